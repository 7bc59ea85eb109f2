"""A file's matrices on the device as our kernels read them, and its vectors as float32.

Everything is allocated first, then streamed in the order of the file; each matrix is repacked in place on the device as
soon as it is there (`packing` tells the order). Nothing but the weights themselves, and blocks of the stream where the
CPU does not reach device memory, takes memory on the way.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from math import prod, sqrt
from typing import Final, Self

import numpy as np

from tegrad.llm import packing
from tegrad.llm.closing import Closing
from tegrad.llm.config import Config, tensor_name
from tegrad.llm.errors import OutOfMemory
from tegrad.llm.formats import F16, F32, PLAIN, BlockType
from tegrad.llm.gguf import Gguf, Progress, TensorInfo
from tegrad.llm.matvec import Part
from tegrad.llm.network import Add, Attend, Convolving, Logits, Op, Project, Spec
from tegrad.llm.programs import Programs
from tegrad.llm.state import STATE_SPEC
from tegrad.llm.stream import PIECE_BYTES, Piece, Stream
from tegrad.llm.workspace import ALIGN, Workspace
from tegrad.nv import roles
from tegrad.nv.gpu import Buffer, Gpu, opened
from tegrad.nv.replay import Launch
from tegrad.nv.spec import MemorySpec

SPEC: Final = MemorySpec(nolru=True, role=roles.WEIGHTS)
"""Weights go back to the device when they are freed, not to a cache of buffers."""
VECTORS_BYTES: Final = 1 << 20
"""Bytes of a buffer of vectors."""
WARPS: Final = 8
"""Segments that a block of the repacking kernel takes."""


@dataclass(frozen=True, slots=True)
class PackedMatrix:
    """A matrix in our order: whole segments in `buffer`, and what is added to its products, if anything."""

    kind: BlockType
    rows: int
    columns: int
    buffer: Buffer
    bias: Buffer | None = None
    """float32 (rows,)."""

    @property
    def nbytes(self) -> int:
        """Bytes of `buffer`."""
        return packing.packed_bytes(self.kind, self.rows, self.columns)


def parts(matrices: Iterable[PackedMatrix]) -> tuple[Part, ...]:
    """Matrices as a product takes them."""
    return tuple(Part(matrix.kind, matrix.rows) for matrix in matrices)


def arranging(programs: Programs, kind: BlockType, buffer: Buffer, segments: int, large: Buffer) -> list[Launch]:
    """What is launched once so many segments of a file lie at the start of a buffer.

    Their order becomes ours, in place (kernels/repack.cu). Then weights from 255 on, which products of halves may not
    hold, are looked for (kernels/large.cu): `large`, an int on the device, is 1 where there is one.
    """
    grid, block, made = (-(-segments // WARPS), 1, 1), (32 * WARPS, 1, 1), list[Launch]()
    if kind.layout is not None:
        program = programs("repack", buffers=1, values=1, FORMAT=kind.name, WARPS=WARPS)
        made.append(Launch(program, (buffer,), grid, block, (segments,)))
    if kind not in (F32, F16):  # never multiplied as halves, and halves as they are
        program = programs("large", buffers=2, values=1, KIND=kind.number, WARPS=WARPS)
        made.append(Launch(program, (buffer, large), grid, block, (segments,)))
    return made


@dataclass(slots=True)
class _Job:
    """Tensors that lie one after the other in a buffer, and what to repack when the last byte is there."""

    pieces: list[Piece]
    missing: int
    kind: BlockType | None
    buffer: Buffer
    segments: int = 0


class PackedLoader:
    """Hands out buffers for a file's tensors, and fills all of them in one `run`. `close` frees them.

    `large` after the run: whether a matrix has weights that products of halves do not take.
    """

    large = False

    def __init__(self, file: Gguf, device: Gpu, progress: Progress | None = None) -> None:
        self.file, self.device = file, device
        self._progress = progress
        self._jobs: list[_Job] = []
        self._workspace = Workspace(device, SPEC)
        self._vectors: Buffer | None = None
        self._used = 0

    def matrix(
        self, infos: Sequence[TensorInfo], biases: Sequence[TensorInfo | None], rows: Sequence[int], columns: int
    ) -> PackedMatrix:
        """Matrices of one type below one another, with their biases (None: zeros), if they have any.

        Each is filled up with zeros to so many `rows` of `columns`.
        """
        kind, total = infos[0].type, sum(rows)
        packing.check(kind, columns)
        size = packing.packed_bytes(kind, total, columns)
        buffer, pitch, pieces, at = self._workspace.take(size), kind.row_bytes(columns), list[Piece](), 0
        for info, count in zip(infos, rows, strict=True):
            pieces += _pieces(info, buffer, at, pitch)
            self._zero(buffer, at + info.rows * pitch, (count - info.rows) * pitch)
            at += count * pitch
        self._zero(buffer, at, size - at)
        self._plan(pieces, buffer, kind, packing.segments(total, columns))
        bias = None
        if any(biases):
            parts = zip(infos, biases, rows, strict=True)
            bias = self.vector([part for info, own, count in parts for part in (own or info.rows, count - info.rows)])
        return PackedMatrix(kind, total, columns, buffer, bias)

    def vector(self, parts: Sequence[TensorInfo | int]) -> Buffer:
        """F32 vectors of the file one after the other, or so many zeros."""
        size = sum(4 * part if isinstance(part, int) else part.nbytes for part in parts)
        buffer, at = self._take(size), 0
        for part in parts:
            if isinstance(part, int):
                self._zero(buffer, at, 4 * part)
                at += 4 * part
            else:
                own = buffer.offset(at, part.nbytes)
                self._plan(_pieces(part, own, 0, part.nbytes // part.rows), own)
                at += part.nbytes
        return buffer

    def scaled(self, info: TensorInfo, scale: float, zeros: int = 0, behind: Sequence[TensorInfo] = ()) -> Buffer:
        """An F32 vector of the file, multiplied, so many zeros, and others of the file as they are."""
        with np.errstate(over="ignore", invalid="ignore"):  # what is no number stays none, and its logits say so
            values = np.frombuffer(self.file.read(info.offset, info.nbytes), np.float32) * np.float32(scale)
        rest = (self.file.read(part.offset, part.nbytes) for part in behind)
        content = b"".join((values.tobytes(), bytes(4 * zeros), *rest))
        buffer = self._take(len(content))
        self.device.upload(buffer, content)
        return buffer

    def run(self) -> None:
        """Read everything to its place and repack it; returns when the device is done."""
        programs, large = Programs(self.device), self._workspace.take(4, STATE_SPEC)
        self.device.upload(large, bytes(4))
        jobs = sorted(self._jobs, key=lambda job: job.pieces[0].offset)
        owner = {id(piece): job for job in jobs for piece in job.pieces}
        done, total = 0, sum(job.missing for job in jobs)

        def arrived(piece: Piece) -> None:
            nonlocal done
            job = owner[id(piece)]
            job.missing -= piece.size
            if job.missing == 0 and job.kind is not None:
                for one in arranging(programs, job.kind, job.buffer, job.segments, large):
                    one.program(*one.buffers, global_size=one.grid, local_size=one.block, vals=one.values)
            done += piece.size
            if self._progress is not None:
                self._progress(done, total)

        with Stream(self.file, self.device) as stream:
            stream.run((piece for job in jobs for piece in job.pieces), arrived)
        self.device.synchronize()
        self.large = any(self.device.download(large, 4))
        self._jobs.clear()

    def close(self) -> None:
        """Free every buffer. Closing twice is harmless."""
        self._workspace.close()

    def _take(self, size: int) -> Buffer:
        """Room for a vector in a buffer that many share."""
        if self._vectors is None or self._used + size > self._vectors.size:
            self._vectors, self._used = self._workspace.take(max(size, VECTORS_BYTES)), 0
        taken = self._vectors.offset(self._used, size)
        self._used += -(-size // ALIGN) * ALIGN
        return taken

    def _zero(self, buffer: Buffer, at: int, size: int) -> None:
        if size:
            self.device.upload(buffer.offset(at, size), bytes(size))

    def _plan(self, pieces: Iterable[Piece], buffer: Buffer, kind: BlockType | None = None, segments: int = 0) -> None:
        """Note to read what belongs together in a buffer."""
        whole = list(pieces)
        self._jobs.append(_Job(whole, sum(piece.size for piece in whole), kind, buffer, segments))


def _pieces(info: TensorInfo, buffer: Buffer, at: int, pitch: int) -> Iterator[Piece]:
    """A tensor's, to byte `at` of a buffer, where a row takes `pitch` bytes."""
    row = info.nbytes // info.rows
    form, most = ((1, 1), PIECE_BYTES) if row == pitch else ((row, pitch), PIECE_BYTES // pitch * row)
    for start in range(0, info.nbytes, most):
        yield Piece(info.offset + start, min(most, info.nbytes - start), buffer, at + start * pitch // row, *form)


@dataclass(frozen=True, slots=True)
class PackedLayer:
    """One transformer block's weights, by their names in the file ("attn_norm", "ffn_down", "attn_norm.bias")."""

    matrices: Mapping[str, PackedMatrix]
    """All but those of `Project`."""
    vectors: Mapping[str, Buffer]
    """float32."""
    qkv: tuple[PackedMatrix, ...]
    """What `Project` makes, queries', keys' and values' rows in this order; neighbours that are packed alike are one
    matrix."""

    def head_norms(self, op: Attend, none: Buffer) -> list[Buffer]:
        """Weights of the norms of queries and keys; `none` where there is no norm."""
        return [none if spec is None else self.vectors[spec.name] for spec in (op.query_norm, op.key_norm)]


class PackedModel(Closing):
    """A GGUF model's weights on a device, packed for our kernels. Use as a context manager, or `close` it."""

    large = False
    """Whether a matrix may have weights from 255 on, which products of halves do not take."""

    def __init__(self, file: Gguf, device: str | None = None, progress: Progress | None = None) -> None:
        self.device = opened(device)
        self._own = Config.read(file)
        self.config = self._own.filled()
        self.metadata = file.metadata
        self.divisors = self.config.rope_divisors(file)
        self._load = PackedLoader(file, self.device, progress)
        try:
            self._allocate(file)
            self._load.run()
            self.large = self._load.large
        except BaseException as error:
            self.close()
            if isinstance(error, MemoryError):
                raise OutOfMemory(
                    f"{file.path} needs {file.size / 2**20:,.0f} MiB, more than {self.device.device} has free: "
                    "choose a smaller model"
                ) from error
            raise

    @classmethod
    def load(cls, path: str | os.PathLike[str], device: str | None = None, progress: Progress | None = None) -> Self:
        """Read a file to a device; raises GgufError, UnsupportedModelError or OutOfMemory."""
        with Gguf.open(path) as file:
            return cls(file, device, progress)

    def matrices_of(self, layer: int, op: Op | Logits) -> tuple[PackedMatrix, ...]:
        """Those of an operation of a layer."""
        match op:
            case Logits():
                return (self.output,)
            case Project():
                return self.layers[layer].qkv
            case Attend() | Convolving():
                return ()
        return tuple(self.layers[layer].matrices[spec.name] for spec in op.matrices)

    def vectors_of(self, layer: int, op: Op | Logits) -> Mapping[str, Buffer]:
        """Where those of an operation of a layer are."""
        return self.vectors if isinstance(op, Logits) else self.layers[layer].vectors

    @property
    def quicker_in_launches(self) -> bool:
        """Whether overlapped launches are quicker than one launch (docs/notebook.md): with weights in blocks where the
        stream's rows are no multiple of 256, of which the one takes fewer at a time; with floats alone where layers
        differ in size."""
        matrices = [self.output, *(one for layer in self.layers for one in (*layer.qkv, *layer.matrices.values()))]
        packed = any(matrix.kind not in PLAIN for matrix in matrices)
        return self.config.dim % 256 != 0 if packed else self.config.layers_differ

    def close(self) -> None:
        """Free the weights. Closing twice is harmless."""
        self._load.close()

    def _allocate(self, file: Gguf) -> None:
        net = self.config.network
        self.embedding = self._matrix(file, net.embed.table)
        self.positions = None if net.embed.positions is None else self._matrix(file, net.embed.positions)
        beside = net.embed.inputs
        self.inputs = None if beside is None else self._matrix(file, beside.table)
        self.inputs_matrix = None if beside is None else self._matrix(file, beside.matrix)
        self.layers = tuple(self._layer(file, at) for at in range(self.config.layers))
        self.vectors = self._vectors(file, net.logits.norm.spec, scale=net.logits.norm.scale)
        self.vectors |= {} if beside is None else self._vectors(file, beside.norm)
        tied = tensor_name(net.logits.matrix) not in file.tensors
        self.output = self.embedding if tied else self._matrix(file, net.logits.matrix)

    def _layer(self, file: Gguf, at: int) -> PackedLayer:
        net = self.config.network
        vectors: dict[str, Buffer] = {}
        matrices: dict[str, PackedMatrix] = {}
        projected = net.project(at).matrices
        scaled = {op.norm.spec: op.scale for op in net.blocks[at] if isinstance(op, Add) and op.scale and op.norm}
        for spec in net.of_layer(at):
            if spec in scaled.values():
                continue
            if (scale := scaled.get(spec)) is not None:
                vectors |= self._vectors(file, spec, at, last=self._own.check(file, scale, at))
            elif not spec.multiplied:
                vectors |= self._vectors(file, spec, at)
            elif spec not in projected:
                matrices[spec.name] = self._matrix(file, spec, at)
        return PackedLayer(matrices, vectors, self._joined(file, projected, at))

    def _matrix(self, file: Gguf, spec: Spec, layer: int | None = None) -> PackedMatrix:
        return self._joined(file, (spec,), layer)[0]

    def _joined(self, file: Gguf, specs: Sequence[Spec], layer: int | None) -> tuple[PackedMatrix, ...]:
        """Matrices over the same input."""
        infos, biases = list[TensorInfo](), list[TensorInfo | None]()
        own, filled = self._own.at(layer), self.config.at(layer)
        names = [name for spec in specs for name in spec.parts]
        for spec in specs:
            sizes, bias = [own.size(name) for name in spec.parts], self._bias(file, spec, layer)
            infos += self._own.check(file, spec, layer).cut(sizes)
            biases += [None] * len(sizes) if bias is None else bias.cut(sizes)
        matrices, columns = [], filled.size(specs[0].shape[1])
        for _, members in groupby(range(len(infos)), key=lambda at: infos[at].type):
            chosen = list(members)
            rows = [filled.size(names[at]) for at in chosen]
            matrices.append(
                self._load.matrix([infos[at] for at in chosen], [biases[at] for at in chosen], rows, columns)
            )
        return tuple(matrices)

    def _vectors(
        self, file: Gguf, spec: Spec, layer: int | None = None, scale: float = 1.0, last: TensorInfo | None = None
    ) -> dict[str, Buffer]:
        """A norm's weights, with a `last` vector behind them, and its bias if it has one; or a kernel."""
        info, size = self._own.check(file, spec, layer), spec.shape[0]
        zeros = prod(map(self.config.at(layer).size, spec.shape)) - prod(info.shape)
        if len(spec.shape) == 1:
            scale *= sqrt(self.config.share(size))
        found = {spec.name: info}
        if (bias := self._bias(file, spec, layer)) is not None:
            found[f"{spec.name}.bias"] = bias
        load, behind = self._load, [] if last is None else [last]
        return {
            name: load.vector([part, zeros, *behind]) if scale == 1 else load.scaled(part, scale, zeros, behind)
            for name, part in found.items()
        }

    def _bias(self, file: Gguf, spec: Spec, layer: int | None) -> TensorInfo | None:
        if spec.bias == "none":
            return None
        return self._own.vector(file, tensor_name(spec, layer, "bias"), self._own.size(spec.shape[0]))
