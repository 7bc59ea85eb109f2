"""Stage 12: who gets the GPU while a kernel runs for seconds, in each mode of preemption, and whether it survives that.

On a Jetson the long kernel and the short ones belong to two groups of channels with address spaces of their own, which
is what two processes are to the driver. Elsewhere they are two processes, and the mode is the driver's.
"""

from __future__ import annotations

import contextlib
import statistics
import time

from tegrad.conformance.engine import Gpu, Queue
from tegrad.conformance.rig import CTRL, Rig
from tegrad.conformance.rule import NotApplicable
from tegrad.diag.selftest.child import NEEDS
from tegrad.diag.selftest.stage import Notes
from tegrad.hw.faults import NotifierCode
from tegrad.nv.kernel import pick_kernel
from tegrad.nv.turns import THREADS, WAVES, Turns, beside, rounds_for, wanted
from tegrad.uapi import constants as k
from tegrad.uapi.errors import DriverError
from tegrad.uapi.kernel import Kernel

CILP, CTA, UNSET = "CILP", "CTA", "no preemption"
MODES: dict[str, int] = {
    CILP: k.NVGPU_COMPUTE_PREEMPTION_MODE_CILP,
    CTA: k.NVGPU_COMPUTE_PREEMPTION_MODE_CTA,
    UNSET: 0,
}
"""What SET_PREEMPTION_MODE is asked for; 0: nothing, the driver's default. The one that may end badly comes last."""
OTHERS = "two processes"
TURN_S = 1.0
"""Within which others have their turn, where the mode preempts at once. Time slices are milliseconds."""
TRIES = 3
"""Until others have a turn where the mode preempts at once: a busy CPU may submit too late for one."""
KILLED = f"error notifier {int(NotifierCode.FIFO_ERROR_IDLE_TIMEOUT)}"
"""What becomes of a group that does not give way for 3 s (nvgpu, the channel's context-switch timeout)."""
ENDED = {CTA: KILLED, UNSET: KILLED, OTHERS: "error 109"}
"""How a kernel may end that cannot give way: on servers after 4.5 s, as the driver's context-switch timeout (nverror.h,
ROBUST_CHANNEL_CTXSW_TIMEOUT_ERROR) [seen on an H200: its driver sets no mode by itself and waits for a grid's end]."""


def preemption(notes: Notes) -> None:
    """`amount` ms of a kernel in each mode, with others' short kernels beside it."""
    kernel = pick_kernel()
    if kernel.exists(CTRL):
        found, first = _modes(notes, kernel), CILP
    else:
        if lacking := NEEDS["tinygrad"]():
            raise NotApplicable(lacking)
        with notes.step(OTHERS):
            found, first = {OTHERS: beside(notes.amount / 1000)}, OTHERS
        _tell(notes, OTHERS, found[OTHERS])
    with notes.step("the long kernel's result"):
        for name, turns in found.items():
            killed = name in ENDED and ENDED[name] in turns.error
            notes.expect(turns.right or killed, f"the result of the long kernel under {name}", _told(turns))
            if killed and name == OTHERS:
                notes.line(
                    "the driver ends a kernel that runs for seconds while another process waits: keep them short"
                )
    if first != CILP or CILP not in found:
        return
    with notes.step("others' turns"):
        expected = f"a turn for others within {TURN_S:g} s under {first}"
        notes.expect(found[first].waits and max(found[first].waits) < TURN_S, expected, _told(found[first]))


def _modes(notes: Notes, kernel: Kernel) -> dict[str, Turns]:
    """What each mode came to that the driver grants, in the order of the table; Surprise where none can be set."""
    found: dict[str, Turns] = {}
    answers: dict[str, str] = {}
    for name, mode in MODES.items():
        with notes.step(f"a long kernel under {name}"):
            came = _beside(kernel, mode, notes.amount / 1000)
            for _ in range(TRIES - 1 if name == CILP else 0):
                if isinstance(came, str) or came.waits:
                    break
                notes.line(f"{name}: nobody else had a turn: tried again")
                came = _beside(kernel, mode, notes.amount / 1000)
        if isinstance(came, str):
            answers[name] = came
            notes.line(f"{name}: SET_PREEMPTION_MODE was refused with {came}")
        else:
            answers[name] = "granted" if mode else "not asked"
            found[name] = came
            _tell(notes, name, came)
    notes.fact("SET_PREEMPTION_MODE", answers)
    with notes.step("SET_PREEMPTION_MODE"):
        expected = f"{CILP}, or {CTA}, which tegrad falls back to"
        notes.expect(CILP in found or CTA in found, expected, f"CHANNEL_SET_PREEMPTION_MODE: {answers[CILP]}")
        if CILP not in found:
            notes.line(
                f"tegrad falls back to {CTA}: others wait for a kernel's blocks, and may have it ended meanwhile"
            )
    return found


def _beside(kernel: Kernel, mode: int, seconds: float) -> Turns | str:
    """Run both; or why the driver refused the mode."""
    with contextlib.ExitStack() as stack:
        rigs = (Rig(kernel, patience=10 + 4 * seconds, hazardous=False) for _ in range(2))
        long, other = (Gpu(stack.enter_context(rig)) for rig in rigs)
        if not long.launches:
            raise NotApplicable("a ga10b's QMD is no other chip's")
        queue = long.queue(contexts=("compute",))
        try:
            if mode:
                long.rig.call(queue.channel.fd, "CHANNEL_SET_PREEMPTION_MODE", compute_preempt_mode=mode)
        except DriverError as error:
            return error.code
        queue.setup().done()
        return _raced(long, queue, other, seconds)


def _raced(gpu: Gpu, queue: Queue, other: Gpu, seconds: float) -> Turns:
    blocks = WAVES * int(gpu.rig.call(gpu.rig.ctrl, "GPU_NUM_VSMS").num_vsms)
    program, block = gpu.program("chain"), gpu.memory(4 * blocks * THREADS)
    bank = gpu.bank(program, block.va)
    qmd = gpu.qmd(program, bank, grid=(blocks, 1, 1), block=(THREADS, 1, 1))

    def launched(rounds: int) -> Queue:
        gpu.arguments(bank, program, block.va, rounds)
        return queue.launch(qmd)

    def timed(rounds: int) -> float:
        start = time.perf_counter()
        launched(rounds).done()
        return time.perf_counter() - start

    short, word = other.compute(), other.memory()
    small = other.kernel("count", word.va)
    short.launch(small).done()  # its code has been read
    rounds, waits = rounds_for(seconds, timed), []
    start = time.perf_counter()
    launched(rounds).fenced()
    while not gpu.rig.wait(lambda: queue.over or queue.dead, seconds / 100):
        submitted = time.perf_counter()
        short.launch(small).done("others' turn")
        if not (queue.over or queue.dead):
            waits.append(time.perf_counter() - submitted)
    took = time.perf_counter() - start
    right = block.cpu.read(0, 4 * blocks * THREADS) == wanted(blocks, rounds)
    return Turns(waits, took, right, f"error notifier {queue.note.info32}" if queue.dead else "")


def _tell(notes: Notes, name: str, turns: Turns) -> None:
    fact: dict[str, float | int | bool | str] = {"long kernel s": round(turns.seconds, 3)}
    fact |= {"its result holds": turns.right, "turns of others": len(turns.waits)}
    if turns.waits:
        fact["median wait ms"] = round(statistics.median(turns.waits) * 1e3, 3)
        fact["longest wait ms"] = round(max(turns.waits) * 1e3, 3)
    notes.fact(name, fact | ({"ended by": turns.error} if turns.error else {}))
    notes.line(f"{name}: {_told(turns)}")


def _told(turns: Turns) -> str:
    waits = f", the longest wait {max(turns.waits) * 1e3:.1f} ms" if turns.waits else ""
    end = "its result holds" if turns.right else "its result is wrong"
    end = f"it was ended: {turns.error}" if turns.error else end
    return f"{len(turns.waits)} turns of others in {turns.seconds:.2f} s of the kernel{waits}; {end}"
