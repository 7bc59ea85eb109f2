"""What memory allows a decode step: the bytes of a file that it reads, and how fast a kernel of ours reads memory."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from tinygrad.runtime.support.hcq import HCQBuffer

from tegrad.bench.dependencies import gpu_us
from tegrad.llm.arch import DIVISORS, Config, Spec, tensor_name
from tegrad.llm.gguf import Gguf
from tegrad.nv import roles
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
"""Bytes to read for a figure: far more than any cache."""
PASSES: Final = 4
"""Launches of the longer recording; the shorter one has one."""


@dataclass(frozen=True, slots=True)
class Bandwidth:
    """The best of several forms of reading memory once: bytes per second, and how."""

    rate: float
    note: str


def read_bandwidth(device: Gpu, size: int) -> Bandwidth:
    """How fast `size` bytes of device memory are read, by the GPU's clock; the slope between one launch and several."""
    spec = MemorySpec(nolru=True, role=roles.WEIGHTS)
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
    return Bandwidth(rate, f"{rate / 1e9:.0f} GB/s, {found.get(rate, 'not measured')}, over {size >> 20} MiB")


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
    """Bytes that a decode step of a GGUF file cannot but read: its tensors once, and keys and values of `depth` tokens.

    A table of which a step reads one row (an embedding that is not the output too, learned positions) counts as a row;
    rope_freqs counts for nothing. Keys and values are halves.
    """
    with Gguf.open(path) as file:
        config = Config.read(file)
        arch, tensors = config.arch, dict(file.tensors)
        tensors.pop(DIVISORS, None)
        total = sum(info.nbytes for info in tensors.values())
        rows: list[Spec] = [] if arch.positions is None else [arch.positions]
        if tensor_name(arch.output) in tensors:
            rows.append(arch.embedding)
        for spec in rows:
            table = tensors[tensor_name(spec)]
            total -= table.nbytes - table.nbytes // table.rows
        cache = 2 * config.layers * config.kv_heads * (config.head_dim + config.value_dim)
    return total + depth * cache


@dataclass(frozen=True, slots=True)
class Limit:
    """The tokens per second that memory allows, and how that was reckoned."""

    rate: float
    note: str


def decode_limit(path: Path, depth: int, bandwidth: Bandwidth) -> Limit | None:
    """The byte limit of decoding a file at a depth; None where no bandwidth was measured."""
    if not bandwidth.rate:
        return None
    size = step_bytes(path, depth)
    what = "the file" if depth == 0 else f"the file and {depth} tokens' keys and values"
    return Limit(bandwidth.rate / size, f"{size} bytes of {what} a token, read at {bandwidth.note}")
