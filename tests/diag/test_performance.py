"""The doctor on what limits a Jetson's speed: each fact out of files laid out as Linux has them there."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType

import pytest

from tegrad import machine
from tegrad.diag import performance
from tegrad.diag.finding import Finding

CONF = """
< POWER_MODEL ID=0 NAME=MAXN >
CPU_ONLINE CORE_0 1
< POWER_MODEL ID=1 NAME=MODE_15W >
< POWER_MODEL ID=2 NAME=MODE_30W >
"""
GPU = "sys/class/devfreq/17000000.gpu"
THERMAL = "sys/class/thermal"
EMC = "sys/kernel/debug/bpmp/debug/clk/emc"
JETSON = {
    "proc/device-tree/compatible": "nvidia,p3737-0000\0nvidia,tegra234\0",
    "proc/meminfo": "MemTotal: 64349184 kB\nMemAvailable: 41943040 kB\nSwapTotal: 8388608 kB\nSwapFree: 8388608 kB\n",
    "var/lib/nvpmodel/status": "pmode:0000",
    "etc/nvpmodel.conf": CONF,
    f"{GPU}/cur_freq": "1300500000",
    f"{GPU}/min_freq": "1300500000",
    f"{GPU}/max_freq": "1300500000",
    f"{GPU}/available_frequencies": "306000000 612000000 1300500000",
    f"{GPU}/governor": "nvhost_podgov",
    f"{EMC}/rate": "3199000000",
    f"{EMC}/min_rate": "204000000",
    f"{EMC}/max_rate": "3199000000",
    f"{THERMAL}/thermal_zone0/type": "cpu-thermal",
    f"{THERMAL}/thermal_zone0/temp": "48000",
    f"{THERMAL}/thermal_zone1/type": "gpu-thermal",
    f"{THERMAL}/thermal_zone1/temp": "51500",
    f"{THERMAL}/cooling_device0/type": "pwm-fan",
    f"{THERMAL}/cooling_device0/cur_state": "3",
    f"{THERMAL}/cooling_device1/type": "gpu-throttle-alert",
    f"{THERMAL}/cooling_device1/cur_state": "0",
    f"{THERMAL}/cooling_device2/type": "hot-surface-alert",
    f"{THERMAL}/cooling_device2/cur_state": "0",
    "sys/class/hwmon/hwmon4/oc1_event_cnt": "0",
    "sys/class/hwmon/hwmon4/oc3_event_cnt": "0",
}
"""An AGX Orin at its best."""


def told(root: Path, changes: Mapping[str, str | None] = MappingProxyType({})) -> dict[str, Finding]:
    """The findings about that Jetson, with other files, or without those that are None."""
    for name, text in {**JETSON, **changes}.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        if text is not None:
            (root / name).write_text(text)
    return {found.name: found for check in performance.CHECKS for found in check(root)}


def test_a_jetson_at_its_best_has_nothing_to_be_told(tmp_path: Path) -> None:
    found = told(tmp_path)
    assert {name: one.state for name, one in found.items()} == dict.fromkeys(
        ("power", "gpu clock", "emc clock", "heat", "ram"), "ok"
    )
    assert found["power"].detail == "power mode 0 (MAXN)"
    assert found["gpu clock"].detail == "1300 MHz, from 1300 MHz to 1300 MHz"
    assert found["heat"].detail == "gpu-thermal at 52 degrees Celsius; nothing throttles"
    assert found["ram"].detail == "61.4 GiB of memory, 40.0 free; swap 8.0 GiB"


def test_a_power_mode_that_limits_names_the_one_that_does_not(tmp_path: Path) -> None:
    found = told(tmp_path, {"var/lib/nvpmodel/status": "pmode:0002"})
    assert (found["power"].state, found["power"].detail[:24]) == ("warn", "power mode 2 (MODE_30W),")
    assert found["power"].remedy.startswith("sudo nvpmodel -m 0 (MAXN")
    nano = CONF.replace("ID=0 NAME=MAXN", "ID=0 NAME=15W") + "< POWER_MODEL ID=3 NAME=MAXN_SUPER >\n"
    found = told(tmp_path, {"var/lib/nvpmodel/status": "pmode:0002", "etc/nvpmodel.conf": nano})
    assert found["power"].remedy.startswith("sudo nvpmodel -m 3 (MAXN_SUPER")


def test_a_gpu_clock_that_is_kept_down_is_a_warning_and_one_that_idles_is_not(tmp_path: Path) -> None:
    idle = {f"{GPU}/min_freq": "306000000", f"{GPU}/cur_freq": "306000000"}
    found = told(tmp_path, {**idle, f"{GPU}/max_freq": "612000000"})
    assert found["gpu clock"].state == "warn"
    assert found["gpu clock"].detail == "306 MHz, from 306 MHz to 612 MHz; the hardware goes up to 1300 MHz"
    assert "jetson_clocks" in found["gpu clock"].remedy
    found = told(tmp_path, {**idle, f"{GPU}/max_freq": "1300500000"})
    assert found["gpu clock"].state == "ok"
    assert "sudo jetson_clocks" in found["gpu clock"].remedy


def test_without_root_the_memorys_clock_is_not_known_and_the_command_is_told(tmp_path: Path) -> None:
    found = told(tmp_path, {f"{EMC}/rate": None})
    assert f"sudo cat /{machine.EMC}/rate" in found["emc clock"].detail


def test_a_surface_too_hot_to_touch_throttles_nothing(tmp_path: Path) -> None:
    found = told(tmp_path, {f"{THERMAL}/thermal_zone1/temp": "74000", f"{THERMAL}/cooling_device2/cur_state": "1"})
    assert (found["heat"].state, found["heat"].detail) == (
        "ok",
        "gpu-thermal at 74 degrees Celsius; nothing throttles",
    )


def test_throttling_by_heat_and_by_the_supply_is_told(tmp_path: Path) -> None:
    found = told(tmp_path, {f"{THERMAL}/cooling_device1/cur_state": "1", "sys/class/hwmon/hwmon4/oc3_event_cnt": "7"})
    assert (found["heat"].state, found["supply"].state) == ("warn", "warn")
    assert "throttled by gpu-throttle-alert:1" in found["heat"].detail
    assert found["supply"].detail.endswith("since the start: oc3 7 times")
    assert found["heat"].remedy
    assert found["supply"].remedy


@pytest.mark.parametrize(
    ("free", "swapped", "state"), [(1 << 20, 0, "warn"), (8 << 20, 4 << 20, "warn"), (8 << 20, 1 << 20, "ok")]
)
def test_little_memory_or_much_in_swap_is_a_warning(tmp_path: Path, free: int, swapped: int, state: str) -> None:
    swap = 8 << 20
    info = f"MemTotal: 16777216 kB\nMemAvailable: {free} kB\nSwapTotal: {swap} kB\nSwapFree: {swap - swapped} kB\n"
    found = told(tmp_path, {"proc/meminfo": info})
    assert (found["ram"].state, bool(found["ram"].remedy)) == (state, state == "warn")


def test_any_other_machine_is_told_of_its_memory_alone(tmp_path: Path) -> None:
    (tmp_path / "proc").mkdir()
    (tmp_path / "proc/meminfo").write_text(JETSON["proc/meminfo"])
    assert [found.name for check in performance.CHECKS for found in check(tmp_path)] == ["ram"]
    assert [found for check in performance.CHECKS for found in check(tmp_path / "none")] == []
