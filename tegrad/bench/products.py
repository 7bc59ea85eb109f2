"""How near the launches of a decode step come to the memory's bandwidth: products, attention, and sampling.

    tegrad bench products 1b-q6k 8b-q4k          a line a product: bytes, microseconds, share of the bandwidth
    tegrad bench products 1b-q6k --sweep 5       all of `CANDIDATES`, the best ones of each product
    tegrad bench attention 1b 8b                 a line a model and depth
    tegrad bench attention 1b --sweep 5          every cut of `CUTS`, the best ones of each depth
    tegrad bench sampling 151936 --sequences 8   a line a vocabulary and kind: launches, microseconds

Launches are those of the decode plan, in a recording of dependent ones that go through so many copies of the weights,
or caches, that none is in the chip's cache when its turn comes again. A time is the GPU's, the slope between recordings
of two lengths: what a launch adds to a step, its dependency included. The bandwidth is measured in the same process
(`limits.read_bandwidth`). Attention at depth 0 reads nearly nothing: that is what the launch costs.

Logits to sample from are drawn from a normal distribution, which is flatter than a model's: its top-p keeps thousands
of tokens.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from itertools import product as combinations
from typing import Any, Final, Self

import numpy as np

from tegrad.bench import limits, models, plans
from tegrad.bench.dependencies import ALL_FORMS
from tegrad.bench.gpu import gpu_us, opened, printed, slope, spawned
from tegrad.bench.models import SHAPES
from tegrad.hw.chips import by_arch
from tegrad.llm.attention import BUFFERS, Attention
from tegrad.llm.cache import KvCache
from tegrad.llm.chips import Role, Tuning
from tegrad.llm.config import Config
from tegrad.llm.formats import PLAIN, BlockType
from tegrad.llm.launch_config import fit, launch_config
from tegrad.llm.matvec import LaunchConfig, Product
from tegrad.llm.network import Attend
from tegrad.llm.packed import SPEC
from tegrad.llm.packing import segments
from tegrad.llm.plan import DecodePlan
from tegrad.llm.programs import compile_kernel
from tegrad.llm.sampling import Sampling, Settings
from tegrad.llm.state import LOGITS_SPEC, States
from tegrad.llm.workspace import Workspace
from tegrad.nv import roles
from tegrad.nv.compilers import CompileFailed
from tegrad.nv.gpu import Buffer, Gpu
from tegrad.nv.program import LaunchError
from tegrad.nv.replay import Dependency, Launch
from tegrad.nv.spec import MemorySpec

ROTATION_BYTES: Final = 1200 << 20
"""Bytes of weights that the launches go through: twenty times an H200's second-level cache."""
LEAST_LAUNCHES: Final = 24
"""Launches of the shorter recording, at least."""
FILLING_BYTES: Final = 64 << 20
"""Random bytes that are repeated in the weights."""
VECTOR_BYTES: Final = 64 << 20
"""Memory for all that launches read and write besides."""


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


def products(
    config: Config, formats: BlockType | plans.Formats, arch: str, tied: bool = True
) -> Counter[tuple[Role, Product]]:
    """The products of a decode step of a model on a chip, as the plan has them, and how many of each it has."""
    with plans.uncompiled(arch) as device:
        made = plans.model(config, formats, device, tied)
        with DecodePlan(made, States(device), KvCache(device, made.config, POSITIONS)) as plan:
            return Counter(plan.products)


POSITIONS: Final = 64
"""Of a cache that no product depends on."""


class Bench:
    """Memory on an opened device, and what one more launch takes. Use it in a `with`."""

    def __init__(self, device: Gpu, dependency: Dependency) -> None:
        self.device, self.dependency = device, dependency
        self.workspace = Workspace(device)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.workspace.close()

    def rotation(self, spec: MemorySpec, filling: bytes) -> Buffer:
        """ROTATION_BYTES of memory with a filling again and again."""
        buffer = self.workspace.take(ROTATION_BYTES, spec)
        for at in range(0, ROTATION_BYTES, len(filling)):
            part = filling[: ROTATION_BYTES - at]
            self.device.upload(buffer.offset(at, len(part)), part)
        return buffer

    def weights(self) -> Buffer:
        """The same with random bytes."""
        size = min(FILLING_BYTES, ROTATION_BYTES)
        return self.rotation(SPEC, np.random.default_rng(1).integers(0, 256, size, np.uint8).tobytes())

    def added_us(self, launch: Callable[[int], Launch], stride: int, least: int, most: int) -> float:
        """Microseconds that a launch adds, of those at every `stride` bytes of the rotation, again and again.

        The shorter recording has `least` launches to `most`, the longer one four times as many.
        """
        copies = max(1, ROTATION_BYTES // stride)
        count = max(least, min(copies, most))
        launches = [launch(at % copies * stride) for at in range(4 * count)]
        return slope(self.device, launches, self.dependency, count, 4 * count)


class ProductBench(Bench):
    """Weights and vectors on an opened device; measures products."""

    def __init__(self, device: Gpu, dependency: Dependency) -> None:
        super().__init__(device, dependency)
        self._weights, self._vectors = self.weights(), self.workspace.take(VECTOR_BYTES)

    def us(self, product: Product, cut: LaunchConfig) -> float:
        """Microseconds that a launch of the product adds."""
        program, stride = product.load(self.device, cut), sum(self._sizes(product))
        return self.added_us(lambda at: self._launch(program, product, cut, at), stride, LEAST_LAUNCHES, ROTATION_BYTES)

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
            places[f"w{index}"] = self._weights.offset(at, size)
            at += size
        names = [name for name in product.arguments if name not in places]
        room = self._vectors.size // len(names) // 256 * 256
        places |= {name: self._vectors.offset(room * index, room) for index, name in enumerate(names)}
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
    list(spawned(_compile, [(product, cut, arch) for cut in cuts]))
    rows = [bench.row(model, role, product, launches, cut, bandwidth) for cut in cuts]
    return sorted(rows, key=lambda row: row.us)


def line(row: ProductRow) -> str:
    """A row as text."""
    chosen = row.config
    cut = f"{chosen.cta_rows}r {chosen.warps}w {chosen.ahead}a {chosen.ctas}c{'' if chosen.keep else ' -'}"
    size = f"{row.bytes / 1e6:9.2f} MB"
    return f"{row.model:12} {row.role:7} {cut:18} {size} {row.us:9.2f} us {row.gb_s:8.0f} GB/s {100 * row.share:5.1f}%"


def measured(bench: ProductBench, names: Sequence[str], bandwidth: float, sweeping: int) -> Iterator[ProductRow]:
    """The rows of models by name: one a product, or the best `sweeping` configurations of each."""
    arch = bench.device.arch
    for model in names:
        shape, _ = models.parse(model)
        found = products(shape.config, models.formats(model), arch, shape.tied)
        for (role, product), launches in found.items():
            if sweeping:
                yield from sweep(bench, model, role, product, launches, bandwidth)[:sweeping]
            else:
                yield bench.row(model, role, product, launches, launch_config(product, role, arch), bandwidth)


def read_bandwidth(device: Gpu) -> float:
    """Print the bandwidth that shares are of; bytes per second."""
    rate = limits.bandwidth(device)
    print(f"read bandwidth {rate / 1e9:.0f} GB/s", flush=True)
    return rate


def show_products(names: Sequence[str], sweeping: int, dependency: str) -> list[dict[str, Any]]:
    """Print what the products of models cost on this machine's GPU; the rows."""
    with opened() as device:
        bandwidth = read_bandwidth(device)
        with ProductBench(device, ALL_FORMS[dependency]) as bench:
            rows = printed(measured(bench, names, bandwidth, sweeping), line)
    for model in () if sweeping else names:
        us = sum(row.us * row.launches for row in rows if row.model == model)
        size = sum(row.bytes * row.launches for row in rows if row.model == model)
        print(f"{model:12} products of a step {us:9.1f} us, {size / 1e6:.1f} MB, {size / us / 1e3:.0f} GB/s")
    return [asdict(row) for row in rows]


# ---- attention


CACHE_SPEC: Final = MemorySpec(nolru=True, role=roles.KV_CACHE)
DEPTHS: Final = (0, 4096, 16384)
SPARE_POSITIONS: Final = 256
"""Positions of a cache beyond the deepest."""
CACHE_FILLING_BYTES: Final = 16 << 20
CUTS: Final = {
    "ATTENTION_WARPS": (4, 8, 16),
    "ATTENTION_LOADS": (2, 4, 8),
    "ctas": (1, 2, 4),
    "rows": (0, 64, 128),
}
"""What a sweep tries: warps, loads in flight, parts for each SM, and the positions that make another part (0: those
that one CTA takes at once)."""


@dataclass(frozen=True, slots=True)
class AttentionRow:
    """What the attention of one layer costs at a depth. `share` is of the bandwidth measured in the same process."""

    model: str
    cache: str
    sequences: int
    depth: int
    warps: int
    loads: int
    splits: int
    split_rows: int
    """0: as many positions as a CTA takes at once."""
    launches: int
    """Of a step."""
    bytes: int
    us: float
    gb_s: float
    share: float


def farthest(config: Config) -> Attend:
    """How layers attend; of a model some of whose layers attend within a window, the others."""
    attends = config.network.attends
    return next((op for op in attends if op.window is None), attends[0])


def attention(config: Config, positions: int, cache: str, device: Gpu, sequences: int = 1, **tuning: int) -> Attention:
    """The attention of a model on a device, as the decode plan has it for packed output matrices, or a batch."""
    return Attention.of(
        config, farthest(config), positions, cache, device, sequences, quantized=sequences == 1,
        halves=sequences > 1, tuning=tuning,
    )  # fmt: skip


class AttentionBench(Bench):
    """Caches and vectors on an opened device."""

    def __init__(self, device: Gpu, dependency: Dependency, sequences: int = 1) -> None:
        super().__init__(device, dependency)
        self.sequences, self.states = sequences, States(device, sequences)
        self.workspace.callback(self.states.close)
        # As bytes they are small whole numbers; as halves, small too.
        filling = np.random.default_rng(1).standard_normal(min(CACHE_FILLING_BYTES, ROTATION_BYTES) // 2)
        self._caches = self.rotation(CACHE_SPEC, filling.astype(np.float16).tobytes())
        self._scratch = self.workspace.put(bytes(VECTOR_BYTES))

    def us(self, at: Attention, depth: int) -> float:
        """Microseconds that a launch adds for a token of each sequence at position `depth`."""
        for slot in range(self.sequences):
            self.states.begin(slot, [0], depth, at.positions)
        program = at.load(self.device)
        stride = 2 * sum(at.cache_bytes)
        return self.added_us(lambda begin: self._launch(program, at, begin), stride, LEAST_LAUNCHES, ROTATION_BYTES)

    def _launch(self, program: Any, at: Attention, begin: int) -> Launch:
        """A launch on the cache at `begin`. Everything else lies in the scratch memory, and may hold anything."""
        elements, scales = at.cache_bytes
        places: dict[str, Any] = {"states": self.states.states}
        for name, size in (("k", elements), ("v", elements), ("k_scale", scales), ("v_scale", scales)):
            places[name] = self._caches.offset(begin, max(size, 16))
            begin += size
        names = [name for name in BUFFERS if name not in places]
        room = self._scratch.size // len(names) // 256 * 256
        places |= {name: self._scratch.offset(room * index, room) for index, name in enumerate(names)}
        return Launch(program, tuple(places[name] for name in BUFFERS), at.grid, at.block)

    def row(self, model: str, at: Attention, depth: int, launches: int, bandwidth: float) -> AttentionRow:
        """Measure one depth."""
        us, size = self.us(at, depth), sum(at.cache_bytes) * 2 * depth // at.positions
        rows = (at.tuning or {}).get("SPLIT_ROWS", 0)
        return AttentionRow(model, at.cache, at.sequences, depth, at.warps, at.loads, at.splits, rows, launches,
                   size, us, size / us / 1e3, size / us * 1e6 / bandwidth)  # fmt: skip


def cuts(config: Config, positions: int, cache: str, device: Gpu, sequences: int) -> list[Attention]:
    """All cuts that a sweep tries."""
    plain = attention(config, positions, cache, device, sequences)
    found: dict[tuple[int, ...], Attention] = {}
    for warps, loads, ctas, rows in combinations(*CUTS.values()):
        splits = max(1, ctas * plain.sms // (config.kv_heads * sequences))
        tuning = {"ATTENTION_WARPS": warps, "ATTENTION_LOADS": loads, "SPLITS": splits}
        if rows:
            tuning["SPLIT_ROWS"] = rows
        found[warps, loads, splits, rows] = attention(config, positions, cache, device, sequences, **tuning)
    return list(found.values())


def sweep_cuts(
    bench: AttentionBench, model: str, config: Config, cache: str, depths: Sequence[int], bandwidth: float
) -> list[AttentionRow]:
    """Rows of all cuts that this chip can launch."""
    rows = []
    for at in cuts(config, max(depths) + SPARE_POSITIONS, cache, bench.device, bench.sequences):
        try:
            rows += [bench.row(model, at, depth, config.layers, bandwidth) for depth in depths]
        except (CompileFailed, LaunchError):
            continue  # more shared memory than a kernel may have
    return rows


def attention_rows(
    bench: AttentionBench, models: Sequence[str], cache: str, depths: Sequence[int], bandwidth: float, best: int
) -> Iterator[AttentionRow]:
    """The rows of models: one a depth, or the `best` cuts of each."""
    for model in models:
        config = SHAPES[model].config
        if not best:
            at = attention(config, max(depths) + SPARE_POSITIONS, cache, bench.device, bench.sequences)
            yield from (bench.row(model, at, depth, config.layers, bandwidth) for depth in depths)
            continue
        rows = sweep_cuts(bench, model, config, cache, depths, bandwidth)
        for depth in depths:
            yield from sorted((row for row in rows if row.depth == depth), key=lambda row: row.us)[:best]


def attention_line(row: AttentionRow) -> str:
    """A row as text."""
    cut = f"{row.warps}w {row.loads}l {row.splits}p {row.split_rows or ''}"
    step = row.us * row.launches
    what = f"{row.model:12} {row.cache:5} x {row.sequences:<2} depth {row.depth:6} {cut:16}"
    return (
        f"{what} {row.bytes / 1e6:8.2f} MB {row.us:8.2f} us "
        f"{row.gb_s:7.0f} GB/s {100 * row.share:5.1f}%  {step:8.1f} us a step"
    )


def show_attention(
    models: Sequence[str], depths: Sequence[int], cache: str, sequences: int, sweeping: int, dependency: str
) -> list[dict[str, Any]]:
    """Print what the attention of models costs on this machine's GPU; the rows."""
    with opened() as device:
        bandwidth = read_bandwidth(device)
        with AttentionBench(device, ALL_FORMS[dependency], sequences) as bench:
            rows = printed(attention_rows(bench, models, cache, depths, bandwidth, sweeping), attention_line)
    return [asdict(row) for row in rows]


# ---- sampling


VOCABULARIES: Final = (128256, 151936)
SAMPLING_STEPS: Final = (8, 32)
"""Steps of the recordings whose difference is measured."""
SAMPLINGS: Final[Mapping[str, Settings]] = {
    "greedy": Settings(),
    "greedy, penalties": Settings(repeat=1.1),
    "greedy, 20 logprobs": Settings(logprobs=20),
    "greedy, 300 biases": Settings(biases=tuple((7 * token, 1.0) for token in range(300))),
    "top-k 40, top-p, min-p": Settings(0.8, 0.95, 0.05, 40),
    "temperature": Settings(0.8),
    "top-p": Settings(0.8, 0.95),
    "top-k 1000, top-p": Settings(0.8, 0.95, 0.0, 1000),
}


@dataclass(frozen=True, slots=True)
class SamplingRow:
    """What one step of sampling costs."""

    vocab: int
    sequences: int
    kind: str
    launches: int
    us: float


def sampling_row(device: Gpu, dependency: Dependency, vocab: int, sequences: int, kind: str) -> SamplingRow:
    """Measure one kind."""
    settings = [SAMPLINGS[kind]] * sequences
    logits = (3 * np.random.default_rng(1).standard_normal((sequences, vocab))).astype(np.float32)
    entries = -(-vocab // 32)
    best_row = np.minimum(np.arange(sequences * entries) % entries * 32, vocab - 1).astype(np.int32)
    best = logits.reshape(sequences, -1)[np.arange(sequences).repeat(entries), best_row]
    with ExitStack() as undo:
        states = States(device, sequences)
        undo.callback(states.close)
        sampling = undo.enter_context(Sampling(device, vocab, (), sequences))
        given = {}
        for name, array in (("logits", logits), ("best", best), ("best_row", best_row)):
            given[name] = device.allocate(array.nbytes, LOGITS_SPEC)
            undo.callback(device.release, given[name], LOGITS_SPEC)
            device.upload(given[name], array.tobytes())
        for slot in range(sequences):
            sampling.set(slot, settings[slot])
            states.begin(slot, [0], 0, 1 << 30, seed=slot)
        launches = sampling.launches(states, settings, **given)
        short, long = (gpu_us(device, launches * count, dependency) for count in SAMPLING_STEPS)
    return SamplingRow(vocab, sequences, kind, len(launches), (long - short) / (SAMPLING_STEPS[1] - SAMPLING_STEPS[0]))


def show_sampling(vocabularies: Sequence[int], sequences: int, dependency: str) -> list[dict[str, Any]]:
    """Print what sampling costs on this machine's GPU; the rows."""

    def line(row: SamplingRow) -> str:
        return f"{row.vocab:7} x {sequences:<3} {row.kind:24} {row.launches:2} launches {row.us:8.2f} us"

    with opened() as device:
        rows = (
            sampling_row(device, ALL_FORMS[dependency], vocab, sequences, kind)
            for vocab in vocabularies
            for kind in SAMPLINGS
        )
        return [asdict(row) for row in printed(rows, line)]
