"""Every ioctl of the drivers tegrad talks to, as data: number, direction, argument, and the fields that matter.

A row says which fields carry file descriptors in or out and which carry user pointers; the same rows serve the client
that calls, the board that answers and the tracer that prints. Request numbers follow from fd kind, number, direction
and struct size, and are tested against tests/data/uapi.json.
Source: L4T r36.4.3 uapi headers; pointer and fd roles from the driver's handlers.
"""

import ctypes
from collections.abc import Mapping
from ctypes import c_int32, c_uint32
from dataclasses import dataclass
from types import MappingProxyType
from typing import Literal

from tegrad.uapi import structs as s

FdKind = Literal["ctrl", "as", "tsg", "channel", "nvmap", "fence"]
Direction = Literal["none", "w", "r", "rw"]
CType = type[ctypes.Structure] | type[ctypes.Union] | type[c_int32] | type[c_uint32]

MAGIC: Mapping[str, str] = MappingProxyType(
    {"ctrl": "G", "as": "A", "tsg": "T", "channel": "H", "nvmap": "N", "fence": "X"}
)
"""The ioctl type letter of each kind of fd."""

LAST_NR: Mapping[str, int] = MappingProxyType({"ctrl": 44, "as": 14, "tsg": 21, "channel": 128, "nvmap": 107})
"""The highest number each driver knows (NVGPU_*_IOCTL_LAST, NVMAP_IOC_MAXNR)."""

MAX_ARG_SIZE: Mapping[str, int] = MappingProxyType({"ctrl": 264, "as": 40, "tsg": 32, "channel": 104})
"""The largest argument each nvgpu driver accepts (NVGPU_*_IOCTL_MAX_ARG_SIZE)."""


@dataclass(frozen=True, slots=True)
class Ioctl:
    """One ioctl. `direction` is from the user's side as in the header: w = the kernel reads, r = it writes back.

    Members of members are named with dots. `sleeps`: it waits for something that may take long, up to a time of its
    caller's.
    """

    name: str
    header: str
    fd_kind: FdKind
    nr: int
    request: int
    direction: Direction
    struct: CType | None
    by_value: bool = False
    fds_in: tuple[str, ...] = ()
    fds_out: tuple[str, ...] = ()
    pointers: tuple[str, ...] = ()
    sleeps: bool = False

    @property
    def size(self) -> int:
        """Bytes of the argument, 0 for none."""
        return 0 if self.struct is None else ctypes.sizeof(self.struct)


def get_field(arg: object, path: str) -> int:
    """The integer at a dotted path inside an argument struct (`value` for a scalar argument)."""
    for part in path.split("."):
        arg = getattr(arg, part)
    assert isinstance(arg, int)
    return arg


def set_field(arg: object, path: str, value: int) -> None:
    """Store an integer at a dotted path inside an argument struct."""
    *outer, last = path.split(".")
    for part in outer:
        arg = getattr(arg, part)
    setattr(arg, last, value)


def request_number(magic: str, nr: int, direction: Direction, size: int) -> int:
    """_IOC of asm-generic/ioctl.h: direction in bits 31:30, size in 29:16, type in 15:8, number in 7:0."""
    return {"none": 0, "w": 1, "r": 2, "rw": 3}[direction] << 30 | size << 16 | ord(magic) << 8 | nr


def request_size(request: int) -> int:
    """The size field of a request number, in bytes."""
    return request >> 16 & 0x3FFF


ROWS: list[Ioctl] = []
"""Every row, in the order of fd kind and number."""


def _row(
    header: str,
    fd_kind: FdKind,
    nr: int,
    direction: Direction,
    struct: CType | None,
    *,
    by_value: bool = False,
    fds_in: tuple[str, ...] = (),
    fds_out: tuple[str, ...] = (),
    pointers: tuple[str, ...] = (),
    sleeps: bool = False,
) -> Ioctl:
    name = header.removeprefix("NVGPU_").replace("IOCTL_", "").replace("IOC_", "")
    size = 0 if struct is None else ctypes.sizeof(struct)
    request = request_number(MAGIC[fd_kind], nr, direction, size)
    row = Ioctl(name, header, fd_kind, nr, request, direction, struct, by_value, fds_in, fds_out, pointers, sleeps)
    ROWS.append(row)
    return row


# ctrl fd
NVGPU_GPU_IOCTL_ZCULL_GET_CTX_SIZE = _row("NVGPU_GPU_IOCTL_ZCULL_GET_CTX_SIZE", "ctrl", 1, "r", s.GpuZcullGetCtxSize)
NVGPU_GPU_IOCTL_ZCULL_GET_INFO = _row("NVGPU_GPU_IOCTL_ZCULL_GET_INFO", "ctrl", 2, "r", s.GpuZcullGetInfo)
NVGPU_GPU_IOCTL_ZBC_SET_TABLE = _row("NVGPU_GPU_IOCTL_ZBC_SET_TABLE", "ctrl", 3, "w", s.GpuZbcSetTable)
NVGPU_GPU_IOCTL_ZBC_QUERY_TABLE = _row("NVGPU_GPU_IOCTL_ZBC_QUERY_TABLE", "ctrl", 4, "rw", s.GpuZbcQueryTable)
NVGPU_GPU_IOCTL_GET_CHARACTERISTICS = _row(
    "NVGPU_GPU_IOCTL_GET_CHARACTERISTICS",
    "ctrl",
    5,
    "rw",
    s.GpuGetCharacteristics,
    pointers=("gpu_characteristics_buf_addr",),
)
NVGPU_GPU_IOCTL_PREPARE_COMPRESSIBLE_READ = _row(
    "NVGPU_GPU_IOCTL_PREPARE_COMPRESSIBLE_READ", "ctrl", 6, "rw", s.GpuPrepareCompressibleRead
)
NVGPU_GPU_IOCTL_MARK_COMPRESSIBLE_WRITE = _row(
    "NVGPU_GPU_IOCTL_MARK_COMPRESSIBLE_WRITE", "ctrl", 7, "rw", s.GpuMarkCompressibleWrite
)
NVGPU_GPU_IOCTL_ALLOC_AS = _row("NVGPU_GPU_IOCTL_ALLOC_AS", "ctrl", 8, "rw", s.AllocAs, fds_out=("as_fd",))
NVGPU_GPU_IOCTL_OPEN_TSG = _row("NVGPU_GPU_IOCTL_OPEN_TSG", "ctrl", 9, "rw", s.GpuOpenTsg, fds_out=("tsg_fd",))
NVGPU_GPU_IOCTL_GET_TPC_MASKS = _row(
    "NVGPU_GPU_IOCTL_GET_TPC_MASKS", "ctrl", 10, "rw", s.GpuGetTpcMasks, pointers=("mask_buf_addr",)
)
NVGPU_GPU_IOCTL_OPEN_CHANNEL = _row(
    "NVGPU_GPU_IOCTL_OPEN_CHANNEL", "ctrl", 11, "rw", s.GpuOpenChannel, fds_out=("channel_fd",)
)
NVGPU_GPU_IOCTL_FLUSH_L2 = _row("NVGPU_GPU_IOCTL_FLUSH_L2", "ctrl", 12, "rw", s.GpuL2Fb)
NVGPU_GPU_IOCTL_SET_MMUDEBUG_MODE = _row("NVGPU_GPU_IOCTL_SET_MMUDEBUG_MODE", "ctrl", 14, "rw", s.GpuMmuDebugMode)
NVGPU_GPU_IOCTL_SET_SM_DEBUG_MODE = _row(
    "NVGPU_GPU_IOCTL_SET_SM_DEBUG_MODE", "ctrl", 15, "rw", s.GpuSmDebugMode, fds_in=("channel_fd",)
)
NVGPU_GPU_IOCTL_WAIT_FOR_PAUSE = _row(
    "NVGPU_GPU_IOCTL_WAIT_FOR_PAUSE", "ctrl", 16, "rw", s.GpuWaitPause, pointers=("pwarpstate",)
)
NVGPU_GPU_IOCTL_GET_TPC_EXCEPTION_EN_STATUS = _row(
    "NVGPU_GPU_IOCTL_GET_TPC_EXCEPTION_EN_STATUS", "ctrl", 17, "rw", s.GpuTpcExceptionEnStatus
)
NVGPU_GPU_IOCTL_NUM_VSMS = _row("NVGPU_GPU_IOCTL_NUM_VSMS", "ctrl", 18, "rw", s.GpuNumVsms)
NVGPU_GPU_IOCTL_VSMS_MAPPING = _row(
    "NVGPU_GPU_IOCTL_VSMS_MAPPING", "ctrl", 19, "rw", s.GpuVsmsMapping, pointers=("vsms_map_buf_addr",)
)
NVGPU_GPU_IOCTL_RESUME_FROM_PAUSE = _row("NVGPU_GPU_IOCTL_RESUME_FROM_PAUSE", "ctrl", 21, "none", None)
NVGPU_GPU_IOCTL_TRIGGER_SUSPEND = _row("NVGPU_GPU_IOCTL_TRIGGER_SUSPEND", "ctrl", 22, "none", None)
NVGPU_GPU_IOCTL_CLEAR_SM_ERRORS = _row("NVGPU_GPU_IOCTL_CLEAR_SM_ERRORS", "ctrl", 23, "none", None)
NVGPU_GPU_IOCTL_GET_CPU_TIME_CORRELATION_INFO = _row(
    "NVGPU_GPU_IOCTL_GET_CPU_TIME_CORRELATION_INFO", "ctrl", 24, "rw", s.GpuGetCpuTimeCorrelationInfo
)
NVGPU_GPU_IOCTL_GET_GPU_TIME = _row("NVGPU_GPU_IOCTL_GET_GPU_TIME", "ctrl", 25, "rw", s.GpuGetGpuTime)
NVGPU_GPU_IOCTL_GET_ENGINE_INFO = _row(
    "NVGPU_GPU_IOCTL_GET_ENGINE_INFO", "ctrl", 26, "rw", s.GpuGetEngineInfo, pointers=("engine_info_buf_addr",)
)
NVGPU_GPU_IOCTL_ALLOC_VIDMEM = _row(
    "NVGPU_GPU_IOCTL_ALLOC_VIDMEM", "ctrl", 27, "rw", s.GpuAllocVidmem, fds_out=("out.dmabuf_fd",)
)
NVGPU_GPU_IOCTL_CLK_GET_RANGE = _row(
    "NVGPU_GPU_IOCTL_CLK_GET_RANGE", "ctrl", 28, "rw", s.GpuClkRange, pointers=("clk_range_entries",)
)
NVGPU_GPU_IOCTL_CLK_GET_VF_POINTS = _row(
    "NVGPU_GPU_IOCTL_CLK_GET_VF_POINTS", "ctrl", 29, "rw", s.GpuClkVfPoints, pointers=("clk_vf_point_entries",)
)
NVGPU_GPU_IOCTL_CLK_GET_INFO = _row(
    "NVGPU_GPU_IOCTL_CLK_GET_INFO", "ctrl", 30, "rw", s.GpuClkGetInfo, pointers=("clk_info_entries",)
)
NVGPU_GPU_IOCTL_CLK_SET_INFO = _row(
    "NVGPU_GPU_IOCTL_CLK_SET_INFO",
    "ctrl",
    31,
    "rw",
    s.GpuClkSetInfo,
    fds_out=("completion_fd",),
    pointers=("clk_info_entries",),
)
NVGPU_GPU_IOCTL_GET_EVENT_FD = _row(
    "NVGPU_GPU_IOCTL_GET_EVENT_FD", "ctrl", 32, "rw", s.GpuGetEventFd, fds_out=("event_fd",)
)
NVGPU_GPU_IOCTL_GET_MEMORY_STATE = _row("NVGPU_GPU_IOCTL_GET_MEMORY_STATE", "ctrl", 33, "rw", s.GpuGetMemoryState)
NVGPU_GPU_IOCTL_GET_VOLTAGE = _row("NVGPU_GPU_IOCTL_GET_VOLTAGE", "ctrl", 34, "rw", s.GpuGetVoltage)
NVGPU_GPU_IOCTL_GET_CURRENT = _row("NVGPU_GPU_IOCTL_GET_CURRENT", "ctrl", 35, "rw", s.GpuGetCurrent)
NVGPU_GPU_IOCTL_GET_POWER = _row("NVGPU_GPU_IOCTL_GET_POWER", "ctrl", 36, "rw", s.GpuGetPower)
NVGPU_GPU_IOCTL_GET_TEMPERATURE = _row("NVGPU_GPU_IOCTL_GET_TEMPERATURE", "ctrl", 37, "rw", s.GpuGetTemperature)
NVGPU_GPU_IOCTL_GET_FBP_L2_MASKS = _row(
    "NVGPU_GPU_IOCTL_GET_FBP_L2_MASKS", "ctrl", 38, "rw", s.GpuGetFbpL2Masks, pointers=("mask_buf_addr",)
)
NVGPU_GPU_IOCTL_SET_THERM_ALERT_LIMIT = _row(
    "NVGPU_GPU_IOCTL_SET_THERM_ALERT_LIMIT", "ctrl", 39, "rw", s.GpuSetThermAlertLimit
)
NVGPU_GPU_IOCTL_SET_DETERMINISTIC_OPTS = _row(
    "NVGPU_GPU_IOCTL_SET_DETERMINISTIC_OPTS", "ctrl", 40, "rw", s.GpuSetDeterministicOpts, pointers=("channels",)
)
NVGPU_GPU_IOCTL_REGISTER_BUFFER = _row(
    "NVGPU_GPU_IOCTL_REGISTER_BUFFER",
    "ctrl",
    41,
    "rw",
    s.GpuRegisterBuffer,
    fds_in=("dmabuf_fd",),
    pointers=("metadata_addr",),
)
NVGPU_GPU_IOCTL_GET_BUFFER_INFO = _row(
    "NVGPU_GPU_IOCTL_GET_BUFFER_INFO",
    "ctrl",
    42,
    "rw",
    s.GpuGetBufferInfo,
    fds_in=("in_.dmabuf_fd",),
    pointers=("in_.metadata_addr",),
)
NVGPU_GPU_IOCTL_GET_GPC_LOCAL_TO_PHYSICAL_MAP = _row(
    "NVGPU_GPU_IOCTL_GET_GPC_LOCAL_TO_PHYSICAL_MAP",
    "ctrl",
    43,
    "rw",
    s.GpuGetGpcPhysicalMap,
    pointers=("physical_gpc_buf_addr",),
)
NVGPU_GPU_IOCTL_GET_GPC_LOCAL_TO_LOGICAL_MAP = _row(
    "NVGPU_GPU_IOCTL_GET_GPC_LOCAL_TO_LOGICAL_MAP",
    "ctrl",
    44,
    "rw",
    s.GpuGetGpcLogicalMap,
    pointers=("logical_gpc_buf_addr",),
)

# address-space fd
NVGPU_AS_IOCTL_BIND_CHANNEL = _row(
    "NVGPU_AS_IOCTL_BIND_CHANNEL", "as", 1, "rw", s.AsBindChannel, fds_in=("channel_fd",)
)
NVGPU32_AS_IOCTL_ALLOC_SPACE = _row("NVGPU32_AS_IOCTL_ALLOC_SPACE", "as", 2, "rw", s.Nvgpu32AsAllocSpace)
NVGPU_AS_IOCTL_FREE_SPACE = _row("NVGPU_AS_IOCTL_FREE_SPACE", "as", 3, "rw", s.AsFreeSpace)
NVGPU_AS_IOCTL_UNMAP_BUFFER = _row("NVGPU_AS_IOCTL_UNMAP_BUFFER", "as", 5, "rw", s.AsUnmapBuffer)
NVGPU_AS_IOCTL_ALLOC_SPACE = _row("NVGPU_AS_IOCTL_ALLOC_SPACE", "as", 6, "rw", s.AsAllocSpace)
NVGPU_AS_IOCTL_MAP_BUFFER_EX = _row(
    "NVGPU_AS_IOCTL_MAP_BUFFER_EX", "as", 7, "rw", s.AsMapBufferEx, fds_in=("dmabuf_fd",)
)
NVGPU_AS_IOCTL_GET_VA_REGIONS = _row(
    "NVGPU_AS_IOCTL_GET_VA_REGIONS", "as", 8, "rw", s.AsGetVaRegions, pointers=("buf_addr",)
)
NVGPU_AS_IOCTL_GET_BUFFER_COMPBITS_INFO = _row(
    "NVGPU_AS_IOCTL_GET_BUFFER_COMPBITS_INFO", "as", 9, "rw", s.AsGetBufferCompbitsInfo
)
NVGPU_AS_IOCTL_MAP_BUFFER_COMPBITS = _row("NVGPU_AS_IOCTL_MAP_BUFFER_COMPBITS", "as", 10, "rw", s.AsMapBufferCompbits)
NVGPU_AS_IOCTL_MAP_BUFFER_BATCH = _row(
    "NVGPU_AS_IOCTL_MAP_BUFFER_BATCH", "as", 11, "rw", s.AsMapBufferBatch, pointers=("unmaps", "maps")
)
NVGPU_AS_IOCTL_GET_SYNC_RO_MAP = _row("NVGPU_AS_IOCTL_GET_SYNC_RO_MAP", "as", 12, "r", s.AsGetSyncRoMap)
NVGPU_AS_IOCTL_MAPPING_MODIFY = _row("NVGPU_AS_IOCTL_MAPPING_MODIFY", "as", 13, "rw", s.AsMappingModify)
NVGPU_AS_IOCTL_REMAP = _row("NVGPU_AS_IOCTL_REMAP", "as", 14, "rw", s.AsRemap, pointers=("ops",))

# TSG fd
NVGPU_TSG_IOCTL_BIND_CHANNEL = _row("NVGPU_TSG_IOCTL_BIND_CHANNEL", "tsg", 1, "w", c_int32, fds_in=("value",))
NVGPU_TSG_IOCTL_UNBIND_CHANNEL = _row("NVGPU_TSG_IOCTL_UNBIND_CHANNEL", "tsg", 2, "w", c_int32, fds_in=("value",))
NVGPU_IOCTL_TSG_ENABLE = _row("NVGPU_IOCTL_TSG_ENABLE", "tsg", 3, "none", None)
NVGPU_IOCTL_TSG_DISABLE = _row("NVGPU_IOCTL_TSG_DISABLE", "tsg", 4, "none", None)
NVGPU_IOCTL_TSG_PREEMPT = _row("NVGPU_IOCTL_TSG_PREEMPT", "tsg", 5, "none", None)
NVGPU_IOCTL_TSG_EVENT_ID_CTRL = _row(
    "NVGPU_IOCTL_TSG_EVENT_ID_CTRL", "tsg", 7, "rw", s.EventIdCtrl, fds_out=("event_fd",)
)
NVGPU_IOCTL_TSG_SET_RUNLIST_INTERLEAVE = _row(
    "NVGPU_IOCTL_TSG_SET_RUNLIST_INTERLEAVE", "tsg", 8, "w", s.RunlistInterleave
)
NVGPU_IOCTL_TSG_SET_TIMESLICE = _row("NVGPU_IOCTL_TSG_SET_TIMESLICE", "tsg", 9, "w", s.Timeslice)
NVGPU_IOCTL_TSG_GET_TIMESLICE = _row("NVGPU_IOCTL_TSG_GET_TIMESLICE", "tsg", 10, "r", s.Timeslice)
NVGPU_TSG_IOCTL_BIND_CHANNEL_EX = _row(
    "NVGPU_TSG_IOCTL_BIND_CHANNEL_EX", "tsg", 11, "rw", s.TsgBindChannelEx, fds_in=("channel_fd",)
)
NVGPU_TSG_IOCTL_READ_SINGLE_SM_ERROR_STATE = _row(
    "NVGPU_TSG_IOCTL_READ_SINGLE_SM_ERROR_STATE", "tsg", 12, "rw", s.TsgReadSingleSmErrorState, pointers=("record_mem",)
)
NVGPU_TSG_IOCTL_SET_L2_MAX_WAYS_EVICT_LAST = _row(
    "NVGPU_TSG_IOCTL_SET_L2_MAX_WAYS_EVICT_LAST", "tsg", 13, "w", s.TsgL2MaxWaysEvictLast
)
NVGPU_TSG_IOCTL_GET_L2_MAX_WAYS_EVICT_LAST = _row(
    "NVGPU_TSG_IOCTL_GET_L2_MAX_WAYS_EVICT_LAST", "tsg", 14, "r", s.TsgL2MaxWaysEvictLast
)
NVGPU_TSG_IOCTL_SET_L2_SECTOR_PROMOTION = _row(
    "NVGPU_TSG_IOCTL_SET_L2_SECTOR_PROMOTION", "tsg", 15, "w", s.TsgSetL2SectorPromotion
)
NVGPU_TSG_IOCTL_BIND_SCHEDULING_DOMAIN = _row(
    "NVGPU_TSG_IOCTL_BIND_SCHEDULING_DOMAIN", "tsg", 16, "w", s.TsgBindSchedulingDomain, fds_in=("domain_fd",)
)
NVGPU_TSG_IOCTL_READ_ALL_SM_ERROR_STATES = _row(
    "NVGPU_TSG_IOCTL_READ_ALL_SM_ERROR_STATES", "tsg", 17, "rw", s.TsgReadAllSmErrorState, pointers=("buffer_mem",)
)
NVGPU_TSG_IOCTL_CREATE_SUBCONTEXT = _row(
    "NVGPU_TSG_IOCTL_CREATE_SUBCONTEXT", "tsg", 18, "rw", s.TsgCreateSubcontext, fds_in=("as_fd",)
)
NVGPU_TSG_IOCTL_DELETE_SUBCONTEXT = _row("NVGPU_TSG_IOCTL_DELETE_SUBCONTEXT", "tsg", 19, "w", s.TsgDeleteSubcontext)
NVGPU_TSG_IOCTL_GET_SHARE_TOKEN = _row("NVGPU_TSG_IOCTL_GET_SHARE_TOKEN", "tsg", 20, "rw", s.TsgGetShareToken)
NVGPU_TSG_IOCTL_REVOKE_SHARE_TOKEN = _row("NVGPU_TSG_IOCTL_REVOKE_SHARE_TOKEN", "tsg", 21, "w", s.TsgRevokeShareToken)

# channel fd
NVGPU_IOCTL_CHANNEL_SET_NVMAP_FD = _row(
    "NVGPU_IOCTL_CHANNEL_SET_NVMAP_FD", "channel", 5, "w", s.SetNvmapFd, fds_in=("fd",)
)
NVGPU_IOCTL_CHANNEL_SET_TIMEOUT = _row("NVGPU_IOCTL_CHANNEL_SET_TIMEOUT", "channel", 11, "w", s.SetTimeout)
NVGPU_IOCTL_CHANNEL_GET_TIMEDOUT = _row("NVGPU_IOCTL_CHANNEL_GET_TIMEDOUT", "channel", 12, "r", s.GetParam)
NVGPU_IOCTL_CHANNEL_SET_TIMEOUT_EX = _row("NVGPU_IOCTL_CHANNEL_SET_TIMEOUT_EX", "channel", 18, "rw", s.SetTimeoutEx)
NVGPU_IOCTL_CHANNEL_WAIT = _row(
    "NVGPU_IOCTL_CHANNEL_WAIT", "channel", 102, "rw", s.Wait, fds_in=("condition.semaphore.dmabuf_fd",), sleeps=True
)
NVGPU_IOCTL_CHANNEL_SUBMIT_GPFIFO = _row(
    "NVGPU_IOCTL_CHANNEL_SUBMIT_GPFIFO", "channel", 107, "rw", s.SubmitGpfifo, pointers=("gpfifo",)
)
NVGPU_IOCTL_CHANNEL_ALLOC_OBJ_CTX = _row("NVGPU_IOCTL_CHANNEL_ALLOC_OBJ_CTX", "channel", 108, "rw", s.AllocObjCtx)
NVGPU_IOCTL_CHANNEL_ZCULL_BIND = _row("NVGPU_IOCTL_CHANNEL_ZCULL_BIND", "channel", 110, "rw", s.ZcullBind)
NVGPU_IOCTL_CHANNEL_SET_ERROR_NOTIFIER = _row(
    "NVGPU_IOCTL_CHANNEL_SET_ERROR_NOTIFIER", "channel", 111, "rw", s.SetErrorNotifier, fds_in=("mem",)
)
NVGPU_IOCTL_CHANNEL_OPEN = _row("NVGPU_IOCTL_CHANNEL_OPEN", "channel", 112, "r", s.ChannelOpen, fds_out=("channel_fd",))
NVGPU_IOCTL_CHANNEL_ENABLE = _row("NVGPU_IOCTL_CHANNEL_ENABLE", "channel", 113, "none", None)
NVGPU_IOCTL_CHANNEL_DISABLE = _row("NVGPU_IOCTL_CHANNEL_DISABLE", "channel", 114, "none", None)
NVGPU_IOCTL_CHANNEL_PREEMPT = _row("NVGPU_IOCTL_CHANNEL_PREEMPT", "channel", 115, "none", None)
NVGPU_IOCTL_CHANNEL_FORCE_RESET = _row("NVGPU_IOCTL_CHANNEL_FORCE_RESET", "channel", 116, "none", None)
NVGPU_IOCTL_CHANNEL_EVENT_ID_CTRL = _row(
    "NVGPU_IOCTL_CHANNEL_EVENT_ID_CTRL", "channel", 117, "rw", s.EventIdCtrl, fds_out=("event_fd",)
)
NVGPU_IOCTL_CHANNEL_WDT = _row("NVGPU_IOCTL_CHANNEL_WDT", "channel", 119, "w", s.ChannelWdt)
NVGPU_IOCTL_CHANNEL_SET_RUNLIST_INTERLEAVE = _row(
    "NVGPU_IOCTL_CHANNEL_SET_RUNLIST_INTERLEAVE", "channel", 120, "w", s.RunlistInterleave
)
NVGPU_IOCTL_CHANNEL_SET_PREEMPTION_MODE = _row(
    "NVGPU_IOCTL_CHANNEL_SET_PREEMPTION_MODE", "channel", 122, "w", s.PreemptionMode
)
NVGPU_IOCTL_CHANNEL_ALLOC_GPFIFO_EX = _row("NVGPU_IOCTL_CHANNEL_ALLOC_GPFIFO_EX", "channel", 123, "w", s.AllocGpfifoEx)
NVGPU_IOCTL_CHANNEL_SET_BOOSTED_CTX = _row("NVGPU_IOCTL_CHANNEL_SET_BOOSTED_CTX", "channel", 124, "w", s.BoostedCtx)
NVGPU_IOCTL_CHANNEL_GET_USER_SYNCPOINT = _row(
    "NVGPU_IOCTL_CHANNEL_GET_USER_SYNCPOINT", "channel", 126, "r", s.GetUserSyncpoint
)
NVGPU_IOCTL_CHANNEL_RESCHEDULE_RUNLIST = _row(
    "NVGPU_IOCTL_CHANNEL_RESCHEDULE_RUNLIST", "channel", 127, "w", s.RescheduleRunlist
)
NVGPU_IOCTL_CHANNEL_SETUP_BIND = _row(
    "NVGPU_IOCTL_CHANNEL_SETUP_BIND",
    "channel",
    128,
    "rw",
    s.ChannelSetupBind,
    fds_in=("userd_dmabuf_fd", "gpfifo_dmabuf_fd"),
)

# /dev/nvmap
NVMAP_IOC_CREATE = _row("NVMAP_IOC_CREATE", "nvmap", 0, "rw", s.CreateHandle)
NVMAP_IOC_CREATE_64 = _row("NVMAP_IOC_CREATE_64", "nvmap", 1, "rw", s.CreateHandle)
NVMAP_IOC_FROM_ID = _row("NVMAP_IOC_FROM_ID", "nvmap", 2, "rw", s.CreateHandle)
NVMAP_IOC_ALLOC = _row("NVMAP_IOC_ALLOC", "nvmap", 3, "w", s.AllocHandle)
NVMAP_IOC_FREE = _row("NVMAP_IOC_FREE", "nvmap", 4, "none", None, by_value=True)
NVMAP_IOC_WRITE = _row("NVMAP_IOC_WRITE", "nvmap", 6, "w", s.RwHandle, pointers=("addr",))
NVMAP_IOC_READ = _row("NVMAP_IOC_READ", "nvmap", 7, "w", s.RwHandle, pointers=("addr",))
NVMAP_IOC_PARAM = _row("NVMAP_IOC_PARAM", "nvmap", 8, "rw", s.HandleParam)
NVMAP_IOC_CACHE = _row("NVMAP_IOC_CACHE", "nvmap", 12, "w", s.CacheOp)
NVMAP_IOC_CACHE_64 = _row("NVMAP_IOC_CACHE_64", "nvmap", 12, "w", s.CacheOp64)
NVMAP_IOC_GET_ID = _row("NVMAP_IOC_GET_ID", "nvmap", 13, "rw", s.CreateHandle)
NVMAP_IOC_GET_FD = _row("NVMAP_IOC_GET_FD", "nvmap", 15, "rw", s.CreateHandle, fds_out=("fd",))
NVMAP_IOC_FROM_FD = _row("NVMAP_IOC_FROM_FD", "nvmap", 16, "rw", s.CreateHandle, fds_in=("fd",))
NVMAP_IOC_CACHE_LIST = _row(
    "NVMAP_IOC_CACHE_LIST", "nvmap", 17, "w", s.CacheOpList, pointers=("handles", "offsets", "sizes")
)
NVMAP_IOC_FROM_IVC_ID = _row("NVMAP_IOC_FROM_IVC_ID", "nvmap", 19, "rw", s.CreateHandle)
NVMAP_IOC_GET_IVC_ID = _row("NVMAP_IOC_GET_IVC_ID", "nvmap", 20, "rw", s.CreateHandle)
NVMAP_IOC_GET_IVM_HEAPS = _row("NVMAP_IOC_GET_IVM_HEAPS", "nvmap", 21, "r", c_uint32)
NVMAP_IOC_FROM_VA = _row("NVMAP_IOC_FROM_VA", "nvmap", 22, "rw", s.CreateHandleFromVa)
NVMAP_IOC_GUP_TEST = _row("NVMAP_IOC_GUP_TEST", "nvmap", 23, "rw", s.GupTest)
NVMAP_IOC_SET_TAG_LABEL = _row("NVMAP_IOC_SET_TAG_LABEL", "nvmap", 24, "w", s.SetTagLabel, pointers=("addr",))
NVMAP_IOC_GET_AVAILABLE_HEAPS = _row("NVMAP_IOC_GET_AVAILABLE_HEAPS", "nvmap", 25, "r", s.AvailableHeaps)
NVMAP_IOC_GET_HEAP_SIZE = _row("NVMAP_IOC_GET_HEAP_SIZE", "nvmap", 26, "r", s.HeapSize)
NVMAP_IOC_PARAMETERS = _row("NVMAP_IOC_PARAMETERS", "nvmap", 27, "r", s.HandleParameters)
NVMAP_IOC_ALLOC_IVM = _row("NVMAP_IOC_ALLOC_IVM", "nvmap", 101, "w", s.AllocIvmHandle)
NVMAP_IOC_VPR_FLOOR_SIZE = _row("NVMAP_IOC_VPR_FLOOR_SIZE", "nvmap", 102, "w", c_uint32)
NVMAP_IOC_GET_SCIIPCID = _row("NVMAP_IOC_GET_SCIIPCID", "nvmap", 103, "r", s.SciipcMap)
NVMAP_IOC_HANDLE_FROM_SCIIPCID = _row("NVMAP_IOC_HANDLE_FROM_SCIIPCID", "nvmap", 104, "r", s.SciipcMap)
NVMAP_IOC_QUERY_HEAP_PARAMS = _row("NVMAP_IOC_QUERY_HEAP_PARAMS", "nvmap", 105, "r", s.QueryHeapParams)
NVMAP_IOC_DUP_HANDLE = _row("NVMAP_IOC_DUP_HANDLE", "nvmap", 106, "rw", s.DuplicateHandle)
NVMAP_IOC_GET_FD_FOR_RANGE_FROM_LIST = _row(
    "NVMAP_IOC_GET_FD_FOR_RANGE_FROM_LIST",
    "nvmap",
    107,
    "r",
    s.FdForRangeFromList,
    fds_out=("fd",),
    pointers=("handles",),
)

# /dev/host1x-fence
HOST1X_IOCTL_CREATE_FENCE = _row(
    "HOST1X_IOCTL_CREATE_FENCE", "fence", 2, "rw", s.Host1xCreateFence, fds_out=("fence_fd",)
)
HOST1X_IOCTL_FENCE_EXTRACT = _row(
    "HOST1X_IOCTL_FENCE_EXTRACT", "fence", 5, "rw", s.Host1xFenceExtract, fds_in=("fence_fd",), pointers=("fences_ptr",)
)
HOST1X_IOCTL_CREATE_POLLFD = _row(
    "HOST1X_IOCTL_CREATE_POLLFD", "fence", 16, "rw", s.Host1xCreatePollfd, fds_out=("fd",)
)
HOST1X_IOCTL_TRIGGER_POLLFD = _row(
    "HOST1X_IOCTL_TRIGGER_POLLFD", "fence", 17, "rw", s.Host1xTriggerPollfd, fds_in=("fd",)
)
BY_REQUEST: Mapping[tuple[str, int], Ioctl] = MappingProxyType({(row.fd_kind, row.request): row for row in ROWS})
"""Rows by (fd kind, full 32-bit request), the way the drivers match a command."""

BY_NAME: Mapping[str, Ioctl] = MappingProxyType({row.name: row for row in ROWS})
"""Rows by short name, such as "AS_MAP_BUFFER_EX"."""
