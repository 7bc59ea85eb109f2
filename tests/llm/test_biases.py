"""What the step in one launch adds to rows of products: biases, and what a norm's bias makes of a matrix."""

import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
from tiny_llama import SHAPES, TYPE, write

from tegrad.llm.biases import Biases, rounds
from tegrad.llm.network import Add, Gate, Project
from tegrad.llm.packed import PackedModel
from tegrad.llm.workspace import Workspace

MATRICES = {
    "qkv": ("attn_q", "attn_k", "attn_v"),
    "gate": ("ffn_up",),
    "output": ("attn_output",),
    "down": ("ffn_down",),
}
NORMS = {"qkv": "attn_norm", "gate": "ffn_norm"}


class Kept(Workspace):
    """A workspace that remembers what was put into it."""

    def put(self, data: Any) -> Any:
        self.last = data
        return super().put(data)


def tensors(path: Path) -> dict[str, np.ndarray]:
    return {
        tensor.name: gguf.dequantize(tensor.data, tensor.tensor_type).astype(np.float64)
        for tensor in gguf.GGUFReader(path).tensors
    }


def joined(found: dict[str, np.ndarray], names: Sequence[str]) -> np.ndarray:
    return np.concatenate([found[name] for name in names])


@pytest.mark.board
@pytest.mark.parametrize("kind", [TYPE.F16, TYPE.Q8_0])
def test_a_norms_bias_is_added_as_its_product_with_the_matrices_to_16_bits(
    opened: Any, tmp_path: Path, kind: TYPE
) -> None:
    """Query, key and value rows together, and up, have one shape here, and launch configurations of their own."""
    path = write(tmp_path / "model.gguf", SHAPES["starcoder2"], kind)
    found = tensors(path)
    with PackedModel.load(path, "NV") as model:
        space = Kept(opened)
        biases = Biases(model, space)
        for at, op in model.config.network.operations():
            if not isinstance(op, Project | Gate | Add):
                continue
            names = [f"blk.{at}.{name}" for name in MATRICES[op.role]]
            wanted = joined(found, [f"{name}.bias" for name in names])
            if isinstance(op, Add):
                wanted -= wanted.mean()
            else:
                weights = joined(found, [f"{name}.weight" for name in names])
                wanted += weights @ found[f"blk.{at}.{NORMS[op.role]}.bias"]
            assert biases.of(at, op)
            np.testing.assert_allclose(space.last, wanted, atol=1e-4 * np.abs(wanted).max())
        assert biases.of(model.config.layers, model.config.network.logits)
        wanted = found["token_embd.weight"] @ found["output_norm.bias"]
        np.testing.assert_allclose(space.last, wanted, atol=1e-4 * np.abs(wanted).max())
        space.close()


@pytest.mark.board
def test_of_products_that_are_added_at_once_the_last_has_all_that_is_added_to_them(opened: Any, tmp_path: Path) -> None:
    path = write(tmp_path / "model.gguf", SHAPES["phi2"], TYPE.F16)
    found = tensors(path)
    with PackedModel.load(path, "NV") as model:
        space = Kept(opened)
        biases, net = Biases(model, space), model.config.network
        hidden, mixed = (op for op in net.blocks[1] if isinstance(op, Add))
        assert net.added_with(1, hidden) == net.added_with(1, mixed) == (hidden, mixed)
        assert biases.of(1, hidden) == 0
        assert biases.of(1, mixed)
        wanted = found["blk.1.attn_output.bias"] + found["blk.1.ffn_down.bias"]
        np.testing.assert_allclose(space.last, wanted - wanted.mean(), atol=1e-5)
        space.close()


def test_what_is_no_number_goes_through_without_a_warning() -> None:
    x = np.ones(64, np.float32)
    x[3], x[40] = np.inf, np.nan
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert len(list(rounds(x))) == 2
