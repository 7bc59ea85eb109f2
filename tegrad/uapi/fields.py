"""Reading ctypes argument structs by field, for messages and traces."""

import ctypes
from collections.abc import Iterator


def leaf_fields(arg: object) -> Iterator[tuple[str, object]]:
    """(dotted name, value) of every member of a struct, unions with all their members; a scalar is ("value", v).

    Arrays of integers are tuples; members of anonymous unions carry no prefix, as in C.
    """
    if not isinstance(arg, (ctypes.Structure, ctypes.Union)):
        yield "value", getattr(arg, "value", arg)
        return
    anonymous = getattr(arg, "_anonymous_", ())
    for name, *_ in arg._fields_:
        value = getattr(arg, name)
        if isinstance(value, (ctypes.Structure, ctypes.Union)):
            prefix = "" if name in anonymous else f"{name}."
            yield from ((prefix + inner, v) for inner, v in leaf_fields(value))
        elif isinstance(value, ctypes.Array):
            yield name, tuple(value)
        else:
            yield name, value


def nonzero_fields(arg: object) -> dict[str, object]:
    """The members that are not zero, reserved or padding: what a reader of an error wants to see."""
    return {
        name: value
        for name, value in leaf_fields(arg)
        if not name.startswith(("reserved", "padding"))
        and (any(value) if isinstance(value, tuple) and not _of_structs(value) else value)
        and not _of_structs(value)
    }


def _of_structs(value: object) -> bool:
    return isinstance(value, tuple) and bool(value) and isinstance(value[0], ctypes.Structure)
