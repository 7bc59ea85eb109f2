"""docs/performance.md has the figures of results/, each computed here in the words of the page."""

import json
import re
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[1]
PAGE = " ".join((ROOT / "docs" / "performance.md").read_text().split())


def loaded(name: str) -> Any:
    """A file of results/."""
    return json.loads((ROOT / "results" / f"{name}.json").read_text())


FIGURES = {row["id"]: row for row in loaded("figures")}
ROWS = [*loaded("reports/h200-models"), *loaded("reports/board-model")]
RATIO = {name: row["ratio"] for name, row in FIGURES.items()}

LONG_PROMPTS = tuple(name for name in RATIO if name.startswith("prefill-") and name.endswith("-16384"))
SHORT_PROMPTS = tuple(name for name in RATIO if name.startswith("prefill-") and name.endswith("-128"))
PROMPTS = tuple(name for name in RATIO if name.startswith("prefill-") and name not in (*SHORT_PROMPTS, *LONG_PROMPTS))


def shares(*prefixes: str) -> str:
    """The least and the largest share of the memory's limit."""
    found = [row["limit_share"] for name, row in FIGURES.items() if name.startswith(prefixes)]
    return f"{100 * min(found):.0f} to {max(found):.0%}"


def spread(*prefixes: str) -> str:
    """The least and the largest ratio of figures whose names begin so, F16 left out; a whole name stands for itself."""
    whole = set(prefixes) & set(RATIO)
    names = whole or {name for name in RATIO if name.startswith(prefixes) and "-f16-" not in name}
    found = [RATIO[name] for name in names]
    return f"{min(found):.1f} to {max(found):.1f} times as fast"


def speed(test: str, backend: str, model: str) -> float:
    """Tokens per second of a row on a page that is kept."""
    rows = [row for row in ROWS if (row["test"], row["model_filename"]) == (test, model)]
    (found,) = (row["avg_ts"] for row in rows if backend in row["backends"])
    return float(found)


def told_of_models() -> list[str]:
    """What the page says of language models."""
    ours, peer = (speed("tg128", side, "8b-q4km.gguf") for side in ("tegrad", "llama.cpp"))
    deep = [
        speed(test, "tegrad", "1b-q6k.gguf") / speed(test, "llama.cpp", "1b-q6k.gguf")
        for test in ("tg128 x 8 @ d4096", "tg128 x 32 @ d4096")
    ]
    middle = ("decode-3b-", "decode-gemma3-4b-", "decode-phi4-mini-", "decode-smollm3-3b-", "decode-tiny-aya-")
    gemma4 = [100 * FIGURES[f"decode-gemma4-{name}-q4km"]["limit_share"] for name in ("e2b", "e4b", "31b")]
    batches = [RATIO[f"batch{name}"] for name in ("8-1b-q6k", "32-1b-q6k", "64-1b-q6k", "32-8b-q4km")]
    servers = [RATIO[f"serve-32-clients-{name}tok-s"] for name in ("", "8b-")]
    start = FIGURES["load-to-first-token"]
    return [
        f"decodes {spread('decode-')} in quantized formats, and {RATIO['decode-1b-f16-d0']:.1f} times in F16",
        f"{shares('decode-8b-')} for 8B, {shares(*middle)} for 3B and 4B, {shares('decode-1b-')} for Llama's 1B",
        f"{FIGURES['decode-gemma3-1b-q4km']['limit_share']:.0%} for Gemma 3 1B",
        f"{FIGURES['decode-qwen2.5-0.5b-q4km']['limit_share']:.0%} for Qwen2.5 0.5B",
        f"({RATIO['decode-gemma4-31b-q4km']:.1f} times for Gemma 4 31B)",
        "(Gemma 4 E2B and E4B reach {:.0f} and {:.0f}%, 31B {:.0f}%.)".format(*gemma4),
        f"of 128 tokens are processed {spread(*SHORT_PROMPTS)}",
        f"of 512 {spread(*PROMPTS)}, and of 16,384 {spread(*LONG_PROMPTS)}",
        "{:.1f}, {:.1f} and {:.1f} times as fast, 32 of 8B in Q4_K_M {:.1f} times".format(*batches),
        "delivers {:.1f} (1B) and {:.1f} times (8B)".format(*servers),
        f"is {'quicker' if start['ratio'] > 1 else 'slower'}: {start['ours']:.2f} s from the start of `tegrad run`",
        f"after one token, llama.cpp's {start['peer']:.2f}",
        f"{ours / peer:.1f} times as fast there ({ours:.0f} tok/s against {peer:.0f})",
        "falls to {:.1f} and {:.1f}".format(*deep),
        f"is {RATIO['ppl-smollm2']:.3f} (SmolLM2 135M) and {RATIO['ppl-gemma3']:.3f} (Gemma 3 270M)",
        f"and {speed('tg8', 'tegrad', 'small.gguf'):.0f} in the run on the board's page",
    ]


def told_of_tinygrad() -> list[str]:
    """What the page says of tinygrad's rows."""
    cuda, page, eager, graphs = (
        {row["row"]: row["ratio"] for row in loaded(name)["rows"]}
        for name in (
            "hardware/tinygrad-rows-h200",
            "reports/h200-tinygrad-cuda",
            "hardware/tinygrad-torch-h200",
            "hardware/tinygrad-torch-graphs-repaired-h200",
        )
    )
    assert min(cuda.values()) > 1
    assert [row for row, ratio in page.items() if ratio < 1] == ["copyin-1mb"]
    simple = [ratio for row, ratio in eager.items() if re.match(r"(add|mul|exp|relu)-", row)]
    large = [ratio for row, ratio in eager.items() if re.match(r"copy(in|out)-(64|256)mb", row)]
    halves = [cuda[f"matmul-f16-{size}"] for size in (256, 4096)]
    return [
        f"a launch to synchronized is {cuda['launch']:.0f} times as fast",
        "products of halves from {:.1f} (256) to {:.2f} times (4,096)".format(*halves),
        f"to and from the GPU {cuda['copyin-256mb']:.1f} and {cuda['copyout-256mb']:.1f} times",
        f"GPT-2 {cuda['gpt2-f16-124m']:.2f} to {cuda['gpt2-f32-124m']:.2f} times",
        f"copies of 1 MB to the GPU, at {page['copyin-1mb']:.2f}",
        f"one in floats {eager['matmul-f32-4096']:.2f} of it",
        f"an element-wise operation {min(simple):.2f} to {max(simple):.2f}",
        f"within the GPU has {eager['copy-256mb']:.2f}",
        f"between host and GPU are {min(large):.1f} to {max(large):.1f} times as fast",
        f"A small network is {eager['mlp']:.1f} times as fast as in eager PyTorch",
        f"GPT-2 124M {eager['gpt2-f32-124m']:.1f} to {eager['gpt2-f16-124m']:.1f} times",
        f"network is {graphs['mlp']:.1f} times as fast, GPT-2 has {graphs['gpt2-f16-124m']:.1f} of their speed",
    ]


@pytest.mark.parametrize("told", [*told_of_models(), *told_of_tinygrad()])
def test_a_figure_of_the_page_is_that_of_results(told: str) -> None:
    assert told in PAGE
