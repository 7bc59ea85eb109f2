"""The GPC clock: what it can be, who asked for what, and the ctrl fd's clock calls.

A ctrl fd is a session with a target; a request of CLK_SET_INFO sets it and holds the clock while its completion fd is
open. The arbiter takes the highest target. Source: L4T r36.4.3 nvgpu, os/linux/ioctl_clk_arb.c and ioctl_ctrl.c,
common/clk_arb/clk_arb_gp10b.c.
"""

from __future__ import annotations

import ctypes
import errno
from typing import TYPE_CHECKING, Any

from tegrad.hw.chips import Chip
from tegrad.orin.files import Call, File, Process, Steps, copy_in, copy_out, require
from tegrad.uapi import constants as k
from tegrad.uapi import structs as s

if TYPE_CHECKING:
    from tegrad.orin.ctrl import CtrlFile
    from tegrad.orin.driver import Driver

MHZ = 1_000_000
IDLE_MHZ, STEP_MHZ = 306, 102
MAX_FREQ_POINTS = 15
MAX_TARGET_MHZ = 0xFFFF  # a target is 16 bits of MHz
DOMAINS = (k.NVGPU_GPU_CLK_DOMAIN_GPCCLK,)
TYPES_PER_DOMAIN = 3


def clock_points(chip: Chip) -> list[int]:
    """The frequencies of the GPC clock, in Hz: steps of 102 MHz and the maximum."""
    most = chip.max_freq_hz // MHZ
    return [mhz * MHZ for mhz in [*range(IDLE_MHZ, most, STEP_MHZ), most][-MAX_FREQ_POINTS:]]


class Arbiter:
    """The clock arbiter of a board: sessions with targets, and the requests whose completion fds are open."""

    def __init__(self, chip: Chip) -> None:
        points = clock_points(chip)
        self.least, self.most = points[0], points[-1]
        self.sessions: list[CtrlFile] = []
        self.requests: list[ClockFile] = []
        self.actual = self.most
        """What the arbiter set last, in Hz; it stays when the last request is gone."""

    @property
    def effective(self) -> int:
        """The clock in Hz: the arbiter's while a request is open, else the governor's, which is the maximum here."""
        return self.actual if self.requests else self.most

    def run(self) -> None:
        """Set the highest target, within what the clock can do; without one, the maximum."""
        wanted = max((session.target_mhz for session in self.sessions), default=0) * MHZ
        self.actual = min(max(wanted or self.most, self.least), self.most)


class ClockFile(File):
    """A completion fd of CLK_SET_INFO: readable at once; while it is open the clock stays."""

    kind = "clk"

    def __init__(self, driver: Driver, process: Process) -> None:
        super().__init__(driver, process)
        driver.clock.requests.append(self)
        self.make_readable()

    def release(self) -> None:
        """Give the clock back to the governor."""
        self.driver.clock.requests.remove(self)


def _entry_count(arg: Any, most: int) -> int:
    """How many entries a query is about: all domains, or with flag 1 as many as the caller names, up to `most`."""
    if not arg.flags:
        return len(DOMAINS)
    require(arg.flags == k.NVGPU_GPU_CLK_FLAG_SPECIFIC_DOMAINS)
    require(arg.num_entries <= most)
    return int(arg.num_entries)


def clk_get_range(file: CtrlFile, call: Call) -> Steps:
    """CLK_GET_RANGE: one domain, the GPC clock."""
    arg, clock, size = call.arg, file.driver.clock, ctypes.sizeof(s.GpuClkRangeItem)
    if not arg.flags and not arg.num_entries:
        arg.num_entries = len(DOMAINS)
        return None
    count = _entry_count(arg, len(DOMAINS))
    for i in range(count):
        at, domain = arg.clk_range_entries + i * size, DOMAINS[0]
        if arg.flags:
            domain = s.GpuClkRangeItem.from_buffer_copy((yield from copy_in(at, size))).clk_domain
        require(domain in DOMAINS)
        left = yield from copy_out(at, bytes(s.GpuClkRangeItem(0, domain, clock.least, clock.most)))
        require(left == 0, errno.EFAULT)
    arg.num_entries = count
    return None


def clk_get_info(file: CtrlFile, call: Call) -> Steps:
    """CLK_GET_INFO: the target of this fd, what the arbiter set, and what the clock is."""
    arg, clock, size = call.arg, file.driver.clock, ctypes.sizeof(s.GpuClkInfo)
    if not arg.flags and not arg.num_entries:
        arg.num_entries = len(DOMAINS)
        return None
    count = _entry_count(arg, len(DOMAINS) * TYPES_PER_DOMAIN)
    rates = {
        k.NVGPU_GPU_CLK_TYPE_TARGET: file.target_mhz * MHZ,
        k.NVGPU_GPU_CLK_TYPE_ACTUAL: clock.actual,
        k.NVGPU_GPU_CLK_TYPE_EFFECTIVE: clock.effective,
    }
    for i in range(count):
        at = arg.clk_info_entries + i * size
        entry = s.GpuClkInfo(clk_type=arg.clk_type, clk_domain=DOMAINS[0])
        if arg.flags:
            entry = s.GpuClkInfo.from_buffer_copy((yield from copy_in(at, size)))
        require(entry.clk_type in rates)
        require(entry.clk_domain in DOMAINS)
        entry.flags, entry.freq_hz = 0, rates[entry.clk_type]
        left = yield from copy_out(at, bytes(entry))
        require(left == 0, errno.EFAULT)
    arg.num_entries = count
    return None


def clk_get_vf_points(file: CtrlFile, call: Call) -> Steps:
    """CLK_GET_VF_POINTS: the frequencies the clock can take. A bad address returns what is left of one point."""
    arg, points = call.arg, clock_points(file.driver.chip)
    require(arg.flags == 0)
    arg.num_entries = 0
    require(arg.clk_domain in DOMAINS)
    if not arg.max_entries:
        arg.max_entries = len(points)
        return None
    require(arg.max_entries >= len(points))
    for i, point in enumerate(points):
        left = yield from copy_out(arg.clk_vf_point_entries + 8 * i, point.to_bytes(8, "little"))
        if left:
            return left
    arg.num_entries = len(points)
    return None


def clk_set_info(file: CtrlFile, call: Call) -> Steps:
    """CLK_SET_INFO: ask for a clock; it holds while the completion fd is open. 0 Hz keeps the fd's target."""
    arg, clock = call.arg, file.driver.clock
    require(arg.flags == 0)
    require(0 < arg.num_entries <= len(DOMAINS))
    raw = yield from copy_in(arg.clk_info_entries, ctypes.sizeof(s.GpuClkInfo))
    entry = s.GpuClkInfo.from_buffer_copy(raw)
    require(entry.clk_domain in DOMAINS)
    call.install("completion_fd", ClockFile(file.driver, file.process))
    file.target_mhz = min(entry.freq_hz // MHZ, MAX_TARGET_MHZ) or file.target_mhz
    clock.run()
    return None
