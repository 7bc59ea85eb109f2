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


MMU_CLIENTS_HUB: Mapping[int, str] = MappingProxyType(
    {
        0: "vip",
        1: "ce0",
        2: "ce1",
        3: "dniso/dispniso",
        4: "fe0/fe",
        5: "fecs0/fecs",
        6: "host",
        7: "host_cpu",
        8: "host_cpu_nb",
        9: "iso",
        10: "mmu",
        11: "nvdec0/nvdec",
        12: "ce3",
        13: "nvenc1",
        14: "niso/actrs",
        15: "p2p",
        16: "pd",
        17: "perf0/perf",
        18: "pmu",
        19: "rastertwod",
        20: "scc",
        21: "scc nb",
        22: "sec",
        23: "ssync",
        24: "grcopy/ce2",
        25: "xv",
        26: "mmu nb",
        27: "nvenc0/nvenc",
        28: "dfalcon",
        29: "sked0/sked",
        30: "afalcon",
        31: "dont_care",
        32: "hsce0",
        33: "hsce1",
        34: "hsce2",
        35: "hsce3",
        36: "hsce4",
        37: "hsce5",
        38: "hsce6",
        39: "hsce7",
        40: "hsce8",
        41: "hsce9",
        42: "hshub",
        43: "ptp_x0",
        44: "ptp_x1",
        45: "ptp_x2",
        46: "ptp_x3",
        47: "ptp_x4",
        48: "ptp_x5",
        49: "ptp_x6",
        50: "ptp_x7",
        51: "nvenc2",
        52: "vpr scrubber0",
        53: "vpr scrubber1",
        54: "dwbif",
        55: "fbfalcon",
        56: "ce shim",
        57: "gsp",
        58: "nvdec1",
        59: "nvdec2",
        60: "nvjpg0",
        61: "nvdec3",
        62: "nvdec4",
        63: "ofa0",
        64: "hsce10",
        65: "hsce11",
        66: "hsce12",
        67: "hsce13",
        68: "hsce14",
        69: "hsce15",
        70: "ptp_x8",
        71: "ptp_x9",
        72: "ptp_x10",
        73: "ptp_x11",
        74: "ptp_x12",
        75: "ptp_x13",
        76: "ptp_x14",
        77: "ptp_x15",
        78: "fe1",
        79: "fe2",
        80: "fe3",
        81: "fe4",
        82: "fe5",
        83: "fe6",
        84: "fe7",
        85: "fecs1",
        86: "fecs2",
        87: "fecs3",
        88: "fecs4",
        89: "fecs5",
        90: "fecs6",
        91: "fecs7",
        92: "sked1",
        93: "sked2",
        94: "sked3",
        95: "sked4",
        96: "sked5",
        97: "sked6",
        98: "sked7",
        99: "esc",
        111: "nvdec5",
        112: "nvdec6",
        113: "nvdec7",
        114: "nvjpg1",
        115: "nvjpg2",
        116: "nvjpg3",
        117: "nvjpg4",
        118: "nvjpg5",
        119: "nvjpg6",
        120: "nvjpg7",
    }
)
"""Names of hub clients by id."""

MMU_CLIENTS_GPC: Mapping[int, str] = MappingProxyType(
    {
        0: "t1_0",
        1: "t1_1",
        2: "t1_2",
        3: "t1_3",
        4: "t1_4",
        5: "t1_5",
        6: "t1_6",
        7: "t1_7",
        8: "pe_0",
        9: "pe_1",
        10: "pe_2",
        11: "pe_3",
        12: "pe_4",
        13: "pe_5",
        14: "pe_6",
        15: "pe_7",
        16: "rast",
        17: "gcc",
        18: "gpccs",
        19: "prop_0",
        20: "prop_1",
        21: "prop_2",
        22: "prop_3",
        33: "t1_8",
        34: "t1_9",
        35: "t1_10",
        36: "t1_11",
        37: "t1_12",
        38: "t1_13",
        39: "t1_14",
        40: "t1_15",
        41: "tpccs_0",
        42: "tpccs_1",
        43: "tpccs_2",
        44: "tpccs_3",
        45: "tpccs_4",
        46: "tpccs_5",
        47: "tpccs_6",
        48: "tpccs_7",
        49: "pe_8",
        50: "pe_9",
        51: "tpccs_8",
        52: "tpccs_9",
        53: "t1_16",
        54: "t1_17",
        55: "t1_18",
        56: "t1_19",
        57: "pe_10",
        58: "pe_11",
        59: "tpccs_10",
        60: "tpccs_11",
        61: "t1_20",
        62: "t1_21",
        63: "t1_22",
        64: "t1_23",
        65: "pe_12",
        66: "pe_13",
        67: "tpccs_12",
        68: "tpccs_13",
        69: "t1_24",
        70: "t1_25",
        71: "t1_26",
        72: "t1_27",
        73: "pe_14",
        74: "pe_15",
        75: "tpccs_14",
        76: "tpccs_15",
        77: "t1_28",
        78: "t1_29",
        79: "t1_30",
        80: "t1_31",
        81: "pe_16",
        82: "pe_17",
        83: "tpccs_16",
        84: "tpccs_17",
        85: "t1_32",
        86: "t1_33",
        87: "t1_34",
        88: "t1_35",
        89: "pe_18",
        90: "pe_19",
        91: "tpccs_18",
        92: "tpccs_19",
        93: "t1_36",
        94: "t1_37",
        95: "t1_38",
        96: "t1_39",
        112: "rop_0",
        113: "rop_1",
        114: "rop_2",
        115: "rop_3",
    }
)
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
