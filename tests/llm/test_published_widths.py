"""One layer as wide as a published model's, on a board: steps of many launches and of one, and prompts, agree.

What a kernel keeps for each CTA follows from a model's widths and the chip's SMs, so that a small model of the family
does not try it. Vocabularies are cut; weights are those of a Q4_K_M.
"""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
from decode_steps import decode

from tegrad.bench import models
from tegrad.llm.cache import KvCache
from tegrad.llm.errors import UnsupportedModelError
from tegrad.llm.packed import PackedModel
from tegrad.llm.persistent import PersistentPlan
from tegrad.llm.plan import DecodePlan
from tegrad.llm.prefill import Prefill
from tegrad.llm.state import States

TOKENS = [5, 17]
NEAR = {"one": 0.1, "prompt": 0.2}
"""Standard deviations of the logits: prompts round nothing to 8 bits."""


class Width(NamedTuple):
    """A published model's, from its config.json."""

    arch: str
    dim: int
    ffn: int
    heads: int
    kv_heads: int
    head_dim: int


WIDTHS = {
    "TinyLlama 1.1B": Width("llama", 2048, 5632, 32, 4, 64),
    "SmolLM2 360M": Width("llama", 960, 2560, 15, 5, 64),
    "Llama 2 13B": Width("llama", 5120, 13824, 40, 40, 128),
    "Llama 3 70B": Width("llama", 8192, 28672, 64, 8, 128),
    "Mistral Small 24B": Width("llama", 5120, 32768, 32, 8, 128),
    "Falcon 3 7B": Width("llama", 3072, 23040, 12, 4, 256),
    "InternLM 3 8B": Width("llama", 4096, 10240, 32, 2, 128),
    "Ministral 3 14B": Width("mistral3", 5120, 16384, 32, 8, 128),
    "Qwen 2.5 7B": Width("qwen2", 3584, 18944, 28, 4, 128),
    "Qwen 3 32B": Width("qwen3", 5120, 25600, 64, 8, 128),
    "Gemma 2 27B": Width("gemma2", 4608, 36864, 32, 16, 128),
    "Gemma 3 12B": Width("gemma3", 3840, 15360, 16, 8, 256),
    "Gemma 4 E2B": Width("gemma4", 1536, 6144, 8, 1, 512),
    "Gemma 4 E4B": Width("gemma4", 2560, 10240, 8, 2, 512),
    "Gemma 7B": Width("gemma", 3072, 24576, 16, 16, 256),
    "Phi-4": Width("phi3", 5120, 17920, 40, 10, 128),
    "Granite 3 8B": Width("granite", 4096, 12800, 32, 8, 128),
    "OLMo 2 7B": Width("olmo2", 4096, 11008, 32, 32, 128),
    "OLMo 2 32B": Width("olmo2", 5120, 27648, 40, 8, 128),
    "MiniCPM4 8B": Width("minicpm", 4096, 16384, 32, 2, 128),
    "InternLM 2 20B": Width("internlm2", 6144, 16384, 48, 8, 128),
    "Hunyuan 7B": Width("hunyuan-dense", 4096, 14336, 32, 8, 128),
    "Seed-OSS 36B": Width("seed_oss", 5120, 27648, 80, 8, 128),
    "EXAONE 3.5 2.4B": Width("exaone", 2560, 7168, 32, 8, 80),
    "EXAONE 4 32B": Width("exaone4", 5120, 27392, 40, 8, 128),
    "GLM-4 9B": Width("glm4", 4096, 13696, 32, 2, 128),
    "GLM-4 32B": Width("glm4", 6144, 23040, 48, 2, 128),
    "StarCoder 2 15B": Width("starcoder2", 6144, 24576, 48, 4, 128),
    "Nemotron-Mini 4B": Width("nemotron", 3072, 9216, 24, 8, 128),
    "AFM 4.5B": Width("arcee", 2560, 18432, 20, 4, 128),
    "SmolLM3 3B": Width("smollm3", 2048, 11008, 16, 4, 128),
    "ERNIE 4.5 0.3B": Width("ernie4_5", 1024, 3072, 16, 2, 128),
    "Qwen 2.5 VL 7B": Width("qwen2vl", 3584, 18944, 28, 4, 128),
    "Qwen 3 VL 8B": Width("qwen3vl", 4096, 12288, 32, 8, 128),
    "GLM-4 9B of 2024": Width("chatglm", 4096, 13696, 32, 2, 128),
    "Qwen 3.5 0.8B": Width("qwen35", 1024, 3584, 8, 2, 256),
    "Qwen 3.5 4B": Width("qwen35", 2560, 9216, 16, 4, 256),
    "Qwen 3.5 27B": Width("qwen35", 5120, 17408, 24, 4, 256),
    "LFM2 350M": Width("lfm2", 1024, 4608, 16, 8, 64),
    "LFM2 1.2B": Width("lfm2", 2048, 8192, 32, 8, 64),
    "LFM2 2.6B": Width("lfm2", 2048, 10752, 32, 8, 64),
    "Tiny Aya": Width("cohere2", 2048, 11008, 16, 4, 128),
    "Command R7B": Width("cohere2", 4096, 14336, 32, 8, 128),
    "Command R 35B": Width("command-r", 8192, 24576, 64, 8, 128),
    "Jais 2 8B": Width("jais2", 3328, 26624, 26, 26, 128),
    "Phi-2": Width("phi2", 2560, 10240, 32, 32, 80),
    "Pythia 1B": Width("gptneox", 2048, 8192, 8, 8, 256),
    "StableLM 2 1.6B": Width("stablelm", 2048, 5632, 32, 32, 64),
    "GPT-2 XL": Width("gpt2", 1600, 6400, 25, 25, 64),
}
"""At least one of each family with a shape, those whose rows are no whole blocks of 256, and whose groups are large."""


PARTLY_TURNED = ("glm4", "chatglm", "nemotron", "phi2", "gptneox", "stablelm")
"""Families half of whose heads rotates here."""
MANY_LAUNCHES = ("gpt2", "gptneox", "stablelm")
"""Families that the step in one launch refuses: for positions, two norms of a block, or a norm's bias at a gate."""


@pytest.fixture
def device(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    import tegrad.nv
    from tegrad.nv import device
    from tegrad.nv.gpu import opened

    for name, value in (("TEGRAD_BOARD", request.param), ("DEV", "NV"), ("HCQDEV_WAIT_TIMEOUT_MS", "400000")):
        monkeypatch.setenv(name, value)
    tegrad.nv.install()
    assert device._opened.get("NV") is None
    yield opened("NV")
    device._opened["NV"].close()


def written(path: Path, width: Width) -> Path:
    """One layer, two of a family with windows in every other one, or whose first one does not attend, and two more that
    take keys and values of others."""
    base = next(shape for shape in models.SHAPES.values() if shape.arch == width.arch)
    turned = width.head_dim // 2 if width.arch in PARTLY_TURNED else width.head_dim
    own = base.own | {"rope.dimension_count": turned} if "rope.dimension_count" in base.own else dict(base.own)
    own |= {"attention.sliding_window_pattern": 2} if width.arch == "gemma3" else {}
    if width.arch == "gemma4":
        own |= {"attention.sliding_window_pattern": [True, False] * 2, "attention.shared_kv_layers": 2}
        own |= {"feed_forward_length": width.ffn}
    if width.arch == "qwen35":
        mixed = width.heads * width.head_dim
        own |= {"full_attention_interval": 2, "ssm.inner_size": mixed, "ssm.time_step_rank": mixed // 128}
    layers = {"gemma3": 2, "gemma4": 4, "lfm2": 2, "qwen35": 2}.get(width.arch, 1)
    shape = replace(
        base, **width._asdict(), layers=layers, vocab=1024,
        specials=min(base.specials, 1000), context=4096, own=own, attends=(1,) if base.attends else (),
    )  # fmt: skip
    models.write(path, shape, "q4km")
    return path


def steps(kind: type[Any], model: PackedModel) -> np.ndarray:
    """The logits of a step for each token."""
    gpu, states = model.device, States(model.device)
    with (
        KvCache(gpu, model.config, 4096) as cache,
        kind(model, states, cache) as plan,
        gpu.record(plan.launches) as step,
    ):
        found = [decode(gpu, plan, states, step, at, token, 4096) for at, token in enumerate(TOKENS)]
    states.close()
    return np.array(found)


def test_every_family_has_a_width() -> None:
    assert {width.arch for width in WIDTHS.values()} == {shape.arch for shape in models.SHAPES.values()}


@pytest.mark.long
@pytest.mark.board
@pytest.mark.parametrize("device", ["gh100", "agx-orin-64gb"], indirect=True)
@pytest.mark.parametrize("name", WIDTHS)
def test_one_launch_and_prompts_find_what_many_launches_do(tmp_path: Path, device: Any, name: str) -> None:
    found = {}
    with PackedModel.load(written(tmp_path / "model.gguf", WIDTHS[name]), "NV") as model:
        many = steps(DecodePlan, model)
        with KvCache(device, model.config, 64) as cache, Prefill(model, cache, sizes=(16,)) as prefill:
            found["prompt"] = prefill.score(TOKENS)
        try:
            found["one"] = steps(PersistentPlan, model)
        except UnsupportedModelError as refused:
            said = str(refused)  # an H100 has room for all of these
            assert device.sm_count < 32 or WIDTHS[name].arch in MANY_LAUNCHES, said
    assert np.isfinite(many).all()
    assert {
        way: far for way, logits in found.items() if (far := np.abs(logits - many).max() / many.std()) > NEAR[way]
    } == {}
