"""Compiled code is kept on disk: found again, safe against damage, and shared by processes that start together."""

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from tegrad import ptx
from tegrad.ptx import jit, module
from tests.ptx.forms import HEADER

ROOT = Path(__file__).parents[2]
TEXT = f"""{HEADER}.visible .entry k(.param .u64 p) {{ .reg .u64 %a; .reg .u32 %i; mov.u32 %i, %tid.x;
  ld.param.u64 %a, [p];
  mad.wide.u32 %a, %i, 4, %a; mad.lo.u32 %i, %i, 5, 3; st.global.u32 [%a], %i; ret; }}"""


def check(directory: Path) -> None:
    out = np.zeros(32, np.uint32)
    ptx.load(TEXT, directory).launch((1, 1, 1), (32, 1, 1), [out])
    assert (out == 5 * np.arange(32) + 3).all()


def objects(directory: Path) -> list[Path]:
    return [p for p in directory.rglob("*") if p.is_file()]


def test_the_second_load_compiles_nothing(tmp_path: Path) -> None:
    check(tmp_path)
    assert objects(tmp_path)
    real = jit.compile_ir
    try:
        jit.compile_ir = lambda *a: (_ for _ in ()).throw(AssertionError("compiled again"))
        check(tmp_path)
    finally:
        jit.compile_ir = real


def test_the_second_load_reads_no_text_and_knows_as_much(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    check(tmp_path)
    first = ptx.load(TEXT, tmp_path).kernels["k"]
    monkeypatch.setattr(module, "parse", None)
    monkeypatch.setattr(module, "Emitter", None)
    check(tmp_path)
    with pytest.raises(ptx.PtxFault) as caught:
        ptx.load(TEXT, tmp_path).launch((1, 1, 1), (32, 1, 1), [1])
    assert "st.global.u32 [%a], %i" in caught.value.source
    assert ptx.load(TEXT, tmp_path).kernels["k"].params == first.params


def test_what_the_engines_source_decides_is_read_anew_once_it_has_changed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    check(tmp_path)
    monkeypatch.setattr(module, "_sources", lambda: "other sources")
    monkeypatch.setattr(module, "parse", lambda text: (_ for _ in ()).throw(AssertionError("read anew")))
    with pytest.raises(AssertionError, match="read anew"):
        ptx.load(TEXT, tmp_path)


def test_an_object_that_is_gone_is_compiled_of_the_kept_kernel(tmp_path: Path) -> None:
    check(tmp_path)
    kernel = ptx.load(TEXT, tmp_path).kernels["k"]
    for path in objects(tmp_path):
        path.unlink()
    out = np.zeros(32, np.uint32)
    kernel.launch((1, 1, 1), (32, 1, 1), [out])
    assert (out == 5 * np.arange(32) + 3).all()


def test_damaged_objects_are_compiled_again(tmp_path: Path) -> None:
    check(tmp_path)
    for p in objects(tmp_path):
        p.write_bytes(p.read_bytes()[:-20])
    check(tmp_path)
    for p in objects(tmp_path):
        p.write_bytes(b"")
    check(tmp_path)


def test_a_cache_that_cannot_be_written_is_no_error(tmp_path: Path) -> None:
    blocked = tmp_path / "file"
    blocked.write_text("not a directory")
    check(blocked / "below")


def test_processes_that_start_together_share_the_cache(tmp_path: Path) -> None:
    code = (
        "import sys; from pathlib import Path; from tests.ptx.test_compile_cache import check; check(Path(sys.argv[1]))"
    )
    runs = [subprocess.Popen([sys.executable, "-c", code, str(tmp_path)], cwd=ROOT) for _ in range(3)]
    assert [r.wait(60) for r in runs] == [0, 0, 0]
    assert not [p for p in objects(tmp_path) if p.name.startswith("tmp")]
    check(tmp_path)
