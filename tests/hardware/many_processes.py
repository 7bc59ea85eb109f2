"""Do submissions get lost when many processes share a GPU? `python tests/hardware/many_processes.py [--json FILE]`

Starts many short-lived processes that launch, copy and read back, in two arms that take turns: as it is, and without
the read of GPPut and the doorbell after it. Says for each arm how many rounds were done and how many submissions
never ran.
"""

import argparse
import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

ARMS = {"as it is": "", "without the read of GPPut": "--no-read"}


def rounds(seconds: float, read: bool) -> dict[str, Any]:
    """One process: rounds until the time is over or a submission does not end; what the channels looked like then."""
    import numpy as np
    from tinygrad import Device, Tensor

    from tegrad.hw.gpfifo import DOORBELL
    from tegrad.nv.faults import WaitTimeout

    device = Device["NV"]
    fifos = [device.compute_gpfifo, device.dma_gpfifo]
    for fifo in fifos:
        fifo._behind_pcie = fifo._behind_pcie and read
    source = Tensor(np.arange(300, dtype=np.float32)).realize()
    end, done = time.monotonic() + seconds, 0
    while time.monotonic() < end:
        try:
            result = (source * 2 + done % 7).numpy()
        except WaitTimeout as timeout:
            before = [fifo.submissions - fifo.done for fifo in fifos]
            for fifo in fifos:
                device.gpu_mmio[DOORBELL // 4] = fifo.token
            time.sleep(1)
            after = [fifo.submissions - fifo.done for fifo in fifos]
            return {"rounds": done, "lost": str(timeout), "missing": before, "missing_after_second_doorbell": after}
        assert result[1] == 2 + done % 7
        done += 1
    return {"rounds": done}


def arm(processes: int, seconds: float, option: str) -> list[dict[str, Any]]:
    """Many processes at once; what each has to say."""
    command = [sys.executable, __file__, "--child", "--seconds", str(seconds), *([option] if option else [])]
    environment = {**os.environ, "DEV": "NV", "HCQDEV_WAIT_TIMEOUT_MS": "4000", "PARALLEL": "0"}
    running = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment) for _ in range(processes)]
    return [json.loads(process.communicate(timeout=seconds + 90)[0].strip().splitlines()[-1]) for process in running]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--processes", type=int, default=24)
    parser.add_argument("--seconds", type=float, default=1.0)
    parser.add_argument("--turns", type=int, default=8)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--child", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--no-read", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child:
        print(json.dumps(rounds(options.seconds, not options.no_read)), flush=True)
        os._exit(0)  # a channel that stands still would hold up a tidy exit
    found: dict[str, list[dict[str, Any]]] = {name: [] for name in ARMS}
    for _ in range(options.turns):
        for name, option in ARMS.items():
            found[name] += arm(options.processes, options.seconds, option)
    lost = {name: [answer for answer in answers if "lost" in answer] for name, answers in found.items()}
    for name, answers in found.items():
        print(f"{name}: {sum(a['rounds'] for a in answers):,} rounds, {len(lost[name])} submissions lost")
    if options.json:
        options.json.write_text(json.dumps(found, indent=1))
    return 1 if lost["as it is"] else 0


if __name__ == "__main__":
    sys.exit(main())
