"""The only way to the operating system: the Kernel seam, and LinuxKernel, which makes the system calls.

Everything above talks to a `Kernel`: `LinuxKernel` on a real device, the board's client on the emulated one. Both raise
`DriverError`, retry what a signal or a busy driver interrupted, and hand out addresses and file descriptors as plain
integers that the caller releases.
"""

import ctypes
import errno
import grp
import mmap as mmap_module
import os
import time
from collections.abc import Callable
from types import TracebackType
from typing import Protocol, Self

from tegrad.hw.gpfifo import USERMODE_SIZE
from tegrad.uapi.errors import DriverError, ioctl_error
from tegrad.uapi.hints import ioctl_hint
from tegrad.uapi.ioctls import Ioctl
from tegrad.uapi.libc import MAP_FAILED, libc

PROT_NONE, PROT_READ, PROT_WRITE = 0, mmap_module.PROT_READ, mmap_module.PROT_WRITE
MAP_SHARED, MAP_PRIVATE, MAP_FIXED = mmap_module.MAP_SHARED, mmap_module.MAP_PRIVATE, 0x10
MAP_ANONYMOUS = mmap_module.MAP_ANONYMOUS
MS_SYNC = 4

Arg = ctypes.Structure | ctypes.Union | ctypes.c_int32 | ctypes.c_uint32 | int | None
"""The argument of an ioctl: a struct or scalar by address, an integer by value, or nothing."""

AGAIN_LIMIT_S = 5.0
"""How long a call that answers EAGAIN or EINTR is repeated before the error is passed on."""

AGAIN_PAUSE_S = 0.001


class Doorbell(Protocol):
    """The usermode register page: 32-bit registers by byte offset."""

    def store32(self, offset: int, value: int) -> None:
        """Write one register with a single 32-bit store."""

    def load32(self, offset: int) -> int:
        """Read one register with a single 32-bit load."""

    def close(self) -> None:
        """Unmap the page. Closing twice is harmless."""


class Kernel(Protocol):
    """What a driver client needs of the operating system. Every method raises DriverError on failure."""

    def open(self, path: str, flags: int = os.O_RDWR | os.O_CLOEXEC) -> int:
        """Open a device node and return its file descriptor."""

    def ioctl(self, fd: int, row: Ioctl, arg: Arg = None) -> int:
        """Make one ioctl. `arg` is the row's struct (filled in place) or, for a by-value row, an integer.

        Returns what the driver returned: 0, or the positive count that some nvgpu calls give for a bad user pointer.
        """

    def mmap(self, fd: int, size: int, prot: int, flags: int, *, addr: int = 0, offset: int = 0) -> int:
        """Map memory and return its address."""

    def munmap(self, addr: int, size: int) -> None:
        """Unmap memory."""

    def msync(self, addr: int, size: int) -> None:
        """Write mapped memory back (MS_SYNC); the drivers' mappings refuse it."""

    def close(self, fd: int) -> None:
        """Close a file descriptor."""

    def doorbell(self, fd: int, size: int = USERMODE_SIZE) -> Doorbell:
        """Map the usermode registers of an open ctrl fd. The driver allows one mapping per fd (EBUSY)."""

    def exists(self, path: str) -> bool:
        """Whether a device node is there."""


def check_argument(row: Ioctl, arg: Arg) -> None:
    """TypeError where `arg` is not what the row takes: its struct, nothing if it has none, or an integer by value."""
    if row.by_value:
        fits, wanted = isinstance(arg, int), "an integer"
    else:
        fits = arg is None if row.struct is None else isinstance(arg, row.struct)
        wanted = "no argument" if row.struct is None else row.struct.__name__
    if not fits:
        raise TypeError(f"{row.name} takes {wanted}, got {type(arg).__name__}")


def repeated(row: Ioctl, fd: int, arg: Arg, attempt: Callable[[], int]) -> int:
    """What `attempt` answers, or DriverError for a negative errno.

    EINTR is repeated at once and EAGAIN after a pause, both for up to AGAIN_LIMIT_S: the drivers answer EINTR for
    failures that stay, too. A row that sleeps is not repeated on EINTR: only its caller knows what is left of its time.
    """
    repeatable = {-errno.EAGAIN} if row.sleeps else {-errno.EAGAIN, -errno.EINTR}
    deadline = 0.0
    while (result := attempt()) < 0:
        now = time.monotonic()
        deadline = deadline or now + AGAIN_LIMIT_S
        if result not in repeatable or now >= deadline:
            raise ioctl_error(row, fd, arg, -result)
        if result == -errno.EAGAIN:
            time.sleep(AGAIN_PAUSE_S)
    return result


class LinuxKernel:
    """The Kernel of the machine this process runs on."""

    def open(self, path: str, flags: int = os.O_RDWR | os.O_CLOEXEC) -> int:
        """Open a device node. The error names the node and says what usually helps."""
        try:
            return os.open(path, flags)
        except OSError as e:
            raise DriverError("open", e.errno or 0, {"path": path}, _open_hint(path, e.errno or 0)) from None

    def ioctl(self, fd: int, row: Ioctl, arg: Arg = None) -> int:
        """Make the ioctl, which `repeated` repeats."""
        check_argument(row, arg)
        pointer = arg if arg is None or isinstance(arg, int) else ctypes.byref(arg)

        def attempt() -> int:
            result: int = libc.ioctl(fd, row.request, pointer)
            return result if result >= 0 else -ctypes.get_errno()

        return repeated(row, fd, arg, attempt)

    def mmap(self, fd: int, size: int, prot: int, flags: int, *, addr: int = 0, offset: int = 0) -> int:
        """Map `size` bytes of `fd`; `fd` -1 with MAP_ANONYMOUS maps plain memory."""
        result = libc.mmap(addr, size, prot, flags, fd, offset)
        if result == MAP_FAILED or result is None:
            arguments = {"fd": fd, "size": size, "prot": prot, "flags": flags, "addr": addr, "offset": offset}
            code = ctypes.get_errno()
            raise DriverError("mmap", code, arguments, ioctl_hint("mmap", code))
        return int(result)

    def munmap(self, addr: int, size: int) -> None:
        """Unmap `size` bytes at `addr`."""
        if libc.munmap(addr, size) != 0:
            code = ctypes.get_errno()
            raise DriverError("munmap", code, {"addr": addr, "size": size}, ioctl_hint("munmap", code))

    def msync(self, addr: int, size: int) -> None:
        """Write `size` bytes at `addr` back."""
        if libc.msync(addr, size, MS_SYNC) != 0:
            raise DriverError("msync", ctypes.get_errno(), {"addr": addr, "size": size})

    def close(self, fd: int) -> None:
        """Close `fd`. Linux releases the number even when it reports EINTR, so that is not repeated."""
        try:
            os.close(fd)
        except OSError as e:
            if e.errno != errno.EINTR:
                raise DriverError("close", e.errno or 0, {"fd": fd}, ioctl_hint("close", e.errno or 0)) from None

    def doorbell(self, fd: int, size: int = USERMODE_SIZE) -> "LinuxDoorbell":
        """Map the usermode registers, shared and writable."""
        return LinuxDoorbell(self, self.mmap(fd, size, PROT_READ | PROT_WRITE, MAP_SHARED), size)

    def exists(self, path: str) -> bool:
        """Whether the path exists."""
        return os.path.exists(path)


class LinuxDoorbell:
    """Registers in a mapped page. ctypes moves a c_uint32 in one piece: one aligned 32-bit store or load."""

    def __init__(self, kernel: LinuxKernel, address: int, size: int) -> None:
        self._kernel = kernel
        self._address = address
        self._size = size

    def store32(self, offset: int, value: int) -> None:
        """Write one register."""
        self._register(offset).value = value

    def load32(self, offset: int) -> int:
        """Read one register."""
        return self._register(offset).value

    def _register(self, offset: int) -> ctypes.c_uint32:
        if not self._address:
            raise ValueError("the doorbell page is closed")
        if offset % 4 or not 0 <= offset <= self._size - 4:
            raise ValueError(f"no 32-bit register at offset {offset:#x} of {self._size:#x} bytes")
        return ctypes.c_uint32.from_address(self._address + offset)

    def close(self) -> None:
        """Unmap the page once."""
        address, self._address = self._address, 0
        if address:
            self._kernel.munmap(address, self._size)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def _open_hint(path: str, code: int) -> str:
    if code == errno.ENOENT:
        return (
            f"{path} does not exist: the driver is not loaded or this is not a Jetson Orin; "
            "set TEGRAD_BOARD=agx-orin-64gb to use the emulated board"
        )
    if code in (errno.EACCES, errno.EPERM) and path == "/dev/kmsg":
        return "only root may read the kernel log here: use sudo, or sysctl kernel.dmesg_restrict=0"
    if code in (errno.EACCES, errno.EPERM):
        return f"no permission for {path}: add your user to the group {_owner_group(path)}, then log in again"
    return ioctl_hint("open", code)


def _owner_group(path: str) -> str:
    try:
        return grp.getgrgid(os.stat(path).st_gid).gr_name
    except (OSError, KeyError):
        return "video"
