"""programs.py: what the compiler and the cache see of a kernel's source."""

import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tegrad.bench.plans import DryDevice
from tegrad.hw.chips import CHIPS
from tegrad.llm import programs
from tegrad.llm.errors import ModelError
from tegrad.nv import compilers

pytestmark = pytest.mark.board

KERNEL = """
// A comment.
#include "first.cuh"

#include "second.cuh"
#include "first.cuh"

#include "first.cuh"
extern "C" __global__ void tiny(int *out, int value) {
    *out = twice(value) + ADDED;
}
"""
FIRST = "#pragma once\n__device__ int once(int v) { return v; }\n"
SECOND = '#include "first.cuh"\n__device__ int twice(int v) {\n    return 2 * once(v);\n}\n'


@pytest.fixture
def kernels(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder of sources in the place of the package's own, and an empty cache."""
    folder = tmp_path / "kernels"
    folder.mkdir()
    for name, text in (("tiny.cu", KERNEL), ("first.cuh", FIRST), ("second.cuh", SECOND)):
        (folder / name).write_text(text)
    monkeypatch.setattr(programs.resources, "files", lambda package: tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    programs.source.cache_clear()
    yield folder
    programs.source.cache_clear()


def test_a_header_that_does_not_say_once_is_expanded_again(kernels: Path) -> None:
    (kernels / "first.cuh").write_text(FIRST.replace("#pragma once\n", ""))
    assert programs.source("tiny.cu").count("int once(") == 4


def test_a_header_is_expanded_once_and_before_what_uses_it(kernels: Path) -> None:
    text = programs.source("tiny.cu")
    assert text.count("int once(") == 1
    assert text.index("int once(") < text.index("int twice(") < text.index("void tiny(")
    assert not any(line.startswith("#include") for line in text.splitlines())


@pytest.mark.parametrize(("file", "at"), [("tiny.cu", "    *out"), ("second.cuh", "    return")])
def test_an_error_names_the_file_and_the_line(kernels: Path, file: str, at: str) -> None:
    path = kernels / file
    lines = path.read_text().splitlines()
    number = next(index for index, line in enumerate(lines) if line.startswith(at))
    lines[number] = f"wrong; {lines[number]}"
    path.write_text("\n".join(lines))
    with pytest.raises(compilers.CompileFailed, match=rf"{file}\({number + 1}\): error"):
        programs.compile_kernel("tiny", "sm_87", ADDED=1)


def test_a_changed_header_or_macro_is_compiled_anew(kernels: Path) -> None:
    first = programs.compile_kernel("tiny", "sm_87", ADDED=1)
    assert programs.compile_kernel("tiny", "sm_87", ADDED=1) == first
    assert programs.compile_kernel("tiny", "sm_87", ADDED=2) != first
    assert len(list(compilers.cache_dir().glob("*.cubin"))) == 2
    (kernels / "first.cuh").write_text(FIRST.replace("return v", "return v + 1"))
    programs.source.cache_clear()  # a later process
    assert programs.compile_kernel("tiny", "sm_87", ADDED=1) != first
    assert len(list(compilers.cache_dir().glob("*.cubin"))) == 3


def test_a_kernels_arguments_have_the_places_in_which_they_are_given(kernels: Path) -> None:
    """Pointers first, then values: tinygrad's runtimes go by a signature's order, or by the places that it names."""
    device = DryDevice(CHIPS["agx-orin-64gb"])
    signature = programs.load_kernel(device, "tiny", buffers=2, values=3, ADDED=1).signature
    assert [place for _, place, *_ in signature] == [0, 1, 2, 3, 4]
    assert [shape == () for *_, shape in signature] == [False, False, True, True, True]
    assert len({name for name, *_ in signature}) == 5


def test_kernels_are_compiled_side_by_side_and_then_only_loaded(kernels: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(programs, "compilers", lambda: 2)
    both, real, compiled = threading.Barrier(2, timeout=30), programs.compile_cuda, list[str]()

    def waiting(source: str, arch: str, *given: Any, **how: Any) -> bytes:
        compiled.append(threading.current_thread().name)
        if len(compiled) <= 2:
            both.wait()  # nobody comes here where one waits for the other
        return real(source, arch, *given, **how)

    monkeypatch.setattr(programs, "compile_cuda", waiting)
    made = programs.Programs(DryDevice(CHIPS["agx-orin-64gb"]))
    with programs.compiled_together():
        for added in (1, 2, 2):
            assert made("tiny", buffers=1, values=1, ADDED=added) is None
        assert not compiled
    assert len(set(compiled)) == len(compiled) == 2
    monkeypatch.setattr("tegrad.nv.toolchain.Nvrtc.compile", lambda *given, **how: pytest.fail("compiled again"))
    loaded = [made("tiny", buffers=1, values=1, ADDED=added) for added in (1, 2)]
    assert [program.name for program in loaded] == ["tiny", "tiny"]
    with programs.compiled_together():
        assert made("tiny", buffers=1, values=1, ADDED=1) is loaded[0]


@pytest.mark.parametrize(
    ("cores", "free", "expected"), [(12, 48 << 30, 8), (6, 48 << 30, 6), (6, 3 << 30, 3), (6, 300 << 20, 1), (1, 0, 1)]
)
def test_as_many_kernels_compile_at_once_as_cores_and_free_memory_allow(
    cores: int, free: int, expected: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("os.sched_getaffinity", lambda pid: set(range(cores)))
    monkeypatch.setattr(programs, "available_memory", lambda: free)
    assert programs.compilers() == expected


def test_a_kernel_that_does_not_compile_says_so_where_it_is_loaded(kernels: Path) -> None:
    made = programs.Programs(DryDevice(CHIPS["agx-orin-64gb"]))
    with programs.compiled_together():
        made("tiny", buffers=1, values=1)
        made("tiny", buffers=1, values=1, ADDED=3)
    with pytest.raises(compilers.CompileFailed, match="ADDED"):
        made("tiny", buffers=1, values=1)
    assert made("tiny", buffers=1, values=1, ADDED=3).name == "tiny"


def test_what_a_model_refuses_is_refused_before_anything_compiles(
    kernels: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(programs, "compile_cuda", lambda *given, **how: pytest.fail("compiled"))
    made = programs.Programs(DryDevice(CHIPS["agx-orin-64gb"]))

    @programs.compiled_together()
    def launches() -> None:
        made("tiny", buffers=1, values=1, ADDED=1)
        raise ModelError("no")

    with pytest.raises(ModelError, match="no"):
        launches()


def test_what_no_cache_keeps_is_compiled_once(kernels: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", "/proc/nowhere")
    monkeypatch.setattr(programs, "compilers", lambda: 2)
    compiled, real = [], programs.compile_cuda
    monkeypatch.setattr(programs, "compile_cuda", lambda *given, **how: compiled.append(1) or real(*given, **how))
    made = programs.Programs(DryDevice(CHIPS["agx-orin-64gb"]))
    for _ in range(2):
        with programs.compiled_together():
            made("tiny", buffers=1, values=1, ADDED=1)
            made("tiny", buffers=1, values=1, ADDED=2)
    assert [made("tiny", buffers=1, values=1, ADDED=added).name for added in (1, 2)] == ["tiny", "tiny"]
    assert len(compiled) == 2
