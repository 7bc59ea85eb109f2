"""The ctrl fd's clock calls, and the completion fd that CLK_SET_INFO makes.

Source: L4T r36.4.3 nvgpu, os/linux/ioctl_clk_arb.c and ioctl_ctrl.c.
"""

from __future__ import annotations

import ctypes
import errno
from typing import Any

from tegrad.orin.arbiter import MHZ, clock_points
from tegrad.orin.ctrl import CtrlFile
from tegrad.orin.files import Call, File, Table
from tegrad.orin.state import DriverState
from tegrad.orin.steps import Process, Steps, copy_in, copy_out, require
from tegrad.uapi import constants as k
from tegrad.uapi import ioctls as io
from tegrad.uapi import structs as s

MAX_TARGET_MHZ = 0xFFFF  # a target is 16 bits of MHz
DOMAINS = (k.NVGPU_GPU_CLK_DOMAIN_GPCCLK,)
TYPES_PER_DOMAIN = 3


class ClockFile(File):
    """A completion fd of CLK_SET_INFO: readable at once; while it is open the clock stays."""

    kind = "clk"

    def __init__(self, driver: DriverState, process: Process) -> None:
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


HANDLERS: Table = {
    io.NVGPU_GPU_IOCTL_CLK_GET_RANGE.request: clk_get_range,
    io.NVGPU_GPU_IOCTL_CLK_GET_VF_POINTS.request: clk_get_vf_points,
    io.NVGPU_GPU_IOCTL_CLK_GET_INFO.request: clk_get_info,
    io.NVGPU_GPU_IOCTL_CLK_SET_INFO.request: clk_set_info,
}
