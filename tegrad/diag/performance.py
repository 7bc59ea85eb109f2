"""What limits how fast a Jetson's GPU may be: power mode, clocks, heat, the power supply; and any machine's memory.

Every check takes the folder that holds /proc, /sys, /etc and /var, and yields nothing where it has nothing to say.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from tegrad import machine
from tegrad.diag.finding import Finding
from tegrad.machine import Clock
from tegrad.uapi.releases import tegra

FULL: Final = re.compile(r"POWER_MODEL\s+ID=(\d+)\s+NAME=(MAXN\w*)")
"""Modes without a limit: MAXN, and on Orin Nano and NX since JetPack 6.1 MAXN_SUPER."""
LOW_MEMORY: Final = 2 << 30
COOL: Final = ("fan", "hot-surface-alert")
"""Cooling devices whose type has this throttle nothing: what turns, and what tells from 70 degrees on not to touch."""


def power(root: Path) -> Iterator[Finding]:
    """nvpmodel's mode, which caps clocks and may switch parts of the GPU off."""
    mode = machine.power_mode(root)
    if mode is None:
        return
    full = sorted(FULL.findall(machine.text(root / "etc/nvpmodel.conf")), key=lambda row: len(row[1]))
    if mode.name.startswith("MAXN") or not full:
        yield Finding("power", "ok", f"power mode {mode}")
        return
    number, name = full[-1]
    remedy = f"sudo nvpmodel -m {number} ({name}: more power and heat; it may ask to restart the machine)"
    yield Finding("power", "warn", f"power mode {mode}, which limits clocks and may switch cores off", remedy)


def clocks(root: Path) -> Iterator[Finding]:
    """The GPU's clock and the memory's, and whether somebody keeps them down or lets them idle."""
    if not tegra(root):
        return
    found = machine.gpu_clocks(root)
    for clock in found:
        yield _clock("gpu clock", clock)
    memory = [clock for clock in machine.clocks(root) if clock.name == "emc"]
    for clock in memory:
        yield _clock("emc clock", clock)
    if found and not memory:
        yield Finding("emc clock", "ok", "only root can read the memory's clock: sudo cat /" + machine.EMC + "/rate")


def _clock(name: str, clock: Clock) -> Finding:
    detail = f"{_mhz(clock.now)}, from {_mhz(clock.least)} to {_mhz(clock.most)}"
    if clock.limited:
        remedy = "the power mode may limit it: choose the one that the line `power` names, then sudo jetson_clocks"
        return Finding(name, "warn", f"{detail}; the hardware goes up to {_mhz(clock.hardware)}", remedy)
    if clock.idles:
        remedy = "sudo jetson_clocks keeps it up (before you measure, or for even latencies)"
        return Finding(name, "ok", f"{detail}; it goes down when there is little to do", remedy)
    return Finding(name, "ok", detail)


def _mhz(hertz: int) -> str:
    return f"{hertz / 1e6:.0f} MHz"


def heat(root: Path) -> Iterator[Finding]:
    """Throttling now by heat, and since the start by the power supply."""
    zones = dict(machine.temperatures(root))
    if not tegra(root) or not zones:
        return
    hottest = max(zones, key=zones.__getitem__)
    detail = f"{hottest} at {zones[hottest]:.0f} degrees Celsius"
    busy = [name for name, state in machine.cooling(root) if state > 0 and not any(cool in name for cool in COOL)]
    if busy:
        remedy = "cool the module (fan, heat sink, airflow), or choose a lower power mode"
        yield Finding("heat", "warn", f"{detail}; throttled by {', '.join(busy)}", remedy)
    else:
        yield Finding("heat", "ok", f"{detail}; nothing throttles")
    if events := {alarm: count for alarm, count in machine.over_currents(root).items() if count}:
        told = ", ".join(f"{alarm} {count} times" for alarm, count in events.items())
        remedy = "a stronger power supply, or a lower power mode (sudo nvpmodel -q --verbose lists them)"
        yield Finding("supply", "warn", f"over-current throttled the hardware since the start: {told}", remedy)


def ram(root: Path) -> Iterator[Finding]:
    """The system's memory, of which a Jetson's GPU has no other, and swap."""
    found = machine.memory(root)
    if "MemAvailable" not in found:
        return
    total, free, swap = found["MemTotal"], found["MemAvailable"], found.get("SwapTotal", 0)
    used = swap - found.get("SwapFree", 0)
    detail = f"{total / 2**30:.1f} GiB of memory, {free / 2**30:.1f} free; swap {swap / 2**30:.1f} GiB"
    detail += f", {used / 2**30:.1f} in use" if used else ""
    if free < LOW_MEMORY:
        remedy = "end other programs; without the desktop there is more: sudo systemctl isolate multi-user.target"
        yield Finding("ram", "warn", detail, remedy)
    elif tegra(root) and used > free // 4:
        remedy = "what is in swap is slow to come back, and the GPU cannot swap: end other programs"
        yield Finding("ram", "warn", detail, remedy)
    else:
        yield Finding("ram", "ok", detail)


CHECKS: Final = (power, clocks, heat, ram)
