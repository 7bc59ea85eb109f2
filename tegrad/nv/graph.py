"""tinygrad's HCQGraph, one thread at a time, with a look at what is put in for its inputs.

It runs what `jit` does not record: kernels with sizes that change, copies, and everything while each kernel is told of.
"""

import weakref
from contextlib import ExitStack, suppress
from typing import Any, Final

from tinygrad.engine.realize import get_call_arg_uops
from tinygrad.helpers import PROFILE
from tinygrad.runtime.graph.hcq import HCQGraph
from tinygrad.uop.ops import Ops, UOp

from tegrad.nv import compat, roles
from tegrad.nv.faults import DeviceClosed, DeviceFault, WaitTimeout
from tegrad.nv.program import check_alignment
from tegrad.nv.spec import allocating

open_graphs: Final[weakref.WeakSet[Any]] = weakref.WeakSet()
"""Those that may have a run to tell of, while tinygrad reports each kernel."""


class NVGraph(HCQGraph):  # type: ignore[misc]
    """A recording of launches that is replayed with other inputs.

    LaunchError, before anything is submitted, when an input's address breaks the alignment that a kernel needs.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        with allocating(roles.ARGUMENTS):
            super().__init__(*args, **kwargs)
        if PROFILE.value:
            open_graphs.add(self)
        self._aligned = [
            (self.calls[j][0], index, position, runtime)
            for j, (replaced, runtime) in enumerate(zip(self.uop_replace, self.runtimes, strict=True))
            for position, index in replaced
            if position < len(getattr(runtime, "align", ())) and runtime.align[position] > 1
        ]

    def __call__(self, input_uops: tuple[Any, ...], var_vals: dict[str, int], wait: bool = False) -> float | None:
        for device_index, index, position, runtime in self._aligned:
            given = input_uops[index].buffer
            buffer = given.bufs[device_index] if hasattr(given, "bufs") else given
            check_alignment(runtime, position, compat.memory_of(buffer).va_addr)
        with ExitStack() as locks:
            for device in self.devices:
                if hasattr(device, "lock"):
                    locks.enter_context(device.lock)
            seconds: float | None = super().__call__(input_uops, var_vals, wait)
        return seconds

    def collect(self) -> None:
        """Tell of the last run, while tinygrad reports each kernel."""
        if self.kickoff_value >= 1:
            for device in self.devices:
                device.synchronize()
            self.collect_timestamps()

    @staticmethod
    def supports_uop(batch_devs: list[Any], new_call: UOp) -> bool:
        """Whether a graph may hold a call: none with a part of an input, for there it stays what it first was."""
        parts = any(
            argument.op is not Ops.PARAM and any(uop.op is Ops.PARAM for uop in argument.toposort())
            for argument in get_call_arg_uops(new_call)
        )
        return not parts and bool(HCQGraph.supports_uop(batch_devs, new_call))

    def __del__(self) -> None:
        """Wait for what was replayed and give the memory back; a device that failed or was closed has none left."""
        with suppress(DeviceFault, DeviceClosed, WaitTimeout):
            super().__del__()
