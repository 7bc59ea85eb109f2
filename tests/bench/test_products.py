"""The bench of the decode products: it measures what the plan launches, in forms that run."""

import json
from dataclasses import replace

import pytest
from typer.testing import CliRunner

from tegrad.bench import products as bench
from tegrad.bench.models import SHAPES, formats
from tegrad.bench.models import ModelShape as Published
from tegrad.bench.prefill import gemms
from tegrad.cli.bench import app
from tegrad.llm.formats import F16, Q4_K, Q6_K, Q8_0, BlockType
from tegrad.llm.launch_config import in_flight, launch_config

TINY = Published("llama", 320, 512, 1024, 2, 8, 4, 64, 128, 0, eps=1e-5)


@pytest.mark.parametrize("chip", ["sm_87", "sm_90"])
def test_every_form_holds_whole_items_and_keeps_its_registers(chip: str) -> None:
    for name, kind in (("1b", Q6_K), ("3b", Q6_K), ("8b", F16), ("qwen3-0.6b", Q8_0), ("qwen2.5-0.5b", Q8_0)):
        for role, product in bench.products(SHAPES[name].config, kind, chip):
            chosen, tried = launch_config(product, role, chip), bench.candidates(product, chip)
            for cut in (chosen, *tried):
                assert product.fits(cut), (name, role, cut)
                assert cut.warps <= 32
                assert cut.ahead <= max(1, in_flight(product, cut))
            assert len(tried) == len(set(tried)) > 10


@pytest.mark.board
def test_the_products_are_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TEGRAD_BOARD", "agx-orin-64gb:14GiB")
    monkeypatch.setenv("DEV", "NV")
    monkeypatch.setenv("HCQDEV_WAIT_TIMEOUT_MS", "60000")
    for name, value in (("products.ROTATION_BYTES", 1 << 21), ("limits.READ_BYTES", 1 << 20),
                        ("products.LEAST_LAUNCHES", 1), ("gpu.PASSES", 1)):  # fmt: skip
        monkeypatch.setattr(f"tegrad.bench.{name}", value)
    monkeypatch.setitem(SHAPES, "tiny", TINY)  # type: ignore[arg-type]
    done = CliRunner().invoke(app, ["products", "tiny-q6k", "--json"], catch_exceptions=False)
    rows = json.loads(done.output.splitlines()[-1])
    assert [row["role"] for row in rows] == ["qkv", "output", "gate", "down", "logits"]
    assert all(row["us"] == pytest.approx(row["bytes"] / row["gb_s"] / 1e3) for row in rows)


@pytest.mark.parametrize("arch", ["gemma3", "gemma2"])
def test_the_first_layer_has_nothing_to_add_where_norms_stand_behind_products(arch: str) -> None:
    config = replace(TINY, arch=arch, layers=3, own={f"{arch}.attention.sliding_window": 16}).config
    found = bench.products(config, Q6_K, "sm_90")
    counts = {(role, product.joins): count for (role, product), count in found.items()}
    assert counts == {
        ("qkv", False): 1, ("qkv", True): 2, ("output", False): 3, ("gate", True): 3, ("down", False): 3,
        ("logits", False): 1,
    }  # fmt: skip


def test_a_mixture_has_the_products_of_its_layers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of Q4_K_M some layers' values and down matrices have Q6_K, and all its logits."""
    monkeypatch.setitem(SHAPES, "tiny", replace(TINY, layers=8))  # type: ignore[arg-type]
    config, kinds = SHAPES["tiny"].config, formats("tiny-q4km")
    steps: dict[tuple[str, tuple[BlockType, ...]], int] = {}
    for (role, product), count in bench.products(config, kinds, "sm_90").items():
        key = role, tuple(part.kind for part in product.parts)
        steps[key] = steps.get(key, 0) + count
    assert steps["down", (Q4_K,)] + steps["down", (Q6_K,)] == 8
    assert steps["logits", (Q6_K,)] == 1
    chunks = {(role, gemm.kind): count for (role, gemm), count in gemms(config, kinds, "sm_90").items()}
    assert chunks["down", Q4_K] == steps["down", (Q4_K,)]
    assert chunks["qkv", Q6_K] == chunks["down", Q6_K]
    assert chunks["logits", Q6_K] == 1


@pytest.mark.parametrize("arch", ["gemma3", "gemma2", "llama"])
def test_products_of_prompts_are_added_or_stand_apart(arch: str) -> None:
    found = gemms(replace(TINY, arch=arch, layers=2).config, Q6_K, "sm_90")
    assert [(role, gemm.add, count) for (role, gemm), count in found.items()] == [
        ("qkv", False, 2), ("output", arch == "llama", 2), ("gate", False, 2), ("down", arch == "llama", 2),
        ("logits", False, 1),
    ]  # fmt: skip


def test_gate_and_up_in_two_formats_are_two_products() -> None:
    config = replace(TINY, layers=2).config
    found = gemms(config, lambda spec, _: Q4_K if spec.name == "ffn_up" else Q6_K, "sm_90")
    assert {(role, gemm.kind, gemm.gated): count for (role, gemm), count in found.items() if role == "gate"} == {
        ("gate", Q4_K, False): 2,
        ("gate", Q6_K, False): 2,
    }
    assert sum(count for (role, _), count in found.items() if role == "down") == 2
