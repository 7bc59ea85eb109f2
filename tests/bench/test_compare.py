"""Two results side by side: what changed by more than noise, and what cannot be compared."""

from __future__ import annotations

import itertools
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tegrad.bench import columns
from tegrad.bench.columns import Measured
from tegrad.bench.record import RecordError, Side, make


def told(before: list[float], after: list[float], **how: Any) -> tuple[str, float | None]:
    found = columns.change("x", Measured(tuple(before), "tok/s", **how), Measured(tuple(after), "tok/s", **how))
    return found.verdict, found.chance


def test_what_is_apart_is_a_change_and_what_overlaps_is_none() -> None:
    slow, fast = [100.0, 101, 99, 100.5, 99.5], [110.0, 111, 109, 110.5, 109.5]
    assert told(slow, fast) == ("better", pytest.approx(2 / 252))
    assert told(fast, slow)[0] == "worse"
    assert told(fast, slow, larger_is_better=False)[0] == "better"
    assert told([100.0, 110, 90, 105, 95], [102.0, 111, 92, 106, 96])[0] == "same"


def test_a_change_that_is_sure_but_tiny_is_none() -> None:
    assert told([100.0, 100.1, 100.2, 100.3], [100.5, 100.6, 100.7, 100.8]) == ("same", pytest.approx(2 / 70))


def test_few_samples_have_to_be_further_apart() -> None:
    assert told([100.0], [103.0]) == ("same", None)
    assert told([100.0], [94.0]) == ("worse", None)


def test_the_chance_is_what_trying_every_order_gives() -> None:
    """Every way to choose which values are the first side's, ties among them."""
    one, other = [3.0, 5, 5, 8], [1.0, 3, 5, 9, 2]
    values = one + other
    ranks = [sum(v < value for v in values) + (1 + sum(v == value for v in values)) / 2 for value in values]
    expected = len(one) * (len(values) + 1) / 2
    far = abs(sum(ranks[: len(one)]) - expected)
    ways = list(itertools.combinations(range(len(values)), len(one)))
    hits = sum(abs(sum(ranks[at] for at in chosen) - expected) >= far - 1e-9 for chosen in ways)
    assert columns.by_chance(one, other) == pytest.approx(hits / len(ways))
    assert columns.by_chance([1.0] * 5, [1.0] * 5) == 1


def rows(path: Path, *speeds: float) -> Path:
    row = {"model_type": "llama 1B Q6_K", "backends": "CUDA", "n_prompt": 0, "n_gen": 128, "n_depth": 0}
    path.write_text(json.dumps([{**row, "samples_ts": speeds}]))
    return path


def run(*words: object) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "tegrad", "bench", "compare", *map(str, words)]
    return subprocess.run(command, capture_output=True, text=True, check=False)


def test_the_command_ends_with_1_where_something_became_worse(tmp_path: Path) -> None:
    before, after = rows(tmp_path / "a", 100, 101, 102, 103), rows(tmp_path / "b", 90, 91, 92, 93)
    done = run(before, after)
    assert done.returncode == 1
    assert done.stdout.splitlines()[1].split() == [
        "llama", "1B", "Q6_K", "tg128", "(CUDA)", "101.5", "91.5", "tok/s", "0.901", "0.029", "worse",
    ]  # fmt: skip
    assert run(after, before).returncode == 0
    (found,) = json.loads(run(before, after, "--json").stdout)
    assert (found["verdict"], found["before"]) == ("worse", 101.5)


def test_samples_files_and_folders_of_them_are_compared_by_figure(tmp_path: Path) -> None:
    for folder, value in (("a", 10.0), ("b", 5.0)):
        samples = [value, value + 0.1, value + 0.2, value + 0.3]
        record = make("token-gap-us", "", "us", Side("tegrad", "", samples), larger_is_better=False)
        record.dump(tmp_path / folder / "token-gap-us.json")
    (found,) = columns.compare(columns.read(tmp_path / "a"), columns.read(tmp_path / "b" / "token-gap-us.json"))
    assert (found.name, found.verdict, found.ratio > 1.9) == ("token-gap-us", "better", True)


def test_what_cannot_be_compared_is_said(tmp_path: Path) -> None:
    (tmp_path / "text").write_text("no JSON")
    (tmp_path / "other").write_text('[{"a": 1}]')
    (tmp_path / "none").mkdir()
    for name, why in (
        ("text", "cannot be read"),
        ("other", "a row lacks"),
        ("none", "holds no measurements"),
        ("no", "cannot be read"),
    ):
        with pytest.raises(RecordError, match=why):
            columns.read(tmp_path / name)
    one = {"x": Measured((1.0,), "us")}
    with pytest.raises(RecordError, match="nothing is in both"):
        columns.compare(one, {"y": Measured((1.0,), "us")})
    with pytest.raises(RecordError, match="x is in us and in ms"):
        columns.compare(one, {"x": Measured((1.0,), "ms")})


def test_a_prompt_with_tokens_after_it_is_a_test_of_its_own_and_rows_alike_are_refused(tmp_path: Path) -> None:
    """What `llama-bench -p 512 -n 128 -pg 512,128` and `llama-bench -t 4,8` print."""
    about = {"model_type": "m", "backends": "CUDA", "n_depth": 0}
    tests = [(512, 0, 100.0), (0, 128, 10.0), (512, 128, 40.0)]
    found = [{**about, "n_prompt": p, "n_gen": n, "samples_ts": [speed]} for p, n, speed in tests]
    (tmp_path / "rows").write_text(json.dumps(found))
    assert {name: one.samples for name, one in columns.read(tmp_path / "rows").items()} == {
        "m pp512 (CUDA)": (100.0,), "m tg128 (CUDA)": (10.0,), "m pp512+tg128 (CUDA)": (40.0,),
    }  # fmt: skip
    (tmp_path / "rows").write_text(json.dumps([found[0] | {"n_threads": count} for count in (4, 8)]))
    with pytest.raises(RecordError, match=r"m pp512 \(CUDA\) is there twice"):
        columns.read(tmp_path / "rows")


def test_json_lines_are_read_and_a_load_is_a_time(tmp_path: Path) -> None:
    load = {"model_type": "m", "backends": "tegrad", "test": "load", "samples_ns": [2_000_000_000]}
    speed = {"model_type": "m", "backends": "tegrad", "test": "pp8", "samples_ts": [5.0]}
    (tmp_path / "lines").write_text(f"{json.dumps(load)}\n{json.dumps(speed)}\n")
    assert columns.read(tmp_path / "lines") == {
        "m load (tegrad)": Measured((2.0,), "s", larger_is_better=False), "m pp8 (tegrad)": Measured((5.0,), "tok/s"),
    }  # fmt: skip
