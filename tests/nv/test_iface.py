"""TegraIface: what is asked of the drivers, in which order, and that every way out releases everything."""

import errno
from typing import Any

import pytest
from fake import FakeKernel
from tinygrad import Device
from tinygrad.runtime.autogen import nv_570 as nv

from tegrad.nv import rm
from tegrad.nv.faults import NoDevice, UnsupportedDriver
from tegrad.nv.iface import GPFIFO_ENTRIES, TegraIface
from tegrad.uapi import constants as c
from tegrad.uapi import releases
from tegrad.uapi.errors import DriverError

OPENING = [
    "open",
    "NVMAP_CREATE",
    "NVMAP_ALLOC",
    "NVMAP_GET_FD",
    "mmap",
    "GPU_GET_CHARACTERISTICS",
    "GPU_ALLOC_AS",
    "AS_ALLOC_SPACE",
    "GPU_OPEN_TSG",
    "AS_MAP_BUFFER_EX",
    "TSG_CREATE_SUBCONTEXT",
    "GPU_OPEN_CHANNEL",
    "AS_BIND_CHANNEL",
    "TSG_BIND_CHANNEL_EX",
    "CHANNEL_WDT",
    "CHANNEL_SETUP_BIND",
    "CHANNEL_SET_ERROR_NOTIFIER",
    "CHANNEL_ALLOC_OBJ_CTX",
    "GPU_NUM_VSMS",
    "GPU_GET_TPC_MASKS",
]


def arguments(kernel: FakeKernel, name: str) -> list[Any]:
    return [arg for call, arg in kernel.calls if call == name]


def position(kernel: FakeKernel, name: str) -> int:
    return next(i for i, (call, _) in enumerate(kernel.calls) if call == name)


def test_the_address_space_leaves_the_driver_its_4_gib_below_2_to_the_40(
    fake_kernel: FakeKernel, fake_device: Any
) -> None:
    (arg,) = arguments(fake_kernel, "GPU_ALLOC_AS")
    assert (arg.big_page_size, arg.va_range_start, arg.va_range_split) == (0, 0x200000, 0)
    assert arg.va_range_end + (1 << 32) == 1 << 40


def test_the_windows_are_reserved_before_anything_is_mapped(fake_kernel: FakeKernel, fake_device: Any) -> None:
    assert fake_kernel.reserved == [(0xFD00000000, 1 << 32), (0xFE00000000, 1 << 32)]
    assert position(fake_kernel, "AS_ALLOC_SPACE") < position(fake_kernel, "AS_MAP_BUFFER_EX")
    assert (fake_device.local_mem_window, fake_device.shared_mem_window) == (0xFD00000000, 0xFE00000000)


def test_a_channel_is_set_up_in_the_driver_s_order(fake_kernel: FakeKernel, fake_device: Any) -> None:
    order = [
        "GPU_OPEN_CHANNEL",
        "AS_BIND_CHANNEL",
        "TSG_BIND_CHANNEL_EX",
        "CHANNEL_WDT",
        "CHANNEL_SETUP_BIND",
        "CHANNEL_SET_ERROR_NOTIFIER",
        "CHANNEL_ALLOC_OBJ_CTX",
        "CHANNEL_SET_PREEMPTION_MODE",
    ]
    positions = [position(fake_kernel, name) for name in order]
    assert positions == sorted(positions)
    assert arguments(fake_kernel, "CHANNEL_WDT")[0].wdt_status == c.NVGPU_IOCTL_CHANNEL_DISABLE_WDT
    assert [arg.class_num for arg in arguments(fake_kernel, "CHANNEL_ALLOC_OBJ_CTX")] == [0xC7C0, 0xC7B5]
    (mode,) = arguments(fake_kernel, "CHANNEL_SET_PREEMPTION_MODE")
    assert mode.compute_preempt_mode == c.NVGPU_COMPUTE_PREEMPTION_MODE_CILP


def test_every_channel_has_a_small_gpfifo_and_userd_of_its_own(fake_kernel: FakeKernel, fake_device: Any) -> None:
    setups = arguments(fake_kernel, "CHANNEL_SETUP_BIND")
    assert [(s.num_gpfifo_entries, s.flags, s.gpfifo_dmabuf_offset, s.userd_dmabuf_offset) for s in setups] == [
        (GPFIFO_ENTRIES, 0xA, 0, 0)
    ] * 2
    rings = {channel.ring for channel in fake_kernel.channels} | {channel.userd for channel in fake_kernel.channels}
    assert len(rings) == 4
    assert [fifo.token for fifo in (fake_device.compute_gpfifo, fake_device.dma_gpfifo)] == [511, 510]


def test_the_fixed_overhead_is_small(fake_kernel: FakeKernel, fake_device: Any) -> None:
    assert sum(size for _, size in fake_kernel.gpu_maps.values()) < 8 << 20
    assert len(fake_kernel.handles) == 10


def test_the_chip_is_what_the_driver_says(fake_kernel: FakeKernel, fake_device: Any) -> None:
    assert (fake_device.arch, fake_device.sass_version, fake_device.iface.sm_count) == ("sm_87", 0x87, 16)
    assert (fake_device.num_gpcs, fake_device.num_tpc_per_gpc, fake_device.num_sm_per_tpc) == (2, 4, 2)
    assert fake_device.max_warps_per_sm == 48


@pytest.mark.parametrize("chip", ["orin-nano-4gb", "orin-nano-8gb", "agx-orin-32gb", "gh100", "h100-pcie"])
def test_other_chips_bring_their_own_numbers(fake_kernel: FakeKernel, chip: str) -> None:
    from tegrad.hw.chips import CHIPS

    fake_kernel.chip = CHIPS[chip]
    device = Device["NV"]
    assert (device.arch, device.iface.compute_class) == (CHIPS[chip].arch, CHIPS[chip].compute_class)
    assert device.sm_count == device.iface.sm_count == CHIPS[chip].sm_count
    assert device.num_sm_per_tpc == 2


def test_an_unknown_chip_is_named(fake_kernel: FakeKernel, monkeypatch: pytest.MonkeyPatch) -> None:
    from tegrad.hw import chips

    monkeypatch.setattr(chips, "CHIPS", {})
    with pytest.raises(rm.RmError, match="0x807"):
        TegraIface(None, 0)


def test_the_clock_is_raised_while_the_device_is_open(fake_kernel: FakeKernel, fake_device: Any) -> None:
    assert fake_kernel.counts["GPU_CLK_SET_INFO"] == 1
    assert "clock" in {kind for kind, _ in fake_kernel.fds.values()}
    fake_device.close()
    assert fake_kernel.fds == {}


def test_the_driver_of_jetpack_5_is_told_in_one_sentence(fake_kernel: FakeKernel) -> None:
    fake_kernel.fail["GPU_OPEN_TSG"] = errno.ENOTTY
    with pytest.raises(UnsupportedDriver, match=r"JetPack 5.*OPEN_TSG takes 8 bytes.*install JetPack 6") as caught:
        Device["NV"]
    assert isinstance(caught.value.__cause__, DriverError)
    assert "\n" not in str(caught.value)


def test_a_newer_release_that_refuses_a_call_says_what_to_send(
    fake_kernel: FakeKernel, monkeypatch: pytest.MonkeyPatch
) -> None:
    newer = releases.Found("39.2", releases.row(releases.L4T, 39), "")
    monkeypatch.setattr(releases, "l4t", lambda: newer)
    fake_kernel.fail["AS_MAP_BUFFER_EX"] = errno.EINVAL
    with pytest.raises(UnsupportedDriver, match=r"L4T r39\.2 .*tegrad doctor --json"):
        Device["NV"]
    monkeypatch.setenv("TEGRAD_BOARD", "agx-orin-64gb")  # of whose release this machine's file says nothing
    with pytest.raises(DriverError):
        Device["NV"]


def test_a_desktop_driver_that_refuses_tinygrad_is_told(
    fake_kernel: FakeKernel, monkeypatch: pytest.MonkeyPatch
) -> None:
    from tinygrad.runtime import ops_nv

    class NVKIface:
        def __init__(self, dev: Any, number: int) -> None:
            raise RuntimeError("rm_control returned NV_ERR_INVALID_PARAM_STRUCT")

    monkeypatch.setattr(ops_nv.NVDevice, "ifaces", [TegraIface, NVKIface])
    monkeypatch.setattr(fake_kernel, "exists", lambda path: False)
    fake_kernel.fail["open"] = errno.ENOENT
    for version, said in (("550.54.15", UnsupportedDriver), ("580.159.04", NoDevice)):
        found = releases.Found(version, releases.row(releases.DESKTOP, int(version[:3])), "")
        monkeypatch.setattr(releases, "desktop", lambda found=found: found)
        with pytest.raises(NoDevice, match=r"776 bytes" if said is UnsupportedDriver else "INVALID_PARAM") as caught:
            Device["NV"]
        assert type(caught.value) is said
    fake_kernel.fail.clear()


def test_a_refused_clock_is_no_reason_to_fail(fake_kernel: FakeKernel) -> None:
    fake_kernel.fail["GPU_CLK_SET_INFO"] = errno.EINVAL
    Device["NV"].synchronize()


@pytest.mark.parametrize("step", OPENING)
def test_opening_that_fails_leaves_nothing_open(fake_kernel: FakeKernel, step: str) -> None:
    fake_kernel.fail[step] = errno.EIO
    with pytest.raises((DriverError, MemoryError)):
        Device["NV"]
    fake_kernel.fail.clear()
    assert set(fake_kernel.held().values()) == {0}


@pytest.mark.parametrize("step", ["NVMAP_ALLOC", "CHANNEL_SETUP_BIND", "AS_MAP_BUFFER_EX", "CHANNEL_ALLOC_OBJ_CTX"])
@pytest.mark.parametrize("nth", [2, 3, 5])
def test_opening_that_fails_late_leaves_nothing_open(
    fake_kernel: FakeKernel, monkeypatch: pytest.MonkeyPatch, step: str, nth: int
) -> None:
    real = fake_kernel._fail

    def fail(name: str) -> None:
        real(name)
        if name == step and fake_kernel.counts[step] == nth:
            raise DriverError(name, errno.EIO)

    monkeypatch.setattr(fake_kernel, "_fail", fail)
    try:
        Device["NV"]
    except DriverError:
        assert set(fake_kernel.held().values()) == {0}
    else:
        assert fake_kernel.counts[step] < nth


def test_unknown_calls_are_refused_by_name(fake_device: Any) -> None:
    iface = fake_device.iface
    with pytest.raises(rm.RmError, match="MAXWELL_PROFILER_DEVICE"):
        iface.rm_alloc(fake_device.subdevice, nv.MAXWELL_PROFILER_DEVICE)
    with pytest.raises(rm.RmError, match="NV0080_CTRL_CMD_GPU_GET_CLASSLIST"):
        iface.rm_control(fake_device.nvdevice, nv.NV0080_CTRL_CMD_GPU_GET_CLASSLIST)


def test_a_wrong_object_is_refused(fake_device: Any) -> None:
    with pytest.raises(rm.RmError, match="wrong object"):
        fake_device.iface.rm_control(
            fake_device.nvdevice,
            nv.NVC36F_CTRL_CMD_GPFIFO_GET_WORK_SUBMIT_TOKEN,
            nv.NVC36F_CTRL_CMD_GPFIFO_GET_WORK_SUBMIT_TOKEN_PARAMS(),
        )


def test_a_second_gpu_does_not_exist(fake_kernel: FakeKernel) -> None:
    with pytest.raises(rm.RmError, match="one GPU"):
        TegraIface(None, 1)


def test_buffers_keep_their_size_and_are_seen_by_both_sides(fake_kernel: FakeKernel, fake_device: Any) -> None:
    buffer = fake_device.iface.alloc(5000)
    assert buffer.size == 5000
    buffer.cpu_view()[:4] = b"abcd"
    import ctypes

    assert ctypes.string_at(fake_kernel.host(buffer.va_addr), 4) == b"abcd"
    held = fake_kernel.held()
    fake_device.iface.free(buffer)
    fake_device.iface.give_back()
    assert fake_kernel.held() == {**held, **{k: held[k] - 1 for k in ("handles", "maps", "gpu maps")}}
    fake_device.iface.free(buffer)


def test_a_buffer_that_cannot_be_mapped_is_given_back(fake_kernel: FakeKernel, fake_device: Any) -> None:
    held = fake_kernel.held()
    for code, error in ((errno.ENOMEM, MemoryError), (errno.EINVAL, DriverError)):
        fake_kernel.fail["AS_MAP_BUFFER_EX"] = code
        with pytest.raises(error):
            fake_device.iface.alloc(4096)
    assert fake_kernel.held() == held


def test_an_address_is_told_by_its_buffer(fake_device: Any) -> None:
    buffer = fake_device.iface.alloc(4096)
    describe = fake_device.iface.describe_address
    assert describe(buffer.va_addr + 8) == f"byte 0x8, in the buffer of 4096 bytes at {buffer.va_addr:#x}"
    assert "after" in describe(buffer.va_addr + 4096)
    fake_device.iface._freed.clear()
    lowest = min(memory.va for memory in fake_device.iface.memory.values() if memory.va)
    assert describe(lowest - 16).startswith("0x10 bytes in front of the buffer of ")
    fake_device.iface.free(buffer)
    assert describe(buffer.va_addr + 8) == f"byte 0x8 of a buffer of 4096 bytes at {buffer.va_addr:#x} that was freed"
    assert describe(0) is None


def test_a_board_that_was_asked_for_is_not_replaced_by_a_gpu(
    fake_kernel: FakeKernel, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TEGRAD_BOARD", "agx-orin-64gb")
    fake_kernel.fail["open"] = errno.ENOENT
    with pytest.raises(DriverError):
        Device["NV"]


def test_a_machine_without_a_gpu_is_told_in_one_error(fake_kernel: FakeKernel, monkeypatch: pytest.MonkeyPatch) -> None:
    from tinygrad.runtime import ops_nv

    class NVKIface:
        def __init__(self, dev: Any, number: int) -> None:
            raise FileNotFoundError("/dev/nvidiactl")

    monkeypatch.setattr(ops_nv.NVDevice, "ifaces", [TegraIface, NVKIface])
    monkeypatch.setattr(fake_kernel, "exists", lambda path: False)
    fake_kernel.fail["open"] = errno.ENOENT
    with pytest.raises(NoDevice, match=r"DriverError: open.*FileNotFoundError: /dev/nvidiactl") as caught:
        Device["NV"]
    assert caught.value.__suppress_context__
