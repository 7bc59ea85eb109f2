"""Accesses by one register plus constants, and lanes far apart: as if each access were checked alone."""

import struct
from collections.abc import Callable

import numpy as np
import pytest

from tegrad import ptx
from tegrad.ptx.check import NEAR_PAGES
from tests.ptx.forms import HEADER

RNG = np.random.default_rng(43)
PAGE = 4096
DATA, OUT, PAGES = 16 * PAGE, 32 * PAGE, 40
"""Where data and results are; the threads' addresses are at 0."""


class Device:
    """Device memory whose page flags do not begin or end at a multiple of 64 bytes."""

    def __init__(self, pages: int = PAGES) -> None:
        raw = np.zeros((pages + 1) * PAGE, np.uint8)
        skip = -raw.ctypes.data % PAGE
        self.bytes = raw[skip : skip + pages * PAGE]
        flags = np.zeros(pages + 128, np.uint8)
        skip = (7 - flags.ctypes.data) % 64
        self.flags = flags[skip : skip + pages]
        self.flags[:] = 3
        self.memory = ptx.Memory(self.bytes.ctypes.data, self.flags.ctypes.data, pages * PAGE)

    def words(self, at: int, count: int) -> np.ndarray:
        return self.bytes[at : at + 4 * count].view(np.uint32)

    def launch(self, kernel: ptx.LoadedKernel, *args: int, threads: int = 32) -> None:
        kernel.launch((1, 1, 1), (threads, 1, 1), struct.pack(f"<{len(args)}Q", *args), memory=self.memory, threads=1)


def kernel(body: str, regs: str = "") -> ptx.LoadedKernel:
    """%a is the thread's address (from an array of 64-bit ones at 0), %o its place in the results, %t its index."""
    text = f"""{HEADER}.visible .entry k(.param .u64 addresses, .param .u64 out, .param .u64 lanes) {{
      .reg .u64 %a, %o, %l; .reg .u32 %t, %m, %v<20>; .reg .u16 %h<8>; .reg .u64 %w<8>; .reg .pred %p; {regs}
      mov.u32 %t, %tid.x; ld.param.u64 %a, [addresses]; ld.param.u64 %o, [out]; ld.param.u64 %l, [lanes];
      mad.wide.u32 %a, %t, 8, %a; ld.global.u64 %a, [%a]; mad.wide.u32 %o, %t, 64, %o;
      shr.u64 %l, %l, %t; cvt.u32.u64 %m, %l; and.b32 %m, %m, 1; setp.eq.u32 %p, %m, 0; @%p bra DONE;
      {body}
      DONE: ret; }}"""
    return ptx.load(text, None).kernels["k"]


PATTERNS: dict[str, Callable[[], np.ndarray]] = {
    "consecutive": lambda: np.arange(32), "reversed": lambda: np.arange(32)[::-1], "strided": lambda: 5 * np.arange(32),
    "one": lambda: np.full(32, 3), "random": lambda: RNG.permutation(900)[:32],
    "almost": lambda: np.arange(32) + (np.arange(32) == 31),
}  # fmt: skip
LANES = {"all": 0xFFFFFFFF, "odd": 0xAAAAAAAA, "last": 1 << 31, "none": 0}


@pytest.mark.parametrize("lanes", LANES)
@pytest.mark.parametrize("pattern", PATTERNS)
@pytest.mark.parametrize(("type_", "vector"), [("u8", 1), ("u16", 1), ("b32", 1), ("b64", 1), ("b32", 4), ("b16", 2)])
def test_loads_and_stores_of_a_group_move_what_each_alone_would(
    type_: str, vector: int, pattern: str, lanes: str
) -> None:
    bits = int(type_[1:])
    step = bits // 8 * vector
    name = {8: "%h", 16: "%h", 32: "%v", 64: "%w"}[bits]
    regs = [[f"{name}{vector * k + i}" for i in range(vector)] for k in range(2)]
    groups = [f"{{{', '.join(r)}}}" if vector > 1 else r[0] for r in regs]
    form = f"{f'v{vector}.' if vector > 1 else ''}{type_}"
    d, index = Device(), PATTERNS[pattern]()
    d.bytes[DATA : DATA + 4 * PAGE] = RNG.integers(0, 256, 4 * PAGE)
    d.bytes[:256].view(np.uint64)[:] = DATA + 64 + index * step
    k = kernel(f"""ld.global.{form} {groups[0]}, [%a+{2 * step}]; ld.global.{form} {groups[1]}, [%a-{step}];
      st.global.{form} [%o], {groups[0]}; st.global.{form} [%o+{step}], {groups[1]};""")
    d.launch(k, 0, OUT, LANES[lanes])
    want = np.zeros((32, 64), np.uint8)
    for lane in range(32):
        if LANES[lanes] >> lane & 1:
            at = DATA + 64 + int(index[lane]) * step
            for place, off in enumerate((2 * step, -step)):
                want[lane, place * step : (place + 1) * step] = d.bytes[at + off : at + off + step]
    assert (d.bytes[OUT : OUT + 32 * 64].reshape(32, 64) == want).all()


@pytest.mark.parametrize("pattern", PATTERNS)
@pytest.mark.parametrize("lanes", LANES)
def test_lanes_that_do_not_run_are_neither_checked_nor_stored_for(lanes: str, pattern: str) -> None:
    d, index, active = Device(), PATTERNS[pattern](), [LANES[lanes] >> i & 1 == 1 for i in range(32)]
    addresses = d.bytes[:256].view(np.uint64)
    for elsewhere in (None, PAGES * PAGE + 5):
        d.words(DATA, 4096)[:] = 99
        addresses[:] = DATA + 4 * index
        if elsewhere is not None:
            addresses[~np.array(active)] = elsewhere
        d.launch(kernel("st.global.u32 [%a], %t; st.global.u32 [%a+8192], %t;"), 0, OUT, LANES[lanes])
        want = np.full(4096, 99)
        for lane in np.flatnonzero(active):
            want[[index[lane], index[lane] + 2048]] = lane
        assert (d.words(DATA, 4096) == want).all()


@pytest.mark.parametrize("pattern", PATTERNS)
def test_a_group_stores_to_scattered_addresses(pattern: str) -> None:
    d, index = Device(), PATTERNS[pattern]()
    d.bytes[:256].view(np.uint64)[:] = DATA + 8 * index
    d.launch(kernel("st.global.u32 [%a], %t; add.u32 %v0, %t, 7; st.global.u32 [%a+4], %v0;"), 0, OUT, 0xFFFFFFFF)
    want = np.zeros(2048, np.uint32)
    for lane in range(32):
        want[2 * index[lane] : 2 * index[lane] + 2] = lane, lane + 7
    assert (d.words(DATA, 2048) == want).all()


def test_a_register_that_changes_begins_a_new_group() -> None:
    d = Device()
    d.words(DATA, 64)[:] = np.arange(64)
    d.bytes[:256].view(np.uint64)[:] = DATA
    d.launch(
        kernel("""ld.global.u32 %v0, [%a]; ld.global.u32 %v1, [%a+4]; add.u64 %a, %a, 8; ld.global.u32 %v2, [%a];
          ld.global.u32 %v3, [%a+4]; st.global.v4.u32 [%o], {%v0, %v1, %v2, %v3};"""),
        0, OUT, 1,
    )  # fmt: skip
    assert d.words(OUT, 4).tolist() == [0, 1, 2, 3]


THREE = """ld.global.u32 %v0, [%a]; st.global.u32 [%o], %v0; ld.global.u32 %v1, [%a+4096]; st.global.u32 [%o+4], %v1;
  st.global.u32 [%a+8192], %v1; st.global.u32 [%o+8], %v1;"""


def faults(d: Device, kind: str, lane: int, address: int, access: str) -> None:
    with pytest.raises(ptx.PtxFault) as caught:
        d.launch(kernel(THREE), 0, OUT, 0xFFFFFFFF)
    fault = caught.value
    assert (fault.kind, fault.lane, fault.address, fault.access) == (kind, lane, address, access)


@pytest.mark.parametrize("pattern", ["consecutive", "strided", "random"])
def test_a_fault_is_that_of_the_first_access_that_is_not_allowed(pattern: str) -> None:
    index = np.sort(PATTERNS[pattern]())
    for page, flags, kind, access in ((5, 0, "unmapped", "read"), (6, 1, "read-only", "write")):
        d = Device()
        d.words(4 * PAGE, 8 * 1024)[:] = 9
        d.bytes[:256].view(np.uint64)[:] = 4 * PAGE + 4 * index
        d.flags[page] = flags
        faults(d, kind, 0, page * PAGE + 4 * int(index[0]), access)
        # What comes before the fault has happened, what comes after has not.
        done = d.words(OUT, 3).tolist()
        assert done == ([9, 0, 0] if page == 5 else [9, 9, 0])


def test_a_lane_alone_beyond_the_end_faults() -> None:
    d = Device()
    d.bytes[:256].view(np.uint64)[:] = DATA + 4 * np.arange(32)
    d.bytes[:256].view(np.uint64)[20] = (PAGES - 1) * PAGE
    faults(d, "unmapped", 20, PAGES * PAGE, "read")


def test_a_misaligned_constant_faults() -> None:
    d = Device()
    d.bytes[:256].view(np.uint64)[:] = DATA + 4 * np.arange(32)
    with pytest.raises(ptx.PtxFault, match="misaligned"):
        d.launch(kernel("ld.global.u32 %v0, [%a]; ld.global.u32 %v1, [%a+2]; st.global.u32 [%o], %v1;"), 0, OUT, 1)


def test_pages_between_those_of_a_group_may_be_missing() -> None:
    d = Device()
    d.flags[5] = 0
    d.words(4 * PAGE, 4096)[:] = np.arange(4096)
    d.bytes[:256].view(np.uint64)[:] = 4 * PAGE + 4 * np.arange(32)
    d.launch(
        kernel("ld.global.u32 %v0, [%a]; ld.global.u32 %v1, [%a+8192]; st.global.v2.u32 [%o], {%v0, %v1};"),
        0, OUT, 0xFFFFFFFF,
    )  # fmt: skip
    got = d.bytes[OUT : OUT + 32 * 64].view(np.uint32).reshape(32, 16)[:, :2]
    assert (got == np.arange(32)[:, None] + [0, 2048]).all()


def test_a_warp_that_faulted_stores_nothing_more_through_its_group() -> None:
    d = Device()
    d.bytes[:256].view(np.uint64)[:] = DATA + 4 * np.arange(32)
    k = kernel(
        """st.global.u32 [%a], 1; mov.u64 %w0, 0xFFFFFFF000; st.global.u32 [%w0], %t;
      st.global.u32 [%a+128], 1;""".replace("[%a], 1", "[%a], %t").replace("128], 1", "128], %m")
    )
    with pytest.raises(ptx.PtxFault, match="unmapped"):
        d.launch(k, 0, OUT, 0xFFFFFFFF)
    assert d.words(DATA, 32).tolist() == list(range(32))
    assert not d.words(DATA + 128, 32).any()


@pytest.mark.parametrize("spread", [1, 3, 37, NEAR_PAGES // 16, NEAR_PAGES // 8])
def test_lanes_on_many_pages_are_checked_each(spread: int) -> None:
    """One access; lanes `spread` pages apart, a page that no lane uses missing, then one that a lane uses."""
    d = Device(8 + 33 * spread)
    pages = 8 + spread * RNG.permutation(32)
    addresses = pages * PAGE + 4 * RNG.integers(0, 1024, 32)
    d.bytes[:256].view(np.uint64)[:] = addresses
    for lane, at in enumerate(addresses):
        d.words(int(at), 1)[0] = 100 + lane
    k = kernel("ld.global.u32 %v0, [%a]; st.global.u32 [%o], %v0;")
    unused = sorted({8 + 32 * spread, 7, *(9 + spread * np.arange(31) if spread > 1 else ())})
    d.flags[[p for p in unused if p < len(d.flags)]] = 0
    d.launch(k, 0, PAGE, 0xFFFFFFFF)
    assert (d.bytes[PAGE : PAGE + 32 * 64].view(np.uint32)[::16] == 100 + np.arange(32)).all()
    d.flags[pages[11]] = 0
    with pytest.raises(ptx.PtxFault) as caught:
        d.launch(k, 0, PAGE, 0xFFFFFFFF)
    assert (caught.value.lane, caught.value.address) == (11, int(addresses[11]))
