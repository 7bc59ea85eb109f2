"""The instruction cache: from a program address to a kernel that the PTX engine runs.

The buffer that holds the program address also holds the loaded section `.tegrad.ptx` of its image. The section names
the machine code by its digest; where memory holds other code, or no section, the instructions are illegal here. Like
the real cache, this one keeps what it fetched until an invalidation, whatever memory holds by then.
"""

from __future__ import annotations

import re
import threading
from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass

from tegrad.errors import TegradError
from tegrad.hw import ptxsection
from tegrad.hw.chips import Chip
from tegrad.orin.memory import GPC_CLIENT_GCC, AddressSpace
from tegrad.ptx import LoadedKernel, load

SEARCH_BYTES = 16 << 20
"""Bytes on either side of the program address that are searched for its section."""

NEAR_BEFORE, NEAR_AFTER = 32 << 10, 256 << 10
"""Bytes before it and after it that are searched first; nearly every image is smaller."""

MOST_MODULES = 1024
"""Loaded PTX modules kept; a program that comes again is compiled again otherwise."""

_TARGET = re.compile(r"^\s*\.target\s+sm_(\d+)", re.MULTILINE)


class IllegalCode(TegradError):
    """Memory at a program address does not hold machine code that this board can execute."""


@dataclass(frozen=True, slots=True)
class Program:
    """A program as fetched: its kernel, its section, and the memory that both came from."""

    kernel: LoadedKernel
    section: ptxsection.PtxSection
    section_va: int
    code: bytes
    image: bytes
    generation: int


class ProgramCache:
    """Programs of one context by address. Modules are shared between all contexts of a GPU."""

    def __init__(self, vm: AddressSpace, chip: Chip, modules: Modules) -> None:
        self._vm = vm
        self._chip = chip
        self._modules = modules
        self._programs: dict[int, Program] = {}

    def fetch(self, va: int, generation: int, *, fresh: bool = False) -> Program:
        """The program at `va`, fetched anew if it is older than `generation` or `fresh` is asked for.

        Raises IllegalCode, or the MMU fault of the instruction fetch.
        """
        self._require(va, 1)
        known = self._programs.get(va)
        if known is not None and known.generation >= generation and not fresh:
            return known
        if known is None or not self._same(va, known):
            known = self._load(va, generation)
        elif known.generation < generation:
            known = Program(known.kernel, known.section, known.section_va, known.code, known.image, generation)
        self._programs[va] = known
        return known

    def _same(self, va: int, known: Program) -> bool:
        """Whether memory still holds what `known` was fetched from."""
        at = known.section_va
        ranges = (va, len(known.code)), (at, len(known.image))
        if any(self._vm.bad_page(start, size, False) is not None for start, size in ranges):
            return False  # a shorter program lies there now, if any
        # The section is no part of what an instruction fetch of silicon reads: the L2 keeps nothing of it.
        return self._bytes(va, len(known.code)) == known.code and self._vm.holds(at, known.image)

    def _bytes(self, va: int, size: int) -> bytes:
        """What an instruction fetch of a mapped range sees."""
        return self._vm.read(va, size, GPC_CLIENT_GCC, gpc=0, what=f"instruction fetch of the program at {va:#x}")

    def _require(self, va: int, size: int) -> None:
        self._vm.require(va, size, GPC_CLIENT_GCC, gpc=0, what=f"instruction fetch of the program at {va:#x}")

    def _load(self, va: int, generation: int) -> Program:
        unlike = ""
        for at, section in self._sections(va):
            if self._vm.bad_page(va, max(1, section.text_size), False) is not None:
                raise IllegalCode(f"the machine code of {section.name} is cut off: map its whole buffer")
            code = self._bytes(va, section.text_size)
            if ptxsection.code_digest(code, section.masked) == section.digest:
                kernel = self._modules.kernel(self._fitting(section))
                return Program(kernel, section, at, code, self._vm.look(at, section.size), generation)
            unlike = section.name  # perhaps what an earlier program left in this buffer
        if unlike:
            raise IllegalCode(
                f"the machine code at {va:#x} is not that of kernel {unlike}; "
                "was it overwritten, or copied to the wrong place?"
            )
        raise IllegalCode(
            f"no {ptxsection.NAME} section for the program at {va:#x}; the board runs only what tegrad compiled"
        )

    def _fitting(self, section: ptxsection.PtxSection) -> ptxsection.PtxSection:
        """The section, unless it is made for a later chip."""
        if (target := _TARGET.search(section.ptx)) and int(target[1]) > int(self._chip.arch[3:]):
            raise IllegalCode(f"kernel {section.name} is made for sm_{target[1]}, this chip is {self._chip.arch}")
        return section

    def _sections(self, va: int) -> Iterator[tuple[int, ptxsection.PtxSection]]:
        """Sections that name the program at `va`, with their addresses: near ones first, then those farther off."""
        mapping = self._vm.mapping_at(va)
        if mapping is None:  # unmapped since its page was looked at
            return
        base, end = mapping.va, mapping.va + mapping.size
        for before, after in ((NEAR_BEFORE, NEAR_AFTER), (SEARCH_BYTES, SEARCH_BYTES)):
            lo = max(base, base + (va - before - base) // ptxsection.ALIGN * ptxsection.ALIGN)
            held = self._vm.look(lo, min(end, va + after) - lo)
            for offset, section in ptxsection.find(memoryview(held), entry=va):
                yield lo + offset, section


class Modules:
    """PTX modules by their text, most recently used last."""

    def __init__(self) -> None:
        self._kernels: OrderedDict[tuple[str, str], LoadedKernel] = OrderedDict()
        self._lock = threading.Lock()

    def kernel(self, section: ptxsection.PtxSection) -> LoadedKernel:
        """The section's kernel, loaded on first sight. PtxError for text that the engine cannot run."""
        key = (section.name, section.ptx)
        kernel = self._kernels.get(key)
        if kernel is None:
            kernels = load(section.ptx).kernels
            if section.name not in kernels:
                raise IllegalCode(f"the PTX of {section.name} has no entry of that name, only {', '.join(kernels)}")
            kernel = kernels[section.name]
        with self._lock:  # channels load in threads of their own
            self._kernels[key] = kernel
            self._kernels.move_to_end(key)
            if len(self._kernels) > MOST_MODULES:
                self._kernels.popitem(last=False)
        return kernel
