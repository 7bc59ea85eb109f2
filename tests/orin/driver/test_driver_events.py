"""Every event that the GPU can raise has its lines and its notifier."""

from __future__ import annotations

import dataclasses
import inspect

import pytest

from tegrad.hw.faults import NotifierCode, PbdmaIntr0, PbdmaIntr1
from tegrad.orin import events, recovery
from tegrad.orin.klog import KernelLog

FATAL = [
    cls
    for _, cls in inspect.getmembers(events, inspect.isclass)
    if issubclass(cls, events.FatalEvent) and cls is not events.FatalEvent
]


def example(cls: type[events.FatalEvent], **fields: int) -> events.FatalEvent:
    values = {f.name: fields.get(f.name, 1) for f in dataclasses.fields(cls) if f.type in ("int", int)}
    return cls(**values)


@pytest.mark.parametrize("cls", FATAL)
def test_a_fatal_event_has_a_code_and_lines(cls: type[events.FatalEvent]) -> None:
    log = KernelLog()
    assert recovery.FATAL[cls](log, example(cls), None) in list(NotifierCode)
    lines = log.since(0)
    assert lines
    assert all(entry.text.startswith("nvgpu: 17000000.gpu ") for entry in lines)


PBDMA = [
    (PbdmaIntr0.GPFIFO, None, "PBDMA intr gpfifo Error"),
    (PbdmaIntr0.SEMAPHORE, None, "PBDMA intr semaphore Error"),
    (PbdmaIntr0.PBENTRY, NotifierCode.PBDMA_ERROR, "PBDMA intr pbentry Error"),
    (PbdmaIntr0.ACQUIRE, NotifierCode.GR_SEMAPHORE_TIMEOUT, "semaphore acquire timeout!"),
    (PbdmaIntr0.PBCRC, NotifierCode.PBDMA_PUSHBUFFER_CRC_MISMATCH, "PBDMA intr pbcrc Error"),
]


@pytest.mark.parametrize(("bit", "code", "line"), PBDMA)
def test_pbdma_interrupts(bit: PbdmaIntr0, code: NotifierCode | None, line: str) -> None:
    log = KernelLog()
    event = example(events.PbdmaFault, intr_0=1 << bit, intr_1=0)
    assert recovery.pbdma_fault(log, event, None) == code  # type: ignore[arg-type]
    assert any(line in entry.text for entry in log.since(0))


def test_a_method_that_the_class_lacks_has_a_code_of_its_own() -> None:
    log = KernelLog()
    assert recovery.illegal_method(log, example(events.IllegalMethod), None) == NotifierCode.GR_ILLEGAL_NOTIFY  # type: ignore[arg-type]
    assert "illegal method" in log.since(0)[0].text


def test_a_refused_copy_is_a_warning_too() -> None:
    log = KernelLog()
    recovery.ce_error(log, example(events.CeError), None)  # type: ignore[arg-type]
    assert [(entry.level, "[WRN]" in entry.text) for entry in log.since(0)] == [(3, False), (4, True)]


def test_a_context_that_is_not_valid() -> None:
    log = KernelLog()
    event = example(events.PbdmaFault, intr_0=0, intr_1=1 << PbdmaIntr1.CTXNOTVALID)
    assert recovery.pbdma_fault(log, event, None) == NotifierCode.PBDMA_ERROR  # type: ignore[arg-type]
    assert any("ctxnotvalid" in entry.text for entry in log.since(0))


def test_every_event_is_known() -> None:
    known = {
        events.NonStall,
        events.Awaken,
        events.ContextSwitchTimeout,
        events.SyncptIncrement,
        events.Note,
        *recovery.FATAL,
    }
    every = {
        cls
        for _, cls in inspect.getmembers(events, inspect.isclass)
        if issubclass(cls, events.GpuEvent) and cls not in (events.GpuEvent, events.FatalEvent)
    }
    assert every == known
