"""Records what nvgpu's own code answers: `python tools/nvgpu_oracle/record.py CLONE OUT`.

CLONE is a clone of the public repository OE4T/linux-nvgpu, OUT a folder outside this repository for what is built.
Writes tests/data/nvgpu-oracle.json.xz: the cases with their answers, and where they come from.
"""

from __future__ import annotations

import argparse
import json
import lzma
import subprocess
from pathlib import Path

import build
from cases import KINDS, Case, generate

ROOT = Path(__file__).resolve().parents[2]
RECORD = ROOT / "tests" / "data" / "nvgpu-oracle.json.xz"
SEED = 1
COMMAND = "python tools/nvgpu_oracle/record.py CLONE OUT"


def ask(program: Path, kind: str, cases: list[Case]) -> list[list[str]]:
    """The answers to each case's steps. ValueError where a case ended the driver, or a step was not understood."""
    lines = [line for case in cases for line in (f"case {kind}", *case, "end")]
    done = subprocess.run([program], input="\n".join(lines) + "\n", capture_output=True, text=True, check=True)
    answers = iter(done.stdout.splitlines()[1:])
    found = []
    for case in cases:
        one = [next(answers) for _ in case]
        status = next(answers)
        if status != "end 0" or any(answer.startswith(("crash", "unknown")) for answer in one):
            steps = "\n".join(f"{step}  ->  {answer}" for step, answer in zip(case, one, strict=True))
            raise ValueError(f"{kind}: {status}\n{steps}")
        found.append(one)
    return found


def main() -> None:
    """Build, ask, write."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("clone", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--seed", type=int, default=SEED)
    options = parser.parse_args()
    out = options.out.resolve()
    made = build.library(options.clone, out)
    program = build.program(made, out)
    kinds = {}
    for kind in KINDS:
        cases = generate(kind, options.seed)
        answers = ask(program, kind, cases)
        kinds[kind] = [[case, answer] for case, answer in zip(cases, answers, strict=True)]
    record = {
        "source": {
            "repository": "OE4T/linux-nvgpu",
            "branch": build.BRANCH,
            "commit": build.commit(options.clone),
            "profile": " ".join(build.PROFILE),
            "command": COMMAND,
            "seed": options.seed,
        },
        "kinds": kinds,
    }
    text = json.dumps(record, separators=(",", ":"))
    RECORD.write_bytes(lzma.compress(text.encode(), preset=9 | lzma.PRESET_EXTREME))
    counts = {kind: len(cases) for kind, cases in kinds.items()}
    print(f"{RECORD.relative_to(ROOT)}: {RECORD.stat().st_size} bytes, {sum(counts.values())} cases {counts}")


if __name__ == "__main__":
    main()
