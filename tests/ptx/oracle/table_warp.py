"""Lanes and warps together: shuffles, votes, matches, barriers, ldmatrix (PTX ISA 9.7.9, 9.7.13, 9.7.14)."""

from tests.ptx.oracle.form import Form, rows

# Only the lanes of a mask (one for the warp) come to the instruction; the others keep 0.
INSIDE = (
    ".reg .b32 %l; .reg .pred %in; mov.u32 %l, %lanemask_eq; and.b32 %l, %l, {mask};"
    " setp.ne.u32 %in, %l, 0; {clear} @!%in bra @@skip; {body} @@skip: "
    "bar.warp.sync 0xffffffff;"
)


def some(op: str, sources: str, results: str, body: str) -> list[Form]:
    """With a member mask; the last source is the mask."""
    mask = f"%s{len(sources.split()) - 1}"
    clear = "".join(
        f"setp.ne.u32 %d{i}, 0, 0; " if r == "pred" else f"mov.b32 %d{i}, 0; " for i, r in enumerate(results.split())
    )
    text = INSIDE.replace("{mask}", mask).replace("{clear}", clear).replace("{body}", body)
    return rows("9.7.13", op, sources, results, text=text, scope="warp", tag="of some lanes", rule="bits")


def shuffle(mode: str, lane: int, clamp: int) -> list[Form]:
    return rows(
        "9.7.9.6",
        f"shfl.sync.{mode}.b32",
        "u32",
        "u32 pred",
        text=f"{{op}} %d0|%d1, %s0, {lane}, {clamp:#x}, 0xffffffff;",
        scope="warp",
        tag=f"{lane} {clamp:#x}",
    )


def matrices(count: int, trans: str) -> list[Form]:
    """ldmatrix of rows that each lane stored, in an order that each lane chooses."""
    names, results = ", ".join(f"%d{i}" for i in range(count)), " ".join(["b32"] * count)
    text = (
        ".reg .b32 %a, %b, %e, %f; ld.global.v4.b32 {%a, %b, %e, %f}, [%p0];"
        " st.shared.v4.b32 [%m], {%a, %b, %e, %f}; bar.warp.sync 0xffffffff;"
        f"mad.lo.u32 %a, %s1, 16, %sm; {{op}} {{{names}}}, [%a]; bar.warp.sync 0xffffffff;"
    )
    return rows(
        "9.7.14",
        f"ldmatrix.sync.aligned.m8n8.x{count}{trans}.shared.b16",
        "blob16 u32:lane",
        results,
        text=text,
        scope="warp",
    )


# In a block of 128 threads: pairs of warps meet at barriers of their own; two warps write for the other two.
PAIRS = (
    ".reg .b32 %t, %u, %v; mov.u32 %t, %tid.x; shr.u32 %u, %t, 6; add.u32 %u, %u, 1;"
    " st.shared.b32 [%m], %s0; {op} %u, 64;"
    "xor.b32 %v, %t, 32; mad.lo.u32 %v, %v, 16, %sm; ld.shared.b32 %d0, [%v]; bar.sync 0;"
)
HANDOVER = (
    ".reg .b32 %t, %v; .reg .pred %y; mov.u32 %t, %tid.x; mov.b32 %d0, %s0; setp.lt.u32 %y, %t, 64;"
    " @!%y bra @@take; st.shared.b32 [%m], %s0;"
    "bar.arrive 3, 128; bra @@done; @@take: bar.sync 3, 128; sub.u32 %v, %t, 64;"
    " mad.lo.u32 %v, %v, 16, %sm; ld.shared.b32 %d0, [%v]; @@done: bar.sync 0;"
)
BLOCK = (
    ".reg .b32 %t; st.shared.b32 [%m], %s0; {op}; mov.u32 %t, %tid.x; xor.b32 %t, %t, 127; mad.lo.u32 %t, %t, 16, %sm;"
    "ld.shared.b32 %d0, [%t]; bar.sync 0;"
)


def reduction(op: str, result: str) -> list[Form]:
    return rows(
        "9.7.13",
        op,
        "u32:few u32:wsame",
        f"{result} {result}",
        scope="cta",
        rule="bits",
        text=".reg .pred %y; setp.ne.u32 %y, %s0, 0; {op} %d0, 0, %y; setp.gt.u32 %y, %s1, 1; {op} %d1, 0, %y;",
    )


FORMS = [
    *rows(
        "9.7.9.6",
        "shfl.sync.{up,down,bfly,idx}.b32",
        "u32 u32:lane64 u32:clamp",
        "u32 pred",
        text="{op} %d0|%d1, %s0, %s1, %s2, 0xffffffff;",
        scope="warp",
    ),
    *(f for k in (1, 2, 4, 8, 16) for f in shuffle("bfly", k, 0x1F)),
    *(f for k in (1, 16) for f in (*shuffle("down", k, 0x1F), *shuffle("up", k, 0))),
    *shuffle("down", 2, 0x181F),
    *shuffle("up", 1, 0x1C00),
    *shuffle("idx", 3, 0x181F),
    *shuffle("idx", 0, 0x1F),
    *shuffle("bfly", 5, 0x101F),
    *rows(
        "9.7.13",
        "vote.sync.{all,any,uni}.pred",
        "u32:wsame",
        "pred",
        text=".reg .pred %y; setp.gt.u32 %y, %s0, 1; {op} %d0, %y, 0xffffffff;",
        scope="warp",
    ),
    *rows(
        "9.7.13",
        "vote.sync.ballot.b32",
        "u32:few",
        "b32",
        text=".reg .pred %y; setp.eq.u32 %y, %s0, 1; {op} %d0, %y, 0xffffffff;",
        scope="warp",
    ),
    *some(
        "vote.sync.{all,any,uni}.pred",
        "u32:wsame u32:wmask",
        "pred",
        ".reg .pred %y; setp.gt.u32 %y, %s0, 1; {op} %d0, %y, %s1;",
    ),
    *some(
        "vote.sync.ballot.b32", "u32:few u32:wmask", "b32", ".reg .pred %y; setp.eq.u32 %y, %s0, 1; {op} %d0, %y, %s1;"
    ),
    *rows("9.7.13", "match.any.sync.{b32,b64}", "$:few", "b32", text="{op} %d0, %s0, 0xffffffff;", scope="warp"),
    *rows(
        "9.7.13", "match.all.sync.{b32,b64}", "$:wsame", "b32 pred", text="{op} %d0|%d1, %s0, 0xffffffff;", scope="warp"
    ),
    *some("match.any.sync.{b32,b64}", "$:few u32:wmask", "b32", "{op} %d0, %s0, %s1;"),
    *some("match.all.sync.{b32,b64}", "$:wsame u32:wmask", "b32 pred", "{op} %d0|%d1, %s0, %s1;"),
    *rows(
        "9.7.13",
        "redux.sync.{add.u32,add.s32,min.u32,min.s32,max.u32,max.s32,and.b32,or.b32,xor.b32}",
        "u32",
        "u32",
        text="{op} %d0, %s0, 0xffffffff;",
        scope="warp",
    ),
    *some(
        "redux.sync.{add.u32,add.s32,min.u32,min.s32,max.u32,max.s32,and.b32,or.b32,xor.b32}",
        "u32 u32:wmask",
        "u32",
        "{op} %d0, %s0, %s1;",
    ),
    *rows("9.7.13", "activemask.b32", "u32", "b32", text="{op} %d0;", scope="warp"),
    *rows("9.7.13", "elect.sync", "u32:wmask", "b32 pred", text="{op} %d0|%d1, 0xffffffff;", scope="warp", arch=90),
    *(f for x in (1, 2, 4) for t in ("", ".trans") for f in matrices(x, t)),
    *rows("9.7.14", "movmatrix.sync.aligned.m8n8.trans.b16", "b32", "b32", scope="warp"),
    *reduction("{bar.red,barrier.cta.red}.popc.u32", "u32"),
    *reduction("{bar.red,barrier.cta.red}.{and,or}.pred", "pred"),
    *rows("9.7.13", "{bar,barrier,barrier.cta}.sync", "b32", "b32", text=BLOCK.replace("{op}", "{op} 0"), scope="cta"),
    *rows("9.7.13", "barrier.sync.aligned", "b32", "b32", text=BLOCK.replace("{op}", "{op} 5, 128"), scope="cta"),
    *rows("9.7.13", "{bar.sync,barrier.sync}", "b32", "b32", text=PAIRS, scope="cta", tag="of pairs of warps"),
    *rows("9.7.13", "bar.arrive", "b32", "b32", text=HANDOVER, scope="cta"),
]
