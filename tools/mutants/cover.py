"""Records which file of tests calls which functions: `python tools/mutants/cover.py FOLDER`. Goes on where it stopped.

Each file of tests runs in a process of its own; FOLDER/calls has what it called, FOLDER/seconds.json how long it took.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import sysconfig
import time
from pathlib import Path

PROJECT = Path(__file__).resolve().parents[2]
HOOK = Path(sysconfig.get_path("purelib")) / "tegrad_calls.pth"
SELECTED = "not hardware and not long"


def test_files() -> list[str]:
    """All files of tests."""
    return sorted(str(path.relative_to(PROJECT)) for path in (PROJECT / "tests").rglob("test_*.py"))


def calls_of(folder: Path, test: str) -> Path:
    """Where a file of tests leaves what it called."""
    return folder / "calls" / test.removesuffix(".py").replace("/", "-")


def main() -> None:
    """Run what has not been run."""
    folder = Path(sys.argv[1]).resolve()
    (folder / "calls").mkdir(parents=True, exist_ok=True)
    table = folder / "seconds.json"
    seconds: dict[str, float] = json.loads(table.read_text()) if table.exists() else {}
    recorder = str(Path(__file__).with_name("recorder.py"))
    HOOK.write_text(f"import os; 'TEGRAD_CALLS' in os.environ and exec(open({recorder!r}).read())\n")
    try:
        for test in test_files():
            if test in seconds:
                continue
            out = calls_of(folder, test)
            out.unlink(missing_ok=True)
            start = time.monotonic()
            environment = {**os.environ, "TEGRAD_CALLS": str(out), "TEGRAD_CALLS_ROOT": f"{PROJECT}/"}
            command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-m", SELECTED, test]
            code = subprocess.run(command, cwd=PROJECT, env=environment, capture_output=True, check=False).returncode
            seconds[test] = round(time.monotonic() - start, 1)
            table.write_text(json.dumps(seconds, indent=1) + "\n")
            print(f"{test}: {seconds[test]} s, code {code}", flush=True)
    finally:
        HOOK.unlink(missing_ok=True)


if __name__ == "__main__":
    main()
