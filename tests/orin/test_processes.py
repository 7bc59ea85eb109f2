"""Several processes on one board: address spaces, time slices, faults, and the end of what there is."""

from __future__ import annotations

import errno
import itertools
import mmap
import os
import resource
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from gpu_programs import SPIN
from gpu_rig import PARAM_BASE, STORE, Buffer, ChannelRig
from gpu_rig import Rig as GpuRig

from tegrad.conformance.process import Child, Peer
from tegrad.conformance.rig import SETUP_FLAGS, Rig
from tegrad.hw.chips import CHIPS
from tegrad.hw.gpfifo import DOORBELL
from tegrad.hw.qmd import LAYOUTS
from tegrad.orin.client import BoardKernel, board_log, board_status
from tegrad.uapi.errors import DriverError

SPEC = "agx-orin-64gb:3GiB"
COMPUTE, COPY = 0xC7C0, 0xC7B5
CILP, WFI = 4, 1
TIMEOUT_CODE, MMU_CODE = 8, 31
BACKSTOP_S = 240.0


class Process(GpuRig):
    """What the GPU's rig offers, by way of the driver: one address space, one TSG."""

    def __init__(self, rig: Rig, *, mode: int = CILP) -> None:
        self.rig, self.mode = rig, mode
        self.chip = CHIPS["agx-orin-64gb"]
        self.events = []
        self.layout, self.param_base = LAYOUTS[self.chip.qmd], PARAM_BASE[self.chip.qmd]
        self.vm, self.tsg = rig.address_space(), rig.tsg()
        self.bell = rig.doorbell()
        for window in (self.chip.shared_window, self.chip.local_window):
            rig.reserve(self.vm, self.chip.window_size, window)

    def buffer(self, size: int = 4096, **_: Any) -> Buffer:
        """A buffer of nvmap, mapped on the GPU and here."""
        made = self.rig.buffer((size + 4095) // 4096 * 4096)
        return Buffer(self.rig.map(self.vm, made.fd), made.size, made.fd, mmap.mmap(made.fd, made.size))

    def channel(self, **_: Any) -> ChannelRig:
        """A channel with both objects."""
        made = self.rig.bound_channel(vm=self.vm, tsg=self.tsg)
        ring, userd = self.buffer(), self.buffer()
        fields = {
            "num_gpfifo_entries": 64,
            "flags": SETUP_FLAGS,
            "gpfifo_dmabuf_fd": ring.fd,
            "userd_dmabuf_fd": userd.fd,
        }
        token = int(self.rig.call(made.fd, "CHANNEL_SETUP_BIND", fields).work_submit_token)
        for class_num in (COPY, COMPUTE):
            self.rig.call(made.fd, "CHANNEL_ALLOC_OBJ_CTX", class_num=class_num)
        self.rig.call(made.fd, "CHANNEL_SET_PREEMPTION_MODE", graphics_preempt_mode=0, compute_preempt_mode=self.mode)
        return DriverChannel(self, token, ring, userd, made.fd)

    def spin(self) -> tuple[DriverChannel, Buffer]:
        """A grid that counts until its gate is set."""
        channel, gate = self.channel().setup(), self.buffer()
        channel.launch(self.qmd(self.program(SPIN, "spin"), self.arguments(gate.va, 0))).submit()
        assert self.wait(lambda: gate.u32(64))
        assert isinstance(channel, DriverChannel)
        return channel, gate

    def store(self, value: int, channel: ChannelRig | None = None) -> int:
        """What a grid stores, once it has."""
        channel, out = channel or self.channel().setup(), self.buffer()
        channel.launch(self.qmd(self.program(STORE, "store"), self.arguments(out.va, value))).submit()
        assert self.wait(lambda: out.u32() == value), "the grid did not run"
        return out.u32()

    def wait(self, condition: Callable[[], object], seconds: float = BACKSTOP_S) -> bool:
        """Poll, for as long as several processes that share two cores with others may need."""
        return super().wait(condition, seconds)


class DriverChannel(ChannelRig):
    """A channel whose doorbell is the driver's page."""

    def __init__(self, process: Process, token: int, ring: Buffer, userd: Buffer, fd: int) -> None:
        super().__init__(process, token & 0xFFF, token >> 16, ring, userd, 64)
        self.fd, self._bell = fd, process.bell

    def doorbell(self) -> ChannelRig:
        """Store the token."""
        self._bell.store32(DOORBELL, self.token)
        return self


@pytest.fixture
def kernel() -> Iterator[BoardKernel]:
    made = BoardKernel(SPEC)
    made.close(made.open("/dev/nvmap"))
    yield made
    # only after the rigs are gone
    deadline = time.monotonic() + BACKSTOP_S
    while any(board_status(SPEC)["counts"].values()) and time.monotonic() < deadline:
        time.sleep(0.01)
    assert {name: n for name, n in board_status(SPEC)["counts"].items() if n} == {}


@pytest.fixture
def rig(kernel: BoardKernel) -> Iterator[Rig]:
    with Rig(kernel, patience=BACKSTOP_S) as made:
        yield made


def counting(rig: Rig, mode: int, *, timeout_ms: int = 0) -> tuple[Child, Any]:
    """A process whose grid counts for ever. Asked, it tells the count, its notifier, GET_TIMEDOUT; `end` ends it."""

    def run(own: Rig, peer: Peer) -> None:
        process = Process(own, mode=mode)
        channel, gate = process.spin()
        record = process.buffer()
        own.call(channel.fd, "CHANNEL_SET_ERROR_NOTIFIER", offset=0, size=16, mem=record.fd)
        if timeout_ms:
            own.call(channel.fd, "CHANNEL_SET_TIMEOUT", timeout=timeout_ms)
        peer.send("running")
        while peer.value() != "end":
            peer.send([gate.u32(64), record.u32(8), own.timed_out(channel.fd)])

    child = rig.child(run)
    assert child.peer.value() == "running"
    return child, lambda: _ask(child)


def _ask(child: Child) -> list[int]:
    child.peer.send("tell")
    answer: list[int] = child.peer.value()
    return answer


def test_the_same_address_is_each_processs_own(rig: Rig) -> None:
    def other(own: Rig, peer: Peer) -> list[int]:
        process = Process(own)
        out = process.buffer()
        channel = process.channel()
        assert channel.release(out.va, 1111).run()
        peer.send(out.va)
        peer.value()
        return [out.va, out.u32()]

    child = rig.child(other)
    process = Process(rig)
    mine = process.buffer()
    assert child.peer.value() == mine.va
    assert process.channel().release(mine.va, 2222).run()
    child.peer.send()
    assert child.result() == [mine.va, 1111]
    assert mine.u32() == 2222


@pytest.mark.klog_errors("(?i)mmu fault|page fault|error notifier")
def test_an_address_that_only_another_process_has_mapped_is_a_fault(rig: Rig) -> None:
    def other(own: Rig, peer: Peer) -> int:
        process = Process(own)
        for _ in range(8):
            last = process.buffer()
        peer.send(last.va)
        peer.value()
        return last.u32()

    child, process = rig.child(other), Process(rig)
    channel, record = process.channel(), process.buffer()
    rig.call(channel.fd, "CHANNEL_SET_ERROR_NOTIFIER", offset=0, size=16, mem=record.fd)
    channel.release(child.peer.value() + (1 << 30), 1).submit()
    assert process.wait(lambda: record.u32(8) == MMU_CODE)
    child.peer.send()
    assert child.result() == 0


def test_an_endless_grid_of_one_process_does_not_starve_another(rig: Rig) -> None:
    _, ask = counting(rig, CILP)
    process = Process(rig)
    channel = process.channel().setup()
    for value in range(1, 6):
        process.store(value, channel)
    before = ask()[0]
    assert process.wait(lambda: ask()[0] > before)
    assert ask()[1:] == [0, 0]


@pytest.mark.klog_errors("ctxsw timeout|error notifier set to 8")
def test_a_process_that_blocks_the_engine_is_killed_and_the_other_goes_on(rig: Rig) -> None:
    child, ask = counting(rig, WFI, timeout_ms=300)
    began = board_log(SPEC)
    process = Process(rig)
    assert process.store(7) == 7
    assert process.wait(lambda: ask()[1:] == [TIMEOUT_CODE, 1])
    lines = board_log(SPEC)[len(began) :]
    killed = next(i for i, line in enumerate(lines) if "ctxsw timeout error: active engine id =0" in line)
    assert "ms=400" in lines[killed]
    assert sum("Host pfifo ctxsw timeout error" in line for line in lines[:killed]) == 4
    assert process.store(8) == 8
    child.peer.send("end")
    child.result()


@pytest.mark.klog_errors("unbind|ctxsw timeout")
def test_a_blocking_process_that_nobody_waits_for_lives(rig: Rig) -> None:
    _, ask = counting(rig, WFI, timeout_ms=100)
    process = Process(rig)
    assert process.channel().release(process.buffer().va, 1).run()  # the host is not the engine
    time.sleep(0.5)
    assert ask()[1:] == [0, 0]


@pytest.mark.klog_errors("(?i)mmu fault|page fault|error notifier")
def test_a_fault_of_one_process_leaves_the_others_grid_running(rig: Rig) -> None:
    _, ask = counting(rig, CILP)
    process = Process(rig)
    bad = process.channel().setup()
    bad.launch(process.qmd(process.program(STORE, "store"), process.arguments(0x4000000000, 1))).submit()
    assert process.wait(lambda: rig.timed_out(bad.fd))  # type: ignore[attr-defined]
    before = ask()[0]
    assert process.wait(lambda: ask()[0] > before)
    assert ask()[1:] == [0, 0]
    again = Process(_second(rig))
    assert again.store(5) == 5


def _second(rig: Rig) -> Rig:
    """Another rig: a ctrl fd, and so a doorbell, of its own."""
    made = Rig(rig.kernel)
    rig.at_end(made.release)
    return made


@pytest.mark.klog_errors("unbind|ctxsw timeout")
def test_a_killed_processs_grid_leaves_the_engine(rig: Rig) -> None:
    child, _ = counting(rig, WFI)
    child.kill()
    assert Process(rig).store(3) == 3


def test_512_channels_are_for_all_processes_together(rig: Rig) -> None:
    def hold(own: Rig, peer: Peer) -> int:
        made = [own.open_channel() for _ in range(300)]
        peer.send()
        peer.value()
        return len(made)

    child = rig.child(hold)
    child.peer.value()
    for _ in range(212):
        rig.open_channel()
    rig.refuses(errno.ENOMEM, rig.ctrl, "GPU_OPEN_CHANNEL", {"in_.runlist_id": -1})
    child.kill()
    for _ in range(300):
        rig.accepts(rig.ctrl, "GPU_OPEN_CHANNEL", {"in_.runlist_id": -1})
    rig.refuses(errno.ENOMEM, rig.ctrl, "GPU_OPEN_CHANNEL", {"in_.runlist_id": -1})


def test_memory_is_for_all_processes_together(rig: Rig) -> None:
    def hold(own: Rig, peer: Peer) -> None:
        own.buffer(2 << 30)
        peer.send()
        peer.value()

    child = rig.child(hold)
    child.peer.value()
    handle = rig.handle(2 << 30)
    fields = {"handle": handle, "heap_mask": 1 << 30, "flags": 0x09000003, "align": 4096, "numa_nid": -1}
    rig.refuses(errno.ENOMEM, rig.nvmap, "NVMAP_ALLOC", fields)
    child.kill()
    assert rig.wait(lambda: _succeeds(rig, fields))


def _succeeds(rig: Rig, fields: dict[str, int]) -> bool:
    try:
        rig.call(rig.nvmap, "NVMAP_ALLOC", fields)
    except DriverError as error:
        return error.errno != errno.ENOMEM
    return True


def test_addresses_end_without_harm(rig: Rig) -> None:
    """A small address space is full; unmapping one buffer makes room again, and another space is not affected."""
    small, other = rig.address_space(0x200000, 0x800000), rig.address_space()
    fds = [rig.buffer(1 << 20).fd for _ in range(7)]
    vas = [rig.map(small, fd) for fd in fds[:6]]
    fields = {"flags": 4, "compr_kind": -1, "incompr_kind": 0, "dmabuf_fd": fds[6]}
    rig.refuses(errno.ENOMEM, small, "AS_MAP_BUFFER_EX", fields)
    rig.map(other, fds[6])
    rig.unmap(small, vas[2])
    assert rig.map(small, fds[6]) == vas[2]


def test_fds_end_without_harm(rig: Rig) -> None:
    def run(own: Rig, peer: Peer) -> list[object]:
        own.address_space()
        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        used = {int(name) for name in os.listdir("/proc/self/fd")}
        free = (number for number in itertools.count() if number not in used)
        resource.setrlimit(resource.RLIMIT_NOFILE, (next(itertools.islice(free, 12, None)), hard))
        seen: list[object] = []
        try:
            for _ in range(20):
                own.tsg()
        except DriverError as error:
            seen.append(error.errno)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        own.tsg()
        return seen

    assert rig.child(run).result() == [errno.EMFILE]
