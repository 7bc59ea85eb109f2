"""Small hand-written kernels for the tests of the device."""

from typing import Any

SOURCE = """
extern "C" __global__ void add(int *state, int value) { state[threadIdx.x] += value; }
extern "C" __global__ void store(int *state, int value) { state[threadIdx.x] = value; }
extern "C" __global__ void mix(int *state, int value) { state[threadIdx.x] = state[threadIdx.x] * 3 + value; }
extern "C" __global__ void spin(int *state, int value) {
    for (int i = 0; i < value; i++) state[threadIdx.x] = state[threadIdx.x] * 3 + i;
}
extern "C" __global__ void stride(int *state, int value) {
    int turns = 0;
    for (int i = blockIdx.x * blockDim.x + threadIdx.x; i < value && turns < 64; i += gridDim.x * blockDim.x, turns++)
        state[i] += 1;
}
extern "C" __global__ void blocks(int *state, int value) {
    int *mine = state + 4 * (blockIdx.x + 8 * (blockIdx.y + 8 * blockIdx.z));
    mine[0] = mine[0] * 3 + value;
    mine[1] = gridDim.x;
    mine[2] = gridDim.y;
    mine[3] = gridDim.z;
}
extern "C" __global__ void wild(int *state, int value) { state[(long long)value << 28] = 1; }
extern "C" __global__ void crooked(int *state, int value) { *(volatile int *)((char *)state + value) = 1; }
extern "C" __global__ void window(int *state, int value) { *(volatile int *)((unsigned long long)value << 28) = 1; }
extern "C" __global__ void spill16(int *state, int value) {
    volatile int a[16];
    for (int i = 0; i < 16; i++) a[i] = value + i;
    state[threadIdx.x] = a[value & 15];
}
extern "C" __global__ void spill64(int *state, int value) {
    volatile int a[64];
    for (int i = 0; i < 64; i++) a[i] = value + i;
    state[threadIdx.x] = a[value & 63];
}
extern "C" __global__ void trap(int *state, int value) { if (value) __trap(); state[0] = value; }
"""


def program(device: Any, name: str) -> Any:
    """One of the kernels above, loaded: (int *state, int value), as many threads as the launch says."""
    from tinygrad.device import TinyELF
    from tinygrad.dtype import dtypes
    from tinygrad.helpers import Target

    from tegrad.nv import compilers

    source = next(part for part in SOURCE.split('extern "C"') if f"void {name}(" in part)
    image = compilers.compile_cuda(f'extern "C"{source}', device.arch)
    signature = (("state", 0, dtypes.int32, ()), ("value", 1, dtypes.int32, ()))
    return device.runtime(TinyELF(image, name, Target(device="NV", arch=device.arch), signature))


def words(buffer: Any, count: int = 1) -> list[int]:
    """The first integers of a buffer, as they are now."""
    return list(buffer.cpu_view().view(0, 4 * count, "i")[:count])
