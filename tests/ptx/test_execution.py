"""Control flow, barriers, scheduling, faults and launches."""

import struct
import threading

import numpy as np
import pytest

from tegrad import ptx
from tests.ptx.bodies import OUT, module
from tests.ptx.forms import HEADER


def run(body: str, threads: int = 32, ctas: int = 1, **options: object) -> np.ndarray:
    """What each thread leaves in %t0."""
    out = np.zeros(threads * ctas, np.uint32)
    k = module(f"mov.u32 %t0, 0; {body} {OUT} st.global.u32 [%a], %t0;").kernels["k"]
    k.launch((ctas, 1, 1), (threads, 1, 1), [out], **options)  # type: ignore[arg-type]
    return out


def collatz(n: int) -> int:
    steps = 0
    while n != 1:
        n = n // 2 if n % 2 == 0 else 3 * n + 1
        steps += 1
    return steps


def test_lanes_of_a_loop_take_their_own_number_of_trips() -> None:
    body = """
      add.u32 %t1, %i, 1;
      L: setp.eq.u32 %p, %t1, 1; @%p bra E;
      and.b32 %t2, %t1, 1; setp.eq.u32 %q, %t2, 0; @%q bra H;
      mad.lo.u32 %t1, %t1, 3, 1; bra J;
      H: shr.u32 %t1, %t1, 1;
      J: add.u32 %t0, %t0, 1; bra L;
      E:
    """
    assert run(body, 128).tolist() == [collatz(n + 1) for n in range(128)]


def test_nested_branches_reconverge() -> None:
    body = """
      and.b32 %t1, %i, 1; setp.eq.u32 %p, %t1, 1; @%p bra A;
      and.b32 %t1, %i, 2; setp.eq.u32 %p, %t1, 0; @%p bra B;
      add.u32 %t0, %t0, 100; bra C;
      B: add.u32 %t0, %t0, 200;
      C: add.u32 %t0, %t0, 1000; bra D;
      A: add.u32 %t0, %t0, 7;
      D: activemask.b32 %t2; setp.eq.u32 %p, %t2, -1; selp.u32 %t3, 1, 0, %p; add.u32 %t0, %t0, %t3;
    """
    assert run(body).tolist() == [8 if i & 1 else 1001 + (100 if i & 2 else 200) for i in range(32)]


def test_a_uniform_loop_counter_in_a_divergent_region_is_not_shared_after_it() -> None:
    """Lanes leave the loop at different trips: the counter they saw last is their own."""
    body = "L: add.u32 %t0, %t0, 1; setp.lt.u32 %p, %t0, %i; @%p bra L;"
    assert run(body).tolist() == [max(1, i) for i in range(32)]


def test_threads_that_end_early_leave_the_others_running() -> None:
    out = np.zeros(64, np.uint32)
    k = module(f"{OUT} setp.lt.u32 %p, %i, 10; @%p ret; mov.u32 %t0, 5; st.global.u32 [%a], %t0;").kernels["k"]
    k.launch((1, 1, 1), (64, 1, 1), [out])
    assert (out == np.where(np.arange(64) < 10, 0, 5)).all()


def test_barrier_orders_shared_memory_between_warps() -> None:
    body = """
      .shared .b32 s[256]; mov.u32 %t1, s; mad.lo.u32 %t2, %i, 4, %t1; st.shared.u32 [%t2], %i; bar.sync 0;
      sub.u32 %t3, 255, %i; mad.lo.u32 %t3, %t3, 4, %t1; ld.shared.u32 %t0, [%t3];
    """
    assert run(body, 256, 3).tolist() == list(range(255, -1, -1)) * 3


def test_named_barriers_of_some_warps() -> None:
    """Warps 0 and 1 meet at barrier 1 while warps 2 and 3 meet at barrier 2."""
    body = """
      .shared .b32 s[128]; mov.u32 %t1, s; mad.lo.u32 %t2, %i, 4, %t1; st.shared.u32 [%t2], %i;
      shr.u32 %t4, %i, 6; add.u32 %t4, %t4, 1; bar.sync %t4, 64;
      xor.b32 %t3, %i, 32; mad.lo.u32 %t3, %t3, 4, %t1; ld.shared.u32 %t0, [%t3];
    """
    assert run(body, 128).tolist() == [i ^ 32 for i in range(128)]


def test_producers_arrive_and_consumers_wait() -> None:
    body = """
      .shared .b32 s[32]; mov.u32 %t1, s; setp.lt.u32 %p, %i, 32; @%p bra C;
      sub.u32 %t2, %i, 32; mad.lo.u32 %t2, %t2, 4, %t1; mul.lo.u32 %t3, %i, 3; st.shared.u32 [%t2], %t3; bar.arrive 3,
      64; bra E;
      C: bar.sync 3, 64; mad.lo.u32 %t2, %i, 4, %t1; ld.shared.u32 %t0, [%t2];
      E:
    """
    assert run(body, 64)[:32].tolist() == [3 * (i + 32) for i in range(32)]


def test_barrier_does_not_wait_for_warps_that_ended() -> None:
    body = f"setp.ge.u32 %p, %i, 64; @%p ret; bar.sync 0; mov.u32 %t0, 1; {OUT} st.global.u32 [%a], %t0;"
    out = np.zeros(128, np.uint32)
    module(body).kernels["k"].launch((1, 1, 1), (128, 1, 1), [out])
    assert (out == (np.arange(128) < 64)).all()


def test_a_lock_between_the_lanes_of_a_warp_makes_progress() -> None:
    """while (atomicCAS(lock, 0, 1)); critical section; unlock: each lane adds its part without an atomic."""
    body = """
      ld.param.u64 %a, [p0]; ld.param.u64 %b, [p1];
      L: atom.global.cas.b32 %t1, [%b], 0, 1; setp.ne.u32 %p, %t1, 0; @%p bra L;
      ld.volatile.global.u32 %t2, [%a]; add.u32 %t2, %t2, %i; st.volatile.global.u32 [%a], %t2;
      membar.gl; atom.global.exch.b32 %t1, [%b], 0;
    """
    total, lock = np.zeros(1, np.uint32), np.zeros(1, np.uint32)
    module(body, 2).kernels["k"].launch((4, 1, 1), (64, 1, 1), [total, lock])
    assert total[0] == 4 * sum(range(64))


@pytest.mark.parametrize("threads", [1, 2])
def test_ctas_wait_for_each_other_at_a_grid_barrier(threads: int) -> None:
    body = """
      ld.param.u64 %a, [p0]; ld.param.u64 %b, [p1]; mov.u32 %c, %ctaid.x; mov.u32 %t9, 0;
      R: mad.wide.u32 %w0, %c, 4, %a; setp.ne.u32 %q, %i, 0; @%q bra S;
      ld.volatile.global.u32 %t1, [%w0]; add.u32 %t1, %t1, 1; st.volatile.global.u32 [%w0], %t1;
      membar.gl; atom.global.add.u32 %t2, [%b], 1; add.u32 %t9, %t9, 12;
      W: ld.acquire.gpu.global.u32 %t3, [%b]; setp.lt.u32 %p, %t3, %t9; @%p bra W;
      xor.b32 %t4, %c, 1; mad.wide.u32 %w1, %t4, 4, %a; ld.volatile.global.u32 %t5, [%w1]; setp.lt.u32 %p, %t5, %t1;
      @%p trap;
      S: bar.sync 0; add.u32 %t8, %t8, 1; mov.u32 %t7, %t8;
      setp.lt.u32 %p, %t7, 20; @%p bra R;
    """
    values, counter = np.zeros(12, np.uint32), np.zeros(1, np.uint32)
    k = module(f"mov.u32 %t8, 0; {body}", 2).kernels["k"]
    k.launch((12, 1, 1), (64, 1, 1), [values, counter], threads=threads)
    assert values.tolist() == [20] * 12
    assert counter[0] == 240


def test_more_ctas_than_workers_cover_a_3d_grid() -> None:
    body = """
      mov.u32 %t1, %ctaid.y; mov.u32 %t2, %ctaid.z; mov.u32 %t3, %tid.y; mov.u32 %t4, %tid.z; mov.u32 %t5, %ctaid.x;
      mov.u32 %t6, %nctaid.y; mov.u32 %t7, %nctaid.x; mov.u32 %t8, %ntid.y; mov.u32 %t9, %ntid.x;
      mad.lo.u32 %t2, %t2, %t6, %t1; mad.lo.u32 %t2, %t2, %t7, %t5;
      mad.lo.u32 %t4, %t4, %t8, %t3; mad.lo.u32 %t4, %t4, %t9, %i;
      mad.lo.u32 %t2, %t2, 48, %t4; ld.param.u64 %a, [p0]; mad.wide.u32 %a, %t2, 4, %a; atom.global.add.u32 %t1, [%a],
      1;
    """
    out = np.zeros(5 * 3 * 7 * 48, np.uint32)
    module(body).kernels["k"].launch((5, 3, 7), (4, 3, 4), [out], threads=2)
    assert (out == 1).all()


def test_dimensions_read_as_the_launch_says() -> None:
    body = """
      mov.u32 %t1, %ntid.x; mov.u32 %t2, %ntid.y; mov.u32 %t3, %ntid.z;
      mov.u32 %t4, %nctaid.x; mov.u32 %t5, %nctaid.y; mov.u32 %t6, %nctaid.z;
      ld.param.u64 %a, [p0]; st.global.u32 [%a], %t1; st.global.u32 [%a+4], %t2; st.global.u32 [%a+8], %t3;
      st.global.u32 [%a+12], %t4; st.global.u32 [%a+16], %t5; st.global.u32 [%a+20], %t6;
      atom.global.add.u32 %t1, [%a+24], 1;
    """
    k = module(body).kernels["k"]
    assert k.reads_dims
    out = np.zeros(7, np.uint32)
    for dims, seen in ((None, [8, 2, 1, 3, 1, 2]), (((7, 6, 5), (4, 3, 2)), [7, 6, 5, 4, 3, 2])):
        out[:] = 0
        k.launch((3, 1, 2), (8, 2, 1), [out], dims=dims)
        assert out.tolist() == [*seen, 96]
    assert not module("mov.u32 %t1, %tid.x;").kernels["k"].reads_dims


def test_abort_ends_an_endless_kernel() -> None:
    k = module("L: bra L;").kernels["k"]
    flag = ptx.AbortFlag()
    timer = threading.Timer(0.05, flag.set)
    timer.start()
    with pytest.raises(ptx.PtxFault) as e:
        k.launch((4, 1, 1), (64, 1, 1), [0], abort=flag, threads=2)
    timer.join()
    assert e.value.kind == "aborted"
    flag.clear()


def test_abort_ends_a_barrier_that_never_opens() -> None:
    k = module("setp.lt.u32 %p, %i, 32; @%p bra E; L: bar.sync 0; bra L; E: bar.sync 1, 96;").kernels["k"]
    flag = ptx.AbortFlag()
    timer = threading.Timer(0.05, flag.set)
    timer.start()
    with pytest.raises(ptx.PtxFault, match="aborted"):
        k.launch((1, 1, 1), (64, 1, 1), [0], abort=flag)
    timer.join()


def test_trap_reports_the_thread() -> None:
    k = module("mov.u32 %c, %ctaid.x; mad.lo.u32 %c, %c, 64, %i; setp.eq.u32 %p, %c, 170; @%p trap;").kernels["k"]
    with pytest.raises(ptx.PtxFault) as e:
        k.launch((4, 1, 1), (64, 1, 1), [0])
    f = e.value
    assert (f.kind, f.cta, f.warp, f.lane, f.thread) == ("trap", (2, 0, 0), 1, 10, (42, 0, 0))


class Device:
    """A small device memory with a page table: pages 1 to 4 writable, page 5 readable."""

    def __init__(self) -> None:
        self.bytes = np.zeros(1 << 20, np.uint8)
        self.pages = np.zeros(256, np.uint8)
        self.pages[1:5] = 3
        self.pages[5] = 1
        self.memory = ptx.Memory(self.bytes.ctypes.data, self.pages.ctypes.data, 1 << 20)

    def fault(self, access: str, address: int, head: str = "") -> ptx.PtxFault:
        """The fault of thread 5 of CTA (1, 0, 0) at this address; the others use address 0x2000."""
        body = f"""ld.param.u64 %a, [p0]; mov.u32 %c, %ctaid.x; setp.eq.u32 %p, %i, 5; setp.eq.and.u32 %p, %c, 1, %p;
          mov.u64 %b, 0x2000; selp.b64 %a, %a, %b, %p; .reg .b64 %d<4>; .reg .f32 %e<4>; {access}"""
        k = module(body, head=head).kernels["k"]
        with pytest.raises(ptx.PtxFault) as e:
            k.launch((2, 1, 1), (64, 1, 1), struct.pack("<Q", address), memory=self.memory, threads=1)
        return e.value


@pytest.mark.parametrize(
    ("access", "address", "kind", "size"),
    [
        ("ld.global.f32 %f0, [%a];", 0x6000, "unmapped", 4),
        ("ld.global.f32 %f0, [%a];", 0, "unmapped", 4),
        ("ld.global.u8 %t0, [%a];", 0x100000, "unmapped", 1),
        ("ld.global.u64 %d0, [%a];", 0xFFFFFFFFFFFFFFF8, "unmapped", 8),
        ("ld.global.f32 %f0, [%a];", 0x2002, "misaligned", 4),
        ("ld.global.v4.f32 {%e0, %e1, %e2, %e3}, [%a];", 0x2004, "misaligned", 16),
        ("ld.global.v2.f32 {%e0, %e1}, [%a];", 0x2004, "misaligned", 8),
        ("st.global.v4.f32 [%a], {%e0, %e1, %e2, %e3};", 0x2008, "misaligned", 16),
        ("st.global.u16 [%a], %t0;", 0x5000, "read-only", 2),
        ("st.global.f32 [%a], %f0;", 0x6000, "unmapped", 4),
        ("ld.global.f32 %f0, [%a];", 0xFE00000000, "address-space", 4),
        ("st.global.f32 [%a], %f0;", 0xFD00001000, "address-space", 4),
        ("ld.f32 %f0, [%a];", 0xFE00000100, "out-of-range", 4),
        ("st.f32 [%a], %f0;", 0xFD00000100, "out-of-range", 4),
        ("ld.f32 %f0, [%a];", 0x7000, "unmapped", 4),
    ],
)
def test_the_first_bad_lane_is_reported(access: str, address: int, kind: str, size: int) -> None:
    f = Device().fault(access, address)
    assert (f.kind, f.address, f.size) == (kind, address, size)
    assert (f.cta, f.warp, f.lane, f.thread) == ((1, 0, 0), 0, 5, (5, 0, 0))
    assert f.access == ("write" if access.startswith("st") else "read")
    assert access.split(";")[0] in f.source
    assert hex(address) in str(f)


def test_shared_memory_ends_at_its_size() -> None:
    for static, dynamic, size in ((16, 0, 16), (16, 48, 64), (0, 100, 100)):
        head = ".extern .shared .align 16 .b8 dyn[];\n" if dynamic else ""
        declare = f".shared .b8 s[{static}];" if static else ""
        body = f"{declare} ld.param.u32 %t1, [p0]; ld.shared.u8 %t0, [%t1];"
        k = module(body, head=head).kernels["k"]
        k.launch((1, 1, 1), (32, 1, 1), struct.pack("<Q", size - 1), shared=dynamic)
        with pytest.raises(ptx.PtxFault) as e:
            k.launch((1, 1, 1), (32, 1, 1), struct.pack("<Q", size), shared=dynamic)
        assert (e.value.kind, e.value.address) == ("out-of-range", size)


def test_dynamic_shared_memory_follows_the_static() -> None:
    head = ".extern .shared .align 16 .b8 dyn[];\n"
    body = ".shared .b8 s[20]; mov.u32 %t1, dyn; mov.u32 %t2, s; sub.u32 %t0, %t1, %t2;"
    out = np.zeros(32, np.uint32)
    k = module(f"{body} {OUT} st.global.u32 [%a], %t0;", head=head).kernels["k"]
    k.launch((1, 1, 1), (32, 1, 1), [out], shared=64)
    assert (out == 32).all()


def test_nothing_is_written_after_a_fault() -> None:
    d = Device()
    body = """ld.param.u64 %a, [p0]; ld.global.u32 %t0, [%a]; mov.u64 %b, 0x2000;
      mov.u32 %t1, 9; st.global.u32 [%b], %t1;
      L: st.global.u32 [%b], %t1; bra L;"""
    with pytest.raises(ptx.PtxFault, match="unmapped"):
        module(body).kernels["k"].launch((1, 1, 1), (32, 1, 1), struct.pack("<Q", 0x9000), memory=d.memory)
    assert not d.bytes.any()


def test_page_borders_are_crossed_only_where_mapped() -> None:
    d = Device()
    body = "ld.param.u64 %a, [p0]; mad.wide.u32 %a, %i, 4, %a; ld.global.u32 %t0, [%a];"
    k = module(body).kernels["k"]
    k.launch((1, 1, 1), (32, 1, 1), struct.pack("<Q", 0x1FC0), memory=d.memory)
    with pytest.raises(ptx.PtxFault) as e:
        k.launch((1, 1, 1), (32, 1, 1), struct.pack("<Q", 0x5FC0), memory=d.memory)
    assert (e.value.address, e.value.lane) == (0x6000, 16)


def test_generic_addresses_reach_all_three_spaces_from_one_instruction() -> None:
    body = """
      .shared .align 4 .b8 s[64]; .local .align 4 .b8 l[4];
      mov.u64 %w0, s; cvta.shared.u64 %w0, %w0; mov.u64 %w1, l; cvta.local.u64 %w1, %w1; ld.param.u64 %w2, [p0];
      st.u32 [%w0], 11; st.u32 [%w1], %i; mov.u32 %t1, 33; st.u32 [%w2+8], %t1;
      rem.u32 %t2, %i, 3; setp.eq.u32 %p, %t2, 0; selp.b64 %w3, %w0, %w1, %p; add.u64 %w2, %w2, 8;
      setp.eq.u32 %p, %t2, 2; selp.b64 %w3, %w2, %w3, %p; ld.u32 %t0, [%w3]; bar.sync 0;
    """
    want = [(11, i, 33)[i % 3] for i in range(32)]
    assert run(body.replace("st.u32 [%w0], 11;", "mov.u32 %t1, 11; st.u32 [%w0], %t1;")).tolist() == want


def test_local_memory_belongs_to_each_thread() -> None:
    body = """
      .local .align 8 .b8 l[64]; mov.u64 %w0, l; and.b32 %t1, %i, 7; mad.wide.u32 %w1, %t1, 8, %w0;
      cvt.u64.u32 %w2, %i; st.local.u64 [%w1], %w2; ld.local.u64 %w3, [%w1]; cvt.u32.u64 %t0, %w3;
    """
    assert run(body, 64, 2).tolist() == list(range(64)) * 2


def test_module_variables_have_their_initial_values_and_keep_changes() -> None:
    head = (
        ".global .align 4 .u32 g[4] = {5, 6, 7};\n.const .align 8 .f64 c = 0d4000000000000000;\n.global .u64 q = g;\n"
    )
    body = f"""{OUT} and.b32 %t1, %i, 3; mov.u64 %w0, g; mad.wide.u32 %w0, %t1, 4, %w0;
      atom.global.add.u32 %t0, [%w0], 1;
      .reg .f64 %d; ld.const.f64 %d, [c]; cvt.rzi.u32.f64 %t2, %d; ld.global.u64 %w1, [q]; ld.global.u32 %t3, [%w1+4];
      mad.lo.u32 %t0, %t2, 100, 0; add.u32 %t0, %t0, %t3; st.global.u32 [%a], %t0;"""
    m = module(body, head=head)
    out = np.zeros(4, np.uint32)
    for n in range(2):
        m.launch((1, 1, 1), (4, 1, 1), [out])
        assert out.max() == 200 + 6 + n + 1
    assert [v.name for v in m.kernels["k"].globals] == ["g", "c", "q"]


def test_stats_count_threads_and_bytes() -> None:
    out = np.zeros(96, np.uint32)
    k = module(f"{OUT} setp.lt.u32 %p, %i, 10; @%p ld.global.u32 %t0, [%a]; st.global.u32 [%a], %t0;").kernels["k"]
    s = k.launch((2, 1, 1), (48, 1, 1), [out])
    assert s.bytes_read == 2 * 10 * 4
    assert s.bytes_written == 96 * 4
    assert s.instructions == 96 * 10


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("frobnicate.u32 %i, %i;", "instruction frobnicate.u32 is not supported"),
        ("wgmma.fence.sync.aligned;", "instruction wgmma.fence.sync.aligned is not supported"),
        ("bra NOWHERE;", "unknown label"),
        ("mov.u32 %i, %nosuch;", "%nosuch"),
        ("add.u32 %i, %i;", "operands"),
    ],
)
def test_what_cannot_run_is_named_when_it_is_loaded(text: str, message: str) -> None:
    with pytest.raises(ptx.PtxError, match=message):
        module(text)


def test_cut_off_text_is_refused() -> None:
    whole = HEADER + ".visible .entry k(.param .u64 p0) { .reg .u32 %r<4>; mov.u32 %r1, %tid.x; ret; }"
    ptx.load(whole, None)
    for cut in range(len(HEADER) + 10, len(whole) - 1, 7):
        with pytest.raises(ptx.PtxError):
            ptx.load(whole[:cut], None)


@pytest.mark.parametrize(
    ("grid", "block"), [((0, 1, 1), (32, 1, 1)), ((1, 1, 1), (1025, 1, 1)), ((1, 1, 1), (0, 1, 1))]
)
def test_impossible_launches_are_refused(grid: tuple[int, int, int], block: tuple[int, int, int]) -> None:
    with pytest.raises(ptx.PtxError, match="cannot be launched"):
        module("mov.u32 %t0, 1;").kernels["k"].launch(grid, block, [0])


def test_launches_from_several_threads_do_not_disturb_each_other() -> None:
    k = module(f"{OUT} ld.global.u32 %t0, [%a]; mad.lo.u32 %t0, %t0, 3, 1; st.global.u32 [%a], %t0;").kernels["k"]
    arrays = [np.full(1024, n, np.uint32) for n in range(4)]
    wrong: list[BaseException] = []

    def work(a: np.ndarray) -> None:
        try:
            for _ in range(20):
                k.launch((8, 1, 1), (128, 1, 1), [a])
        except BaseException as e:
            wrong.append(e)

    workers = [threading.Thread(target=work, args=(a,), daemon=True) for a in arrays]
    for w in workers:
        w.start()
    for w in workers:
        w.join()
    assert not wrong
    for n, a in enumerate(arrays):
        want = n
        for _ in range(20):
            want = (want * 3 + 1) & 0xFFFFFFFF
        assert (a == want).all()


def test_clocks_advance() -> None:
    body = """.reg .u64 %g<2>; mov.u64 %g0, %globaltimer; mov.u32 %t1, %clock; mov.u32 %t3, 0;
      L: nanosleep.u32 100; add.u32 %t3, %t3, 1; setp.lt.u32 %p, %t3, 50; @%p bra L;
      mov.u64 %g1, %globaltimer; setp.gt.u64 %p, %g1, %g0; selp.u32 %t0, 1, 0, %p;"""
    assert (run(body) == 1).all()


def test_shared_memory_counts_what_the_kernel_names_without_gaps() -> None:
    head = ".shared .align 16 .b8 other[4096];\n.shared .b8 used[3];\n"
    body = """.shared .align 4 .b8 a[12]; .shared .align 16 .b8 b[64]; mov.u32 %t0, used; mov.u32 %t1, a;
      mov.u32 %t2, b;
      st.shared.u8 [%t0], %t1; st.shared.u8 [%t2], %t1;"""
    assert module(body, head=head).kernels["k"].static_shared == 64 + 12 + 3


def test_a_function_called_twice_has_one_shared_variable_and_its_own_locals() -> None:
    head = """.func (.param .b32 o) count(.param .b32 x) {
      .shared .b32 total; .local .b32 mine; .reg .b32 %v, %w; .reg .pred %q;
      ld.param.b32 %v, [x]; st.local.b32 [mine], %v; setp.gt.s32 %q, %v, 100; @%q bra OVER;
      atom.shared.add.u32 %w, [total], %v; ld.local.b32 %v, [mine]; add.u32 %w, %w, %v; st.param.b32 [o], %w; ret;
      OVER: ld.shared.b32 %w, [total]; st.param.b32 [o], %w; ret; }\n"""
    call = "{{ .param .b32 a; .param .b32 r; st.param.b32 [a], {}; call.uni (r), count, (a); ld.param.b32 {}, [r]; }}"
    body = f"""mov.u32 %t1, 5; mov.u32 %t2, 7; mov.u32 %t3, 999; {call.format("%t1", "%t4")} {call.format("%t2", "%t5")}
      {call.format("%t3", "%t6")} mul.lo.u32 %t0, %t4, 100; mad.lo.u32 %t0, %t5, 10, %t0; add.u32 %t0, %t0, %t6;
      {OUT} st.global.u32 [%a], %t0;"""
    out = np.zeros(1, np.uint32)
    k = module(body, head=head).kernels["k"]
    k.launch((1, 1, 1), (1, 1, 1), [out])
    assert k.static_shared == 4
    first = int(out[0])
    k.launch((1, 1, 1), (1, 1, 1), [out])
    # Shared memory keeps what the CTA before left in it: only the difference is defined.
    assert (first - 5 * 100 - 12 * 10 - 12) % 111 == 0


@pytest.mark.parametrize(("t", "bits"), [("f16", 0xFC00), ("f32", 0xFF800000), ("f64", 0xFFF0000000000000)])
def test_bits_moved_into_a_float_register_stay_bits(t: str, bits: int) -> None:
    """`mov.b16 %h, 0xFC00` is minus infinity, also in another block, where it is formed again."""
    size = int(t[1:])
    text = f"""{HEADER}.visible .entry k(.param .u64 p) {{ .reg .u64 %a; .reg .{t} %h<3>;
      ld.param.u64 %a, [p]; mov.b{size} %h0, {bits:#x}; bra NEXT; NEXT: ld.global.b{size} %h1, [%a];
      max.{t} %h2, %h0, %h1; st.global.b{size} [%a], %h2; ret; }}"""
    value = np.array([1.5], f"f{size // 8}")
    ptx.load(text, None).kernels["k"].launch((1, 1, 1), (1, 1, 1), [value])
    assert value[0] == 1.5
