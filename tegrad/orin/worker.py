"""A channel's engine thread: runs its grids and larger copies one after the other, off the host engine's thread."""

from __future__ import annotations

import threading
from collections.abc import Callable
from queue import SimpleQueue

from tegrad.orin.memory import AddressSpace
from tegrad.orin.race import Race
from tegrad.ptx import AbortFlag

Job = Callable[[], None]

JOIN_SECONDS = 10.0
"""How long an aborted grid may take to end before it is left behind."""


class Worker:
    """Jobs in order, in a thread that starts with the first one.

    With a `race`, jobs that are `unordered` and wait side by side run in any order: launches between which nobody waits
    overlap on hardware.

    `on_fault` is called in the thread when a job raises, `on_done` after every job. Once `stopping` is set, jobs that
    have not begun are dropped; long ones look at it, and grids at `abort`.
    """

    def __init__(
        self,
        name: str,
        vm: AddressSpace,
        on_fault: Callable[[BaseException], None],
        on_done: Callable[[], None],
        race: Race | None = None,
    ) -> None:
        self.abort = AbortFlag()
        self.stopping = False
        self._name = name
        self._vm = vm
        self._on_fault = on_fault
        self._on_done = on_done
        self._race = race
        self._jobs: SimpleQueue[tuple[Job | None, bool]] = SimpleQueue()
        self._held: list[tuple[Job | None, bool]] = []
        self._submitted = 0
        self._done = 0
        self._thread: threading.Thread | None = None

    @property
    def idle(self) -> bool:
        """Nothing runs and nothing waits to run."""
        return self._submitted == self._done

    def submit(self, job: Job, *, unordered: bool = False) -> None:
        """Run `job` after those before it. Called by the host engine only."""
        self._submitted += 1
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name=self._name, daemon=True)
            self._thread.start()
        self._jobs.put((job, unordered))

    def _next(self) -> Job | None:
        if self._race is None:
            return self._jobs.get()[0]
        held = self._held
        if not held:
            held.append(self._jobs.get())
        while not self._jobs.empty():
            held.append(self._jobs.get())
        loose = next((i for i, (_, unordered) in enumerate(held) if not unordered), len(held))
        return held.pop(self._race.pick(max(1, loose)))[0]

    def _run(self) -> None:
        while (job := self._next()) is not None:
            if not self.stopping:
                self._vm.enter()
                try:
                    job()
                except Exception as error:  # a fault, or a defect of ours: either way the channel is dead
                    self._on_fault(error)
                finally:
                    self._vm.leave()
            self._done += 1
            self._on_done()

    def stop(self) -> None:
        """Drop what has not begun and end what runs; returns at once."""
        self.stopping = True
        self.abort.set()

    def close(self) -> None:
        """Drop what has not begun, end what runs, end the thread."""
        self.stop()
        self._jobs.put((None, False))
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join(JOIN_SECONDS)
