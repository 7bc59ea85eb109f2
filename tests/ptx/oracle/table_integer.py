"""Integer arithmetic, extended precision, logic and shifts (PTX ISA 9.7.1, 9.7.2, 9.7.8)."""

from tests.ptx.oracle.form import Form, rows

INT, INT16UP = "{u16,s16,u32,s32,u64,s64}", "9.7.1"
LUTS = (
    0x00,
    0xFF,
    0xF0,
    0xCC,
    0xAA,
    0x96,
    0xE8,
    0xCA,
    0xD8,
    0xFE,
    0x80,
    0x01,
    0x6A,
    0x1E,
    0x3C,
    0x5A,
    0x2D,
    0x47,
    0xB1,
    0x7B,
)
# x is the 64-bit product {%s0,%s1} * {%s2,%s3}, as compilers write it.
WIDE_PRODUCT = (
    "mul.lo.u32 %d0, %s0, %s2; mul.hi.u32 %d1, %s0, %s2; mad.lo.cc.u32 %d1, %s0, %s3, %d1;"
    "madc.hi.u32 %d2, %s0, %s3, 0;"
    "mad.lo.cc.u32 %d1, %s1, %s2, %d1; madc.hi.cc.u32 %d2, %s1, %s2, %d2; addc.u32 %d3, 0, 0;"
    "mad.lo.cc.u32 %d2, %s1, %s3, %d2; madc.hi.u32 %d3, %s1, %s3, %d3;"
)


def chain(base: str, t: str, links: int) -> Form:
    """A sum or difference of `links` words."""
    text = "".join(
        f"{base}{'c' if i else ''}{'.cc' if i < links - 1 else ''}.{t} %d{i}, %s{i}, %s{i + links}; "
        for i in range(links)
    )
    source, result = " ".join([t] * 2 * links), " ".join([t] * links)
    return rows("9.7.2", f"{base}.cc.{t}", source, result, text=text, tag=f"chain of {links}")[0]


FORMS = [
    *rows("9.7.1", f"{{add,sub}}.{INT}", "$ $"),
    *rows("9.7.1", "{add,sub}.sat.s32", "$ $"),
    *rows("9.7.1", f"mul.{{lo,hi}}.{INT}", "$ $"),
    *rows("9.7.1", "mul.wide.{u16,s16,u32,s32}", "$ $", "$w"),
    *rows("9.7.1", f"mad.{{lo,hi}}.{INT}", "$ $ $"),
    *rows("9.7.1", "mad.hi.sat.s32", "$ $ $"),
    *rows("9.7.1", "mad.wide.{u16,s16,u32,s32}", "$ $ $w", "$w"),
    *rows("9.7.1", "mul24.{lo,hi}.{u32,s32}", "$ $"),
    *rows("9.7.1", "mad24.{lo,hi}.{u32,s32} mad24.hi.sat.s32", "$ $ $"),
    *rows("9.7.1", f"sad.{INT}", "$ $ $"),
    *rows("9.7.1", f"{{div,rem}}.{INT}", "$ $"),
    *rows("9.7.1", "{abs,neg}.{s16,s32,s64}", "$"),
    *rows("9.7.1", f"{{min,max}}.{INT}", "$ $"),
    *rows("9.7.1", "{popc,clz}.{b32,b64}", "$", "u32"),
    *rows("9.7.1", "bfind{,.shiftamt}.{u32,s32,u64,s64}", "$", "u32"),
    *rows("9.7.1", "fns.b32", "u32 u32:lane u32:nth", "u32"),
    *rows("9.7.1", "brev.{b32,b64}", "$"),
    *rows("9.7.1", "bfe.{u32,s32,u64,s64}", "$ u32:shift u32:shift"),
    *rows("9.7.1", "bfi.{b32,b64}", "$ $ u32:shift u32:shift"),
    *rows("9.7.1", "szext.{clamp,wrap}.{u32,s32}", "$ u32:shift"),
    *rows("9.7.1", "bmsk.{clamp,wrap}.b32", "u32:shift u32:shift"),
    *rows("9.7.1", "dp4a.{u32,s32}.{u32,s32}", "u32 u32 u32", "u32"),
    *rows("9.7.1", "dp2a.{lo,hi}.{u32,s32}.{u32,s32}", "u32 u32 u32", "u32"),
    *(chain(b, t, n) for b in ("add", "sub") for t in ("u32", "s32", "u64", "s64") for n in (2, 4)),
    *rows(
        "9.7.2",
        "{mad.lo,mad.hi}.cc.{u32,s32,u64,s64}",
        "$ $ $",
        "$ $",
        text="{op} %d0, %s0, %s1, %s2; addc.{t} %d1, 0, 0;",
    ),
    *rows(
        "9.7.2",
        "madc.{lo,hi}.{u32,s32,u64,s64}",
        "$ $ $",
        "$ $",
        text="add.cc.{t} %d1, %s0, %s1; {op} %d0, %s0, %s1, %s2;",
    ),
    *rows(
        "9.7.2",
        "madc.{lo,hi}.cc.u32",
        "u32 u32 u32 u32",
        "u32 u32",
        text="add.cc.u32 %d1, %s3, %s1; {op} %d0, %s0, %s1, %s2; addc.u32 %d1, 0, 0;",
    ),
    *rows("9.7.2", "mad.lo.cc.u32", "u32 u32 u32 u32", "u32 u32 u32 u32", text=WIDE_PRODUCT, tag="64 x 64 bits"),
    *rows("9.7.8", "{and,or,xor}.{b16,b32,b64,pred}", "$ $"),
    *rows("9.7.8", "not.{b16,b32,b64,pred}", "$"),
    *rows("9.7.8", "cnot.{b16,b32,b64}", "$"),
    *(f for lut in LUTS for f in rows("9.7.8", "lop3.b32", "$ $ $", extra=f", {lut:#04x}")),
    *rows("9.7.8", "shf.{l,r}.{clamp,wrap}.b32", "$ $ u32:shift"),
    *rows("9.7.8", "shl.{b16,b32,b64}", "$ u32:shift"),
    *rows("9.7.8", "shr.{u16,s16,b16,u32,s32,b32,u64,s64,b64}", "$ u32:shift"),
    *(f for n in (0, 5, 31, 32, 40) for f in rows("9.7.8", "{shl.b32,shr.u32,shr.s32}", "$", extra=f", {n}")),
    *rows("9.7.9", "prmt.b32{,.f4e,.b4e,.rc8,.ecl,.ecr,.rc16}", "u32 u32 u32:prmt", "u32"),
    *(
        f
        for sel in (0x5410, 0x7632, 0x0123, 0x8888, 0xBA98, 0x4F0D)
        for f in rows("9.7.9", "prmt.b32", "u32 u32", extra=f", {sel:#06x}")
    ),
    *rows("9.7.9", "mov.b32", "u16 u16", "b32", text="{op} %d0, {%s0, %s1};", tag="pack"),
    *rows("9.7.9", "mov.b32", "b32", "u16 u16", text="{op} {%d0, %d1}, %s0;", tag="unpack"),
    *rows("9.7.9", "mov.b64", "u32 u32", "b64", text="{op} %d0, {%s0, %s1};", tag="pack"),
    *rows("9.7.9", "mov.b64", "b64", "u32 u32", text="{op} {%d0, %d1}, %s0;", tag="unpack"),
    *rows("9.7.9", "mov.b64", "u16 u16 u16 u16", "b64", text="{op} %d0, {%s0, %s1, %s2, %s3};", tag="pack of 4"),
    *rows("9.7.9", "mov.b64", "b64", "u16 u16 u16 u16", text="{op} {%d0, %d1, %d2, %d3}, %s0;", tag="unpack to 4"),
    *rows("9.7.9", "mov.{b16,u16,s16,b32,u32,s32,f32,b64,u64,s64,f64,pred}", "$", rule="bits"),
    *rows("9.3", "add.s32", "s32 s32 pred", text="mov.s32 %d0, %s1; @%s2 {op} %d0, %s0, %s1;", tag="predicated"),
    *rows(
        "9.3",
        "mul.lo.s32",
        "s32 s32 pred",
        text="mov.s32 %d0, %s1; @!%s2 {op} %d0, %s0, %s1;",
        tag="predicated, negated",
    ),
]
