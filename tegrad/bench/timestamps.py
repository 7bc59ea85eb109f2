"""When steps begin and end on the GPU: a kernel before each step and one after it note the GPU's clock.

What lies between the end of a step and the begin of the next is when the GPU does nothing for the sequence: the end of
one submission, the other submission's way through the host engine, and the launch of its first kernel.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import mean
from typing import Final, Self

import numpy as np
from numpy.typing import NDArray

from tegrad.llm.state import STATE_SPEC, State, States
from tegrad.nv.compilers import compile_cuda
from tegrad.nv.gpu import Gpu
from tegrad.nv.replay import Launch

SOURCE: Final = """
extern "C" __global__ void timestamp(unsigned long long *to, const volatile unsigned *state, int after) {
    unsigned long long now;
    asm volatile("mov.u64 %0, %globaltimer;" : "=l"(now));
    to[2 * (state[WRITTEN] - after) + after] = now;
}
"""
"""A step before which n tokens were written stores at 2n, and after it, where there is one more, at 2n + 1."""


@dataclass(frozen=True, slots=True)
class Times:
    """Means in microseconds: of a step, and of what lies between one and the next."""

    step: float
    gap: float


class Timestamps:
    """Launches that note the begin and the end of the first `steps` steps of a stream of slot 0. Use it in a `with`."""

    def __init__(self, device: Gpu, states: States, steps: int) -> None:
        self._device, self._states, self._steps = device, states, steps
        macro = f"-DWRITTEN={State.written.offset // 4}"
        image = compile_cuda(SOURCE, device.arch, (macro,))
        self._program = device.load_program(image, "timestamp", buffers=2, values=1)
        self._memory = device.allocate(16 * steps, STATE_SPEC)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._device.release(self._memory, STATE_SPEC)

    def around(self, step: Sequence[Launch]) -> tuple[Launch, ...]:
        """The launches of a step with one in front and one after that take the time."""
        begin, end = (Launch(self._program, (self._memory, self._states.states), values=(at,)) for at in (0, 1))
        return (begin, *step, end)

    def clock(self) -> NDArray[np.int64]:
        """Nanoseconds (steps, 2) of each step's begin and end, once the last one is over."""
        view = self._memory.cpu_view()
        return np.frombuffer(bytes(view[0 : 16 * self._steps]), np.int64).reshape(-1, 2)

    def times(self) -> Times:
        """The means over all steps, of which there are at least two."""
        begins, ends = self.clock().T
        return Times(mean((ends - begins).tolist()) / 1e3, mean((begins[1:] - ends[:-1]).tolist()) / 1e3)
