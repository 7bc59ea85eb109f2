"""programs.py: what the compiler and the cache see of a kernel's source."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tegrad.bench.plans import DryDevice
from tegrad.hw.chips import CHIPS
from tegrad.llm import programs
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
FIRST = "__device__ int once(int v) { return v; }\n"
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
