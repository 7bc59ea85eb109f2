"""The loaded section `.tegrad.ptx`: a kernel's PTX travelling with its machine code.

NVIDIA's compilers leave the machine code as it is; we append one section that is loaded with it. Profilers and
fault reports show its PTX, and an emulated GPU executes it in place of machine code that it cannot run. Layout, little
endian:

    header     see `_HEADER`: magic, size of the section, entry slot, sizes, digest of the machine code
    slots      one 64-bit word per global symbol, in the order of their names
    masked     one 32-bit word per relocated word of the machine code: its byte offset there
    strings    kernel name and symbol names, each ended by NUL; then the PTX (UTF-8); zero padding to 8 bytes

The entry slot and the symbol slots are filled by the loader through ordinary 64-bit relocations (R_CUDA_64), so that
they hold the addresses that the loaded machine code itself uses. The entry slot tells which machine code a section
belongs to, where one allocation holds several, or the leftovers of an earlier one.
"""

import hashlib
import struct
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

Buffer = bytes | bytearray | memoryview

MAGIC = b"\x7f.tegrad.ptx\x00v1\x00"
NAME = ".tegrad.ptx"
ALIGN = 128
"""Alignment of the section in its image: `find` looks at multiples of it from the start of the buffer."""

# magic, section size, symbol count, entry slot, text size, masked count, parameter base, static shared, dynamic shared,
# PTX size, strings size (names with their NULs), zero, SHA-256 of the masked machine code
_HEADER = struct.Struct("<16sIIQIIIIIIII32s")
ENTRY_SLOT = 24
"""Byte offset of the entry slot: the address of the kernel's first instruction, once relocated."""


@dataclass(frozen=True, slots=True)
class PtxSection:
    """A section as read from memory. Offsets and sizes in bytes; `masked` are offsets into the machine code.

    `static_shared` is what the kernel declares, `dynamic_shared` what it was compiled to be launched with on top.
    """

    name: str
    text_size: int
    digest: bytes
    masked: tuple[int, ...]
    symbols: dict[str, int]
    ptx: str
    param_base: int
    static_shared: int
    dynamic_shared: int
    entry: int
    size: int


def symbol_slot(index: int) -> int:
    """Byte offset within the section of the 64-bit slot of the `index`-th symbol."""
    return _HEADER.size + 8 * index


def code_digest(text: Buffer, masked: Sequence[int] = ()) -> bytes:
    """SHA-256 of machine code with each 32-bit word at an offset of `masked` taken as zero."""
    code = bytearray(text)
    for offset in masked:
        if offset % 4 or not 0 <= offset <= len(code) - 4:
            raise ValueError(f"masked word at {offset:#x} lies outside {len(code):#x} bytes of machine code")
        code[offset : offset + 4] = b"\0\0\0\0"
    return hashlib.sha256(code).digest()


def pack(
    name: str,
    text: Buffer,
    ptx: str,
    *,
    masked: Sequence[int] = (),
    symbols: Sequence[str] = (),
    param_base: int = 0,
    static_shared: int = 0,
    dynamic_shared: int = 0,
) -> bytes:
    """Build the section for machine code `text` with its slots still zero.

    The caller adds the relocations: one for `ENTRY_SLOT` and one for `symbol_slot(i)` of each name in `symbols`.
    """
    strings = b"".join(part.encode() + b"\0" for part in (name, *symbols))
    source = ptx.encode()
    body = struct.pack(f"<{len(symbols)}Q{len(masked)}I", *[0] * len(symbols), *masked) + strings + source
    size = (_HEADER.size + len(body) + 7) // 8 * 8
    code = memoryview(text).cast("B")
    counts = (len(code), len(masked), param_base, static_shared, dynamic_shared, len(source), len(strings), 0)
    head = _HEADER.pack(MAGIC, size, len(symbols), 0, *counts, code_digest(code, masked))
    return (head + body).ljust(size, b"\0")


def unpack(buf: Buffer) -> PtxSection:
    """Read a section that starts at the beginning of `buf`; ValueError when there is none or it is damaged."""
    view = memoryview(buf).cast("B")
    if len(view) < _HEADER.size or bytes(view[: len(MAGIC)]) != MAGIC:
        raise ValueError(f"no {NAME} section: magic not found")
    fields = _HEADER.unpack_from(view)
    _, size, nsymbols, entry, text_size, nmasked, param_base, static_shared, dynamic_shared = fields[:9]
    ptx_size, strings_size, _, digest = fields[9:]
    at_masked = symbol_slot(nsymbols)
    at_strings = at_masked + 4 * nmasked
    at_ptx = at_strings + strings_size
    if not at_ptx + ptx_size <= size <= len(view):
        raise ValueError(f"{NAME} section is cut short: {size} bytes stated, {len(view)} there")
    names = bytes(view[at_strings:at_ptx]).split(b"\0")
    if len(names) != nsymbols + 2 or names[-1]:
        raise ValueError(f"{NAME} section names {len(names) - 2} symbols for {nsymbols} slots")
    return PtxSection(
        name=names[0].decode(),
        text_size=text_size,
        digest=digest,
        masked=struct.unpack_from(f"<{nmasked}I", view, at_masked),
        symbols=dict(
            zip(
                (n.decode() for n in names[1:-1]),
                struct.unpack_from(f"<{nsymbols}Q", view, symbol_slot(0)),
                strict=True,
            )
        ),
        ptx=bytes(view[at_ptx : at_ptx + ptx_size]).decode(),
        param_base=param_base,
        static_shared=static_shared,
        dynamic_shared=dynamic_shared,
        entry=entry,
        size=size,
    )


def find(image: Buffer, *, entry: int | None = None) -> Iterator[tuple[int, PtxSection]]:
    """Yield (offset, section) for every whole section in `image`, in order; with `entry`, those of that address only.

    `image` is the buffer that holds the loaded machine code, from its start (sections lie at multiples of `ALIGN`).
    """
    view = memoryview(image).cast("B")
    for offset in range(0, len(view) - _HEADER.size + 1, ALIGN):
        if view[offset] != MAGIC[0] or view[offset : offset + len(MAGIC)] != MAGIC:
            continue
        if entry is not None and int.from_bytes(view[offset + ENTRY_SLOT : offset + ENTRY_SLOT + 8], "little") != entry:
            continue
        try:
            yield offset, unpack(view[offset:])
        except (ValueError, UnicodeDecodeError):
            continue
