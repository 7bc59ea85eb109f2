"""What the engine does not execute is refused when a module is loaded, by the instruction's name."""

from pathlib import Path

import pytest

from tegrad import ptx

ROWS = {
    "wgmma": "wgmma.fence.sync.aligned;",
    "cp.async.bulk.tensor": "cp.async.bulk.tensor.1d.shared::cluster.global.mbarrier::complete_tx::bytes"
    " [%r], [%l, {%r}], [%r];",
    "cp.async.bulk of other CTAs": "cp.async.bulk.shared::cluster.shared::cta.mbarrier::complete_tx::bytes"
    " [%r], [%r], 16, [%r];",
    "cp.async.bulk to several CTAs": "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes"
    ".multicast::cluster [%r], [%l], 16, [%r], %h;",
    "st.async": "st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.b32 [%r], %r, [%r];",
    "cp.reduce.async.bulk": "cp.reduce.async.bulk.global.shared::cta.bulk_group.add.u32 [%l], [%r], 16;",
    "barrier.cluster": "barrier.cluster.arrive;",
    "mapa": "mapa.u64 %l, %l, %r;",
    "getctarank": "getctarank.u64 %r, %l;",
    "stmatrix": "stmatrix.sync.aligned.m8n8.x1.shared.b16 [%r], {%r};",
    "tensormap": "tensormap.cp_fenceproxy.global.shared::cta.tensormap::generic.release.gpu.sync.aligned"
    " [%l], [%r], 128;",
    "multimem": "multimem.red.global.add.u32 [%l], %r;",
    "wmma": "wmma.load.a.sync.aligned.row.m16n16k16.f16 {%r, %r, %r, %r, %r, %r, %r, %r}, [%l];",
    "mma.sp": "mma.sp.sync.aligned.m16n8k16.row.col.f32.tf32.tf32.f32"
    " {%r, %r, %r, %r}, {%r, %r, %r, %r}, {%r, %r, %r, %r},"
    " {%r, %r, %r, %r}, %r, 0;",
    "mma of b1": "mma.sync.aligned.m16n8k256.row.col.s32.b1.b1.s32.and.popc"
    " {%r, %r, %r, %r}, {%r, %r, %r, %r}, {%r, %r},"
    " {%r, %r, %r, %r};",
    "mma m8n8k4 of f16": "mma.sync.aligned.m8n8k4.row.col.f32.f16.f16.f32"
    " {%r, %r, %r, %r, %r, %r, %r, %r}, {%r, %r}, {%r, %r},"
    " {%r, %r, %r, %r, %r, %r, %r, %r};",
    "atom of b128": "atom.exch.b128 %q, [%l], %q;",
    "atom of vectors": "atom.global.add.v2.f32 {%r, %r}, [%l], {%r, %r};",
    "redux of f32": "redux.sync.min.f32 %r, %r, 0xffffffff;",
    "s16x2, u16x2": "min.s16x2 %r, %r, %r;",
    "f32x2": "add.rn.f32x2 %l, %l, %l;",
    "video instructions": "vadd4.u32.u32.u32 %r, %r, %r, %r;",
    "tex, surfaces": "tex.1d.v4.f32.s32 {%r, %r, %r, %r}, [%l, {%r}];",
    "alloca, stacksave": "stacksave.u64 %l;",
    "istypep": "istypep.texref %p, %l;",
}


@pytest.mark.parametrize("name", ROWS)
def test_is_refused_by_name(name: str) -> None:
    text = ".version 8.5\n.target sm_90\n.address_size 64\n.visible .entry k(.param .u64 p0)\n{"
    text += f".reg .b16 %h; .reg .b32 %r; .reg .b64 %l; .reg .b128 %q; .reg .pred %p;\n{ROWS[name]}\nret; }}"
    with pytest.raises(ptx.PtxError, match=ROWS[name].split()[0].rstrip(";")):
        ptx.load(text, None)


def test_the_document_lists_what_is_refused() -> None:
    text = (Path(__file__).parents[2] / "docs" / "ptx.md").read_text()
    assert [n for n in ROWS if f"| {n} |" not in text] == []
