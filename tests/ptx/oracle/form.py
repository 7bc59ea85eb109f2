"""Instruction forms: what the rows of the oracle's tables become."""

import itertools
import re
from collections.abc import Iterator
from dataclasses import dataclass

BYTES = {
    "pred": 4,
    "u8": 4,
    "s8": 4,
    "b8": 4,
    "f16x2": 4,
    "bf16x2": 4,
    "tf32": 4,
    "e4m3x2": 2,
    "e5m2x2": 2,
    "bf16": 2,
    "s8x4": 4,
    "u8x4": 4,
    "s4x8": 4,
    "u4x8": 4,
    "e4m3x4": 4,
    "e5m2x4": 4,
    **{f"{k}{b}": b // 8 for k in "usb" for b in (16, 32, 64)},
    **{f"f{b}": b // 8 for b in (16, 32, 64)},
    **{f"blob{n}": n for n in (2, 4, 8, 16, 32)},
}
"""Bytes of a value in the buffers. 8-bit values travel in 32-bit registers, predicates as 0 or 1; a blob has no
register, only an address."""
PTX_TYPES = frozenset(t for t in BYTES if not t.startswith("blob"))
CASES = {"lane": 128, "warp": 104, "cta": 100, "warpgroup": 100}
"""Cases of a form, by who makes one: a lane, a warp of 32, a block of 128 threads, a block that is one warpgroup."""
THREADS = {"lane": 1, "warp": 32, "cta": 128, "warpgroup": 128}


@dataclass(frozen=True)
class Form:
    """One instruction form.

    `text` is PTX on results %d0.., sources %s0.., their addresses %q0.. and %p0.., the lane's cell of global memory %c,
    the warp's %w, a word for the whole grid %g, the lane's 16 bytes of shared memory %m, and all of it from %sm. `@@`
    makes labels unique. `inputs` are the generators of the sources. `rule` says how results compare; `arch` is the
    least SM version; forms with a `group` share kernels with that group only.
    """

    name: str
    text: str
    results: tuple[str, ...]
    sources: tuple[str, ...]
    inputs: tuple[str, ...]
    section: str
    rule: str
    scope: str = "lane"
    arch: int = 80
    group: str = ""

    @property
    def cases(self) -> int:
        return CASES[self.scope]

    @property
    def threads(self) -> int:
        """Threads over all cases."""
        return self.cases * THREADS[self.scope]


def expand(pattern: str) -> Iterator[str]:
    """`add{.rn,.rz}.f32` to its alternatives."""
    parts = [p[1:-1].split(",") if p.startswith("{") else [p] for p in re.findall(r"\{[^{}]*\}|[^{}]+", pattern)]
    return ("".join(choice) for choice in itertools.product(*parts))


def op_types(op: str) -> list[str]:
    """The types among an opcode's modifiers."""
    return [m for m in op.split(".") if m in PTX_TYPES]


def _type(token: str, types: list[str]) -> str:
    if token == "$":
        return types[-1]
    if token == "$1":
        return types[0]
    if token == "$w":
        return f"{types[-1][0]}{int(types[-1][1:]) * 2}"
    return token


def _default_rule(results: tuple[str, ...]) -> str:
    floats = any(r.startswith(("f", "bf", "tf", "e4", "e5")) for r in results)
    return "nan" if floats else "bits"


def rows(
    section: str,
    patterns: str,
    sources: str,
    results: str = "$",
    *,
    text: str = "",
    extra: str = "",
    rule: str = "",
    scope: str = "lane",
    arch: int = 80,
    tag: str = "",
    group: str = "",
) -> list[Form]:
    """The forms of one table row.

    `patterns` are opcodes with alternatives in braces; in `sources` and `results`, `$` is the opcode's last type, `$1`
    its first, `$w` twice as wide as the last; `type:name` picks an input generator. The text is `op results, sources`
    unless given, where {op} is the opcode and {t} its last type, {n} the bits of that.
    """
    out = []
    for op in (o for p in patterns.split() for o in expand(p)):
        types = op_types(op) or ["b32"]
        split = [s.split(":") for s in sources.split()]
        kinds = tuple(_type(s[0], types) for s in split)
        inputs = tuple(s[1] if len(s) > 1 else kind for s, kind in zip(split, kinds, strict=True))
        made = tuple(_type(r, types) for r in results.split())
        body = text or _plain(op, len(made), len(kinds), extra)
        bits = re.sub(r"\D", "", types[-1]) or "32"
        body = body.replace("{op}", op).replace("{t}", types[-1]).replace("{n}", bits)
        name = op + (f" {tag}" if tag else "") + (f" [{extra.strip(', ')}]" if extra else "")
        out.append(Form(name, body, made, kinds, inputs, section, rule or _default_rule(made), scope, arch, group))
    return out


def _plain(op: str, results: int, sources: int, extra: str) -> str:
    target = "|".join(f"%d{i}" for i in range(results))
    return f"{op} {', '.join([target, *(f'%s{i}' for i in range(sources))])}{extra};"
