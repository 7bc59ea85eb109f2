"""exercise.py on a board: what an exercise took is there for the next one, whatever order they come in."""

from collections.abc import Callable, Iterator
from typing import Any

import pytest
from boards import use_board

from tegrad.nv import exercise

pytestmark = pytest.mark.board


@pytest.fixture(scope="module")
def device() -> Iterator[Any]:
    from tinygrad import Device

    with use_board("agx-orin-64gb:43GiB"):
        yield Device["NV"]


def traffic() -> None:
    """A round of it."""
    made = exercise.Traffic()
    made.round(7)
    made.close()


EXERCISES: dict[str, Callable[[], object]] = {
    "launches": lambda: exercise.launches(3),
    "spill": exercise.spill,
    "all_shared": exercise.all_shared,
    "traffic": traffic,
}


@pytest.mark.parametrize("name", EXERCISES)
def test_an_exercise_is_done_again_in_the_memory_that_it_gave_back(
    device: Any, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Buffers that were freed are kept by their size: one of another size would be given to somebody as that."""
    EXERCISES[name]()
    taken: list[int] = []
    real = device.allocator._alloc

    def alloc(size: int, options: Any) -> Any:
        if not options.nolru:  # programs keep theirs to themselves
            taken.append(size)
        return real(size, options)

    monkeypatch.setattr(device.allocator, "_alloc", alloc)
    EXERCISES[name]()
    assert taken == []
