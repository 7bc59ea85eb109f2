"""What the step in one launch adds to rows of products: biases of matrices, and what a norm's bias makes there.

That step multiplies the stream by a norm's weights w, then by matrices W, and norms the products by a factor f. A norm
with a bias b makes W (f x w + b) = f W (x w) + W b, whose last part is the same for every token: it is computed once,
by the product's own kernel. Where all that reads the stream subtracts its mean, nothing that is the same in all
elements counts, so what is added to the stream is added without its mean.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tegrad.llm.chips import Role
from tegrad.llm.errors import UnsupportedModelError
from tegrad.llm.formats import SET
from tegrad.llm.launch_config import launch_config
from tegrad.llm.matvec import LaunchConfig, Product
from tegrad.llm.network import Add, Gate, Logits, Norm, Op, Project
from tegrad.llm.packed import PackedMatrix, PackedModel, parts
from tegrad.llm.workspace import Workspace
from tegrad.nv.gpu import Buffer

Floats = NDArray[np.float32]


class Biases:
    """A loaded model's, put into a workspace as they are asked for."""

    def __init__(self, model: PackedModel, workspace: Workspace) -> None:
        self.model, self._workspace = model, workspace
        self._programs: dict[tuple[Product, LaunchConfig], Any] = {}

    def of(self, at: int, op: Op | Logits) -> int:
        """The address of what is added to the rows of all matrices of a layer's operation, float32, or 0 for nothing.

        Of operations that are added at once the last one has the sum. UnsupportedModelError where the step does not
        add it.
        """
        matrices = self.model.matrices_of(at, op)
        self._check(at, op, matrices)
        if isinstance(op, Add):
            return self._of_additions(at, op)
        constant = self._of_norm(at, op, matrices)
        if constant is None and all(matrix.bias is None for matrix in matrices):
            return 0
        if constant is None and len(matrices) == 1:
            assert matrices[0].bias is not None
            return int(matrices[0].bias.va_addr)
        total = np.concatenate([self._own(matrix) for matrix in matrices])
        if constant is not None:
            total += constant
        return int(self._workspace.put(total).va_addr)

    def _of_additions(self, at: int, op: Add) -> int:
        """What is added at once with an addition, if it is the last of these, without its mean."""
        adds = self.model.config.network.added_with(at, op)
        matrices = [self.model.matrices_of(at, one)[0] for one in adds]
        if op is not adds[-1] or all(matrix.bias is None for matrix in matrices):
            return 0
        total = sum(map(self._own, matrices), np.zeros(matrices[0].rows, np.float32))
        return int(self._workspace.put(total - total.mean()).va_addr)

    def _check(self, at: int, op: Op | Logits, matrices: Sequence[PackedMatrix]) -> None:
        """Refuse a bias that the step does not add."""
        by_mean = self.model.config.network.by_mean
        if (isinstance(op, Gate) and op.gate is not None) or (isinstance(op, Add) and not by_mean):
            for spec, matrix in zip(op.matrices, matrices, strict=True):
                if matrix.bias is not None:
                    name = f"blk.{at}.{spec.name}"
                    raise UnsupportedModelError(f"{name} has a bias, which the persistent step does not add")

    def _of_norm(self, at: int, op: Op | Logits, matrices: Sequence[PackedMatrix]) -> Floats | None:
        """What the bias of an operation's norm makes in its products; None where there is none."""
        match op:
            case Project(norm=Norm(spec=spec)) | Gate(norm=Norm(spec=spec)) | Logits(norm=Norm(spec=spec)):
                bias = self.model.vectors_of(at, op).get(f"{spec.name}.bias")
                if bias is not None:
                    return self._products(op.role, matrices, self._floats(bias, self.model.config.dim))
        return None

    def _own(self, matrix: PackedMatrix) -> Floats:
        return np.zeros(matrix.rows, np.float32) if matrix.bias is None else self._floats(matrix.bias, matrix.rows)

    def _floats(self, buffer: Buffer, count: int) -> Floats:
        return np.frombuffer(self.model.device.download(buffer, 4 * count), np.float32)

    def _products(self, role: Role, matrices: Sequence[PackedMatrix], x: Floats) -> Floats:
        """Products of matrices with a vector, to 16 bits of it: as int8, and what that leaves as int8 again."""
        device = self.model.device
        product = Product(parts(matrices), matrices[0].columns, out_x=True)
        config = launch_config(product, role, device.arch)
        if (product, config) not in self._programs:
            self._programs[product, config] = product.load(device, config)
        program, total, room = self._programs[product, config], np.zeros(product.rows, np.float32), Workspace(device)
        try:
            out = room.take(total.nbytes)
            for floats, q, scale in rounds(x):
                given = {"x": room.put(floats), "q": room.put(q), "s": room.put(scale), "out": out}
                given |= {f"w{index}": matrix.buffer for index, matrix in enumerate(matrices)}
                buffers = [given[name] for name in product.arguments]
                program(*buffers, global_size=(product.grid(config), 1, 1), local_size=(32 * config.warps, 1, 1))
                device.synchronize()
                total += self._floats(out, product.rows)
        finally:
            room.close()
        return total


def rounds(x: Floats) -> Iterator[tuple[Floats, NDArray[np.int8], Floats]]:
    """A vector (n,) as two that are added, each in the two forms in which products read one: floats, which the first
    has whole, and int8 (n,) with scales (n / 16,)."""
    rest = x
    for floats in (x, np.zeros_like(x)):
        sets = rest.reshape(-1, SET)
        with np.errstate(over="ignore", invalid="ignore"):  # what is no number stays none, and its logits say so
            scale = np.abs(sets).max(axis=1, keepdims=True) / np.float32(127)
            q = np.rint(np.divide(sets, scale, out=np.zeros_like(sets), where=scale > 0)).astype(np.int8)
            rest = (sets - q * scale).reshape(-1)
        yield floats, q, scale
