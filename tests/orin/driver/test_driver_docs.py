"""docs/board.md lists every ioctl as the board treats it."""

from __future__ import annotations

import re
from pathlib import Path

from tegrad.orin import ctrl
from tegrad.orin.driver import HANDLERS
from tegrad.uapi.ioctls import ROWS

PAGE = Path(__file__).parents[3] / "docs" / "board.md"
ROW = re.compile(r"\| (\d+) \| (\w+) \| ([a-z ]+) \|")


def test_every_ioctl_is_listed_as_it_is() -> None:
    listed = {(int(nr), name): status for nr, name, status in ROW.findall(PAGE.read_text())}
    assert set(listed) == {(row.nr, row.name) for row in ROWS}
    for row in ROWS:
        handler = HANDLERS[row.fd_kind].get(row.request)
        status = listed[row.nr, row.name]
        if handler is None:
            assert status in ("absent", "unknown to the driver"), row.name
        elif handler is ctrl.refuse:
            assert status == "refused", row.name
        else:
            assert status in ("yes", "refused", "checks only"), row.name
