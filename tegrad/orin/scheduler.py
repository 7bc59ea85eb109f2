"""The host engine: one thread that takes doorbells and gives channels their turns.

It executes methods and semaphores itself and hands grids and copies to the channels' workers, so that nothing it does
takes long. A channel whose acquire is not satisfied waits without holding up the others; it is looked at again whenever
an engine has written memory and, since the CPU may write the semaphore too, at short intervals while it waits.
"""

from __future__ import annotations

import os
import select
import struct
import threading
import time
import traceback
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress

from tegrad.hw.gpfifo import DOORBELL
from tegrad.orin.events import ContextSwitchTimeout, FatalEvent, GpuEvent, TsgAborted
from tegrad.orin.host import EngineObject, HostChannel, Wait
from tegrad.orin.memory import Fault
from tegrad.orin.race import Race
from tegrad.orin.runlist import Patience, Runlist, Tsg

RECORD = struct.Struct("<II")
"""A store to the usermode page, as it comes through the doorbell pipe: offset, value."""

RECHECK_MS, RECHECK_LONG_MS, RECHECK_PATIENCE = 1, 5, 200
"""Interval at which semaphores that the CPU may write are looked at: longer after so many vain looks."""

PREEMPT_SECONDS = 0.1
"""How long the driver waits for a TSG to give way (ctxsw_timeout_period_ms)."""

Binder = Callable[[HostChannel, int, int, int], EngineObject]
"""(channel, subchannel, class, data of SET_OBJECT) -> the object; raises Fault for a class that does not fit."""


class Scheduler:
    """Channels, their turns, their faults. Everything but events happens under one lock, a turn at a time."""

    def __init__(
        self,
        on_event: Callable[[GpuEvent], None],
        doorbell_fd: int,
        bind: Binder,
        groups: Callable[[], Iterable[Tsg]],
        race: Race | None = None,
    ) -> None:
        self.race = race
        self.runlist = Runlist(groups, self._stuck)
        self.bind_object = bind
        self.doorbells = 0
        self._on_event = on_event
        self._doorbell_fd = doorbell_fd
        self._channels: dict[int, HostChannel] = {}
        self._contexts: dict[int, set[int]] = {}
        self._lock = threading.Lock()
        self._callers: set[int] = set()
        self._dirty = False
        self._asleep = False
        self._vain = 0
        self._stopping = False
        self._wake_fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._poll = select.poll()
        self._poll.register(self._wake_fd, select.POLLIN)
        self._poll.register(doorbell_fd, select.POLLIN)
        self._thread = threading.Thread(target=self._run, name="gpu-host", daemon=True)
        self._thread.start()

    # -- from the driver ----------------------------------------------------------------------------------------------

    @contextmanager
    def exclusive(self) -> Iterator[None]:
        """No channel has its turn inside. Callers go before the next turn."""
        me = threading.get_ident()
        self._callers.add(me)
        with self._lock:
            self._callers.discard(me)
            yield
        self.wake()

    def add(self, channel: HostChannel) -> None:
        """Let a channel take part."""
        with self.exclusive():
            channel.tsg.channels[channel.chid] = channel
            self._channels[channel.chid] = channel

    def remove(self, chid: int) -> bool:
        """Stop a channel and forget it; True if its TSG did not give way in time and died. Unknown ids are fine."""
        with self.exclusive():
            self._contexts.pop(chid, None)
            channel = self._channels.pop(chid, None)
            if channel is None:
                return False
        tsg = channel.tsg
        with self._preempted(tsg, 0.0 if channel.dead else PREEMPT_SECONDS, (channel,)) as off:
            channel.worker.close()
            with self.exclusive():
                tsg.channels.pop(chid, None)
                channel.close()
                aborted = not off and not channel.dead
                if aborted:
                    self.kill(tsg)
        return aborted

    def add_context(self, chid: int, class_id: int) -> None:
        """ALLOC_OBJ_CTX: the channel may send engine methods from now on."""
        with self.exclusive():
            self._contexts.setdefault(chid, set()).add(class_id)

    def preempt(self, tsg: Tsg, seconds: float) -> bool:
        """Take the TSG off the engine and let it on again; False if its work does not give way in time."""
        with self._preempted(tsg, seconds, list(tsg.channels.values())) as off:
            return off

    @contextmanager
    def _preempted(self, tsg: Tsg, seconds: float, channels: Iterable[HostChannel]) -> Iterator[bool]:
        """The TSG's grids are off the engine inside; whether the channels' work gave way within `seconds`."""

        def off() -> bool:
            return all(channel.worker.idle or self.runlist.off(channel.worker.abort) for channel in channels)

        self.runlist.hold(tsg)
        try:
            patience = Patience(seconds)
            while not (gone := off()) and not patience.over:
                time.sleep(0.0005)
            yield gone
        finally:
            self.runlist.free(tsg)

    def enable(self, channels: Iterable[HostChannel], on: bool) -> None:
        """Let the host load channels, or load them no more; what runs goes on until its time slice is over."""
        with self.exclusive():
            for channel in channels:
                channel.enabled = on
        self.runlist.kick()

    def channel(self, chid: int) -> HostChannel | None:
        """The channel of this number."""
        return self._channels.get(chid)

    def close(self) -> None:
        """End the thread and every channel."""
        self._stopping = True
        os.eventfd_write(self._wake_fd, 1)
        self._thread.join()
        for channel in self._channels.values():
            channel.worker.stop()
        for chid in list(self._channels):
            self.remove(chid)
        self.runlist.close()
        os.close(self._wake_fd)

    # -- from the engines ---------------------------------------------------------------------------------------------

    def has_context(self, chid: int) -> bool:
        """Whether ALLOC_OBJ_CTX was done on the channel."""
        return chid in self._contexts

    def on_event(self, event: GpuEvent) -> None:
        """Report an event."""
        self._on_event(event)

    def changed(self) -> None:
        """An engine has written memory that others may wait for, or ended a job."""
        self._dirty = True
        if self._asleep:
            self.wake()

    def wake(self) -> None:
        """Make the thread look at its channels."""
        self._dirty = True
        with suppress(OSError):
            os.eventfd_write(self._wake_fd, 1)

    def fault(self, channel: HostChannel, error: BaseException) -> None:
        """A worker's job has failed."""
        with self.exclusive():
            self._stop(channel, error)

    def _stop(self, channel: HostChannel, error: BaseException) -> None:
        """Stop the channel's TSG and report, unless that was done already: the first fault counts."""
        tsg = channel.tsg
        if channel.dead or channel.chid not in tsg.channels:
            return
        self.kill(tsg)
        if isinstance(error, Fault):
            event: FatalEvent = error.event(channel.chid, tsg.id)
        else:
            trace = "".join(traceback.format_exception(error))
            event = TsgAborted(channel.chid, tsg.id, f"defect of the emulated GPU: {trace}")
        self._on_event(event)

    def _stuck(self, tsg: Tsg) -> None:
        """A TSG that should have left the engine is still there."""
        self._on_event(ContextSwitchTimeout(-1, tsg.id))

    def kill(self, tsg: Tsg) -> int:
        """Stop every channel of the group for good, under `exclusive`; how many still lived."""
        living = [channel for channel in tsg.channels.values() if not channel.dead]
        for channel in living:
            channel.dead = True
            channel.worker.stop()
        return len(living)

    # -- the thread ---------------------------------------------------------------------------------------------------

    def _run(self) -> None:
        while not self._stopping:
            self._sleep()
            with self._lock:
                self._dirty = False
                for channel in [c for c in self._channels.values() if self._runnable(c)]:
                    self._turn(channel)
            if self._callers:
                time.sleep(0.0001)

    def _runnable(self, channel: HostChannel) -> bool:
        return not channel.dead and channel.enabled and (channel.state is not Wait.DOORBELL or channel.rung)

    def _turn(self, channel: HostChannel) -> None:
        channel.vm.enter()
        try:
            channel.state = next(channel.run)
        except Exception as error:  # a fault of the channel's, or a defect of ours
            self._stop(channel, error)
        finally:
            channel.vm.leave()

    def _timeout(self) -> int | None:
        blocked = False
        for channel in self._channels.values():
            if self._runnable(channel):
                state = channel.state
                if state is Wait.TURN or state is Wait.DOORBELL:
                    self._dirty = True
                elif state is Wait.MEMORY:
                    blocked = True
        if self._dirty:
            self._vain = 0
            return 0
        if blocked:
            self._vain += 1
            return RECHECK_MS if self._vain < RECHECK_PATIENCE else RECHECK_LONG_MS
        return None

    def _sleep(self) -> None:
        """Wait for doorbells, the end of work, or the time to look at semaphores again; take in the doorbells."""
        self._asleep = True
        with self._lock:
            timeout = self._timeout()
        ready = dict(self._poll.poll(timeout))
        self._asleep = False
        if self._wake_fd in ready:
            with suppress(BlockingIOError):
                os.eventfd_read(self._wake_fd)
        if events := ready.get(self._doorbell_fd):
            if events & select.POLLIN:
                self._ring(os.read(self._doorbell_fd, 65536))
            else:  # the last writer is gone
                self._poll.unregister(self._doorbell_fd)

    def _ring(self, records: bytes) -> None:
        for offset, value in RECORD.iter_unpack(records[: len(records) // RECORD.size * RECORD.size]):
            self.doorbells += 1
            channel = self._channels.get(value & 0xFFF)
            if offset == DOORBELL and channel is not None and channel.token == value:
                channel.rung = True
