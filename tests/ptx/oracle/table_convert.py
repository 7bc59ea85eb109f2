"""cvt between every pair of types, in every rounding (PTX ISA 9.7.9, cvt)."""

from tests.ptx.oracle.form import Form, rows

INTS = ("u8", "s8", "u16", "s16", "u32", "s32", "u64", "s64")
SECTION = "9.7.9 cvt"


def conversion(op: str, arch: int = 80, rule: str = "") -> list[Form]:
    return rows(SECTION, op, "$", "$1", arch=arch, rule=rule)


def saturates(d: str, s: str) -> bool:
    """Whether the destination lacks a value of the source: only then .sat is legal."""
    bits = int(d[1:]) - (d[0] == "s")
    return (s[0] == "s" and d[0] == "u") or int(s[1:]) - (s[0] == "s") > bits


FORMS = [
    *(f for d in INTS for s in INTS if d != s for f in conversion(f"cvt.{d}.{s}")),
    *(f for d in INTS for s in INTS if d != s and saturates(d, s) for f in conversion(f"cvt.sat.{d}.{s}")),
    *(f for s in INTS for f in conversion(f"cvt{{.rn,.rz,.rm,.rp}}.{{f16,f32,f64}}.{s}")),
    *(f for s in INTS[2:] for f in conversion(f"cvt{{.rn,.rz,.rm,.rp}}.bf16.{s}", arch=90)),
    *conversion("cvt.rn.sat.{f16,f32,f64}.s32"),
    *(f for d in INTS for f in conversion(f"cvt{{.rni,.rzi,.rmi,.rpi}}.{d}.{{f16,f32,f64}}")),
    *(f for d in INTS for f in conversion(f"cvt{{.rni,.rzi}}.ftz.{d}.f32 cvt.rzi.sat.{d}.f32")),
    *(f for d in INTS[2:] for f in conversion(f"cvt{{.rni,.rzi,.rmi,.rpi}}.{d}.bf16", arch=90)),
    *conversion("cvt{.rni,.rzi,.rmi,.rpi}.{f16.f16,f32.f32,f64.f64}"),
    *conversion("cvt{.rni,.rzi,.rmi,.rpi}.bf16.bf16", arch=90),
    *conversion("cvt{.rni,.rzi}{.ftz,.sat,.ftz.sat}.f32.f32"),
    *conversion("cvt.ftz.f32.f32 cvt.sat.{f16.f16,f32.f32,f64.f64} cvt.ftz.sat.f32.f32"),
    *conversion("cvt{.rn,.rz,.rm,.rp}{,.ftz}{,.sat}.f16.f32"),
    *conversion("cvt{.rn,.rz,.rm,.rp}.f16.f64 cvt{.rn,.rz,.rm,.rp}{,.ftz}{,.sat}.f32.f64"),
    *conversion("cvt{,.ftz}{,.sat}.f32.f16 cvt{,.sat}.f64.f16 cvt{,.ftz}{,.sat}.f64.f32"),
    *conversion("cvt{.rn,.rz}.relu.f16.f32"),
    *conversion("cvt{.rn,.rz}{,.relu}.bf16.f32"),
    *conversion("cvt.f32.bf16"),
    *conversion(
        "cvt.f64.bf16 cvt{.rn,.rz,.rm,.rp}.f16.bf16 cvt{.rn,.rz,.rm,.rp}.bf16.{f16,f64} cvt{.rm,.rp}.bf16.f32", arch=90
    ),
    *conversion("cvt.rna.tf32.f32", rule="tf32"),
    *conversion("cvt{.rn,.rz}{,.relu}.tf32.f32", arch=90, rule="tf32"),
    *rows(SECTION, "cvt{.rn,.rz}{,.relu}.{f16x2,bf16x2}.f32", "$ $", "$1"),
    *rows(SECTION, "cvt.rn.satfinite{,.relu}.{e4m3x2,e5m2x2}.f32", "$ $", "$1", arch=89),
    *rows(SECTION, "cvt.rn.satfinite{,.relu}.{e4m3x2,e5m2x2}.f16x2", "$", "$1", arch=89),
    *rows(SECTION, "cvt.rn{,.relu}.f16x2.{e4m3x2,e5m2x2}", "$", "$1", arch=89),
    *rows(SECTION, "cvt.pack.sat.{u16,s16}.s32", "$ $", "b32"),
    *rows(SECTION, "cvt.pack.sat.{u8,s8}.s32.b32", "s32 s32 b32", "b32"),
]
