"""What the hardware cases at depth compare, on the board with small models: right steps pass, and wrong ones do not.

A wrong step is a kernel with one change: a norm without its epsilon, or attention that skips one key.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from small_tunings import SMALL
from tiny_llama import SHAPES, TYPE, Shape, write

from tegrad.llm import programs
from tegrad.llm.config import Config
from tegrad.llm.gguf import Gguf
from tegrad.llm.persistent import PersistentPlan

sys.path.append(str(Path(__file__).parents[1] / "hardware"))
import depths
from one_launch import Distances, Filling, Found, Model, Place, compare, modelled
from stages import Off

TOKENS = (5, 17, 200)
PLACES = (Place(256, 0, False), Place(256, 200, False, True, True), Place(256, 200, True, True, True))
QWEN3 = replace(SHAPES["qwen3"], heads=4, context=512, layers=1)
"""Its epsilon is so large that nothing is right without it."""
GEMMA = replace(SHAPES["gemma3"], context=1024, heads=2, head_dim=256)
QWEN35 = replace(SHAPES["qwen35"], context=1024, layers=3, eps=1e-2)
LFM2 = replace(SHAPES["lfm2"], context=1024, layers=3)
COHERE = replace(SHAPES["cohere2"], context=512)
GEMMA4 = replace(SHAPES["gemma4"], context=1024, layers=3)
SHARING = replace(SHAPES["gemma4 small"], context=1024, layers=6)
FAR = (Place(640, 580, True, True, True),)
"""Further than the rings of windows, and of LFM2's convolutions, have rows."""


def taken(
    device: Any, path: Path, shape: Shape, kind: TYPE, places: Any = PLACES, ring: int = 0, **kinds: TYPE
) -> list[Found]:
    write(path, shape, kind, kinds=kinds)
    one = partial(PersistentPlan, tuning=replace(SMALL, attention_pipeline=ring), ctas=4)
    return compare(device, path, places, TOKENS, 2, one, threads=2)


def complaints(found: list[Found]) -> list[str]:
    return [what for each in found for what in depths.wrong(each, 2, {}, "small")]


@pytest.mark.board
@pytest.mark.parametrize(
    ("shape", "kind", "ring", "kinds"),
    [
        pytest.param(replace(SHAPES["plain"], context=512), TYPE.Q6_K, 0, {"attn_v": TYPE.Q4_K}, id="llama Q6_K"),
        pytest.param(replace(SHAPES["plain"], context=512), TYPE.Q8_0, 2, {}, id="ring", marks=pytest.mark.long),
        pytest.param(GEMMA, TYPE.Q8_0, 1, {}, id="gemma3 Q8_0", marks=pytest.mark.long),
        pytest.param(QWEN3, TYPE.F16, 2, {}, id="qwen3 F16", marks=pytest.mark.long),
        pytest.param(replace(SHAPES["qwen2"], context=512), TYPE.Q8_0, 0, {}, id="qwen2 Q8_0", marks=pytest.mark.long),
        pytest.param(COHERE, TYPE.Q8_0, 0, {}, id="cohere2 Q8_0", marks=pytest.mark.long),
        pytest.param(LFM2, TYPE.Q4_K, 0, {}, id="lfm2 Q4_K"),
        pytest.param(QWEN35, TYPE.Q4_K, 0, {}, id="qwen35 Q4_K"),
        pytest.param(GEMMA4, TYPE.Q8_0, 0, {}, id="gemma4 Q8_0", marks=pytest.mark.long),
        pytest.param(SHARING, TYPE.Q8_0, 0, {}, id="gemma4 small Q8_0", marks=pytest.mark.long),
    ],
)
def test_right_steps_are_off_by_their_roundings_alone(
    opened: Any, tmp_path: Path, shape: Shape, kind: TYPE, ring: int, kinds: dict[str, TYPE]
) -> None:
    far = shape in (GEMMA, LFM2, QWEN35, GEMMA4, SHARING)
    places = FAR if far else PLACES
    found = taken(opened, tmp_path / "model.gguf", shape, kind, places, ring, **kinds)
    assert [each.place for each in found] == list(places)
    assert complaints(found) == []
    for each in found:
        plans = {"one"} if shape in (GEMMA, COHERE, GEMMA4, SHARING) else {"one", "many"}
        assert set(each.stages) == (plans if each.place.stepped else set())
        for plan in each.stages:
            attending = sum(bool(shape.delta[0]) or not shape.convolves(at) for at in range(shape.layers))
            for name, layers in each.stages[plan].items():
                whole = attending if (plan, name) == ("one", "products") else shape.layers
                assert len(layers) == (1 if name in ("logits", "scores") else whole)
            off = getattr(each.modelled, f"{plan}_exact")
            together = sum(share**2 for share in each.shares[plan].values()) ** 0.5
            assert together == pytest.approx(off, rel=0.35, abs=1e-9)
        if kind is not TYPE.F16:
            assert 0.003 < each.measured.one_exact < 0.05
            assert each.measured.one_many == pytest.approx(each.modelled.one_many, rel=0.35)
    # The host alone finds the same.
    for each, alone in zip(found, modelled(tmp_path / "model.gguf", 4, places, TOKENS, 2), strict=True):
        assert alone.place == each.place
        assert vars(alone.distances) == pytest.approx(vars(each.modelled), rel=1e-6, abs=1e-12)


WRONG = {
    "an epsilon of many": ("matvec.cu", "rsqrtf(warp_sum(squares) / K + EPS)", "rsqrtf(warp_sum(squares) / K)"),
    "an epsilon of one": ("persistent.cu", "rsqrtf(sum * (1.0f / DIM) + EPS)", "rsqrtf(sum * (1.0f / DIM))"),
    "a key of many": ("attention.cu", "position >= begin &&", "position >= begin && position != 77 &&"),
    "a key of one": ("persistent.cu", "position >= begin &&", "position >= begin && position != 77 &&"),
}
"""The kernel's file, and what of its source is written otherwise."""
LONG = ("an epsilon of one", "a key of many")


def changed(monkeypatch: pytest.MonkeyPatch, file: str, before: str, after: str) -> None:
    right: Callable[[str], str] = programs.source

    def source(name: str) -> str:
        text = right(name)
        if name == file:
            assert before in text
            text = text.replace(before, after)
        return text

    monkeypatch.setattr(programs, "source", source)


@pytest.mark.board
@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.long] if name in LONG else []) for name in WRONG]
)
def test_a_wrong_step_is_noticed_in_its_stage(
    opened: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    changed(monkeypatch, *WRONG[name])
    found = taken(opened, tmp_path / "model.gguf", QWEN3, TYPE.Q8_0, PLACES[1:2])
    said = complaints(found)
    plan = name.split()[-1]
    if "epsilon" in name:
        assert any(what.startswith(f"{plan}: queries, keys and values of layer 0 is") for what in said)
    else:
        assert any(what.startswith(f"{plan}: attention of layer 0 is") for what in said)
        assert found[0].measured.one_many < depths.UNRECORDED  # which the logits alone would not have told
    other = {"one": "many", "many": "one"}[plan]
    assert not any(what.startswith(f"{other}: ") for what in said)


@pytest.mark.parametrize("q8", [False, True])
def test_keys_and_values_are_as_large_as_a_models(tmp_path: Path, q8: bool) -> None:
    """An f16 cache's buffers, which stand for its scales too, were once filled like those: 0.015 and all alike."""
    path = write(tmp_path / "model.gguf", replace(SHAPES["qwen3"], kv_heads=3), TYPE.F16)
    with Gguf.open(path) as file:
        config = Config.read(file)
    filling, positions = Filling(config, q8), 700
    for layer in range(2):
        for side in filling.cached(positions, 600)(layer):
            heads = [side[head].astype(np.float64) for head in range(3)]
            assert len(side) == len([*side]) == 3
            for head in heads:
                assert head.shape == (600, config.head_dim)
                assert 0.9 < head.std() < 1.2
                assert abs(head.mean()) < 0.02
            assert not np.array_equal(heads[0], heads[1])
    # The layout is the cache's: heads one after the other, of all its positions. Scales come again later.
    whole = np.concatenate([*filling.cached(positions, positions)(0)[0]]).reshape(-1)
    again = np.array_equal(whole[Filling.COUNT :], whole[: -Filling.COUNT])
    assert again is not q8


# --- the limit --------------------------------------------------------------------------------------------------------


def found(**changes: Any) -> Found:
    measured = Distances(0.03, 0.02, 0.04)
    made = Found(Place(4096, 2100, False), measured, measured, 100, {}, {})
    return replace(made, **changes)


def kept(one: float, many: float, place: Place) -> dict[str, Any]:
    row = found(place=place, measured=Distances(one, many, 0.0))
    return {"1b-q6k": {"places": [depths.as_json(row)]}}


def test_the_limit_is_twice_the_larger_recorded_distance_from_exact_at_the_place() -> None:
    place = Place(4096, 2100, False)
    record = kept(0.031234567, 0.02, place)
    assert depths.limit(record, "1b-q6k", place) == (pytest.approx(0.062470), "2 times what was recorded")
    assert depths.limit(kept(0.01, 0.03, place), "1b-q6k", place)[0] == pytest.approx(0.06)
    # What is nearly exact may be off by what floats make.
    assert depths.limit(kept(1e-7, 1e-7, place), "1b-q6k", place)[0] == 1e-3
    packed = Place(4096, 2100, True)
    assert depths.limit(kept(1e-7, 1e-7, packed), "1b-q6k", packed)[0] == 0.02


def test_without_a_recorded_row_the_limit_says_so() -> None:
    record = kept(0.03, 0.02, Place(4096, 2100, False))
    for model, place in (
        ("1b-q4k", Place(4096, 2100, False)),
        ("1b-q6k", Place(4096, 0, False)),
        ("1b-q6k", Place(4096, 2100, True)),
    ):
        assert depths.limit(record, model, place) == (0.15, "nothing recorded")
        assert "limit 0.1500, nothing recorded" in depths.line(found(place=place), record, model)


def test_each_way_to_be_wrong_has_its_sentence() -> None:
    def said(record: Any = None, **changes: Any) -> list[str]:
        return list(depths.wrong(found(**changes), 100, record or {}, "1b-q6k"))

    assert said() == []
    assert said(kept(0.03, 0.02, found().place)) == []
    [apart] = said(kept(0.015, 0.01, found().place))
    assert apart == "one launch and many differ by 0.0400, allowed 0.0300 (2 times what was recorded)"
    [off] = said(modelled=Distances(0.015, 0.02, 0.0))
    assert off == "one is 0.0300 from exact, its roundings alone 0.0150"
    [bits] = said(same=98)
    assert bits == "2 of 100 steps in one launch gave other bits"
    [stage] = said(stages={"many": {"output": [Off(0.005, 0.0), Off(0.005, 0.02), Off(0.01, 0.002)]}})
    assert stage == "many: attention of layer 1 is 2.0e-02 of its size beyond its rounding"
    nan = float("nan")
    assert len(said(measured=Distances(nan, nan, nan))) == 3
    assert said(stages={"many": {"output": [Off(nan, nan)]}})


def test_a_model_takes_the_place_of_its_older_rows(tmp_path: Path) -> None:
    path = tmp_path / "depths.json"
    assert depths.recorded(path) == {}
    depths.keep(path, "1b-q6k", [found(measured=Distances(0.5, 0.5, 0.5))])
    depths.keep(path, "3b-q6k", [found()])
    depths.keep(path, "1b-q6k", [found()])
    record = depths.recorded(path)
    assert list(record) == ["1b-q6k", "3b-q6k"]
    assert depths.limit(record, "1b-q6k", found().place)[0] == pytest.approx(0.06)
    assert {"date", "machine", "versions", "commit", "times"} < set(record["1b-q6k"])
    assert json.loads(path.read_text())["what"]


def test_what_is_modelled_is_kept_beside_what_is_measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, asked = tmp_path / "depths.json", []
    row = Model(found().place, found().measured, {"one": {"qkv": 0.0123456}}, np.zeros(1))

    def model(file: Path, ctas: int, threads: int) -> list[Model]:
        asked.append((file, ctas))
        return [row]

    monkeypatch.setattr("one_launch.modelled", model)
    monkeypatch.setattr("tegrad.bench.models.provide", Path)
    depths.keep(path, "3b-q6k", [found()])
    depths.keep_modelled(path, "1b-q6k")
    assert asked == [(Path("1b-q6k"), 132)]
    record = depths.recorded(path)
    [kept_row] = record["1b-q6k"]["places"]
    assert kept_row["modelled"] == {"one_exact": 0.03, "many_exact": 0.02, "one_many": 0.04}
    assert kept_row["shares"] == {"one": {"qkv": 0.012346}}
    # Nothing was measured there, so that no limit follows.
    assert depths.limit(record, "1b-q6k", row.place) == (0.15, "nothing recorded")
    assert depths.limit(record, "3b-q6k", row.place)[1] != "nothing recorded"


def test_what_is_recorded_is_of_published_models_at_the_places_of_today() -> None:
    import nv_cases
    from one_launch import PLACES as ALL

    models = nv_cases.published_models()
    measured, alone = depths.recorded(), depths.recorded(depths.ROOT / "results" / "depths-modelled.json")
    assert set(measured) <= set(models)
    assert set(alone) == set(models)
    for model in alone:
        for record in (measured, alone):
            places = [row["place"] for row in record[model]["places"]] if model in record else []
            assert not places or places == [depths._place(place) for place in ALL]
