"""Method tables of the host, compute and copy classes: offsets, bit fields, named values.

`HOST`, `COMPUTE` and `COPY` hold the union over the classes in use (Hopper's wider address fields include Ampere's);
`BY_CLASS` holds each class exactly. A method is a 32-bit word sent to a byte offset; `Method.pack` builds that word
from field names, `Method.decode` takes it apart. Offsets alone are the IntEnums `HostMethod`, `ComputeMethod` and
`CopyMethod`. Source: NVIDIA open-gpu-doc, classes clc76f.h, clc7c0.h, clcbc0.h, clc7b5.h, clc8b5.h; tested against
tests/data/classes.json.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from enum import IntEnum
from types import MappingProxyType

from tegrad.hw import class_tables as tables
from tegrad.hw.class_tables import ComputeMethod, CopyMethod, HostMethod, MemOp

__all__ = [
    "BY_CLASS",
    "COMPUTE",
    "COPY",
    "HOST",
    "ComputeMethod",
    "CopyMethod",
    "HostMethod",
    "MemOp",
    "Method",
    "find_method",
]


@dataclass(frozen=True, slots=True)
class Method:
    """One method: byte offset, fields as (hi, lo) bits, named field values, distance of elements if it is indexed."""

    name: str
    offset: int
    fields: Mapping[str, tuple[int, int]]
    values: Mapping[str, Mapping[str, int]]
    stride: int | None = None

    def pack(self, **fields: int | str) -> int:
        """The 32-bit word with these fields (lower-case names; a value is a number or the header's name for it).

        KeyError for an unknown field or value name, OverflowError for a number that does not fit.
        """
        word = 0
        for key, value in fields.items():
            hi, lo = self.fields[key.upper()]
            number = self.values[key.upper()][value] if isinstance(value, str) else int(value)
            if number < 0 or number >> (hi - lo + 1):
                raise OverflowError(f"{self.name}.{key} holds {hi - lo + 1} bits, got {number:#x}")
            word |= number << lo
        return word

    def decode(self, word: int) -> dict[str, int]:
        """Every field's value in a 32-bit word, by the header's (upper-case) field names."""
        return {name: word >> lo & ((1 << (hi - lo + 1)) - 1) for name, (hi, lo) in self.fields.items()}

    def describe(self, word: int) -> str:
        """The word in words: fields that are not 0, with names for values that have one."""
        shown = []
        for field, value in self.decode(word).items():
            names = [name for name, number in self.values.get(field, {}).items() if number == value]
            if value or names:
                shown.append(f"{field}={names[0] if names else hex(value)}")
        return f"{self.name}({', '.join(shown)})"


_FIELD = re.compile(r"(\w+)\[(\d+)(?::(\d+))?\]")


def _fields(text: str) -> Mapping[str, tuple[int, int]]:
    return MappingProxyType({name: (int(hi), int(lo or hi)) for name, hi, lo in _FIELD.findall(text)})


def _method(offset: IntEnum, fields: Mapping[str, tuple[int, int]], values: Mapping[str, Mapping[str, int]]) -> Method:
    known = MappingProxyType({field: named for field, named in values.items() if field in fields})
    return Method(offset.name, offset.value, fields, known, tables.STRIDES.get(offset.name))


def _methods(
    offsets: type[IntEnum], fields: Mapping[str, str], values: Mapping[str, Mapping[str, Mapping[str, int]]]
) -> Mapping[str, Method]:
    return MappingProxyType(
        {m.name: _method(m, _fields(fields.get(m.name, "")), values.get(m.name, {})) for m in offsets}
    )


HOST = _methods(HostMethod, tables.HOST_FIELDS, tables.HOST_VALUES)
"""Host methods, executed by the channel's host engine whatever the subchannel."""

COMPUTE = _methods(ComputeMethod, tables.COMPUTE_FIELDS, tables.COMPUTE_VALUES)
"""Compute methods: Hopper's, and the three that only Ampere has."""

COPY = _methods(CopyMethod, tables.COPY_FIELDS, tables.COPY_VALUES)
"""Copy-engine methods (Hopper's, which include Ampere's)."""


def _without(methods: Mapping[str, Method], names: frozenset[str]) -> Mapping[str, Method]:
    return MappingProxyType({name: method for name, method in methods.items() if name not in names})


BY_CLASS: Mapping[int, Mapping[str, Method]] = MappingProxyType(
    {
        0xC76F: HOST,
        0xC86F: HOST,
        0xC7C0: _without(
            _methods(ComputeMethod, tables.COMPUTE_FIELDS | tables.COMPUTE_FIELDS_AMPERE, tables.COMPUTE_VALUES),
            tables.COMPUTE_HOPPER_ONLY,
        ),
        0xCBC0: _without(COMPUTE, tables.COMPUTE_AMPERE_ONLY),
        0xC7B5: _without(
            _methods(CopyMethod, tables.COPY_FIELDS | tables.COPY_FIELDS_AMPERE, tables.COPY_VALUES),
            tables.COPY_HOPPER_ONLY,
        ),
        0xC8B5: COPY,
    }
)
"""Each class exactly, by class number. c86f (Hopper's GPFIFO) has no public header; it takes c76f's methods."""


def find_method(methods: Mapping[str, Method], offset: int) -> tuple[Method, int] | None:
    """The method at a byte offset and its element index (0 if not indexed), or None if no method lies there."""
    below = [method for method in methods.values() if method.offset <= offset]
    method = max(below, key=lambda m: m.offset, default=None)
    if method is None:
        return None
    if method.offset == offset:
        return method, 0
    # Interleaved arrays (CALL_MME_MACRO and CALL_MME_DATA) start in front of each other.
    for candidate in sorted(below, key=lambda m: -m.offset)[:2]:
        if candidate.stride and (offset - candidate.offset) % candidate.stride == 0:
            return candidate, (offset - candidate.offset) // candidate.stride
    return None
