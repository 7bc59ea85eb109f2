"""Stage 2: the drivers' ioctls that need no GPU work."""

from __future__ import annotations

import os

from tegrad.conformance.rig import NVMAP, PAGE, Rig
from tegrad.diag.selftest.stage import Notes
from tegrad.hw.chips import by_sm_version
from tegrad.nv.kernel import pick_kernel
from tegrad.uapi import constants as k

BUFFER_SIZES = (PAGE, 64 << 10, 16 << 20)


def ioctls(notes: Notes) -> None:
    """Characteristics, buffers, address space, mappings, channel set-up; and that closing gives all of it back."""
    kernel = pick_kernel()
    with notes.step("open"):
        kernel.close(kernel.open(NVMAP))  # a board's own connection is there from now on
    before = _fds()
    with Rig(kernel) as rig:
        _walk(notes, rig)
    with notes.step("close"):
        notes.expect(_fds() == before, f"{before} open files as before", _fds())


def _walk(notes: Notes, rig: Rig) -> None:
    with notes.step("characteristics"):
        info = rig.characteristics()
        notes.fact("sm version", hex(info.sm_arch_sm_version))
        notes.fact("L2 bytes", info.L2_cache_size)
        notes.fact("GPCs", info.num_gpc)
        notes.fact("max MHz", round(info.max_freq / 1e6))
        try:
            chip = by_sm_version(info.sm_arch_sm_version)
        except KeyError:
            notes.expect(False, "a chip that tegrad has a row of", hex(info.sm_arch_sm_version))
            return
        classes = (info.compute_class, info.gpfifo_class, info.dma_copy_class)
        wanted = (chip.compute_class, chip.gpfifo_class, chip.dma_class)
        notes.expect(classes == wanted, f"the classes {wanted}", classes)
        usermode = info.flags & k.NVGPU_GPU_FLAGS_SUPPORT_USERMODE_SUBMIT
        notes.expect(usermode, "usermode submission", hex(info.flags))
        sms = int(rig.call(rig.ctrl, "GPU_NUM_VSMS").num_vsms)
        notes.fact("SMs", sms)
        notes.fact("chip", f"{chip.chip} ({chip.arch}), {sms} SMs")
    buffers = []
    for size in BUFFER_SIZES:
        with notes.step(f"a buffer of {size >> 10} KiB: alloc and mmap"):
            buffers.append(rig.buffer(size))
            cpu = rig.mapped(buffers[-1])
            cpu.put32(size, size - 4)
            notes.expect(cpu.u32(size - 4) == size, "the word that was stored", cpu.u32(size - 4))
            notes.expect(cpu.u32() == 0, "zeroed memory", hex(cpu.u32()))
    with notes.step("address space"):
        vm = rig.address_space()
        for window in (chip.shared_window, chip.local_window):
            rig.reserve(vm, chip.window_size, window)
    with notes.step("map and unmap"):
        for buffer in buffers:
            va = rig.map(vm, buffer.fd)
            notes.expect(0 < va < 1 << chip.va_bits, f"an address below 2^{chip.va_bits}", hex(va))
            rig.unmap(vm, va)
    with notes.step("TSG and channel, set up and not rung"):
        channel = rig.channel_ready(vm=vm)
        notes.fact("doorbell token", hex(channel.token))
        notes.expect(rig.timed_out(channel.fd) == 0, "a channel that lives", "GET_TIMEDOUT 1")
    with notes.step("engine objects"):
        for number in (chip.compute_class, chip.dma_class):
            rig.call(channel.fd, "CHANNEL_ALLOC_OBJ_CTX", class_num=number)


def _fds() -> int:
    return len(os.listdir("/proc/self/fd"))
