"""Record what a GPU makes of every form of the PTX oracle.

    python tests/hardware/ptx_oracle.py OUT.xz [family ...]

Each family runs in a process of its own, many forms to a kernel. Forms that the compiler refuses are tried one by one
and recorded as refused; when a launch takes the device down, a new process goes on with the forms of that kernel one by
one. Needs tinygrad, numpy and NVIDIA's compilers; with TEGRAD_BOARD set it runs on an emulated board.
"""

import argparse
import base64
import json
import os
import subprocess
import sys
import tempfile
import time
from collections import deque
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))
ENVIRONMENT = {"DEV": "NV", "HCQDEV_WAIT_TIMEOUT_MS": "10000", "PARALLEL": "0", "CCACHE": "0"}
TASK_LIMIT_S = 120
TOTAL_LIMIT_S = 400


def inside(names: list[str], per_kernel: int) -> None:
    """Run forms in this process; a line of JSON for each on stdout, and one `begin` before each launch."""
    import numpy as np
    from tinygrad import Device, Tensor, dtypes
    from tinygrad.device import TinyELF
    from tinygrad.helpers import Target

    import tegrad  # noqa: F401  (activates)
    from tegrad.errors import TegradError
    from tegrad.nv.compilers import compile_ptx
    from tests.ptx.oracle.kernels import batches
    from tests.ptx.oracle.table import FORMS

    dev: Any = Device["NV"]
    sm = int(dev.arch.removeprefix("sm_"))
    signature = tuple((f"p{i}", i, dtypes.uint8, (1,)) for i in range(3))

    def say(**what: Any) -> None:
        print(json.dumps(what), flush=True)

    def compiled(batch: Any) -> bytes | None:
        try:
            return compile_ptx(batch.text(sm), dev.arch + batch.features, cache=False)
        except TegradError as error:
            if len(batch.forms) == 1:
                say(refused=batch.forms[0].name, why=str(error)[:300])
            return None

    def buffer(values: Any) -> Any:
        return Tensor(values).realize().uop.base.buffer

    def one(batch: Any) -> None:
        lib = compiled(batch)
        if lib is None:
            if len(batch.forms) > 1:
                for small in batches(batch.forms, 1):
                    one(small)
            return
        say(begin=[f.name for f in batch.forms])
        program = dev.runtime(TinyELF(lib, "k", Target("NV", arch=dev.arch), signature))
        source, out = buffer(batch.input()), buffer(np.zeros(max(batch.output_size, 256), np.uint8))
        scratch = buffer(np.zeros(batch.scratch_size, np.uint8))
        program(source._buf, out._buf, scratch._buf, global_size=(batch.grid, 1, 1), local_size=(batch.block, 1, 1))
        dev.synchronize()
        for form, data in batch.results(np.asarray(out.numpy(), dtype=np.uint8)):
            say(form=form.name, data=base64.b64encode(data).decode())

    forms = [FORMS[n] for n in names]
    for form in forms:
        if form.arch > sm:
            say(refused=form.name, why=f"needs sm_{form.arch}, this is sm_{sm}")
    for batch in batches([f for f in forms if f.arch <= sm], per_kernel):
        one(batch)
    say(end=True)


def task(names: list[str], per_kernel: int, limit: float) -> tuple[list[dict[str, Any]], str]:
    """Run forms in a process of their own: its lines, and its errors if it did not reach the end."""
    environment = {**ENVIRONMENT, **os.environ}
    with tempfile.TemporaryFile("w+") as errors, tempfile.TemporaryFile("w+") as lines:
        command = [sys.executable, __file__, "--inside", str(per_kernel)]
        try:
            subprocess.run(
                command,
                env=environment,
                input=json.dumps(names),
                stdout=lines,
                stderr=errors,
                text=True,
                timeout=limit,
                check=False,
            )
            wrong = ""
        except subprocess.TimeoutExpired:
            wrong = f"no end after {limit:.0f} s. "
        lines.seek(0)
        errors.seek(0)
        said = [json.loads(line) for line in lines if line.startswith("{") and line.endswith("}\n")]
        if any("end" in line for line in said):
            return said, ""
        return said, wrong + "".join(errors.read().strip().splitlines()[-1:])  # not the traceback: it names paths


def record(families: dict[str, list[str]], per_kernel: int) -> tuple[dict[str, bytes], dict[str, str]]:
    """Results and refusals of all forms, whatever fails on the way. SystemExit where no form can be run."""
    results: dict[str, bytes] = {}
    refused: dict[str, str] = {}
    begin = time.monotonic()
    tasks = deque((family, names, per_kernel) for family, names in families.items())
    while tasks:
        family, names, size = tasks.popleft()
        left = TOTAL_LIMIT_S - (time.monotonic() - begin)
        if left <= 0:
            refused.update((n, "not run: out of time") for n in names)
            continue
        at = time.monotonic()
        said, wrong = task(names, size, min(TASK_LIMIT_S, left))
        results.update((line["form"], base64.b64decode(line["data"])) for line in said if "form" in line)
        refused.update((line["refused"], line["why"]) for line in said if "refused" in line)
        if not results and not said:
            raise SystemExit(f"no form can be run here: {wrong}")
        rest = [n for n in names if n not in results and n not in refused]
        print(
            f"{family:10s} {len(names) - len(rest):5d} forms, {time.monotonic() - at:5.1f} s {wrong[-300:]}", flush=True
        )
        if not rest:
            continue
        launched = [line["begin"] for line in said if "begin" in line]
        hit = [n for n in (launched[-1] if launched else rest[:1]) if n in rest]
        if len(hit) <= 1:
            refused.update((n, f"failed: {wrong[-300:]}") for n in hit or rest)
        elif hit:
            tasks.appendleft((family, hit, 1))
        if hit and (others := [n for n in rest if n not in hit]):
            tasks.append((family, others, size))
    return results, refused


def main(path: Path, chosen: list[str]) -> int:
    from tegrad.bench.record import machine, now, versions
    from tegrad.nv.toolchain import nvjitlink
    from tests.ptx.oracle.kernels import PER_KERNEL
    from tests.ptx.oracle.record import Record, digests
    from tests.ptx.oracle.table import FAMILIES

    families = {name: [f.name for f in forms] for name, forms in FAMILIES.items() if not chosen or name in chosen}
    results, refused = record(families, PER_KERNEL)
    forms = [f for name in families for f in FAMILIES[name]]
    tools = {**versions(), "nvJitLink": ".".join(map(str, nvjitlink().version))}
    command = f"python tests/hardware/ptx_oracle.py {' '.join([path.name, *chosen])}"
    about = {"date": now(), "machine": machine(), "versions": tools, "command": command}
    Record(about, digests(forms), results, refused).dump(path)
    for name, why in refused.items():
        print(f"refused {name}: {' '.join(why.split())[:200]}")
    print(f"{len(results)} of {len(forms)} forms recorded in {path} ({path.stat().st_size} bytes)")
    return 0 if results else 1


if __name__ == "__main__":
    if sys.argv[1:2] == ["--inside"]:
        inside(json.load(sys.stdin), int(sys.argv[2]))
        sys.exit(0)
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path, metavar="OUT.xz", help="where the record goes")
    parser.add_argument("family", nargs="*", help="only these families of forms")
    options = parser.parse_args()
    sys.exit(main(options.out, options.family))
