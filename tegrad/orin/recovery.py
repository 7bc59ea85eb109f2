"""What the driver makes of the GPU's events: log lines in nvgpu's form, and which code a failed group gets.

The TSG is off the engine already. Some interrupts of the host engine the driver only logs: the TSG hangs, and nothing
tells its client. Upon all else every channel of it that registered a notifier gets the code (the first stays), all
of them become unserviceable, and whoever waits is woken. Source: L4T r36.4.3 nvgpu, common/rc/rc.c, common/fifo/tsg.c.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from tegrad.hw import faults
from tegrad.hw.faults import NotifierCode
from tegrad.orin import events as ev
from tegrad.orin.klog import KernelLog
from tegrad.orin.state import DriverState
from tegrad.orin.tsg import Tsg
from tegrad.uapi import constants as k
from tegrad.uapi.structs import TsgSmErrorStateRecord

NO_REPORTING = "Error reporting is not supported in this platform"
"""Follows every error on a Jetson, which has no safety services to report to: harmless."""

CONTEXT_SWITCH_PERIOD_MS = 100
GR_ENGINE = 0
GPC_STRIDE, TPC_STRIDE = 0x8000, 0x800  # register space of one GPC, of one TPC in it


def mmu_fault(log: KernelLog, event: ev.MmuFault, tsg: Tsg | None) -> NotifierCode:
    """Two `[MMU FAULT]` lines and the summary."""
    client_type = "gpc" if event.client_type == 0 else "hub"
    names = faults.MMU_CLIENTS_GPC if event.client_type == 0 else faults.MMU_CLIENTS_HUB
    kind = faults.MMU_FAULT_TEXT.get(event.fault_type, "xxx")
    log.error(
        "gv11b_fb_mmu_fault_info_dump",
        f"[MMU FAULT] mmu engine id:  {event.engine}, ch id:  {event.chid}, fault addr: {event.address:#x}, "
        f"fault addr aperture: 0, fault type: {kind}, access type: {faults.MMU_ACCESS_TEXT.get(event.access, 'xxx')}",
    )
    log.error(
        "gv11b_fb_mmu_fault_info_dump",
        f"[MMU FAULT] protected mode: 0, client type: {client_type}, client id:  {names.get(event.client, 'TBD')}, "
        f"gpc id if client type is gpc: {event.gpc}",
    )
    log.error(
        "ga10b_report_page_fault",
        f"page fault: err_type={event.fault_type}, address={event.address:#x}, access={event.access}",
    )
    log.error("nvgpu_rc_mmu_fault", f"TSG {event.tsg}: mmu fault")
    return NotifierCode.FIFO_ERROR_MMU_ERR_FLT


def sm_exception(log: KernelLog, event: ev.SmException, tsg: Tsg | None) -> NotifierCode:
    """The SM's registers, kept for READ_SINGLE_SM_ERROR_STATE too."""
    log.error(
        "nvgpu_gr_intr_handle_sm_exception",
        f"sm machine check err. gpc_id({event.gpc}), tpc_id({event.tpc}), "
        f"offset({event.gpc * GPC_STRIDE + event.tpc * TPC_STRIDE})",
    )
    log.error(
        "gr_gv11b_handle_sm_exception",
        f"sm err state: hww_global_esr {event.global_esr:#x}, hww_warp_esr {event.warp_esr:#x}, warp pc {event.pc:#x}",
    )
    log.error("nvgpu_gr_intr_handle_sm_exception", f"sm hww global {event.global_esr:#x} warp {event.warp_esr:#x}")
    log.error("nvgpu_gr_intr_stall_isr", f"GR exception, ch {event.chid}")
    if tsg is not None:
        tsg.sm_errors[event.sm] = TsgSmErrorStateRecord(
            event.global_esr, event.warp_esr, event.pc, faults.GLOBAL_ESR_REPORT_MASK, faults.WARP_ESR_REPORT_MASK
        )
    return NotifierCode.GR_EXCEPTION


def sked_exception(log: KernelLog, event: ev.SkedException, tsg: Tsg | None) -> NotifierCode:
    """One line with the exception register."""
    log.error("gr_gp10b_handle_sked_exception", f"sked exception: esr 0x{event.esr:08x}")
    return NotifierCode.GR_EXCEPTION


def pbdma_fault(log: KernelLog, event: ev.PbdmaFault, tsg: Tsg | None) -> NotifierCode | None:
    """One line per interrupt bit, then the PBDMA's registers. None where the driver leaves it at that."""
    names = faults.bit_names(faults.PbdmaIntr0, event.intr_0)
    registers = f"PBH: {event.header:08x} SHADOW: {event.shadow:08x} M0: {event.method:08x} {event.data:08x}"
    for name in names:
        log.error("ga10b_pbdma_handle_intr_0", f"PBDMA intr {name.lower()} Error")
    if event.intr_0:
        log.error("ga10b_pbdma_handle_intr_0", f"pbdma_intr_0(0):0x{event.intr_0:08x} {registers}")
    for name in faults.bit_names(faults.PbdmaIntr1, event.intr_1):
        log.error("ga10b_pbdma_handle_intr_1", f"{name.lower()} pbdma_intr_1(0):0x{event.intr_1:08x} {registers}")
    acquire = "ACQUIRE" in names
    if acquire:
        log.error("ga10b_pbdma_handle_intr_0", "semaphore acquire timeout!")
    if not event.intr_1 and not any(event.intr_0 >> bit & 1 for bit in faults.PBDMA_INTR_0_RECOVERED):
        return None
    if "PBCRC" in names:
        return NotifierCode.PBDMA_PUSHBUFFER_CRC_MISMATCH
    return NotifierCode.GR_SEMAPHORE_TIMEOUT if acquire else NotifierCode.PBDMA_ERROR


def class_error(log: KernelLog, event: ev.ClassError, tsg: Tsg | None) -> NotifierCode:
    """The method that the class does not take."""
    log.error(
        "nvgpu_gr_intr_handle_class_error",
        f"class error 0x{event.class_id:08x}, offset 0x{event.method:08x}, sub_chan {event.subchannel}, "
        f"data 0x{event.data:08x}, chid 0x{event.chid:08x}",
    )
    return NotifierCode.GR_EXCEPTION


def illegal_method(log: KernelLog, event: ev.IllegalMethod, tsg: Tsg | None) -> NotifierCode:
    """The method that the class does not have."""
    log.error(
        "nvgpu_gr_intr_handle_illegal_method",
        f"illegal method: invalid method class 0x{event.class_id:08x}, offset 0x{event.method:08x} "
        f"sub_chan {event.subchannel}, data 0x{event.data:08x}, chid 0x{event.chid:08x}",
    )
    return NotifierCode.GR_ILLEGAL_NOTIFY


def ce_error(log: KernelLog, event: ev.CeError, tsg: Tsg | None) -> NotifierCode:
    """A refused copy launch; its code has no user mapping, hence a warning and 11."""
    log.error("ga10b_ce_stall_isr", f"ce launch error interrupt, error code {event.code:#x}")
    log.warn("nvgpu_set_err_notifier_locked", f"invalid error_notifier requested {int(NotifierCode.CE_ERROR)}")
    return NotifierCode.CE_ERROR


def tsg_aborted(log: KernelLog, event: ev.TsgAborted, tsg: Tsg | None) -> NotifierCode:
    """A defect of the emulated GPU: like a context that never switches."""
    log.error("ga10b_fifo_ctxsw_timeout_isr", "Host pfifo ctxsw timeout error")
    return NotifierCode.FIFO_ERROR_IDLE_TIMEOUT


FATAL: Mapping[type[ev.FatalEvent], Callable[[Any, Any, Any], NotifierCode | None]] = {
    ev.MmuFault: mmu_fault,
    ev.SmException: sm_exception,
    ev.SkedException: sked_exception,
    ev.PbdmaFault: pbdma_fault,
    ev.ClassError: class_error,
    ev.IllegalMethod: illegal_method,
    ev.CeError: ce_error,
    ev.TsgAborted: tsg_aborted,
}


def handle(driver: DriverState, event: ev.GpuEvent) -> None:
    """Act on one event of the GPU."""
    channel = driver.channels.get(event.chid)
    if isinstance(event, ev.SyncptIncrement):
        driver.syncpoints.advance(event.syncpt)
    elif isinstance(event, ev.NonStall):
        non_stall(driver)
    elif isinstance(event, ev.Awaken):
        if channel is not None and channel.tsg is not None:
            channel.tsg.post(k.NVGPU_IOCTL_CHANNEL_EVENT_ID_GR_SEMAPHORE_WRITE_AWAKEN)
            channel.semaphore_waiters.wake()
    elif isinstance(event, ev.ContextSwitchTimeout):
        context_switch_timeout(driver, driver.tsgs.get(event.tsg))
    elif isinstance(event, ev.Note):
        driver.log.board(event.text)
    elif isinstance(event, ev.FatalEvent):
        tsg = driver.tsgs.get(event.tsg)
        code = FATAL[type(event)](driver.log, event, tsg)
        driver.log.error("nvgpu_cic_mon_report_err_safety_services", NO_REPORTING)
        detail = getattr(event, "detail", "")
        kernel = getattr(event, "kernel", "")
        if detail or kernel:
            driver.log.board(f"{kernel}: {detail}" if kernel else detail)
        if tsg is not None and code is not None:
            tsg.recover(code)


def non_stall(driver: DriverState) -> None:
    """The non-stalling interrupt does not tell its channel: all that are set up look at their semaphores again."""
    for channel in list(driver.channels.values()):
        if channel.running:
            channel.semaphore_waiters.wake()
            if channel.tsg is not None:
                channel.tsg.post(k.NVGPU_IOCTL_CHANNEL_EVENT_ID_BLOCKING_SYNC)


def context_switch_timeout(driver: DriverState, tsg: Tsg | None) -> None:
    """A TSG has kept another from the engine for one more period: it dies when a channel of it was given no more.

    The channels' times are looked at in turn, up to the first whose time is up.
    """
    if tsg is None:
        return
    log = driver.log
    log.error("ga10b_fifo_ctxsw_timeout_isr", "Host pfifo ctxsw timeout error")
    for channel in tsg.channels:
        channel.stuck_ms += CONTEXT_SWITCH_PERIOD_MS
        if channel.stuck_ms > channel.timeout_ms:
            log.error(
                "ga10b_fifo_ctxsw_timeout_isr",
                f"ctxsw timeout error: active engine id ={GR_ENGINE}, tsg={tsg.id}, info: awaiting ack "
                f"ms={channel.stuck_ms}",
            )
            tsg.recover(NotifierCode.FIFO_ERROR_IDLE_TIMEOUT)
            return
