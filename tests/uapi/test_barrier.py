"""The memory barrier is the right instruction and can be called."""

import platform
import time

import pytest

from tegrad.uapi import barrier


def test_it_returns_and_is_cheap() -> None:
    start = time.perf_counter()
    for _ in range(10_000):
        barrier.full_barrier()
    assert time.perf_counter() - start < 1


def test_the_code_of_each_machine() -> None:
    """dsb sy = D5033F9F, ret = D65F03C0 (Arm ARM, little endian); mfence = 0F AE F0, ret = C3 (Intel SDM)."""
    assert barrier._CODE["aarch64"] == (0xD5033F9F).to_bytes(4, "little") + (0xD65F03C0).to_bytes(4, "little")
    assert barrier._CODE["x86_64"] == b"\x0f\xae\xf0\xc3"


def test_it_works_where_code_cannot_be_mapped(monkeypatch: pytest.MonkeyPatch) -> None:
    real = barrier.ctypes.CDLL

    class Refusing:
        def __init__(self, *args: object, **kwargs: object) -> None:
            self.libc = real(None, use_errno=True)
            self.syscall = self.libc.syscall
            self.mmap = Mmap()

    class Mmap:
        restype: object = None
        argtypes: object = None

        def __call__(self, *args: object) -> int | None:
            return barrier.ctypes.c_void_p(-1).value

    monkeypatch.setattr(barrier.ctypes, "CDLL", Refusing)
    assert barrier._build()() == 0


def test_an_unknown_machine_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(platform, "machine", lambda: "riscv64")
    with pytest.raises(NotImplementedError, match="riscv64"):
        barrier._build()
