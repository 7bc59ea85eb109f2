"""Reading ctypes argument structs by field, for messages and traces."""

import ctypes
from collections.abc import Iterator, Mapping
from types import MappingProxyType

from tegrad.uapi.ioctls import Ioctl


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


UNIONS: Mapping[str, tuple[frozenset[str], frozenset[str]]] = MappingProxyType(
    {
        name: (frozenset(inputs.split()), frozenset(outputs.split()))
        for name, inputs, outputs in (
            ("GPU_OPEN_CHANNEL", "in_.runlist_id", "channel_fd"),
            ("CHANNEL_OPEN", "in_.runlist_id", "channel_fd"),
            ("GPU_ALLOC_VIDMEM", "in_.size in_.flags in_.memtag in_.alignment", "out.dmabuf_fd"),
            (
                "GPU_GET_BUFFER_INFO",
                "in_.dmabuf_fd in_.metadata_size in_.metadata_addr",
                "out.flags out.metadata_size out.size",
            ),
            ("AS_ALLOC_SPACE", "pages page_size flags o_a.offset", "o_a.offset"),
            ("NVGPU32_AS_ALLOC_SPACE", "pages page_size flags o_a.offset", "o_a.offset"),
            ("NVMAP_CREATE", "size", "handle"),
            ("NVMAP_CREATE_64", "size64", "handle64"),
            ("NVMAP_GET_FD", "handle", "fd"),
            ("NVMAP_FROM_FD", "fd", "handle"),
            ("NVMAP_FROM_VA", "va size size64 flags", "handle"),
            (
                "CHANNEL_WAIT",
                "type timeout condition.semaphore.dmabuf_fd condition.semaphore.offset condition.semaphore.payload",
                "",
            ),
        )
    }
)
"""Of ioctls whose struct holds a union: the members that mean something going in, and coming back."""


def call_arguments(row: Ioctl, fd: int, arg: object) -> dict[str, object]:
    """What to show of an ioctl about to be made: `fd`, then the members that matter (one called fd is `arg.fd`)."""
    shown: dict[str, object] = {"fd": fd}
    if arg is None or isinstance(arg, int):
        return shown if arg is None else shown | {"arg": arg}
    inputs, _ = UNIONS.get(row.name, (None, None))
    for name, value in nonzero_fields(arg).items():
        if inputs is None or name in inputs:
            shown["arg.fd" if name == "fd" else name] = value
    return shown


def written_fields(row: Ioctl, before: Mapping[str, object], after: Mapping[str, object]) -> dict[str, object]:
    """What to show of an ioctl that was made: the members the driver changed, given all of them before and after."""
    _, outputs = UNIONS.get(row.name, (None, None))
    return {
        name: value for name, value in after.items() if value != before[name] and (outputs is None or name in outputs)
    }


def snapshot(arg: object) -> dict[str, object]:
    """Every member by name, as values that do not change when the argument does (structs in arrays as bytes)."""
    if arg is None or isinstance(arg, int):
        return {}
    return {
        name: tuple(bytes(item) if isinstance(item, ctypes.Structure) else item for item in value)
        if isinstance(value, tuple)
        else value
        for name, value in leaf_fields(arg)
    }


def _of_structs(value: object) -> bool:
    return isinstance(value, tuple) and bool(value) and isinstance(value[0], ctypes.Structure)
