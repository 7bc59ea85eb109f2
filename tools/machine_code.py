"""Whether our kernels are what they were: hashes of their machine code, `python tools/machine_code.py [--write]`.

For a set of models in which every format and family occurs, every plan's kernels are compiled for sm_87 and sm_90. A
kernel's row has a hash of its instructions and constants, its registers, shared and local memory; names do not count.
`--write` keeps the rows in results/machine-code.json; without it they are compared with that file, and what is new,
gone or changed is told by model, plan and place. Exit code 1 where anything is. With `--plan` only plans of that name
are compiled; the other rows stay as they are, and "again" says of which commit the plan's are.
"""

from __future__ import annotations

import argparse
import hashlib
import itertools
import json
import sys
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))
sys.path.insert(0, str(ROOT / "tools"))

from policies import commit  # noqa: E402

from tegrad.bench import models, plans, record  # noqa: E402
from tegrad.bench.plans import DryDevice, DryProgram  # noqa: E402
from tegrad.hw.chips import CHIPS  # noqa: E402
from tegrad.llm.errors import UnsupportedModelError  # noqa: E402
from tegrad.nv.program import shared_usage  # noqa: E402

RESULT = ROOT / "results" / "machine-code.json"
CHOSEN = ("agx-orin-64gb", "gh100")
MODELS = (
    *(f"1b-{kind}" for kind in models.FORMATS),
    "8b-q4k", "qwen2.5-0.5b-q8_0", "qwen3-0.6b-q6k", "gpt2-q6k", "gpt2-f16",
    "gemma2-2b-q6k", "gemma3-1b-q4km", "gemma3-1b-f16", "phi4-mini-q4km", "smollm3-3b-q4km", "granite3.1-2b-q4k",
    "olmo2-1b-q4k", "olmo2-1b-f16", "ministral3-3b-q4k", "glm4-9b-q4km", "hunyuan-1.8b-q4k", "nemotron-mini-4b-q4k",
    "tiny-aya-q4km", "phi2-q4k", "lfm2-1.2b-q4km", "qwen3.5-0.8b-q4km", "gemma4-e2b-q4km",
)  # fmt: skip
"""Every format with llama; the others' biases, norms, halves of rows and positions; an output of its own (8b); windows,
caps, norms after blocks, partial rotation, scales, large groups, norms after rotations, squared ReLUs and parallel
blocks of the families that have them."""
CODE = (".text.", ".nv.constant2.", ".nv.constant3", ".nv.constant4.", ".nv.global.init")
"""Sections by which a kernel computes: instructions, and constants that are not launch parameters."""

Row = dict[str, Any]


def described(program: DryProgram) -> Row:
    """A kernel's hash and what it takes of an SM."""
    cubin, digest = program.cubin, hashlib.sha256()
    for section in sorted(cubin.sections, key=lambda one: one.name.replace(program.name, "")):
        if section.name.startswith(CODE):
            digest.update(section.name.replace(program.name, "").encode())
            digest.update(cubin.content(section))
    row = {"name": program.name, "code": digest.hexdigest()[:24], "registers": cubin.registers(program.name)}
    return {**row, "stack": cubin.stack(program.name), "shared": shared_usage(cubin, program.name)}


def kernels(chip: str, name: str, plan: str) -> list[Row]:
    """A row for each kernel of a plan, in the order of their first launch."""
    shape, _ = models.parse(name)
    _, launches = plans.launches(plan, shape.config, models.formats(name), DryDevice(CHIPS[chip]), shape.tied)
    rows: dict[str, Row] = {}
    for launch in launches:
        row = {**described(launch.program), "grid": list(launch.grid), "block": list(launch.block)}
        rows.setdefault(json.dumps(masked(row)), row)
    return list(rows.values())


def masked(row: Row) -> Row:
    """A row without its name."""
    return {key: value for key, value in row.items() if key != "name"}


def of_model(chip: str, name: str, only: str | None) -> dict[str, list[Row]]:
    """The rows of every plan of a model, or of one, by "chip model plan"."""
    found = {}
    for plan in plans.plans_of(CHIPS[chip].arch):
        if only not in (None, plan):
            continue
        place = f"{chip} {name} {plan}"
        try:
            found[place] = kernels(chip, name, plan)
        except UnsupportedModelError as refused:  # floats have no prompts and batches
            print(f"{place}: {refused}", file=sys.stderr)
        else:
            print(f"{place}: {len(found[place])} kernels", file=sys.stderr, flush=True)
    return found


def gathered(names: tuple[str, ...], plan: str | None) -> dict[str, list[Row]]:
    """The rows of all models, compiled in as many processes as there are cores."""
    pairs = itertools.product(CHOSEN, names, (plan,))
    with ProcessPoolExecutor() as pool:
        return {place: rows for found in pool.map(of_model, *zip(*pairs, strict=True)) for place, rows in found.items()}


def differences(before: dict[str, list[Row]], after: dict[str, list[Row]]) -> Iterator[str]:
    """What is not as it was, a line for each kernel."""
    for place in sorted(before.keys() | after.keys()):
        old, new = ([json.dumps(masked(row)) for row in rows.get(place, [])] for rows in (before, after))
        yield from (
            f"{place}: gone: {row['name']}" for row in before.get(place, []) if json.dumps(masked(row)) not in new
        )
        yield from (
            f"{place}: new: {row['name']}" for row in after.get(place, []) if json.dumps(masked(row)) not in old
        )


def main() -> int:
    """Compile, and write or compare."""
    parser = argparse.ArgumentParser(prog="python tools/machine_code.py", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("models", nargs="*", default=MODELS, help="such as 1b-q6k; all of the set, unless given")
    known_plans = sorted({plan for chip in CHOSEN for plan in plans.plans_of(CHIPS[chip].arch)})
    parser.add_argument("--plan", choices=known_plans, help="all, unless given")
    parser.add_argument("--write", action="store_true", help=f"keep the rows in results/{RESULT.name}")
    given = parser.parse_args()
    found = gathered(tuple(given.models), given.plan)
    kept = json.loads(RESULT.read_text())
    if given.write:
        versions = record.versions()
        known = record.History(ROOT).head(versions["tegrad_sources"]) or commit()  # where the sources are the commit's
        about = {"commit": known, "date": record.now(), "versions": versions}
        if part := given.plan or ("" if given.models is MODELS else ", ".join(given.models)):  # the others stay
            about = {**kept, "again": {**kept.get("again", {}), part: about}}
            found = kept["plans"] | found
        RESULT.write_text(json.dumps({**about, "plans": found}, indent=1) + "\n")
        return 0
    told = [*differences({place: rows for place, rows in kept["plans"].items() if place in found}, found)]
    print("\n".join(told) or f"{sum(map(len, found.values()))} kernels of {len(found)} plans are what they were")
    return int(bool(told))


if __name__ == "__main__":
    sys.exit(main())
