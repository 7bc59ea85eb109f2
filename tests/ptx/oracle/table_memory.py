"""Loads, stores, addresses, asynchronous copies, atomics and fences (PTX ISA 9.7.9, 9.7.13)."""

from tests.ptx.oracle.form import Form, rows

SMALL, WIDE = "{u8,s8,b8,u16,s16,b16}", "{b32,u32,s32,f32}"


def spaces(op: str, sources: str, results: str, text: str, tag: str = "", arch: int = 80) -> list[Form]:
    """An atomic on the lane's cell of global memory, of shared memory, and through a generic address."""
    out = []
    for space, cell in ((".global", "%c"), (".shared", "%m"), ("", "%c")):
        filled = text.replace("{cell}", cell).replace("{space}", space or ".global")
        out += rows("9.7.13", op.replace("SPACE", space), sources, results, text=filled, tag=tag, arch=arch, rule="nan")
    return out


def atom(op: str, sources: str, width: str, tag: str = "", arch: int = 80) -> list[Form]:
    """Old and new value of the lane's cell."""
    count = len(sources.split())
    values = ", ".join(f"%s{i}" for i in range(1, count))
    text = (
        f"st{{space}}.b{width} [{{cell}}], %s0; {{op}} %d0, [{{cell}}], {values}; ld{{space}}.b{width} %d1, [{{cell}}];"
    )
    return spaces(op, sources, "$ $", text, tag, arch)


def red(op: str, sources: str, width: str, arch: int = 80) -> list[Form]:
    text = f"st{{space}}.b{width} [{{cell}}], %s0; {{op}} [{{cell}}], %s1; ld{{space}}.b{width} %d0, [{{cell}}];"
    return spaces(op, sources, "$", text, "", arch)


def together(op: str, sources: str, result: str, width: str) -> list[Form]:
    """32 lanes on one cell, in any order: only what is left there is compared."""
    text = (
        f"st.volatile.global.b{width} [%w], %s1; membar.gl; bar.warp.sync 0xffffffff; {{op}} [%w], %s0; membar.gl;"
        f"bar.warp.sync 0xffffffff; ld.volatile.global.b{width} %d0, [%w]; bar.warp.sync 0xffffffff;"
    )
    return rows("9.7.13", op, sources, result, text=text, scope="warp", tag="by 32 lanes")


def vector(op: str, n: int, width: int, register: str = "") -> list[Form]:
    """A load of n values."""
    names = ", ".join(f"%d{i}" for i in range(n))
    result = " ".join([register or f"b{width}"] * n)
    return rows("9.7.9", op, f"blob{n * width // 8}", result, text=f"{{op}} {{{names}}}, [%p0];", rule="bits")


def vector_store(op: str, n: int, width: int, register: str = "") -> list[Form]:
    names = ", ".join(f"%s{i}" for i in range(n))
    source = " ".join([register or f"b{width}"] * n)
    return rows("9.7.9", op, source, f"blob{n * width // 8}", text=f"{{op}} [%q0], {{{names}}};", rule="bits")


def copy(op: str, size: int, source: str, tail: str, tag: str = "", wait: str = "cp.async.wait_all;") -> list[Form]:
    """cp.async into the lane's shared memory, filled with a pattern before, and read after the wait."""
    n = size // 4
    fill = "".join(f"st.shared.b32 [%m+{4 * i}], 0xdeadbee{i};" for i in range(n))
    read = "".join(f"ld.shared.b32 %d{i}, [%m+{4 * i}];" for i in range(n))
    return rows(
        "9.7.9 cp.async",
        f"{op}.shared.global",
        source,
        " ".join(["b32"] * n),
        text=f"{fill} {{op}} [%m], [%p0], {size}{tail}; {wait} {read}",
        tag=f"{size} bytes{tag}",
    )


def cached() -> list[Form]:
    """Loads and stores with cache operators, eviction priorities and memory orders."""
    out = []
    for how in (
        ".ca",
        ".cg",
        ".cs",
        ".lu",
        ".cv",
        ".nc",
        ".L1::evict_last",
        ".L1::no_allocate",
        ".L2::128B",
        ".nc.L1::no_allocate.L2::256B",
    ):
        out += rows("9.7.9", f"ld.global{how}.b32", "blob4", "b32", text="{op} %d0, [%p0];")
    for how in (".ca", ".nc"):
        out += vector(f"ld.global{how}.v4.b32", 4, 32)
    for how in (".wb", ".cg", ".cs", ".wt", ".L1::evict_first"):
        out += rows("9.7.9", f"st.global{how}.b32", "b32", "blob4", text="{op} [%q0], %s0;", rule="bits")
    for how in (
        "volatile.global",
        "relaxed.cta.global",
        "relaxed.gpu.global",
        "acquire.gpu.global",
        "acquire.sys.global",
    ):
        out += rows("9.7.9", f"ld.{how}.u32", "blob4", "u32", text="{op} %d0, [%p0];")
    for how in ("volatile.global", "relaxed.gpu.global", "release.gpu.global", "release.sys.global"):
        out += rows("9.7.9", f"st.{how}.u32", "u32", "blob4", text="{op} [%q0], %s0;", rule="bits")
    return out


DYNAMIC_LOCAL = (
    ".local .align 16 .b8 loc[64]; .reg .b32 %i; .reg .b64 %l, %o; mov.u64 %l, loc; and.b32 %i, %s1, 12;"
    "st.local.v4.b32 [%l], {0, 1, 2, 3}; cvt.u64.u32 %o, %i; add.u64 %o, %o, %l; st.local.b32 [%o], %s0;"
    "ld.local.v4.b32 {%d0, %d1, %d2, %d3}, [%l];"
)
THROUGH_GENERIC = (
    ".reg .b64 %a; cvt.u64.u32 %a, %m; cvta.shared.u64 %a, %a; st.b32 [%a], %s0; ld.shared.b32 %d0, [%m];"
    " ld.b32 %d1, [%a];"
)
LOCAL_GENERIC = (
    ".local .align 8 .b8 loc[16]; .reg .b64 %a, %l; mov.u64 %l, loc; cvta.local.u64 %a, %l;"
    " st.b32 [%a+4], %s0; ld.local.b32 %d0, [%l+4];"
    "cvta.to.local.u64 %l, %a; ld.local.b32 %d1, [%l+4];"
)
NEIGHBOUR = (
    "st.shared.b32 [%m], %s0; bar.warp.sync 0xffffffff; .reg .b32 %i; mov.u32 %i, %laneid;"
    " xor.b32 %i, %i, 5; mad.lo.u32 %i, %i, 16, %sm;"
    "ld.shared.b32 %d0, [%i]; bar.warp.sync 0xffffffff;"
)
IS = (
    ".reg .b64 %a, %l; .local .b8 loc[8]; .reg .b32 %k; .reg .pred %y; and.b32 %k, %s0, 3; cvt.u64.u32 %a, %m;"
    "cvta.shared.u64 %a, %a; setp.eq.u32 %y, %k, 1; @%y mov.b64 %a, %c; mov.u64 %l, loc; cvta.local.u64 %l, %l;"
    "setp.eq.u32 %y, %k, 2; @%y mov.b64 %a, %l; {op} %d0, %a;"
)
GROUPS = (
    "st.shared.b32 [%m], 7; st.shared.b32 [%m+4], 8; cp.async.ca.shared.global [%m], [%p0], 4; cp.async.commit_group;"
    "cp.async.ca.shared.global [%m+4], [%p0+4], 4; cp.async.commit_group; cp.async.wait_group 1;"
    " ld.shared.b32 %d0, [%m];"
    "cp.async.wait_group 0; ld.shared.b32 %d1, [%m+4];"
)
PASS = "st.global.b32 [%c], %s0; {op}; ld.global.b32 %d0, [%c];"
SYMBOL = (
    ".reg .b64 %a; .reg .b32 %i; and.b32 %i, %s0, 252; cvt.u64.u32 %a, %i; .reg .b64 %b;"
    " mov.u64 %b, {symbol}; add.u64 %a, %a, %b; "
)
GRID = (
    ".reg .pred %y, %z; .reg .b32 %l, %n, %b; .reg .b64 %a; mov.u32 %l, %laneid; mov.u32 %n, %nctaid.x;"
    " mov.u32 %b, %ctaid.x;"
    "st.volatile.global.b32 [%w], %s0; membar.gl; setp.eq.u32 %y, %l, 0; @%y red.global.add.u32 [%g], 1;"
    "@@wait: ld.volatile.global.u32 %l, [%g]; setp.lt.u32 %z, %l, %n; @%z bra @@wait; membar.gl;"
    # Then the cell of the next block, or of the first.
    "add.u32 %l, %b, 1; setp.eq.u32 %y, %l, %n; mov.b64 %a, %w; @!%y add.u64 %a, %a, 64;"
    " mul.wide.u32 %o, %b, 64; @%y sub.u64 %a, %a, %o;"
    "ld.volatile.global.b32 %d0, [%a];"
).replace(".reg .b64 %a;", ".reg .b64 %a, %o;", 1)

FORMS = [
    *rows("9.7.9", f"ld.global.{SMALL}", "blob4", "b32", text="{op} %d0, [%p0];"),
    *rows("9.7.9", f"ld.global.{WIDE}", "blob4", "b32", text="{op} %d0, [%p0];"),
    *rows("9.7.9", "ld.global.{b64,u64,s64,f64}", "blob8", "b64", text="{op} %d0, [%p0];"),
    *rows("9.7.9", "ld.b32", "blob4", "b32", text="{op} %d0, [%p0];", tag="generic"),
    *rows("9.7.9", "ldu.global.b32", "blob4", "b32", text="{op} %d0, [%p0];"),
    *vector("ld.global.v2.b8", 2, 8, "u16"),
    *vector("ld.global.v4.u8", 4, 8, "b32"),
    *vector("ld.global.v4.s8", 4, 8, "b32"),
    *vector("ld.global.v2.b16", 2, 16, "u16"),
    *vector("ld.global.v4.u16", 4, 16, "u16"),
    *vector("ld.global.v2.f32", 2, 32),
    *vector("ld.global.v4.f32", 4, 32),
    *vector("ld.global.v4.u32", 4, 32),
    *vector("ld.global.v2.b64", 2, 64),
    *vector("ld.global.v2.f64", 2, 64),
    *vector("ld.v4.b32", 4, 32),
    *rows("9.7.9", "st.global.{u8,b8,u16,b16}", "b32", "blob4", text="{op} [%q0], %s0;", rule="bits"),
    *rows("9.7.9", f"st.global.{WIDE}", "b32", "blob4", text="{op} [%q0], %s0;", rule="bits"),
    *rows("9.7.9", "st.global.{b64,u64,f64}", "b64", "blob8", text="{op} [%q0], %s0;", rule="bits"),
    *rows("9.7.9", "st.b32", "b32", "blob4", text="{op} [%q0], %s0;", rule="bits", tag="generic"),
    *vector_store("st.global.v2.b8", 2, 8, "u16"),
    *vector_store("st.global.v4.u8", 4, 8, "b32"),
    *vector_store("st.global.v2.u16", 2, 16, "u16"),
    *vector_store("st.global.v4.b16", 4, 16, "u16"),
    *vector_store("st.global.v2.f32", 2, 32),
    *vector_store("st.global.v4.f32", 4, 32),
    *vector_store("st.global.v2.f64", 2, 64),
    *vector_store("st.v4.b32", 4, 32),
    *vector("ld.global.v2.u16", 2, 16, "u16"),
    *vector("ld.global.v4.b16", 4, 16, "u16"),
    *vector("ld.global.v2.s32", 2, 32),
    *vector("ld.global.v2.u32", 2, 32),
    *vector("ld.global.v4.s32", 4, 32),
    *vector("ld.global.v2.u64", 2, 64),
    *vector_store("st.global.v2.b16", 2, 16, "u16"),
    *vector_store("st.global.v4.u16", 4, 16, "u16"),
    *vector_store("st.global.v2.s32", 2, 32),
    *vector_store("st.global.v2.u32", 2, 32),
    *vector_store("st.global.v4.s32", 4, 32),
    *vector_store("st.global.v4.u32", 4, 32),
    *rows("9.7.9", "st.global.{s8,s16}", "b32", "blob4", text="{op} [%q0], %s0;", rule="bits"),
    *rows("9.7.9", "ld.global.nc.{u32,f32}", "blob4", "b32", text="{op} %d0, [%p0];"),
    *rows("9.7.9", "ld.global.nc.{u64,f64}", "blob8", "b64", text="{op} %d0, [%p0];"),
    *rows("9.7.9", "st.global.s64", "b64", "blob8", text="{op} [%q0], %s0;", rule="bits"),
    *rows("9.7.9", "ld.shared.{b32,u32,s32,f32}", "b32", "b32", text="st.shared.{t} [%m+4], %s0; {op} %d0, [%m+4];"),
    *rows("9.7.9", "ld.shared.{b64,u64,s64,f64}", "b64", "b64", text="st.shared.{t} [%m+8], %s0; {op} %d0, [%m+8];"),
    *rows(
        "9.7.9",
        "ld.shared.v2.{f32,u32}",
        "b32 b32",
        "b32 b32",
        text="st.shared.v2.{t} [%m+8], {%s0, %s1}; {op} {%d1, %d0}, [%m+8];",
    ),
    *rows(
        "9.7.9",
        "ld.shared.v2.{f64,u64}",
        "b64 b64",
        "b64 b64",
        text="st.shared.v2.{t} [%m], {%s0, %s1}; {op} {%d1, %d0}, [%m];",
    ),
    *rows(
        "9.7.9",
        "ld.shared.v4.{f32,u32}",
        "b32 b32 b32 b32",
        "b32 b32 b32 b32",
        text="st.shared.v4.{t} [%m], {%s0, %s1, %s2, %s3}; {op} {%d3, %d2, %d1, %d0}, [%m];",
    ),
    *rows(
        "9.7.9",
        "st.shared.{s8,s16}",
        "b32 b32",
        "b32",
        text="st.shared.b32 [%m], %s0; {op} [%m+2], %s1; ld.shared.b32 %d0, [%m];",
    ),
    *rows(
        "9.7.9",
        "ld.local.{u32,f32}",
        "b32",
        "b32",
        text=".local .align 16 .b8 loc[16]; st.local.{t} [loc+4], %s0; {op} %d0, [loc+4];",
    ),
    *rows(
        "9.7.9",
        "ld.local.{u64,f64}",
        "b64",
        "b64",
        text=".local .align 16 .b8 loc[16]; st.local.{t} [loc+8], %s0; {op} %d0, [loc+8];",
    ),
    *rows(
        "9.7.9",
        "ld.local.{u8,s16}",
        "b32",
        "b32",
        text=".local .align 16 .b8 loc[16]; st.local.b32 [loc+4], %s0; {op} %d0, [loc+6];",
    ),
    *cached(),
    *rows("9.7.9", "ld.shared.{u8,s8,u16,s16}", "b32", "b32", text="st.shared.b32 [%m], %s0; {op} %d0, [%m+2];"),
    *rows(
        "9.7.9",
        "st.shared.{u8,u16}",
        "b32 b32",
        "b32",
        text="st.shared.b32 [%m], %s0; {op} [%m+2], %s1; ld.shared.b32 %d0, [%m];",
    ),
    *rows(
        "9.7.9",
        "ld.shared.v4.b32",
        "b32 b32 b32 b32",
        "b32 b32 b32 b32",
        text="st.shared.v4.b32 [%m], {%s0, %s1, %s2, %s3}; {op} {%d3, %d2, %d1, %d0}, [%m];",
    ),
    *rows("9.7.9", "ld.shared.b32", "b32", "b32", text=NEIGHBOUR, tag="of a neighbour's word", scope="warp"),
    *rows("9.7.9", "ld.local.v4.b32", "b32 u32", "b32 b32 b32 b32", text=DYNAMIC_LOCAL, tag="at dynamic indices"),
    *rows(
        "9.7.9",
        "ld.const.{u8,b32}",
        "u32",
        "b32",
        text=SYMBOL.replace("{symbol}", "cdata") + "{op} %d0, [%a];",
        tag="of a table",
        group="symbols",
    ),
    *rows(
        "9.7.9",
        "ld.const.v2.b32",
        "u32",
        "b32 b32",
        text=SYMBOL.replace("{symbol}", "cdata").replace("252", "248") + "{op} {%d0, %d1}, [%a];",
        tag="of a table",
        group="symbols",
    ),
    *rows(
        "9.7.9",
        "ld.global.b32",
        "u32",
        "b32",
        text=SYMBOL.replace("{symbol}", "gdata") + "{op} %d0, [%a];",
        tag="of a module variable",
        group="symbols",
    ),
    *rows(
        "9.7.9",
        "cvta.const.u64",
        "u32",
        "b32",
        text=SYMBOL.replace("{symbol}", "cdata") + "cvta.const.u64 %a, %a; ld.b32 %d0, [%a];",
        group="symbols",
    ),
    *rows("9.7.9", "cvta.shared.u64", "b32", "b32 b32", text=THROUGH_GENERIC),
    *rows(
        "9.7.9",
        "cvta.to.shared.u64",
        "b32",
        "b32",
        text=(
            ".reg .b64 %a; cvt.u64.u32 %a, %m; cvta.shared.u64 %a, %a; st.b32 [%a], %s0; {op} %a, %a;"
            " ld.shared.b32 %d0, [%a];"
        ),
    ),
    *rows("9.7.9", "cvta.local.u64", "b32", "b32 b32", text=LOCAL_GENERIC),
    *rows(
        "9.7.9",
        "cvta.to.global.u64",
        "b32",
        "b32",
        text=".reg .b64 %a; st.b32 [%c], %s0; {op} %a, %c; ld.global.b32 %d0, [%a];",
    ),
    *rows("9.7.9", "isspacep.{global,shared,local,const,shared::cta}", "u32", "pred", text=IS),
    *rows(
        "9.7.9",
        "prefetch.{global.L1,global.L2} prefetchu.L1",
        "blob4",
        "b32",
        text="{op} [%p0]; ld.global.b32 %d0, [%p0];",
    ),
    *rows(
        "9.7.9",
        "createpolicy.fractional.L2::evict_last.b64",
        "blob4",
        "b32",
        text=".reg .b64 %a; {op} %a, 1.0; ld.global.L2::cache_hint.b32 %d0, [%p0], %a;",
    ),
    *copy("cp.async.ca", 4, "blob4", ""),
    *copy("cp.async.ca", 8, "blob8", ""),
    *copy("cp.async.ca", 16, "blob16", ""),
    *copy("cp.async.cg", 16, "blob16", ""),
    *copy("cp.async.cg", 16, "blob16 u32:size16", ", %s1", " with a source size"),
    *copy("cp.async.ca", 4, "blob4 u32:size4", ", %s1", " with a source size"),
    *copy("cp.async.ca", 8, "blob8 u32:size8", ", %s1", " with a source size"),
    *copy("cp.async.ca", 4, "blob4", "", " in a group", "cp.async.commit_group; cp.async.wait_group 0;"),
    *rows("9.7.9 cp.async", "cp.async.wait_group", "blob8", "b32 b32", text=GROUPS, tag="two groups"),
    *(f for sem in ("", ".relaxed.gpu", ".acq_rel.sys") for f in atom(f"atom{sem}SPACE.add.u32", "u32 u32", "32")),
    *(
        f
        for op in (
            "add.s32",
            "add.f32",
            "min.u32",
            "max.u32",
            "min.s32",
            "max.s32",
            "and.b32",
            "or.b32",
            "xor.b32",
            "exch.b32",
            "inc.u32",
            "dec.u32",
        )
        for f in atom(f"atomSPACE.{op}", "$ $", "32")
    ),
    *(
        f
        for op in (
            "add.u64",
            "add.f64",
            "min.u64",
            "max.u64",
            "min.s64",
            "max.s64",
            "and.b64",
            "or.b64",
            "xor.b64",
            "exch.b64",
        )
        for f in atom(f"atomSPACE.{op}", "$ $", "64")
    ),
    *atom("atomSPACE.add.noftz.f16", "$ $", "16"),
    *atom("atomSPACE.add.noftz.f16x2", "$ $", "32"),
    *atom("atomSPACE.add.noftz.bf16", "$ $", "16", arch=90),
    *atom("atomSPACE.add.noftz.bf16x2", "$ $", "32", arch=90),
    *atom("atomSPACE.cas.b32", "u32 u32 u32", "32"),
    *atom("atomSPACE.cas.b64", "u64 u64 u64", "64"),
    *atom("atomSPACE.cas.b16", "u16 u16 u16", "16"),
    *atom("atomSPACE.cas.b32", "u32:few u32:few u32", "32", "of small values"),
    *atom("atomSPACE.cas.b64", "u64:few u64:few u64", "64", "of small values"),
    *atom("atomSPACE.cas.b16", "u16:few u16:few u16", "16", "of small values"),
    *(
        f
        for op in ("add.u32", "add.f32", "min.s32", "max.u32", "and.b32", "or.b32", "xor.b32", "inc.u32", "dec.u32")
        for f in red(f"redSPACE.{op}", "$ $", "32")
    ),
    *(
        f
        for op in ("add.u64", "add.f64", "min.s64", "max.u64", "and.b64", "or.b64", "xor.b64")
        for f in red(f"redSPACE.{op}", "$ $", "64")
    ),
    *red("redSPACE.add.noftz.f16", "$ $", "16"),
    *red("redSPACE.add.noftz.f16x2", "$ $", "32"),
    *red("redSPACE.add.noftz.bf16x2", "$ $", "32", 90),
    *red("red.relaxed.gpuSPACE.add.u32", "$ $", "32"),
    *red("red.release.gpuSPACE.add.u32", "$ $", "32"),
    *(
        f
        for op in ("add.u32", "min.s32", "max.u32", "and.b32", "or.b32", "xor.b32")
        for f in together(f"red.global.{op}", "u32 u32:wint", "u32", "32")
    ),
    *rows(
        "9.7.13",
        "{membar.cta,membar.gl,membar.sys,fence.acq_rel.cta,fence.acq_rel.gpu,fence.sc.gpu,fence.sc.sys}",
        "b32",
        "b32",
        text=PASS,
    ),
    *rows("9.7.19", "nanosleep.u32", "u32:few", "u32", text="{op} %s0; add.u32 %d0, %s0, 1;"),
    *rows("9.7.13", "red.global.add.u32", "u32:wint", "u32", text=GRID, tag="a barrier of all blocks", scope="warp"),
]
