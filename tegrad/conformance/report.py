"""What a run of the rules is told as: lines while it goes on, and one JSON document to keep or send."""

from __future__ import annotations

import datetime
import platform
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import tegrad
from tegrad.conformance.rig import Rig
from tegrad.conformance.rule import NotApplicable
from tegrad.conformance.run import Outcome
from tegrad.uapi.errors import DriverError
from tegrad.uapi.kernel import Kernel

L4T_RELEASE = Path("/etc/nv_tegra_release")
DRIVER_VERSION = Path("/proc/driver/nvidia/version")


def line(outcome: Outcome) -> str:
    """One rule that does not simply hold, for the terminal."""
    rule = outcome.rule
    if outcome.state == "differs":
        return (
            f"DIFFERS  {rule.id}: {rule.sentence}\n         expected {outcome.expected}\n         seen {outcome.seen}"
        )
    return f"{outcome.state:8} {rule.id}: {outcome.detail}"


def summary(outcomes: Iterable[Outcome]) -> str:
    """How many rules came to what."""
    counts = Counter(outcome.state for outcome in outcomes)
    return f"{counts.total()} rules: " + ", ".join(f"{count} {state}" for state, count in counts.most_common())


def document(kernel: Kernel, outcomes: list[Outcome], command: str) -> dict[str, Any]:
    """Everything that somebody elsewhere needs to understand the differences."""
    return {
        "tegrad": tegrad.__version__,
        "command": command,
        "date": datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%dT%H:%M:%SZ"),
        "machine": machine(kernel),
        "counts": dict(Counter(outcome.state for outcome in outcomes)),
        "rules": [_row(outcome) for outcome in outcomes],
    }


def machine(kernel: Kernel) -> dict[str, Any]:
    """The kernel, the driver's release and what the GPU says of itself; `gpu` is None where it cannot be asked."""
    return {
        "kernel": f"{platform.system()} {platform.release()}",
        "arch": platform.machine(),
        "client": f"{type(kernel).__module__}.{type(kernel).__name__}",
        "l4t": _first_line(L4T_RELEASE),
        "driver": _first_line(DRIVER_VERSION),
        "gpu": _gpu(kernel),
    }


def _gpu(kernel: Kernel) -> dict[str, int] | None:
    try:
        with Rig(kernel) as rig:
            found = rig.characteristics()
            names = (name for name, *_ in found._fields_ if isinstance(getattr(found, name), int))
            return {name: getattr(found, name) for name in names if name != "per_device_identifier"}
    except (DriverError, NotApplicable):
        return None


def _row(outcome: Outcome) -> dict[str, Any]:
    row: dict[str, Any] = {"id": outcome.rule.id, "state": outcome.state, "seconds": round(outcome.seconds, 4)}
    if outcome.state != "holds":
        row["rule"] = outcome.rule.sentence
    return row | {key: text for key in ("expected", "seen", "detail") if (text := getattr(outcome, key))}


def _first_line(path: Path) -> str:
    try:
        return path.read_text().splitlines()[0].strip()
    except (OSError, IndexError):
        return ""
