"""wgmma: when a product runs, what it finds in its registers, and what is refused.

What it computes is in the oracle (oracle/warpgroups.py).
"""

import numpy as np
import pytest

from tegrad import ptx

HEADER = ".version 8.5\n.target sm_90a\n.address_size 64\n"
ONES, TWOS = "0x3c003c00", "0x40004000"
FENCE, COMMIT, WAIT = (
    "wgmma.fence.sync.aligned;",
    "wgmma.commit_group.sync.aligned;",
    "wgmma.wait_group.sync.aligned 0;",
)
FILL = "st.shared.b32 [%m], {value}; fence.proxy.async.shared::cta; bar.sync 0;"
"""All of B, 16 x 8 halves without a swizzle; the rest of the block's stores lie after it."""
DEAD = 0x7FFF7FFF


def product(sums: str = "f", b: str = "%d", scale: str = "1, 1, 1, 0") -> str:
    """16 columns of ones times B, added to four sums."""
    names = ", ".join(f"%{sums}{i}" for i in range(4))
    op = "wgmma.mma_async.sync.aligned.m64n8k16.f32.f16.f16"
    return f"{op} {{{names}}}, {{%a, %a, %a, %a}}, {b}, {scale};"


def kernel(body: str, target: str = "sm_90a") -> str:
    return (
        HEADER.replace("sm_90a", target)
        + f""".visible .entry k(.param .u64 p0) {{
      .reg .b32 %t, %m, %a; .reg .f32 %f<4>, %g<4>, %h<4>; .reg .b64 %o, %d; .reg .pred %p;
      .shared .align 1024 .b8 sm[1024];
      ld.param.u64 %o, [p0]; mov.u32 %t, %tid.x; mad.wide.u32 %o, %t, 16, %o;
      mov.u32 %m, sm; mad.lo.u32 %m, %t, 4, %m; mov.b32 %a, {ONES}; mov.b64 %d, 0x0000000800080000;
      {" ".join(f"mov.f32 %{x}{i}, 0f00000000;" for x in "fgh" for i in range(4))}
      {body} ret; }}"""
    )


def out(names: str = "%f0, %f1, %f2, %f3") -> str:
    return f"st.global.v4.f32 [%o], {{{names}}};"


def run(body: str, threads: int = 128, seed: int = 0) -> np.ndarray:
    """The four values of each thread."""
    result = np.zeros((threads, 4), np.float32)
    ptx.load(kernel(body), None).launch((1, 1, 1), (threads, 1, 1), [result], seed=seed)
    return result


def test_sums_are_there_after_the_wait_and_not_before() -> None:
    body = f"{FILL.format(value=ONES)} {FENCE} {product()} {COMMIT}"
    assert (run(f"{body} {WAIT} {out()}") == 16).all()
    assert (run(f"{body} {out()} {WAIT}").view(np.uint32) == DEAD).all()


def test_a_product_reads_shared_memory_as_late_as_its_wait() -> None:
    early = f"{FILL.format(value=ONES)} {FENCE} {product()} {COMMIT} {FILL.format(value=TWOS)} {WAIT} {out()}"
    right = (
        f"{FILL.format(value=ONES)} {FENCE} {product()} {COMMIT} {WAIT} bar.sync 0; {FILL.format(value=TWOS)} {out()}"
    )
    assert (run(early) == 32).all()
    assert (run(right) == 16).all()


def test_with_seeds_a_product_may_run_at_once() -> None:
    """And then finds what is stored after it as little as what is stored over its matrices."""
    late = (
        f"{FILL.format(value=ONES)} {FENCE} {product()} {COMMIT} bar.sync 0; {FILL.format(value=TWOS)} {WAIT} {out()}"
    )
    found = {float(x) for seed in range(8) for x in run(late, seed=seed).ravel()}
    assert found == {16, 32}
    right = f"{FILL.format(value=ONES)} {FENCE} {' '.join([product()] * 40)} {COMMIT}"
    for seed in range(4):
        assert (run(f"{right} {WAIT} {out()}", seed=seed) == 40 * 16).all()
        assert (run(f"{right} {out()} {WAIT}", seed=seed).view(np.uint32) == DEAD).all()


def test_a_wait_leaves_the_newest_groups_and_those_not_committed() -> None:
    three = f"{FENCE} {product('f')} {COMMIT} {product('g')} {COMMIT} {product('h')}"
    body = f"{FILL.format(value=ONES)} {three} wgmma.wait_group.sync.aligned 1;"
    got = run(f"{body} {out('%f0, %g0, %h0, %f3')} {WAIT}")
    assert (got[:, [0, 3]] == 16).all()
    assert (got[:, [1, 2]].view(np.uint32) == DEAD).all()
    assert (run(f"{body} {WAIT} {out('%f0, %g0, %g3, %f3')}") == 16).all()
    assert (run(f"{body} {WAIT} {out('%h0, %h1, %h2, %h3')}").view(np.uint32) == DEAD).all()


def test_products_are_added_to_the_same_sums_in_order() -> None:
    many = " ".join([product()] * 40)
    assert (run(f"{FILL.format(value=ONES)} {FENCE} {many} {COMMIT} {WAIT} {out()}") == 40 * 16).all()
    last = f"{FENCE} {product()} {product(scale='0, 1, -1, 0')} {product()} {COMMIT} {WAIT} {out()}"
    assert (run(f"{FILL.format(value=TWOS)} {last}") == 0).all()


def test_sums_that_were_written_without_a_fence_are_undefined() -> None:
    start = f"{FILL.format(value=ONES)} {FENCE} mov.f32 %f0, 0f3F800000;"
    assert np.isnan(run(f"{start} {product()} {COMMIT} {WAIT} {out()}")[:, 0]).all()
    assert (run(f"{start} {FENCE} {product()} {COMMIT} {WAIT} {out()}")[:, 0] == 17).all()


def test_fragments_that_were_written_without_a_fence_are_undefined() -> None:
    start = f"{FILL.format(value=ONES)} {FENCE} mov.b32 %a, {TWOS};"
    assert np.isnan(run(f"{start} {product()} {COMMIT} {WAIT} {out()}")).all()
    assert (run(f"{start} {FENCE} {product()} {COMMIT} {WAIT} {out()}") == 32).all()


def test_stores_that_no_fence_shows_to_products_are_undefined() -> None:
    body = f"{FILL.format(value=ONES)} {FENCE} {product()} {COMMIT} {WAIT} {out()}"
    assert (run(body) == 16).all()
    assert np.isnan(run(body.replace("fence.proxy.async.shared::cta;", ""))).all()


def test_fragments_are_the_products_until_the_wait() -> None:
    body = f"{FILL.format(value=ONES)} {FENCE} {product()} {COMMIT}"
    change = f"mov.b32 %a, {TWOS};"
    assert np.isnan(run(f"{body} {change} {WAIT} {out()}")).all()
    assert (run(f"{body} {WAIT} {change} {FENCE} {product()} {COMMIT} {WAIT} {out()}") == 16 + 32).all()


def test_products_of_a_loop_are_waited_for_in_its_next_turn() -> None:
    body = f"""{FILL.format(value=ONES)} mov.u32 %t, 0;
      $L: wgmma.wait_group.sync.aligned 1; {FENCE} {product()} {COMMIT}
      add.u32 %t, %t, 1; setp.lt.u32 %p, %t, 5; @%p bra $L; {WAIT} {out()}"""
    assert (run(body) == 5 * 16).all()


def test_lists_of_sums_may_share_registers() -> None:
    """A product of other sums finds those of the one before complete."""
    mixed = product().replace("%f1", "%g1")
    body = f"{FILL.format(value=ONES)} {FENCE} {product()} {mixed} {COMMIT} {WAIT} {out('%f0, %f1, %g1, %f3')}"
    assert (run(body) == [32, 16, 16, 32]).all()


@pytest.mark.parametrize(
    ("body", "threads", "kind"),
    [
        (f"{FENCE} {product()} {WAIT}", 96, "illegal"),
        (f"setp.lt.u32 %p, %t, 40; @%p bra $L; {FENCE} {product()} {COMMIT} {WAIT} $L:", 128, "illegal"),
        (f"mov.b64 %d, 0x0000000800080039; {FENCE} {product()} {COMMIT} {WAIT}", 128, "out-of-range"),
        (f"mov.b64 %d, 0x4002000800010000; {FENCE} {product()} {COMMIT} {WAIT}", 128, "illegal"),
        (f"mov.b64 %d, 0x4000000800010008; {FENCE} {product()} {COMMIT} {WAIT}", 128, "illegal"),
    ],
    ids=["three warps", "a part of a warp", "beyond shared memory", "a base offset", "amid a pattern"],
)
def test_what_is_not_a_whole_product_is_a_fault(body: str, threads: int, kind: str) -> None:
    with pytest.raises(ptx.PtxFault, match=kind):
        run(body, threads)


@pytest.mark.parametrize(
    "ins",
    [
        product(scale="1, 1, 2, 0"),
        product(scale="1, 1, 1"),
        product().replace("n8k16", "n12k16"),
        product().replace("n8k16", "n16k16"),
        product().replace("n8k16", "n8k32"),
        product().replace("f32.f16.f16", "f16.bf16.bf16"),
        product().replace("mma_async", "mma_async.sp"),
        f"@%p {product()}",
    ],
    ids=["a factor", "an operand less", "12 columns", "too few sums", "depth", "types", "sparse", "predicated"],
)
def test_other_forms_are_refused_by_name(ins: str) -> None:
    with pytest.raises(ptx.PtxError, match=r"instruction wgmma.mma_async\S* is not supported"):
        ptx.load(kernel(ins), None)


@pytest.mark.parametrize("ins", [FENCE, COMMIT, WAIT, product()], ids=lambda i: i.split(".")[1])
@pytest.mark.parametrize("target", ["sm_87", "sm_90"])
def test_only_hoppers_own_code_has_it(ins: str, target: str) -> None:
    with pytest.raises(ptx.PtxError, match=r"wgmma\."):
        ptx.load(kernel(ins, target), None)
