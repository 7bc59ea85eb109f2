"""What a family does not have is refused by name, and what it must have is missed by name."""

import math
import re
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import tiny_llama
from tiny_llama import SHAPES, TYPE, Shape, letters, rewritten, write

from tegrad.llm.config import Config
from tegrad.llm.errors import ContextError, GgufError, ModelError, UnsupportedModelError
from tegrad.llm.families import ARCHES
from tegrad.llm.gguf import Gguf

SMALL = Shape(dim=32, ffn=32, heads=1, kv_heads=1, layers=1)


def read(path: Path) -> Config:
    with Gguf.open(path) as file:
        return Config.read(file)


@pytest.mark.parametrize(
    ("key", "value", "said"),
    [
        ("general.type", "adapter", "no model but of the type 'adapter'"),
        ("gemma3.attention.causal", False, "both directions"),
        ("llama.attention.scale", 0.5, r"scales attention by a number of its own \(llama.attention.scale\)"),
        ("llama.final_logit_softcapping", 30.0, "caps logits"),
        ("llama.attention.max_alibi_bias", 8.0, "ALiBi"),
        ("llama.logit_scale", 0.25, "scales logits"),
        ("granite.rope.scaling.finetuned", False, "rotates no heads"),
        ("granite.expert_count", 4, "is a mixture of experts"),
        ("chatglm.rope.dimension_sections", [4, 4, 8, 0], r"rotates parts of heads by other positions \(chatglm.rope"),
    ],
)
def test_values_that_change_the_numbers_are_refused(tmp_path: Path, key: str, value: object, said: str) -> None:
    arch = key.partition(".")[0]
    shape = replace(SMALL, arch=arch if arch in ARCHES else "llama", extra={key: value})
    path = write(tmp_path / "model.gguf", shape, TYPE.F32)
    with pytest.raises(UnsupportedModelError, match=said):
        read(path)


@pytest.mark.parametrize("kind", ["mmproj", "imatrix"])
def test_what_lies_beside_models_is_named(tmp_path: Path, kind: str) -> None:
    """Repositories have them: a model's eyes, of the architecture clip, and figures for a quantizer, of none."""
    path = write(tmp_path / "m.gguf", replace(SMALL, arch="clip", extra={"general.type": kind}), TYPE.F32)
    with Gguf.open(path) as file:
        if kind == "imatrix":
            file.metadata = {key: value for key, value in file.metadata.items() if key != "general.architecture"}
        with pytest.raises(UnsupportedModelError, match=f"is no model but of the type '{kind}': choose a model"):
            Config.read(file)


def test_a_minicpm_without_its_scales_is_incomplete(tmp_path: Path) -> None:
    """llama.cpp divides such a file's logits by what they must be multiplied by."""
    scales = {"minicpm.embedding_scale": 12.0, "minicpm.residual_scale": 0.2, "minicpm.logit_scale": 9.0}
    for left_out in scales:
        extra = {name: scale for name, scale in scales.items() if name != left_out}
        path = write(tmp_path / "model.gguf", replace(SMALL, arch="minicpm", extra=extra), TYPE.F32)
        with pytest.raises(GgufError, match=f"lacks the value '{left_out}'; it is incomplete, convert it again"):
            read(path)


def test_what_says_whether_a_block_is_parallel_is_a_yes_or_no(tmp_path: Path) -> None:
    """llama.cpp refuses a number there."""
    said = "gptneox.use_parallel_residual"
    for value, parallel in ((True, True), (False, False)):
        path = write(tmp_path / "model.gguf", replace(SMALL, arch="gptneox", extra={said: value}), TYPE.F32)
        assert read(path).network.parallel is parallel
    path = write(tmp_path / "model.gguf", replace(SMALL, arch="gptneox", extra={said: 0}), TYPE.F32)
    with pytest.raises(GgufError, match=f"{said} = 0, which is no yes or no"):
        read(path)


def test_a_family_that_normalizes_heads_in_a_way_of_its_own_is_refused_for_that(tmp_path: Path) -> None:
    """StableLM 2 12B, whose blocks are parallel and lack the second norm."""
    whole = write(tmp_path / "whole.gguf", replace(SMALL, arch="stablelm", odd="blk.0.attn_q_norm.weight"), TYPE.F32)
    path = rewritten(whole, tmp_path / "model.gguf", tensor="blk.0.ffn_norm.weight")
    with pytest.raises(
        UnsupportedModelError, match=r"the tensor 'blk\.0\.attn_q_norm\.weight', which the family stablelm"
    ):
        read(path)


def test_values_that_change_nothing_are_not(tmp_path: Path) -> None:
    extra = {"llama.attention.causal": True, "llama.expert_count": 0, "llama.logit_scale": 0.0, "general.type": "model"}
    assert read(write(tmp_path / "model.gguf", replace(SMALL, extra=extra), TYPE.F32)).rope.dim == 32


@pytest.mark.parametrize("name", ARCHES)
def test_a_tensor_that_the_family_does_not_use_is_refused(tmp_path: Path, name: str) -> None:
    shape = replace(
        SMALL, arch=name, extra={f"{name}.{scale}": 1.5 for scale in ARCHES[name].needs},
        local=(SMALL.width, SMALL.kv_heads) if ARCHES[name].sized else (0, 0),
    )  # fmt: skip
    if ARCHES[name].instead is not None:
        keys = ("shortconv.l_cache", "ssm.conv_kernel", "ssm.state_size", "ssm.time_step_rank", "ssm.group_count")
        extra = {f"{name}.{key}": 3 for key in keys} | {
            f"{name}.ssm.inner_size": 9,
            f"{name}.full_attention_interval": 1,
        }
        shape = replace(shape, extra=extra)
    odd = "blk.0.attn_sinks.weight" if ARCHES[name].rope_divisors else "rope_freqs.weight"
    path = write(tmp_path / "model.gguf", shape, TYPE.F32)
    assert read(path).arch is ARCHES[name]
    with pytest.raises(UnsupportedModelError, match=f"the tensor '{odd}', which the family {name}"):
        read(write(tmp_path / "odd.gguf", replace(shape, odd=odd), TYPE.F32))


@pytest.mark.parametrize(
    ("name", "tensor"),
    [
        ("qwen2", "blk.0.attn_k.bias"),
        ("qwen3", "blk.0.attn_q_norm.weight"),
        ("gpt2", "position_embd.weight"),
        ("gpt2", "blk.0.attn_qkv.weight"),
        ("gpt2", "blk.0.ffn_norm.bias"),
        ("gpt2", "output_norm.bias"),
    ],
)
def test_a_missing_tensor_is_named(tmp_path: Path, name: str, tensor: str) -> None:
    path = write(tmp_path / "model.gguf", replace(SMALL, arch=name), TYPE.F32)
    with pytest.raises(GgufError, match=f"lacks the tensor '{tensor}'"):
        read(rewritten(path, tmp_path / "less.gguf", tensor=tensor))


def test_another_familys_tensors_are_refused(tmp_path: Path) -> None:
    path = write(tmp_path / "model.gguf", replace(SHAPES["gpt2"], layers=1), TYPE.F32)
    with pytest.raises(ModelError):
        read(rewritten(path, tmp_path / "wrong.gguf", "llama"))


@pytest.mark.parametrize(
    ("extra", "error", "said"),
    [
        ({"attention.sliding_window_pattern": [True]}, GgufError, "has 1 entries for 2 layers"),
        ({"attention.sliding_window_pattern": ["local", "global"]}, GgufError, "has the entry 'local'"),
        ({"attention.sliding_window_pattern": [1, 2]}, GgufError, "has the entry 2"),
        ({"attention.key_length_swa": 16}, UnsupportedModelError, "keys of another size"),
        ({"rope.dimension_count_swa": 16}, UnsupportedModelError, "rotates another part of heads"),
        ({"final_logit_softcapping": -1.0}, GgufError, "final_logit_softcapping = -1"),
        ({"attn_logit_softcapping": -1.0}, GgufError, "attn_logit_softcapping = -1"),
        ({"attention.scale": 0.5}, UnsupportedModelError, "scales attention by a number of its own"),
    ],
)
def test_a_gemma_with_other_layers_or_caps_is_refused(
    tmp_path: Path, extra: dict[str, object], error: type[Exception], said: str
) -> None:
    shape = replace(SMALL, arch="gemma2", layers=2, extra={f"gemma2.{key}": value for key, value in extra.items()})
    with pytest.raises(error, match=said):
        read(write(tmp_path / "model.gguf", shape, TYPE.F32))


@pytest.mark.parametrize(("factor", "scale"), [({}, 0.25), ({"llama.rope.scaling.factor": 0.0}, 1.0)])
def test_the_older_name_of_a_ropes_factor_counts_where_the_newer_is_missing(
    tmp_path: Path, factor: dict[str, float], scale: float
) -> None:
    """As in llama.cpp, where 0 is none and no reason to look further."""
    shape = replace(SMALL, extra={"llama.rope.scale_linear": 4.0, **factor})
    assert read(write(tmp_path / "model.gguf", shape, TYPE.F32)).rope.scale == scale


def test_a_cap_of_0_is_none(tmp_path: Path) -> None:
    caps = {"gemma2.attn_logit_softcapping": 0.0, "gemma2.final_logit_softcapping": 0.0}
    config = read(write(tmp_path / "model.gguf", replace(SMALL, arch="gemma2", extra=caps), TYPE.F32))
    assert (config.score_cap, config.logit_cap) == (None, None)
    config = read(write(tmp_path / "model.gguf", replace(SMALL, arch="gemma2"), TYPE.F32))
    assert (config.score_cap, config.logit_cap) == (50.0, 30.0)


@pytest.mark.parametrize("change", [{"block_count": 1}, {"attention.shared_kv_layers": 10}])
def test_more_layers_than_there_are_cannot_share_keys(tmp_path: Path, change: dict[str, int]) -> None:
    path = write(tmp_path / "model.gguf", SHAPES["gemma4 small"], TYPE.F32)
    changed = {f"gemma4.{key}": value for key, value in change.items()}
    with pytest.raises(GgufError, match=r"shared_kv_layers = \d+ of \d layers"):
        read(rewritten(path, tmp_path / "changed.gguf", **changed))


def test_windowed_layers_bound_no_context(tmp_path: Path) -> None:
    config = read(write(tmp_path / "model.gguf", SHAPES["gemma3"], TYPE.F32))
    assert config.longest == SHAPES["gemma3"].context
    assert [op.window for op in config.network.attends] == [9, 9, None]


@pytest.mark.parametrize(
    ("pattern", "windows"), [([False, True, False], [None, 9, None]), (0, [9] * 3), (1, [None] * 3)]
)
def test_a_file_says_which_layers_attend_within_the_window(
    tmp_path: Path, pattern: object, windows: list[int | None]
) -> None:
    """llama.cpp's newest sources read a list so; the release that the tests run ignores it."""
    extra = {**SHAPES["gemma3"].extra, "gemma3.attention.sliding_window_pattern": pattern}
    config = read(write(tmp_path / "model.gguf", replace(SHAPES["gemma3"], extra=extra), TYPE.F32))
    assert [op.window for op in config.network.attends] == windows


def test_blocks_that_guess_tokens_ahead_are_left_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """EXAONE 4.5's converter writes one behind the 64 others, which it counts with them; llama.cpp reads none of it."""
    made, shape = tiny_llama.weights, SHAPES["exaone4 of 64 layers"]
    path = write(tmp_path / "model.gguf", shape, TYPE.F32)

    def with_one_more(shape: Shape, seed: int) -> dict[str, np.ndarray]:
        return {**made(shape, seed), "blk.64.nextn.enorm.weight": np.ones(64, np.float32)}

    monkeypatch.setattr(tiny_llama, "weights", with_one_more)
    within = [at % 4 < 3 for at in range(64)]
    extra = {**shape.extra, "exaone4.nextn_predict_layers": 1, "exaone4.attention.sliding_window_pattern": within}
    more = write(tmp_path / "more.gguf", replace(shape, layers=65, extra=extra), TYPE.F32)
    config = read(more)
    assert (config.layers, config.network) == (64, read(path).network)
    assert [op.window for op in config.network.attends] == [9 if one else None for one in within]
    with Gguf.open(more) as file:
        assert "blk.64.attn_q.weight" in file.tensors
        assert not any(".64." in info.name for info in config.tensors(file))
    with pytest.raises(UnsupportedModelError, match=r"the tensor 'blk.64.nextn.enorm.weight', which the family"):
        read(rewritten(more, tmp_path / "all.gguf", **{"exaone4.nextn_predict_layers": None}))
    for count in (65, 66):
        with pytest.raises(GgufError, match=f"exaone4.nextn_predict_layers = {count} of 65 blocks"):
            read(rewritten(more, tmp_path / "wrong.gguf", **{"exaone4.nextn_predict_layers": count}))


def test_a_sliding_window_bounds_the_context(tmp_path: Path) -> None:
    shape = replace(SMALL, extra={"llama.attention.sliding_window": 48})
    config = read(write(tmp_path / "model.gguf", shape, TYPE.F32))
    assert (config.context, config.window, config.longest, config.positions()) == (128, 48, 48, 48)
    assert config.positions(48) == 48
    with pytest.raises(ContextError, match="sliding window of 48"):
        config.positions(49)
    wide = replace(SMALL, extra={"llama.attention.sliding_window": 4096})
    assert read(write(tmp_path / "wide.gguf", wide, TYPE.F32)).positions() == 128


SCALING = "llama.rope.scaling"
YARN = {f"{SCALING}.type": "yarn", f"{SCALING}.factor": 4.0}


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"llama.attention.sliding_window": -5}, "llama.attention.sliding_window = -5"),
        ({"llama.attention.layer_norm_rms_epsilon": -1e-5}, "layer_norm_rms_epsilon = -1e-05"),
        ({"llama.attention.layer_norm_rms_epsilon": math.nan}, "layer_norm_rms_epsilon = nan"),
        ({"llama.rope.freq_base": 0.0}, "llama.rope.freq_base = 0"),
        ({"llama.rope.freq_base": -10.0}, "llama.rope.freq_base = -10"),
        ({"llama.rope.freq_base": math.inf}, "llama.rope.freq_base = inf"),
        ({**YARN, "llama.rope.freq_base": 1.0}, "llama.rope.freq_base = 1"),
        ({f"{SCALING}.factor": -2.0}, "llama.rope.scaling.factor = -2"),
        ({"llama.rope.scale_linear": math.nan}, "llama.rope.scale_linear = nan"),
        ({**YARN, f"{SCALING}.attn_factor": 0.0}, "attn_factor = 0"),
        ({**YARN, f"{SCALING}.yarn_beta_fast": -32.0}, "yarn_beta_fast = -32"),
        ({**YARN, f"{SCALING}.yarn_beta_slow": math.nan}, "yarn_beta_slow = nan"),
    ],
)
def test_numbers_that_no_model_has_are_refused_by_name(tmp_path: Path, changes: dict[str, object], said: str) -> None:
    path = rewritten(write(tmp_path / "model.gguf", SMALL, TYPE.F32), tmp_path / "wrong.gguf", **changes)
    with pytest.raises(GgufError, match=re.escape(said)) as refused:
        read(path)
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({f"{SCALING}.type": "longrope"}, "scales its rope by 'longrope'"),
        ({"llama.attention.head_count_kv": [1, 2]}, "has layers of different llama.attention.head_count_kv"),
    ],
)
def test_what_we_do_not_run_says_what_to_do(tmp_path: Path, changes: dict[str, object], said: str) -> None:
    path = rewritten(write(tmp_path / "model.gguf", SMALL, TYPE.F32), tmp_path / "other.gguf", **changes)
    with pytest.raises(UnsupportedModelError, match=f"{re.escape(said)}.*: choose another model$"):
        read(path)


def test_ollamas_names_of_ropes_bases_are_read(tmp_path: Path) -> None:
    """Its Gemma 3 has no others, and rotates nothing rightly with llama.cpp's usual base."""
    own = {"gemma3.rope.global.freq_base": 2e6, "gemma3.rope.local.freq_base": 3e4}
    usual = {"gemma3.rope.freq_base": 1e6, "gemma3.rope.freq_base_swa": 2e4}
    plain = {key: value for key, value in SHAPES["gemma3"].extra.items() if key not in usual}
    for extra, bases in ((own, [3e4, 3e4, 2e6]), (own | usual, [2e4, 2e4, 1e6]), (plain, [1e4] * 3)):
        shape = replace(SHAPES["gemma3"], extra=plain | extra)
        config = read(write(tmp_path / "model.gguf", shape, TYPE.F32))
        assert [op.rope.base for op in config.network.attends] == bases


@pytest.mark.parametrize(("fast", "slow"), [(None, None), (8.0, 2.0), (64.0, 0.5)])
def test_yarns_betas_are_the_files(tmp_path: Path, fast: float | None, slow: float | None) -> None:
    """Pairs that turn more often within the trained context stay, those that turn seldom are slowed by the factor.

    llama.cpp reads both for grok and mistral3 alone; converters write them for every family, as they were trained.
    """
    betas = {"yarn_beta_fast": fast, "yarn_beta_slow": slow}
    changes = {f"{SCALING}.{name}": value for name, value in betas.items() if value is not None}
    changes[f"{SCALING}.original_context_length"] = 4096  # type: ignore[assignment]
    shape = replace(SMALL, dim=128, heads=1, kv_heads=1)
    path = rewritten(write(tmp_path / "model.gguf", shape, TYPE.F32), tmp_path / "yarn.gguf", **YARN, **changes)
    rope = read(path).rope
    cos, sin = rope.tables(2)[:, 1].astype(np.float64)
    found, pairs = np.arctan2(sin, cos), np.arange(64)
    plain = 10000.0 ** (-pairs / 64)
    turns = 4096 * plain / (2 * np.pi)
    # A pair at a border belongs to what comes after it: the ramp begins and ends at whole pairs.
    stays = pairs <= np.flatnonzero(turns >= (fast or 32.0))[-1]
    slowed = pairs >= np.flatnonzero(turns <= (slow or 1.0))[0]
    np.testing.assert_allclose(found[stays], plain[stays], rtol=1e-6)
    np.testing.assert_allclose(found[slowed], plain[slowed] / 4, rtol=1e-5)
    between = ~stays & ~slowed
    assert (found[between] < plain[between] * (1 - 1e-3)).all()
    assert (found[between] > plain[between] / 4 * (1 + 1e-3)).all()


def test_positions_that_yarn_stretches_lose_nothing_of_their_cosines(tmp_path: Path) -> None:
    """Only where it squeezes them they grow, as in llama.cpp and Hugging Face's models."""
    path = write(tmp_path / "model.gguf", SMALL, TYPE.F32)
    for factor, growth in ((0.5, 1.0), (1.0, 1.0), (4.0, 1 + 0.1 * math.log(4))):
        changes = {**YARN, f"{SCALING}.factor": factor}
        tables = read(rewritten(path, tmp_path / "yarn.gguf", **changes)).rope.tables(3)
        np.testing.assert_allclose(np.hypot(*tables), growth, rtol=1e-6)


@pytest.mark.parametrize("scale", [1e-9, 1e9])
def test_a_scale_that_leaves_nothing_to_normalize_is_refused(tmp_path: Path, scale: float) -> None:
    shape = replace(SMALL, arch="granite", extra={"granite.residual_scale": scale})
    with pytest.raises(GgufError, match=re.escape(f"granite.residual_scale = {scale:g}")):
        read(write(tmp_path / "model.gguf", shape, TYPE.F32))


def test_numbers_at_their_bounds_are_not_refused(tmp_path: Path) -> None:
    changes = {"llama.attention.layer_norm_rms_epsilon": 0.0, f"{SCALING}.factor": 0.0, "llama.rope.freq_base": 1.0}
    path = rewritten(write(tmp_path / "model.gguf", SMALL, TYPE.F32), tmp_path / "odd.gguf", **changes)
    config = read(path)
    assert (config.eps, config.rope.scale, config.rope.base) == (0, 1, 1)


def test_tokens_that_the_file_does_not_list_are_missed(tmp_path: Path) -> None:
    """A model of 600 rows may choose token 599; one that lists more than it has only never says them."""
    for rows, refused in ((600, True), (300, False), (299, False)):
        path = write(tmp_path / "model.gguf", replace(SMALL, vocab=rows), TYPE.F32, vocabulary=letters(300))
        with Gguf.open(path) as file:
            config = Config.read(file)
            with pytest.raises(GgufError, match="300 tokens for 600 rows of token_embd") if refused else nullcontext():
                config.check_tokens(file)


def test_a_model_without_a_tokenizer_lacks_no_token(tmp_path: Path) -> None:
    path = rewritten(
        write(tmp_path / "model.gguf", SMALL, TYPE.F32), tmp_path / "mute.gguf", **{"tokenizer.ggml.tokens": None}
    )
    with Gguf.open(path) as file:
        Config.read(file).check_tokens(file)
