"""What programs do while the GPU lags behind: right where the remedies are in place."""

from boards import open_device
from kernels import program, words
from submissions import held_back, launch

from tegrad.nv.queues import NVComputeQueue


def run_twice_with_two_values() -> int:
    """Submit one bound queue with 1 and again with 20 while the GPU is held back; what both runs added up to."""
    from tinygrad.dtype import dtypes
    from tinygrad.uop.ops import UOp

    device = open_device()
    buffer, add = device.allocator.alloc(4096), program(device, "add")
    value = UOp.variable("value", 0, 100, dtype=dtypes.int32)
    kernargs = device.allocator.alloc(add.kernargs_alloc_size)
    args = add.fill_kernargs((buffer,), (value,), kernargs)
    queue = NVComputeQueue().memory_barrier().exec(add, args, (1, 1, 1), (1, 1, 1))
    queue.bind(device)
    with held_back(device):
        queue.submit(device, {"value": 1})
        queue.submit(device, {"value": 20})
    device.compute_gpfifo.wait(device.compute_gpfifo.submissions)
    return words(buffer)[0]


def count_by_stride(size: int = 1000) -> list[int]:
    """Add one to each word by a kernel that goes through them in steps of its whole grid, which it has to know."""
    device = open_device()
    buffer, stride = device.allocator.alloc(4 * size), program(device, "stride")
    device.allocator._copyin(buffer, memoryview(bytes(4 * size)))
    stride(buffer, global_size=(3, 1, 1), local_size=(64, 1, 1), vals=(size,))
    device.synchronize()
    return words(buffer, size)


def overwrite_what_a_kernel_reads() -> int:
    """Copy a new value over the input of a kernel that has not run yet; what the kernel saw."""
    device = open_device()
    buffer, add = device.allocator.alloc(4096), program(device, "add")
    device.allocator._copyin(buffer, memoryview((1).to_bytes(4, "little")))
    with held_back(device):
        launch(add, buffer, 10)
        device.allocator._copyin(buffer, memoryview((500).to_bytes(4, "little")))
    return words(buffer)[0]


def read_what_a_kernel_writes() -> int:
    """Copy out the result of a kernel that has not run yet; what the CPU got."""
    device = open_device()
    buffer, store = device.allocator.alloc(4096), program(device, "store")
    device.allocator._copyin(buffer, memoryview((1).to_bytes(4, "little")))
    got = bytearray(4)
    with held_back(device):
        launch(store, buffer, 7)
        device.allocator._copyout(memoryview(got), buffer)
    return int.from_bytes(got, "little")
