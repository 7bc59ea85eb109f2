"""Many forms in one kernel: each reads its sources, executes its text and writes its results, for every thread.

The kernel takes three pointers: inputs, outputs (zeros before) and scratch memory (zeros before). Lanes of a form lie
in order; each source and each result is one array.
"""

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np

from tests.ptx.oracle.form import BYTES, Form
from tests.ptx.oracle.inputs import arrays
from tests.ptx.oracle.table_used import FUNCTIONS

PER_KERNEL = 40
ALIGN = 256
CELL = 64
SHARED = {"lane": 1024, "warp": 1024, "cta": 2048, "warpgroup": 10240}
SHARED_ALIGN = {"warpgroup": 1024}
BLOCK = {"lane": 32, "warp": 32, "cta": 128, "warpgroup": 128}
REGISTERS = {2: "b16", 4: "b32", 8: "b64"}
SYMBOLS = (
    ".const .align 16 .b8 cdata[256] = {" + ", ".join(str((i * 37 + 11) & 255) for i in range(256)) + "};\n"
    ".global .align 16 .b8 gdata[256] = {" + ", ".join(str((i * 101 + 7) & 255) for i in range(256)) + "};\n"
)


def digest(form: Form) -> str:
    """What decides a form's results: its text, types and inputs."""
    h = hashlib.sha256(repr((form.name, form.text, form.results, form.sources, form.scope)).encode())
    for a in arrays(form):
        h.update(a.tobytes())
    return h.hexdigest()[:16]


@dataclass
class Batch:
    """Forms of one scope and their places in the buffers (offsets in bytes)."""

    forms: list[Form]
    inputs: list[list[int]] = field(default_factory=list)
    outputs: list[list[int]] = field(default_factory=list)
    input_size: int = 0
    output_size: int = 0

    def __post_init__(self) -> None:
        for f in self.forms:
            self.inputs.append([self._take("input_size", BYTES[t] * f.threads) for t in f.sources])
            self.outputs.append([self._take("output_size", BYTES[t] * f.threads) for t in f.results])

    def _take(self, which: str, size: int) -> int:
        at: int = getattr(self, which)
        setattr(self, which, -(-(at + size) // ALIGN) * ALIGN)
        return at

    @property
    def scope(self) -> str:
        return self.forms[0].scope

    @property
    def features(self) -> str:
        """What the name of the SM version ends in: "a" for instructions of this version alone."""
        return "a" if self.forms[0].group.endswith("a") else ""

    @property
    def threads(self) -> int:
        return self.forms[0].threads

    @property
    def block(self) -> int:
        return BLOCK[self.scope]

    @property
    def grid(self) -> int:
        return self.threads // self.block

    @property
    def scratch_size(self) -> int:
        return (self.threads + (self.grid + 1) * len(self.forms)) * CELL

    def input(self) -> np.ndarray:
        """The bytes of all sources."""
        out = np.zeros(max(self.input_size, ALIGN), np.uint8)
        for f, places in zip(self.forms, self.inputs, strict=True):
            for at, a in zip(places, arrays(f), strict=True):
                out[at : at + a.size] = a
        return out

    def results(self, output: np.ndarray) -> Iterator[tuple[Form, bytes]]:
        """Each form with the bytes of its results, one after the other."""
        for f, places in zip(self.forms, self.outputs, strict=True):
            yield (
                f,
                b"".join(
                    output[at : at + BYTES[t] * f.threads].tobytes() for at, t in zip(places, f.results, strict=True)
                ),
            )

    def text(self, sm: int) -> str:
        """The kernel `k` as PTX for an SM version."""
        body = "\n".join(self._one(i, f) for i, f in enumerate(self.forms))
        sizes = {BYTES[t] for f in self.forms for t in (*f.sources, *f.results)}
        bases = "".join(
            f"mul.wide.u32 %in{s}, %gth, {s}; add.u64 %out{s}, %in{s}, %out; add.u64 %in{s}, %in{s}, %in;\n"
            for s in sorted(sizes)
        )
        regs = "".join(f".reg .b64 %in{s}, %out{s};" for s in sorted(sizes))
        symbols = {"symbols": SYMBOLS, "functions": FUNCTIONS + "\n"}.get(self.forms[0].group, "")
        stop = "bar.sync 0;" if self.scope == "cta" else ""
        shared = SHARED[self.scope]
        return f""".version 8.5
.target sm_{sm}{self.features}
.address_size 64
{symbols}.visible .entry k(.param .u64 p0, .param .u64 p1, .param .u64 p2)
{{
.reg .b64 %in, %out, %scratch, %c, %w0, %g0; .reg .b32 %gth, %th, %cta, %sm, %m; {regs}
.shared .align {SHARED_ALIGN.get(self.scope, 16)} .b8 sm[{shared}];
ld.param.u64 %in, [p0]; ld.param.u64 %out, [p1]; ld.param.u64 %scratch, [p2];
mov.u32 %th, %tid.x; mov.u32 %cta, %ctaid.x; mad.lo.u32 %gth, %cta, {self.block}, %th;
mov.u32 %sm, sm; mad.lo.u32 %m, %th, 16, %sm;
mul.wide.u32 %c, %gth, {CELL}; add.u64 %c, %c, %scratch;
mul.wide.u32 %w0, %cta, {CELL}; add.u64 %w0, %w0, %scratch; add.u64 %w0, %w0, {self.threads * CELL};
add.u64 %g0, %scratch, {(self.threads + self.grid * len(self.forms)) * CELL};
{bases}{body}
{stop}ret;
}}
"""

    def _one(self, index: int, f: Form) -> str:
        before, after = [], []
        for i, (t, at) in enumerate(zip(f.sources, self.inputs[index], strict=True)):
            size = BYTES[t]
            if f"%p{i}" in f.text:
                before.append(f".reg .b64 %p{i}; add.u64 %p{i}, %in{size}, {at};")
            if t == "pred":
                before.append(
                    f".reg .pred %s{i}; .reg .b32 %si{i};"
                    f" ld.global.b32 %si{i}, [%in4+{at}]; setp.ne.u32 %s{i}, %si{i}, 0;"
                )
            elif not t.startswith("blob"):
                before.append(f".reg .{REGISTERS[size]} %s{i}; ld.global.{REGISTERS[size]} %s{i}, [%in{size}+{at}];")
        for i, (t, at) in enumerate(zip(f.results, self.outputs[index], strict=True)):
            size = BYTES[t]
            if t.startswith("blob"):
                before.append(f".reg .b64 %q{i}; add.u64 %q{i}, %out{size}, {at};")
            elif t == "pred":
                before.append(f".reg .pred %d{i}; .reg .b32 %di{i};")
                after.append(f"selp.b32 %di{i}, 1, 0, %d{i}; st.global.b32 [%out4+{at}], %di{i};")
            else:
                before.append(f".reg .{REGISTERS[size]} %d{i};")
                after.append(f"st.global.{REGISTERS[size]} [%out{size}+{at}], %d{i};")
        if "%w" in f.text:
            before.append(f".reg .b64 %w; add.u64 %w, %w0, {index * self.grid * CELL};")
        if "%g]" in f.text:
            before.append(f".reg .b64 %g; add.u64 %g, %g0, {index * CELL};")
        text = f.text.replace("@@", f"$L{index}")
        return "{ " + " ".join(before) + "\n" + text + "\n" + " ".join(after) + " }"


def batches(forms: list[Form], per_kernel: int = PER_KERNEL) -> list[Batch]:
    """Forms of one scope and group, `per_kernel` at a time."""
    groups: dict[tuple[str, str], list[Form]] = {}
    for f in forms:
        groups.setdefault((f.scope, f.group), []).append(f)
    return [Batch(g[i : i + per_kernel]) for g in groups.values() for i in range(0, len(g), per_kernel)]
