"""Kernels by hand for the GPU of `gpu_rig`: (address p, 64-bit number)."""

HEAD = ".version 7.5\n.target sm_80\n.address_size 64\n"

ADD_ONE = (
    HEAD
    + """
.visible .entry add_one(.param .u64 p, .param .u64 n)
{
    .reg .b64 %a; .reg .b32 %w; .reg .b32 %c; .reg .b64 %o;
    mov.u32 %c, %ctaid.x;
    mul.wide.u32 %o, %c, 4;
    ld.param.u64 %a, [p];
    add.u64 %a, %a, %o;
    ld.global.u32 %w, [%a];
    add.u32 %w, %w, 1;
    st.global.u32 [%a], %w;
    ret;
}
"""
)
"""Add one to each CTA's own word of those at p."""

SPIN = """
.version 7.5
.target sm_80
.address_size 64
.visible .entry spin(.param .u64 p, .param .u64 unused)
{
    .reg .b64 %a; .reg .b32 %v; .reg .pred %q;
    ld.param.u64 %a, [p];
L:  atom.global.add.u32 %v, [%a+64], 1;
    ld.volatile.global.u32 %v, [%a];
    setp.eq.u32 %q, %v, 0;
    @%q bra L;
    ret;
}
"""
"""Count at p+64 until the word at p is set."""
