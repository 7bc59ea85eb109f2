"""A prompt into the cache: many tokens at once on tensor cores, in chunks.

A chunk is one list of launches, recorded once and replayed: what it is of lies on the device (`Chunk`), where a kernel
in front of it puts that. The last chunk is filled as far as the prompt goes; tiles beyond do nothing. Only the last
token of a prompt gets logits, unless all are asked for. Chunks of several prompts may follow each other in any order.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Iterator, Sequence
from functools import partial
from typing import Final

import numpy as np
from numpy.typing import NDArray

from tegrad.llm import convolution, delta, embedding
from tegrad.llm.cache import KvCache
from tegrad.llm.chips import kernels_of
from tegrad.llm.closing import Closing
from tegrad.llm.errors import ContextError, ModelError
from tegrad.llm.flash import Flash
from tegrad.llm.gemm import TilePicker, pick_quickest
from tegrad.llm.macros import QK_NORMS, ROPES, number
from tegrad.llm.network import Attend, Convolve, Delta, Mixer
from tegrad.llm.packed import PackedModel
from tegrad.llm.programs import compiled_together
from tegrad.llm.rows import Rows, floats
from tegrad.llm.state import LOGITS_SPEC, STATE_SPEC
from tegrad.llm.workspace import Workspace
from tegrad.nv.gpu import Buffer
from tegrad.nv.replay import DEFAULT, Dependency, Launch, Number, Recording

CHUNKS: Final = (32, 128, 512)
"""Tokens of a chunk that every chip has, ascending; `chunk_sizes` has a chip's own, too."""
MOST_PADDED: Final = CHUNKS[-1]
"""Tokens of the largest chunk that may have fewer. What is left of a prompt goes in the smallest that holds it."""
MOST_LOGITS_BYTES: Final = 64 << 20
"""Bytes of a chunk's logits, where all are asked for; a chunk of the smallest size may take more."""
QKV_WARPS: Final = 4

_CHUNK = struct.Struct("<8i")
LOST_INDEX: Final = 4
"""Which of its numbers `lost` is."""


CHUNKS_AHEAD: Final = 8
"""Chunks whose tokens may lie on the device at once."""


def chunk_bytes(start: int = 0, count: int = 0, slot: int = 0, at: int = 0) -> bytes:
    """`struct Chunk` of kernels/chunk.cuh."""
    return _CHUNK.pack(start, count, slot, at, 0, 0, 0, 0)


def chunk_sizes(arch: str, positions: int, *, whole: bool = False) -> tuple[int, ...]:
    """Tokens of a chunk on a chip: those that may have fewer, and of the others those that so many positions fill.

    Where a text is to be one `whole` chunk, any may have fewer.
    """
    most = max(positions, MOST_PADDED)
    if whole:
        return *CHUNKS, *(MOST_PADDED << at for at in range(1, 1 + (-(-most // MOST_PADDED) - 1).bit_length()))
    return tuple(sorted({*CHUNKS, *(size for size in kernels_of(arch).chunks if size <= most)}))


def split(tokens: int, sizes: Sequence[int] = CHUNKS, *, whole: bool = False) -> Iterator[int]:
    """The sizes of the chunks of a prompt, the last perhaps larger than what is left."""
    while tokens > 0:
        size = next((size for size in sizes if size >= tokens), sizes[-1])
        if size > (most := max(tokens, MOST_PADDED)) and not whole:
            size = max(size for size in sizes if size <= most)
        yield size
        tokens -= size


class Prefill(Closing):
    """Runs prompts of one model into a cache. Close it when nothing of it is in flight; the model and the cache stay.

    `logits` (vocab,) float32 on the device are those of the last token of a prompt. With `overlap` launches
    begin early, as in `Rows`.
    UnsupportedModelError, MemoryError.
    """

    def __init__(
        self,
        model: PackedModel,
        cache: KvCache,
        *,
        sizes: Sequence[int] = CHUNKS,
        pick: TilePicker = pick_quickest,
        dependency: Dependency = DEFAULT,
        overlap: bool = False,
    ) -> None:
        self.model, self.cache, self.device, self.config = model, cache, model.device, model.config
        self._sizes, self._dependency = tuple(sorted(sizes)), dependency
        self._closed = False
        self._recordings: dict[tuple[int, bool, bool], Recording] = {}
        self.last: tuple[Recording, int] | None = None
        """The run that was submitted last."""
        self._tell: Recording | None = None
        self._at = 0
        """Where the next chunk's tokens go."""
        self._workspace = Workspace(self.device)
        most = self._sizes[-1]
        with self._closed_on_error():
            if most > cache.ahead and cache.rings:
                raise ValueError(f"chunks of {most} tokens go into a cache whose rings take {cache.ahead} at once")
            self.rows = Rows(model, most, cache.positions, pick, overlap=most if overlap else 0)
            self._workspace.callback(self.rows.close)
            self._one = self._workspace.put(chunk_bytes(count=1))
            self._chunk = self._workspace.take(_CHUNK.size, STATE_SPEC)
            self._tokens = self._workspace.take(4 * CHUNKS_AHEAD * most, STATE_SPEC)
            self._queries = self._workspace.take(2 * most * self.config.queries)
            self.logits = self._workspace.take(4 * self.config.vocab, LOGITS_SPEC)
            self._made = self._workspace.take(max(4, most * max(map(delta.made_bytes, self.config.network.mixers))))
            self._scores: Buffer | None = None

    def launches(self, size: int) -> list[Launch]:
        """One chunk of up to `size` tokens."""
        launches = [self._embed(size), *self.rows.inputs(size, self._chunk, (self._tokens, self._chunk))]
        for at in range(self.config.layers):
            launches += self.rows.layer(at, size, self._chunk, partial(self._mix, size))
        return launches

    def head(self) -> list[Launch]:
        """The logits of the last token of the chunk before."""
        return self.rows.logits(self.logits, 1, self._chunk, last=self._one)

    def prepare(self, tokens: int) -> None:
        """Record the chunks of a prompt of so many tokens. UnsupportedModelError, MemoryError."""
        self._told()
        self._compile(split(tokens, self._sizes))
        for size in split(tokens, self._sizes):
            self._recording(size)

    def run(self, tokens: Sequence[int], position: int = 0, slot: int = 0, *, logits: bool = True) -> None:
        """Put tokens into the cache from `position` on, and their last one's `logits` there. Returns before they are.

        ContextError where the cache does not hold them, ModelError once this is closed, UnsupportedModelError before
        anything runs.
        """
        self._check(tokens, position, slot)
        self._compile([*split(len(tokens), self._sizes), *([0] if logits else [])])
        head = self._recording(0) if logits else None
        for _ in self._chunks(tokens, position, slot, self._sizes):
            pass
        if head is not None:
            self.last = head, head.run()

    def score(self, tokens: Sequence[int], position: int = 0) -> NDArray[np.float32]:
        """Put tokens into the cache as `run` does, and return the logits (len(tokens), vocab) after each of them.

        ContextError, ModelError, MemoryError, UnsupportedModelError before anything runs.
        """
        self._check(tokens, position)
        vocab = self.config.vocab
        fit = [size for size in self._sizes if 4 * size * vocab <= MOST_LOGITS_BYTES] or self._sizes[:1]
        if self._scores is None:
            self._scores = self._workspace.take(4 * fit[-1] * vocab, LOGITS_SPEC)
        self._compile(split(len(tokens), fit), self._scores)
        out = np.empty((len(tokens), vocab), np.float32)
        for at, count in self._chunks(tokens, position, 0, fit, self._scores):
            out[at : at + count] = floats(self.device, self._scores, count * vocab).reshape(count, vocab)
        return out

    def hidden(self, tokens: Sequence[int]) -> NDArray[np.float32]:
        """Put tokens into the cache as `run` does, and return the stream (len(tokens), dim) after the last layer.

        ContextError, ModelError, UnsupportedModelError before anything runs.
        """
        self._check(tokens)
        dim = self.config.dim
        self._compile(self._cut(len(tokens), self._sizes), whole=True)
        out = np.empty((len(tokens), dim), np.float32)
        for at, count in self._chunks(tokens, 0, 0, self._sizes, whole=True):
            out[at : at + count] = floats(self.device, self.rows.x, count * dim).reshape(count, dim)
        return out

    @property
    def lost(self) -> bool:
        """Whether a value of the last prompt did not fit a half: what is in the cache after it is no number.

        Waits for that prompt. What its last layer left out of the cache does not count, but for logits.
        """
        if self.last is None:
            return False
        self.last[0].wait(self.last[1])
        return bool(_CHUNK.unpack(self._chunk.cpu_view()[0 : _CHUNK.size])[LOST_INDEX])

    def close(self) -> None:
        """Free everything but the model and the cache. Closing twice is harmless."""
        self._closed, self.last = True, None
        self._workspace.close()

    def _check(self, tokens: Sequence[int], position: int = 0, slot: int = 0) -> None:
        """ContextError where the cache does not hold tokens, and what keeps this from being used."""
        if self._closed:
            raise ModelError("this prefill was closed: make a new one")
        end = position + len(tokens)
        if not tokens or position < 0 or end > self.cache.positions or not 0 <= slot < self.cache.slots:
            raise ContextError(
                f"{len(tokens)} tokens at position {position} do not fit a context of {self.cache.positions}"
            )
        self.device.check_usable()
        self.cache.rings.wrote(end, slot)

    def _chunks(
        self, tokens: Sequence[int], position: int, slot: int, sizes: Sequence[int], scores: Buffer | None = None, *,
        whole: bool = False,
    ) -> Iterator[tuple[int, int]]:  # fmt: skip
        """Submit tokens in chunks; after each where its tokens begin among them, and how many these are."""
        cut = self._cut(len(tokens), sizes)
        at = 0
        for size, recording in zip(cut, [self._recording(size, scores, whole=whole) for size in cut], strict=True):
            part = tokens[at : at + size]
            # Its depth says that the chunk which had these tokens' place before is over.
            self._told().run(numbers=(position + at, len(part), slot, self._at, int(at == 0)))
            place, self._at = 4 * self._at, (self._at + self._sizes[-1]) % (CHUNKS_AHEAD * self._sizes[-1])
            self._tokens.cpu_view()[place : place + 4 * len(part)] = np.asarray(part, np.int32).tobytes()
            self.last = recording, recording.run()
            yield at, len(part)
            at += size

    def _cut(self, tokens: int, sizes: Sequence[int]) -> list[int]:
        """The sizes of the chunks of so many tokens: one chunk, where tokens attend to later ones. ContextError."""
        whole = not self.config.causal
        if whole and tokens > sizes[-1]:
            raise ContextError(f"{tokens} tokens are more than the {sizes[-1]} that attend to each other at most")
        return list(split(tokens, sizes, whole=whole))

    def _told(self) -> Recording:
        """What tells the device what the next chunk is."""
        if self._tell is None:
            numbers = [[Number(0, value=at)] for at in range(5)]
            program = self.rows.programs("chunk", buffers=1, values=5)
            launch = Launch(program, (self._chunk,), values=(0,) * 5)
            self._tell = self.device.record([launch], depth=CHUNKS_AHEAD - 1, numbers=numbers)
            self._workspace.callback(self._tell.close)
        return self._tell

    def _recording(self, size: int, scores: Buffer | None = None, *, whole: bool = False) -> Recording:
        """The recording of a chunk, with the logits of every token of it into `scores`; or of the last one's for 0.

        Without logits, `rows.x` has all that layers add to it only where it is to be `whole`.
        """
        key = size, scores is not None, whole
        if key not in self._recordings:
            made = self._recordings[key] = self.device.record(self._listed(size, scores, whole), self._dependency)
            self._workspace.callback(made.close)
        return self._recordings[key]

    def _compile(self, sizes: Iterable[int], scores: Buffer | None = None, *, whole: bool = False) -> None:
        """Have the kernels of recordings that are yet to be made compiled side by side."""
        with compiled_together():
            for size in set(sizes):
                if (size, scores is not None, whole) not in self._recordings:
                    self._listed(size, scores, whole)

    def _listed(self, size: int, scores: Buffer | None, whole: bool) -> list[Launch]:
        launches = self.launches(size) if size else self.head()
        if scores is not None:
            launches += self.rows.logits(scores, size, self._chunk)
        if whole:
            launches.append(self.rows.norm(self.config.layers, self.rows.network.logits, size, self._chunk))
        return launches

    def _embed(self, size: int) -> Launch:
        matrix, learned = self.model.embedding, self.model.positions
        defines = {"COLUMNS": matrix.columns, "POSITIONS": 0, **embedding.macros(self.model)}
        program = self.rows.programs("embed_rows", buffers=5, OVERLAP=self.rows.overlaps(size), **defines)
        buffers = (self.rows.x, matrix.buffer, (learned or matrix).buffer, self._tokens, self._chunk)
        threads = embedding.THREADS
        return Launch(program, buffers, (-(-matrix.columns // threads), size, 1), (threads, 1, 1))

    def _mix(self, size: int, at: int, op: Mixer) -> list[Launch]:
        match op:
            case Convolve():
                return self._convolution(size, at, op)
            case Delta():
                return self._delta(size, at, op)
        return self._attention(size, at, op)

    def _delta(self, size: int, at: int, op: Delta) -> list[Launch]:
        rows = self.rows
        return delta.chunk(
            rows.programs, self.config, op, self.model.layers[at], self._chunk, rows.qkv, self.cache.layers[at],
            self._made, rows.mixed, tokens=size, overlap=rows.overlaps(size),
        )  # fmt: skip

    def _convolution(self, size: int, at: int, op: Convolve) -> list[Launch]:
        rows, out = self.rows, self.rows.mixed
        launch = convolution.launch(
            rows.programs, self.config, op, self.model.layers[at], self._chunk, rows.qkv, self.cache.layers[at],
            (out, out, out), rows=size, CHUNK=1, OUTPUT_H=1, OVERLAP=rows.overlaps(size),
        )  # fmt: skip
        return [launch]

    def _attention(self, size: int, at: int, op: Attend) -> list[Launch]:
        programs, cache = self.rows.programs, self.cache.layers[at]
        flash = Flash.of(
            self.config.at(at), op, self.cache.positions, self.device.arch, rows=cache.rows, q8=self.cache.q8,
            blocks=cache.table_blocks,
        ).spread(size, int(self.device.sm_count))  # fmt: skip
        attend = flash.launch(
            programs, out=self.rows.mixed, q=self._queries, keys=cache.keys, values=cache.values, chunk=self._chunk,
            tokens=size, key_scales=cache.key_scales, value_scales=cache.value_scales, table=cache.table,
            overlap=self.rows.overlaps(size),
        )  # fmt: skip
        return [self._store(size, at, op, flash), attend, *([self._gates(size)] if op.gated else [])]

    def _gates(self, size: int) -> Launch:
        config, rows, threads = self.config, self.rows, embedding.THREADS
        program = rows.programs(
            "gate_rows", buffers=3, HEADS=config.heads, KV_HEADS=config.kv_heads, HEAD_DIM=config.head_dim,
            OVERLAP=rows.overlaps(size),
        )  # fmt: skip
        grid = (size, -(-config.size("mixed") // threads), 1)
        return Launch(program, (rows.mixed, rows.qkv, self._chunk), grid, (threads, 1, 1))

    def _store(self, size: int, at: int, op: Attend, flash: Flash) -> Launch:
        config, rows, cache = self.config.at(at), self.rows, self.cache.layers[at]
        form = {"GATED": 1} if op.gated else {}
        form |= {"MADE": op.made} if op.made != 2 else {}
        form |= {"UNIT_VALUES": 1} if op.unit_values else {}
        program = rows.programs(
            "store_qkv", buffers=10 + len(cache.tables), values=1, ROPE=ROPES[op.rotation],
            ROPE_PAIRS=op.rope.dim // 2, QK_NORM=QK_NORMS[op.norms], EPS=number(config.head_eps),
            WARPS=QKV_WARPS, OVERLAP=rows.overlaps(size), **flash.defines, **form,
        )  # fmt: skip
        norms = self.model.layers[at].head_norms(op, rows.x)
        buffers = (self._queries, cache.keys, cache.values, cache.key_scales, cache.value_scales, rows.qkv, *norms,
                   rows.turns(op.rope), self._chunk, *cache.tables)  # fmt: skip
        grid = (size, -(-(config.heads + (2 if op.made else 0) * config.kv_heads) // QKV_WARPS), 1)
        return Launch(program, buffers, grid, (32 * QKV_WARPS, 1, 1), (self.cache.positions,))
