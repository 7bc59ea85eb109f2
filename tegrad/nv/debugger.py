"""What NVIDIA's resource manager (RM) tells of a fault: a channel's error notifier, and a debugger's view of the SMs.

RM writes record 0 of a channel's error memory when it recovers the channel: 50 to 130 ms after the fault on an H200,
whatever exceptions the debugger wants that tinygrad attaches to its compute channel. The debugger's controls wait for
the recovery, and tell SM, program counter and address also after it.

Facts: NVIDIA's open-gpu-kernel-modules (kernel_rc_notification.c, ctrl83dedebug.h), and an H200 (docs/notebook.md).
"""

import ctypes
import functools
from collections.abc import Iterator
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from tinygrad.runtime import ops_nv

from tegrad.hw.faults import (
    GLOBAL_ESR_REPORT_MASK,
    MMU_ACCESS_TEXT,
    MMU_FAULT_TEXT,
    NOTIFIER_ERROR,
    NOTIFIER_FORMAT,
    read_notifier,
)
from tegrad.nv.faults import WARP_ESR_CODE, SmError
from tegrad.nv.kernlog import FaultReport

if TYPE_CHECKING:
    from tegrad.nv.device import NVDevice


NOTIFIER_BYTES = 4096
"""Of a channel's error memory; RM writes a few records of 16 bytes at its start."""


class ErrorNotifier:
    """Record 0 of a channel's error memory, by its address in this process."""

    def __init__(self, address: int) -> None:
        self._record = (ctypes.c_uint8 * NOTIFIER_FORMAT.size).from_address(address)

    def error(self) -> int | None:
        """RM's code once the channel was recovered, else None."""
        found = read_notifier(memoryview(self._record))
        return found.info32 if found.status == NOTIFIER_ERROR else None


class Debugger:
    """The debugger that tinygrad attaches to a device's compute channel. RM's refusals are RuntimeError."""

    def __init__(self, device: "NVDevice") -> None:
        self._device = device

    def stopped(self) -> bool:
        """Whether a kernel of the channel stopped with an exception or an MMU fault. One or two calls of RM."""
        return any(states.mmuFault.valid or _errors(0, states) for _, states in self._states())

    def failed_sms(self) -> list[SmError]:
        """The SMs that report an exception; empty where RM does not answer."""
        with suppress(RuntimeError, OSError):
            return [error for first, states in self._states() for error in _errors(first, states)]
        return []

    def mmu_fault(self) -> FaultReport | None:
        """The first MMU fault that RM keeps of the channel, if there is one."""
        nv = ops_nv.nv_gpu
        with suppress(RuntimeError, OSError):
            if any(states.mmuFault.valid for _, states in self._states()):
                params = nv.NV83DE_CTRL_DEBUG_READ_MMU_FAULT_INFO_PARAMS()
                found = self._control(nv.NV83DE_CTRL_CMD_DEBUG_READ_MMU_FAULT_INFO, params)
                if found.count:
                    return _report(found.mmuFaultInfoList[0])
        return None

    @functools.cached_property
    def _sm_count(self) -> int:
        """SMs that this GPU has; as many as one call reads where RM does not say."""
        return sms_in_order(self._device) or int(ops_nv.nv_gpu.NV83DE_CTRL_DEBUG_MAX_SMS_PER_CALL)

    def _states(self) -> Iterator[tuple[int, Any]]:
        """The states of all SMs: the first SM's number and RM's answer, as many at a time as one call reads."""
        nv = ops_nv.nv_gpu
        portion = nv.NV83DE_CTRL_DEBUG_MAX_SMS_PER_CALL
        for first in range(0, self._sm_count, portion):
            params = nv.NV83DE_CTRL_DEBUG_READ_ALL_SM_ERROR_STATES_PARAMS(
                hTargetChannel=self._device.debug_channel,
                numSMsToRead=min(portion, self._sm_count - first),
                startingSM=first,
            )
            yield first, self._control(nv.NV83DE_CTRL_CMD_DEBUG_READ_ALL_SM_ERROR_STATES, params)

    def _control(self, command: int, params: Any) -> Any:
        return self._device.iface.rm_control(self._device.debugger, command, params)


def sms_in_order(device: "NVDevice") -> int:
    """The SMs that RM lists; 0 where it does not answer."""
    nv = ops_nv.nv_gpu
    with suppress(RuntimeError, OSError):
        params = nv.NV2080_CTRL_GR_GET_GLOBAL_SM_ORDER_PARAMS()
        command = nv.NV2080_CTRL_CMD_GR_GET_GLOBAL_SM_ORDER
        return int(device.iface.rm_control(device.subdevice, command, params).numSm)
    return 0


def _errors(first: int, states: Any) -> list[SmError]:
    """The SMs of one answer that report an exception which stops a kernel."""
    return [
        SmError(first + number, state.hwwGlobalEsr, state.hwwWarpEsr, state.hwwWarpEsrPc64, state.hwwEsrAddr or None)
        for number, state in enumerate(states.smErrorStateArray[: states.numSMsToRead])
        if state.hwwWarpEsr & WARP_ESR_CODE or state.hwwGlobalEsr & GLOBAL_ESR_REPORT_MASK
    ]


def _report(entry: Any) -> FaultReport:
    kind = MMU_FAULT_TEXT.get(entry.faultType, f"fault type {entry.faultType}")
    access = MMU_ACCESS_TEXT.get(entry.accessType, f"access {entry.accessType}")
    return FaultReport((), address=int(entry.faultAddress), reason=f"{access} ({kind})")
