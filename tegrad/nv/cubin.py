"""Reading NVIDIA's cubins (ELF64) and appending the loaded section `.tegrad.ptx` to them.

Everything that NVIDIA's compiler wrote keeps its bytes and its place in the file. After it come: the storage of
uninitialised `__device__` data (`.nv.global` is NOBITS, which loaders of PROGBITS sections skip; it becomes PROGBITS),
our section, its relocations, the section names with ours added, and a new section header table.
"""

import struct
from collections.abc import Iterator
from dataclasses import astuple, dataclass, replace

from tegrad.hw import ptxsection

_EHDR = struct.Struct("<16sHHIQQQIHHHHHH")
_SHDR = struct.Struct("<IIQQQQIIQQ")
_SYM = struct.Struct("<IBBHQQ")
_REL, _RELA = struct.Struct("<QQ"), struct.Struct("<QQq")

_SHT_PROGBITS, _SHT_SYMTAB, _SHT_RELA, _SHT_NOBITS, _SHT_REL = 1, 2, 4, 8, 9
_SHF_ALLOC, _SHF_INFO_LINK = 0x2, 0x40
_STT_OBJECT, _STT_FUNC = 1, 2
_STO_ENTRY = 0x10  # st_other of a function that can be launched
R_CUDA_64 = 2
"""A whole 64-bit address, two words at the relocated offset."""
R_CUDA_ABS32_LO, R_CUDA_ABS32_HI = 0x38, 0x39
"""Low and high half of an address, in the 32-bit immediate at byte 4 of an instruction."""

_PARAM_CBANK, _REGCOUNT, _MIN_STACK_SIZE = 0x0A, 0x2F, 0x12  # EIATTR codes in .nv.info
_EIFMT_SVAL = 4

SHARED_RESERVE_SM90 = 0x400
"""From sm_90 on, `.nv.shared.<kernel>` begins with 1 KiB that the hardware keeps for itself."""


class BadCubin(ValueError):
    """The bytes are no cubin that can be loaded: the message says what is wrong with them."""


@dataclass(frozen=True, slots=True)
class Section:
    """One ELF section: its name, then the fields of its header in their order."""

    name: str
    name_offset: int
    type: int
    flags: int
    addr: int
    offset: int
    size: int
    link: int
    info: int
    align: int
    entsize: int

    def header(self) -> bytes:
        """The section header as it is stored."""
        return _SHDR.pack(*astuple(self)[1:])


@dataclass(frozen=True, slots=True)
class Symbol:
    """One symbol: `section` is an index into the sections, `value` an offset there, `entry` marks a kernel."""

    name: str
    type: int
    entry: bool
    section: int
    value: int
    size: int


def _cstr(blob: bytes, offset: int) -> str:
    return blob[offset : blob.index(b"\0", offset)].decode()


class Cubin:
    """A parsed cubin. BadCubin when `data` is not an ELF64 little-endian file."""

    def __init__(self, data: bytes) -> None:
        if len(data) < _EHDR.size or data[:6] != b"\x7fELF\x02\x01":
            raise BadCubin("not a cubin: no 64-bit ELF header")
        self.data = data
        self.ehdr = _EHDR.unpack_from(data)
        shoff, count, strndx = self.ehdr[6], self.ehdr[12], self.ehdr[13]
        try:
            rows = [_SHDR.unpack_from(data, shoff + i * _SHDR.size) for i in range(count)]
            self.names = self._bytes(rows[strndx])
            self.sections = [Section(_cstr(self.names, row[0]), *row) for row in rows]
        except (struct.error, IndexError, ValueError) as error:
            raise BadCubin(f"not a cubin: its section table is damaged ({error})") from error

    def _bytes(self, row: tuple[int, ...]) -> bytes:
        return self.data[row[4] : row[4] + row[5]]

    def content(self, section: Section) -> bytes:
        """The bytes of a section; zeros for one without storage."""
        if section.type == _SHT_NOBITS:
            return bytes(section.size)
        return self.data[section.offset : section.offset + section.size]

    def find(self, name: str) -> Section | None:
        """The section of that name, or None."""
        return next((s for s in self.sections if s.name == name), None)

    @property
    def kernels(self) -> list[str]:
        """Names of the functions that can be launched."""
        return [s.name for s in self.symbols() if s.entry and s.type == _STT_FUNC]

    @property
    def helpers(self) -> list[str]:
        """Names of functions with machine code of their own that kernels call."""
        return [
            name
            for s in self.sections
            if s.name.startswith(".text.") and (name := s.name.removeprefix(".text.")) not in self.kernels
        ]

    @property
    def arch(self) -> int:
        """SM version as in `sm_<arch>`: the low byte of e_flags up to ELF ABI 7, the second byte from ABI 8."""
        flags: int = self.ehdr[7]
        return flags >> 8 & 0xFF if self.data[8] >= 8 else flags & 0xFF

    def symbols(self) -> Iterator[Symbol]:
        """Every symbol, in the order of the table."""
        table = next((s for s in self.sections if s.type == _SHT_SYMTAB), None)
        if table is None:
            return
        strings = self.content(self.sections[table.link])
        for name, info, other, shndx, value, size in _SYM.iter_unpack(self.content(table)):
            yield Symbol(_cstr(strings, name), info & 0xF, bool(other & _STO_ENTRY), shndx, value, size)

    def relocations(self, target: str) -> Iterator[tuple[int, int]]:
        """(offset, type) of each relocation of the section named `target`."""
        for section in self.sections:
            if section.type in (_SHT_REL, _SHT_RELA) and self.sections[section.info].name == target:
                layout = _REL if section.type == _SHT_REL else _RELA
                for row in layout.iter_unpack(self.content(section)):
                    yield row[0], row[1] & 0xFFFFFFFF

    def info(self, section: str) -> Iterator[tuple[int, bytes]]:
        """(attribute, value) pairs of `.nv.info` or `.nv.info.<kernel>`; immediate values come as two bytes."""
        found = self.find(section)
        blob = self.content(found) if found else b""
        at = 0
        while at + 4 <= len(blob):
            form, attribute, size = struct.unpack_from("<BBH", blob, at)
            length = size if form == _EIFMT_SVAL else 0
            yield attribute, blob[at + 4 : at + 4 + length] if length else struct.pack("<H", size)
            at += 4 + length

    def param_base(self, kernel: str) -> int:
        """Offset of the parameters in constant bank 0, in bytes."""
        for attribute, value in self.info(f".nv.info.{kernel}"):
            if attribute == _PARAM_CBANK:
                return int.from_bytes(value[4:6], "little")
        return 0

    def static_shared(self, kernel: str) -> int:
        """Bytes of shared memory that the kernel itself declares."""
        section = self.find(f".nv.shared.{kernel}")
        size = section.size if section else 0
        return max(0, size - SHARED_RESERVE_SM90) if self.arch >= 90 else size

    def _per_symbol(self, attribute: int, kernel: str) -> int:
        names = [s.name for s in self.symbols()]
        for found, value in self.info(".nv.info"):
            if found == attribute and len(value) == 8:
                symbol, number = struct.unpack("<II", value)
                if symbol < len(names) and names[symbol] == kernel:
                    return int(number)
        return 0

    def barriers(self, kernel: str) -> int:
        """Barriers of a block that the kernel uses: bits 26:20 of its code section's flags, up to ELF ABI 7; else 0."""
        text = self.find(f".text.{kernel}")
        return text.flags >> 20 & 0x7F if text and self.data[8] < 8 else 0

    def registers(self, kernel: str) -> int:
        """Registers per thread."""
        return self._per_symbol(_REGCOUNT, kernel)

    def stack(self, kernel: str) -> int:
        """Least stack per thread, in bytes."""
        return self._per_symbol(_MIN_STACK_SIZE, kernel)


def sole_kernel(cubin: Cubin) -> str:
    """The kernel of a cubin that holds just one and calls nothing outside it; BadCubin otherwise.

    tinygrad's loader takes registers, stack and constant banks from the last entry it meets, whichever function it is
    for, and knows no relocation of calls.
    """
    if len(names := cubin.kernels) != 1:
        listed = ", ".join(names) or "none"
        raise BadCubin(f"a cubin must hold one kernel, this one holds {len(names)} ({listed}): compile each by itself")
    if helpers := cubin.helpers:
        raise BadCubin(f"kernel {names[0]} calls functions outside of it ({', '.join(helpers)})")
    return names[0]


def _masked_words(cubin: Cubin, kernel: str) -> list[int]:
    """Byte offsets of the 32-bit words of the machine code that relocations change."""
    words: set[int] = set()
    for offset, kind in cubin.relocations(f".text.{kernel}"):
        if kind == R_CUDA_64:
            words |= {offset, offset + 4}
        elif kind in (R_CUDA_ABS32_LO, R_CUDA_ABS32_HI):
            words.add(offset + 4)
        else:
            raise BadCubin(f"{kernel}: relocation type {kind:#x} at {offset:#x} is not known")
    return sorted(words)


def _variables(cubin: Cubin) -> list[tuple[int, str]]:
    """(symbol index, name) of each module variable: data of `__device__` and `__constant__`."""
    banks = (".nv.global", ".nv.constant")
    return [
        (index, symbol.name)
        for index, symbol in enumerate(cubin.symbols())
        if symbol.type == _STT_OBJECT
        and 0 < symbol.section < len(cubin.sections)
        and cubin.sections[symbol.section].name.startswith(banks)
    ]


def with_ptx(data: bytes, ptx: str, *, dynamic_shared: int = 0) -> bytes:
    """A cubin of one kernel with its PTX appended as the loaded section `.tegrad.ptx`; BadCubin when it has several."""
    cubin = Cubin(data)
    kernel = sole_kernel(cubin)
    text = cubin.find(f".text.{kernel}")
    if text is None:
        raise BadCubin(f"the cubin has no machine code for its kernel {kernel}")
    entry = next(i for i, s in enumerate(cubin.symbols()) if s.name == kernel and s.type == _STT_FUNC)
    variables = _variables(cubin)
    blob = ptxsection.pack(
        kernel,
        cubin.content(text),
        ptx,
        masked=_masked_words(cubin, kernel),
        symbols=[name for _, name in variables],
        param_base=cubin.param_base(kernel),
        static_shared=cubin.static_shared(kernel),
        dynamic_shared=dynamic_shared,
    )
    slots = [(ptxsection.ENTRY_SLOT, entry)]
    slots += [(ptxsection.symbol_slot(i), symbol) for i, (symbol, _) in enumerate(variables)]
    return _append(cubin, blob, slots)


def _append(cubin: Cubin, blob: bytes, slots: list[tuple[int, int]]) -> bytes:
    """Write the file anew: old bytes, storage, our section, its relocations, names, headers."""
    out = bytearray(cubin.data)

    def put(content: bytes, align: int) -> int:
        out.extend(bytes(-len(out) % align))
        out.extend(content)
        return len(out) - len(content)

    sections = []
    for section in cubin.sections:
        if section.name.startswith(".nv.global") and section.type == _SHT_NOBITS:
            stored = put(bytes(section.size), max(section.align, 8))
            section = replace(section, type=_SHT_PROGBITS, offset=stored)
        sections.append(section)

    symtab = next(i for i, s in enumerate(sections) if s.type == _SHT_SYMTAB)
    rela_name = f".rela{ptxsection.NAME}"
    at_name, at_rela = len(cubin.names), len(cubin.names) + len(ptxsection.NAME) + 1
    names = cubin.names + ptxsection.NAME.encode() + b"\0" + rela_name.encode() + b"\0"
    at_blob = put(blob, ptxsection.ALIGN)
    ours = Section(
        ptxsection.NAME, at_name, _SHT_PROGBITS, _SHF_ALLOC, 0, at_blob, len(blob), 0, 0, ptxsection.ALIGN, 0
    )
    table = b"".join(_RELA.pack(offset, symbol << 32 | R_CUDA_64, 0) for offset, symbol in slots)
    at_table, index = put(table, 8), len(sections)
    rela = Section(rela_name, at_rela, _SHT_RELA, _SHF_INFO_LINK, 0, at_table, len(table), symtab, index, 8, _RELA.size)
    strndx: int = cubin.ehdr[13]
    sections[strndx] = replace(sections[strndx], offset=put(names, 1), size=len(names))
    sections += [ours, rela]

    shoff = put(b"".join(s.header() for s in sections), 8)
    ehdr = list(cubin.ehdr)
    ehdr[6], ehdr[12] = shoff, len(sections)
    _EHDR.pack_into(out, 0, *ehdr)
    return bytes(out)


def read_ptx(data: bytes) -> ptxsection.PtxSection | None:
    """The `.tegrad.ptx` section of a cubin, with slots not yet relocated; None when it has none."""
    cubin = Cubin(data)
    section = cubin.find(ptxsection.NAME)
    return ptxsection.unpack(cubin.content(section)) if section else None
