"""Runs the drawn mutants: `python tools/mutants/run.py FOLDER`. Goes on where it stopped; hours.

FOLDER is where cover.py has recorded calls. Each mutant is a change in a copy of the project as it is committed, made
where the drawn line stands now; one whose line is gone is made in the source of the draw, with the tests of
that commit. It is run against the test files that called the function: those of its module, of its package, then the
quickest, up to the first failure. FOLDER/journal has a line for each; `--share 0/2` and `--share 1/2` run at the same
time. Writes results/random-mutants.json when all have run.
"""

from __future__ import annotations

import argparse
import ast
import contextlib
import difflib
import json
import os
import shutil
import subprocess
import sys
import time
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

from cover import COMMIT, KNOWN, SELECTED, calls_of
from draw import DRAWN, PROJECT
from operators import Change, apply

RESULT = PROJECT / "results" / "random-mutants.json"
KNOWN_KILLED = Path(__file__).with_name("journal")
"""Mutants that a test has noticed, of earlier runs: they need not be run again."""
EQUIVALENT = Path(__file__).with_name("equivalent.json")
"""By id, of mutants that no test can notice: the proof, in a line."""
MOST_S = 120.0
"""Seconds of tests, on an idle machine, that a mutant is held against at most."""
LONG_S = 300.0
"""Of a file of tests that was not recorded."""
RULES = "tests/conformance/test_mutants.py"
"""What holds the rules of tegrad/conformance against boards that break them; it takes too long to be recorded."""
SAME = 5
"""Letters of a module's name that the name of a file of tests for it has, too: sample.cu's is test_sampling.py."""
PATIENCE = 6
"""A file of tests may take so many times its recorded seconds, and a minute: what a mutant hangs, it has noticed."""


def function_line(text: str, line: int) -> int:
    """Where the innermost function around a line begins, as its code object has it; 1 for the module's own code."""
    found = 1
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.FunctionDef | ast.Lambda) and node.lineno <= line <= (node.end_lineno or 0):
            decorators = getattr(node, "decorator_list", [])
            found = max(found, min([node.lineno, *(decorator.lineno for decorator in decorators)]))
    return found


def chosen(folder: Path, row: dict[str, Any], seconds: dict[str, float], drawn: str) -> list[str]:
    """The files of tests to hold a mutant against: those named for its module, of its package, then the quickest.

    One that has the module's very name comes first, whatever was recorded of it.
    """
    path = Path(row["file"])
    if path.match("tegrad/conformance/s*.py"):
        return [RULES]
    function = f"{path}\t0"
    if path.suffix == ".py":
        then = git("show", f"{(folder / COMMIT).read_text()}:{path}")
        change = placed(row, git("show", f"{drawn}:{path}"), then)
        function = f"{path}\t{function_line(then, change.line)}" if change else f"{path}\t"  # or any of the file

    def rank(test: str) -> tuple[bool, bool, float]:
        return path.stem[:SAME] not in Path(test).stem, Path(test).parent.name not in path.parts, seconds[test]

    idle: dict[str, float] = json.loads(KNOWN.read_text())
    called = [test for test in {**idle, **seconds} if Path(test).stem == f"test_{path.stem}"]
    called += [
        test for test in sorted(seconds, key=rank) if test not in called and _has(_calls(folder, test), function)
    ]
    taken: list[str] = []
    total = 0.0
    for test in called:
        takes = idle.get(test, seconds.get(test, 0.0))
        if test not in seconds:
            taken.append(test)
        elif total + takes <= MOST_S or not taken:
            taken.append(test)
            total += takes
    return taken


def _has(calls: frozenset[str], function: str) -> bool:
    """Whether a function was called; one without a line is any of the file."""
    return function in calls if function[-1] != "\t" else any(call.startswith(function) for call in calls)


_known: dict[str, frozenset[str]] = {}


def _calls(folder: Path, test: str) -> frozenset[str]:
    if test not in _known:
        path = calls_of(folder, test)
        _known[test] = frozenset(path.read_text().splitlines()) if path.exists() else frozenset()
    return _known[test]


def git(*arguments: str) -> str:
    """What git says in the project."""
    return subprocess.run(["git", "-C", str(PROJECT), *arguments], check=True, capture_output=True, text=True).stdout


def lay(copy: Path, commit: str) -> Path:
    """A copy of the project as of a commit."""
    if not copy.exists():
        git("worktree", "add", "--detach", "--force", str(copy), commit)
    subprocess.run(["git", "-C", str(copy), "checkout", "-q", "-f", commit], check=True)
    return copy


def placed(row: dict[str, Any], drawn: str, now: str) -> Change | None:
    """The change that was drawn from one text, in another; None where its lines are not there."""
    change = Change(**{name: row[name] for name in ("start", "end", "line", "operator", "before", "after")})
    first, last = (drawn.count("\n", 0, at) for at in (change.start, change.end))
    old, new = drawn.splitlines(keepends=True), now.splitlines(keepends=True)
    for block in difflib.SequenceMatcher(None, old, new, autojunk=False).get_matching_blocks():
        if block.a <= first and last < block.a + block.size:
            lines = block.b - block.a
            letters = sum(map(len, new[: block.b])) - sum(map(len, old[: block.a]))
            return replace(change, start=change.start + letters, end=change.end + letters, line=change.line + lines)
    return None


def held(copy: Path, folder: Path, row: dict[str, Any], seconds: dict[str, float], drawn: str) -> dict[str, Any]:
    """Run one mutant: what killed it, or that it survived what it was held against."""
    head = git("rev-parse", "HEAD").strip()
    text = git("show", f"{drawn}:{row['file']}")
    path, commit = lay(copy, head) / row["file"], head
    change = placed(row, text, path.read_text()) if path.exists() else None
    if change is None:
        path, commit = lay(copy, drawn) / row["file"], drawn
        change = placed(row, text, text)
    assert change is not None
    text = path.read_text()
    tests = chosen(folder, row, seconds, drawn)
    start = time.monotonic()
    path.write_text(apply(text, change))
    cache = copy.with_suffix(".cache")
    try:
        for test in tests:
            took = seconds.get(test, LONG_S)
            shutil.rmtree(cache, ignore_errors=True)
            _warm(folder, cache)
            if (killer := _killer(copy, cache, test, took)) and _sound(folder, copy, commit, path, text, test, seconds):
                return {"outcome": "killed", "by": killer, "seconds": round(time.monotonic() - start, 1)}
    finally:
        path.write_text(text)
    return {"outcome": "survived", "held against": tests, "seconds": round(time.monotonic() - start, 1)}


def _sound(folder: Path, copy: Path, commit: str, path: Path, text: str, test: str, seconds: dict[str, float]) -> bool:
    """Whether a file of tests passes without a mutant, found out once for a commit: what fails anyway has noticed
    nothing."""
    table = folder / f"sound-{copy.name}.json"
    known: dict[str, bool] = json.loads(table.read_text()) if table.exists() else {}
    if (key := f"{commit}:{test}") not in known:
        mutant = path.read_text()
        path.write_text(text)
        known[key] = not _killer(copy, copy.with_suffix(".cache"), test, seconds.get(test, LONG_S))
        path.write_text(mutant)
        table.write_text(json.dumps(known, indent=1) + "\n")
    return known[key]


def _warm(folder: Path, cache: Path) -> None:
    """A mutant's own cache, whose files are links to those of everybody's: what it writes has names of its own."""
    whole = folder / "warm"
    if whole.exists():
        shutil.copytree(whole, cache, copy_function=os.link)
    else:
        cache.mkdir()


def _killer(copy: Path, cache: Path, test: str, seconds: float) -> str:
    """The first test of a file that fails; "" where none does."""
    environment = {**os.environ, "PYTHONPATH": str(copy), "XDG_CACHE_HOME": str(cache), "PYTHONDONTWRITEBYTECODE": "1"}
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-x",
        "-q",
        "--no-header",
        "-p",
        "no:cacheprovider",
        "-m",
        SELECTED,
        test,
    ]
    process = subprocess.Popen(
        command, cwd=copy, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, start_new_session=True
    )
    try:
        said = process.communicate(timeout=60 + PATIENCE * seconds)[0].decode(errors="replace")
    except subprocess.TimeoutExpired:
        return f"{test}: no end"
    finally:
        end_group(process)
    if process.returncode in (0, 5):
        return ""
    failed = [line for line in said.splitlines() if line.startswith(("FAILED", "ERROR"))]
    return failed[0].partition(" - ")[0].split(" ", 1)[1] if failed else f"{test}: exit code {process.returncode}"


def end_group(process: subprocess.Popen[bytes]) -> None:
    """End a process and what it started."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, 9)
    process.wait()


def told(journal: Path) -> list[dict[str, Any]]:
    """What has been found so far; the last line of a mutant holds."""
    return [json.loads(line) for line in journal.read_text().splitlines()] if journal.exists() else []


def main() -> int:
    """Run what has not been run, then count."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--minutes", type=float, default=1e6, help="begin no mutant after this many minutes")
    parser.add_argument("--share", default="0/1", help="which share of how many, such as 0/2")
    parser.add_argument("--only", nargs="*", default=[], help="these ids and no others, again")
    given = parser.parse_args()
    folder, until = given.folder.resolve(), time.monotonic() + 60 * given.minutes
    drawn = json.loads(DRAWN.read_text())
    seconds = json.loads((folder / "seconds.json").read_text())
    journal = folder / "journal"
    done = {line["id"]: line for line in (*told(KNOWN_KILLED), *told(journal)) if line["id"] not in given.only}
    share, shares = map(int, given.share.split("/"))
    copy = folder / f"copy{share}"
    for number, row in enumerate(drawn["mutants"]):
        asked = not given.only or row["id"] in given.only
        if number % shares != share or not asked or row["id"] in done or time.monotonic() > until:
            continue
        done[row["id"]] = {"id": row["id"], **held(copy, folder, row, seconds, drawn["commit"])}
        with journal.open("a") as file:
            file.write(json.dumps(done[row["id"]]) + "\n")
        print(row["id"], row["file"], row["line"], row["operator"], done[row["id"]]["outcome"], flush=True)
    done = {line["id"]: line for line in (*told(KNOWN_KILLED), *told(journal))}
    counts = Counter(line["outcome"] for line in done.values())
    print(f"{len(done)} of {len(drawn['mutants'])}: {dict(counts)}")
    if len(done) == len(drawn["mutants"]):
        write(drawn, done)
    return 0


def write(drawn: dict[str, Any], done: dict[str, dict[str, Any]]) -> None:
    """results/random-mutants.json: each mutant with what came of it."""
    proofs = json.loads(EQUIVALENT.read_text()) if EQUIVALENT.exists() else {}
    rows = [{**row, **done[row["id"]], **({"equivalent": proofs[row["id"]]} if row["id"] in proofs else {})}
            for row in drawn["mutants"]]  # fmt: skip
    RESULT.write_text(json.dumps({"seed": drawn["seed"], "commit": drawn["commit"], "mutants": rows}, indent=1) + "\n")


if __name__ == "__main__":
    sys.exit(main())
