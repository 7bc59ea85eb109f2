"""One user at a time: whose turn it is to use what many threads ask for, and how it is closed under them."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from threading import Condition, get_ident
from typing import Final
from weakref import WeakSet

from tegrad.llm.errors import ModelError

CLOSED: Final = "this model was closed: open it anew"
OVERTAKEN: Final = "another request of the same thread ended this stream: read a stream to its end first"


class ClosedError(ModelError):
    """What was closed is asked for more."""

    exit_code = 1


class Cancelled(ModelError):
    """A user whose turn was ended by itself, or by its own thread, goes on."""

    exit_code = 1


class User:
    """One request. Its turn begins with its first piece of work and ends when it leaves."""

    def __init__(self) -> None:
        self.ended: ModelError | None = None
        """Why it may not go on; who works looks at it now and then."""
        self.working = False
        self.thread = 0
        """The last one that worked for it."""


class Serial:
    """Gives one user after the other their turn; `free` is called once, when it is closed and nobody works."""

    def __init__(self, free: Callable[[], None]) -> None:
        self._free: Callable[[], None] | None = free
        self._changed = Condition()
        self._user: User | None = None
        self._closed = False
        _all.add(self)

    def forked(self) -> None:
        """In a forked child: whoever had a turn works on in the parent."""
        self._changed, self._user = Condition(), None

    @contextmanager
    def work(self, user: User) -> Iterator[None]:
        """A piece of a user's work, which waits for its turn. ClosedError, Cancelled.

        A user between two pieces of work whose thread comes with another user has lost its turn: nobody else would
        ever go on with it.
        """
        with self._changed:
            while not self._closed and user.ended is None and not self._free_for(user):
                self._changed.wait()
            self.check()
            if user.ended is not None:
                raise user.ended
            self._user, user.working, user.thread = user, True, get_ident()
        try:
            yield
        finally:
            with self._changed:
                user.working = False
                if user.ended is not None:
                    self._user = None
                self._changed.notify_all()
                self._close_if_idle()

    def check(self) -> None:
        """ClosedError where nobody may work any more."""
        if self._closed:
            raise ClosedError(CLOSED)

    def leave(self, user: User, why: str) -> None:
        """End a user's turn, now or with its piece of work; from any thread, without waiting for that."""
        with self._changed:
            user.ended = user.ended or Cancelled(why)
            if self._user is user and not user.working:
                self._user = None
            self._changed.notify_all()

    def close(self) -> None:
        """Let nobody work any more, wait for who does, and free. Twice is harmless."""
        with self._changed:
            self._closed = True
            if self._user is not None and self._user.working:
                self._user.ended = self._user.ended or ClosedError(CLOSED)
            self._changed.notify_all()
            # A signal's handler may have come between a piece of this thread's own work, which then frees.
            while self._user and self._user.working and self._user.thread != get_ident():
                self._changed.wait()
            self._close_if_idle()

    def _free_for(self, user: User) -> bool:
        other = self._user
        if other is not None and other is not user and not other.working and other.thread == get_ident():
            other.ended = Cancelled(OVERTAKEN)
            return True
        return other is None or (other is user and not user.working)

    def _close_if_idle(self) -> None:
        if self._closed and not (self._user and self._user.working) and self._free is not None:
            free, self._free = self._free, None
            free()


_all: WeakSet[Serial] = WeakSet()


def _after_fork() -> None:
    for serial in list(_all):
        serial.forked()


os.register_at_fork(after_in_child=_after_fork)
