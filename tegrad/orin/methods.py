"""Which methods a class has, as the engine objects ask: fast for the offsets that come again and again."""

from __future__ import annotations

from functools import cache

from tegrad.hw.classes import BY_CLASS, find_method
from tegrad.orin.events import ClassError, IllegalMethod
from tegrad.orin.memory import Fault


@cache
def name_of(class_id: int, offset: int) -> str | None:
    """Name of the method of a class at an offset, None if it has none there."""
    found = find_method(BY_CLASS[class_id], offset)
    return found[0].name if found else None


def class_error(subchannel: int, class_id: int, method: int, data: int, detail: str) -> Fault:
    """The fault of a class that does not fit, or of a method that the class cannot take with this data."""
    return Fault(ClassError, subchannel=subchannel, class_id=class_id, method=method, data=data, detail=detail)


def illegal_method(subchannel: int, class_id: int, method: int, data: int) -> Fault:
    """The fault of a method that the class does not have."""
    detail = f"class {class_id:#06x} has no method {method:#x}"
    return Fault(IllegalMethod, subchannel=subchannel, class_id=class_id, method=method, data=data, detail=detail)


def require_method(subchannel: int, class_id: int, method: int, data: int) -> str:
    """The method's name; raises the illegal method where there is none."""
    name = name_of(class_id, method)
    if name is None:
        raise illegal_method(subchannel, class_id, method, data)
    return name
