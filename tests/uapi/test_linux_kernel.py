"""LinuxKernel on objects that exist everywhere: a pipe, a memfd, /dev/null, a directory of our own."""

import ctypes
import errno
import grp
import mmap
import os
import signal
import stat
import struct
import termios
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from tegrad.uapi import ioctls, kernel, structs
from tegrad.uapi.errors import DriverError
from tegrad.uapi.ioctls import ROWS, Ioctl
from tegrad.uapi.kernel import LinuxKernel

PAGE = mmap.PAGESIZE
FIONREAD = Ioctl("FIONREAD", "FIONREAD", "ctrl", 0x1B, termios.FIONREAD, "r", ctypes.c_int32)
"""A call that a pipe answers: the number of bytes waiting in it."""


@pytest.fixture
def linux() -> LinuxKernel:
    return LinuxKernel()


@pytest.fixture
def null(linux: LinuxKernel) -> Iterator[int]:
    fd = linux.open("/dev/null")
    yield fd
    linux.close(fd)


@pytest.fixture
def memory(linux: LinuxKernel) -> Iterator[int]:
    fd = os.memfd_create("test")
    os.ftruncate(fd, 0x10000)
    yield fd
    linux.close(fd)


def open_fds() -> int:
    return len(os.listdir("/proc/self/fd"))


def maps() -> int:
    return Path("/proc/self/maps").read_text().count("memfd:test")


def test_open_is_close_on_exec_and_read_write(linux: LinuxKernel, null: int) -> None:
    assert not os.get_inheritable(null)
    flags = int(
        next(x.split()[1] for x in Path(f"/proc/self/fdinfo/{null}").read_text().splitlines() if "flags" in x), 8
    )
    assert flags & os.O_ACCMODE == os.O_RDWR


def test_an_open_that_fails_without_a_number_has_none(linux: LinuxKernel, monkeypatch: pytest.MonkeyPatch) -> None:
    """As where an audit hook refuses it: no errno is made up."""

    def refused(path: str, flags: int) -> int:
        raise OSError("refused")

    with monkeypatch.context() as patch:
        patch.setattr(os, "open", refused)
        with pytest.raises(DriverError) as caught:
            linux.open("/dev/null")
    assert caught.value.errno == 0


def test_close_gives_the_number_back(linux: LinuxKernel) -> None:
    before = open_fds()
    fd = linux.open("/dev/null")
    assert open_fds() == before + 1
    linux.close(fd)
    assert open_fds() == before
    with pytest.raises(DriverError, match=rf"close\(fd={fd}\) failed: EBADF .*: the file descriptor is not open"):
        linux.close(fd)


def test_an_interrupted_close_has_closed(linux: LinuxKernel, monkeypatch: pytest.MonkeyPatch) -> None:
    closed: list[int] = []

    def interrupted(fd: int) -> None:
        closed.append(fd)
        raise OSError(errno.EINTR, "interrupted")

    monkeypatch.setattr(os, "close", interrupted)
    linux.close(12345)
    assert closed == [12345]


def test_ioctl_fills_a_scalar_and_returns_zero(linux: LinuxKernel) -> None:
    r, w = os.pipe()
    try:
        os.write(w, b"abc")
        arg = ctypes.c_int32(-1)
        assert linux.ioctl(r, FIONREAD, arg) == 0
        assert arg.value == 3
    finally:
        os.close(r)
        os.close(w)


@pytest.mark.parametrize("row", ROWS, ids=lambda r: r.name)
def test_dev_null_refuses_every_row_with_enotty(linux: LinuxKernel, null: int, row: Ioctl) -> None:
    arg: kernel.Arg = 7 if row.by_value else row.struct() if row.struct else None
    with pytest.raises(DriverError) as caught:
        linux.ioctl(null, row, arg)
    assert caught.value.errno == errno.ENOTTY
    assert str(caught.value).startswith(f"{row.name}(fd={null}")


@pytest.mark.parametrize(
    ("row", "arg"),
    [
        (ioctls.NVGPU_GPU_IOCTL_ALLOC_AS, None),
        (ioctls.NVGPU_GPU_IOCTL_ALLOC_AS, structs.AsMapBufferEx()),
        (ioctls.NVGPU_GPU_IOCTL_ALLOC_AS, 5),
        (ioctls.NVGPU_IOCTL_TSG_ENABLE, structs.AllocAs()),
        (ioctls.NVGPU_IOCTL_TSG_ENABLE, 5),
        (ioctls.NVMAP_IOC_FREE, None),
        (ioctls.NVMAP_IOC_FREE, structs.CreateHandle()),
    ],
)
def test_the_wrong_argument_never_reaches_the_system(
    linux: LinuxKernel, null: int, row: Ioctl, arg: kernel.Arg
) -> None:
    with pytest.raises(TypeError, match=f"{row.name} takes"):
        linux.ioctl(null, row, arg)


def test_two_mappings_of_one_memory_alias(linux: LinuxKernel, memory: int) -> None:
    before = maps()
    first = linux.mmap(memory, 2 * PAGE, kernel.PROT_READ | kernel.PROT_WRITE, kernel.MAP_SHARED)
    second = linux.mmap(memory, PAGE, kernel.PROT_READ, kernel.MAP_SHARED, offset=PAGE)
    ctypes.c_uint32.from_address(first + PAGE).value = 0xCAFE
    assert ctypes.c_uint32.from_address(second).value == 0xCAFE
    linux.munmap(first, 2 * PAGE)
    linux.munmap(second, PAGE)
    assert maps() == before


def test_a_fixed_mapping_lands_where_it_is_told(linux: LinuxKernel, memory: int) -> None:
    anonymous = kernel.MAP_ANONYMOUS | kernel.MAP_PRIVATE
    area = linux.mmap(-1, 16 * PAGE, kernel.PROT_NONE, anonymous)
    flags = kernel.MAP_SHARED | kernel.MAP_FIXED
    try:
        assert linux.mmap(memory, PAGE, kernel.PROT_READ, flags, addr=area + 4 * PAGE) == area + 4 * PAGE
    finally:
        linux.munmap(area, 16 * PAGE)


def test_mmap_errors_carry_their_arguments(linux: LinuxKernel, null: int, memory: int) -> None:
    with pytest.raises(DriverError, match=r"mmap\(fd=\d+, size=0, .*EINVAL"):
        linux.mmap(memory, 0, kernel.PROT_READ, kernel.MAP_SHARED)
    with pytest.raises(DriverError, match=r"offset=1\) failed: EINVAL"):
        linux.mmap(memory, PAGE, kernel.PROT_READ, kernel.MAP_SHARED, offset=1)
    with pytest.raises(DriverError, match=r"munmap\(addr=1, size=0x1000\) failed: EINVAL"):
        linux.munmap(1, 4096)


class FakeMmap:
    """A libc whose mmap answers one address, and remembers what it was asked."""

    def __init__(self, answer: int | None) -> None:
        self.answer = answer
        self.asked: list[tuple[int, ...]] = []

    def mmap(self, *arguments: int) -> int | None:
        self.asked.append(arguments)
        return self.answer


def test_mmap_leaves_the_place_to_the_system_unless_told(linux: LinuxKernel, monkeypatch: pytest.MonkeyPatch) -> None:
    libc = FakeMmap(0x5000)
    monkeypatch.setattr(kernel, "libc", libc)
    assert linux.mmap(3, PAGE, kernel.PROT_READ, kernel.MAP_SHARED) == 0x5000
    assert linux.mmap(3, PAGE, kernel.PROT_READ, kernel.MAP_SHARED, addr=0x7000, offset=PAGE) == 0x5000
    assert libc.asked == [
        (0, PAGE, kernel.PROT_READ, kernel.MAP_SHARED, 3, 0),
        (0x7000, PAGE, kernel.PROT_READ, kernel.MAP_SHARED, 3, PAGE),
    ]


def test_a_mapping_at_address_0_is_none(linux: LinuxKernel, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernel, "libc", FakeMmap(None))
    with pytest.raises(DriverError, match=r"mmap\(fd=3, size=0x1000"):
        linux.mmap(3, PAGE, kernel.PROT_READ, kernel.MAP_SHARED)


def test_msync_writes_mapped_memory_back_and_tells_where_none_is(linux: LinuxKernel, memory: int) -> None:
    at = linux.mmap(memory, PAGE, kernel.PROT_READ | kernel.PROT_WRITE, kernel.MAP_SHARED)
    linux.msync(at, PAGE)
    with pytest.raises(DriverError, match=r"msync\(addr=0x[0-9a-f]+, size=0x1000\) failed: EINVAL"):
        linux.msync(at + 1, PAGE)
    linux.munmap(at, PAGE)


def test_the_doorbell_is_a_shared_page_of_32_bit_registers(linux: LinuxKernel, memory: int) -> None:
    before = maps()
    with linux.doorbell(memory) as bell:
        assert maps() == before + 1
        bell.store32(0x90, 0x0001_01FF)
        assert os.pread(memory, 12, 0x8C) == struct.pack("<III", 0, 0x0001_01FF, 0)
        os.pwrite(memory, struct.pack("<I", 0xC461), 0)
        assert bell.load32(0) == 0xC461
        bell.store32(0xFFFC, 0xFFFFFFFF)
        bell.store32(4, 7)
        assert os.pread(memory, 8, 0xFFFC) == b"\xff" * 4
        assert bell.load32(4) == 7
        for offset in (-4, 2, 3, 0x10000):
            with pytest.raises(ValueError, match="no 32-bit register"):
                bell.store32(offset, 1)
    assert maps() == before
    bell.close()
    with pytest.raises(ValueError, match="closed"):
        bell.store32(0x90, 1)


def test_every_store_is_seen_whole(linux: LinuxKernel, memory: int) -> None:
    """A reader on another thread never sees half of one value and half of another."""
    with linux.doorbell(memory) as bell, linux.doorbell(memory) as other:
        torn: list[int] = []
        stop = threading.Event()

        def watch() -> None:
            while not stop.is_set():
                value = other.load32(0x90)
                if value not in (0, 0xFFFFFFFF):
                    torn.append(value)

        thread = threading.Thread(target=watch, daemon=True)
        thread.start()
        for _ in range(20_000):
            bell.store32(0x90, 0xFFFFFFFF)
            bell.store32(0x90, 0)
        stop.set()
        thread.join()
        assert torn == []


def test_exists(linux: LinuxKernel) -> None:
    assert linux.exists("/dev/null")
    assert not linux.exists("/dev/no-such-node")


class FakeLibc:
    """A libc whose ioctl fails with the given error numbers, then succeeds."""

    def __init__(self, *codes: int) -> None:
        self.codes = list(codes)
        self.calls = 0

    def ioctl(self, fd: int, request: int, pointer: object) -> int:
        self.calls += 1
        if self.codes:
            ctypes.set_errno(self.codes.pop(0))
            return -1
        return 0


def test_interrupted_and_busy_calls_are_repeated(linux: LinuxKernel, monkeypatch: pytest.MonkeyPatch) -> None:
    libc = FakeLibc(errno.EINTR, errno.EAGAIN, errno.EINTR, errno.EAGAIN)
    monkeypatch.setattr(kernel, "libc", libc)
    assert linux.ioctl(3, ioctls.NVGPU_IOCTL_TSG_ENABLE) == 0
    assert libc.calls == 5


def test_a_driver_that_stays_busy_is_an_error_in_the_end(linux: LinuxKernel, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernel, "libc", FakeLibc(*[errno.EAGAIN] * 10_000))
    monkeypatch.setattr(kernel, "AGAIN_LIMIT_S", 0.02)
    with pytest.raises(DriverError, match=r"EAGAIN.*the hardware stayed busy"):
        linux.ioctl(3, ioctls.NVGPU_IOCTL_TSG_ENABLE)


def test_a_call_that_is_always_interrupted_is_an_error_in_the_end(
    linux: LinuxKernel, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kernel, "libc", FakeLibc(*[errno.EINTR] * 1_000_000))
    monkeypatch.setattr(kernel, "AGAIN_LIMIT_S", 0.02)
    with pytest.raises(DriverError, match="EINTR"):
        linux.ioctl(3, ioctls.NVGPU_IOCTL_TSG_ENABLE)


class FakeClock:
    """A clock that only sleeping and calls move."""

    def __init__(self, now: float) -> None:
        self.now = now
        self.slept: list[float] = []

    def monotonic(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.slept.append(seconds)
        self.now += seconds


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> FakeClock:
    made = FakeClock(1000.0)
    monkeypatch.setattr(kernel, "time", made)
    return made


def test_a_busy_driver_is_asked_again_after_a_pause_up_to_its_limit(
    linux: LinuxKernel, clock: FakeClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The time runs from the first answer, and the call at its very end is the last."""
    libc = FakeLibc(*[errno.EAGAIN] * 100)
    monkeypatch.setattr(kernel, "libc", libc)
    monkeypatch.setattr(kernel, "AGAIN_LIMIT_S", 2.0)
    monkeypatch.setattr(kernel, "AGAIN_PAUSE_S", 0.5)
    for row, arg in ((ioctls.NVGPU_IOCTL_TSG_ENABLE, None), (ioctls.NVGPU_IOCTL_CHANNEL_WAIT, structs.Wait())):
        libc.calls, clock.slept = 0, []
        with pytest.raises(DriverError, match="EAGAIN"):
            linux.ioctl(3, row, arg)
        assert (libc.calls, clock.slept) == (5, [0.5] * 4)


def test_an_interrupted_call_is_made_again_at_once(
    linux: LinuxKernel, clock: FakeClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    libc = FakeLibc(*[errno.EINTR] * 3)
    monkeypatch.setattr(kernel, "libc", libc)
    assert linux.ioctl(3, ioctls.NVGPU_IOCTL_TSG_ENABLE) == 0
    assert (libc.calls, clock.slept) == (4, [])


@pytest.mark.parametrize("code", [errno.EPERM, errno.ENOENT, errno.ENOTTY])
def test_every_error_of_a_call_is_raised(linux: LinuxKernel, monkeypatch: pytest.MonkeyPatch, code: int) -> None:
    monkeypatch.setattr(kernel, "libc", FakeLibc(code))
    with pytest.raises(DriverError) as caught:
        linux.ioctl(3, ioctls.NVGPU_IOCTL_TSG_ENABLE)
    assert caught.value.errno == code


def test_an_interrupted_sleep_is_its_callers_to_repeat(linux: LinuxKernel, monkeypatch: pytest.MonkeyPatch) -> None:
    libc = FakeLibc(errno.EINTR)
    monkeypatch.setattr(kernel, "libc", libc)
    with pytest.raises(DriverError, match="EINTR"):
        linux.ioctl(3, ioctls.NVGPU_IOCTL_CHANNEL_WAIT, structs.Wait())
    assert libc.calls == 1


def test_another_error_is_not_repeated(linux: LinuxKernel, monkeypatch: pytest.MonkeyPatch) -> None:
    libc = FakeLibc(errno.EINVAL)
    monkeypatch.setattr(kernel, "libc", libc)
    with pytest.raises(DriverError, match="EINVAL"):
        linux.ioctl(3, ioctls.NVGPU_IOCTL_TSG_ENABLE)
    assert libc.calls == 1


def test_a_real_signal_does_not_break_a_call(linux: LinuxKernel) -> None:
    """Opening a FIFO blocks until a writer comes; a signal that arrives meanwhile is handled, the open goes on."""
    seen: list[int] = []
    old = signal.signal(signal.SIGALRM, lambda number, frame: seen.append(number))
    path = Path(os.environ.get("TMPDIR", "/tmp")) / f"tegrad-fifo-{os.getpid()}"
    os.mkfifo(path)
    try:
        signal.setitimer(signal.ITIMER_REAL, 0.05)
        opener = threading.Timer(0.2, lambda: os.close(os.open(path, os.O_WRONLY)))
        opener.start()
        fd = linux.open(str(path), os.O_RDONLY | os.O_CLOEXEC)
        opener.join()
        linux.close(fd)
        assert seen == [signal.SIGALRM]
    finally:
        signal.signal(signal.SIGALRM, old)
        path.unlink()


def test_a_missing_node_says_so_and_names_the_board(linux: LinuxKernel) -> None:
    with pytest.raises(DriverError) as caught:
        linux.open("/dev/nvgpu/igpu0/no-such-node")
    assert caught.value.errno == errno.ENOENT
    assert "/dev/nvgpu/igpu0/no-such-node does not exist" in str(caught.value)
    assert "TEGRAD_BOARD=agx-orin-64gb" in str(caught.value)


def test_a_forbidden_node_names_its_group(linux: LinuxKernel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    node = tmp_path / "ctrl"
    node.touch(mode=stat.S_IRUSR)

    def refuse(path: str, flags: int) -> int:
        raise PermissionError(errno.EACCES, "Permission denied", path)

    if os.geteuid() == 0:  # root may open anything
        monkeypatch.setattr(os, "open", refuse)
    else:
        node.chmod(0)
    with pytest.raises(DriverError) as caught:
        linux.open(str(node))
    assert caught.value.errno == errno.EACCES
    assert f"no permission for {node}" in str(caught.value)
    assert grp.getgrgid(node.stat().st_gid).gr_name in str(caught.value)


KMSG_HINT = "only root may read the kernel log here: use sudo, or sysctl kernel.dmesg_restrict=0"


@pytest.mark.parametrize(
    ("path", "code", "hint"),
    [
        ("/dev/kmsg", errno.EPERM, KMSG_HINT),
        ("/dev/kmsg", errno.EACCES, KMSG_HINT),
        ("/dev/kmsg", errno.EMFILE, "too many open files in this process: raise `ulimit -n`"),
        ("/dev/nvmap", errno.EMFILE, "too many open files in this process: raise `ulimit -n`"),
        ("/nowhere/nvmap", errno.EPERM, "no permission for /nowhere/nvmap: add your user to the group video, then"),
        ("/dev/null", errno.EACCES, "no permission for /dev/null: add your user to the group GROUP, then log in again"),
    ],
)
def test_a_node_that_does_not_open_says_what_helps(
    linux: LinuxKernel, monkeypatch: pytest.MonkeyPatch, path: str, code: int, hint: str
) -> None:
    """The group is the node's own, and video where that cannot be known."""

    def refuse(path: str, flags: int) -> int:
        raise OSError(code, os.strerror(code), path)

    monkeypatch.setattr(os, "open", refuse)
    with pytest.raises(DriverError) as caught:
        linux.open(path)
    assert caught.value.errno == code
    assert caught.value.hint.startswith(hint.replace("GROUP", grp.getgrgid(os.stat("/dev/null").st_gid).gr_name))
