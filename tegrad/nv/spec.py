"""How a role travels through tinygrad's allocator: in the options of a buffer, which its cache of free buffers goes by.

Ours name it (`MemorySpec`). tinygrad's own allocations do not, so whoever calls tinygrad says where they come from
(`allocating`). Options that are not given at all are a tensor's.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, fields
from typing import Any

from tinygrad.device import BufferSpec

from tegrad.nv import roles
from tegrad.nv.roles import Role


@dataclass(frozen=True)
class MemorySpec(BufferSpec):  # type: ignore[misc]
    """tinygrad's options of a buffer, with its role. Other interfaces than a Jetson's take no notice of it."""

    role: Role = roles.TENSORS


_allocating: ContextVar[Role | None] = ContextVar("allocating", default=None)


@contextmanager
def allocating(role: Role) -> Iterator[None]:
    """What tinygrad allocates in here, in this thread, is of this role, if nothing nearer says otherwise."""
    token = _allocating.set(role)
    try:
        yield
    finally:
        _allocating.reset(token)


def role_here() -> Role:
    """The role of what tinygrad allocates at this moment."""
    return _allocating.get() or roles.TENSORS


def role_of(options: BufferSpec | None) -> Role:
    """The role of a buffer with these options that is allocated now."""
    if options is None:
        return roles.TENSORS
    return options.role if isinstance(options, MemorySpec) else role_here()


def with_role(options: BufferSpec | None, role: Role) -> BufferSpec | None:
    """The options that name the role: those that are a tensor's anyway as they are."""
    if (options.role if isinstance(options, MemorySpec) else roles.TENSORS) is role:
        return options
    given: dict[str, Any] = {}
    if options is not None:
        given = {field.name: getattr(options, field.name) for field in fields(BufferSpec)}
    return MemorySpec(**given, role=role)
