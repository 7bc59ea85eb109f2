"""A GGUF file's header, strictly checked, and its tensor data, read straight into memory that the caller owns.

Format: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md (versions 2 and 3, little endian). Block formats:
ggml-common.h of the same repository. The `gguf` package holds the same numbers; the tests compare against it.
"""

from __future__ import annotations

import os
import struct
from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from itertools import accumulate, pairwise
from math import prod
from pathlib import Path
from typing import Final, Self, TypeAlias

from tegrad.llm.closing import Closing
from tegrad.llm.errors import GgufError, UnsupportedModelError
from tegrad.llm.formats import BLOCK_TYPES, BlockType
from tegrad.llm.parts import File, Place

MAGIC: Final = b"GGUF"
VERSIONS: Final = (2, 3)
DEFAULT_ALIGNMENT: Final = 32
MOST_HEADER_BYTES: Final = 64 << 20
"""Bytes in front of the tensor data that are read: several times the largest vocabularies."""
MOST_ITEMS: Final = 1 << 16
"""Values, and tensors, that a file may have."""
MOST_LIST_ENTRIES: Final = 1 << 23
"""Entries that all lists of a file may have together."""
KEY_BYTES: Final = (1 << 16) - 1
"""Of a value's key, as the format has it."""
NAME_BYTES: Final = 64
"""Of a tensor's name, as the format has it."""
SHOWN_CHARACTERS: Final = 60
"""Characters of a value that an error shows."""

Value: TypeAlias = int | float | bool | str | list[int] | list[float] | list[bool] | list[str]
Progress: TypeAlias = Callable[[int, int], None]
"""Called with bytes done and bytes in all."""


def shown(value: object) -> str:
    """A value out of a file as an error shows it: short, and on one line."""
    if isinstance(value, list):
        return f"a list of {len(value)}"
    size = len(value) if isinstance(value, str) else 0
    text = repr(value[:SHOWN_CHARACTERS] if isinstance(value, str) else value)
    return text if size <= SHOWN_CHARACTERS and len(text) <= 2 * SHOWN_CHARACTERS else f"{text[:SHOWN_CHARACTERS]}..."


_STRING: Final = 8
_ARRAY: Final = 9
_SCALARS: Final[Mapping[int, str]] = {
    0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d",
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """Where a tensor lies. `shape` is outermost first, as numpy has it (GGUF stores the reverse)."""

    name: str
    type: BlockType
    shape: tuple[int, ...]
    offset: int
    """From the start of the file."""

    @property
    def rows(self) -> int:
        """Rows of the tensor as a matrix."""
        return prod(self.shape[:-1])

    @property
    def columns(self) -> int:
        """Elements of a row."""
        return self.shape[-1]

    @property
    def nbytes(self) -> int:
        """Bytes in the file."""
        return self.rows * self.type.row_bytes(self.columns)

    def shaped(self, rank: int) -> TensorInfo:
        """With so many dimensions, where those in front of them are 1: to ggml every tensor has four."""
        before = self.shape[:-rank]
        return replace(self, shape=self.shape[-rank:]) if before and max(before) == 1 else self

    def cut(self, sizes: Iterable[int]) -> list[TensorInfo]:
        """Parts that follow each other, of so many rows, or elements of a vector."""
        sizes, each = list(sizes), self.nbytes // self.shape[0]
        starts = accumulate(sizes, initial=0)
        return [replace(self, shape=(size, *self.shape[1:]), offset=self.offset + start * each)
                for size, start in zip(sizes, starts, strict=False)]  # fmt: skip


class Gguf(Closing):
    """An open GGUF file: `metadata` and `tensors` by name. Use as a context manager.

    A model in several files is one as well: its parts lie behind each other, and each tensor's offset counts from the
    start of the first.
    """

    def __init__(self, path: Path, files: Sequence[File], headers: Sequence[_Header]) -> None:
        """`path` is the file that was asked for; `files` are the model's, each with what its header says."""
        self.path = path
        self._files = tuple(files)
        self._starts = tuple(accumulate((file.size for file in files[:-1]), initial=0))
        self.size = sum(file.size for file in files)
        """Of all files, in bytes."""
        self.metadata = headers[0].metadata
        found: dict[str, TensorInfo] = {}
        for start, header in zip(self._starts, headers, strict=True):
            for name, info in header.tensors.items():
                if name in found:
                    raise header.file.corrupt(f"another part has the tensor {shown(name)}, too")
                found[name] = replace(info, offset=start + info.offset)
        self.tensors: Mapping[str, TensorInfo] = found

    @classmethod
    def open(cls, path: str | os.PathLike[str]) -> Self:
        """Open and check a file, and with one part of a model all others; GgufError or UnsupportedModelError."""
        path = Path(path)
        with ExitStack() as opened:
            files = [opened.enter_context(File.open(path))]
            headers = [_Header(files[0])]
            if (place := Place.of(files[0], headers[0].metadata)) is not None:
                one = files[0], headers[0]
                files, headers = [], []
                for number in range(place.count):
                    if number == place.number:
                        file, header = one
                    else:
                        file = opened.enter_context(File.open(place.beside(one[0], number)))
                        place.check_fellow(file, (header := _Header(file)).metadata, number)
                    files.append(file)
                    headers.append(header)
            made = cls(path, files, headers)
            if place is not None and len(made.tensors) != place.tensors:
                raise made.corrupt(f"its {place.count} parts have {len(made.tensors)} tensors, not {place.tensors}")
            opened.pop_all()
            return made

    def close(self) -> None:
        """Close the file. Closing twice is harmless."""
        for file in self._files:
            file.close()

    def read(self, offset: int, size: int) -> bytes:
        """`size` bytes at `offset`, fewer at the end of the file."""
        return b"".join(file.read(at, count) for file, at, count in self._of(offset, size))

    def read_into(self, offset: int, target: memoryview, keep: bool = False) -> None:
        """Fill `target` from `offset`; several threads may.

        Unless told to `keep` it, the page cache drops what was read: where memory is unified, that would be a second
        copy beside the device's.
        """
        done = 0
        for file, at, count in self._of(offset, len(target)):
            file.read_into(at, target[done : done + count], keep)
            done += count

    def _of(self, offset: int, size: int) -> Iterator[tuple[File, int, int]]:
        """The files that bytes lie in, where in each they begin and how many; what is past the end is the last's."""
        at = bisect_right(self._starts, offset) - 1
        while size > 0:
            file, start = self._files[at], self._starts[at]
            last = at == len(self._files) - 1
            count = size if last else min(size, start + file.size - offset)
            yield file, offset - start, count
            offset, size, at = offset + count, size - count, at + 1

    def tensor(self, name: str) -> TensorInfo:
        """The tensor of that name; raises GgufError when the file lacks it."""
        try:
            return self.tensors[name]
        except KeyError:
            raise GgufError(f"{self.path} lacks the tensor {name!r}; it is incomplete, convert it again") from None

    def corrupt(self, what: str) -> GgufError:
        """The error for a file whose contents contradict themselves."""
        return GgufError(f"{self.path} is not a sound GGUF file: {what}; download or convert it again")


class _Header:
    """Everything in front of a file's tensor data: `metadata` and `tensors`. Each read is checked against its size."""

    WINDOW: Final = 1 << 20

    def __init__(self, file: File) -> None:
        """Read it; raises GgufError or UnsupportedModelError."""
        self.file = file
        self.offset = 0
        self.start = 0
        self.window = b""
        self.entries = 0
        try:
            self.metadata, self.tensors = self.parse()
        except OSError as error:
            raise GgufError(
                f"cannot read the model {file.path}: {error.strerror}; give the path of a GGUF file"
            ) from error

    def truncated(self, end: int) -> GgufError:
        return GgufError(
            f"{self.file.path} is truncated: {self.file.size} bytes, at least {end} expected; download it again"
        )

    def check(self, end: int) -> None:
        """Refuse, before anything is allocated, a header that ends past the file's end or where none does."""
        if end > self.file.size:
            raise self.truncated(end)
        if end > MOST_HEADER_BYTES:
            raise self.file.corrupt(
                f"its metadata takes at least {end:,} bytes, of which we read {MOST_HEADER_BYTES:,}"
            )

    def count(self, what: str, smallest: int) -> int:
        """How many of something follow, each of at least so many bytes."""
        count = self.u64()
        if self.offset + count * smallest > self.file.size:
            raise self.truncated(self.offset + count * smallest)
        if count > MOST_ITEMS:
            raise self.file.corrupt(f"{count:,} {what}, of which we read {MOST_ITEMS:,}")
        return count

    def take(self, size: int) -> int:
        """Advance over `size` bytes and return where they begin in `window`."""
        self.check(self.offset + size)
        if self.offset + size > self.start + len(self.window):
            self.start = self.offset
            self.window = self.file.read(self.offset, max(size, self.WINDOW))
        begin = self.offset - self.start
        self.offset += size
        return begin

    def u32(self) -> int:
        return int.from_bytes(self.bytes(4), "little")

    def u64(self) -> int:
        return int.from_bytes(self.bytes(8), "little")

    def bytes(self, size: int) -> bytes:
        begin = self.take(size)
        return self.window[begin : begin + size]

    def string(self) -> str:
        return self.bytes(self.u64()).decode("utf-8", errors="surrogateescape")

    def name(self, what: str, limit: int) -> str:
        """A string of at most so many bytes."""
        if (size := self.u64()) > limit:
            raise self.file.corrupt(f"the name of a {what} has {size:,} bytes, {limit:,} at most expected")
        return self.bytes(size).decode("utf-8", errors="surrogateescape")

    def value(self, kind: int) -> Value:
        if kind == _STRING:
            return self.string()
        if kind == _ARRAY:
            return self.array()
        layout = "<" + self.scalar_code(kind)
        value: int | float = struct.unpack(layout, self.bytes(struct.calcsize(layout)))[0]
        return value

    def array(self) -> Value:
        kind, count = self.u32(), self.u64()
        if kind == _ARRAY:
            raise self.file.corrupt("a list of lists in its metadata")
        code = "Q" if kind == _STRING else self.scalar_code(kind)  # a string has its length in front
        self.check(self.offset + count * struct.calcsize("<" + code))
        self.entries += count
        if self.entries > MOST_LIST_ENTRIES:
            raise self.file.corrupt(f"its lists have {self.entries:,} entries, of which we read {MOST_LIST_ENTRIES:,}")
        if kind == _STRING:
            return self.strings(count)
        return list(struct.unpack(f"<{count}{code}", self.bytes(count * struct.calcsize("<" + code))))

    def strings(self, count: int) -> list[str]:
        """So many strings; a vocabulary has some hundred thousand, so those inside the window cost no calls."""
        texts: list[str] = []
        size_at = struct.Struct("<Q").unpack_from
        while len(texts) < count:
            texts.append(self.string())  # moves the window on, or says that the file is truncated
            window, end, held = self.window, self.offset - self.start, len(self.window)
            for _ in range(count - len(texts)):
                begin = end + 8
                if begin > held or begin + (size := size_at(window, end)[0]) > held:
                    break
                end = begin + size
                texts.append(window[begin:end].decode("utf-8", "surrogateescape"))
            self.offset = self.start + end
        return texts

    def scalar_code(self, kind: int) -> str:
        try:
            return _SCALARS[kind]
        except KeyError:
            raise self.file.corrupt(f"unknown metadata type {kind}") from None

    def parse(self) -> tuple[Mapping[str, Value], Mapping[str, TensorInfo]]:
        if self.file.read(0, 4) != MAGIC:
            raise GgufError(f"{self.file.path} is not a GGUF file: give a model in GGUF format")
        self.take(4)
        version = self.u32()
        if version not in VERSIONS:
            raise UnsupportedModelError(
                f"{self.file.path} has GGUF version {version}; little-endian 2 and 3 are read: convert it again"
            )
        tensor_count, value_count = self.count("tensors", 32), self.count("values", 13)
        metadata: dict[str, Value] = {}
        for _ in range(value_count):
            key = self.name("value", KEY_BYTES)
            if key in metadata:
                raise self.file.corrupt(f"two values named {shown(key)}")
            metadata[key] = self.value(self.u32())
        raw = [self.tensor_info() for _ in range(tensor_count)]
        return metadata, self.infos(raw, self.data_start(metadata))

    def data_start(self, metadata: Mapping[str, Value]) -> int:
        alignment = metadata.get("general.alignment", DEFAULT_ALIGNMENT)
        if not isinstance(alignment, int) or alignment <= 0 or alignment & (alignment - 1):
            raise self.file.corrupt(f"alignment {shown(alignment)}")
        return -(-self.offset // alignment) * alignment

    def tensor_info(self) -> tuple[str, tuple[int, ...], int, int]:
        name, rank = self.name("tensor", NAME_BYTES), self.u32()
        if not 1 <= rank <= 4:
            raise self.file.corrupt(f"tensor {shown(name)} has {rank} dimensions")
        shape = tuple(self.u64() for _ in range(rank))
        return name, shape[::-1], self.u32(), self.u64()

    def infos(self, raw: list[tuple[str, tuple[int, ...], int, int]], start: int) -> Mapping[str, TensorInfo]:
        tensors: dict[str, TensorInfo] = {}
        for name, shape, number, offset in raw:
            if name in tensors:
                raise self.file.corrupt(f"two tensors named {shown(name)}")
            block = BLOCK_TYPES.get(number)
            if block is None:
                raise UnsupportedModelError(
                    f"{self.file.path}: tensor {shown(name)} is quantized as {_type_name(number)}; we run "
                    f"{', '.join(known.name for known in BLOCK_TYPES.values())}: quantize the model again"
                )
            if min(shape) <= 0 or shape[-1] % block.elements:
                raise self.file.corrupt(f"tensor {shown(name)} of {block.name} has the shape {shape}")
            info = TensorInfo(name, block, shape, start + offset)
            if info.offset + info.nbytes > self.file.size:
                raise self.truncated(info.offset + info.nbytes)
            tensors[name] = info
        self.check_apart(tensors.values())
        return tensors

    def check_apart(self, tensors: Iterable[TensorInfo]) -> None:
        """Refuse tensors that share bytes: a small file would take any amount of memory."""
        for one, other in pairwise(sorted(tensors, key=lambda info: info.offset)):
            if one.offset + one.nbytes > other.offset:
                raise self.file.corrupt(f"the tensors {shown(one.name)} and {shown(other.name)} overlap")


_UNNAMED: Final[Mapping[int, str]] = {
    31: "Q4_0_4_4", 32: "Q4_0_4_8", 33: "Q4_0_8_8", 36: "IQ4_NL_4_4", 37: "IQ4_NL_4_8", 38: "IQ4_NL_8_8", 42: "Q2_0",
}  # fmt: skip
"""What the `gguf` package does not name: formats for ARM's processors, which llama.cpp gave up, and a newer one."""


def _type_name(number: int) -> str:
    from gguf.constants import GGMLQuantizationType  # only to name what we refuse

    try:
        return str(GGMLQuantizationType(number).name)
    except ValueError:
        return _UNNAMED.get(number, f"type {number}")
