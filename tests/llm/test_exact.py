"""Logits in float64 a layer at a time are the float32 reference's; roundings are those of the plans."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import exact
import numpy as np
import pytest
from exact import Asked, Parts, Weights, by_sets, by_units, chain, not_at_all, nothing, only, together
from interpreter import Travelling
from tiny_llama import SHAPES, TYPE, Shape, write

from tegrad.llm.errors import UnsupportedModelError
from tegrad.llm.gguf import Gguf
from tegrad.llm.reference import Past, Reference
from tegrad.llm.schedule import UNIT
from tegrad.llm.schedule_build import deal

TOKENS = [5, 17, 200, 3, 3, 91, 250, 1, 42, 7]
MODELS = {
    "llama": (SHAPES["plain"], TYPE.Q6_K, {"attn_v": TYPE.Q4_K}),
    "yarn": (SHAPES["yarn"], TYPE.F32, {}),
    "qwen2": (SHAPES["qwen2"], TYPE.Q8_0, {}),
    "qwen3": (SHAPES["qwen3"], TYPE.BF16, {}),
    "gemma3": (SHAPES["gemma3"], TYPE.Q8_0, {}),
    "gemma2": (SHAPES["gemma2"], TYPE.F16, {}),
    "granite": (replace(SHAPES["granite"], bias=False), TYPE.Q6_K, {}),
    "smollm3": (replace(SHAPES["smollm3"], layers=4), TYPE.Q4_0, {}),
    "mistral3": (SHAPES["mistral3"], TYPE.Q8_0, {}),
    "olmo2": (SHAPES["olmo2"], TYPE.Q8_0, {}),
    "phi3": (SHAPES["phi3"], TYPE.Q8_0, {}),
    "glm4": (SHAPES["glm4"], TYPE.Q8_0, {}),
    "hunyuan": (SHAPES["hunyuan"], TYPE.Q8_0, {}),
    "minicpm": (SHAPES["minicpm"], TYPE.Q8_0, {}),
    "exaone4": (SHAPES["exaone4"], TYPE.Q8_0, {}),
    "cohere2": (SHAPES["cohere2"], TYPE.Q8_0, {}),
    "lfm2": (SHAPES["lfm2"], TYPE.Q8_0, {}),
    "qwen35": (SHAPES["qwen35"], TYPE.Q8_0, {}),
    "gemma4": (SHAPES["gemma4"], TYPE.Q8_0, {}),
    "gemma4 small": (SHAPES["gemma4 small"], TYPE.Q8_0, {}),
    "gemma4 in blocks": (SHAPES["gemma4 small"], TYPE.Q8_0, {"per_layer_model_proj": TYPE.Q6_K}),
    "divisors": (Shape(rope_freqs=True, tied=True, vocab=303), TYPE.Q4_0, {}),
}


def test_pairs_turn_as_in_a_session_of_so_many_positions(tmp_path: Path) -> None:
    """Beyond the trained context phi3 has other divisors."""
    trained = SHAPES["phi3"].extra["phi3.rope.scaling.original_context_length"]
    path = write(tmp_path / "model.gguf", replace(SHAPES["phi3"], context=2 * trained), TYPE.F16)
    near, far = (Reference(path, context).logits(TOKENS) for context in (trained, trained + 1))
    assert np.abs(near - far).max() > 0.01 * near.std()
    with Gguf.open(path) as file, Weights(file, 2) as weights:
        parts = [Parts(weights, trained), Parts(weights, trained + 1), Parts(weights)]
        ways = [chain(one, TOKENS, [not_at_all], nothing(one.config), 0, "F32") for one in parts]
        found = [each for (each,) in together(weights, ways)]
    for each, wanted in zip(found, (near, far, far), strict=True):
        np.testing.assert_allclose(each, wanted, rtol=1e-4, atol=2e-5 * np.abs(wanted).max())


def logits(path: Path, ways: Any, threads: int = 2) -> list[Any]:
    with Gguf.open(path) as file, Weights(file, threads) as weights:
        return together(weights, ways(Parts(weights)))


@pytest.mark.parametrize("name", MODELS)
def test_logits_are_the_float_references_with_and_without_a_past(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    monkeypatch.setattr(exact, "WEIGHTS_AT_ONCE", 3000)  # several blocks of each matrix, none of them all rows
    shape, kind, kinds = MODELS[name]
    path = write(tmp_path / "model.gguf", shape, kind, kinds=kinds)
    reference = Reference(path)
    wanted = reference.logits(TOKENS)

    def begin(parts: Parts) -> list[Any]:
        return [chain(parts, TOKENS, [not_at_all] * 2, nothing(parts.config), 0, "F32")]

    [found] = logits(path, begin)
    assert found.shape == (2, *wanted.shape)
    for each in found:
        np.testing.assert_allclose(each, wanted, rtol=1e-4, atol=2e-5 * np.abs(wanted).max())
    for stored in ("F16", "Q8_0") if reference.config.head_dim % 32 == 0 else ("F16",):
        past = Past(stored)
        reference.logits(TOKENS[:6], past)
        sides = {
            layer: tuple(np.moveaxis(side[layer][:, :, 0], 0, 1) for side in (dict(past.keys), dict(past.values)))
            for layer in past.keys
        } | {layer: ([kept.copy()], past.states.get(layer, ())) for layer, kept in past.convolved.items()}
        wanted = reference.logits(TOKENS[6:], past)

        def go_on(parts: Parts, sides: Any = sides, stored: Any = stored) -> list[Any]:
            return [chain(parts, TOKENS[6:], [not_at_all], sides.__getitem__, 6, stored)]

        [[found]] = logits(path, go_on)
        np.testing.assert_allclose(found, wanted, rtol=1e-4, atol=1e-3 * np.abs(wanted).max())
        assert np.sqrt(((found - wanted) ** 2).mean()) < 1e-4 * wanted.std()


def test_ways_share_each_matrix_and_keep_in_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write(tmp_path / "model.gguf", SHAPES["plain"], TYPE.Q8_0)
    asked: list[str] = []
    times = Weights.times

    def counted(self: Weights, name: str, x: Any) -> Any:
        asked.append(name)
        return times(self, name, x)

    monkeypatch.setattr(Weights, "times", counted)

    def three(parts: Parts) -> list[Any]:
        own = (parts, TOKENS, [not_at_all, by_sets], nothing(parts.config), 0, "F16")
        return [chain(*own), chain(*own), chain(parts, TOKENS[:2], [not_at_all], nothing(parts.config), 0, "F16")]

    one, same, first = logits(path, three)
    assert len(asked) == len(set(asked)) == 7 * SHAPES["plain"].layers + 1
    np.testing.assert_allclose(one, same, rtol=1e-9, atol=1e-9)
    np.testing.assert_allclose(one[0, :2], first[0], rtol=1e-9, atol=1e-9)

    def astray() -> Any:
        yield Asked(("output.weight",), np.zeros(SHAPES["plain"].dim))

    with pytest.raises(ValueError, match="in the same order"):
        logits(path, lambda parts: [*three(parts), astray()])


@pytest.mark.parametrize("ctas", [1, 4, 5, 7, 132])
@pytest.mark.parametrize("role", ["qkv", "gate", "down", "logits"])
def test_units_are_rounded_as_they_travel_in_the_twin(tmp_path: Path, ctas: int, role: Any) -> None:
    """Whoever writes them: sets of 16 of one CTA, and those whose halves two of them wrote."""
    path = write(tmp_path / "model.gguf", replace(SHAPES["plain"], layers=1), TYPE.Q8_0)
    with Gguf.open(path) as file, Weights(file, 1) as weights:
        config = weights.config
    size = config.size("ffn" if role == "down" else "dim")
    x = np.random.default_rng(ctas).standard_normal((3, size)) * np.repeat([1.0, 30.0, 0.02, 1.0], size // 4)
    x[0, :16] = 0
    found = by_units(config, ctas)(role, x)
    for vector, got in zip(x.astype(np.float32), found, strict=True):
        travelling = Travelling(size)
        for first, units in deal(size // UNIT, ctas):
            own = vector[first * UNIT : (first + units) * UNIT]
            if units:
                travelling.write(first * UNIT, own, own, False, 0)
        wanted = travelling.staged(False)
        # A float32 may lie on the other side of a half.
        assert (np.abs(got - wanted) > 1e-6 * np.abs(vector).max()).mean() < 2e-3
    attention = by_units(config, ctas)("output", x[:, : config.size("mixed")])
    np.testing.assert_array_equal(attention, by_units(config, 1)("output", x[:, : config.size("mixed")]))


def test_sets_are_rounded_to_half_a_step_and_only_where_it_is_asked_for() -> None:
    x = np.random.default_rng(0).standard_normal((2, 64))
    x[1, 16:32] = 0
    found = by_sets("qkv", x)
    step = np.repeat(np.abs(x.reshape(2, -1, 16)).max(axis=2) / 127, 16, axis=1)
    assert (np.abs(found - x) <= step / 2 + 1e-12).all()
    assert 0.2 < np.sqrt(((found - x) ** 2).mean()) / step.mean() < 0.4
    np.testing.assert_array_equal(only(by_sets, "down")("qkv", x), x)
    np.testing.assert_array_equal(only(by_sets, "qkv")("qkv", x), found)


def test_a_family_without_gates_is_refused(tmp_path: Path) -> None:
    for name, said in (("gpt2", "gpt2 is not evaluated so"), ("grouped", "is not added here")):
        path = write(tmp_path / f"{name}.gguf", SHAPES[name], TYPE.F16)
        with pytest.raises(UnsupportedModelError, match=said):
            logits(path, lambda parts: [])
