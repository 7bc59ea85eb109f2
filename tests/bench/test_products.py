"""The bench of the decode products: it measures what the plan launches, in forms that run."""

import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "llm"))
from tiny_llama import TYPE, Shape, write
from typer.testing import CliRunner

from tegrad.bench import plans
from tegrad.bench import products as bench
from tegrad.bench.models import SHAPES
from tegrad.bench.models import ModelShape as Published
from tegrad.bench.plans import DryDevice
from tegrad.bench.prefill import gemms
from tegrad.cli.bench import app
from tegrad.hw.chips import CHIPS
from tegrad.llm.cache import KvCache
from tegrad.llm.chips import Role
from tegrad.llm.formats import F16, Q6_K, Q8_0, BlockType
from tegrad.llm.gemm import AnyTile, Gemm, pick_quickest
from tegrad.llm.launch_config import in_flight, launch_config
from tegrad.llm.matvec import Product
from tegrad.llm.plan import DecodePlan
from tegrad.llm.prefill import Prefill
from tegrad.llm.state import States

TINY = Published("llama", 320, 512, 1024, 2, 8, 4, 64, 128, 0, eps=1e-5)


@pytest.mark.parametrize("chip", ["sm_87", "sm_90"])
def test_every_form_holds_whole_items_and_keeps_its_registers(chip: str) -> None:
    for name, kind in (("1b", Q6_K), ("3b", Q6_K), ("8b", F16), ("qwen3-0.6b", Q8_0), ("qwen2.5-0.5b", Q8_0)):
        for role, (product, _) in bench.products(SHAPES[name].config, kind).items():
            chosen, tried = launch_config(product, role, chip), bench.candidates(product, chip)
            for cut in (chosen, *tried):
                assert product.fits(cut), (name, role, cut)
                assert cut.warps <= 32
                assert cut.ahead <= max(1, in_flight(product, cut))
            assert len(tried) == len(set(tried)) > 10


@pytest.mark.board
def test_the_products_are_those_of_the_plan_and_are_measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TEGRAD_BOARD", "agx-orin-64gb:14GiB")
    monkeypatch.setenv("DEV", "NV")
    monkeypatch.setenv("HCQDEV_WAIT_TIMEOUT_MS", "60000")
    for name, value in (("ROTATION_BYTES", 1 << 21), ("READ_BYTES", 1 << 20), ("LEAST_LAUNCHES", 1)):
        monkeypatch.setattr(bench, name, value)
    monkeypatch.setattr("tegrad.bench.dependencies.PASSES", 1)
    monkeypatch.setitem(bench.SHAPES, "tiny", TINY)
    with bench.opened() as device:
        expected = {(role, product) for role, (product, _) in bench.products(TINY.config, Q6_K).items()}
        assert {
            (role, replace(product, eps=product.eps and TINY.eps)) for role, product in planned(device, tmp_path)
        } == expected
    done = CliRunner().invoke(app, ["products", "tiny-q6k", "--json"], catch_exceptions=False)
    rows = json.loads(done.output.splitlines()[-1])
    assert [row["role"] for row in rows] == ["qkv", "output", "gate", "down", "logits"]
    assert all(row["us"] == pytest.approx(row["bytes"] / row["gb_s"] / 1e3) for row in rows)


@pytest.mark.parametrize("kind", [Q6_K, F16], ids=lambda kind: kind.name)
@pytest.mark.parametrize("arch", ["gemma3", "gemma2"])
def test_products_whose_norms_stand_behind_them_are_those_of_the_plan(arch: str, kind: BlockType) -> None:
    """And beside them the first layer's, to which nothing is to be added."""
    config = replace(TINY, arch=arch, layers=3, head_dim=64, own={f"{arch}.attention.sliding_window": 16}).config
    device: Any = DryDevice(CHIPS["gh100"])
    made = plans.model(config, kind, device)
    found = set(DecodePlan(made, States(device), KvCache(device, config, 64)).products)
    expected = {(role, product) for role, (product, _) in bench.products(config, kind).items()}
    [(role, first)] = found - expected
    assert (role, first.joins) == ("qkv", False)
    assert expected < found


@pytest.mark.parametrize("arch", ["gemma3", "gemma2", "llama"])
def test_products_of_prompts_are_those_of_the_rows(arch: str) -> None:
    config = replace(TINY, arch=arch, layers=2).config
    device: Any = DryDevice(CHIPS["gh100"])
    made = plans.model(config, Q6_K, device)
    found: list[Gemm] = []

    def noted(device: Any, gemm: Gemm, tokens: int) -> AnyTile:
        found.append(gemm)
        return pick_quickest(device, gemm, tokens)

    prompts = Prefill(made, KvCache(device, config, 64), sizes=(32,), pick=noted)
    prompts.launches(32)
    prompts.head()
    assert set(found) == {gemm for gemm, _ in gemms(config, Q6_K).values()}


def planned(device: object, folder: Path) -> set[tuple[Role, Product]]:
    """The products of a plan; its eps is the file's float32."""
    from tegrad.llm.packed import PackedModel

    shape = Shape(TINY.dim, TINY.ffn, TINY.heads, TINY.kv_heads, TINY.vocab, TINY.layers, tied=True)
    path = write(folder / "model.gguf", shape, TYPE.Q6_K)
    with PackedModel.load(path, "NV") as model, KvCache(device, model.config, 64) as cache:
        states = States(device)
        with DecodePlan(model, states, cache) as plan:
            found = set(plan.products)
        states.close()
    return found
