"""events.py: what the GPU reports is a value, by its fields and nothing else."""

from __future__ import annotations

import inspect
import pickle
from dataclasses import FrozenInstanceError, fields

import pytest

from tegrad.orin import events
from tegrad.orin.events import GpuEvent

EVENTS = [kind for _, kind in inspect.getmembers(events, inspect.isclass) if issubclass(kind, GpuEvent)]


def made(kind: type[GpuEvent], first: int = 1) -> GpuEvent:
    """An event with a number, or a text, of its own in every field."""
    return kind(
        *(first + at if field.type in (int, "int") else f"{first + at}" for at, field in enumerate(fields(kind)))
    )


@pytest.mark.parametrize("kind", EVENTS)
def test_an_event_is_a_value_that_goes_to_another_process_whole(kind: type[GpuEvent]) -> None:
    one = made(kind)
    assert one == made(kind) == pickle.loads(pickle.dumps(one))
    assert one != made(kind, first=2)
    assert hash(one) == hash(made(kind))
    with pytest.raises(FrozenInstanceError):
        one.chid = 2  # type: ignore[misc]
    assert not hasattr(one, "__dict__"), "it has room for its fields and no more"
