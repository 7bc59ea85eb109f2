"""A long seeded run of the random clients: `python tests/orin/fuzz/run.py --steps 1000000 --seed 1`.

Prints progress on stderr and one line of JSON at the end; where something goes wrong, exit code 1 and the round's seed.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
import traceback
from collections import Counter

from fuzz_world import run

ROUND = 5000
"""Steps of one world; each round has a seed of its own, so a failure is repeated by its round alone."""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=20_000)
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()
    start, done, refused, steps = time.monotonic(), Counter[str](), Counter[str](), 0
    seed = options.seed
    while steps < options.steps:
        count = min(ROUND, options.steps - steps)
        try:
            world = run(seed, count)
        except (Exception, KeyboardInterrupt):
            traceback.print_exc()
            print(f"failed in the round of seed {seed} ({count} steps)", file=sys.stderr)
            return 1
        done, refused, steps, seed = done + world.done, refused + world.refused, steps + count, seed + 1
        print(f"\r{steps:,} steps, {time.monotonic() - start:.0f} s", end="", file=sys.stderr, flush=True)
    print(file=sys.stderr)
    seconds = round(time.monotonic() - start, 1)
    summary = {"steps": steps, "seed": options.seed, "seconds": seconds, "done": dict(done), "refused": dict(refused)}
    print(json.dumps(summary))
    return 0


if __name__ == "__main__":
    sys.exit(main())
