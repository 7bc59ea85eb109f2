"""Tests that mean nothing under qemu-user, each with the cause."""

import re

NO_DONTFORK = "qemu-user takes MADV_DONTFORK for a hint and drops it: a forked child has the mapping there"
LEFT_OUT: list[tuple[str, str]] = [
    (
        r"tests/uapi/test_linux_kernel\.py::test_dev_null_refuses_every_row_with_enotty",
        "qemu-user answers an ioctl that it does not know with ENOSYS; the kernel never sees it",
    ),
    (r"tests/conformance/test_(rules|mutants)\.py::.*\[2\.5/mapping-is-not-inherited", NO_DONTFORK),
    (r"tests/uapi/test_strace\.py::", "strace needs ptrace, which qemu-user does not have"),
]
"""A pattern of a test's id, and why such a test is left out. First match counts."""

_PATTERNS = [(re.compile(pattern), cause) for pattern, cause in LEFT_OUT]


def cause_of(test: str) -> str | None:
    """Why a test is left out, or None where it is to run."""
    return next((cause for pattern, cause in _PATTERNS if pattern.match(test)), None)
