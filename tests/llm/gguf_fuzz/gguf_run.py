"""A seeded run over damaged and hostile GGUF files: `python tests/llm/gguf_fuzz/gguf_run.py --count 6000 --seed 1`.

Each mutant (`gguf_mutants`) is opened, tokenized with, rendered, planned and computed with in another process
(`gguf_worker`) of bounded memory; with --serve it is listed and served (`gguf_serve_worker`). What is no error of
tegrad's in one line, or takes over ten seconds (40 if it is served), is found: it is printed with its seed, and `--only
SEED` tries that one again. The last line is JSON; exit code 1 where something was found.
"""

from __future__ import annotations

import argparse
import json
import os
import select
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))
from gguf_mutants import SERVED, SOUND, Mutant, mutant

WORKER = Path(__file__).with_name("gguf_worker.py")
SERVER = Path(__file__).with_name("gguf_serve_worker.py")
SECONDS = 10.0
"""That a mutant may take."""
SERVED_S = 40.0
"""That one may take which is served: its template is ended after 9 s of each request."""
STARTING = 120.0
"""That a worker may take to start, with its first mutant."""


class Worker:
    """The other process, started anew after it was ended."""

    def __init__(self, folder: Path, *, serve: bool = False) -> None:
        self._path = folder / "mutant.gguf"
        self._limit = SERVED_S if serve else SECONDS
        self._command = [sys.executable, str(SERVER if serve else WORKER)]
        self._environment = {**os.environ, "HF_HUB_CACHE": str(folder / "hub")}
        self._process: subprocess.Popen[str] | None = None

    def tried(self, made: Mutant) -> dict[str, Any]:
        """What became of a mutant, and the seconds that it took."""
        self._path.write_bytes(made.data)
        os.truncate(self._path, made.size)
        limit = self._limit if self._process is not None else STARTING
        started = time.monotonic()
        answer = self._asked(limit)
        return {"said": "", "mib": 0, **answer, "seconds": time.monotonic() - started}

    def _asked(self, limit: float) -> dict[str, Any]:
        if self._process is None:
            self._process = subprocess.Popen(
                self._command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=self._environment
            )
        process = self._process
        assert process.stdin is not None
        assert process.stdout is not None
        process.stdin.write(f"{self._path}\n")
        process.stdin.flush()
        if not select.select([process.stdout], [], [], limit)[0]:
            self.close()
            return {"outcome": "found", "said": f"took over {limit:g} s"}
        if line := process.stdout.readline():
            answer: dict[str, Any] = json.loads(line)
            return answer
        code = process.wait()
        self.close()
        return {"outcome": "found", "said": f"the process ended with code {code}"}

    def close(self) -> None:
        """End the process."""
        if self._process is not None:
            self._process.kill()
            self._process.communicate()
            self._process = None


def tried(seeds: range, show: bool = False, *, serve: bool = False) -> tuple[dict[str, Any], list[str]]:
    """What became of the mutants of these seeds, counted, and what was found, a text each."""
    outcomes, found, slowest, most = Counter[str](), [], 0.0, 0
    started = time.monotonic()
    with TemporaryDirectory() as folder:
        worker = Worker(Path(folder), serve=serve)
        try:
            for seed in seeds:
                made = mutant(seed, SERVED if serve else tuple(SOUND))
                answer = worker.tried(made)
                outcomes[answer["outcome"]] += 1
                if seed != seeds[0]:
                    slowest = max(slowest, answer["seconds"])
                most = max(most, answer["mib"])
                if answer["outcome"] == "found":
                    found.append(f"{made.name}\n{answer['said']}")
                    if show:
                        print(f"\r{found[-1]}\n", file=sys.stderr, flush=True)
                elif show and len(seeds) == 1:
                    print(f"{made.name}: {answer['outcome']}, {answer['said']}", file=sys.stderr)
                if show:
                    print(f"\r{sum(outcomes.values()):,} mutants", end="", file=sys.stderr, flush=True)
        finally:
            worker.close()
    summary = {
        "mutants": len(seeds), "seed": seeds[0], **outcomes, "found": len(found), "slowest_s": round(slowest, 2),
        "most_mib": most, "seconds": round(time.monotonic() - started, 1),
    }  # fmt: skip
    return summary, found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--count", type=int, default=6000)
    parser.add_argument("--seed", type=int, default=1, help="of the first mutant; the others count on from it")
    parser.add_argument("--only", type=int, help="try the mutant of this seed")
    parser.add_argument("--serve", action="store_true", help="serve mutants of three families")
    options = parser.parse_args()
    first, count = (options.seed, options.count) if options.only is None else (options.only, 1)
    summary, found = tried(range(first, first + count), show=True, serve=options.serve)
    print(file=sys.stderr)
    print(json.dumps(summary))
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
