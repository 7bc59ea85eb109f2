"""probes.py: what a probe takes is given back."""

from typing import Any

import pytest

from tegrad.nv import probes


def test_memory_of_a_probe_is_nobodys_as_soon_as_it_ends(fake_device: Any) -> None:
    """It is not kept for the next buffer of that size, which would be one that a probe has been at."""
    kept = fake_device.allocator.cache
    with probes.buffer(fake_device, 3 << 20) as made:
        assert made.size == 3 << 20
    with pytest.raises(ZeroDivisionError), probes.buffer(fake_device, 3 << 20):
        raise ZeroDivisionError
    assert [size for (size, _), buffers in kept.items() if buffers] == []
