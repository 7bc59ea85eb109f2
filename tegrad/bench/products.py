"""How near each product of a decode step comes to the memory's bandwidth, and which launch configuration comes nearest.

    python -m tegrad.bench.products 1b-q6k 8b-q4k          a line a product: bytes, microseconds, share of the bandwidth
    python -m tegrad.bench.products 1b-q6k --sweep         all of `CANDIDATES`, the best of each product

Each product runs as the decode plan launches it, in a recording of dependent launches that go through so many copies of
the weights that none is in a cache when its turn comes again. A time is the GPU's, the slope between recordings of two
lengths: what a launch adds to a step, its dependency included. The bandwidth is measured in the same process by a
kernel that only reads.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from itertools import product as combinations
from multiprocessing import get_context
from typing import Any, Final

import numpy as np

from tegrad.bench.dependencies import FORMS, HOPPER, gpu_us, opened
from tegrad.bench.models import SHAPES
from tegrad.hw.chips import by_arch
from tegrad.llm.arch import Config
from tegrad.llm.chips import Role, Tuning
from tegrad.llm.formats import BLOCK_TYPES, PLAIN, BlockType
from tegrad.llm.launch_config import fit, launch_config
from tegrad.llm.matvec import LaunchConfig, Part, Product
from tegrad.llm.packing import segments
from tegrad.nv import roles
from tegrad.nv.compilers import CompileFailed, compile_cuda
from tegrad.nv.gpu import Gpu
from tegrad.nv.replay import Dependency, Launch
from tegrad.nv.spec import MemorySpec

SPEC: Final = MemorySpec(nolru=True, role=roles.WEIGHTS)
ROTATION_BYTES: Final = 1200 << 20
"""Bytes of weights that the launches go through: twenty times an H200's second-level cache."""
LEAST_LAUNCHES: Final = 24
"""Launches of the shorter recording, at least."""
FILLING_BYTES: Final = 64 << 20
"""Random bytes that are repeated in the weights."""
READ_BYTES: Final = 4 << 30

KINDS: Final[Mapping[str, BlockType]] = {kind.name.lower().replace("_k", "k"): kind for kind in BLOCK_TYPES.values()}
"""By the name that ends a model's (`tegrad.bench.models`)."""

READ: Final = """
extern "C" __global__ void read(unsigned *out, const uint4 *from) {
    const uint4 *mine = from + (long long)blockIdx.x * 4096 + threadIdx.x;
    uint4 v[8];
#pragma unroll
    for (int i = 0; i < 8; i++)
        asm volatile("ld.global.nc.L1::no_allocate.v4.u32 {%0, %1, %2, %3}, [%4];"
                     : "=r"(v[i].x), "=r"(v[i].y), "=r"(v[i].z), "=r"(v[i].w) : "l"(mine + 512 * i));
    unsigned any = 0;
#pragma unroll
    for (int i = 0; i < 8; i++) any |= v[i].x & v[i].y & v[i].z & v[i].w;
    if (any == 0x9e3779b9) out[0] = any;
}
"""
"""64 KiB a block of 512 threads, every load issued before the first is used."""
READ_BLOCK: Final = 65536


@dataclass(frozen=True, slots=True)
class ProductRow:
    """What a product costs. `share` is of the bandwidth measured in the same process."""

    model: str
    role: Role
    config: LaunchConfig
    launches: int
    """Of a step."""
    bytes: int
    us: float
    gb_s: float
    share: float


def products(config: Config, kind: BlockType) -> dict[Role, tuple[Product, int]]:
    """The products of a step of a model whose matrices are all of one kind, and how many of each a step has.

    They are those of `tegrad.llm.plan` with the configurations of `tegrad.llm.launch_config`; a test holds them equal.
    """
    arch, packed = config.arch, kind not in PLAIN
    norm = arch.norm
    sums = config.dim // 16 if packed and norm == "rms" else 0
    biases = {"qkv": arch.qkv[0].bias == "must", "all": arch.attn_output.bias == "must"}

    def normed(*rows: int, **more: Any) -> Product:
        return Product(tuple(Part(kind, r) for r in rows), config.dim, norm, config.eps, sums, **more)

    def added(columns: int) -> Product:
        parts = (Part(kind, config.dim),)
        return Product(parts, columns, bias=biases["all"], residual=True, out_q=packed, out_norm=packed)

    ffn = (config.ffn,) if arch.gate is None else (config.ffn, config.ffn)
    inner: dict[str, Any] = {
        "gated": arch.gate is not None,
        "activation": arch.activation,
        "out_q": packed,
        "out_x": not packed,
    }
    return {
        "qkv": (normed(config.size("query+key+value"), bias=biases["qkv"], out_x=True), config.layers),
        "output": (added(config.size("mixed")), config.layers),
        "gate": (normed(*ffn, bias=biases["all"], **inner), config.layers),
        "down": (added(config.ffn), config.layers),
        "logits": (normed(config.vocab, out_x=True, best=True), 1),
    }


class ProductBench:
    """Weights and vectors on an opened device; measures products. Use it in a `with`."""

    def __init__(self, device: Gpu, dependency: Dependency) -> None:
        self.device, self.rotation, self._dependency = device, ROTATION_BYTES, dependency
        self._undo = ExitStack()

    def __enter__(self) -> ProductBench:
        self.weights = self._alloc(self.rotation)
        filling = np.random.default_rng(1).integers(0, 256, min(FILLING_BYTES, self.rotation), np.uint8)
        for at in range(0, self.rotation, len(filling)):
            part = filling[: min(len(filling), self.rotation - at)]
            self.device.upload(self.weights.offset(at, len(part)), part.tobytes())
        self.vectors = self._alloc(64 << 20)
        return self

    def __exit__(self, *_: object) -> None:
        self._undo.close()

    def _alloc(self, size: int) -> Any:
        buffer = self.device.allocate(size, SPEC)
        self._undo.callback(self.device.release, buffer, SPEC)
        return buffer

    def bandwidth(self) -> float:
        """Bytes per second of a kernel that only reads."""
        size = READ_BYTES
        program = self.device.load_program(compile_cuda(READ, self.device.arch), "read", buffers=2)
        with ExitStack() as undo:
            source = self.device.allocate(size, SPEC)
            undo.callback(self.device.release, source, SPEC)
            launch = Launch(program, (self.vectors, source), (size // READ_BLOCK, 1, 1), (512, 1, 1))
            once, thrice = (gpu_us(self.device, [launch] * count, self._dependency) for count in (1, 3))
        return 2 * size / (thrice - once) * 1e6

    def us(self, product: Product, cut: LaunchConfig) -> float:
        """Microseconds that a launch of the product adds."""
        program = product.load(self.device, cut)
        stride = sum(self._sizes(product))
        copies = max(1, self.rotation // stride)
        count = max(LEAST_LAUNCHES, min(copies, 2 * self.rotation // stride))
        launches = [self._launch(program, product, cut, at % copies * stride) for at in range(4 * count)]
        short, long = (gpu_us(self.device, launches[:length], self._dependency) for length in (count, 4 * count))
        return (long - short) / (3 * count)

    def _sizes(self, product: Product) -> list[int]:
        """Bytes of each part's matrix, from one 256-byte dependency to the next."""
        sizes = [
            (part.kind.row_bytes(2048) * segments(part.rows, product.columns))
            if part.kind not in PLAIN
            else part.kind.row_bytes(part.rows * product.columns)
            for part in product.parts
        ]
        return [-(-size // 256) * 256 for size in sizes]

    def _launch(self, program: Any, product: Product, cut: LaunchConfig, at: int) -> Launch:
        """A launch that reads the weights from `at` on. Vectors lie 1 MiB apart, and may hold anything."""
        places: dict[str, Any] = {}
        for index, size in enumerate(self._sizes(product)):
            places[f"w{index}"] = self.weights.offset(at, size)
            at += size
        names = [name for name in product.arguments if name not in places]
        room = self.vectors.size // len(names) // 256 * 256
        places |= {name: self.vectors.offset(room * index, room) for index, name in enumerate(names)}
        buffers = tuple(places[name] for name in product.arguments)
        return Launch(program, buffers, (product.grid(cut), 1, 1), (32 * cut.warps, 1, 1))

    def row(
        self, model: str, role: Role, product: Product, launches: int, cut: LaunchConfig, bandwidth: float
    ) -> ProductRow:
        """Measure a product in a launch configuration."""
        us, size = self.us(product, cut), product.weight_bytes
        return ProductRow(model, role, cut, launches, size, us, size / us / 1e3, size / us * 1e6 / bandwidth)


CANDIDATES: Final = {
    "rows": (16, 64),
    "items": (1, 2, 4, 8),
    "ahead": (1, 2, 4),
    "warps": (8, 16),
    "ctas": (1, 2, 3, 4),
    "keep": (True, False),
}
"""Of a `Tuning`; what comes to the same configuration is tried once."""


LEAST_WARPS: Final = 4


def candidates(product: Product, arch: str) -> list[LaunchConfig]:
    """The configurations that a sweep tries: all tunings made to fit, and what an SM's registers hold of each."""
    found: dict[LaunchConfig, None] = {}
    chip = by_arch(arch)
    most = 0 if chip is None else chip.warps_per_sm
    for rows, items, ahead, warps, ctas, keep in combinations(*CANDIDATES.values()):
        if ahead <= items and 8 <= warps * ctas <= most:
            cut = fit(product, Tuning(rows, items, ahead, warps, ctas, bool(keep)))
            if product.grid(cut) >= 32 and cut.warps >= LEAST_WARPS and product.items(cut) <= 32 * cut.warps:
                found[cut] = None
    return list(found)


def _compile(product: Product, cut: LaunchConfig, arch: str) -> None:
    """Put a program into the cache on disk; what fails there fails again where it is loaded."""
    from tegrad.llm.programs import compile_kernel

    try:
        compile_kernel("matvec", arch, dynamic_shared=product.shared_bytes(), **product.defines(cut))
    except CompileFailed:
        return


def sweep(
    bench: ProductBench, model: str, role: Role, product: Product, launches: int, bandwidth: float
) -> list[ProductRow]:
    """All candidates of a product, the fastest first."""
    arch = bench.device.arch
    cuts = candidates(product, arch)
    with ProcessPoolExecutor(mp_context=get_context("spawn")) as pool:
        for made in [pool.submit(_compile, product, cut, arch) for cut in cuts]:
            made.result()
    rows = [bench.row(model, role, product, launches, cut, bandwidth) for cut in cuts]
    return sorted(rows, key=lambda row: row.us)


def line(row: ProductRow) -> str:
    """A row as text."""
    chosen = row.config
    cut = f"{chosen.cta_rows}r {chosen.warps}w {chosen.ahead}a {chosen.ctas}c{'' if chosen.keep else ' -'}"
    size = f"{row.bytes / 1e6:9.2f} MB"
    return f"{row.model:12} {row.role:7} {cut:18} {size} {row.us:9.2f} us {row.gb_s:8.0f} GB/s {100 * row.share:5.1f}%"


def measured(bench: ProductBench, models: Sequence[str], bandwidth: float, sweeping: int) -> Iterator[ProductRow]:
    """The rows of models named SHAPE-KIND: one a product, or the best `sweeping` configurations of each."""
    for model in models:
        shape, _, kind = model.rpartition("-")
        for role, (product, launches) in products(SHAPES[shape].config, KINDS[kind]).items():
            if sweeping:
                yield from sweep(bench, model, role, product, launches, bandwidth)[:sweeping]
            else:
                cut = launch_config(product, role, bench.device.arch)
                yield bench.row(model, role, product, launches, cut, bandwidth)


def main(arguments: Sequence[str] | None = None) -> None:
    """Print what the products of models cost on this machine's GPU."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("models", nargs="+", help="SHAPE-KIND, such as 1b-q6k; as in tegrad.bench.models")
    parser.add_argument(
        "--sweep", type=int, default=0, metavar="N", help="try all configurations, print the best N of each"
    )
    parser.add_argument("--dependency", default="chain-lean", choices=[*FORMS, *HOPPER])
    parser.add_argument("--json", action="store_true", help="a JSON list on the last line")
    asked = parser.parse_args(arguments)
    rows = []
    with opened() as device, ProductBench(device, {**FORMS, **HOPPER}[asked.dependency]) as bench:
        bandwidth = bench.bandwidth()
        print(f"read bandwidth {bandwidth / 1e9:.0f} GB/s", flush=True)
        for row in measured(bench, asked.models, bandwidth, asked.sweep):
            rows.append(row)
            print(line(row), flush=True)
    if not asked.sweep:
        for model in asked.models:
            us = sum(row.us * row.launches for row in rows if row.model == model)
            size = sum(row.bytes * row.launches for row in rows if row.model == model)
            print(f"{model:12} products of a step {us:9.1f} us, {size / 1e6:.1f} MB, {size / us / 1e3:.0f} GB/s")
    if asked.json:
        print(json.dumps([asdict(row) for row in rows]))


if __name__ == "__main__":
    main()
