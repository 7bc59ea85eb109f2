"""The table of formats: ggml's sizes, what C is told of it, and that nothing else knows a format by its name."""

import re
import shutil
import subprocess
from pathlib import Path

import numpy as np
import pytest
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType, quants

from tegrad.llm import formats, programs
from tegrad.llm.formats import FORMATS, PACKED, BlockType

LLM = Path(formats.__file__).parent
EACH = pytest.mark.parametrize("kind", FORMATS, ids=lambda kind: kind.name)
EACH_PACKED = pytest.mark.parametrize("kind", PACKED, ids=lambda kind: kind.name)

TABLE_IN_C = """
#include <stdio.h>
#define SHOW(place, member, type, base, shift) printf("%d %s %d %d ", place, #member, base, shift);
#define NAME(X, ...) #X " "
int main(void) {
    printf("%d %d ", OF_KIND(BYTES), OF_KIND(PIECES));
    OF_KIND(HEAD)(SHOW)
    puts(EVERY_FORMAT(NAME));
}
"""


@EACH
def test_a_block_is_ggmls(kind: BlockType) -> None:
    theirs = GGMLQuantizationType[kind.name]
    assert (kind.number, kind.elements, kind.size) == (theirs.value, *GGML_QUANT_SIZES[theirs])


@EACH_PACKED
def test_planes_and_pieces_are_the_files_bytes(kind: BlockType) -> None:
    assert kind.layout is not None
    pieces = sum(piece.segment_bytes for piece in kind.layout.pieces)
    assert formats.PLANE_BYTES * kind.layout.planes + pieces == kind.segment_bytes


@EACH_PACKED
def test_blocks_taken_apart_and_put_together_are_the_same(kind: BlockType) -> None:
    assert kind.layout is not None
    blocks = np.random.default_rng(1).integers(0, 256, (9, kind.size), dtype=np.uint8)
    integers, fields = kind.layout.taken_apart(blocks)
    assert integers.shape == (9, 0 if kind.booked else kind.elements)
    np.testing.assert_array_equal(kind.layout.put_together(integers, fields), blocks)


@EACH_PACKED
def test_every_integer_is_within_its_bounds(kind: BlockType) -> None:
    """kernels/large.cu takes the largest weight that a scale allows from them."""
    assert kind.layout is not None
    rng = np.random.default_rng(2)
    blocks = rng.integers(0, 256, (400, kind.size), dtype=np.uint8)
    integers, _ = kind.layout.taken_apart(blocks)
    found = integers.view(np.int8) if kind.layout.lowest == -128 else integers.astype(int) + kind.layout.lowest
    if kind.layout.codes:
        found = np.array(kind.layout.codes)[formats.book(kind.name) if kind.booked else integers]
    if kind.booked:
        found = np.concatenate([found, -found])  # the signs are apart
    assert (found.min(), found.max()) == (kind.layout.lowest, kind.layout.highest)


@pytest.mark.skipif(not shutil.which("gcc"), reason="no C compiler here")
@EACH
def test_c_finds_the_table_by_a_formats_number(kind: BlockType, tmp_path: Path) -> None:
    (tmp_path / "table.c").write_text(formats.header() + TABLE_IN_C)
    command = ["gcc", f"-DKIND={kind.number}", str(tmp_path / "table.c"), "-o", str(tmp_path / "table")]
    subprocess.run(command, check=True)
    told = subprocess.run([tmp_path / "table"], check=True, capture_output=True, text=True).stdout.split()
    assert told[0] == str(kind.segment_bytes)
    assert told[-len(FORMATS) :] == [one.name for one in FORMATS]
    own = sorted((piece.member, piece.shift) for piece in (kind.layout.pieces if kind.layout else ()))
    middle = told[2 : -len(FORMATS)]
    assert sorted((middle[at + 1], int(middle[at + 3])) for at in range(0, len(middle), 4)) == own


@pytest.mark.parametrize("kind", [kind for kind in PACKED if kind.booked], ids=lambda kind: kind.name)
def test_a_code_book_is_ggmls(kind: BlockType) -> None:
    theirs = getattr(quants, kind.name)
    theirs.init_grid()
    np.testing.assert_array_equal(np.array(kind.layout.codes)[formats.book(kind.name)], theirs.grid[0, 0])


def test_a_format_is_known_by_name_in_few_places() -> None:
    """Its row; how it is made for tests, and read by tinygrad's graph; and kernels' sources."""
    name = re.compile("|".join(rf"\b{kind.name}\b" for kind in PACKED if kind.name != "Q8_0"))  # also a cache's format
    sources = [path for path in LLM.rglob("*") if path.suffix in (".py", ".cu", ".cuh")]
    known = {path.name for path in sources if name.search(path.read_text())}
    assert known == {"formats.py", "quantize.py", "dequant.py", "blocks.cuh", "books.cuh", "repack.cu"}


def test_kernels_include_the_table_once() -> None:
    text = programs.source("persistent.cu")
    assert text.count("#define KIND_Q6_K 14\n") == 1
