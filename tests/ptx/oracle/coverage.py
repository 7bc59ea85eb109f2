"""Which instruction forms kernels use that the oracle has no row for: `python -m tests.ptx.oracle.coverage`.

Used are those of tests/data/ptx-forms.json: tinygrad's test suite, and tegrad's own kernels, which `--collect` compiles
anew for every plan of the models of tools/machine_code.py, on Orin and on Hopper.
"""

import itertools
import json
import re
import sys
from collections.abc import Iterable
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

from tests.ptx.oracle.form import Form
from tests.ptx.oracle.record import Record
from tests.ptx.oracle.table import FORMS
from tests.ptx.oracle.table_used import FUNCTIONS

DATA = Path(__file__).parents[2] / "data" / "ptx-forms.json"
OURS = "tegrad"
EXCLUDED = {
    **dict.fromkeys(("ld.param.u64", "ret"), "in every kernel of the oracle"),
    **{f"setmaxnreg.{to}.sync.aligned.u32": "it deals out registers and computes nothing" for to in ("dec", "inc")},
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
    """The opcodes of tegrad's own kernels: every plan of every format and family, on both chips."""
    sys.path.insert(0, str(Path(__file__).parents[3] / "tools"))
    import machine_code  # with the compilers and benches, which only collecting needs

    pairs = itertools.product(machine_code.CHOSEN, machine_code.MODELS)
    with ProcessPoolExecutor() as pool:
        return set().union(*pool.map(_of_model, *zip(*pairs, strict=True)))


def _of_model(chip: str, name: str) -> set[str]:
    from tegrad.bench import models, plans
    from tegrad.hw.chips import CHIPS
    from tegrad.llm.errors import UnsupportedModelError
    from tegrad.nv.cubin import read_ptx

    found: set[str] = set()
    shape, _ = models.parse(name)
    for plan in plans.plans_of(CHIPS[chip].arch):
        try:
            made = plans.launches(plan, shape.config, models.formats(name), plans.DryDevice(CHIPS[chip]), shape.tied)
        except UnsupportedModelError as error:  # floats have no prompts and batches, for instance
            print(f"{chip} {name} {plan}: {error}", file=sys.stderr)
            continue
        for lib in {launch.program.lib for launch in made[1]}:
            section = read_ptx(lib)
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
