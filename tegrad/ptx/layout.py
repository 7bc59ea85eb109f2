"""Byte offsets of the structures that compiled code and the launcher share.

Launch: one per launch, read by every warp. Frame: the state of one warp; registers that live across basic blocks follow
its header. Slot: one resident CTA: header, then the frames of its warps, shared memory, local memory. Worker: one per
host thread.
"""

from enum import IntEnum

LANES = 32
ALL_LANES = 0xFFFFFFFF
BARRIERS = 16
BACK_EDGES = 1 << 16
"""Back edges a warp may take before it yields; a loop that can wait for another thread pays SPIN_COST for each."""
SPIN_COST = 512
HASH_FACTOR = 0x9E3779B1
"""2^32 over the golden ratio, by which numbers are spread where a launch with a seed draws."""
STACK_ALIGN = 64
"""Alignment of the stack on which warp functions are called: their vectors of 64 bytes are spilled to it."""


class Launch(IntEnum):
    """Offsets in the launch structure."""

    MEM_BASE = 0
    PAGES = 8
    LIMIT = 16
    PARAMS = 24
    GRID = 32
    BLOCK = 44
    WARPS = 56
    THREADS = 60
    SHARED_WINDOW = 64
    LOCAL_WINDOW = 72
    WINDOW_SIZE = 80
    SHARED_SIZE = 88
    LOCAL_SIZE = 92
    ABORT = 96
    NEXT_CTA = 104
    TOTAL_CTAS = 112
    FRAME_SIZE = 120
    FRAMES_END = 128
    SHARED_END = 136
    WARP_FN = 144
    SYMBOLS = 152
    DYNAMIC_SHARED = 164
    NTID = 168
    NCTAID = 180
    FAULT_STATE = 192
    FAULT_PC = 196
    FAULT_LANE = 200
    FAULT_WARP = 204
    FAULT_CTA = 208
    FAULT_ADDRESS = 216
    FAULT_INFO = 224
    COPY_QUEUE = 228
    """Where warps' frames have the queue of cp.async, in kernels whose copies arrive at an mbarrier; else 0."""
    SETTLE = 232
    """The function tgx_async_settle, in kernels with mbarriers; else 0."""
    SEED = 240
    """Where copies may land early and out of order: a number that is not 0."""
    TAG = 244
    """What reports of the L2 name the launch by."""
    L2 = 248
    """The L2's port of this address space, or 0 (`l2.Port`)."""
    SIZE = 256


class Frame(IntEnum):
    """Offsets in a warp's frame. Those that begin with CONVERGE are there where lanes may have to converge."""

    LAUNCH = 0
    SHARED = 8
    LOCAL = 16
    COUNTS = 24
    SLOT = 32
    LIVE = 40
    BLOCKED = 44
    BUDGET = 48
    FAULTED = 52
    STATE = 56
    WARP = 60
    CTAID = 64
    ROTATE = 76
    CTA = 80
    ALL = 88
    MET = 92
    BAR_MASK = 96
    HELD = 160
    RED_BARRIER = 164
    COPY_HEAD = 168
    COPY_COUNT = 172
    COPY_GROUP = 176
    RESUME = 180
    COPY_ARRIVES = 184
    FENCES = 188
    PCS = 192
    TID = 320
    END = 704
    CONVERGE_MASK = 704
    CONVERGE_KEY = 832
    CONVERGE_PC = 960
    CONVERGE_FROM = 1088
    CONVERGE_VALUE = 1216
    CONVERGE_RESULT = 1472
    CONVERGE_GROUP = 1600
    CONVERGE_END = 1728


class Slot(IntEnum):
    """Offsets in a resident CTA's header."""

    STATE = 0
    LIVE_WARPS = 4
    LIVE_THREADS = 8
    PENDING = 12
    CTA = 16
    ARRIVED = 64
    EXPECTED = 128
    REDUCE = 192
    RESULT = 256
    FRAMES = 320


class Worker(IntEnum):
    """Offsets in a worker's structure."""

    SLOTS = 0
    STRIDE = 8
    COUNT = 16
    COUNTS = 24
    SIZE = 64


class Flag(IntEnum):
    """What a launch is asked to do, in the word that its ABORT points to; the next word counts its running workers."""

    ABORT = 1
    PAUSE = 2
    """Give way at once."""
    PAUSE_CTA = 4
    """Give way when the CTAs that have begun are done."""


class Status(IntEnum):
    """What a warp function returns."""

    EXIT = 0
    BARRIER = 1
    YIELD = 2


class WarpState(IntEnum):
    READY = 0
    WAITING = 1
    DONE = 2
    HELD = 3
    """Ready, and held back for a while, in a launch with a seed."""


class Space(IntEnum):
    """State spaces in a fault record."""

    GLOBAL = 0
    SHARED = 1
    LOCAL = 2
    GENERIC = 3
    PARAM = 4


class Access(IntEnum):
    """Kinds of access in a fault record; TRAP and ILLEGAL have no address.

    MISSING and OUTSIDE are no accesses: their address is a member mask, and above it the lanes that did not come, or
    that it does not name.
    """

    READ = 0
    WRITE = 1
    ATOMIC = 2
    TRAP = 3
    ILLEGAL = 4
    MISSING = 5
    OUTSIDE = 6


def fault_info(space: int, access: int, size: int) -> int:
    """The fault record's word: size in bits 0-15, access in 16-23, space in 24-31."""
    return size | access << 16 | space << 24
