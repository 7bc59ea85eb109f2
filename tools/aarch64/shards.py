"""The suite in shards: one file of tests each, in the order of what a Jetson's first hours need, then what is quick."""

from __future__ import annotations

import json
import subprocess
import time
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from outcomes import is_complete, outcomes, unfinished, write
from root import PROJECT, Root, environment

ORDER = (
    "uapi",
    "hw",
    ".",
    "conformance",
    "orin/driver",
    "orin/nvgpu_oracle",
    "ptx",
    "orin",
    "diag",
    "nv",
    "ptx/oracle",
    "tegra",
    "cli",
    "examples",
    "llm",
    "bench",
)
"""Folders of tests/ by turn; a folder below one that is named goes with it, all others come last."""
SECONDS: dict[str, float] = json.loads((PROJECT / "tests" / "seconds.json").read_text())
"""What a file takes on x86-64, by which those of a folder come; what takes little is not in there."""
SELECTED = "not hardware and not long"
TEST_LIMIT_S = 600.0
"""How long one test may take before it counts as killed; collecting a file, too."""
POLL_S = 2.0


@dataclass(frozen=True)
class Shard:
    """One file of tests, as a path in the project."""

    file: str

    @property
    def folder(self) -> str:
        """The folder of tests/ that it counts for."""
        parts = Path(self.file).parts[1:-1]
        return parts[0] if parts else "."

    @property
    def name(self) -> str:
        """The name of its journal and log."""
        return self.file.removesuffix(".py").replace("/", "-")

    def turn(self) -> tuple[int, float, str]:
        """Its place in the order."""
        whole = "/".join(Path(self.file).parts[1:-1]) or "."
        folder = whole if whole in ORDER else self.folder
        return (ORDER.index(folder) if folder in ORDER else len(ORDER), SECONDS.get(self.file, 0.0), self.file)


def all_shards() -> list[Shard]:
    """Every file of tests, in order."""
    files = (path.relative_to(PROJECT).as_posix() for path in (PROJECT / "tests").rglob("test_*.py"))
    return sorted((Shard(file) for file in files), key=Shard.turn)


def journal(root: Root, shard: Shard) -> Path:
    """The file that says what became of a shard's tests."""
    return root.journals / f"{shard.name}.jsonl"


def run_shard(root: Root, shard: Shard, commit: str, limit_s: float = TEST_LIMIT_S) -> None:
    """Run what a shard has not settled. A test that a signal or the limit ends is written down; the rest goes on."""
    path = journal(root, shard)
    again = {"AARCH64_AGAIN": "1"}
    while True:
        write(path, commit=commit, date=time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()))
        end = _run(root, shard, path, limit_s, again)
        stuck = unfinished(path)
        if stuck is None:
            if end not in ("0", "1", "5"):  # pytest's: all passed, some failed, none to run
                write(path, test=shard.file, outcome="failed", reason=f"pytest ended with {end}", seconds=0.0)
            return
        reason = f"pytest ended with {end}" if end.isdigit() else end
        write(path, test=stuck, outcome="killed", reason=reason, seconds=0.0)
        again = {}


def _run(root: Root, shard: Shard, path: Path, limit_s: float, extra: dict[str, str]) -> str:
    """One process of tests; returns how it ended: its exit code, or what killed it."""
    extra = extra | {"AARCH64_JOURNAL": f"/journals/{path.name}", "PYTHONPATH": "/src:/src/tools/aarch64"}
    pytest = ["pytest", "-q", "-p", "journal", "-p", "no:cacheprovider", "-p", "no:xdist", "-m", SELECTED, shard.file]
    with path.with_suffix(".log").open("ab") as log:
        process = subprocess.Popen(
            root.command(*pytest), env=environment(extra), stdin=subprocess.DEVNULL, stdout=log, stderr=log
        )
        try:
            while True:
                try:
                    code = process.wait(POLL_S)
                except subprocess.TimeoutExpired:
                    if time.time() - path.stat().st_mtime > limit_s:
                        return f"took longer than {limit_s:g} s"
                    continue
                return f"signal {-code if code < 0 else code - 128}" if code < 0 or code > 128 else str(code)
        finally:
            process.kill()
            process.wait()


def run(root: Root, shards: Iterable[Shard], commit: str, limit_s: float, until: float) -> None:
    """Run shards that are not complete, one after the other, starting none after `until` (time.time())."""
    for shard in shards:
        path = journal(root, shard)
        if is_complete(path):
            continue
        if time.time() > until:
            print("out of time: call again to go on", flush=True)
            return
        begun = time.monotonic()
        run_shard(root, shard, commit, limit_s)
        counted = Counter(line["outcome"] for line in outcomes(path).values())
        counts = ", ".join(f"{count} {outcome}" for outcome, count in sorted(counted.items()))
        print(f"{shard.file}: {counts} ({time.monotonic() - begun:.0f} s)", flush=True)
