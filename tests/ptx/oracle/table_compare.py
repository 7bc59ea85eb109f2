"""Comparison and selection (PTX ISA 9.7.6, 9.7.7)."""

from tests.ptx.oracle.form import rows

ORDERED = "{eq,ne,lt,le,gt,ge}"
FLOAT = "{eq,ne,lt,le,gt,ge,equ,neu,ltu,leu,gtu,geu,num,nan}"
BOOL = "{and,or,xor}"

FORMS = [
    *rows("9.7.6", f"setp.{ORDERED}.{{u16,s16,u32,s32,u64,s64}}", "$ $", "pred pred"),
    *rows("9.7.6", "setp.{lo,ls,hi,hs}.{u16,u32,u64} setp.{eq,ne}.{b16,b32,b64}", "$ $", "pred"),
    *rows("9.7.6", f"setp.{FLOAT}{{,.ftz}}.f32 setp.{FLOAT}.f64", "$ $", "pred pred"),
    *rows("9.7.6", f"setp.{{lt,ne}}.{BOOL}.{{s32,u64}} setp.{{ge,neu}}.{BOOL}.{{f32,f64}}", "$ $ pred", "pred pred"),
    *rows(
        "9.7.6",
        "setp.lt.and.s32",
        "$ $ pred",
        "pred pred",
        text="{op} %d0|%d1, %s0, %s1, !%s2;",
        tag="of a negated predicate",
    ),
    *rows("9.7.7", f"setp.{FLOAT}{{,.ftz}}.f16", "$ $", "pred"),
    *rows("9.7.7", f"setp.{FLOAT}.bf16", "$ $", "pred", arch=90),
    *rows("9.7.7", f"setp.{FLOAT}.f16x2", "$ $", "pred pred"),
    *rows("9.7.7", f"setp.{FLOAT}.bf16x2", "$ $", "pred pred", arch=90),
    *rows("9.7.7", f"setp.gtu.{BOOL}.f16", "$ $ pred", "pred"),
    *rows("9.7.6", f"set.{ORDERED}.{{u32,s32,f32}}.{{s32,u32,s64,u16}}", "$ $", "$1"),
    *rows("9.7.6", f"set.{FLOAT}.{{u32,f32}}.{{f32,f64}} set.{FLOAT}.ftz.f32.f32", "$ $", "$1"),
    *rows("9.7.6", f"set.{{lt,geu}}.{BOOL}.{{u32,s32,f32}}.f32", "$ $ pred", "$1"),
    *rows("9.7.7", f"set.{FLOAT}.{{f16,u16,u32}}.f16", "$ $", "$1"),
    *rows("9.7.7", f"set.{FLOAT}.f16x2.f16x2 set.lt.f16.{{f32,s32}}", "$ $", "$1"),
    *rows("9.7.7", f"set.{FLOAT}.{{bf16.bf16,bf16x2.bf16x2}}", "$ $", "$1", arch=90),
    *rows("9.7.6", "selp.{b16,u16,s16,b32,u32,s32,f32,b64,u64,s64,f64}", "$ $ pred", rule="bits"),
    *rows("9.7.6", "slct.{b16,u16,s16,b32,u32,s32,f32,b64,u64,s64,f64}.s32", "$1 $1 $", "$1", rule="bits"),
    *rows("9.7.6", "slct{,.ftz}.{b32,f32,u64}.f32", "$1 $1 $", "$1", rule="bits"),
]
