"""Tracer: every call decoded on one line, results and errors passed on unchanged."""

import ctypes
import json
import os
from pathlib import Path

import pytest
from tinygrad.runtime.autogen import nv_570

from tegrad.uapi import constants as c
from tegrad.uapi import desktop, ioctls, structs
from tegrad.uapi.errors import DriverError
from tegrad.uapi.fields import UNIONS, leaf_fields, nonzero_fields
from tegrad.uapi.flags import FORMATTERS, field_text
from tegrad.uapi.ioctls import BY_NAME, Ioctl, set_field
from tegrad.uapi.kernel import MAP_SHARED, PROT_READ, Arg, Kernel, LinuxKernel
from tegrad.uapi.trace import Call, Tracer

DATA = Path(__file__).parents[1] / "data"


class ScriptedKernel(LinuxKernel):
    """A kernel whose ioctls answer like nvgpu would, on any fd."""

    def ioctl(self, fd: int, row: Ioctl, arg: Arg = None) -> int:
        if isinstance(arg, structs.AsMapBufferEx):
            arg.offset = 0xFEFFA00000
        elif isinstance(arg, structs.GpuOpenChannel):
            arg.channel_fd = 12
        elif isinstance(arg, structs.GpuGetCpuTimeCorrelationInfo):
            arg.samples[0].gpu_timestamp = 99
        elif isinstance(arg, ctypes.c_int32):
            raise DriverError(row.name, 22, {"fd": fd})
        return 0


def line(call: Call) -> str:
    return str(call).rsplit(" [", 1)[0]


def test_an_ioctl_shows_flags_by_name_and_what_the_driver_wrote() -> None:
    tracer = Tracer(ScriptedKernel())
    flags = c.NVGPU_AS_MAP_BUFFER_FLAGS_CACHEABLE | c.NVGPU_AS_MAP_BUFFER_ACCESS_READ_ONLY << 10
    tracer.ioctl(7, ioctls.NVGPU_AS_IOCTL_MAP_BUFFER_EX, structs.AsMapBufferEx(flags=flags, compr_kind=-1, dmabuf_fd=9))
    assert line(tracer.calls[0]) == (
        "AS_MAP_BUFFER_EX(fd=7, flags=CACHEABLE|READ_ONLY, compr_kind=-1, dmabuf_fd=9) = 0 -> offset=0xfeffa00000"
    )


def test_a_union_shows_only_the_members_that_mean_something() -> None:
    tracer = Tracer(ScriptedKernel())
    arg = structs.GpuOpenChannel()
    arg.in_.runlist_id = -1
    tracer.ioctl(5, ioctls.NVGPU_GPU_IOCTL_OPEN_CHANNEL, arg)
    assert line(tracer.calls[0]) == "GPU_OPEN_CHANNEL(fd=5, in_.runlist_id=-1) = 0 -> channel_fd=12"


def test_a_member_called_fd_does_not_hide_the_fd() -> None:
    tracer = Tracer(ScriptedKernel())
    tracer.ioctl(4, ioctls.NVMAP_IOC_FROM_FD, structs.CreateHandle(fd=9))
    assert line(tracer.calls[0]) == "NVMAP_FROM_FD(fd=4, arg.fd=9) = 0"


def test_every_ioctl_with_a_union_says_what_it_shows() -> None:
    for row in BY_NAME.values():
        if row.struct is None or row.struct in (structs.GpuPrepareCompressibleRead, structs.AsMapBufferCompbits):
            continue  # not in use: all their members are shown
        members = [name for name, _ in leaf_fields(row.struct())]
        offsets = {name for name in members if overlaps(row.struct, name)}
        used = not row.name.startswith(("NVMAP_FROM_I", "NVMAP_GET_I"))  # FROM_ID, GET_ID and the hypervisor's
        assert not offsets or row.name in UNIONS or not used, row.name
    for name, (inputs, outputs) in UNIONS.items():
        struct = BY_NAME[name].struct
        assert struct is not None
        assert inputs | outputs <= {member for member, _ in leaf_fields(struct())}, name


def overlaps(struct: type, name: str) -> bool:
    """Whether setting this member alone changes another one."""
    arg = struct()
    try:
        set_field(arg, name, 1)
    except TypeError:
        return False  # an array
    return [n for n, value in nonzero_fields(arg).items() if value and n != name] != []


def test_a_change_inside_an_array_of_structs_shows() -> None:
    tracer = Tracer(ScriptedKernel())
    tracer.ioctl(5, ioctls.NVGPU_GPU_IOCTL_GET_CPU_TIME_CORRELATION_INFO, structs.GpuGetCpuTimeCorrelationInfo(count=1))
    assert set(tracer.calls[0].written) == {"samples"}


def test_a_failure_shows_and_is_raised() -> None:
    tracer = Tracer(ScriptedKernel())
    with pytest.raises(DriverError):
        tracer.ioctl(6, ioctls.NVGPU_TSG_IOCTL_BIND_CHANNEL, ctypes.c_int32(8))
    assert line(tracer.calls[0]) == "TSG_BIND_CHANNEL(fd=6, value=8) = EINVAL"


def test_a_by_value_argument_shows() -> None:
    tracer = Tracer(ScriptedKernel())
    tracer.ioctl(4, ioctls.NVMAP_IOC_FREE, 0x80000015)
    assert line(tracer.calls[0]) == "NVMAP_FREE(fd=4, arg=0x80000015) = 0"


def test_every_other_call_shows_and_works(tmp_path: Path) -> None:
    lines: list[str] = []
    tracer = Tracer(LinuxKernel(), lambda call: lines.append(line(call)))
    path = tmp_path / "registers"
    path.write_bytes(bytes(0x10000))
    fd = tracer.open(str(path))
    bell = tracer.doorbell(fd)
    bell.store32(0x90, 0x0001_01FF)
    assert bell.load32(0x90) == 0x0001_01FF
    address = tracer.mmap(fd, 4096, PROT_READ, MAP_SHARED)
    tracer.munmap(address, 4096)
    bell.close()
    assert tracer.exists(str(path))
    tracer.close(fd)
    with pytest.raises(DriverError):
        tracer.open(str(tmp_path / "missing"))
    flags = hex(os.O_RDWR | os.O_CLOEXEC)
    assert lines == [
        f"open(path='{path}', flags={flags}) = {fd}",
        f"doorbell(fd={fd}, size=0x10000) = ok",
        "store32(offset=144, value=0x101ff, chid=511, runlist=1) = ok",
        "load32(offset=144) = 0x101ff",
        f"mmap(fd={fd}, size=0x1000, prot=1, flags=1, addr=0, offset=0) = {address:#x}",
        f"munmap(addr={address:#x}, size=0x1000) = ok",
        "doorbell_close() = ok",
        f"exists(path='{path}') = 1",
        f"close(fd={fd}) = ok",
        f"open(path='{tmp_path / 'missing'}', flags={flags}) = ENOENT",
    ]


def test_a_tracer_is_a_kernel() -> None:
    kernel: Kernel = Tracer(Tracer(LinuxKernel()))
    assert kernel.exists("/dev/null")


def test_formatters_name_fields_that_exist() -> None:
    for name, field in FORMATTERS:
        if name in desktop.BLOCKS:
            assert field in desktop.BLOCKS[name]
            continue
        struct = BY_NAME[name].struct
        assert struct is not None
        assert hasattr(struct, field), (name, field)


@pytest.mark.parametrize(
    ("name", "field", "value", "text"),
    [
        ("NVMAP_ALLOC", "heap_mask", 1 << 30, "IOVMM"),
        ("NVMAP_ALLOC", "flags", 0x0900_0002, "INNER_CACHEABLE|tag=0x900"),
        ("NVMAP_ALLOC", "flags", 5, "WRITE_COMBINE|SECURE"),
        ("CHANNEL_WDT", "wdt_status", 1, "DISABLE_WDT"),
        ("CHANNEL_ALLOC_OBJ_CTX", "class_num", 0xC7C0, "AMPERE_COMPUTE_B"),
        ("CHANNEL_SET_PREEMPTION_MODE", "compute_preempt_mode", 4, "CILP"),
        ("AS_ALLOC_SPACE", "flags", 1, "FIXED_OFFSET"),
        ("AS_ALLOC_SPACE", "flags", 0x11, "FIXED_OFFSET|0x10"),
        ("CHANNEL_WAIT", "type", 0, "NOTIFIER"),
        ("GPU_ALLOC_AS", "flags", 0, "0x0"),
    ],
)
def test_numbers_become_names(name: str, field: str, value: int, text: str) -> None:
    assert field_text(name, field, value) == text


CLASS_IDS = {
    **{row["class_name"]: row["class_id"] for row in json.loads((DATA / "classes.json").read_text()).values()},
    **{name: value for name, value in vars(nv_570).items() if isinstance(value, int)},
}
"""NVIDIA's class headers, and tinygrad's reading of the desktop driver's."""


@pytest.mark.parametrize(
    "name",
    [
        *("FERMI_TWOD_A", "KEPLER_INLINE_TO_MEMORY_B", "AMPERE_CHANNEL_GPFIFO_B", "AMPERE_B", "AMPERE_DMA_COPY_B"),
        *("AMPERE_COMPUTE_B", "HOPPER_CHANNEL_GPFIFO_A", "HOPPER_DMA_COPY_A", "HOPPER_A", "HOPPER_COMPUTE_A"),
    ],
)
def test_classes_have_their_names_in_nvidias_headers(name: str) -> None:
    assert field_text("CHANNEL_ALLOC_OBJ_CTX", "class_num", CLASS_IDS[name]) == name


@pytest.mark.parametrize(
    ("result", "shown"), [(4095, "4095"), (4096, "0x1000"), (-4095, "-4095"), (-4096, "-0x1000"), (None, "ok")]
)
def test_small_results_are_decimal_and_addresses_are_not(result: int | None, shown: str) -> None:
    assert line(Call("mmap", {}, {}, result, "", 0.0)) == f"mmap() = {shown}"


def test_msync_is_carried_out_and_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    kernel, asked = LinuxKernel(), []
    monkeypatch.setattr(kernel, "msync", lambda addr, size: asked.append((addr, size)), raising=False)
    tracer = Tracer(kernel)
    tracer.msync(0x10000, 4096)
    assert asked == [(0x10000, 4096)]
    assert line(tracer.calls[0]).startswith("msync(addr=0x10000, size=0x1000) = ok")
