"""Exercises of the device as tinygrad sees it, for a first boot: a sum, launches until every ring has wrapped, a kernel
that spills, one that takes all shared memory there is, and rounds of small launches and copies."""

import random
import struct
from collections.abc import Callable
from dataclasses import dataclass

from tegrad.nv import probes
from tegrad.nv.probes import WrongResult

THREADS = 32
CHECK_EVERY = 500
"""Launches between two looks at the results."""
SOURCE = """extern "C" __global__ void exercise(int *state, int value) {
    state[threadIdx.x] = state[threadIdx.x] * 3 + value + threadIdx.x;
}"""
"""A launch that is lost, doubled or out of order changes every later result."""

TRAFFIC_BYTES = 64 << 10
"""Bytes that a round of traffic copies in, between two buffers, and out."""
TRAFFIC_LAUNCHES = 4
"""Launches of a round, each on what the one before left."""

SPILL_BLOCKS, SPILL_THREADS = 64, 256
SPILLING = """extern "C" __global__ void spilling(int *state, int value) {
    volatile int a[256];
    int thread = blockIdx.x * blockDim.x + threadIdx.x;
    for (int i = 0; i < 256; i++) a[i] = value * 7 + i + thread;
    state[thread] = a[(value + thread) & 255];
}"""
SHARED = """extern "C" __global__ void all_shared(int *state, int value) {
    extern __shared__ unsigned words[];
    for (unsigned i = threadIdx.x; i < value; i += blockDim.x) words[i] = (i + blockIdx.x) * 2654435761u;
    __syncthreads();
    unsigned wrong = 0, looked = 0;
    for (unsigned i = threadIdx.x; i < value; i += blockDim.x, looked++) {
        unsigned other = value - 1 - i;
        wrong += words[other] != (other + blockIdx.x) * 2654435761u;
    }
    atomicAdd(state, (int)wrong);
    atomicAdd(state + 1, (int)looked);
}"""


@dataclass(frozen=True, slots=True)
class Rounds:
    """How often each ring began anew."""

    gpfifo: int
    commands: int
    arguments: int


def open_device() -> str:
    """Open the device ahead, so that what follows can be timed; its chip."""
    device = probes.device()
    return f"{device.arch}, {device.sm_count} SMs"


def close_device() -> None:
    """Close the device, so that all of its memory is there for another process."""
    probes.device().close()


def ring_entries() -> int:
    """Launches after which the ring of submissions has wrapped: a Jetson's is small, a server's is not."""
    return int(probes.device().compute_gpfifo.entries_count)


def one_liner() -> list[int]:
    """README's one-liner: a sum of two tensors on the GPU. WrongResult where it is wrong."""
    from tinygrad import Tensor

    name = probes.device().device
    found = (Tensor([1, 2, 3], device=name) + Tensor([4, 5, 6], device=name)).tolist()
    if found != [5, 7, 9]:
        raise WrongResult(f"[1, 2, 3] + [4, 5, 6] came to {found}, not to [5, 7, 9]")
    return [int(value) for value in found]


def spill() -> int:
    """A kernel whose threads keep 1 KiB each in local memory; how many threads. WrongResult names a wrong one."""
    device, threads = probes.device(), SPILL_BLOCKS * SPILL_THREADS
    program = probes.load(device, SPILLING, "spilling", 1, 1)
    buffer = device.allocator.alloc(4 * threads)
    for value in (3, 12345):
        program(buffer, global_size=(SPILL_BLOCKS, 1, 1), local_size=(SPILL_THREADS, 1, 1), vals=(value,))
        for thread, word in enumerate(probes.words(device, buffer, threads)):
            if word != (wanted := value * 7 + (value + thread) % 256 + thread):
                raise WrongResult(f"thread {thread} of a kernel that spills came to {word}, not to {wanted}")
    device.allocator.free(buffer, 4 * threads)
    return threads


def all_shared() -> int:
    """Blocks that take all shared memory a block may; how many bytes. WrongResult where a word is not kept."""
    from tegrad.nv.program import SHARED_RESERVE, shared_limit

    device = probes.device()
    size = shared_limit(device.sm_version) - SHARED_RESERVE
    program = probes.load(device, SHARED, "all_shared", 1, 1, dynamic_shared=size)
    buffer = device.allocator.alloc(8)
    device.upload(buffer, bytes(8))
    program(buffer, global_size=(2, 1, 1), local_size=(256, 1, 1), vals=(size // 4,))
    wrong, looked = probes.words(device, buffer, 2)
    if wrong or looked != 2 * (size // 4):
        raise WrongResult(f"of {2 * (size // 4)} words of shared memory {looked} were read, and {wrong} of them wrong")
    device.allocator.free(buffer, 8)
    return int(size)


def launches(count: int, progress: Callable[[int], object] = lambda done: None) -> Rounds:
    """Launch a small kernel so many times and check what all of them together left. WrongResult says from where on."""
    device = probes.device()
    program = probes.load(device, SOURCE, "exercise", 1, 1)
    buffer = device.allocator.alloc(4 * THREADS)
    device.upload(buffer, bytes(4 * THREADS))
    wanted = [0] * THREADS
    for done in range(1, count + 1):
        program(buffer, global_size=(1, 1, 1), local_size=(THREADS, 1, 1), vals=(done,))
        wanted = [(word * 3 + done + i) & 0xFFFFFFFF for i, word in enumerate(wanted)]
        if done % CHECK_EVERY == 0 or done == count:
            progress(done)
            if (found := probes.words(device, buffer, THREADS)) != wanted:
                lane = next(i for i in range(THREADS) if found[i] != wanted[i])
                raise WrongResult(
                    f"between launches {max(0, done - CHECK_EVERY)} and {done}, thread {lane} came to "
                    f"{found[lane]:#x}, not to {wanted[lane]:#x}"
                )
    device.allocator.free(buffer, 4 * THREADS)
    fifo = device.compute_gpfifo
    return Rounds(
        fifo.put_value // fifo.entries_count, device.cmdq_allocator.turns, device.kernargs_offset_allocator.turns
    )


class Traffic:
    """Small launches and copies: rounds whose every byte is checked. Close it."""

    def __init__(self) -> None:
        self._device = probes.device()
        self._program = probes.load(self._device, SOURCE, "exercise", 1, 1)
        self._buffers = [self._device.allocator.alloc(TRAFFIC_BYTES) for _ in range(2)]

    def round(self, number: int) -> None:
        """Copy in, launch, copy by the GPU's copy engine, copy out. WrongResult says at which byte."""
        device, (state, far) = self._device, self._buffers
        data = random.Random(number).randbytes(TRAFFIC_BYTES)
        device.upload(state, data)
        words = list(struct.unpack_from(f"<{THREADS}I", data))
        for launch in range(TRAFFIC_LAUNCHES):
            self._program(state, global_size=(1, 1, 1), local_size=(THREADS, 1, 1), vals=(number + launch,))
            words = [(word * 3 + number + launch + i) & 0xFFFFFFFF for i, word in enumerate(words)]
        queue = device.hw_copy_queue_t().wait(device.timeline_signal, device.timeline_value - 1)
        queue.copy(far, state, TRAFFIC_BYTES).signal(device.timeline_signal, device.next_timeline()).submit(device)
        device.synchronize()
        found, wanted = device.download(far, TRAFFIC_BYTES), struct.pack(f"<{THREADS}I", *words) + data[4 * THREADS :]
        if found != wanted:
            at = next(i for i in range(TRAFFIC_BYTES) if found[i] != wanted[i])
            raise WrongResult(
                f"round {number}: byte {at} of {TRAFFIC_BYTES} came back as {found[at]}, not as {wanted[at]}"
            )

    def close(self) -> None:
        """Give the buffers back."""
        for buffer in self._buffers:
            self._device.allocator.free(buffer, TRAFFIC_BYTES)
