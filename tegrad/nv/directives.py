"""One comment line in a kernel's source that tells loader and launcher what no ELF section holds.

`// tegrad: dynamic_shared=104000 align=16,4,8` stands in CUDA C++ or PTX. `dynamic_shared` is the bytes of
`extern __shared__` memory that every block gets; `align` is, for each pointer parameter in order, the alignment that
the kernel's widest access through it needs.
"""

import re
from dataclasses import dataclass

_LINE = re.compile(r"^// tegrad: (.*)$", re.MULTILINE)


@dataclass(frozen=True, slots=True)
class Directives:
    """What a kernel asks for: bytes of dynamic shared memory, alignment in bytes of each pointer parameter."""

    dynamic_shared: int = 0
    align: tuple[int, ...] = ()

    def __str__(self) -> str:
        words = [f"dynamic_shared={self.dynamic_shared}"] if self.dynamic_shared else []
        if any(a > 1 for a in self.align):
            words.append("align=" + ",".join(map(str, self.align)))
        return f"// tegrad: {' '.join(words)}\n" if words else ""


def parse(source: str) -> Directives:
    """The directives of a source text; the defaults where it has none. ValueError for a malformed line."""
    # A kernel's text with its headers is long, and most have no such line.
    if "// tegrad:" not in source or (line := _LINE.search(source)) is None:
        return Directives()
    fields = dict(word.split("=", 1) for word in line[1].split())
    align = tuple(int(a) for a in fields.pop("align", "").split(",") if a)
    made = Directives(dynamic_shared=int(fields.pop("dynamic_shared", "0")), align=align)
    if fields:
        raise ValueError(f"unknown words in the line {line[0]!r}: {', '.join(fields)}")
    return made
