"""The NV device on a real GPU: what the emulated board cannot vouch for.

Run as a program (`python tests/hardware/test_h200.py [case ...]`) where there is no pytest: every case is a process of
its own with a time limit, and prints one line. Under pytest: `pytest -m hardware tests/hardware/test_h200.py`. Needs
tinygrad, numpy and NVIDIA's compilers. With TEGRAD_BOARD set, the same cases run on an emulated board.
"""

import argparse
import sys
import time
from pathlib import Path

from case_record import write_record
from nv_cases import CASES, ROOT, run_case


def main(names: list[str], record: Path | None = None) -> int:
    """Run cases and print a line for each, kept with machine and versions in `record`; the number that failed."""
    failed, cases = 0, []
    for name in names or CASES:
        begin = time.monotonic()
        code, said, wrong = run_case(name)
        seconds = time.monotonic() - begin
        failed += code != 0
        cases.append({"case": name, "passed": code == 0, "seconds": round(seconds, 1), "said": said.splitlines()})
        print(f"{'FAIL' if code else 'pass'}  {name:40s} {seconds:5.1f} s  {said}", flush=True)
        if code:
            print("      " + "\n      ".join(wrong.splitlines()[-12:]), flush=True)
        if record is not None:  # after each: a run that is stopped keeps what it had
            write_record(record, cases)
    print(f"{len(cases) - failed}/{len(cases)} passed", flush=True)
    return failed


try:
    import pytest
except ModuleNotFoundError:
    pass
else:
    has_gpu = Path("/dev/nvidiactl").exists() or Path("/dev/nvgpu").exists()

    @pytest.mark.hardware
    @pytest.mark.skipif(not has_gpu, reason="no NVIDIA GPU here")
    @pytest.mark.parametrize("name", CASES)
    def test_on_hardware(name: str) -> None:
        """Each case passes in its own process."""
        code, said, wrong = run_case(name)
        assert code == 0, f"{said}\n{wrong[-3000:]}"


if __name__ == "__main__":
    listed = "cases:\n  " + "\n  ".join(CASES)
    arguments = argparse.ArgumentParser(
        description=__doc__, epilog=listed, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    arguments.add_argument("case", nargs="*", help="cases to run; all of them if left out")
    arguments.add_argument("--record", type=Path, help="keep the outcome as JSON here")
    options = arguments.parse_args()
    if unknown := [name for name in options.case if name not in CASES]:
        arguments.error(f"there is no case {', '.join(unknown)}; --help lists them")
    sys.path.insert(0, str(ROOT))
    sys.exit(1 if main(options.case, options.record) else 0)
