"""Floating point: f32 and f64, halves and bfloat16 (PTX ISA 9.7.3, 9.7.4).

Rules of approximations: `approx:F:REL:ABS` allows an error of 2^REL of the true F(x), or of 2^ABS, whichever is more;
the bounds are those of the instruction's section. Both the engine and silicon are held to it.
"""

from tests.ptx.oracle.form import Form, rows

RND = "{.rn,.rz,.rm,.rp}"


def approx(
    pattern: str,
    function: str,
    relative: str,
    absolute: str = "",
    source: str = "$",
    arch: int = 80,
    section: str = "9.7.3",
) -> list[Form]:
    return rows(section, pattern, source, rule=f"approx:{function}:{relative}:{absolute}", arch=arch)


FORMS = [
    *rows("9.7.3", "testp.{finite,infinite,number,notanumber,normal,subnormal}.{f32,f64}", "$", "pred"),
    *rows("9.7.3", "copysign.{f32,f64}", "$ $", rule="bits"),
    *rows("9.7.3", f"{{add,sub,mul}}{RND}{{,.ftz}}{{,.sat}}.f32", "$ $"),
    *rows("9.7.3", f"{{add,sub,mul}}{RND}.f64", "$ $"),
    *rows("9.7.3", f"fma{RND}{{,.ftz}}{{,.sat}}.f32", "$ $ $"),
    *rows("9.7.3", f"fma{RND}.f64", "$ $ $"),
    *rows("9.7.3", "mad{.rn,.rz}{,.ftz}.f32 mad{.rn,.rp}.f64", "$ $ $"),
    *rows("9.7.3", f"div{RND}{{,.ftz}}.f32", "$ $"),
    *rows("9.7.3", f"div{RND}.f64", "$ $"),
    *rows("9.7.3", f"{{rcp,sqrt}}{RND}{{,.ftz}}.f32", "$"),
    *rows("9.7.3", f"{{rcp,sqrt}}{RND}.f64", "$"),
    *rows("9.7.3", "{abs,neg}{,.ftz}.f32", "$"),
    *rows("9.7.3", "{abs,neg}.f64", "$"),
    *rows("9.7.3", "{min,max}{,.ftz}{,.NaN}{,.xorsign.abs}.f32", "$ $"),
    *rows("9.7.3", "{min,max}.f64", "$ $"),
    *rows("9.7.3", "div.approx{,.ftz}.f32", "$ $", rule="approx:divapprox:-22:"),
    *rows("9.7.3", "div.full{,.ftz}.f32", "$ $", rule="approx:div:-22:"),
    *approx("rcp.approx{,.ftz}.f32", "rcp", "-23"),
    *approx("rcp.approx.ftz.f64", "rcp", "-19"),
    *approx("sqrt.approx{,.ftz}.f32", "sqrt", "-23"),
    *approx("rsqrt.approx{,.ftz}.f32", "rsqrt", "-22.9"),
    *approx("rsqrt.approx.ftz.f64", "rsqrt", "-19"),
    *approx("rsqrt.approx.f64", "rsqrt", "-50"),
    *approx("{sin,cos}.approx{,.ftz}.f32", "$base", "", "angle", "$:angle"),
    *approx("lg2.approx{,.ftz}.f32", "lg2", "-22", "-22"),
    *approx("ex2.approx{,.ftz}.f32", "ex2", "-22"),
    *approx("tanh.approx.f32", "tanh", "-11", "", "$:tame"),
    *rows("9.7.4", "{add,sub,mul}.rn{,.ftz}{,.sat}.{f16,f16x2}", "$ $"),
    *rows("9.7.4", "{add,sub,mul}.rn.{bf16,bf16x2}", "$ $", arch=90),
    *rows("9.7.4", "fma.rn{,.ftz}{,.sat,.relu}.{f16,f16x2}", "$ $ $"),
    *rows("9.7.4", "fma.rn{,.relu}.{bf16,bf16x2}", "$ $ $"),
    *rows("9.7.4", "{neg,abs}{,.ftz}.{f16,f16x2}", "$"),
    *rows("9.7.4", "{neg,abs}.{bf16,bf16x2}", "$"),
    *rows("9.7.4", "{min,max}{,.ftz}{,.NaN}.{f16,f16x2}", "$ $"),
    *rows("9.7.4", "{min,max}{,.ftz}{,.NaN}.xorsign.abs.{f16,f16x2}", "$ $", arch=86),
    *rows("9.7.4", "{min,max}{,.NaN}.{bf16,bf16x2}", "$ $"),
    *rows("9.7.4", "{min,max}{,.NaN}.xorsign.abs.{bf16,bf16x2}", "$ $", arch=86),
    *approx("tanh.approx.{f16,f16x2}", "tanh", "", "-10.987", section="9.7.4"),
    *approx("tanh.approx.{bf16,bf16x2}", "tanh", "", "-8", arch=90, section="9.7.4"),
    *approx("ex2.approx.{f16,f16x2}", "ex2", "-9.9", section="9.7.4"),
    *approx("ex2.approx.ftz.{bf16,bf16x2}", "ex2", "-7", arch=90, section="9.7.4"),
]
