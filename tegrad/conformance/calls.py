"""Rules of one call: an ioctl with a few fields changed, and one verdict. A table has a row for each.

    wdt = Calls("5.4", "CHANNEL_WDT", Rig.open_channel)
    wdt.refuses("wdt-both", "both enable and disable are", errno.EINVAL, wdt_status=3)
    wdt.accepts("wdt-other-bits", "other bits are ignored", wdt_status=1 | 4 | 8)

makes 5.4/wdt-both, "WDT: both enable and disable are EINVAL", and 5.4/wdt-other-bits, "WDT: other bits are ignored".
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import product

from tegrad.conformance.rig import Fields, Rig, code
from tegrad.conformance.rule import Check, rule

NO_FD = 987654
"""A number that is no fd, nor a handle."""
Maker = Callable[[Rig], int]
"""What makes an fd, or a field's value, for the rule that asks for it."""
Value = int | Maker | tuple[int | Maker, ...]
"""A field: a number, what makes it, or several of these: then each has a call of its own, and all the same verdict."""


def ctrl(rig: Rig) -> int:
    """The rig's ctrl fd."""
    return rig.ctrl


def nvmap(rig: Rig) -> int:
    """The rig's fd of /dev/nvmap."""
    return rig.nvmap


def unallocated(rig: Rig) -> int:
    """A dmabuf without memory."""
    return rig.buffer(allocate=False).fd


def bound(rig: Rig) -> int:
    """A channel in an address space and a TSG, before SETUP_BIND."""
    return rig.bound_channel().fd


def ready(rig: Rig) -> int:
    """A channel that only needs its doorbell."""
    return rig.channel_ready().fd


class Calls:
    """A table of rules of one ioctl (or of several that must all do the same) on a fresh fd.

    `usual` makes the fields of a call that works, which a row's fields change. Sentences begin with the ioctl's name
    without its kind ("WDT: "), or as `begins` says.
    """

    def __init__(
        self,
        section: str,
        ioctl: str | tuple[str, ...],
        fd: Maker,
        usual: Callable[[Rig], Fields] | None = None,
        *,
        begins: str = "",
    ) -> None:
        self.section, self.fd, self.usual = section, fd, usual
        self.ioctls = (ioctl,) if isinstance(ioctl, str) else ioctl
        self.begins = begins or f"{self.ioctls[0].partition('_')[2]}: "

    def refuses(self, name: str, says: str, number: int, fd: Maker | None = None, /, **fields: Value) -> None:
        """A row: the call fails with this errno, whose name ends the sentence. `fd` replaces the table's."""

        def check(rig: Rig) -> None:
            for on, ioctl, block in self._asked(rig, fd, fields):
                rig.refuses(number, on, ioctl, block)

        self._rule(name, f"{says} {code(number)}", check)

    def accepts(self, name: str, says: str, fd: Maker | None = None, /, **fields: Value) -> None:
        """A row: the call succeeds."""

        def check(rig: Rig) -> None:
            for on, ioctl, block in self._asked(rig, fd, fields):
                rig.accepts(on, ioctl, block)

        self._rule(name, says, check)

    def _rule(self, name: str, sentence: str, check: Check) -> None:
        rule(self.section, self.begins + sentence, name=name)(check)

    def _asked(self, rig: Rig, fd: Maker | None, fields: dict[str, Value]) -> Iterator[tuple[int, str, Fields]]:
        """The calls of a row: fd, ioctl, fields."""
        on = (fd or self.fd)(rig)
        usual = self.usual(rig) if self.usual else {}
        for values in product(*(value if isinstance(value, tuple) else (value,) for value in fields.values())):
            changed = {
                name: value(rig) if callable(value) else value for name, value in zip(fields, values, strict=True)
            }
            for ioctl in self.ioctls:
                yield on, ioctl, {**usual, **changed}
