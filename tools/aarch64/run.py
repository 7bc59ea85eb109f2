"""Runs the suite on aarch64, emulated: `python tools/aarch64/run.py FOLDER`. Needs root, and some hours.

Builds a Debian arm64 root in FOLDER, installs the project there, looks whether it works at all, and runs the suite in
shards. A call that is stopped, or out of its --minutes, is gone on with by the next one, which asks again what failed
and leaves what passed. Writes results/aarch64.json, or of the files of --only the record that --to names. Exit code 1
if a test failed.
"""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path

from record import RECORD, write_record
from root import Root, RootError
from shards import TEST_LIMIT_S, all_shards, run

FIRST = (
    ("tegrad", "doctor"),
    ("env", "TEGRAD_BOARD=agx-orin-64gb", "python", "examples/bringup.py"),
    ("tegrad", "run", "-n", "8", "In the beginning"),
)
"""What must work before tests are worth their time."""


def main() -> int:
    """Parse arguments, build, run, record."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path, help="where the root and the shards' journals are kept")
    parser.add_argument("--only", default="", help="run files whose path contains this")
    parser.add_argument("--minutes", type=float, default=1e6, help="start no shard after so many minutes")
    parser.add_argument("--limit", type=float, default=TEST_LIMIT_S, help="seconds that one test may take")
    parser.add_argument("--to", type=Path, help="a record of the files of --only alone, written here")
    parser.add_argument("--record", action="store_true", help="only write the record of what has run")
    arguments = parser.parse_args()
    until = time.time() + arguments.minutes * 60
    root = Root(arguments.folder.resolve())
    shards = all_shards()
    chosen = [shard for shard in shards if arguments.only in shard.file]
    try:
        if not arguments.record:
            commit = root.prepare()
            for command in FIRST:
                print(f"$ {' '.join(command)}\n{root.run(*command)}", flush=True)
            run(root, chosen, commit, arguments.limit, until)
        if arguments.to is None:
            found = write_record(root, shards, "make test-aarch64", RECORD)
        else:
            command = f"python tools/aarch64/run.py FOLDER --only {arguments.only} --limit {arguments.limit:g}"
            found = write_record(root, chosen, command, arguments.to)
    except RootError as error:
        print(error, file=sys.stderr)
        return 2
    print(", ".join(f"{count} {kind}" for kind, count in found["totals"].items()))
    return int(bool(found["totals"]["failed"] or found["totals"]["killed"]))


if __name__ == "__main__":
    sys.exit(main())
