"""What the kernels of tegrad and of tinygrad use beside the forms of the other tables.

Then forms of those tables again whose every result is zero there, with inputs or a text that leave something.
"""

from tests.ptx.oracle.form import Form, rows
from tests.ptx.oracle.table_meeting import sides
from tests.ptx.oracle.table_memory import IS, SYMBOL, atom, together, vector, vector_store
from tests.ptx.oracle.table_warp import HANDOVER, some

FUNCTIONS = "\n".join(
    f".func (.param .{t} r) twice_{t}(.param .{t} a) {{ .reg .{t} %x; ld.param.{t} %x, [a];"
    f" {add} %x, %x, %x; st.param.{t} [r], %x; ret; }}"
    for t, add in (("b32", "add.u32"), ("b64", "add.u64"), ("f64", "add.rn.f64"), ("u32", "add.u32"),
                   ("s32", "add.s32"), ("u64", "add.u64"))
)  # fmt: skip
"""Functions in front of the kernel, of the forms whose group is `functions`."""

CALL = (
    ".param .{t} a@@; .param .{t} r@@; st.param.{t} [a@@+0], %s0; call.uni (r@@), twice_{t}, (a@@);"
    " ld.param.{t} %d0, [r@@+0];"
)
AND_SOURCE = "xor.b32 %d0, %d0, %s0;"
NEVER = IS + " .reg .pred %v; setp.eq.u32 %v, %s0, 7; xor.pred %d0, %d0, %v;"
MATCH = "{op} %d0|%d1, %v, 0xffffffff;"
UNIFORM = ".reg .pred %y; setp.ne.b32 %y, 1, 0; mov.b32 %d0, %s0; @%y {op} @@on; mov.b32 %d0, %s1; @@on:"


def loads(ops: str, source: str, result: str, text: str = "{op} %d0, [%p0];") -> list[Form]:
    return rows("9.7.9", ops, source, result, text=text, tag="used")


def through_shared(op: str, width: int, count: int = 1) -> list[Form]:
    """A load of what the lane has stored to shared memory."""
    names = ", ".join(f"%d{i}" for i in range(count))
    target = f"{{{names}}}" if count > 1 else names
    text = f"st.shared.b{width * count} [%m], %s0; {{op}} {target}, [%m];"
    return rows("9.7.9", op, f"b{width * count}", " ".join([f"b{width}"] * count), text=text, rule="bits")


def stores(ops: str, source: str, result: str) -> list[Form]:
    return rows("9.7.9", ops, source, result, text="{op} [%q0], %s0;", rule="bits", tag="used")


FORMS = [
    # Alone, arithmetic without a rounding mode is that of .rn; before an addition a product may be fused with it.
    *rows("9.7.3", "{add,sub,mul}.{f32,f64}", "$ $"),
    *rows("9.7.4", "{add,sub,mul}.{f16,f16x2}", "$ $"),
    *vector("ld.relaxed.gpu.global.v4.u32", 4, 32),
    *vector_store("st.relaxed.gpu.global.v4.u32", 4, 32),
    *vector("ld.global.L1::no_allocate.v2.u32", 2, 32),
    *vector("ld.global.L1::no_allocate.v4.u32", 4, 32),
    *vector("ld.global.nc.L1::no_allocate.v2.u32", 2, 32),
    *vector("ld.global.nc.L1::no_allocate.v4.u32", 4, 32),
    *vector("ld.global.nc.v4.u32", 4, 32),
    *vector("ld.global.cg.v4.f32", 4, 32),
    *vector("ld.global.cg.v4.u32", 4, 32),
    *vector_store("st.global.cg.v4.f32", 4, 32),
    *loads("ld.global.cg.{f32,u32} ld.global.nc.s32 ld.global.nc.L1::no_allocate.{u16,u32}", "blob4", "b32"),
    *loads("ld.global.cg.u64 ld.volatile.global.u64", "blob8", "b64"),
    *loads("ld.{u8,s8,u16,u32,f32}", "blob4", "b32"),
    *stores("st.{u8,u16,u32}", "b32", "blob4"),
    *stores("st.volatile.u32", "b32", "blob4"),
    *stores("st.volatile.global.u64", "b64", "blob8"),
    *through_shared("ld.volatile.shared.u32", 32),
    *through_shared("ld.shared.v2.u16", 16, 2),
    *rows("9.7.9", "ld.volatile.shared.u8", "b32", "b32", text="st.shared.b32 [%m], %s0; {op} %d0, [%m+2];"),
    *rows("9.7.9", "st.volatile.shared.u32", "b32", "b32", text="{op} [%m], %s0; ld.shared.b32 %d0, [%m];"),
    *rows(
        "9.7.9", "st.local.v2.u32", "b32 b32", "b32 b32",
        text=".local .align 8 .b8 loc[8]; .reg .b64 %l; mov.u64 %l, loc; {op} [%l], {%s0, %s1};"
        " ld.local.v2.b32 {%d1, %d0}, [%l];",
    ),
    *rows(
        "9.7.9", "st.local.v4.u8", "b32 b32 b32 b32", "b32",
        text=".local .align 4 .b8 loc[4]; .reg .b64 %l; mov.u64 %l, loc; {op} [%l], {%s0, %s1, %s2, %s3};"
        " ld.local.b32 %d0, [%l];",
    ),
    *rows(
        "9.7.9", "st.local.v4.f32", "b32 b32 b32 b32", "b32 b32 b32 b32",
        text=".local .align 16 .b8 loc[16]; .reg .b64 %l; mov.u64 %l, loc; {op} [%l], {%s0, %s1, %s2, %s3};"
        " ld.local.v4.b32 {%d3, %d2, %d1, %d0}, [%l];",
    ),
    *rows(
        "9.7.9", "ld.const.f32", "u32", "b32", text=SYMBOL.replace("{symbol}", "cdata") + "{op} %d0, [%a];",
        tag="of a table", group="symbols",
    ),
    *rows(
        "9.7.9", "createpolicy.fractional.L2::evict_first.b64", "blob4", "b32",
        text=".reg .b64 %a; {op} %a, 1.0; ld.global.L2::cache_hint.b32 %d0, [%p0], %a;",
    ),
    *atom("atom.acq_rel.gpuSPACE.inc.u32", "u32 u32", "32"),
    *rows("9.7.13", "barrier.arrive", "b32", "b32", text=HANDOVER.replace("bar.", "barrier."), scope="cta"),
    *rows(
        "9.7.13", "griddepcontrol.{wait,launch_dependents}", "b32", "b32",
        text="st.shared.b32 [%m], %s0; {op}; ld.shared.b32 %d0, [%m];", arch=90,
    ),
    *rows("9.7.12", "bra.uni", "b32 b32", "b32", text=UNIFORM),
    *(
        f
        for t, register in (("b32",) * 2, ("u32", "b32"), ("s32", "b32"), ("b64",) * 2, ("u64", "b64"), ("f64",) * 2)
        for f in rows(
            "9.7.12", "call.uni", register, register, text=CALL.replace("{t}", t), tag=f"of {t}", group="functions",
            rule="nan" if t == "f64" else "bits",
        )
    ),
    *rows("9.7.8", "cnot.b32", "$:zeros", tag="of zeros"),
    *rows(
        "9.7.8", "lop3.b32", "$ $ $", text="{op} %d0, %s0, %s1, %s2, 0x00;" + AND_SOURCE, tag="[0x00], and the source"
    ),
    *(
        f
        for n in (32, 40)
        for f in rows(
            "9.7.8", "{shl.b32,shr.u32}", "$", text=f"{{op}} %d0, %s0, {n};" + AND_SOURCE, tag=f"[{n}], and the source"
        )
    ),
    *rows("9.7.9", "isspacep.const", "u32", "pred", text=NEVER, tag="and the source"),
    *(
        Form(**{**vars(f), "name": f"{f.name} of ones"})
        for f in (
            *together("red.global.and.b32", "u32:ones u32:wones", "u32", "32"),
            *rows("9.7.13", "redux.sync.and.b32", "u32:ones", text="{op} %d0, %s0, 0xffffffff;", scope="warp"),
            *some("redux.sync.and.b32", "u32:ones u32:wmask", "u32", "{op} %d0, %s0, %s1;"),
        )
    ),
    *(
        Form(**{**vars(f), "name": f"{f.name} of bits"})
        for f in sides("match.all.sync.{b32,b64}", "$:wbit $:wbit", "b32 pred", MATCH)
    ),
]  # fmt: skip
