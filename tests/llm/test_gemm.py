"""Products of many tokens with packed weights, against float64 on the same weights, on the board."""

from __future__ import annotations

import subprocess
import tempfile
from typing import Any

import numpy as np
import pytest
from gemm_operands import check, product
from operands import Operands as Placed
from tinygrad import dtypes
from tinygrad.device import TinyELF
from tinygrad.helpers import Target

from tegrad.llm import packing
from tegrad.llm.formats import BLOCK_TYPES, F16, F32, Q4_0, Q4_K, Q5_K, Q6_K, Q8_0, BlockType
from tegrad.llm.gemm import AnyTile, Gemm, Operands, SmallMTile, StreamTile, Tile, WgmmaTile, pick_alike
from tegrad.llm.programs import OPTIONS, Programs, compile_kernel, source
from tegrad.nv.compilers import compile_cuda
from tegrad.nv.cubin import Cubin
from tegrad.nv.toolchain import CompilerMissing, find_program

pytestmark = pytest.mark.board

SMALL = Tile(bm=32, bn=32, wm=16, wn=16, units=1, stages=3)
SPLIT = Tile(bm=32, bn=32, wm=16, wn=16, units=2, stages=2, splits=3)


@pytest.mark.parametrize("kind", list(BLOCK_TYPES.values()), ids=lambda kind: kind.name)
def test_every_format_is_multiplied_within_half_precision(opened: Any, operands: Placed, kind: BlockType) -> None:
    """45 tokens of 48, 37 rows of 2 tiles, 12 runs: rows that share segments, a partial last segment."""
    ours, expected = product(opened, operands, Gemm(kind, 37, 768), SMALL, 45)
    check(ours, expected)


@pytest.mark.parametrize(("largest", "sizes"), [(512, (32, 128, 512)), (128, (16, 128)), (40, (16, 40))])
def test_a_token_has_the_same_sums_in_chunks_and_steps_of_any_size(
    opened: Any, operands: Placed, largest: int, sizes: tuple[int, ...]
) -> None:
    """Bit by bit, by the tiles that an Orin's chip picks for that, whose columns are split."""
    gemm, found = Gemm(Q6_K, 40, 2048), []
    for most in sizes:
        tile = pick_alike(largest)(opened, gemm, most)
        assert isinstance(tile, Tile)
        assert tile.splits > 1
        found.append(product(opened, operands, gemm, tile, min(most, 20), most)[0])
    for ours in found:
        assert np.array_equal(ours[:8], found[0][:8])


EPILOGUES = {
    "gated halves": (Gemm(Q6_K, 48, 512, gated=True, activation="silu", half_out=True), SMALL),
    "split columns, residual, bias": (Gemm(Q6_K, 40, 1024, add=True, bias=True), SPLIT),
}


@pytest.mark.parametrize(("gemm", "tile"), list(EPILOGUES.values()), ids=list(EPILOGUES))
def test_epilogues_with_operands_at_the_edges_of_their_pages(
    opened: Any, operands: Placed, gemm: Gemm, tile: AnyTile
) -> None:
    ours, expected = product(opened, operands, gemm, tile, 33)
    check(ours, expected)


SMALL_M = {
    "gated halves, a tail of runs": (
        Gemm(Q4_0, 48, 704, gated=True, activation="silu", half_out=True), 13, SmallMTile(2, 1, 2, 2, stages=2),
    ),
    "residual, bias, blocks that share columns": (
        Gemm(Q6_K, 37, 1280, add=True, bias=True), 3, SmallMTile(1, 1, 1, 2, stages=2, splits=2),
    ),
    "halves": (Gemm(F16, 48, 768), 5, SmallMTile(1, 1, 1, 2, stages=2)),
    "fifth bits, minima, one block for all sets": (Gemm(Q5_K, 80, 512), 8, SmallMTile(1, 2, 1, 2, stages=2, blocks=2)),
    "bytes, x in parts, one block for all sets": (
        Gemm(Q8_0, 48, 1280, half_out=True, activation="gelu"), 11,
        SmallMTile(2, 1, 1, 2, stages=3, phases=3, blocks=1),
    ),
}  # fmt: skip


@pytest.mark.parametrize(("gemm", "tokens", "tile"), list(SMALL_M.values()), ids=list(SMALL_M))
def test_few_tokens_are_multiplied_by_warps_that_copy_their_own_weights(
    opened: Any, operands: Placed, gemm: Gemm, tokens: int, tile: SmallMTile
) -> None:
    ours, expected = product(opened, operands, gemm, tile, tokens, min(8 * tile.nb, tokens + 2))
    check(ours, expected)


PROBE = """
__shared__ unsigned long long lowest[THREADS], highest[THREADS];
static __device__ void note(unsigned, const unsigned char *from) {
    lowest[threadIdx.x] = min(lowest[threadIdx.x], (unsigned long long)from);
    highest[threadIdx.x] = max(highest[threadIdx.x], (unsigned long long)from);
}
"""
ASK = """
extern "C" __global__ void ask(unsigned long long *out, const unsigned char *w) {
    lowest[threadIdx.x] = ~0ull, highest[threadIdx.x] = 0;
    for (int group = 0; group < GROUPS; group++) Source(w, w, SETS - 1).copy(0, group);
    out[2 * threadIdx.x] = lowest[threadIdx.x] - (unsigned long long)w;
    out[2 * threadIdx.x + 1] = highest[threadIdx.x] - (unsigned long long)w;
}
"""


def test_the_last_rows_of_a_matrix_beyond_2_gib_are_read_where_they_lie(opened: Any, operands: Placed) -> None:
    """Rows that begin within a segment. Too many to multiply here: the addresses of the last set's copies are noted."""
    gemm, tile = Gemm(F32, 160_000, 3584), SmallMTile(1)
    head, _, _ = source("gemm_small_m.cu").partition('extern "C" __global__')
    struct, named, rest = head.partition("struct Source {")
    assert rest.count("copy_async_near<p.bytes>(") == 2
    text = struct + PROBE + named + rest.replace("copy_async_near<p.bytes>(", "note(") + ASK
    macros = {
        "NB": tile.nb, "MT": tile.mt, "WARPS_M": tile.warps_m, "WARPS_K": tile.warps_k, "STAGES": tile.stages,
        "SPLITS": 1, "PHASES": 1, "RESIDENT": 1, "MOST": 8, "OVERLAP": 0, **gemm.macros(),
    }  # fmt: skip
    options = [f"-D{name}={int(value) if isinstance(value, bool) else value}" for name, value in macros.items()]
    lib = compile_cuda(text, opened.arch, (*OPTIONS, *options))
    signature = tuple((f"p{at}", at, dtypes.char, (1,)) for at in range(2))
    ask = opened.runtime(TinyELF(lib, "ask", Target("NV", arch=opened.arch), signature))
    threads = 32 * tile.warps
    out = operands.zeros(2 * threads, np.uint64)
    ask(out, operands.zeros(16, np.uint8), global_size=(1, 1, 1), local_size=(threads, 1, 1), wait=True)
    lane = np.arange(threads) % 32
    row = gemm.rows - tile.rows + 16 * (np.arange(threads) // 32) + lane // 4  # and the eighth after it
    first = row * gemm.columns * 4 + lane % 4 * 256
    last = (row + 8) * gemm.columns * 4 + (gemm.columns // 64 - 4 + lane % 4) * 256 + 240
    assert last.max() == gemm.rows * gemm.columns * 4 - 16 > 1 << 31
    assert operands.get(out, (threads, 2), np.uint64).tolist() == np.stack([first, last], 1).tolist()


STREAM = {
    "gated halves": (
        Gemm(Q6_K, 48, 2048, gated=True, activation="silu", half_out=True), 13, StreamTile(2, stages=3, blocks=2),
    ),
    "residual, bias, several segments": (
        Gemm(Q6_K, 37, 4096, add=True, bias=True), 30, StreamTile(4, stages=4, blocks=2),
    ),
    "fifth bits, minima": (Gemm(Q5_K, 16, 4096), 3, StreamTile(1, stages=2, blocks=1)),
    "bytes": (Gemm(Q8_0, 40, 2048), 8, StreamTile(1, stages=2, blocks=9)),
    "halves": (Gemm(F16, 16, 2048), 8, StreamTile(1, stages=2)),
}  # fmt: skip


@pytest.mark.parametrize(("gemm", "tokens", "tile"), list(STREAM.values()), ids=list(STREAM))
def test_rows_of_whole_segments_stream_by_what_stays_in_registers(
    opened: Any, operands: Placed, gemm: Gemm, tokens: int, tile: StreamTile
) -> None:
    ours, expected = product(opened, operands, gemm, tile, tokens, min(8 * tile.nb, tokens + 2))
    check(ours, expected)


LARGE = {
    "128 x 128": (Gemm(Q6_K, 300, 512), Tile(128, 128, 64, 64)),
    "128 x 64, split": (Gemm(Q4_K, 300, 1024, add=True), Tile(128, 64, 64, 32, splits=2)),
    "256 x 64, two runs a stage": (
        Gemm(Q8_0, 80, 512, gated=True, half_out=True),
        Tile(256, 64, 64, 64, units=2, stages=2),
    ),
    "64 x 64": (Gemm(F16, 70, 512), Tile(64, 64, 64, 16)),
}


@pytest.mark.long
@pytest.mark.parametrize(("gemm", "tile"), list(LARGE.values()), ids=list(LARGE))
def test_tiles_as_they_are_picked(opened: Any, operands: Placed, gemm: Gemm, tile: AnyTile) -> None:
    ours, expected = product(opened, operands, gemm, tile, 131, 160)
    check(ours, expected)


@pytest.mark.parametrize("tile", [SmallMTile(1, warps_m=1, warps_k=2), SMALL], ids=["small M", "large M"])
def test_products_that_no_half_holds_become_infinite(opened: Any, tile: AnyTile) -> None:
    """They make everything after them NaN, which is noticed; the largest half would only be wrong."""
    operands = Placed(opened)
    x, w = np.full((1, 256), 100, np.float16), np.full((16, 256), 100, np.float16)
    y, count = operands.zeros((1, 16), np.float16), operands.put(np.array([1], np.int32))
    packed = operands.put(packing.pack(F16, w.view(np.uint8), 16, 256))
    launch = tile.launch(
        Programs(opened), Gemm(F16, 16, 256, half_out=True), Operands(y, operands.put(x), packed, count), 1
    )
    launch.program(*launch.buffers, global_size=launch.grid, local_size=launch.block, wait=True)
    assert (operands.get(y, (1, 16), np.float16) == np.inf).all()
    operands.free()


@pytest.mark.parametrize(
    ("tile", "arch"),
    [
        (Tile(128, 128, 64, 64, resident=2), "sm_87"),
        (SmallMTile(4, stages=3), "sm_87"),
        (StreamTile(4), "sm_87"),
        (StreamTile(4, stages=7), "sm_90"),
        (StreamTile(1, stages=3, resident=2), "sm_90"),
        (WgmmaTile(128, 128, resident=2, blocks=264), "sm_90"),
        (WgmmaTile(256, 64, stages=3, resident=2, blocks=264), "sm_90"),
    ],
    ids=["mma", "small M", "stream", "deep stream", "two streams", "wgmma", "wgmma, 256 tokens"],
)
def test_tiles_that_fill_an_sm_spill_nothing(tile: AnyTile, arch: str) -> None:
    made = []

    def compiled(name: str, *, buffers: int, features: str = "", **how: Any) -> None:
        made.append((name, Cubin(compile_kernel(name, arch + features, **how))))

    tokens = 8 * tile.nb if isinstance(tile, (SmallMTile, StreamTile)) else 512
    tile.launch(compiled, Gemm(Q6_K, 2048, 2048), Operands(None, None, None, None), tokens)  # type: ignore[arg-type]
    for name, cubin in made:
        assert cubin.stack(name) == 0
        assert cubin.registers(name) <= 255


@pytest.mark.parametrize(("blocks", "units"), [(0, 1), (264, 1), (0, 2)])
def test_products_of_warpgroups_are_not_taken_apart(blocks: int, units: int) -> None:
    """ptxas waits after each one where it does not trust what lies between them: then each has a start of its own."""
    try:
        disassembler = find_program("nvdisasm")
    except CompilerMissing:
        pytest.skip("no nvdisasm")
    made = []

    def compiled(name: str, *, buffers: int, features: str = "", **how: Any) -> None:
        made.append(compile_kernel(name, "sm_90" + features, **how))

    tile = WgmmaTile(128, 128, units, 4, 2 // units, blocks)
    tile.launch(compiled, Gemm(Q6_K, 2048, 2048), Operands(None, None, None, None), 512)  # type: ignore[arg-type]
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(made[0])
        file.flush()
        text = subprocess.run([disassembler, "-c", file.name], capture_output=True, text=True, check=True).stdout
    assert text.count("HGMMA.64x128x16") == 4 * units
    assert text.count("WARPGROUP.ARRIVE") == 1
