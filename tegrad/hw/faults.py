"""Names and numbers of everything that goes wrong: notifier, MMU faults, SM and SKED exceptions, PBDMA interrupts.

Sources: L4T r36.4.3 nvgpu (linux-channel.c, mmu_fault_ga10b_fusa.c, fb_mmu_fault_gv11b_fusa.c, hw_gr_ga10b.h,
hw_pbdma_ga10b.h), tested against tests/data/ga10b-hw.json; SKED bits from the GA100 manual (open-gpu-doc, same family).
"""

import struct
from collections.abc import Mapping
from enum import IntEnum
from types import MappingProxyType
from typing import NamedTuple


class NotifierCode(IntEnum):
    """info32 of an error notifier. 13 also stands for GR_ERROR_SW_NOTIFY, 12 for an internal INVAL."""

    FIFO_ERROR_IDLE_TIMEOUT = 8
    CE_ERROR = 11
    GR_ERROR_SW_METHOD = 12
    GR_EXCEPTION = 13
    GR_SEMAPHORE_TIMEOUT = 24
    GR_ILLEGAL_NOTIFY = 25
    FIFO_ERROR_MMU_ERR_FLT = 31
    PBDMA_ERROR = 32
    FECS_ERR_UNIMP_FIRMWARE_METHOD = 37
    RESETCHANNEL_VERIF_ERROR = 43
    PBDMA_PUSHBUFFER_CRC_MISMATCH = 80


NOTIFIER_TEXT: Mapping[int, str] = MappingProxyType(
    {
        8: "context-switch timeout",
        11: "copy-engine launch error",
        12: "graphics software method",
        13: "GR exception (SM error, SKED, or class error)",
        24: "semaphore acquire timeout",
        25: "illegal notify or method",
        31: "MMU fault",
        32: "PBDMA error",
        37: "unimplemented firmware method",
        43: "channel reset on request",
        80: "push-buffer CRC mismatch",
    }
)
"""What a notifier code means, for messages."""

RM_ERROR_TEXT: Mapping[int, str] = MappingProxyType(
    {
        39: "copy engine 0 error",
        40: "copy engine 1 error",
        41: "copy engine 2 error",
        44: "fault during a context switch",
        45: "channel removed after another one's error",
        48: "uncorrectable memory error",
        69: "class error",
        70: "copy engine 3 error",
        71: "copy engine 4 error",
        72: "copy engine 5 error",
        79: "the GPU fell off the bus",
        94: "contained memory error",
        95: "uncontained memory error",
    }
)
"""More codes, which only desktop drivers write (NVIDIA's open-gpu-kernel-modules, nverror.h)."""

NOTIFIER_FORMAT = struct.Struct("<QIHH")
"""Record of 16 bytes: time in ns, info32 (the code), info16 (untouched), status."""

_STATUS = struct.Struct("<H")
"""The last field by itself."""

NOTIFIER_ERROR = 0xFFFF
"""`status` after an error; it is written last, so it is read before info32."""


class Notifier(NamedTuple):
    """A decoded error-notifier record."""

    time_ns: int
    info32: int
    info16: int
    status: int


def read_notifier(mem: bytes | bytearray | memoryview, offset: int = 0) -> Notifier:
    """The notifier record at `offset`, which may be written meanwhile: with an error's status comes its code."""
    status = _STATUS.unpack_from(mem, offset + NOTIFIER_FORMAT.size - _STATUS.size)
    return Notifier(*NOTIFIER_FORMAT.unpack_from(mem, offset)[:-1], *status)


class MmuFaultType(IntEnum):
    """Type of an MMU fault."""

    INVALID_PDE = 0
    INVALID_PDE_SIZE = 1
    INVALID_PTE = 2
    LIMIT_VIOLATION = 3
    UNBOUND_INST_BLOCK = 4
    PRIV_VIOLATION = 5
    WRITE_RO_VIOLATION = 6
    READ_WO_VIOLATION = 7
    PITCH_MASK_VIOLATION = 8
    WORK_CREATION = 9
    UNSUPPORTED_APERTURE = 10
    COMPRESSION_FAILURE = 11
    UNSUPPORTED_KIND = 12
    REGION_VIOLATION = 13
    POISON = 14
    ATOMIC_VIOLATION = 15


MMU_FAULT_TEXT: Mapping[int, str] = MappingProxyType(
    {
        0: "invalid pde",
        1: "invalid pde size",
        2: "invalid pte",
        3: "limit violation",
        4: "unbound inst block",
        5: "priv violation",
        6: "write, ro violation",
        7: "read, wo violation",
        8: "pitch mask violation",
        9: "work creation",
        10: "unsupported aperture",
        11: "compression failure",
        12: "unsupported kind",
        13: "region violation",
        14: "poison",
        15: "atomic violation",
    }
)
"""The driver's words for a fault type, as in its log lines."""


class MmuAccess(IntEnum):
    """Kind of access that faulted."""

    VIRT_READ = 0
    VIRT_WRITE = 1
    VIRT_ATOMIC_STRONG = 2
    VIRT_PREFETCH = 3
    VIRT_ATOMIC_WEAK = 4
    PHYS_READ = 8
    PHYS_WRITE = 9
    PHYS_ATOMIC = 10
    PHYS_PREFETCH = 11


MMU_ACCESS_TEXT: Mapping[int, str] = MappingProxyType(
    {
        0: "virt read",
        1: "virt write",
        2: "virt atomic strong",
        3: "virt prefetch",
        4: "virt atomic weak",
        5: "xxx",
        6: "xxx",
        7: "xxx",
        8: "phys read",
        9: "phys write",
        10: "phys atomic",
        11: "phys prefetch",
    }
)
"""The driver's words for an access type."""


class MmuClientType(IntEnum):
    """Which side the faulting client is on."""

    GPC = 0
    HUB = 1


MMU_CLIENTS_HUB: Mapping[int, str] = MappingProxyType({
    **dict(enumerate((
        "vip", "ce0", "ce1", "dniso/dispniso", "fe0/fe", "fecs0/fecs", "host", "host_cpu", "host_cpu_nb", "iso",
        "mmu", "nvdec0/nvdec", "ce3", "nvenc1", "niso/actrs", "p2p", "pd", "perf0/perf", "pmu", "rastertwod",
        "scc", "scc nb", "sec", "ssync", "grcopy/ce2", "xv", "mmu nb", "nvenc0/nvenc", "dfalcon", "sked0/sked",
        "afalcon", "dont_care", "hsce0", "hsce1", "hsce2", "hsce3", "hsce4", "hsce5", "hsce6", "hsce7",
        "hsce8", "hsce9", "hshub", "ptp_x0", "ptp_x1", "ptp_x2", "ptp_x3", "ptp_x4", "ptp_x5", "ptp_x6",
        "ptp_x7", "nvenc2", "vpr scrubber0", "vpr scrubber1", "dwbif", "fbfalcon", "ce shim", "gsp", "nvdec1", "nvdec2",
        "nvjpg0", "nvdec3", "nvdec4", "ofa0", "hsce10", "hsce11", "hsce12", "hsce13", "hsce14", "hsce15",
        "ptp_x8", "ptp_x9", "ptp_x10", "ptp_x11", "ptp_x12", "ptp_x13", "ptp_x14", "ptp_x15", "fe1", "fe2",
        "fe3", "fe4", "fe5", "fe6", "fe7", "fecs1", "fecs2", "fecs3", "fecs4", "fecs5",
        "fecs6", "fecs7", "sked1", "sked2", "sked3", "sked4", "sked5", "sked6", "sked7", "esc",
    ))),
    **dict(enumerate((
        "nvdec5", "nvdec6", "nvdec7", "nvjpg1", "nvjpg2", "nvjpg3", "nvjpg4", "nvjpg5", "nvjpg6", "nvjpg7",
    ), 111)),
})  # fmt: skip
"""Names of hub clients by id, ten to a line."""

MMU_CLIENTS_GPC: Mapping[int, str] = MappingProxyType({
    **dict(enumerate((
        "t1_0", "t1_1", "t1_2", "t1_3", "t1_4", "t1_5", "t1_6", "t1_7",
        "pe_0", "pe_1", "pe_2", "pe_3", "pe_4", "pe_5", "pe_6", "pe_7",
        "rast", "gcc", "gpccs", "prop_0", "prop_1", "prop_2", "prop_3",
    ))),
    **dict(enumerate((
        "t1_8", "t1_9", "t1_10", "t1_11", "t1_12", "t1_13", "t1_14", "t1_15",
        "tpccs_0", "tpccs_1", "tpccs_2", "tpccs_3", "tpccs_4", "tpccs_5", "tpccs_6", "tpccs_7",
        "pe_8", "pe_9", "tpccs_8", "tpccs_9",
        "t1_16", "t1_17", "t1_18", "t1_19", "pe_10", "pe_11", "tpccs_10", "tpccs_11",
        "t1_20", "t1_21", "t1_22", "t1_23", "pe_12", "pe_13", "tpccs_12", "tpccs_13",
        "t1_24", "t1_25", "t1_26", "t1_27", "pe_14", "pe_15", "tpccs_14", "tpccs_15",
        "t1_28", "t1_29", "t1_30", "t1_31", "pe_16", "pe_17", "tpccs_16", "tpccs_17",
        "t1_32", "t1_33", "t1_34", "t1_35", "pe_18", "pe_19", "tpccs_18", "tpccs_19",
        "t1_36", "t1_37", "t1_38", "t1_39",
    ), 33)),
    **dict(enumerate(("rop_0", "rop_1", "rop_2", "rop_3"), 112)),
})  # fmt: skip
"""Names of GPC clients by id; t1_n is the L1 of TPC n."""

MMU_ENGINE_IDS: Mapping[str, int] = MappingProxyType({"bar2": 192, "physical": 31, "ce0": 15})
"""MMU engine ids the driver names."""


class WarpEsr(IntEnum):
    """Error code in bits 15:0 of a warp ESR."""

    NONE = 0
    API_STACK_ERROR = 2
    MISALIGNED_PC = 5
    PC_OVERFLOW = 6
    MISALIGNED_REG = 8
    ILLEGAL_INSTR_ENCODING = 9
    ILLEGAL_INSTR_PARAM = 0xB
    OOR_REG = 0xD
    OOR_ADDR = 0xE
    MISALIGNED_ADDR = 0xF
    INVALID_ADDR_SPACE = 0x10
    INVALID_CONST_ADDR_LDC = 0x12
    MMU_FAULT = 0x17
    TEX_FORMAT = 0x18
    TEX_LAYOUT = 0x19
    MMU_NACK = 0x20
    ARRIVE = 0x21


class GlobalEsrBit(IntEnum):
    """Bit numbers of the global ESR."""

    MULTIPLE_WARP_ERRORS = 2
    BPT_INT = 4
    BPT_PAUSE = 5
    SINGLE_STEP_COMPLETE = 6
    ERROR_IN_TRAP = 8
    POISON_DATA = 12


WARP_ESR_REPORT_MASK = 0xF85EB64
"""Warp errors the driver asks to be reported (or-ed into the hardware default)."""

GLOBAL_ESR_REPORT_MASK = 0x1174
"""Global errors the driver asks to be reported."""


class SkedBit(IntEnum):
    """Bit numbers of the SKED exception status: what is wrong with a QMD or its launch."""

    SCG_GOTO_IDLE = 0
    CTA_STEER = 1
    PCAS_WITH_SEMAPHORE = 2
    VSPAN_0 = 3
    VSPAN_1 = 4
    THROTTLED_RESTRICTED = 5
    CTA_RESUME = 6
    CONSTANT_BUFFER_SIZE = 7
    DEPENDENCE_COUNTER_UNDERFLOW = 8
    LOCAL_MEMORY_LOW_SIZE = 9
    LOCAL_MEMORY_HIGH_SIZE = 10
    LOCAL_MEMORY_CRS_SIZE = 11
    LOCAL_MEMORY_TOTAL_SIZE = 12
    REGISTER_COUNT = 13
    OUTER_PUT = 14
    OUTER_GET = 15
    INNER_PUT = 16
    INNER_GET = 17
    TOTAL_THREADS = 18
    VEID_CACHE_LINE = 19
    PROGRAM_OFFSET = 20
    SHARED_MEMORY_SIZE = 21
    ZERO_CTA_DIMENSION = 23
    MEMORY_WINDOW_OVERLAP = 24
    L1_CONFIG_TOO_SMALL = 25
    CTA_REGISTER_CONSUMPTION = 26
    GET_PUT_TOO_LARGE = 27
    QUEUE_SIZE = 28
    INVALIDATE_ACTIVE_QMD = 29


class PbdmaIntr0(IntEnum):
    """Bit numbers of PBDMA intr_0."""

    GPFIFO = 0xD
    GPPTR = 0xE
    GPENTRY = 0xF
    GPCRC = 0x10
    PBPTR = 0x11
    PBENTRY = 0x12
    PBCRC = 0x13
    METHOD = 0x15
    DEVICE = 0x17
    ENG_RESET = 0x18
    SEMAPHORE = 0x19
    ACQUIRE = 0x1A
    PRI = 0x1B
    PBSEG = 0x1E
    SIGNATURE = 0x1F


PBDMA_INTR_0_FATAL: frozenset[PbdmaIntr0] = frozenset(
    {
        PbdmaIntr0.GPFIFO,
        PbdmaIntr0.GPPTR,
        PbdmaIntr0.GPENTRY,
        PbdmaIntr0.GPCRC,
        PbdmaIntr0.PBPTR,
        PbdmaIntr0.PBENTRY,
        PbdmaIntr0.PBCRC,
        PbdmaIntr0.METHOD,
        PbdmaIntr0.PBSEG,
        PbdmaIntr0.ENG_RESET,
        PbdmaIntr0.SEMAPHORE,
        PbdmaIntr0.SIGNATURE,
    }
)
"""The interrupts that the driver calls fatal for the channel. Not all of them make it act: see the next set."""

PBDMA_INTR_0_RECOVERED: frozenset[PbdmaIntr0] = frozenset(
    {
        PbdmaIntr0.PBENTRY,
        PbdmaIntr0.PBCRC,
        PbdmaIntr0.METHOD,
        PbdmaIntr0.DEVICE,
        PbdmaIntr0.ENG_RESET,
        PbdmaIntr0.ACQUIRE,
    }
)
"""The interrupts upon which nvgpu ends the TSG; the others it logs and clears (pbdma_ga10b_fusa.c,
ga10b_pbdma_handle_intr_0, executed: what it has found by then is overwritten by the look for an acquire's timeout)."""


class PbdmaIntr1(IntEnum):
    """Bit numbers of PBDMA intr_1."""

    HCE_RE_ILLEGAL_OP = 0
    HCE_RE_ALIGNB = 1
    HCE_PRIV = 2
    HCE_ILLEGAL_MTHD = 3
    HCE_ILLEGAL_CLASS = 4
    CTXNOTVALID = 0x1F


def bit_names(bits: type[IntEnum], value: int) -> list[str]:
    """Names of the bits set in `value`, lowest first; unknown bits as `bit<n>`."""
    known = {int(bit): bit.name for bit in bits}
    return [known.get(n, f"bit{n}") for n in range(value.bit_length()) if value >> n & 1]
