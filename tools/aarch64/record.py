"""The record of a run, from the journals of its shards: results/aarch64.json has all of them."""

from __future__ import annotations

import json
import os
import platform
import re
from collections import Counter, defaultdict
from pathlib import Path
from typing import Any

from outcomes import lines, outcomes
from root import PROJECT, Root, qemu_version
from shards import SELECTED, Shard, journal

RECORD = PROJECT / "results" / "aarch64.json"
KINDS = ("passed", "failed", "killed", "skipped", "left out")


def merge(journals: dict[Shard, Path]) -> dict[str, Any]:
    """What the journals say together: counts by folder, and each test that did not pass with its reason."""
    folders: dict[str, Counter[str]] = defaultdict(Counter)
    seconds: Counter[str] = Counter()
    reasons: dict[str, dict[str, list[str]]] = {kind: defaultdict(list) for kind in KINDS[1:]}
    commits: Counter[str] = Counter()
    not_run, dates = [], []
    for shard, path in journals.items():
        dates += [line["date"] for line in lines(path) if "date" in line]
        ended = outcomes(path)
        if (asked := _collected(path)) is None or any(test not in ended for test in asked):
            not_run.append(shard.file)
        for test, line in ended.items():
            folders[shard.folder][line["outcome"]] += 1
            seconds[shard.folder] += line["seconds"]
            if line["outcome"] == "passed":
                commits[line["commit"]] += 1
            else:
                reasons[line["outcome"]][line["reason"]].append(test)
    total = sum(folders.values(), Counter())
    return {
        "begun": min(dates, default=""),
        "ended": max(dates, default=""),
        "totals": {kind: total[kind] for kind in KINDS},
        "passed_by_commit": dict(commits),
        "folders": {
            name: {**{kind: counts[kind] for kind in KINDS}, "seconds": round(seconds[name])}
            for name, counts in folders.items()
        },
        **{kind: {reason: sorted(tests) for reason, tests in sorted(reasons[kind].items())} for kind in KINDS[1:]},
        "files not run to the end": not_run,
    }


def _collected(path: Path) -> list[str] | None:
    """A file's tests, none where all are long ones; None where it was not looked at."""
    found: list[str] | None = None
    for line in lines(path):
        found = line.get("collected", found)
    return found


def write_record(root: Root, shards: list[Shard], command: str, to: Path) -> dict[str, Any]:
    """Write the record of what the folder of the root has journals of, among these."""
    cpu = re.search(r"^model name\s*:\s*(.+)$", Path("/proc/cpuinfo").read_text(), re.MULTILINE)
    found = {
        "command": command,
        "selected": SELECTED,
        "machine": {
            "cpu": cpu.group(1) if cpu else platform.machine(),
            "cores": len(os.sched_getaffinity(0)),
            "arch": platform.machine(),
            "kernel": platform.release(),
        },
        "qemu": qemu_version(),
        "debian": (root.path / "etc/debian_version").read_text().strip(),
        "python": root.run("python", "--version").strip(),
        "packages": root.run("pip", "freeze", "--exclude-editable").split(),
        **merge({shard: journal(root, shard) for shard in shards}),
    }
    to.write_text(json.dumps(found, indent=1) + "\n")
    return found
