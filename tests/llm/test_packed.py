"""A loaded model's buffers hold what numpy packs, however they got there, and go when they are closed."""

import gc
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gguf import GGUFWriter
from tiny_llama import TYPE, Shape, finish, letters, write

from tegrad.llm import packed, packing, stream
from tegrad.llm.errors import GgufError, OutOfMemory, UnsupportedModelError
from tegrad.llm.families import LLAMA
from tegrad.llm.footprint import Footprint
from tegrad.llm.formats import Q5_1
from tegrad.llm.gguf import Gguf
from tegrad.llm.packed import PackedMatrix, PackedModel

pytestmark = pytest.mark.board

SHAPE = Shape(dim=768, ffn=1280, heads=6, kv_heads=3, vocab=317, layers=2, bias=True)
MIXED = {
    "attn_v.w": TYPE.Q6_K, "ffn_down.w": TYPE.Q5_K, "ffn_up.w": TYPE.F16, "token_embd": TYPE.Q8_0,
    "attn_output.w": TYPE.Q4_K, "output.w": TYPE.Q4_0,
}  # fmt: skip


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write(tmp_path_factory.mktemp("packed") / "model.gguf", SHAPE, TYPE.Q4_K, kinds=MIXED)


def content(buffer: Any, size: int) -> bytes:
    """A buffer's bytes."""
    out = bytearray(size)
    buffer.owner.allocator._copyout(memoryview(out), buffer)
    return bytes(out)


def expected(file: Gguf, names: list[str]) -> bytes:
    """The file's matrices of these names below one another, packed by numpy."""
    infos = [file.tensors[name] for name in names]
    raw = np.frombuffer(b"".join(file.read(info.offset, info.nbytes) for info in infos), np.uint8)
    return packing.pack(infos[0].type, raw, sum(info.rows for info in infos), infos[0].columns).tobytes()


def in_pieces(allocator: Any, size: int, mapped: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Files are read in pieces of so many bytes, through host blocks where memory is not `mapped`."""
    for module in (stream, packed):
        monkeypatch.setattr(module, "PIECE_BYTES", size)
    for owner in type(allocator).__mro__ if not mapped else ():
        if "lend" in vars(owner):
            monkeypatch.delattr(owner, "lend")


@pytest.mark.parametrize("mapped", [True, False], ids=["read in place", "through host blocks"])
def test_every_buffer_holds_what_the_twin_packs(
    path: Path, device: str, monkeypatch: pytest.MonkeyPatch, mapped: bool
) -> None:
    from tinygrad import Device

    in_pieces(Device[device].allocator, 100_000, mapped, monkeypatch)
    steps: list[tuple[int, int]] = []
    with PackedModel.load(path, device, lambda *step: steps.append(step)) as model, Gguf.open(path) as file:

        def check(matrix: PackedMatrix, *names: str) -> None:
            assert content(matrix.buffer, matrix.nbytes) == expected(file, [f"{name}.weight" for name in names]), names

        check(model.embedding, "token_embd")
        check(model.output, "output")
        for at, layer in enumerate(model.layers):
            query_key, value = layer.qkv
            assert query_key.rows == 768 + 384
            check(query_key, f"blk.{at}.attn_q", f"blk.{at}.attn_k")
            check(value, f"blk.{at}.attn_v")
            for name, matrix in layer.matrices.items():
                check(matrix, f"blk.{at}.{name}")
            assert {*layer.matrices} == {"attn_output", "ffn_gate", "ffn_up", "ffn_down"}
            for name, vector in layer.vectors.items():
                info = file.tensors[f"blk.{at}.{name}.weight"]
                assert content(vector, info.nbytes) == file.read(info.offset, info.nbytes)
            biases = [file.tensors[f"blk.{at}.attn_{name}.bias"] for name in "qk"]
            assert query_key.bias is not None
            assert content(query_key.bias, 4 * 1152) == b"".join(file.read(b.offset, b.nbytes) for b in biases)
        assert {*model.layers[0].vectors} == {"attn_norm", "ffn_norm"}
        total = sum(info.nbytes for info in file.tensors.values())
    assert steps[-1] == (total, total)
    assert [done for done, _ in steps] == sorted({done for done, _ in steps})


def test_a_tied_output_is_the_embedding_and_lacking_biases_are_zeros(tmp_path: Path, device: str) -> None:
    from tinygrad import Device

    shape = Shape(dim=256, ffn=256, heads=2, kv_heads=1, layers=1, tied=True, vocab=290)
    path = write(tmp_path / "tied.gguf", shape, TYPE.Q8_0)
    with PackedModel.load(path, device) as model, Gguf.open(path) as file:
        assert model.output is model.embedding
        assert model.layers[0].qkv[0].bias is None
        # Part of a group has a bias: the rest are zeros, also in memory that was used before.
        loader = packed.PackedLoader(file, Device[device])
        norm = file.tensors["output_norm.weight"]
        vector = loader.vector([3, norm, 2])
        loader.run()
        assert content(vector, norm.nbytes + 20) == bytes(12) + file.read(norm.offset, norm.nbytes) + bytes(8)
        loader.close()


def test_a_fused_matrix_is_one_and_a_norm_has_its_bias(tmp_path: Path, device: str) -> None:
    shape = Shape(arch="gpt2", dim=128, ffn=192, heads=2, kv_heads=2, layers=1, vocab=290)
    path = write(tmp_path / "gpt2.gguf", shape, TYPE.F16)
    with PackedModel.load(path, device) as model, Gguf.open(path) as file:
        (layer,) = model.layers
        (fused,) = layer.qkv
        assert fused.rows == 384
        assert content(fused.buffer, fused.nbytes) == expected(file, ["blk.0.attn_qkv.weight"])
        assert model.positions is not None
        assert content(model.positions.buffer, model.positions.nbytes) == expected(file, ["position_embd.weight"])
        bias = file.tensors["blk.0.attn_norm.bias"]
        assert content(layer.vectors["attn_norm.bias"], bias.nbytes) == file.read(bias.offset, bias.nbytes)
        assert {*layer.matrices} == {"attn_output", "ffn_up", "ffn_down"}


def taken(device: str) -> int:
    """Bytes that the board has given out, but for those that wait to go back."""
    from tinygrad import Device

    from tegrad.orin.client import board_status

    gc.collect()
    Device[device].iface.give_back()
    return int(board_status(os.environ["TEGRAD_BOARD"])["counts"]["memory_bytes"])


def test_a_closed_or_failed_model_gives_its_memory_back(
    path: Path, device: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from tinygrad import Device

    PackedModel.load(path, device).close()
    before = taken(device)
    with PackedModel.load(path, device):
        assert taken(device) - before >= sum(info.nbytes for info in Gguf.open(path).tensors.values())
    assert taken(device) == before

    allocator = Device[device].allocator
    alloc = allocator.alloc

    def bounded(size: int, *rest: object) -> object:
        if size > 700_000:
            raise MemoryError
        return alloc(size, *rest)

    with monkeypatch.context() as patch:
        patch.setattr(allocator, "alloc", bounded)
        with pytest.raises(OutOfMemory, match=r"model.gguf needs .* MiB, more than NV has free"):
            PackedModel.load(path, device)
    assert taken(device) == before

    shrinking = tmp_path / "shrinking.gguf"
    shrinking.write_bytes(path.read_bytes())

    def shrink(done: int, total: int) -> None:
        os.truncate(shrinking, shrinking.stat().st_size // 2)

    with monkeypatch.context() as patch:
        patch.setattr(packed, "PIECE_BYTES", 50_000)
        with pytest.raises(GgufError, match="became shorter"):
            PackedModel.load(shrinking, device, shrink)
    assert taken(device) == before


@pytest.mark.parametrize("mapped", [True, False], ids=["read in place", "through host blocks"])
def test_rows_heads_and_vectors_are_filled_up_with_zeros(
    tmp_path: Path, device: str, monkeypatch: pytest.MonkeyPatch, mapped: bool
) -> None:
    """Rows of 96 to 128, of 160 to 192; 3 heads on 1 to 6 on 2. Norms are told what part of a row is zeros."""
    from tinygrad import Device

    shape = Shape(dim=96, ffn=160, heads=3, kv_heads=1, layers=1, vocab=301, arch="qwen2")
    path = write(tmp_path / "odd.gguf", shape, TYPE.Q5_1, kinds={"ffn_down.w": TYPE.F16})
    in_pieces(Device[device].allocator, 3000, mapped, monkeypatch)
    with PackedModel.load(path, device) as model, Gguf.open(path) as file:
        (layer,), config = model.layers, model.config
        assert (config.dim, config.ffn, config.heads, config.kv_heads) == (128, 192, 6, 2)
        assert config.eps == pytest.approx(0.75 * shape.eps)
        assert config.head_eps == pytest.approx(shape.eps)

        def rows(name: str, count: int, columns: int) -> np.ndarray:
            info = file.tensors[f"{name}.weight"]
            raw = np.frombuffer(file.read(info.offset, info.nbytes), np.uint8).reshape(info.rows, -1)
            wide = np.zeros((count, info.type.row_bytes(columns)), np.uint8)
            wide[: len(raw), : raw.shape[1]] = raw
            return wide

        def check(matrix: PackedMatrix, columns: int, *parts: tuple[str, int]) -> None:
            raw = np.concatenate([rows(name, count, columns) for name, count in parts])
            assert (matrix.rows, matrix.columns) == (len(raw), columns)
            assert content(matrix.buffer, matrix.nbytes) == packing.pack(matrix.kind, raw, len(raw), columns).tobytes()

        check(model.embedding, 128, ("token_embd", 301))
        check(model.output, 128, ("output", 301))
        check(layer.qkv[0], 128, ("blk.0.attn_q", 192), ("blk.0.attn_k", 64), ("blk.0.attn_v", 64))
        check(layer.matrices["attn_output"], 192, ("blk.0.attn_output", 128))
        check(layer.matrices["ffn_up"], 128, ("blk.0.ffn_up", 192))
        check(layer.matrices["ffn_down"], 192, ("blk.0.ffn_down", 128))
        whole = np.zeros(320, np.float32)
        for name, at, count in (("q", 0, 96), ("k", 192, 32), ("v", 256, 32)):
            info = file.tensors[f"blk.0.attn_{name}.bias"]
            whole[at : at + count] = np.frombuffer(file.read(info.offset, info.nbytes), np.float32)
        assert layer.qkv[0].bias is not None
        assert content(layer.qkv[0].bias, 4 * 320) == whole.tobytes()
        info = file.tensors["blk.0.attn_norm.weight"]
        norm = np.frombuffer(content(layer.vectors["attn_norm"], 4 * 128), np.float32)
        np.testing.assert_allclose(
            norm[:96], np.frombuffer(file.read(info.offset, info.nbytes), np.float32) * 0.75**0.5, rtol=1e-6
        )
        assert not norm[96:].any()
        matrices = [model.embedding, model.output, *layer.qkv, *layer.matrices.values()]
        vectors = sum(info.nbytes + packed.ALIGN for info in file.tensors.values() if len(info.shape) == 1)
        beside = Footprint.of(file).weights - vectors - sum(matrix.nbytes for matrix in matrices)
        assert 0 <= beside <= 2 * Q5_1.segment_bytes  # three matrices that are one here


def test_odd_rows_after_a_layer_norm_are_refused_by_name(tmp_path: Path, device: str) -> None:
    shape = Shape(arch="gpt2", dim=96, ffn=64, heads=1, kv_heads=1, layers=1)
    with pytest.raises(UnsupportedModelError, match="96 weights in Q8_0"):
        PackedModel.load(write(tmp_path / "narrow.gguf", shape, TYPE.Q8_0), device)


def random_blocks(path: Path, shape: Shape) -> None:
    """A model of random Q6_K blocks of small weights, which takes no time to quantize."""
    rng = np.random.default_rng(0)
    writer = GGUFWriter(path, "llama")
    writer.add_context_length(shape.context)
    writer.add_embedding_length(shape.dim)
    writer.add_block_count(shape.layers)
    writer.add_feed_forward_length(shape.ffn)
    writer.add_head_count(shape.heads)
    writer.add_head_count_kv(shape.kv_heads)
    writer.add_layer_norm_rms_eps(1e-5)
    letters(300).add_to(writer)
    key = shape.kv_heads * shape.width
    sizes = {LLAMA.embedding.name: (shape.vocab, shape.dim)}
    for at in range(shape.layers):
        rows = {"attn_q": shape.dim, "attn_k": key, "attn_v": key, "attn_output": shape.dim, "ffn_gate": shape.ffn}
        sizes |= {f"blk.{at}.{name}": (count, shape.dim) for name, count in {**rows, "ffn_up": shape.ffn}.items()}
        sizes[f"blk.{at}.ffn_down"] = (shape.dim, shape.ffn)
        for name in ("attn_norm", "ffn_norm"):
            writer.add_tensor(f"blk.{at}.{name}.weight", np.ones(shape.dim, np.float32))
    writer.add_tensor("output_norm.weight", np.ones(shape.dim, np.float32))
    for name, (rows_, columns) in sizes.items():
        blocks = rng.integers(0, 256, (rows_, columns // 256 * 210), dtype=np.uint8)
        blocks.reshape(rows_, -1, 210)[:, :, 208:] = np.array([3e-5], np.float16).view(np.uint8)
        writer.add_tensor(f"{name}.weight", blocks, raw_dtype=TYPE.Q6_K)
    finish(writer)


LOAD = """
import json, os, sys, threading
from pathlib import Path
import tegrad.nv
tegrad.nv.install()
from tinygrad import Device
from tegrad.llm.formats import Q6_K
from tegrad.llm.packed import SPEC, PackedModel, arranging
from tegrad.llm.programs import Programs
from tegrad.orin.client import board_status

device = Device["NV"]
first = device.allocator.alloc(1680, SPEC)
repack, *_ = arranging(Programs(device), Q6_K, first, 1, first)
# The device itself takes memory for the first kernel.
repack.program(first, global_size=repack.grid, local_size=repack.block, vals=repack.values)
device.synchronize()
device.allocator.free(first, 1680, SPEC)

def own():
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith("RssAnon:"))

def taken():
    return board_status(os.environ["TEGRAD_BOARD"])["counts"]["memory_bytes"]

start, peak, done = {"board": taken(), "own": own()}, {"board": 0, "own": 0}, threading.Event()

def watch():
    while not done.wait(0.002):
        peak["own"] = max(peak["own"], own())

watcher = threading.Thread(target=watch, daemon=True)
watcher.start()

def progress(*_):
    peak["board"] = max(peak["board"], taken())

if sys.argv[2] == "load":
    with PackedModel.load(sys.argv[1], "NV", progress):
        progress()
else:
    from tegrad.llm.engine import Engine
    from tegrad.llm.gguf import Gguf
    from tegrad.llm.sampling import Settings

    # A prompt that goes in chunks, and tokens drawn through every kind of launch; kernels are compiled in this process.
    with Gguf.open(sys.argv[1]) as file, Engine(file, 256, progress=progress) as engine:
        for settings in (Settings(), Settings(temperature=0.8, top_p=0.9)):
            engine.reset()
            assert len(list(engine.generate(list(range(40)), settings, 3))) == 3
            progress()
done.set()
watcher.join()
print(json.dumps({"start": start, "peak": peak}))
"""


def peak_memory(path: Path, what: str, **env: str) -> dict[str, dict[str, int]]:
    """Bytes of the board and of the process's own, at the start and at the most, on the spec of the 8 GB board."""
    random_blocks(path, Shape(dim=1024, ffn=4096, heads=8, kv_heads=4, layers=3, vocab=16384, tied=True, context=256))
    command = [sys.executable, "-c", LOAD, str(path), what]
    whole = {**os.environ, "TEGRAD_BOARD": "orin-nano-8gb", **env}
    ran = subprocess.run(command, env=whole, capture_output=True, text=True, timeout=600)
    assert ran.returncode == 0, ran.stderr
    seen: dict[str, dict[str, int]] = json.loads(ran.stdout)
    return seen


@pytest.mark.long
def test_generating_takes_weights_cache_and_less_than_300_mb_beside_them(tmp_path: Path) -> None:
    path = tmp_path / "large.gguf"
    seen = peak_memory(path, "generate", XDG_CACHE_HOME=str(tmp_path), HCQDEV_WAIT_TIMEOUT_MS="300000")
    cache = 3 * 2 * 2 * 4 * 256 * 128
    assert seen["peak"]["board"] + seen["peak"]["own"] < path.stat().st_size + cache + 300_000_000, seen


def test_loading_takes_the_weights_and_less_than_300_mb_beside_them(tmp_path: Path) -> None:
    """The memory of that board is shared by the process and the GPU; the repacking is part of the load."""
    path = tmp_path / "large.gguf"
    seen = peak_memory(path, "load")
    weights = path.stat().st_size
    assert weights > 50 << 20
    assert seen["peak"]["board"] >= weights
    assert seen["peak"]["board"] - seen["start"]["board"] < weights + (2 << 20)
    assert seen["peak"]["board"] + seen["peak"]["own"] < weights + 300_000_000, seen
