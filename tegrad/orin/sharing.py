"""Sharing a TSG between processes: instances of the device, and the tokens that they give each other.

Every open of the ctrl node is a device instance with a number. Whoever opened a TSG through one may make a token there
for another instance; that one opens the TSG with it, once. An instance lives as long as its ctrl fd or a TSG fd that
was opened through it. Source: L4T r36.4.3 nvgpu, os/linux/ioctl_ctrl.c. `share_calls` has the TSG fd's calls.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

from tegrad.orin.steps import needed, require
from tegrad.orin.tsg import Tsg
from tegrad.uapi import constants as k


@dataclass(frozen=True, slots=True)
class Token:
    """The right of one instance to open a TSG, once."""

    number: int
    target: int
    tsg: Tsg


class KeepsInstances(Protocol):
    """Who keeps instances."""

    instances: dict[int, Instance]

    def new_instance_id(self) -> int: ...


class Instance:
    """One open of the ctrl node, with the tokens that were made in its name."""

    def __init__(self, driver: KeepsInstances) -> None:
        self.driver = driver
        self.id = driver.new_instance_id()
        self.holders = 1
        self.last_token = 0
        self.tokens: list[Token] = []
        driver.instances[self.id] = self

    def hold(self) -> Instance:
        """Take a reference."""
        self.holders += 1
        return self

    def drop(self) -> None:
        """Give a reference back."""
        self.holders -= 1
        if self.holders == 0:
            self.driver.instances.pop(self.id, None)

    def issue(self, tsg: Tsg, target: int) -> int:
        """A new token for another instance; numbers start at 1."""
        self.last_token += 1
        self.tokens.append(Token(self.last_token, target, tsg))
        tsg.token_count += 1
        return self.last_token

    def take(self, number: int, target: int, tsg: Tsg | None = None) -> Tsg:
        """Use a token up; Errno(EINVAL) if there is none like that."""
        found = next(
            (t for t in self.tokens if (t.number, t.target) == (number, target) and tsg in (None, t.tsg)), None
        )
        token = needed(found)
        self.tokens.remove(token)
        token.tsg.token_count -= 1
        return token.tsg

    def revoke(self, tsg: Tsg) -> None:
        """Forget the tokens for a TSG."""
        mine = [t for t in self.tokens if t.tsg is tsg]
        tsg.token_count -= len(mine)
        self.tokens = [t for t in self.tokens if t.tsg is not tsg]


def shared_tsg(driver: KeepsInstances, arg: Any, target: int) -> Tsg | None:
    """OPEN_TSG's share fields: the TSG of a token, held once more; None if the caller wants a new one."""
    source, number = arg.source_device_instance_id, arg.share_token
    if not arg.flags & k.NVGPU_GPU_IOCTL_OPEN_TSG_FLAGS_SHARE:
        require(source == 0 and number == 0)
        return None
    require(source and number)
    return needed(driver.instances.get(source)).take(number, target).hold()
