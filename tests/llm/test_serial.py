"""Of many threads one has its turn; who leaves, is overtaken or closed under hears of it, and nobody waits for ever."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable

import pytest

from tegrad.llm.serial import Cancelled, ClosedError, Serial, User

PATIENCE_S = 20


class Beside(threading.Thread):
    """A thread that does something and keeps what came of it."""

    def __init__(self, work: Callable[[], object]) -> None:
        super().__init__(daemon=True)
        self._work = work
        self.came: object = None
        self.start()

    def run(self) -> None:
        try:
            self.came = self._work()
        except Exception as error:
            self.came = error

    def end(self) -> object:
        self.join(PATIENCE_S)
        assert not self.is_alive()
        return self.came


def waiting(serial: Serial, count: int) -> None:
    """Until so many threads wait for something of it."""
    reached = threading.Event()
    for _ in range(PATIENCE_S * 100):
        with serial._changed:
            if len(serial._changed._waiters) == count:  # type: ignore[attr-defined]
                return
        reached.wait(0.01)
    pytest.fail(f"no {count} threads came to wait")


@pytest.fixture
def freed() -> list[str]:
    return []


@pytest.fixture
def serial(freed: list[str]) -> Serial:
    return Serial(lambda: freed.append("freed"))


def one_piece(serial: Serial, user: User) -> str:
    with serial.work(user):
        return "worked"


def test_another_thread_waits_until_a_user_leaves(serial: Serial) -> None:
    first = User()
    one_piece(serial, first)
    other = Beside(lambda: one_piece(serial, User()))
    waiting(serial, 1)
    assert one_piece(serial, first) == "worked"  # between whose pieces nobody comes
    serial.leave(first, "done")
    assert other.end() == "worked"


def test_another_user_of_the_same_thread_ends_the_one_that_nobody_would_go_on_with(serial: Serial) -> None:
    first, second = User(), User()
    one_piece(serial, first)
    assert one_piece(serial, second) == "worked"
    with pytest.raises(Cancelled, match="another request of the same thread"):
        one_piece(serial, first)
    serial.leave(second, "done")
    with pytest.raises(Cancelled):
        one_piece(serial, second)


def test_who_leaves_while_it_waits_does_so_at_once_and_takes_no_turn(serial: Serial) -> None:
    first, second = User(), User()
    one_piece(serial, first)
    other = Beside(lambda: one_piece(serial, second))
    waiting(serial, 1)
    serial.leave(second, "no longer wanted")
    assert isinstance(came := other.end(), Cancelled)
    assert str(came) == "no longer wanted"
    assert one_piece(serial, first) == "worked"


def test_who_leaves_in_the_middle_of_a_piece_hands_over_at_its_end(serial: Serial) -> None:
    first, second = User(), User()
    with serial.work(first):
        other = Beside(lambda: one_piece(serial, second))
        waiting(serial, 1)
        serial.leave(first, "done")
        assert other.is_alive()
    assert other.end() == "worked"


def test_to_close_waits_for_a_piece_of_work_and_ends_all_who_wait(serial: Serial, freed: list[str]) -> None:
    first = User()
    with serial.work(first):
        second = Beside(lambda: one_piece(serial, User()))
        waiting(serial, 1)
        closing = Beside(serial.close)
        assert isinstance(second.end(), ClosedError)
        waiting(serial, 1)
        assert freed == []
        assert isinstance(first.ended, ClosedError)  # by which a long piece of work may end early
    assert closing.end() is None
    assert freed == ["freed"]
    serial.close()
    assert freed == ["freed"]
    with pytest.raises(ClosedError, match="open it anew"):
        one_piece(serial, first)


def test_to_close_does_not_wait_for_a_user_between_two_pieces(serial: Serial, freed: list[str]) -> None:
    one_piece(serial, User())
    assert Beside(serial.close).end() is None
    assert freed == ["freed"]


def test_to_close_within_ones_own_work_frees_at_its_end(serial: Serial, freed: list[str]) -> None:
    """As a signal's handler does."""
    with serial.work(User()):
        serial.close()
        assert freed == []
    assert freed == ["freed"]


def test_an_error_of_a_piece_of_work_leaves_the_turn_where_it_is(serial: Serial) -> None:
    first = User()
    with pytest.raises(ZeroDivisionError), serial.work(first):
        raise ZeroDivisionError
    assert one_piece(serial, first) == "worked"


def test_a_forked_child_does_not_wait_for_whoever_had_a_turn() -> None:
    """Whose thread it does not have, nor what that held."""
    freed, working, enough = list[int](), threading.Event(), threading.Event()
    serial = Serial(lambda: freed.append(1))

    def work() -> None:
        with serial.work(User()):
            working.set()
            assert enough.wait(PATIENCE_S)

    beside = Beside(work)
    assert working.wait(PATIENCE_S)
    if (child := os.fork()) == 0:
        signal.alarm(PATIENCE_S)
        serial.close()
        os._exit(7 if freed else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
    enough.set()
    assert beside.end() is None
    serial.close()
    assert freed == [1]
