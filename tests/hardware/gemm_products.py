"""Products of many tokens by Hopper's own instructions, and of few tokens, held to others: cases of test_h200."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from tegrad.llm import packing
from tegrad.llm.formats import BLOCK_TYPES, F32, Q4_K, Q6_K
from tegrad.llm.gemm import (
    AnyTile,
    Gemm,
    Operands,
    SmallMTile,
    StreamTile,
    Tile,
    WgmmaTile,
    fragment_order,
    pick_small_m,
)
from tegrad.llm.programs import Programs
from tegrad.llm.workspace import Workspace

TOKENS = 300
PLAIN = Tile(64, 64, 32, 32)
CASES: dict[str, tuple[Gemm, AnyTile]] = {
    **{f"{kind.name}": (Gemm(kind, 200, 1280), WgmmaTile(128, 128, stages=3)) for kind in BLOCK_TYPES.values()},
    "gated halves, 256 tokens": (
        Gemm(Q6_K, 4096, 2048, gated=True, activation="silu", half_out=True),
        WgmmaTile(256, 128),
    ),
    "shared tiles, residual, bias": (Gemm(Q6_K, 2048, 8192, add=True, bias=True), WgmmaTile(128, 64, blocks=250)),
    "two runs a stage, 64 tokens": (Gemm(Q4_K, 3072, 2048), WgmmaTile(64, 192, units=2)),
    "shared tiles, two blocks an SM": (Gemm(Q6_K, 2048, 2048), WgmmaTile(128, 128, resident=2, blocks=264)),
    "two runs a stage, 128 tokens": (Gemm(Q4_K, 3072, 2048), WgmmaTile(128, 128, units=2)),
    "32 tokens": (Gemm(Q4_K, 3072, 2048), WgmmaTile(32, 256, blocks=31)),
}
SMALL_M: dict[str, tuple[Gemm, AnyTile]] = {
    **{f"{kind.name}": (Gemm(kind, 200, 1280), SmallMTile(2, warps_m=2, stages=2)) for kind in BLOCK_TYPES.values()},
    **{
        f"{kind.name}, whole segments": (
            Gemm(kind, 200, 4096),
            StreamTile(4, stages=3 if kind.layout is None else 4, blocks=5),
        )
        for kind in BLOCK_TYPES.values()
        if kind is not F32
    },
    "gate and up of 1B": (
        Gemm(Q6_K, 8192, 2048, gated=True, activation="silu", half_out=True),
        StreamTile(4, stages=7, blocks=128),
    ),
    "down of 1B, two blocks an SM": (Gemm(Q6_K, 2048, 8192, add=True), StreamTile(1, 3, resident=2, blocks=64)),
    "down of 3B, split columns": (Gemm(Q6_K, 3072, 3072, add=True), SmallMTile(4, stages=3, splits=4)),
    "logits of 3B, a part of them": (Gemm(Q6_K, 16032, 3072), SmallMTile(4, stages=3, phases=2, blocks=132)),
}


def packed(gemm: Gemm, seed: int) -> np.ndarray:
    """Random bits in the kernels' order, with scales (or floats) that keep weights below one."""
    rng = np.random.default_rng(seed)
    values = (rng.standard_normal((gemm.rows, gemm.columns)) / 8).astype(np.float32)
    if gemm.kind.name in ("F32", "F16"):
        raw = values.astype(np.float32 if gemm.kind.name == "F32" else np.float16).view(np.uint8)
    elif gemm.kind.name == "BF16":
        raw = (values.view(np.uint32) >> 16).astype(np.uint16).view(np.uint8)
    else:
        raw = rng.integers(0, 256, (gemm.rows * gemm.columns // gemm.kind.elements, gemm.kind.size), dtype=np.uint8)
        gemm.kind.layout.spread.scale(raw, rng.uniform(1e-4, 2e-4, (len(raw), 1)))
    return packing.pack(gemm.kind, raw, gemm.rows, gemm.columns)


def product(device: Any, gemm: Gemm, tile: AnyTile, tokens: int) -> np.ndarray:
    """What a tile's kernel computes of random operands, the same for every tile."""
    rng = np.random.default_rng(7)
    workspace = Workspace(device)
    x = rng.standard_normal((tokens, gemm.columns)).astype(np.float16)
    before = rng.standard_normal((tokens, gemm.rows)).astype(np.float16 if gemm.half_out else np.float32)
    y = workspace.put(before.tobytes())
    on = Operands(
        y,
        workspace.put(x.tobytes()),
        workspace.put(packed(gemm, 1).tobytes()),
        workspace.put(np.array([tokens, 0, 0, 0], np.int32).tobytes()),
        workspace.put(packed(gemm, 2).tobytes()) if gemm.gated else None,
        workspace.put(rng.standard_normal(gemm.rows).astype(np.float32).tobytes()) if gemm.bias else None,
        workspace.put(bytes(max(16, tile.scratch_bytes(gemm, tokens)))),
        workspace.put(bytes(max(16, 4 * tile.counters(gemm, tokens)))),
    )
    launch = tile.launch(Programs(device), gemm, on, tokens)
    launch.program(*launch.buffers, global_size=launch.grid, local_size=launch.block, wait=True)
    out = bytearray(before.nbytes)
    device.allocator._copyout(memoryview(out), y)
    workspace.close()
    found = np.frombuffer(out, before.dtype).reshape(before.shape).astype(np.float64)
    return found[:, fragment_order(gemm.rows)] if gemm.half_out else found


def difference(device: Any, cases: Mapping[str, tuple[Gemm, AnyTile]], name: str) -> float:
    """The largest difference of the two kernels' results, of the largest result: they add the same in another order."""
    gemm, tile = cases[name]
    tokens = 8 * tile.nb if isinstance(tile, (SmallMTile, StreamTile)) else TOKENS
    expected, found = product(device, gemm, PLAIN, tokens), product(device, gemm, tile, tokens)
    return float(np.abs(found - expected).max() / np.abs(expected).max())


def limit(gemm: Gemm) -> float:
    """One unit of the result's last place, or the rounding of sums in float32."""
    return 1e-3 if gemm.half_out else 2e-5


def beyond_2_gib(device: Any) -> float:
    """The same for eight tokens and 160,000 F32 rows that begin within segments, against numpy.

    The matrix is 64 rows over and over, and 64 others at its end.
    """
    rows, some = 160_000, 64
    gemm = Gemm(F32, rows, 3584)
    rng = np.random.default_rng(7)
    x = rng.standard_normal((8, gemm.columns)).astype(np.float16)
    ordered = np.empty_like(x)
    ordered[:, fragment_order(gemm.columns)] = x
    w = (rng.standard_normal((2, some, gemm.columns)) / 8).astype(np.float32)
    first, last = (packing.pack(F32, part.view(np.uint8), some, gemm.columns).reshape(-1) for part in w)
    workspace, tile = Workspace(device), pick_small_m(device, gemm, 8)
    y = workspace.put(bytes(8 * rows * 4))
    on = Operands(
        y,
        workspace.put(ordered.tobytes()),
        workspace.put(np.concatenate([np.tile(first, rows // some - 1), last]).tobytes()),
        workspace.put(np.array([8, 0, 0, 0], np.int32).tobytes()),
        scratch=workspace.put(bytes(max(16, tile.scratch_bytes(gemm, 8)))),
        arrived=workspace.put(bytes(max(16, 4 * tile.counters(gemm, 8)))),
    )
    launch = tile.launch(Programs(device), gemm, on, 8)
    launch.program(*launch.buffers, global_size=launch.grid, local_size=launch.block, wait=True)
    out = bytearray(8 * rows * 4)
    device.allocator._copyout(memoryview(out), y)
    workspace.close()
    found = np.frombuffer(out, np.float32).reshape(8, rows // some, some).astype(np.float64)
    products = x.astype(np.float64) @ w.astype(np.float64).transpose(0, 2, 1)  # of both parts
    found[:, :-1] -= products[0][:, None]
    found[:, -1] -= products[1]
    return float(np.abs(found).max() / np.abs(products).max())
