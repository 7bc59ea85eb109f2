"""By how much the logits of a step in one launch and in many differ on models of full size, and how much may be.

    python tests/hardware/depths.py results/hardware/depths-h200.json 1b-q6k 3b-q6k    these models, kept there
    python tests/hardware/depths.py OUT.json                                          every published one
    python tests/hardware/depths.py OUT.json --modelled 3b-q6k     what roundings alone would cause; needs no device

Runs the cases `steps_in_one_launch[MODEL]` of nv_cases.py, each in a process of its own, and keeps what they find
(one_launch.py says what that is). Rows of other models stay in the file. With TEGRAD_BOARD set it runs on a board.

What is right (`wrong`):

- the logits of one launch and of many differ by FACTOR times the larger of the two recorded distances from exact
  logits at the place, at most: two vectors can differ by the sum of what each is off, and either may be as far off as
  the worse one was when it was recorded. Where RECORD has no such row they may differ by UNRECORDED;
- neither is further from exact logits than MORE times what roundings to int8 alone cause, which the host models;
- the same bits come each time;
- no vector that crosses between stages is off by more than half a step of its rounding and BEYOND of its size.

FLOORS are what float32 sums cause, or a key or value that such a sum lets round to the other side.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

ROOT = Path(__file__).resolve().parents[2]
if TYPE_CHECKING:
    from one_launch import Found, Place

RECORD = ROOT / "results" / "hardware" / "depths-h200.json"
KEEP = "TEGRAD_DEPTHS"
"""Environment variable with the file that a case keeps what it finds in."""
FACTOR, UNRECORDED, MORE, BEYOND = 2.0, 0.15, 1.5, 1e-3
FLOORS = {"F16": 1e-3, "Q8_0": 0.02}
"""By the kind of the cache."""
CTAS = 132
"""SMs of an H200."""

Record = Mapping[str, Any]


def recorded(path: Path = RECORD) -> Record:
    """What a file keeps, by model; nothing where there is none."""
    found: dict[str, Any] = json.loads(path.read_text())["models"] if path.exists() else {}
    return found


def limit(record: Record, model: str, place: Place) -> tuple[float, str]:
    """By how much one launch and many may differ at a place, and where that comes from."""
    rows = record.get(model, {}).get("places", ())
    row = next((row for row in rows if row["place"] == _place(place) and "measured" in row), None)
    if row is None:
        return UNRECORDED, "nothing recorded"
    measured = row["measured"]
    derived = FACTOR * max(measured["one_exact"], measured["many_exact"])
    return max(derived, FLOORS[place.stored]), f"{FACTOR:g} times what was recorded"


def wrong(found: Found, times: int, record: Record, model: str) -> Iterator[str]:
    """What is not as it should be, in a sentence each."""
    measured, modelled, floor = found.measured, found.modelled, FLOORS[found.place.stored]
    allowed, why = limit(record, model, found.place)
    if not measured.one_many <= allowed:
        yield f"one launch and many differ by {measured.one_many:.4f}, allowed {allowed:.4f} ({why})"
    for plan in ("one", "many"):
        off, roundings = (getattr(distances, f"{plan}_exact") for distances in (measured, modelled))
        if not off <= MORE * roundings + floor:
            yield f"{plan} is {off:.4f} from exact, its roundings alone {roundings:.4f}"
    if found.same != times:
        yield f"{times - found.same} of {times} steps in one launch gave other bits"
    for plan, vectors in found.stages.items():
        for name, layers in vectors.items():
            worst = max(range(len(layers)), key=lambda at: layers[at].beyond)
            if not all(off.beyond <= BEYOND for off in layers):
                off = layers[worst].beyond
                yield f"{plan}: {STAGES[name]} of layer {worst} is {off:.1e} of its size beyond its rounding"


STAGES = {
    "qkv": "what queries, keys and values read", "products": "queries, keys and values", "output": "attention",
    "gate": "what gate and up read", "down": "what down reads",
    "input_gate": "what the gate of the layer's own input reads", "gated": "the layer's own input, gated",
    "logits": "what the logits' product reads", "scores": "logits",
}  # fmt: skip
"""The vectors of stages.Step in words."""


def line(found: Found, record: Record, model: str) -> str:
    """What came out at a place."""
    allowed, why = limit(record, model, found.place)
    texts = [f"{found.place}: {found.measured.one_many:.4f} apart (limit {allowed:.4f}, {why})"]
    for name, distances in (("measured", found.measured), ("by roundings alone", found.modelled)):
        texts.append(f"{name} {distances.one_exact:.4f} and {distances.many_exact:.4f} from exact")
    texts.append(f"{found.modelled.one_many:.4f} apart by roundings alone")
    return ", ".join(texts)


def case(device: Any, model: str) -> None:
    """A model at every place: prints a line each, keeps them where KEEP says, and fails if anything is wrong."""
    from one_launch import TIMES, compare

    from tegrad.bench.models import provide

    record, complaints = recorded(), []
    rows = compare(device, provide(model), threads=len(os.sched_getaffinity(0)))
    for found in rows:
        print(line(found, record, model), flush=True)
        complaints += [f"{found.place}: {what}" for what in wrong(found, TIMES, record, model)]
    if kept := os.environ.get(KEEP):
        keep(Path(kept), model, rows)
    assert not complaints, "\n".join(complaints)


def keep(path: Path, model: str, rows: Sequence[Found]) -> None:
    """Put a model's rows into a file, in the place of older ones."""
    from one_launch import TIMES

    _put(path, model, {"times": TIMES, "places": [as_json(found) for found in rows]})


def keep_modelled(path: Path, model: str) -> None:
    """Put what roundings alone would make of a model into a file."""
    from one_launch import modelled

    from tegrad.bench.models import provide

    rows = modelled(provide(model), CTAS, threads=len(os.sched_getaffinity(0)))
    places = [{"place": _place(row.place), "modelled": asdict(row.distances), "shares": row.shares} for row in rows]
    _put(path, model, {"ctas": CTAS, "places": _short(places)})


def _put(path: Path, model: str, found: Mapping[str, Any]) -> None:
    from tegrad.bench.record import History, machine, now, versions

    own = versions()
    commit = History(ROOT).head(own["tegrad_sources"])
    about = {"date": now(), "machine": machine(_board()), "versions": own, "commit": commit}
    models = {**recorded(path), model: {**about, **found}}
    what = "distances between logits of decode steps, in standard deviations (tests/hardware/one_launch.py)"
    path.write_text(json.dumps({"what": what, "models": dict(sorted(models.items()))}, indent=1) + "\n")


def as_json(found: Found) -> dict[str, Any]:
    """A place's row: five significant digits; of attention every layer, of the other vectors the worst."""
    vectors = {
        plan: {
            name: {
                "rounded": max(off.rounded for off in layers),
                "beyond": max(off.beyond for off in layers),
                **({"layers": [off.rounded for off in layers]} if name == "output" else {}),
            }
            for name, layers in each.items()
        }
        for plan, each in found.stages.items()
    }
    made = {
        "place": _place(found.place), "measured": asdict(found.measured), "modelled": asdict(found.modelled),
        "same": found.same, "shares": found.shares, "stages": vectors,
    }  # fmt: skip
    return _short(made)


def _short(made: Any) -> Any:
    return json.loads(json.dumps(made), parse_float=lambda text: float(f"{float(text):.5g}"))


def _place(place: Place) -> dict[str, Any]:
    return {"positions": place.positions, "depth": place.depth, "cache": place.stored}


def _board() -> str:
    board = os.environ.get("TEGRAD_BOARD")
    return f"emulated {board}" if board else ""


def main() -> int:
    """Run the cases of models, or model them; the number that failed."""
    sys.path[:0] = [str(ROOT), str(Path(__file__).parent)]
    from nv_cases import published_models, run_case

    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("out", type=Path, help="a file such as results/hardware/depths-h200.json")
    parser.add_argument("model", nargs="*", help="all published ones if left out")
    parser.add_argument("--modelled", action="store_true", help="only what roundings alone would make")
    asked = parser.parse_intermixed_args()
    known = published_models()
    if unknown := set(asked.model) - set(known):
        parser.error(f"no published model {', '.join(unknown)}; known: {', '.join(known)}")
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")  # before numpy comes: `exact` has threads of its own
    failed = 0
    for model in asked.model or known:
        begun, code, said, errors = time.monotonic(), 0, "", ""
        if asked.modelled:
            keep_modelled(asked.out, model)
        else:
            code, said, errors = run_case(f"steps_in_one_launch[{model}]", **{KEEP: str(asked.out.absolute())})
        failed += code != 0
        print(f"{'FAIL' if code else 'pass'}  {model}, {time.monotonic() - begun:.0f} s\n{said}", flush=True)
        if code:
            print("\n".join(errors.splitlines()[-30:]), flush=True)
    return failed


if __name__ == "__main__":
    sys.exit(main())
