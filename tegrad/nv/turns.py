"""A kernel that runs for seconds, with a result that tells whether all of its state survived others' turns.

    python -m tegrad.nv.turns SECONDS

is a process that runs one: it says when it is ready, waits for a line, says that the kernel runs, and tells what came
of it as a line of JSON. `beside` starts it and takes turns on the GPU meanwhile.
"""

from __future__ import annotations

import json
import select
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final

from tegrad.errors import TegradError

M32: Final = 0xFFFFFFFF
MULTIPLIER, INCREMENT, STEPS = 1664525, 1013904223, 256
"""A generator, and its steps in a round."""
CHAIN: Final = f"""__shared__ volatile unsigned s[1024];
    unsigned x = threadIdx.x;
    for (unsigned i = 0; i < n; i++) {{
        for (int j = 0; j < {STEPS}; j++) x = x * {MULTIPLIER}u + {INCREMENT}u;
        s[threadIdx.x] = x;
        __syncthreads();
        x = s[threadIdx.x ^ 1];
        __syncthreads();
    }}
    p[blockIdx.x * blockDim.x + threadIdx.x] = x;"""
"""The body of the kernel, of (unsigned *p, unsigned n): `n` rounds, an even number. State is in registers, in shared
memory and at barriers."""
THREADS: Final = 1024
WAVES: Final = 8
"""Blocks for each SM, one after the other where an SM holds one: what gives way between blocks can. Of 10 s each takes
less than the 3 s after which nvgpu kills who does not."""
PROBE_S: Final = 0.05
"""A kernel of that length tells how many rounds a long one has."""
PROBES: Final = 3
"""Times that each is run; the quickest counts, since a busy machine can make any of them slow."""
MOST_ROUNDS: Final = 0x7FFFFFFE
"""Rounds of a kernel at most."""


class Ended(TegradError, RuntimeError):
    """The process with the long kernel ended before it told what came of it."""


@dataclass(frozen=True, slots=True)
class Turns:
    """What became of others' work beside a long kernel, and of that kernel."""

    waits: list[float]
    """Seconds of each turn of the others that ended before the kernel did, from submission to end."""
    seconds: float
    """Of the long kernel."""
    right: bool
    error: str = ""
    """What ended it; "" where it ended by itself."""


def chained(thread: int, rounds: int) -> int:
    """What a thread comes to after so many rounds, an even number: the generator's steps, composed by squaring."""
    factor, term, a, c, count = 1, 0, MULTIPLIER, INCREMENT, rounds * STEPS
    while count:
        if count & 1:
            factor, term = a * factor & M32, (a * term + c) & M32
        a, c, count = a * a & M32, (a * c + c) & M32, count >> 1
    return (factor * thread + term) & M32


def wanted(blocks: int, rounds: int) -> bytes:
    """What so many blocks leave, little-endian words."""
    return b"".join(chained(thread, rounds).to_bytes(4, "little") for thread in range(THREADS)) * blocks


def rounds_for(seconds: float, run: Callable[[int], float]) -> int:
    """Rounds that take so many seconds, where `run` runs some, waits for them, and says how long they took."""
    rounds = 2
    run(rounds)  # code has been read
    while (took := min(run(rounds) for _ in range(PROBES))) < PROBE_S and rounds < MOST_ROUNDS // 2:
        rounds *= 2
    return max(2, min(MOST_ROUNDS, int(rounds * seconds / took)) // 2 * 2)


def beside(seconds: float) -> Turns:
    """Launch small kernels on this process's device while another process runs a long one. Ended, DeviceFault."""
    from tegrad.nv import probes

    device = probes.device()
    small, waits = probes.load(device, probes.EMPTY, "empty", 1, 0), []
    process = subprocess.Popen(
        [sys.executable, "-m", "tegrad.nv.turns", str(seconds)],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
    )  # fmt: skip
    assert process.stdin is not None
    assert process.stdout is not None
    try:
        with probes.buffer(device, 16) as word:
            small(word, wait=True)
            _expect(process, "ready")
            process.stdin.write("\n")
            process.stdin.flush()
            _expect(process, "running")
            while not select.select([process.stdout], [], [], seconds / 100)[0]:
                start = time.perf_counter()
                small(word, wait=True)
                if not select.select([process.stdout], [], [], 0)[0]:
                    waits.append(time.perf_counter() - start)
        told: dict[str, Any] = json.loads(_line(process))
        return Turns(waits, told["seconds"], told["right"], told["error"])
    finally:
        process.kill()
        process.communicate()


def _line(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    if not (line := process.stdout.readline().strip()):
        raise Ended("the process with the long kernel ended early: what it wrote on stderr says why")
    return line


def _expect(process: subprocess.Popen[str], word: str) -> None:
    if (line := _line(process)) != word:
        raise Ended(f"the process with the long kernel said {line!r}, not {word!r}")


def main(seconds: float) -> None:
    """Be that process."""
    from tegrad.nv import probes

    device = probes.device()
    source = f'extern "C" __global__ void chain(unsigned *p, unsigned n) {{ {CHAIN} }}'
    program, blocks = probes.load(device, source, "chain", 1, 1), WAVES * device.sm_count
    size = 4 * blocks * THREADS
    launch = {"global_size": (blocks, 1, 1), "local_size": (THREADS, 1, 1)}
    with probes.buffer(device, size) as words:
        rounds = rounds_for(seconds, lambda count: program(words, vals=(count,), wait=True, **launch))
        print("ready", flush=True)
        sys.stdin.readline()
        print("running", flush=True)
        start, out, error = time.perf_counter(), bytearray(), ""
        try:
            program(words, vals=(rounds,), **launch)
            device.synchronize()
        except TegradError as found:
            error = str(found)
        took = time.perf_counter() - start
        if not error:
            out = device.download(words, size)
        print(json.dumps({"seconds": took, "right": out == wanted(blocks, rounds), "error": error}), flush=True)


if __name__ == "__main__":
    main(float(sys.argv[1]))
