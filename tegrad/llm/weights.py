"""A file's matrices on the device: packed as they are in the file, read in large reads straight into device memory.

Matrices that multiply the same vector and are packed alike share one buffer, so that one kernel computes them all.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any

import numpy as np
from tinygrad import Tensor, dtypes
from tinygrad.device import Buffer

from tegrad.llm import network
from tegrad.llm.config import Config, tensor_name
from tegrad.llm.dequant import dequantize, storage
from tegrad.llm.formats import F32, BlockType
from tegrad.llm.gguf import Gguf, Progress, TensorInfo
from tegrad.llm.network import Spec
from tegrad.llm.parts import READ_SIZE


@dataclass(frozen=True, slots=True)
class Matrix:
    """Packed rows on the device, and the bias that is added to their products, if any."""

    kind: BlockType
    data: Tensor
    """(rows, row elements of `dequant.storage`)."""
    bias: Tensor | None = None

    def apply(self, x: Tensor, norm: Norm | LayerNorm | None = None) -> Tensor:
        """Products (tokens, rows) of x (tokens, columns), lazily; of the normalized x where `norm` is given.

        One reduction: the factor that normalizes a token is a second sum over the same elements, in the same kernel.
        A LayerNorm, which needs two sums one after the other, is a kernel of its own.
        """
        if isinstance(norm, LayerNorm):
            x, norm = norm.apply(x).contiguous(), None
        weights = dequantize(self.kind, self.data)
        if x.shape[0] != 1 and self.kind is not F32:
            # Several tokens share the expanded weights, which live for this product only.
            weights = weights.reshape(weights.shape[0], -1).contiguous()
        weights = weights.unsqueeze(0)
        axes = tuple(range(2, len(weights.shape)))

        def spread(vector: Tensor) -> Tensor:
            return vector.reshape(vector.shape[0], 1, *weights.shape[2:])

        if norm is None:
            y = (spread(x) * weights).sum(axis=axes)
        else:
            y = (spread(x * norm.weight) * weights).sum(axis=axes)
            squares = spread(x.square()).expand(x.shape[0], *weights.shape[1:]).sum(axis=axes)
            y = y * (squares / x.shape[1] + norm.eps).rsqrt()
        return y if self.bias is None else y + self.bias

    def rows(self, index: Tensor) -> Tensor:
        """Rows (tokens, columns) in float32, chosen by index (tokens,)."""
        weights = dequantize(self.kind, self.data)
        return weights.reshape(weights.shape[0], -1)[index]


@dataclass(frozen=True, slots=True)
class Norm:
    """Root mean square normalization of a token, then a weight for each element."""

    weight: Tensor
    eps: float

    def apply(self, x: Tensor) -> Tensor:
        """x, normalized along its last axis, lazily."""
        return x * (x.square().mean(axis=-1, keepdim=True) + self.eps).rsqrt() * self.weight


@dataclass(frozen=True, slots=True)
class LayerNorm:
    """Normalization of a token by its mean and variance, then a weight and a bias for each element."""

    weight: Tensor
    bias: Tensor
    eps: float

    def apply(self, x: Tensor) -> Tensor:
        """x, normalized along its last axis, lazily."""
        centered = x - x.mean(axis=-1, keepdim=True)
        return centered * (centered.square().mean(axis=-1, keepdim=True) + self.eps).rsqrt() * self.weight + self.bias


@dataclass(frozen=True, slots=True)
class Joined:
    """Matrices over the same input; neighbours of the same packing are one matrix, so that one kernel computes them."""

    matrices: tuple[Matrix, ...]
    rows: tuple[tuple[int, ...], ...]
    """Of each matrix, the rows of its parts."""

    def apply(self, x: Tensor, norm: Norm | LayerNorm | None) -> list[Tensor]:
        """One (tokens, rows) result for each part, computed when asked for."""
        results = []
        for matrix, rows in zip(self.matrices, self.rows, strict=True):
            y = matrix.apply(x, norm).contiguous()
            results += list(y.split(list(rows), dim=1)) if len(rows) > 1 else [y]
        return results


class Loader:
    """Reads one file's tensors to one device, reporting progress."""

    def __init__(self, file: Gguf, config: Config, device: str, progress: Progress | None = None) -> None:
        self.file, self.config, self.device = file, config, device
        self._progress = progress
        self._done = 0
        self._total = sum(info.nbytes for info in file.tensors.values())

    def norm(self, norm: network.Norm, layer: int | None = None) -> Norm | LayerNorm:
        """A norm of the residual stream."""
        spec, weight = norm.spec, self.head_norm(norm.spec, layer).weight
        if norm.scale != 1:
            weight = (weight * norm.scale).realize()
        if norm.kind == "rms":
            return Norm(weight, self.config.eps)
        bias = self._join([self._bias(spec, layer, weight.shape[0])])
        bias = weight.zeros_like() if bias is None else bias * norm.scale
        return LayerNorm(weight, bias.contiguous().realize(), self.config.eps)

    def head_norm(self, spec: Spec, layer: int | None = None) -> Norm:
        """A root mean square norm."""
        info = self.config.check(self.file, spec, layer)
        return Norm(self._read([info], dtypes.float32).reshape(-1), self.config.eps)

    def plain(self, spec: Spec, layer: int) -> Tensor:
        """float32s that no product reads as a matrix (rows, columns)."""
        return self._read([self.config.check(self.file, spec, layer)], dtypes.float32)

    def matrix(self, spec: Spec, layer: int | None = None) -> Matrix:
        """One matrix."""
        return self.joined((spec,), layer).matrices[0]

    def joined(self, specs: Sequence[Spec], layer: int | None = None) -> Joined:
        """Matrices over the same input."""
        infos = [self.config.check(self.file, spec, layer) for spec in specs]
        biases = [self._bias(spec, layer, info.rows) for spec, info in zip(specs, infos, strict=True)]
        matrices, rows = [], []
        for kind, members in groupby(range(len(infos)), key=lambda at: infos[at].type):
            chosen = list(members)
            data = self._read([infos[at] for at in chosen], storage(kind))
            own = [biases[at] for at in chosen]
            some = any(isinstance(bias, np.ndarray) for bias in own)
            matrices.append(Matrix(kind, data, self._join(own) if some else None))
            sizes = self.config.at(layer)
            rows.append(tuple(sizes.size(part) for at in chosen for part in specs[at].parts))
        return Joined(tuple(matrices), tuple(rows))

    def _bias(self, spec: Spec, layer: int | None, size: int) -> np.ndarray[Any, Any] | int:
        """The bias vector, or its size where the file has none."""
        info = self.config.vector(self.file, tensor_name(spec, layer, "bias"), size) if spec.bias != "none" else None
        if info is None:
            return size
        self._advance(info.nbytes)
        return np.frombuffer(self.file.read(info.offset, info.nbytes), np.float32)

    def _join(self, biases: list[np.ndarray[Any, Any] | int]) -> Tensor:
        """Biases below one another, zeros where one is missing."""
        parts = [np.zeros(bias, np.float32) if isinstance(bias, int) else bias for bias in biases]
        return Tensor(np.concatenate(parts), device=self.device).realize()

    def _read(self, infos: list[TensorInfo], dtype: Any) -> Tensor:
        """The rows of tensors of one type, below one another, in one new buffer."""
        rows, nbytes = sum(info.rows for info in infos), sum(info.nbytes for info in infos)
        tensor = Tensor.empty(rows, nbytes // rows // dtype.itemsize, dtype=dtype, device=self.device).realize()
        buffer: Buffer = tensor.uop.buffer.ensure_allocated()
        at = 0
        for info in infos:
            self._fill(buffer, at, info)
            at += info.nbytes
        return tensor

    def _fill(self, buffer: Buffer, at: int, info: TensorInfo) -> None:
        """Read a tensor into a buffer: in place where the CPU can write there, else through one staging block."""
        mapped = hasattr(buffer.allocator, "_as_buffer")
        target = buffer.as_memoryview(force_zero_copy=True).cast("B") if mapped else None
        staging = None if mapped else memoryview(bytearray(min(info.nbytes, READ_SIZE)))
        for start in range(0, info.nbytes, READ_SIZE):
            size = min(READ_SIZE, info.nbytes - start)
            if target is not None:
                self.file.read_into(info.offset + start, target[at + start : at + start + size])
            else:
                assert staging is not None
                self.file.read_into(info.offset + start, staging[:size])
                source = Buffer("PYTHON", size, dtypes.uint8, opaque=staging[:size])
                buffer.view(size, dtypes.uint8, at + start).ensure_allocated().copy_from(source)
            self._advance(size)

    def _advance(self, size: int) -> None:
        self._done += size
        if self._progress is not None:
            self._progress(self._done, self._total)
