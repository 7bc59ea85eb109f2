"""What a DriverError says, and how it behaves."""

import copy
import errno
import pickle

import pytest

from tegrad.errors import TegradError
from tegrad.uapi import structs
from tegrad.uapi.errors import DriverError, ioctl_error
from tegrad.uapi.fields import leaf_fields, nonzero_fields
from tegrad.uapi.hints import GENERAL, HINTS, ioctl_hint
from tegrad.uapi.ioctls import BY_NAME


def refused_bind() -> DriverError:
    arg = structs.ChannelSetupBind(num_gpfifo_entries=1024, flags=0xA, userd_dmabuf_fd=9, gpfifo_dmabuf_fd=10)
    return ioctl_error(BY_NAME["CHANNEL_SETUP_BIND"], 8, arg, errno.EINVAL)


def test_the_message_names_call_arguments_errno_and_remedy() -> None:
    assert str(refused_bind()) == (
        "CHANNEL_SETUP_BIND(fd=8, num_gpfifo_entries=1024, flags=DETERMINISTIC|USERMODE_SUPPORT, userd_dmabuf_fd=9, "
        "gpfifo_dmabuf_fd=10) failed: EINVAL (Invalid argument): needs an address space and a TSG, the watchdog "
        "disabled, USERMODE with DETERMINISTIC, a power-of-two entry count, nonzero dmabuf fds at offset 0, one per "
        "channel"
    )


def test_it_is_a_tegrad_error_and_an_os_error() -> None:
    error = refused_bind()
    assert isinstance(error, TegradError)
    assert isinstance(error, OSError)
    assert (error.errno, error.code, error.name) == (errno.EINVAL, "EINVAL", "CHANNEL_SETUP_BIND")
    assert error.strerror == "Invalid argument"


@pytest.mark.parametrize("clone", [copy.copy, lambda e: pickle.loads(pickle.dumps(e))])
def test_it_survives_a_copy_and_a_process_boundary(clone: object) -> None:
    assert callable(clone)
    other = clone(refused_bind())
    assert str(other) == str(refused_bind())
    assert other.errno == errno.EINVAL


def test_large_numbers_are_hexadecimal_and_no_hint_leaves_no_colon() -> None:
    error = DriverError("munmap", errno.EINVAL, {"addr": 0xFE00000000, "size": 64})
    assert str(error) == "munmap(addr=0xfe00000000, size=64) failed: EINVAL (Invalid argument)"


def test_hints_name_calls_that_exist() -> None:
    assert {name for name, _ in HINTS} - {"open", "mmap", "munmap"} <= set(BY_NAME)
    assert ioctl_hint("NVMAP_GET_FD", errno.EMFILE) == GENERAL[errno.EMFILE]
    assert ioctl_hint("NVMAP_GET_FD", errno.EXDEV) == ""


def test_reserved_fields_and_zeros_are_left_out() -> None:
    arg = structs.AllocAs(va_range_start=0x200000)
    arg.reserved = 7
    arg.padding[2] = 9
    assert nonzero_fields(arg) == {"va_range_start": 0x200000}
    assert dict(leaf_fields(arg))["padding"] == (0, 0, 9, 0, 0, 0)


def test_named_unions_are_dotted() -> None:
    arg = structs.AsAllocSpace(pages=1)
    arg.o_a.offset = 0xFE00000000
    assert nonzero_fields(arg) == {"pages": 1, "o_a.offset": 0xFE00000000, "o_a.align": 0xFE00000000}
