"""A prompt into the cache: many tokens at once on tensor cores, in chunks.

A chunk is one list of launches, recorded once and replayed: where it is in the prompt lies on the device (`Chunk`), and
its first kernel moves on. The last chunk is filled as far as the prompt goes; tiles beyond do nothing. Only the last
token of a prompt gets logits. Activations are halves between kernels, the residual stream and all sums float32.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from typing import Any, Final, Self

import numpy as np
from tinygrad.device import BufferSpec
from tinygrad.runtime.support.hcq import HCQBuffer

from tegrad.llm.cache import KvCache, LayerCache
from tegrad.llm.errors import ContextError, UnsupportedModelError
from tegrad.llm.flash import Flash
from tegrad.llm.gemm import Gemm, Operands, TilePicker, pick_tile, scratch_bound
from tegrad.llm.packed import PackedLayer, PackedMatrix, PackedModel
from tegrad.llm.programs import Programs
from tegrad.nv.program import LaunchError
from tegrad.nv.replay import DEFAULT, Boundary, Launch, Recording

CHUNKS: Final = (32, 128, 512)
"""Tokens of a chunk, ascending: the smallest that holds what is left of a prompt, else the largest."""
ROPES: Final = {"none": 0, "interleaved": 1, "halves": 2}
NORMS: Final = {"rms": 1, "layer": 2}
NORM_THREADS: Final = 256
QKV_WARPS: Final = 4
SPEC: Final = BufferSpec(nolru=True)

_CHUNK = struct.Struct("<8i")
COUNT_AT: Final = 4
"""Where `count` lies in a Chunk."""


def chunk_bytes(start: int = 0, count: int = 0, slot: int = 0, at: int = 0, left: int = 0) -> bytes:
    """`struct Chunk` of kernels/chunk.cuh."""
    return _CHUNK.pack(start, count, slot, at, left, 0, 0, 0)


def split(tokens: int, sizes: Sequence[int] = CHUNKS) -> Iterator[int]:
    """The sizes of the chunks of a prompt, the last perhaps larger than what is left."""
    while tokens > 0:
        size = next((size for size in sizes if size >= tokens), sizes[-1])
        yield size
        tokens -= size


class Prefill:
    """Runs prompts of one model into a cache. Close it when nothing of it is in flight; the model and the cache stay.

    `logits` (vocab,) float32 on the device are those of the last token that was run. UnsupportedModelError, RoomError.
    """

    def __init__(
        self,
        model: PackedModel,
        cache: KvCache,
        *,
        sizes: Sequence[int] = CHUNKS,
        pick: TilePicker = pick_tile,
        boundary: Boundary = DEFAULT,
    ) -> None:
        self.model, self.cache, self.device = model, cache, model.device
        self._config, self._sizes, self._pick, self._boundary = model.config, tuple(sorted(sizes)), pick, boundary
        self._programs = Programs(model.device)
        self._undo = ExitStack()
        self._recordings: dict[int, Recording] = {}
        config, most = self._config, self._sizes[-1]
        try:
            self._qkv_rows = (config.heads + 2 * config.kv_heads) * config.head_dim
            self.chunk = self._put(np.frombuffer(chunk_bytes() + struct.pack("<4i", 1, 0, 0, 0), np.uint8))
            self._tokens = self._alloc(4 * cache.positions)
            self._x = self._alloc(4 * most * config.dim)
            self._normed = self._alloc(2 * most * config.dim)
            self._qkv = self._alloc(4 * most * self._qkv_rows)
            self._queries = self._alloc(2 * most * config.heads * config.head_dim)
            self._mixed = self._alloc(2 * most * config.heads * config.head_dim)
            self._hidden = self._alloc(2 * most * config.ffn)
            self.logits = self._alloc(4 * config.vocab)
            self._rope_positions = cache.positions
            self._rope = self._put(self._config.rope.tables(cache.positions, model.divisors))
            scratch, counters = scratch_bound(self.device)
            self._scratch, self._arrived = self._alloc(scratch), self._put(np.zeros(counters, np.uint8))
        except BaseException:
            self.close()
            raise

    def run(self, tokens: Sequence[int], position: int = 0, slot: int = 0) -> None:
        """Put tokens into the cache from `position` on; `logits` are then those of the last. Returns before they are.

        ContextError where the cache does not hold them.
        """
        if (
            not tokens
            or position < 0
            or position + len(tokens) > self.cache.positions
            or not 0 <= slot < self.cache.slots
        ):
            raise ContextError(
                f"{len(tokens)} tokens at position {position} do not fit a context of {self.cache.positions}"
            )
        copy = self.device.allocator._copyin
        copy(self._tokens, memoryview(np.asarray(tokens, np.int32).tobytes()))
        copy(self.chunk, memoryview(chunk_bytes(start=position, slot=slot, left=len(tokens))))
        for size in split(len(tokens), self._sizes):
            self._recording(size).run()
        self._recording(0).run()

    def close(self) -> None:
        """Free everything but the model and the cache. Closing twice is harmless."""
        for recording in self._recordings.values():
            recording.close()
        self._recordings.clear()
        self._undo.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # ---- launches

    def _recording(self, size: int) -> Recording:
        """The recording of a chunk, or of the logits for 0."""
        if size not in self._recordings:
            launches = self.launches(size) if size else self.head()
            self._recordings[size] = Recording(self.device, launches, self._boundary)
        return self._recordings[size]

    def launches(self, size: int) -> list[Launch]:
        """One chunk of up to `size` tokens."""
        model = self.model
        launches = [Launch(self._load("chunk", 1, TOKENS=size), (self.chunk,)), self._embed(size)]
        for layer, cache in zip(model.layers, self.cache.layers, strict=True):
            launches += self._attention(layer, cache, size)
            launches += self._ffn(layer, size)
        return launches

    def head(self) -> list[Launch]:
        """The logits of the last token of the chunk before."""
        arch = self._config.arch
        norm = self._norm(self.model.vectors, arch.output_norm.name, 1, last=True)
        product = self._product(
            self.model.output, self._normed, self.logits, 1, count=self.chunk.offset(_CHUNK.size, 4)
        )
        return [norm, product]

    def _embed(self, size: int) -> Launch:
        matrix, positions = self.model.embedding, self.model.positions
        more = (
            {"POSITIONS": 0}
            if positions is None
            else {"POSITIONS": positions.rows, "POSITIONS_FORMAT": positions.kind.name}
        )
        program = self._load("embed_rows", 5, FORMAT=matrix.kind.name, ROWS=matrix.rows, COLUMNS=matrix.columns, **more)
        second = (positions or matrix).buffer
        grid = (-(-matrix.columns // 256), size, 1)
        return Launch(program, (self._x, matrix.buffer, second, self._tokens, self.chunk), grid, (256, 1, 1))

    def _norm(self, vectors: Any, name: str, tokens: int, *, last: bool = False) -> Launch:
        config = self._config
        program = self._load(
            "norm_rows", 5, COLUMNS=config.dim, NORM=NORMS[config.arch.norm], EPS=f"{config.eps:.9e}f", LAST=last,
            THREADS=NORM_THREADS,
        )  # fmt: skip
        weight = vectors[name]
        buffers = (self._normed, self._x, weight, vectors.get(f"{name}.bias", weight), self.chunk)
        return Launch(program, buffers, (tokens, 1, 1), (NORM_THREADS, 1, 1))

    def _attention(self, layer: PackedLayer, cache: LayerCache, size: int) -> list[Launch]:
        config, arch = self._config, self._config.arch
        launches, at = [self._norm(layer.vectors, arch.attn_norm.name, size)], 0
        for matrix in layer.qkv:
            y = self._qkv.offset(4 * at, self._qkv.size - 4 * at)
            launches.append(self._product(matrix, self._normed, y, size, stride=self._qkv_rows))
            at += matrix.rows
        flash = Flash(config.heads, config.kv_heads, config.head_dim, self.cache.positions, self.cache.q8)
        attend = flash.launch(
            self._programs, out=self._mixed, q=self._queries, keys=cache.keys, values=cache.values, chunk=self.chunk,
            tokens=size, key_scales=cache.key_scales, value_scales=cache.value_scales,
        )  # fmt: skip
        output = self._product(layer.matrices[arch.attn_output.name], self._mixed, self._x, size, add=True)
        return [*launches, self._store(layer, cache, size), attend, output]

    def _store(self, layer: PackedLayer, cache: LayerCache, size: int) -> Launch:
        config, arch = self._config, self._config.arch
        normed = arch.query_norm is not None and arch.key_norm is not None
        program = self._load(
            "store_qkv", 10, values=1, HEADS=config.heads, KV_HEADS=config.kv_heads, HEAD_DIM=config.head_dim,
            POSITIONS=self.cache.positions, CACHE_Q8=self.cache.q8, ROPE=ROPES[arch.rope],
            ROPE_PAIRS=config.rope.dim // 2, QK_NORM=normed, EPS=f"{config.eps:.9e}f", WARPS=QKV_WARPS,
        )  # fmt: skip
        q_norm = layer.vectors[arch.query_norm.name] if arch.query_norm else self._x
        k_norm = layer.vectors[arch.key_norm.name] if arch.key_norm else self._x
        buffers = (
            self._queries, cache.keys, cache.values, cache.key_scales, cache.value_scales, self._qkv, q_norm, k_norm,
            self._rope, self.chunk,
        )  # fmt: skip
        grid = (size, -(-(config.heads + 2 * config.kv_heads) // QKV_WARPS), 1)
        return Launch(program, buffers, grid, (32 * QKV_WARPS, 1, 1), (self._rope_positions,))

    def _ffn(self, layer: PackedLayer, size: int) -> list[Launch]:
        arch = self._config.arch
        norm = self._norm(layer.vectors, arch.ffn_norm.name, size)
        up, down = layer.matrices[arch.up.name], layer.matrices[arch.down.name]
        gate = layer.matrices[arch.gate.name] if arch.gate else None
        if gate is not None and gate.kind is not up.kind:
            raise UnsupportedModelError("gate and up matrices differ in format: convert the model with one for both")
        hidden = self._product(gate or up, self._normed, self._hidden, size, second=up if gate else None,
                               activation=arch.activation, half_out=True)  # fmt: skip
        return [norm, hidden, self._product(down, self._hidden, self._x, size, add=True)]

    def _product(
        self, matrix: PackedMatrix, x: HCQBuffer, y: HCQBuffer, tokens: int, *, second: PackedMatrix | None = None,
        count: HCQBuffer | None = None, **form: Any,
    ) -> Launch:  # fmt: skip
        """y of x and a matrix, or of gate and up."""
        bias = matrix.bias
        gemm = Gemm(matrix.kind, matrix.rows, matrix.columns, gated=second is not None, bias=bias is not None, **form)
        tile = self._pick(self.device, gemm, tokens)
        if (
            tile.scratch_bytes(gemm, tokens) > self._scratch.size
            or 4 * tile.counters(gemm, tokens) > self._arrived.size
        ):
            raise LaunchError(f"{tile} splits more blocks than partial sums are kept for: split fewer")
        operands = Operands(
            y, x, matrix.buffer, count or self.chunk.offset(COUNT_AT, 4), second.buffer if second else None, bias,
            self._scratch, self._arrived,
        )  # fmt: skip
        return tile.launch(self._programs, gemm, operands, tokens)

    # ---- memory

    def _load(self, name: str, buffers: int, values: int = 0, **defines: object) -> Any:
        return self._programs(name, buffers=buffers, values=values, **defines)

    def _alloc(self, size: int) -> HCQBuffer:
        buffer: HCQBuffer = self.device.allocator.alloc(size, SPEC)
        self._undo.callback(self.device.allocator.free, buffer, size, SPEC)
        return buffer

    def _put(self, array: np.ndarray[Any, Any]) -> HCQBuffer:
        data = array.tobytes() or bytes(16)
        buffer = self._alloc(len(data))
        self.device.allocator._copyin(buffer, memoryview(data))
        return buffer
