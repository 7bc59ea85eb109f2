"""Random control flow, run as warps and thread by thread: both must agree.

The interpreter here knows nothing of warps: it runs one thread after the other over the same list of instructions.
"""

import random

import numpy as np
import pytest

from tegrad import ptx
from tests.ptx.forms import HEADER

REGS = 6
MASK = 0xFFFFFFFF
LIMIT = 4000
OPS = {
    "add": lambda a, b: a + b, "sub": lambda a, b: a - b, "mul.lo": lambda a, b: a * b, "xor": lambda a, b: a ^ b,
    "and": lambda a, b: a & b, "min": min, "max": max,
}  # fmt: skip
COMPARE = {"eq": lambda a, b: a == b, "ne": lambda a, b: a != b, "lt": lambda a, b: a < b, "ge": lambda a, b: a >= b}
Line = tuple[str, ...]


class Program:
    """A random program: blocks of arithmetic, if/else, counted loops (uniform or per thread), early exits and gotos."""

    def __init__(self, seed: int) -> None:
        self.rng = random.Random(seed)
        self.lines: list[Line] = []
        self.labels = 0
        self.counters = 0
        self.sequence(3)

    def label(self) -> str:
        self.labels += 1
        return f"L{self.labels}"

    def operand(self) -> str:
        kind = self.rng.random()
        if kind < 0.7:
            return f"%r{self.rng.randrange(REGS)}"
        return str(self.rng.choice([0, 1, 2, 3, 7, 31, self.rng.randrange(1 << 16)]))

    def source(self) -> str:
        kind = self.rng.random()
        return "%i" if kind < 0.15 else "%c" if kind < 0.25 else "%n" if kind < 0.3 else self.operand()

    def arithmetic(self) -> None:
        for _ in range(self.rng.randrange(1, 4)):
            op = self.rng.choice(sorted(OPS))
            kind = self.rng.random()
            target = f"%r{self.rng.randrange(REGS)}"
            if kind < 0.2:
                self.lines.append(("mov", target, self.source()))
            elif kind < 0.4:
                self.condition()
                self.lines.append(("pred", op, target, self.source(), self.operand(), self.rng.choice(["", "!"])))
            elif kind < 0.5:
                self.condition()
                self.lines.append(("selp", target, self.source(), self.operand()))
            else:
                self.lines.append(("op", op, target, self.source(), self.operand()))

    def condition(self) -> None:
        """Set the predicate: of thread, of the CTA, or of data."""
        self.lines.append(("setp", self.rng.choice(sorted(COMPARE)), self.source(), self.operand()))

    def sequence(self, depth: int) -> None:
        for _ in range(self.rng.randrange(1, 4)):
            kind = self.rng.random()
            if depth == 0 or kind < 0.35:
                self.arithmetic()
            elif kind < 0.6:
                self.branch(depth)
            elif kind < 0.85:
                self.loop(depth)
            elif kind < 0.9:
                self.condition()
                self.lines.append(("exit", self.rng.choice(["", "!"])))
            else:
                self.tangle(depth)

    def branch(self, depth: int) -> None:
        other, end = self.label(), self.label()
        self.condition()
        self.lines.append(("cond", other, self.rng.choice(["", "!"])))
        self.sequence(depth - 1)
        if self.rng.random() < 0.6:
            self.lines.append(("bra", end))
            self.lines.append(("label", other))
            self.sequence(depth - 1)
            self.lines.append(("label", end))
        else:
            self.lines.append(("label", other))

    def loop(self, depth: int) -> None:
        """A counted loop whose bound is a constant, the CTA's or the thread's; sometimes left in the middle."""
        k = self.counters
        self.counters += 1
        head, end = self.label(), self.label()
        bound = self.rng.choice(["3", "%c", "%t"])
        self.lines += [("zero", k), ("label", head)]
        self.sequence(depth - 1)
        if self.rng.random() < 0.3:
            self.condition()
            self.lines.append(("cond", end, ""))
            self.sequence(max(0, depth - 2))
        self.lines += [("count", k, bound), ("cond", head, ""), ("label", end)]

    def tangle(self, depth: int) -> None:
        """Three blocks that jump into each other, each at most a few times: not a nest of ifs and loops."""
        names = [self.label() for _ in range(3)]
        end = self.label()
        k = self.counters
        self.counters += 1
        self.lines.append(("zero", k))
        for i, name in enumerate(names):
            self.lines.append(("label", name))
            self.sequence(0)
            self.lines += [("count", k, "4"), ("cond", end, "!")]
            self.condition()
            self.lines.append(("cond", names[self.rng.choice([j for j in range(3) if j != i])], ""))
        self.lines.append(("label", end))

    def ptx(self) -> str:
        out = []
        for line in self.lines:
            kind, *a = line
            out.append({
                "mov": lambda a: f"mov.u32 {a[0]}, {a[1]};",
                "op": lambda a: f"{a[0]}.u32 {a[1]}, {a[2]}, {a[3]};" if a[0] not in ("xor", "and")
                else f"{a[0]}.b32 {a[1]}, {a[2]}, {a[3]};",
                "pred": lambda a: f"@{a[4]}%p {a[0]}.{'b32' if a[0] in ('xor', 'and') else 'u32'} "
                f"{a[1]}, {a[2]}, {a[3]};",
                "selp": lambda a: f"selp.u32 {a[0]}, {a[1]}, {a[2]}, %p;",
                "setp": lambda a: f"setp.{a[0]}.u32 %p, {a[1]}, {a[2]};",
                "cond": lambda a: f"@{a[1]}%p bra {a[0]};",
                "bra": lambda a: f"bra {a[0]};",
                "label": lambda a: f"{a[0]}:",
                "exit": lambda a: f"@{a[0]}%p bra DONE;",
                "zero": lambda a: f"mov.u32 %k{a[0]}, 0;",
                "count": lambda a: f"add.u32 %k{a[0]}, %k{a[0]}, 1; setp.lt.u32 %p, %k{a[0]}, {a[1]};",
            }[kind](a))  # fmt: skip
        start = "".join(f"mov.u32 %r{i}, {i};" for i in range(REGS))
        store = "".join(f"st.global.u32 [%a+{4 * i}], %r{i};" for i in range(REGS))
        return f"""{HEADER}.visible .entry k(.param .u64 p) {{
          .reg .u64 %a; .reg .u32 %i, %c, %n, %t, %w, %r<{REGS}>, %k<{self.counters + 1}>; .reg .pred %p;
          mov.u32 %i, %tid.x; mov.u32 %c, %ctaid.x; mov.u32 %n, %ntid.x; and.b32 %t, %i, 3;
          setp.eq.u32 %p, 0, 0; {start} {" ".join(out)}
          DONE: mad.lo.u32 %w, %c, %n, %i; ld.param.u64 %a, [p]; mad.wide.u32 %a, %w, {4 * REGS}, %a; {store} ret; }}"""

    def thread(self, i: int, c: int, n: int) -> list[int] | None:
        """The registers of one thread at the end; None if it takes too long."""
        regs, counters, p = list(range(REGS)), {}, True
        names = {"%i": i, "%c": c, "%n": n, "%t": i & 3}
        at = {line[1]: pc for pc, line in enumerate(self.lines) if line[0] == "label"}

        def value(text: str) -> int:
            if text in names:
                return names[text]
            return regs[int(text[2:])] if text[0] == "%" else int(text)

        pc = steps = 0
        while pc < len(self.lines):
            steps += 1
            if steps > LIMIT:
                return None
            kind, *a = self.lines[pc]
            pc += 1
            if kind == "mov":
                regs[int(a[0][2:])] = value(a[1])
            elif kind == "op" or (kind == "pred" and p != (a[4] == "!")):
                regs[int(a[1][2:])] = OPS[a[0]](value(a[2]), value(a[3])) & MASK
            elif kind == "selp":
                regs[int(a[0][2:])] = value(a[1]) if p else value(a[2])
            elif kind == "setp":
                p = COMPARE[a[0]](value(a[1]), value(a[2]))
            elif (kind == "cond" and p != (a[1] == "!")) or kind == "bra":
                pc = at[a[0]]
            elif kind == "exit" and p != (a[0] == "!"):
                break
            elif kind == "zero":
                counters[a[0]] = 0
            elif kind == "count":
                counters[a[0]] += 1
                p = counters[a[0]] < value(a[1])
        return regs


@pytest.mark.parametrize("group", range(12))
def test_warps_and_single_threads_agree(group: int) -> None:
    threads, ctas, done = 40, 2, 0
    for seed in range(1000 * group, 1000 * group + 12):
        program = Program(seed)
        want = [program.thread(i, c, threads) for c in range(ctas) for i in range(threads)]
        if any(w is None for w in want) or len(program.lines) > 300:
            continue
        out = np.zeros((threads * ctas, REGS), np.uint32)
        ptx.load(program.ptx(), None).launch((ctas, 1, 1), (threads, 1, 1), [out], threads=1)
        wrong = np.nonzero((out != np.array(want, np.uint32)).any(1))[0]
        assert not len(wrong), (seed, wrong, program.ptx())
        done += 1
    assert done >= 4
