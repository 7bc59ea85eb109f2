"""What both kinds of memory give kernels, for a first boot: bytes a second, and hand-overs between CTAs.

On a Jetson each probe is made in volatile and in cached memory, whatever the policy of the process is; on a GPU with
memory of its own in that, which is of one kind. Results that a probe counts with go to volatile memory.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Final

from tegrad.errors import TegradError
from tegrad.nv import compilers, roles
from tegrad.nv.roles import Role

if TYPE_CHECKING:
    from tegrad.nv.device import NVDevice

VOLATILE: Final = "volatile"
CACHED: Final = "cached"
OWN: Final = "the GPU's own"
"""The kinds of memory: Orin's two, and that of a GPU which has its own."""
_ROLES: Final = {
    name: replace(roles.WORKSPACE, name=f"{name} probe", volatile=flags, cached=flags)
    for name, flags in ((VOLATILE, roles.VOLATILE), (CACHED, roles.CACHED))
}
M32: Final = 0xFFFFFFFF

THREADS: Final = 256
BLOCKS_PER_SM: Final = 4
"""Of the kernels that stream: 1,024 threads an SM with four loads of 16 bytes each in flight."""
REREAD_BYTES: Final = 2 << 20
"""Bytes that are read again and again: half of an Orin's L2."""
PASSES: Final = 5
"""Times that each is measured; the median counts."""
FACTOR: Final = 2654435761
FILL: Final = """extern "C" __global__ void fill(uint4 *to, int pieces) {
    for (unsigned i = blockIdx.x * blockDim.x + threadIdx.x; i < pieces; i += gridDim.x * blockDim.x) {
        unsigned v = i * 2654435761u;
        to[i] = make_uint4(v, v ^ 0x55555555u, ~v, i);
    }
}"""
READ: Final = """extern "C" __global__ void read(const uint4 *from, unsigned *sum, int pieces, int times) {
    unsigned total = 0, step = gridDim.x * blockDim.x;
    for (int turn = 0; turn < times; turn++)
        for (unsigned i = blockIdx.x * blockDim.x + threadIdx.x; i < pieces; i += 4 * step) {
            uint4 v[4];
#pragma unroll
            for (int k = 0; k < 4; k++) {
                v[k] = make_uint4(0, 0, 0, 0);
                if (i + k * step < pieces)
                    asm volatile("ld.global.cg.v4.u32 {%0, %1, %2, %3}, [%4];"
                                 : "=r"(v[k].x), "=r"(v[k].y), "=r"(v[k].z), "=r"(v[k].w) : "l"(from + i + k * step));
            }
#pragma unroll
            for (int k = 0; k < 4; k++) total += v[k].x + v[k].w * (v[k].y ^ v[k].z);
        }
    atomicAdd(sum, total);
}"""
"""Loads that pass L1 by, as those of weights do."""
_COPY: Final = """extern "C" __global__ void copy(uint4 *to, const uint4 *from, int pieces) {
    unsigned step = gridDim.x * blockDim.x;
    for (unsigned i = blockIdx.x * blockDim.x + threadIdx.x; i < pieces; i += 4 * step) {
        uint4 v[4];
#pragma unroll
        for (int k = 0; k < 4; k++)
            if (i + k * step < pieces) v[k] = from[i + k * step];
#pragma unroll
        for (int k = 0; k < 4; k++)
            if (i + k * step < pieces) to[i + k * step] = v[k];
    }
}"""

MOST_ROUND_PACKETS: Final = 512
"""Packets of a round at most, and threads of a CTA, each of which waits for one. A step's vectors are of 256 to 1,024
(8 elements a packet, Llama 3.2 1B)."""
PACKET_TIMEOUT_NS: Final = 2_000_000_000
"""How long a packet is waited for."""
_PACKETS: Final = """extern "C" __global__ void packets(unsigned char *memory, unsigned *told, int first, int rounds,
                                                       int patience) {
    __shared__ volatile unsigned over;
    unsigned torn = 0, parts = 0, late = 0, lost = 0;
    if (threadIdx.x == 0) over = 0;
    __syncthreads();
    for (unsigned epoch = first; epoch < first + rounds && !over; epoch++) {
        const unsigned count = gridDim.x * PER_CTA;
        unsigned char *slots = memory + (size_t)(epoch & 1) * count * 16;
        if (threadIdx.x < PER_CTA) {
            const unsigned id = blockIdx.x * PER_CTA + threadIdx.x;
            STORE(slots + id * 16, epoch * 2654435761u + id, epoch ^ id * 40503u, ~(epoch + id), epoch);
        }
        for (unsigned id = threadIdx.x; id < count; id += blockDim.x) {
            unsigned long long begun = 0;
            uint4 v;
            for (unsigned polls = 0;; polls++) {
                asm volatile("ld.relaxed.gpu.global.v4.u32 {%0, %1, %2, %3}, [%4];"
                             : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "l"(slots + id * 16) : "memory");
                bool mixed = v.x != v.w * 2654435761u + id || v.y != (v.w ^ id * 40503u) || v.z != ~(v.w + id);
                if (!v.w) mixed = v.x | v.y | v.z;
                torn += mixed && v.w == epoch;
                parts += mixed && v.w != epoch;
                if (v.w == epoch) break;
                late += v.w != 0 && v.w + 2 != epoch;
                if (polls % 256 == 255) {
                    unsigned long long now;
                    asm volatile("mov.u64 %0, %globaltimer;" : "=l"(now));
                    if (!begun) begun = now;
                    if (over || now - begun > patience) {
                        lost++;
                        over = 1;
                        break;
                    }
                }
            }
        }
        __syncthreads();
    }
    atomicAdd(told, torn);
    atomicAdd(told + 1, late);
    atomicAdd(told + 2, lost);
    atomicAdd(told + 3, parts);
    if (threadIdx.x == 0) {
        unsigned sm;
        asm volatile("mov.u32 %0, %smid;" : "=r"(sm));
        told[4 + blockIdx.x] = sm;
    }
}"""
"""Packets as the one-launch step has them (llm/kernels/sync.cuh): 12 bytes and the epoch, stored and loaded as one.

Every CTA stores its packets of an epoch and then polls for those of all. There are two slots of each, in turn: who is
in an epoch has seen all packets of the one before, so that a slot holds this epoch's packet or the one before last.
"""
STORE: Final = (
    '#define STORE(to, x, y, z, w) asm volatile("st.relaxed.gpu.global.v4.u32 [%0], {%1, %2, %3, %4};"'
    ' :: "l"(to), "r"(x), "r"(y), "r"(z), "r"(w) : "memory")'
)
EMPTY: Final = 'extern "C" __global__ void empty(unsigned *nothing) {}'
_EXCHANGE: Final = """extern "C" __global__ void exchange(unsigned char *from, unsigned char *to) {
    unsigned total = 0;
    for (unsigned id = threadIdx.x; id < gridDim.x * PER_CTA; id += blockDim.x) {
        uint4 v;
        asm volatile("ld.global.cg.v4.u32 {%0, %1, %2, %3}, [%4];"
                     : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "l"(from + id * 16) : "memory");
        total += v.x + v.y + v.z + v.w;
    }
    __syncthreads();
    if (threadIdx.x < PER_CTA) {
        unsigned id = blockIdx.x * PER_CTA + threadIdx.x;
        STORE(to + id * 16, total, id, ~total, 1);
    }
}"""
"""A round of packets as a launch of its own: each CTA loads all packets of the last one and stores its own."""
LAUNCHES: Final = (100, 400)
"""Lengths of the recordings whose difference is what a round by launches costs."""


class WrongResult(TegradError, RuntimeError):
    """What the GPU computed is not what it should have."""


@dataclass(frozen=True, slots=True)
class Rates:
    """GB/s: writing, reading and copying (bytes read plus written) once, and reading a little again and again."""

    write: float
    read: float
    copy: float
    again: float


@dataclass(frozen=True, slots=True)
class Handover:
    """What packets between CTAs came to. Microseconds of a round, in which each CTA hands its packets to all."""

    ctas: int
    sms: int
    """On which the CTAs ran."""
    torn: int
    """Packets whose epoch was there before their data."""
    late: int
    """Packets of an epoch that could not be there any more, or not yet."""
    lost: int
    """Packets that did not come."""
    parts: int
    """Looks at packets whose data were there before their epoch: not whole, but harmless to who waits for the epoch."""
    us: float

    @property
    def right(self) -> bool:
        """Whether they are whole, in order, and all of them come."""
        return not (self.torn or self.late or self.lost)


def device() -> Any:
    """The NV device of this process, through tegrad."""
    import tegrad.nv

    tegrad.nv.install()
    from tinygrad import Device

    return Device["NV"]


def kinds(device: NVDevice) -> Mapping[str, Role]:
    """The kinds of memory that the device's GPU has, as roles: volatile and cached whatever the policy."""
    return _ROLES if getattr(device.iface, "unified_memory", False) else {OWN: roles.TENSORS}


def load(device: NVDevice, source: str, name: str, buffers: int, values: int, dynamic_shared: int | None = None) -> Any:
    """A kernel of so many pointers and then 32-bit integers, loaded; `dynamic_shared` as `compile_cuda` has it."""
    cubin = compilers.compile_cuda(source, device.arch, dynamic_shared=dynamic_shared)
    return device.load_program(cubin, name, buffers, values)


@contextmanager
def buffer(device: NVDevice, size: int, role: Role = roles.TENSORS) -> Iterator[Any]:
    """Memory of the device, given back when its work is done; volatile unless said."""
    from tegrad.nv.spec import MemorySpec

    spec = MemorySpec(nolru=True, role=role)
    made = device.allocator.alloc(size, spec)
    try:
        yield made
    finally:
        device.synchronize()
        device.allocator.free(made, size, spec)


def sum_of(pieces: int) -> int:
    """What `read` adds up of what `fill` has stored: v + i * 0xAAAAAAAA of each piece, which v ^ 0x5... ^ ~v is."""
    return (FACTOR + 0xAAAAAAAA) * (pieces * (pieces - 1) // 2) & M32


def stream(device: NVDevice, role: Role, size: int, times: int) -> Rates:
    """Write, read and copy `size` bytes once, half of it into the other half; read REREAD_BYTES of them `times` times.

    WrongResult where a sum of what was read is not that of what was written. MemoryError.
    """
    fill, read = load(device, FILL, "fill", 1, 1), load(device, READ, "read", 2, 2)
    copy = load(device, _COPY, "copy", 2, 1)
    launch = {"global_size": (device.sm_count * BLOCKS_PER_SM, 1, 1), "local_size": (THREADS, 1, 1), "wait": True}
    pieces, again = size // 16, REREAD_BYTES // 16

    def rate(program: Any, bytes_: int, *buffers: Any, vals: tuple[int, ...]) -> float:
        seconds = statistics.median(program(*buffers, vals=vals, **launch) for _ in range(PASSES))
        return float(bytes_ / seconds / 1e9)

    def summed(what: str, of: Any, out: Any, pieces: int, times: int) -> float:
        device.upload(out, bytes(16))
        speed = rate(read, 16 * pieces * times, of, out, vals=(pieces, times))
        found, wanted = words(device, out, 1)[0], sum_of(pieces) * times * PASSES & M32
        if found != wanted:
            raise WrongResult(f"{what} added up to {found:#x}, not to {wanted:#x}")
        return speed

    with buffer(device, max(size, REREAD_BYTES), role) as whole, buffer(device, 16) as out:
        written = rate(fill, size, whole, vals=(pieces,))
        once = summed(f"{size} bytes, read once,", whole, out, pieces, 1)
        half = whole.offset(size // 2, size // 2)
        copied = rate(copy, size, half, whole, vals=(pieces // 2,))
        summed(f"{size // 2} bytes that were copied", half, out, pieces // 2, 1)
        fill(whole, vals=(again,), **launch)
        return Rates(
            written, once, copied, summed(f"{REREAD_BYTES} bytes, read {times} times,", whole, out, again, times)
        )


def words(device: NVDevice, buffer: Any, count: int) -> list[int]:
    """The first words of a buffer when all work is done."""
    device.synchronize()
    return list(memoryview(device.download(buffer, 4 * count)).cast("I"))


def handover(device: NVDevice, role: Role, ctas: int, rounds: int) -> Handover:
    """Let so many CTAs, on an SM each, hand packets to each other for `rounds`. A round that ends badly is the last."""
    per_cta = max(1, MOST_ROUND_PACKETS // ctas)
    source = f"{STORE}\n#define PER_CTA {per_cta}\n{_PACKETS}"
    program, slots, told = load(device, source, "packets", 2, 3), 2 * ctas * per_cta * 16, 4 * (4 + ctas)
    short = max(1, rounds // 4)
    launch = {"global_size": (ctas, 1, 1), "local_size": (MOST_ROUND_PACKETS, 1, 1), "wait": True}
    with buffer(device, slots, role) as memory, buffer(device, told) as out:
        device.upload(out, bytes(told))
        device.upload(memory, bytes(slots))
        epoch, seconds = 1, []
        for count in (short, *((short, rounds) * PASSES)):  # the first is not measured
            seconds.append(program(memory, out, vals=(epoch, count, PACKET_TIMEOUT_NS), **launch))
            epoch += count
            torn, late, lost, parts, *sms = words(device, out, 4 + ctas)
            if torn or late or lost:
                return Handover(ctas, len(set(sms)), torn, late, lost, parts, 0.0)
    less, more = statistics.median(seconds[1::2]), statistics.median(seconds[2::2])
    return Handover(ctas, len(set(sms)), 0, 0, 0, parts, 1e6 * (more - less) / (rounds - short))


def exchange_us(device: NVDevice, role: Role, counts: tuple[int, int] = LAUNCHES) -> float:
    """Microseconds of a round of packets between all SMs as a recorded launch: its start, work and end.

    An empty launch would not do: on an H200 one takes 0.8 us, and a dependency between kernels that hand over 2.4.
    """
    from tegrad.nv.replay import Launch, Recording

    ctas = device.sm_count
    per_cta = max(1, MOST_ROUND_PACKETS // ctas)
    program = load(device, f"{STORE}\n#define PER_CTA {per_cta}\n{_EXCHANGE}", "exchange", 2, 0)
    size, times = ctas * per_cta * 16, []
    with buffer(device, size, role) as one, buffer(device, size, role) as other:
        for slot in (one, other):
            device.upload(slot, bytes(size))
        ways = [
            Launch(program, pair, (ctas, 1, 1), (MOST_ROUND_PACKETS, 1, 1)) for pair in ((one, other), (other, one))
        ]
        for count in counts:
            with Recording(device, [ways[at % 2] for at in range(count)]) as recording:
                recording.wait(recording.run())
                times.append(statistics.median(device.timed(recording.run) for _ in range(PASSES)))
    return float((times[1] - times[0]) / (counts[1] - counts[0]))
