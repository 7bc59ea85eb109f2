"""QMD (queue meta data, the launch descriptor of the compute engine): layouts, and one writer and reader for all.

A QMD is a block of 256 bytes (version 3, Ampere) or 384 bytes (version 4, Hopper), 256-byte aligned, full of bit
fields. A layout says where each field lies; `Qmd` sets and gets fields by name in any writable memory. The queue that
builds a launch, the board that executes it and the tracer that prints it use the same declaration.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from types import MappingProxyType

from tegrad.hw import qmd_tables as tables


@dataclass(frozen=True, slots=True)
class QmdArray:
    """An array of fields: bits (hi, lo) of element 0, the distance in bits to the next, the number of elements."""

    hi: int
    lo: int
    stride: int
    count: int


@dataclass(frozen=True)
class QmdLayout:
    """One QMD version: scalar fields as (hi, lo) bits, arrays, and the named values of enumerated fields."""

    name: str
    major: int
    minor: int
    size: int
    fields: Mapping[str, tuple[int, int]]
    arrays: Mapping[str, QmdArray]
    enums: Mapping[str, Mapping[str, int]]

    @cached_property
    def bits(self) -> Mapping[str, tuple[int, int]]:
        """(hi, lo) of every field by its flat name: scalars as they are, array elements as `name_index`."""
        flat = dict(self.fields)
        for name, array in self.arrays.items():
            for i in range(array.count):
                flat[f"{name}_{i}"] = (array.hi + i * array.stride, array.lo + i * array.stride)
        return MappingProxyType(flat)

    @cached_property
    def minor_field(self) -> str:
        """Name of the minor version's field, which the headers do not spell alike."""
        return "qmd_minor_version" if "qmd_minor_version" in self.fields else "qmd_version"


def _layout(
    name: str,
    version: tuple[int, int],
    size: int,
    fields: dict[str, tuple[int, int]],
    arrays: dict[str, tuple[int, int, int, int]],
    enums: dict[str, dict[str, int]],
) -> QmdLayout:
    return QmdLayout(
        name,
        *version,
        size,
        MappingProxyType(fields),
        MappingProxyType({key: QmdArray(*array) for key, array in arrays.items()}),
        MappingProxyType(enums),
    )


V3 = _layout("V3", (3, 0), 256, tables.V3_FIELDS, tables.V3_ARRAYS, tables.V3_ENUMS)
"""Version 3.0, class c7c0 (ga10b)."""

V4 = _layout("V4", (4, 0), 384, tables.V4_FIELDS, tables.V4_ARRAYS, tables.V4_ENUMS)
"""Version 4.0, class cbc0 (gh100)."""

LAYOUTS: Mapping[str, QmdLayout] = MappingProxyType({"V3": V3, "V4": V4})


class Qmd:
    """A QMD in memory: set fields with `write(name=value)`, get one with `read(name)`.

    Names are the header's in lower case; an element of an array is `name_index`, such as `constant_buffer_valid_0`.
    `mem` is writable memory of at least the layout's size; it is read and written in place, nothing is copied.
    """

    __slots__ = ("layout", "mem")

    def __init__(self, layout: QmdLayout, mem: memoryview | bytearray) -> None:
        view = memoryview(mem).cast("B")
        if view.nbytes < layout.size:
            raise ValueError(f"a QMD {layout.name} needs {layout.size} bytes of memory, got {view.nbytes}")
        self.layout = layout
        self.mem = view[: layout.size]

    def write(self, **fields: int) -> None:
        """Set fields. KeyError for a name the layout lacks, OverflowError for a value its bits cannot hold."""
        for name, value in fields.items():
            hi, lo = self._bits(name)
            if value < 0 or value >> (hi - lo + 1):
                raise OverflowError(f"QMD {self.layout.name} field {name} holds {hi - lo + 1} bits, got {value:#x}")
            first, last = lo // 8, hi // 8 + 1
            mask = ((1 << (hi - lo + 1)) - 1) << (lo % 8)
            old = int.from_bytes(self.mem[first:last], "little")
            self.mem[first:last] = (old & ~mask | value << (lo % 8)).to_bytes(last - first, "little")

    def read(self, name: str) -> int:
        """The value of one field. KeyError for a name the layout lacks."""
        hi, lo = self._bits(name)
        return int.from_bytes(self.mem[lo // 8 : hi // 8 + 1], "little") >> (lo % 8) & ((1 << (hi - lo + 1)) - 1)

    def items(self) -> Iterator[tuple[str, int]]:
        """Every field whose value is not 0, in the order of the layout."""
        return ((name, value) for name in self.layout.bits if (value := self.read(name)))

    def _bits(self, name: str) -> tuple[int, int]:
        try:
            return self.layout.bits[name]
        except KeyError:
            raise KeyError(f"QMD {self.layout.name} has no field {name}") from None
