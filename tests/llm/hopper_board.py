"""The next NV device is an emulated H100, whose bulk copies take their time."""

import pytest


def hopper(patch: pytest.MonkeyPatch, seed: int | None = None) -> None:
    """A board of that chip, whose copies land as late as they may, or as a seed draws; each seed has one of its own."""
    board = "gh100" if seed is None else f"gh100:{8 + seed}GiB"
    for name, value in (("TEGRAD_BOARD", board), ("DEV", "NV"), ("HCQDEV_WAIT_TIMEOUT_MS", "100000")):
        patch.setenv(name, value)
    if seed is not None:
        patch.setenv("TEGRAD_RACE", str(seed))
