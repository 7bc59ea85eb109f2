"""What memory allows a decode step, and how long one takes on a chip that is not at hand.

The limit is the bytes of a file that a step reads, and how fast a kernel of ours reads memory.

In the estimate a launch takes the longer of reading its bytes and of issuing its instructions, plus what a boundary
between launches costs (launch, ramp and tail together). Bytes and instructions come from the table of
`tegrad.bench.kernels`, that is from the kernels as they are compiled for the chip; what a chip gives is its row here.
CHECKS holds the same rule against launches that were measured on an H200. A Jetson has a row for each kind of memory
that weights and workspace may lie in (nv/roles.py). What blocks read again L2 answers of cached memory; of volatile
memory every read goes to DRAM, so that the vector of a product counts once for each block. An estimate is no
measurement of a Jetson, and every figure made of it says so.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from tinygrad.runtime.support.hcq import HCQBuffer

from tegrad.bench.gpu import gpu_us
from tegrad.bench.kernels import PIPES, KernelRow, plan_table
from tegrad.bench.record import Record, RecordError, Side, make
from tegrad.hw.chips import CHIPS, Chip
from tegrad.llm.cache import bytes_of, state_bytes
from tegrad.llm.config import Config, tensor_name
from tegrad.llm.gguf import Gguf
from tegrad.llm.network import Spec, present
from tegrad.nv import roles, toolchain
from tegrad.nv.compilers import compile_cuda
from tegrad.nv.gpu import Gpu
from tegrad.nv.replay import DEFAULT, Launch
from tegrad.nv.spec import MemorySpec

SOURCE: Final = """
extern "C" __global__ void read(unsigned *out, const uint4 *from, int chunks) {
    uint4 all = {};
    for (int chunk = blockIdx.x; chunk < chunks; chunk += gridDim.x) {
        const uint4 *at = from + (size_t)chunk * 8 * blockDim.x + threadIdx.x;
        uint4 v[8];
        for (int i = 0; i < 8; i++) v[i] = __ldg(at + i * blockDim.x);
        for (int i = 0; i < 8; i++) all.x |= v[i].x, all.y |= v[i].y, all.z |= v[i].z, all.w |= v[i].w;
    }
    if ((all.x | all.y | all.z | all.w) == 1) *out = 1;
}
"""
"""Reads everything once. `out` is there for the compiler's sake: it is written where all bits together are a 1."""
LOAD_BYTES: Final = 8 * 16
"""Bytes that a thread asks for at once."""
THREADS_AND_BLOCKS: Final = ((256, 8), (256, 4), (512, 4), (512, 2), (1024, 2), (1024, 1))
"""Threads of a block, and blocks for each SM."""
READ_BYTES: Final = 2 << 30
"""Far more than any cache."""
PASSES: Final = 4
"""Launches of the longer recording; the shorter one has one."""


@dataclass(frozen=True, slots=True)
class Rate:
    """So much a second, and how that was measured or reckoned."""

    rate: float
    note: str


def read_bandwidth(device: Gpu) -> Rate:
    """How fast READ_BYTES of device memory are read by the best form, in bytes, by the GPU's clock: the slope between
    one launch and several."""
    spec, size = MemorySpec(nolru=True, role=roles.WEIGHTS), READ_BYTES
    buffer = device.allocate(size, spec)
    found = {}
    try:
        for (threads, blocks), launch, count in readers(device, buffer):
            short, long = (gpu_us(device, [launch] * passes, DEFAULT) for passes in (1, PASSES))
            if long > short:  # an emulated GPU's clock may not tell them apart
                found[count * (PASSES - 1) / (long - short) * 1e6] = f"{blocks} blocks of {threads} threads an SM"
    finally:
        device.release(buffer, spec)
    rate = max(found, default=0.0)
    return Rate(rate, f"{rate / 1e9:.0f} GB/s, {found.get(rate, 'not measured')}, over {size >> 20} MiB")


def bandwidth(device: Gpu) -> float:
    """The same for what takes shares of it: bytes per second. RecordError where the clock does not tell it."""
    if not (rate := read_bandwidth(device).rate):
        raise RecordError("the bandwidth cannot be measured: the GPU's clock does not tell one read from several")
    return rate


def readers(device: Gpu, buffer: HCQBuffer) -> Iterator[tuple[tuple[int, int], Launch, int]]:
    """Each of THREADS_AND_BLOCKS, a launch of it that reads a buffer, and the bytes that it reads: all whole chunks."""
    program = _load(device)
    out, whole = buffer.offset(0, 16), buffer.offset(0, buffer.size)
    for threads, blocks in THREADS_AND_BLOCKS:
        chunks = buffer.size // (threads * LOAD_BYTES)
        grid = (min(chunks, blocks * device.sm_count), 1, 1)
        yield (
            (threads, blocks),
            Launch(program, (out, whole), grid, (threads, 1, 1), (chunks,)),
            chunks * threads * LOAD_BYTES,
        )


def _load(device: Gpu) -> Any:
    return device.load_program(compile_cuda(SOURCE, device.arch), "read", buffers=2, values=1)


def step_bytes(path: Path, depth: int = 0) -> int:
    """Bytes that a decode step of a GGUF file cannot but read: its model's tensors once, and keys and values of `depth`
    tokens.

    A table of which a step reads one row (an embedding that is not the output too, learned positions) counts as a row;
    what divides rope frequencies counts for nothing. Keys and values are halves; a layer reads those in its window.
    """
    with Gguf.open(path) as file:
        config = Config.read(file)
        arch, tensors = config.arch, {info.name: info for info in config.tensors(file)}
        total = sum(info.nbytes for info in tensors.values())
        inputs = config.network.embed.inputs
        rows: list[Spec] = [*present(arch.positions, inputs.table if inputs else None)]
        if tensor_name(arch.output) in tensors:
            rows.append(arch.embedding)
        for spec in rows:
            table = tensors[tensor_name(spec)]
            total -= table.nbytes - table.nbytes // table.rows
        mixers = config.network.mixers
        counts = [min(depth, depth if op.window is None else op.window - 1) for op in mixers]
    sizes = map(config.at, range(config.layers))
    kept = sum(bytes_of(*each, q8=False) for each in zip(sizes, mixers, counts, strict=True))
    return total + kept + sum(state_bytes(op) // 2 for op in mixers)


def decode_limit(path: Path, depth: int, bandwidth: Rate) -> Rate | None:
    """The byte limit of decoding a file at a depth, in tokens; None where no bandwidth was measured."""
    if not bandwidth.rate:
        return None
    size = step_bytes(path, depth)
    what = "the file" if depth == 0 else f"the file and {depth} tokens' keys and values"
    return Rate(bandwidth.rate / size, f"{size} bytes of {what} a token, read at {bandwidth.note}")


# ---- the estimate


ISSUED_PER_CYCLE: Final = 4
"""Instructions of warps that an SM issues per cycle: one for each of its four parts."""


@dataclass(frozen=True, slots=True)
class Assumption:
    """What a chip is taken to give."""

    efficiency: float
    """Of the data sheet's bandwidth."""
    boundary_us: tuple[float, float]
    """From one launch's end to the next one's full speed: least and most."""
    source: str
    memory: str = ""
    """The kind that weights and workspace lie in, where there are two."""
    again: bool = False
    """Whether what blocks read of a vector comes from memory each time, and not from L2."""


VOLATILE, CACHED = "volatile", "cached"
_JETSON: Final = "boundaries are a guess: 2 to 3 times an H200's; highest power mode"
_CACHED: Final = (
    "78% of the data sheet's bandwidth, which a BF16 decode reached elsewhere, taken to be from memory that L2 keeps, "
    f"as CUDA's is; vectors come from L2; {_JETSON}"
)
_VOLATILE: Final = (
    "the share of the bandwidth is ASSUMED to be that of cached memory, 78%: how fast a GPU with an L2 of this kind "
    "streams from memory that it does not keep is not known (others' copies and products with flags 0 were not slower "
    "than CUDA's, but far from the bandwidth); "
    f"each block's vector comes from DRAM; {_JETSON}"
)


def _jetson(boundary_us: tuple[float, float]) -> tuple[Assumption, ...]:
    """The first is the memory policy that holds where no record says otherwise."""
    return (
        Assumption(0.78, boundary_us, _VOLATILE, VOLATILE, again=True),
        Assumption(0.78, boundary_us, _CACHED, CACHED),
    )


ASSUMPTIONS: Final[Mapping[str, tuple[Assumption, ...]]] = {
    "agx-orin-64gb": _jetson((5.0, 10.0)),
    "orin-nx-16gb": _jetson((5.0, 12.0)),
    "orin-nano-8gb": _jetson((5.0, 12.0)),
    "gh100": (
        Assumption(
            4614 / 4800,
            (2.6, 3.6),
            "measured on an H200: reads at 4614 GB/s, and the time of a layer's products above that of their bytes",
        ),
    ),
}
"""By chip, and for Jetsons by kind of memory."""


def assumption(chip: Chip, memory: str = "") -> Assumption:
    """What a chip is taken to give, from this kind of memory; from that which it uses by default unless said."""
    return next(one for one in ASSUMPTIONS[chip.name] if memory in ("", one.memory))


@dataclass(frozen=True, slots=True)
class Work:
    """Launches alike: how many a token, and what one reads (bytes) and issues (cycles of every SM).

    `again`: bytes that blocks read after another block has read them.
    """

    name: str
    launches: int
    bytes: float
    cycles: float = 0.0
    again: float = 0.0


def works(chip: Chip, rows: Sequence[KernelRow]) -> list[Work]:
    """The rows of a table as work. A kernel whose instructions are not known counts with its bytes alone."""
    return [Work(row.name, row.launches, row.weight_bytes, cycles(chip, row), reread(row)) for row in rows]


def reread(row: KernelRow) -> int:
    """Bytes of its vector that a product's blocks read in all but the first of them."""
    return row.input_bytes * (math.prod(row.grid) - 1)


def cycles(chip: Chip, row: KernelRow) -> float:
    """Cycles that the SMs need to issue a launch's instructions, by the unit that is busiest, work spread evenly."""
    if row.code is None or row.instructions is None:
        return 0.0
    share = row.instructions / row.code.instructions / chip.sm_count
    busiest = max(count / PIPES[unit] for unit, count in row.code.units.items())
    return share * max(busiest, row.code.instructions / ISSUED_PER_CYCLE)


def step_us(chip: Chip, work: Sequence[Work], boundary_us: float, assumed: Assumption | None = None) -> float:
    """Microseconds of a step."""
    assumed = assumed or assumption(chip)
    bandwidth = chip.mem_bandwidth * assumed.efficiency
    busy = (max(_bytes(part, assumed) / bandwidth, part.cycles / chip.max_freq_hz) for part in work)
    return sum(part.launches * (boundary_us + 1e6 * time) for part, time in zip(work, busy, strict=True))


def _bytes(part: Work, assumed: Assumption) -> float:
    """What a launch takes from memory."""
    return part.bytes + part.again * assumed.again


@dataclass(frozen=True, slots=True)
class Estimate:
    """Of one chip: a step's microseconds at the least and the most that a boundary is taken to cost, and its parts."""

    chip: Chip
    launches: int
    bytes_us: float
    """Reading everything once, and what comes from memory again."""
    weight_bytes: float
    again_bytes: float
    """Of a step, that come from memory again."""
    issue_us: float
    """Issuing everything, if nothing else took time."""
    step_us: tuple[float, float]
    assumption: Assumption

    @property
    def tokens_per_second(self) -> tuple[float, float]:
        """At the most and at the least."""
        return 1e6 / self.step_us[1], 1e6 / self.step_us[0]


def estimate(chip: Chip, rows: Sequence[KernelRow], memory: str = "") -> Estimate:
    """The estimate for a plan whose table was made for this chip's architecture, from this kind of memory."""
    work, assumed = works(chip, rows), assumption(chip, memory)
    low, high = assumed.boundary_us
    bandwidth = chip.mem_bandwidth * assumed.efficiency
    return Estimate(
        chip=chip,
        launches=sum(part.launches for part in work),
        bytes_us=1e6 * sum(part.launches * _bytes(part, assumed) for part in work) / bandwidth,
        weight_bytes=sum(part.launches * part.bytes for part in work),
        again_bytes=sum(part.launches * (_bytes(part, assumed) - part.bytes) for part in work),
        issue_us=1e6 * sum(part.launches * part.cycles for part in work) / chip.max_freq_hz,
        step_us=(step_us(chip, work, low, assumed), step_us(chip, work, high, assumed)),
        assumption=assumed,
    )


# --- the rule against what was measured -------------------------------------------------------------------------------

GRAPH_BOUNDARY_US: Final = 2.3
"""What a boundary cost the kernels of an experiment, in a CUDA graph."""
_SEGMENT_BYTES: Final = 1680
_SEGMENT_CYCLES: Final = 33 / 132
"""Issuing a Q6_K segment of 2048 weights from shared memory took an SM 28 to 33 cycles (measured)."""
_HEAD: Final = ("head", 1, 128256)
_PRODUCTS: Final = (("qkv", 16, 3072), ("o", 16, 2048), ("gate and up", 16, 16384), ("down", 16, 8192))
"""Name, how many a token, segments of 2048 weights: Llama 3.2 1B."""


def _product(name: str, launches: int, segments: int) -> Work:
    return Work(name, launches, segments * _SEGMENT_BYTES, segments * _SEGMENT_CYCLES)


ALL_PRODUCTS: Final = tuple(_product(*row) for row in (*_PRODUCTS, _HEAD))


@dataclass(frozen=True, slots=True)
class Check:
    """Launches that were measured on an H200, least and most microseconds: ours, and those of an experiment in CUDA.

    A boundary of None is what ours cost; that of a persistent kernel is a hand-over.
    """

    what: str
    work: tuple[Work, ...]
    measured_us: tuple[float, float]
    boundary_us: float | None = None


_ATTENTION: Final = Work("attention", 16, 0.3e6)
CHECKS: Final = (
    Check("our 65 products, one kind at a time", ALL_PRODUCTS, (421, 421)),
    Check("our decode step, 83 launches", (*ALL_PRODUCTS, _ATTENTION, Work("ends", 2, 0)), (499, 501)),
    Check("experiment: qkv alone", (_product("qkv", 1, 3072),), (3.2, 3.5), GRAPH_BOUNDARY_US),
    Check("experiment: o alone", (_product("o", 1, 2048),), (2.8, 3.1), GRAPH_BOUNDARY_US),
    Check("experiment: gate and up alone", (_product("gate and up", 1, 16384),), (8.5, 9.8), GRAPH_BOUNDARY_US),
    Check("experiment: down alone", (_product("down", 1, 8192),), (5.4, 6.6), GRAPH_BOUNDARY_US),
    Check("experiment: head alone", (_product(*_HEAD),), (50.6, 54.1), GRAPH_BOUNDARY_US),
    Check("experiment: 65 products in a graph", ALL_PRODUCTS, (378, 402), GRAPH_BOUNDARY_US),
    Check("experiment: with attention, 81 kernels", (*ALL_PRODUCTS, _ATTENTION), (477, 536), GRAPH_BOUNDARY_US),
    Check(
        "experiment: and norms, 113 kernels",
        (*ALL_PRODUCTS, _ATTENTION, Work("norm", 32, 0)), (480, 520), GRAPH_BOUNDARY_US,
    ),
    Check("experiment: one persistent kernel, 81 hand-overs", (*ALL_PRODUCTS, _ATTENTION), (359, 383), 1.9),
)  # fmt: skip
"""Boundaries are fitted to products alone; what has all launches of a step, and the persistent kernel, is predicted."""


def checked(check: Check) -> float:
    """What the rule says about a check, in microseconds."""
    fitted = sum(assumption(CHIPS["gh100"]).boundary_us) / 2
    return step_us(CHIPS["gh100"], check.work, fitted if check.boundary_us is None else check.boundary_us)


# --- the figure -------------------------------------------------------------------------------------------------------

MODEL: Final = "1b-q6k"


def estimates(chip: Chip, name: str = MODEL) -> list[Estimate]:
    """The estimates for a model such as "1b-q6k" and its plan of many kernels, compiled for the chip: a row for each
    kind of memory."""
    toolchain.find_program("nvdisasm")  # without it the instructions would silently count nothing
    rows = plan_table(chip, name, "decode")
    return [estimate(chip, rows, assumed.memory) for assumed in ASSUMPTIONS[chip.name]]


def estimate_record(id: str, chip: Chip, memory: str) -> Record:
    """Tokens per second as a figure that says what it is: samples with the most, a middle and the least boundary."""
    made = next(one for one in estimates(chip) if one.assumption.memory == memory)
    slow, fast = made.tokens_per_second
    middle = 2e6 / sum(made.step_us)
    size = made.weight_bytes
    low, high = made.assumption.boundary_us
    return make(
        id,
        f"ESTIMATE, not measured: decode of {MODEL} at depth 0 on {chip.name}, weights and workspace in {memory} "
        f"memory, {made.launches} launches of {low:g} to {high:g} us, reads at {made.assumption.efficiency:.0%} of "
        f"peak, {made.again_bytes / 1e6:.0f} MB of vectors from DRAM again ({made.assumption.source})",
        "tok/s",
        Side("tegrad, estimated", "tegrad bench estimate", [slow, middle, fast]),
        limit=chip.mem_bandwidth / size,
        limit_note=f"{size / 1e6:.1f} MB of weights at {chip.mem_bandwidth / 1e9:g} GB/s (data sheet peak)",
        gpu=f"none: an estimate for {chip.name}",
    )
