"""Which instruction forms kernels use that the oracle has no row for: `python -m tests.ptx.oracle.coverage`.

Used are those of tests/data/ptx-forms.json: tinygrad's test suite, and tegrad's own kernels, which `--collect` compiles
anew for every plan and format, on Orin and on Hopper.
"""

import itertools
import json
import re
import sys
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path

from tests.ptx.oracle.form import Form
from tests.ptx.oracle.record import Record
from tests.ptx.oracle.table import FORMS
from tests.ptx.oracle.table_used import FUNCTIONS

DATA = Path(__file__).parents[2] / "data" / "ptx-forms.json"
OURS = "tegrad"
EXCLUDED = {
    **dict.fromkeys(("ld.param.u64", "ret"), "in every kernel of the oracle"),
    **{f"{op}.approx.f64": "no assembler takes it" for op in ("ex2", "lg2", "rcp", "sin", "sqrt")},
}
"""Forms without a row, and why."""
_OPCODE = r"[a-z]\w*(?:(?:\.|::)\w+)*"
_STATEMENT = re.compile(rf"\s*(?:\$?[\w$]+:\s*)*(?:@!?%\w+\s+)?({_OPCODE})(?=\s|$)")


def opcodes(ptx: str) -> set[str]:
    """The opcodes of PTX text, with all their modifiers."""
    text = re.sub(r"//[^\n]*", "", ptx)
    text = re.sub(r"\.(?:visible |weak )?(?:entry|func)[^{;]*", "", text)
    text = re.sub(r"=\s*\{[^}]*\}", "", text)
    return {match[1] for part in re.split(r"[;{}]", text) if (match := _STATEMENT.match(part))}


def opcodes_of(forms: Iterable[Form]) -> set[str]:
    """Opcodes that rows of the table are of, or that their texts have."""
    forms = list(forms)
    texts = " ".join([form.text for form in forms] + [FUNCTIONS] * any(form.group == "functions" for form in forms))
    return {form.name.split(" ")[0] for form in forms} | set(re.findall(rf"(?<![\w.%$@]){_OPCODE}", texts))


def without_a_row(used: Iterable[str]) -> list[str]:
    """Of the used opcodes, those that the table lacks."""
    return sorted(set(used) - opcodes_of(FORMS.values()) - set(EXCLUDED))


def unrecorded(used: Iterable[str]) -> list[str]:
    """Of the used opcodes, those that nothing holds against silicon."""
    record = Record.load()
    return sorted(set(used) - opcodes_of(FORMS[name] for name in record.results) - set(EXCLUDED))


def used() -> set[str]:
    """All opcodes of the data."""
    data = json.loads(DATA.read_text())
    return {op for user in ("PTXRenderer", "CUDARenderer_NVRTC", OURS) for op in data[user]["instructions"]}


def collect() -> set[str]:
    """The opcodes of tegrad's own kernels: every plan of every format, on both chips."""
    from tegrad.bench import plans
    from tegrad.bench.models import SHAPES
    from tegrad.bench.plans import DryDevice, DryProgram
    from tegrad.hw.chips import CHIPS
    from tegrad.llm.formats import BF16, F16, PACKED, Q4_K, Q8_0
    from tegrad.nv.cubin import read_ptx

    found: set[str] = set()
    kinds = [("1b", kind) for kind in (*PACKED, F16, BF16)] + [("8b", Q4_K), ("qwen3-0.6b", Q8_0)]
    for chip, (shape, kind) in itertools.product((CHIPS["agx-orin-64gb"], CHIPS["gh100"]), kinds):
        config = replace(SHAPES[shape].config, layers=2, vocab=4096)
        for plan in plans.plans_of(chip.arch, kind):
            for launch in plans.launches(plan, config, kind, DryDevice(chip))[1]:
                assert isinstance(launch.program, DryProgram)
                section = read_ptx(launch.program.lib)
                found |= opcodes(section.ptx) if section else set()
    return found


def main(arguments: list[str]) -> int:
    """Count, or collect; a line of JSON."""
    if arguments == ["--collect"]:
        data = json.loads(DATA.read_text())
        data[OURS] = {"instructions": sorted(collect())}
        DATA.write_text(json.dumps(data, indent=1) + "\n")
    print(json.dumps({"used": len(used()), "without a row": without_a_row(used()), "unrecorded": unrecorded(used())}))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
