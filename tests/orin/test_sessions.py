"""What a board does with one request of a session."""

from __future__ import annotations

import errno
import os
from typing import Any

import pytest

from tegrad.orin import sessions
from tegrad.orin.wire import Message, Op


def _refuse(*_: Any) -> Any:
    raise sessions.Errno(errno.ENOMEM)


@pytest.mark.parametrize(("how", "code"), [(lambda *_: (Message(Op.DONE), None), 0), (_refuse, errno.ENOMEM)])
def test_fds_of_a_request_are_closed_however_it_ends(monkeypatch: pytest.MonkeyPatch, how: Any, code: int) -> None:
    monkeypatch.setitem(sessions.SESSION_CALLS, Op.STATUS, how)  # type: ignore[arg-type]
    fd, other = os.pipe()
    message = Message(Op.STATUS, fds=(fd, None))
    answer, _ = sessions.carry_out(None, None, message)  # type: ignore[arg-type, misc]
    assert answer.code == code
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(fd)
    os.close(other)
