"""Records which file of tests calls which functions: `python tools/mutants/cover.py FOLDER`. Goes on where it stopped.

Each file of tests runs in a process of its own, two at a time; FOLDER/calls has what it called, FOLDER/seconds.json how
long it took, FOLDER/warm what it compiled, FOLDER/commit the commit that was recorded.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import sysconfig
import time
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path

PROJECT = Path(__file__).resolve().parents[2]
HOOK = Path(sysconfig.get_path("purelib")) / "tegrad_calls.pth"
SELECTED = "not hardware and not long"
AT_ONCE = 2
KNOWN = PROJECT / "tests" / "seconds.json"
COMMIT = "commit"
"""What FOLDER has the recorded commit in."""
LONGEST_S = 100.0
"""Files of tests that take longer are for no mutant."""


def test_files() -> list[str]:
    """Files of tests, the quickest first."""
    known: dict[str, float] = json.loads(KNOWN.read_text())
    found = sorted(str(path.relative_to(PROJECT)) for path in (PROJECT / "tests").rglob("test_*.py"))
    return sorted((test for test in found if known.get(test, 0) <= LONGEST_S), key=lambda test: known.get(test, 0))


def calls_of(folder: Path, test: str) -> Path:
    """Where a file of tests leaves what it called."""
    return folder / "calls" / test.removesuffix(".py").replace("/", "-")


def hook() -> str:
    """The line of a .pth file that begins to record in every process whose environment asks for it."""
    recorder = str(Path(__file__).with_name("recorder.py"))
    return f"import os; 'TEGRAD_CALLS' in os.environ and exec(open({recorder!r}).read(), {{}})\n"


def recorded(folder: Path, test: str) -> tuple[float, int]:
    """Run one file of tests: seconds, exit code."""
    out = calls_of(folder, test)
    out.unlink(missing_ok=True)
    start = time.monotonic()
    recording = {"TEGRAD_CALLS": str(out), "TEGRAD_CALLS_ROOT": f"{PROJECT}/", "XDG_CACHE_HOME": str(folder / "warm")}
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-m", SELECTED, test]
    done = subprocess.run(command, cwd=PROJECT, env={**os.environ, **recording}, capture_output=True, check=False)
    return round(time.monotonic() - start, 1), done.returncode


def main() -> None:
    """Run what has not been run."""
    folder = Path(sys.argv[1]).resolve()
    (folder / "calls").mkdir(parents=True, exist_ok=True)
    head = subprocess.run(["git", "-C", str(PROJECT), "rev-parse", "HEAD"], check=True, capture_output=True, text=True)
    (folder / COMMIT).write_text(head.stdout.strip())
    table = folder / "seconds.json"
    seconds: dict[str, float] = json.loads(table.read_text()) if table.exists() else {}
    HOOK.write_text(hook())
    try:
        with ThreadPoolExecutor(AT_ONCE) as pool:
            left = {pool.submit(recorded, folder, test): test for test in test_files() if test not in seconds}
            for one in as_completed(left):
                took, code = one.result()
                if not calls_of(folder, left[one]).exists():
                    raise SystemExit(f"{left[one]}: no call was recorded")
                seconds[left[one]] = took
                table.write_text(json.dumps(seconds, indent=1) + "\n")
                print(f"{left[one]}: {seconds[left[one]]} s, code {code}", flush=True)
    finally:
        HOOK.unlink(missing_ok=True)


if __name__ == "__main__":
    main()
