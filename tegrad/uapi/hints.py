"""What to do about a failed call: hints by call and errno, from the drivers' own checks (L4T r36.4.3 nvgpu, nvmap)."""

import errno
from collections.abc import Mapping
from types import MappingProxyType

HINTS: Mapping[tuple[str, int], str] = MappingProxyType(
    {
        ("GPU_GET_CHARACTERISTICS", errno.EINVAL): "the GPU does not power up; see the kernel log (dmesg)",
        ("GPU_ALLOC_AS", errno.EINVAL): "big_page_size must be 0 and the VA bounds nonzero multiples of 2 MiB on Orin",
        ("GPU_ALLOC_AS", errno.ENOMEM): "va_range_end + 4 GiB must not pass 2^49",
        ("GPU_FLUSH_L2", errno.EBUSY): "the GPU's way to memory stayed busy; see the kernel log (dmesg)",
        ("GPU_FLUSH_L2", errno.ETIMEDOUT): "the GPU's L2 was not written back in time; see the kernel log (dmesg)",
        ("AS_BIND_CHANNEL", errno.EINVAL): "the channel fd is not a channel or already has an address space",
        ("AS_ALLOC_SPACE", errno.EINVAL): "page_size must be 4096",
        ("AS_ALLOC_SPACE", errno.ENOMEM): "the range is taken, not 4 KiB aligned, or outside the address space",
        (
            "AS_MAP_BUFFER_EX",
            errno.EINVAL,
        ): "a fixed offset needs an ALLOC_SPACE area around it; without one, offset, buffer_offset and mapping_size "
        "must be 0; unknown flags are refused",
        ("AS_MAP_BUFFER_EX", errno.ENOMEM): "the nvmap handle is not allocated, or the address space is full",
        ("AS_MAP_BUFFER_EX", errno.EBADF): "dmabuf_fd is not open",
        ("TSG_BIND_CHANNEL_EX", errno.EPERM): "the owner of the sched node has locked scheduling: end that process",
        ("TSG_CREATE_SUBCONTEXT", errno.ENOSPC): "all 64 subcontexts of the group are taken",
        (
            "TSG_BIND_CHANNEL_EX",
            errno.EINVAL,
        ): "bind the channel to its address space first, and to one TSG and a created subcontext only",
        (
            "CHANNEL_SETUP_BIND",
            errno.EINVAL,
        ): "needs an address space and a TSG, the watchdog disabled, USERMODE with DETERMINISTIC, a power-of-two "
        "entry count, nonzero dmabuf fds at offset 0, one per channel",
        ("CHANNEL_SETUP_BIND", errno.EEXIST): "the channel is set up already",
        ("CHANNEL_ALLOC_OBJ_CTX", errno.EINVAL): "the class is unknown to this GPU, or address space or TSG is missing",
        ("CHANNEL_SET_PREEMPTION_MODE", errno.EINVAL): "call ALLOC_OBJ_CTX first; a mode cannot be lowered",
        ("CHANNEL_WDT", errno.EINVAL): "set exactly one of DISABLE_WDT and ENABLE_WDT",
        ("CHANNEL_SUBMIT_GPFIFO", errno.EINVAL): "a usermode channel is rung by its doorbell, not by this call",
        ("CHANNEL_SET_ERROR_NOTIFIER", errno.EINVAL): "mem must be a dmabuf fd and offset + 16 lie inside the buffer",
        ("NVMAP_CREATE", errno.EINVAL): "size must not be 0; from 4 GiB up use NVMAP_CREATE_64",
        ("NVMAP_ALLOC", errno.EINVAL): "align must be a power of two, numa_nid -1, and the handle this process's own",
        ("NVMAP_ALLOC", errno.EEXIST): "the handle is allocated already",
        ("NVMAP_ALLOC", errno.ENOMEM): "not enough memory, or no such heap (use NVMAP_HEAP_IOVMM)",
        ("mmap", errno.EPERM): "the nvmap handle is not allocated, or its memory is protected",
        ("mmap", errno.EBUSY): "this ctrl fd already has its doorbell page mapped; unmap it or open another",
        ("mmap", errno.ENOSYS): "this driver has no usermode submission, which L4T r36 brings",
        ("munmap", errno.ENOMEM): "the process has too many mappings: raise vm.max_map_count",
        ("mmap", errno.EINVAL): "longer than the buffer, or an offset that is not page-aligned",
    }
)
"""By (call, errno). Calls are short ioctl names, or `open` and `mmap`."""

GENERAL: Mapping[int, str] = MappingProxyType(
    {
        errno.ENOTTY: "the driver does not know this command: wrong kind of fd, or another driver release",
        errno.ENODEV: "the GPU is gone: the driver is shutting down or gave up on it; see the kernel log, then reboot "
        "(an emulated board: see tegrad doctor, or its own errors with TEGRAD_BOARD_DEBUG=1)",
        errno.ENOMEM: "out of memory: free buffers or use a smaller model",
        errno.EMFILE: "too many open files in this process: raise `ulimit -n`",
        errno.ENFILE: "too many open files on this machine",
        errno.ETIMEDOUT: "the channel is dead after a fault; see the kernel log (dmesg), then open a new one",
        errno.EBADF: "the file descriptor is not open",
        errno.EFAULT: "a pointer in the argument is not readable or writable memory",
        errno.EACCES: "no permission: add your user to the group that owns the device node",
        errno.EPERM: "not allowed for this user",
        errno.EAGAIN: "the hardware stayed busy",
        errno.EIO: "the driver reports an I/O error; see the kernel log (dmesg)",
        errno.EINVAL: "the driver refuses the arguments: it may differ from L4T r36.4.3, for which tegrad is made; "
        "please report this with the last lines of dmesg",
        errno.EEXIST: "it is there already; please report this with the last lines of dmesg",
    }
)
"""By errno alone, where no row of HINTS fits."""


def ioctl_hint(name: str, code: int) -> str:
    """What to do about `name` failing with `code`, "" if nothing is known."""
    return HINTS.get((name, code), GENERAL.get(code, ""))
