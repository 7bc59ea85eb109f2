"""What Linux tells of this machine: power mode, clocks, heat, throttling, memory. Reads files; no root, no NVML.

`root` is the folder that holds /proc, /sys, /etc and /var. What a file does not tell is left out.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Final

ROOT: Final = Path("/")
GPUS: Final = "*.g[pa]*"
"""A Jetson's GPU in devfreq: 17000000.gpu, or 17000000.ga10b before L4T r36."""
EMC: Final = "sys/kernel/debug/bpmp/debug/clk/emc"
"""The memory's clock (Jetson Linux Developer Guide, Clocks), which only root can read."""


@dataclass(frozen=True, slots=True)
class Clock:
    """A clock in Hz: now, the range that it may move in, and the most that the hardware does; 0 where nobody tells."""

    name: str
    now: int
    least: int = 0
    most: int = 0
    hardware: int = 0
    governor: str = ""

    @property
    def limited(self) -> bool:
        """Whether it may not go as fast as the hardware: by the power mode, or because somebody lowered it."""
        return 0 < self.most < self.hardware

    @property
    def idles(self) -> bool:
        """Whether it goes down while there is little to do, so that it has to come up first."""
        return 0 < self.least < self.most


@dataclass(frozen=True, slots=True)
class PowerMode:
    """nvpmodel's mode: its number, and its name where the table of modes has one."""

    number: int
    name: str = ""

    def __str__(self) -> str:
        return f"{self.number} ({self.name})" if self.name else str(self.number)


def power_mode(root: Path = ROOT) -> PowerMode | None:
    """The mode that is on, by nvpmodel's status file (`pmode:0000`) and its table; None where there is none."""
    mode = re.search(r"pmode:(\d+)", text(root / "var/lib/nvpmodel/status"))
    if not mode:
        return None
    number = int(mode[1])
    name = re.search(rf"POWER_MODEL\s+ID={number}\s+NAME=(\S+)", text(root / "etc/nvpmodel.conf"))
    return PowerMode(number, name[1].rstrip(">").strip() if name else "")


def clocks(root: Path = ROOT) -> Iterator[Clock]:
    """Of devices (devfreq), of the first CPU (cpufreq, in kHz there), and of the memory where it can be read."""
    for device in sorted((root / "sys/class/devfreq").glob("*")):
        rates = [int(word) for word in text(device / "available_frequencies").split() if word.isdecimal()]
        yield Clock(
            device.name, number(device / "cur_freq") or 0, number(device / "min_freq") or 0,
            number(device / "max_freq") or 0, max(rates, default=0), text(device / "governor").strip(),
        )  # fmt: skip
    cpu = root / "sys/devices/system/cpu/cpu0/cpufreq"
    if (now := number(cpu / "scaling_cur_freq")) is not None:
        names = ("scaling_min_freq", "scaling_max_freq", "cpuinfo_max_freq")
        least, most, hardware = (1000 * (number(cpu / name) or 0) for name in names)
        yield Clock("cpu0", 1000 * now, least, most, hardware, text(cpu / "scaling_governor").strip())
    if (now := number(root / EMC / "rate")) is not None:
        least, most = (number(root / EMC / name) or 0 for name in ("min_rate", "max_rate"))
        yield Clock("emc", now, least, most, most)


def gpu_clocks(root: Path = ROOT) -> list[Clock]:
    """Those of a Jetson's GPU."""
    return [clock for clock in clocks(root) if Path(clock.name).match(GPUS)]


def temperatures(root: Path = ROOT) -> Iterator[tuple[str, float]]:
    """Of each thermal zone, in degrees Celsius."""
    for zone in sorted((root / "sys/class/thermal").glob("thermal_zone*")):
        if (degrees := number(zone / "temp")) is not None:
            yield text(zone / "type").strip() or zone.name, degrees / 1000


def cooling(root: Path = ROOT) -> Iterator[tuple[str, int]]:
    """The state of each cooling device; a fan's is its speed, hot-surface-alert's that a hand should keep off,
    any other's tells above 0 that it throttles."""
    for device in sorted((root / "sys/class/thermal").glob("cooling_device*")):
        if (state := number(device / "cur_state")) is not None:
            kind = text(device / "type").strip()
            yield f"{kind}:{device.name.removeprefix('cooling_device')}", state


def over_currents(root: Path = ROOT) -> dict[str, int]:
    """How often the power supply's limits made the hardware throttle since the start, by alarm (oc1 to oc3)."""
    files = (root / "sys/class/hwmon").glob("hwmon*/oc*_event_cnt")
    return {file.name.removesuffix("_event_cnt"): number(file) or 0 for file in sorted(files)}


def memory(root: Path = ROOT) -> dict[str, int]:
    """/proc/meminfo in bytes: MemTotal, MemAvailable, SwapTotal, SwapFree and the others."""
    found = re.findall(r"^(\w+):\s+(\d+) kB", text(root / "proc/meminfo"), re.MULTILINE)
    return {name: int(kib) << 10 for name, kib in found}


def revisions(root: Path = ROOT) -> list[str]:
    """Of each NVIDIA GPU on the PCI bus, in the order of their addresses ("0xa1")."""
    devices = sorted((root / "sys/bus/pci/devices").glob("*"))
    return [
        text(one / "revision").strip()
        for one in devices
        if text(one / "vendor").strip() == "0x10de" and text(one / "class").startswith("0x03")
    ]


def text(path: Path) -> str:
    """What a file holds; nothing where it cannot be read."""
    with suppress(OSError):
        return path.read_bytes().decode(errors="replace")
    return ""


def number(path: Path) -> int | None:
    """The whole number in a file; None where there is none."""
    word = text(path).strip()
    return int(word) if word.lstrip("-").isdecimal() else None
