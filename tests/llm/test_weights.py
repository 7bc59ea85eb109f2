"""Tensors reach the device byte for byte, in place or through a staging block, and leave it with their model."""

import gc
from pathlib import Path

import numpy as np
import packs
import pytest
from gguf import GGMLQuantizationType
from gguf.quants import dequantize
from tiny_llama import TYPE, Shape, write

from tegrad.llm import weights
from tegrad.llm.config import Config
from tegrad.llm.errors import OutOfMemory
from tegrad.llm.families import LLAMA
from tegrad.llm.formats import BLOCK_TYPES, BlockType
from tegrad.llm.gguf import Gguf
from tegrad.llm.model import Model
from tegrad.llm.session import Session

pytestmark = pytest.mark.board

SHAPE = Shape(layers=1, vocab=300)


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write(tmp_path_factory.mktemp("weights") / "model.gguf", SHAPE, TYPE.Q6_K)


def hide_mapping(monkeypatch: pytest.MonkeyPatch, device: str) -> None:
    """Let the device's memory look out of the CPU's reach, as that of a graphics card is."""
    from tinygrad import Device

    for owner in type(Device[device].allocator).__mro__:
        if "_as_buffer" in vars(owner):
            monkeypatch.delattr(owner, "_as_buffer")


@pytest.mark.parametrize("mapped", [True, False])
def test_packed_bytes_arrive_as_they_are_in_the_file(
    path: Path, device: str, monkeypatch: pytest.MonkeyPatch, mapped: bool
) -> None:
    monkeypatch.setattr(weights, "READ_SIZE", 10_000)
    if not mapped:
        hide_mapping(monkeypatch, device)
    steps: list[tuple[int, int]] = []
    with Gguf.open(path) as file:
        config = Config.read(file)
        loader = weights.Loader(file, config, device, lambda done, total: steps.append((done, total)))
        joined = loader.joined(LLAMA.qkv, 0)
        infos = [file.tensors[f"blk.0.attn_{name}.weight"] for name in "qkv"]
        expected = b"".join(file.read(info.offset, info.nbytes) for info in infos)
    assert [matrix.data.shape[0] for matrix in joined.matrices] == [sum(info.rows for info in infos)]
    assert joined.rows == (tuple(info.rows for info in infos),)
    assert joined.matrices[0].data.numpy().tobytes() == expected
    assert [done for done, _ in steps] == sorted({done for done, _ in steps})
    assert steps[-1][0] == len(expected) < steps[-1][1]


def test_the_progress_of_a_whole_model_ends_at_its_total(path: Path, device: str) -> None:
    steps: list[tuple[int, int]] = []
    Model.load(path, device, lambda done, total: steps.append((done, total)))
    assert steps[-1][0] == steps[-1][1] > 0


@pytest.mark.parametrize("kind", BLOCK_TYPES.values(), ids=lambda kind: kind.name)
def test_blocks_of_any_bits_are_expanded_as_ggml_does(device: str, kind: BlockType) -> None:
    from tinygrad import Tensor

    rng = np.random.default_rng(kind.size)
    rows = packs.blocks(kind, rng, 3 * 512 // kind.elements).reshape(3, -1)
    stored = rows.view({"F32": np.float32, "F16": np.float16, "BF16": np.uint16}.get(kind.name, np.uint8))
    matrix = weights.Matrix(kind, Tensor(stored, device=device).realize())
    ours = matrix.rows(Tensor(np.array([2, 0, 1], np.int32), device=device)).numpy()
    theirs = dequantize(rows, GGMLQuantizationType[kind.name]).astype(np.float32)[[2, 0, 1]]
    assert np.allclose(ours, theirs, rtol=1e-6, atol=1e-6 * np.abs(theirs).max())


def test_a_model_or_cache_that_does_not_fit_is_said_so(
    path: Path, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    from tinygrad import Device

    model = Model.load(path, device)
    allocator = Device[device].allocator
    alloc = allocator.alloc

    def bounded(size: int, *rest: object) -> object:
        if size > 30_000:
            raise MemoryError
        return alloc(size, *rest)

    monkeypatch.setattr(allocator, "alloc", bounded)
    with pytest.raises(OutOfMemory, match=r"model.gguf needs .* MiB, more than"):
        Model.load(path, device)
    with pytest.raises(OutOfMemory, match=r"a context of 160 tokens needs"):
        Session(model)


def test_a_dropped_model_and_session_give_their_memory_back(path: Path, device: str) -> None:
    from tinygrad import GlobalCounters

    def use() -> None:
        session = Session(Model.load(path, device))
        assert np.isfinite(session.feed([1, 2, 3])).all()

    use()
    gc.collect()
    before = GlobalCounters.mem_used_per_device[device]
    for _ in range(2):
        use()
    gc.collect()
    assert GlobalCounters.mem_used_per_device[device] == before
