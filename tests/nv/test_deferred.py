"""What tinygrad's NV runtime does without until it is used, in processes of their own: modules are loaded once."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tegrad.nv import deferred, kernel

HEAVY = "m.split('.')[-1] in ('nv_570', 'nv_580', 'nv_610', 'mesa', 'nvdev', 'nir', 'usb', 'compiler_cuda')"
LOADED = f"import sys; print(sorted(m.split('.')[-1] for m in sys.modules if m.startswith('tinygrad.') and {HEAVY}))"


def fresh(code: str, **environment: str) -> str:
    done = subprocess.run(
        [sys.executable, "-c", code], env={**os.environ, **environment}, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stdout.strip()


def test_the_runtime_comes_without_what_a_machine_does_not_need() -> None:
    assert fresh(f"import tegrad, tinygrad.runtime.ops_nv; {LOADED}", TEGRAD_BOARD="agx-orin-64gb") == "['nv_570']"


@pytest.mark.parametrize(("version", "module"), [("580.159.04", "nv_580"), ("575.1", "nv_570")])
def test_a_desktops_driver_has_one_form_of_the_structures(version: str, module: str, tmp_path: Path) -> None:
    (tmp_path / "version").write_text(version)
    code = f"""
from pathlib import Path
from tegrad.nv import kernel
kernel.DESKTOP_DRIVER = Path({str(tmp_path / "version")!r})
import tegrad, tinygrad.runtime.ops_nv, tegrad.nv.device
{LOADED}
"""
    assert fresh(code, TEGRAD_BOARD="") == f"['{module}']"


def test_what_was_deferred_is_there_when_it_is_used() -> None:
    code = """
import tegrad
import tinygrad.runtime.ops_nv as o
from tinygrad.runtime.autogen import mesa, nv_610
from tinygrad.runtime.support.nv.nvdev import NVDev
from tinygrad.renderer.nir import NAKRenderer
assert (mesa.__name__, nv_610.__name__) == ("tinygrad.runtime.autogen.mesa", "tinygrad.runtime.autogen.nv_610")
assert o.nv_610.NV01_DEVICE_0 == nv_610.NV01_DEVICE_0 and o.mesa.struct_nak_shader_info is mesa.struct_nak_shader_info
assert o.NVDev.__name__ == NVDev.__name__ and o.NVMemoryManager.va_allocator is not None
assert o.NAKRenderer.__name__ == NAKRenderer.__name__ and isinstance(object.__new__(NAKRenderer), o.NAKRenderer)
assert not isinstance(1, o.NAKRenderer) and o.nv_570.__name__ == "tinygrad.runtime.autogen.nv_570"
"""
    fresh(code, TEGRAD_BOARD="agx-orin-64gb")


def test_without_tegrad_everything_is_imported_as_ever() -> None:
    assert "nv_610" in fresh(f"import tegrad, tinygrad.runtime.ops_nv; {LOADED}", TEGRAD="0")


@pytest.mark.parametrize(
    ("version", "module"),
    [("580.159.04", "nv_580"), ("610.43", "nv_610"), ("575.1", "nv_570"), ("540.4.0", "nv_570"), ("", "nv_570")],
)
def test_the_structures_are_those_of_the_driver(
    version: str, module: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("TEGRAD_BOARD", raising=False)
    monkeypatch.setattr(kernel, "DESKTOP_DRIVER", tmp_path / "version")
    assert deferred.structures() == "nv_570"
    (tmp_path / "version").write_text(version + "\n")
    assert deferred.structures() == module
    monkeypatch.setenv("TEGRAD_BOARD", "agx-orin-64gb")
    assert deferred.structures() == "nv_570"
