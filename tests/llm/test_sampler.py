"""The sampler draws what its settings say, and the same again from the same seed."""

import math
import re

import numpy as np
import pytest

from tegrad.llm.errors import ModelError
from tegrad.llm.sampler import SAMPLED, Sampler, Settings, own_options

LOGITS = np.log(np.array([0.1, 0.4, 0.05, 0.3, 0.15], np.float32))


def drawn(sampler: Sampler, count: int = 20_000) -> np.ndarray:
    return np.bincount([sampler(LOGITS) for _ in range(count)], minlength=len(LOGITS)) / count


def test_temperature_zero_takes_the_likeliest() -> None:
    assert Sampler(0)(LOGITS) == 1


def test_temperature_one_draws_by_probability() -> None:
    assert np.abs(drawn(Sampler(1.0, seed=1)) - np.exp(LOGITS)).max() < 0.015


def test_temperature_sharpens_and_flattens() -> None:
    for temperature in (0.5, 2.0):
        expected = np.exp(LOGITS / temperature)
        assert np.abs(drawn(Sampler(temperature, seed=2)) - expected / expected.sum()).max() < 0.015


def test_a_mask_and_biases_leave_what_they_allow_or_an_error() -> None:
    for sampler in (Sampler(0), Sampler(1.0, top_p=0.9, seed=1), Sampler(1.0, top_k=3, min_p=0.1, seed=1)):
        assert {sampler(LOGITS, (), bytes([0b10100])) for _ in range(50)} <= {2, 4}
        assert sampler(LOGITS, (), bytes([0b100])) == 2
        with pytest.raises(ModelError, match="the mask and the biases leave none"):
            sampler(LOGITS, (), bytes(1))
    none = Sampler(1.0, biases=tuple((token, -math.inf) for token in range(5)))
    with pytest.raises(ModelError, match="leave none"):
        none(LOGITS)


def test_top_k_keeps_the_likeliest() -> None:
    assert np.abs(drawn(Sampler(1.0, top_k=2, seed=3)) - [0, 4 / 7, 0, 3 / 7, 0]).max() < 0.015


def test_top_p_keeps_the_smallest_set_that_reaches_it() -> None:
    assert np.abs(drawn(Sampler(1.0, top_p=0.8, seed=4)) - [0, 0.4 / 0.85, 0, 0.3 / 0.85, 0.15 / 0.85]).max() < 0.015
    assert Sampler(1.0, top_p=0.01, seed=5)(LOGITS) == 1


def test_min_p_drops_what_is_far_less_likely_than_the_likeliest() -> None:
    assert np.abs(drawn(Sampler(1.0, min_p=0.5, seed=6)) - [0, 4 / 7, 0, 3 / 7, 0]).max() < 0.015


def test_penalties_lower_what_the_last_tokens_hold() -> None:
    logits = np.array([2, -1, 3, 2.5], np.float32)
    past = [2, 2, 0, 1, 2]
    for settings, expected in (
        ({"repeat": 2.0}, [1, -2, 1.5, 2.5]),
        ({"presence": 1.0}, [1, -2, 2, 2.5]),
        ({"frequency": 1.0}, [1, -2, 0, 2.5]),
        ({"frequency": 1.0, "last_n": 1}, [2, -1, 2, 2.5]),
        ({"repeat": 2.0, "presence": 1.0, "frequency": 0.25}, [-0.25, -3.25, -0.25, 2.5]),
    ):
        sampler = Sampler(0.0, **settings)  # type: ignore[arg-type]
        assert sampler(logits, past) == int(np.argmax(expected)), settings
        weights = np.exp(np.array(expected))
        sampler = Sampler(1.0, seed=8, **settings)  # type: ignore[arg-type]
        found = np.bincount([sampler(logits, past) for _ in range(5000)], minlength=4) / 5000
        assert np.abs(found - weights / weights.sum()).max() < 0.03, settings


def test_equal_seeds_draw_equally() -> None:
    first, second, other = (Sampler(1.0, seed=seed) for seed in (7, 7, 8))
    rows = np.random.default_rng(0).standard_normal((100, 50)).astype(np.float32)
    assert [first(row) for row in rows] == [second(row) for row in rows] != [other(row) for row in rows]


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"temperature": math.inf}, "a temperature of 0 or from 0.001 to 1e+09"),
        ({"top_k": 1 << 31}, "a top-k from 0 to 2147483647"),
        ({"repeat": 1e10}, "a repetition penalty above 0 and up to 1e+09"),
        ({"presence": 1e10}, "presence and frequency penalties from -1e+09 to 1e+09"),
    ],
)
def test_a_setting_that_is_too_large_is_told_the_largest(settings: dict[str, float], said: str) -> None:
    with pytest.raises(ModelError, match=f": give {re.escape(said)}$"):
        Sampler(**settings)  # type: ignore[arg-type]


@pytest.mark.parametrize("settings", [{"temperature": -1}, {"top_k": -1}, {"top_p": 0}, {"temperature": float("nan")}])
def test_settings_without_meaning_are_refused(settings: dict[str, float]) -> None:
    with pytest.raises(ModelError, match="cannot sample"):
        Sampler(**settings)  # type: ignore[arg-type]


def test_a_models_own_options_are_llama_cpps() -> None:
    """Keys and meanings of llama.cpp's common_init_sampler_from_model; what has no meaning here is the nearest."""

    def own(said: dict[str, object] | None = None, **values: object) -> dict[str, object]:
        return own_options({f"general.sampling.{key}": value for key, value in values.items()}, said or {})

    file = {"temp": 0.6, "top_k": 20, "top_p": 0.95, "min_p": 0.05, "penalty_repeat": 1.05, "penalty_last_n": 32}
    whole = {
        "temperature": 0.6, "top_k": 20, "top_p": 0.95, "min_p": 0.05, "repeat_penalty": 1.05, "repeat_last_n": 32,
    }  # fmt: skip
    assert own(**file) == whole
    said = {"top_k": 0, "temperature": 1.0}
    assert own(said, **file) == {name: value for name, value in whole.items() if name not in said}
    assert own({"temperature": 0}, **file) == own({"temperature": 0.0}, **file) == own() == {}
    assert own(temp=-1, top_k=-1, top_p=0, penalty_last_n=-1, penalty_repeat=0) == {
        "temperature": 0, "top_k": 0, "top_p": 1e-6, "repeat_last_n": 1024, "repeat_penalty": 1,
    }  # fmt: skip
    assert own(temp=1e-4, top_k=20.0, top_p=7.0, min_p=2, penalty_last_n=1 << 20) == {
        "temperature": 0, "top_k": 20, "top_p": 1, "min_p": 1, "repeat_last_n": 1024,
    }  # fmt: skip
    assert own(temp=math.nan, top_p="0.5", top_k=True, min_p=[0.1], penalty_repeat=math.inf, mirostat=2) == {}
    for values in (file, {"temp": 5, "top_k": 1e9, "top_p": -3, "min_p": -1, "penalty_repeat": 1e9}):
        Settings(**{SAMPLED[name]: value for name, value in own(**values).items()})  # type: ignore[arg-type]
