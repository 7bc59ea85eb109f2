"""What the emulated board cannot vouch for, case by case: the NV device, its launches, faults and kernels.

`python tests/hardware/nv_cases.py CASE ...` is the process that `run_case` starts; test_h200.py is the command.
"""

import itertools
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from nv_opened import buffer, device, raw

ROOT = Path(__file__).resolve().parents[2]
TIME_LIMIT_S = 90
ENVIRONMENT = {"DEV": "NV", "HCQDEV_WAIT_TIMEOUT_MS": "5000", "PARALLEL": "0", "CCACHE": "0"}

CASES: dict[str, tuple[Callable[[], None], dict[str, str]]] = {}
TIME_LIMITS_S: dict[str, float] = {}
"""Of cases that take longer than TIME_LIMIT_S."""


def case(**environment: str) -> Callable[[Callable[[], None]], Callable[[], None]]:
    """Register a case with the environment that it needs."""

    def register(function: Callable[[], None]) -> Callable[[], None]:
        CASES[function.__name__] = function, environment
        return function

    return register


def both_renderers(function: Callable[[], None]) -> Callable[[], None]:
    """Register a case once for each renderer."""
    for renderer in ("CUDA", "PTX"):
        CASES[f"{function.__name__}[{renderer}]"] = function, {"DEV": f"NV:{renderer}"}
    return function


# ---- helpers

ADD_ONE = 'extern "C" __global__ void add_one(float *out, const float *in) { out[threadIdx.x] = in[threadIdx.x] + 1; }'


def close_to(got: Any, want: Any, tolerance: float) -> None:
    """Fail when two arrays differ by more than a tolerance relative to the largest value."""
    import numpy as np

    got, want = np.asarray(got, dtype=np.float64), np.asarray(want, dtype=np.float64)
    assert got.shape == want.shape, (got.shape, want.shape)
    scale = max(1.0, float(np.abs(want).max()))
    worst = float(np.abs(got - want).max()) / scale
    assert worst <= tolerance, f"differs by {worst:.3g} of the largest value, allowed {tolerance:g}"


def stock_queue_class() -> Any:
    """tinygrad's own compute queue, whose signals after a kernel are releases of the QMD."""
    from tinygrad.runtime import ops_nv

    return next(c for c in ops_nv.NVComputeQueue.__mro__ if c.__module__ == ops_nv.__name__)


# ---- tinygrad operations


@both_renderers
def one_liner() -> None:
    """The first thing that a user types."""
    from tinygrad import Tensor

    got = (Tensor([1, 2, 3]) + Tensor([4, 5, 6])).numpy().tolist()
    assert got == [5, 7, 9], got


@both_renderers
def operations() -> None:
    """Matrix products, convolution, softmax, cumulative sum, argmax: against numpy."""
    import numpy as np
    from tinygrad import Tensor

    rng = np.random.default_rng(1)
    for m, k, n in ((128, 128, 128), (65, 129, 33), (512, 256, 384)):
        a, b = (rng.standard_normal(s, dtype=np.float32) for s in ((m, k), (k, n)))
        close_to((Tensor(a) @ Tensor(b)).numpy(), a @ b, 1e-5)
        ah, bh = a.astype(np.float16), b.astype(np.float16)
        close_to((Tensor(ah) @ Tensor(bh)).numpy(), ah.astype(np.float32) @ bh.astype(np.float32), 2e-3)
    x, w = rng.standard_normal((2, 3, 17, 19), dtype=np.float32), rng.standard_normal((5, 3, 3, 3), dtype=np.float32)
    windows = np.lib.stride_tricks.sliding_window_view(x, (3, 3), axis=(2, 3))
    close_to(Tensor(x).conv2d(Tensor(w)).numpy(), np.einsum("nchwij,ocij->nohw", windows, w), 1e-5)
    z = rng.standard_normal((37, 1000), dtype=np.float32)
    e = np.exp(z - z.max(1, keepdims=True))
    close_to(Tensor(z).softmax(1).numpy(), e / e.sum(1, keepdims=True), 1e-5)
    close_to(Tensor(z).cumsum(1).numpy(), z.cumsum(1), 1e-5)
    assert (Tensor(z).argmax(1).numpy() == z.argmax(1)).all()


@both_renderers
def backward() -> None:
    """Gradients of a two-layer network, against numpy."""
    import numpy as np
    from tinygrad import Tensor

    rng = np.random.default_rng(2)
    x, w, v = (rng.standard_normal(s, dtype=np.float32) for s in ((20, 30), (30, 40), (40, 5)))
    tx, tw, tv = Tensor(x), Tensor(w), Tensor(v)
    gw, gv = ((tx @ tw).relu() @ tv).square().sum().gradient(tw, tv)
    hidden = np.maximum(x @ w, 0)
    out = 2 * (hidden @ v)
    close_to(gv.numpy(), hidden.T @ out, 1e-4)
    close_to(gw.numpy(), x.T @ ((out @ v.T) * (x @ w > 0)), 1e-4)


@both_renderers
def double_precision() -> None:
    """Operations in float64, which tinygrad's PTX cannot even assemble."""
    import numpy as np
    from tinygrad import Tensor

    x = np.random.default_rng(3).uniform(0.1, 30, 1000)
    t = Tensor(x)
    for name, got, want in (
        ("reciprocal", t.reciprocal(), 1 / x),
        ("sqrt", t.sqrt(), np.sqrt(x)),
        ("exp2", t.exp2(), np.exp2(x)),
        ("log2", t.log2(), np.log2(x)),
        ("sin", t.sin(), np.sin(x)),
    ):
        worst = float(np.abs(got.numpy() / want - 1).max())
        assert worst < 1e-9, f"{name} differs by {worst:.3g}"


@both_renderers
def odd_views() -> None:
    """Pieces of buffers at odd offsets, read by kernels that would like vector loads."""
    import numpy as np
    from tinygrad import Tensor, dtypes

    rng = np.random.default_rng(4)
    for dtype, offset in itertools.product((np.float16, np.float32), (1, 2, 3, 5)):
        h = rng.standard_normal(4096).astype(dtype)
        t = Tensor(h).realize()
        close_to((t[offset : offset + 1024].contiguous() + 1).numpy(), h[offset : offset + 1024] + 1, 1e-3)
    raw_bytes = rng.integers(0, 60, 4096).astype(np.uint8)
    t = Tensor(raw_bytes).realize()
    got = (t[2:514].bitcast(dtypes.half).contiguous() + 1).numpy()
    close_to(got, raw_bytes[2:514].view(np.float16) + np.float16(1), 1e-3)


@both_renderers
def shared_pool() -> None:
    """A reduction by 1024 threads whose partial sums take 64 KiB of shared memory."""
    import numpy as np
    from tinygrad import Tensor
    from tinygrad.codegen import to_program
    from tinygrad.codegen.opt import Opt, OptOps
    from tinygrad.uop.ops import Ops

    x = np.random.default_rng(7).standard_normal((1024, 1024), dtype=np.float32)
    options = (Opt(OptOps.GROUPTOP, 0, 64), Opt(OptOps.LOCAL, 0, 16), Opt(OptOps.UPCAST, 0, 16))
    tensor = Tensor(x).realize()
    [ast] = [call.src[0] for call in tensor.sum(1).schedule_linear().src if call.src[0].op is Ops.SINK]
    compiled = to_program(ast.replace(arg=replace(ast.arg, opts_to_apply=options)), device().renderer)
    program = device().runtime(compiled.to_elf())
    out = buffer(np.zeros(1024, np.float32))
    sizes = {"global_size": compiled.arg.global_size, "local_size": compiled.arg.local_size}
    program(out._buf, tensor.uop.base.buffer._buf, **sizes)
    assert program.shmem_usage > 64 << 10, program.shmem_usage
    close_to(out.numpy(), x.sum(1), 1e-5)


@both_renderers
def jit() -> None:
    """A recorded function, replayed with new inputs."""
    import numpy as np
    from tinygrad import Tensor, TinyJit

    @TinyJit
    def step(x: Any, w: Any) -> Any:
        return ((x @ w).relu() @ w + x).realize()

    rng = np.random.default_rng(5)
    w = rng.standard_normal((64, 64), dtype=np.float32) / 8
    tw = Tensor(w).realize()
    for _ in range(8):
        x = rng.standard_normal((64, 64), dtype=np.float32)
        close_to(step(Tensor(x).realize(), tw).numpy(), np.maximum(x @ w, 0) @ w + x, 1e-5)


@both_renderers
def jit_in_flight() -> None:
    """Functions of one kernel, of three and of forty, called with other inputs and parts of inputs without a sync."""
    import numpy as np
    from tinygrad import Tensor, TinyJit

    def steps(state: Any, count: int) -> Any:
        def function(x: Any) -> Any:
            for i in range(count - 1):
                x = (x[4:].contiguous() * 3 + i if i == 0 else x * 3 + i).realize()
            return state.assign(state * 5 + (x if count > 1 else x[4:])).realize()

        return function

    rng, turns = np.random.default_rng(6), 30 if os.environ.get("TEGRAD_BOARD") else 300
    for count in (1, 3, 40):
        state = Tensor(np.zeros(60, np.int32)).realize()
        given = [rng.integers(0, 1000, 64).astype(np.int32) for _ in range(7)]
        tensors = [Tensor(x).realize() for x in given]
        function: Any = TinyJit(steps(state, count))
        expected = np.zeros(60, np.int32)
        begin = 0.0
        for turn in range(turns):
            if turn == turns // 3:
                device().synchronize()
                begin = time.perf_counter()
            function(tensors[turn % 7])
            x = given[turn % 7][4:]
            for i in range(count - 1):
                x = x * 3 + np.int32(i)
            expected = expected * 5 + x
        taken = time.perf_counter() - begin
        print(f"{count} kernels: {taken / (turns - turns // 3) * 1e6:.1f} us a call", end=" ")
        assert (state.numpy() == expected).all()


@case(DEV="NV:PTX", PARALLEL="2")
def spawned_workers() -> None:
    """Kernels compiled in tinygrad's worker processes have the patches too."""
    double_precision()
    odd_views()


# ---- queues, signals, QMDs


def _kernel_and_arguments() -> tuple[Any, Any, Any, Any, Any]:
    import numpy as np

    program = raw(ADD_ONE, "add_one", 2)
    a, b = buffer(np.zeros(32, np.float32)), buffer(np.zeros(32, np.float32))
    forth = program.fill_kernargs((b._buf, a._buf))
    back = program.fill_kernargs((a._buf, b._buf))
    return program, a, b, forth, back


@case()
def signal_after_kernel_pushbuffer() -> None:
    """A kernel and a release in the pushbuffer right after it."""
    dev = device()
    program, _, b, forth, _ = _kernel_and_arguments()
    for value in range(1, 51):
        signal = dev.new_signal()
        queue = dev.hw_compute_queue_t().exec(program, forth, (1, 1, 1), (32, 1, 1))
        queue.signal(signal, value).submit(dev)
        signal.wait(value)
        assert signal.value == value
    assert (b.numpy() == 1).all()


@case()
def signal_after_kernel_qmd() -> None:
    """A kernel whose QMD releases the signal itself: value, timestamp, two releases, memory written before."""
    dev = device()
    program, _, b, forth, _ = _kernel_and_arguments()
    stock = stock_queue_class()
    # Version 3 stores 32 bits of payload, as tinygrad has it.
    for value in (1, 7, 0x1_2345_6789 if program.qmd.ver >= 4 else 0x2345_6789):
        first, second = dev.new_signal(), dev.new_signal()
        queue = dev.hw_compute_queue_t().exec(program, forth, (1, 1, 1), (32, 1, 1))
        stock.signal(queue, first, value)
        stock.signal(queue, second, value + 1)
        assert queue.active_qmd is not None, "the signal did not go into the QMD"
        queue.submit(dev)
        first.wait(value)
        second.wait(value + 1)
        assert (first.value, second.value) == (value, value + 1), (hex(first.value), hex(second.value))
        assert first.timestamp > 0
        forth = program.fill_kernargs(forth.bufs)
    assert (b.numpy() == 1).all()


def _release_form(structure: int, wide: int) -> None:
    """What a QMD's release of one form stores, and whether the launch ends: printed, for the board's model of it."""
    import struct

    dev = device()
    program, _, _, forth, _ = _kernel_and_arguments()
    said = []
    for membar in (0, 1):
        signal = dev.new_signal()
        words = signal.base_buf.cpu_view().view(0, 16, "B")
        words[:] = b"\xa5" * 16
        queue = dev.hw_compute_queue_t().exec(program, program.fill_kernargs(forth.bufs), (1, 1, 1), (32, 1, 1))
        qmd = queue.active_qmd
        stock_queue_class().signal(queue, signal, 0x1_0000_0002)
        for name, value in (("structure_size", structure), ("payload64b", wide), ("membar_type", membar)):
            qmd.write(**{f"release0_{name}": value})
        queue.submit(dev)
        fifo, limit = dev.compute_gpfifo, time.monotonic() + 1
        while fifo.done < fifo.submissions and time.monotonic() < limit:
            time.sleep(0.001)
        time.sleep(0.005)
        stored = " ".join(f"{w:08x}" for w in struct.unpack("<4I", bytes(words[:])))
        said.append(f"membar {membar}: {stored}, {'ended' if fifo.done == fifo.submissions else 'never ended'}")
        if fifo.done < fifo.submissions:
            break
    print(f"QMD v{qmd.ver}, {'; '.join(said)}", end=" ", flush=True)
    if (structure, wide) == (0, int(qmd.ver >= 4)):
        expected = "00000002 00000001" if qmd.ver >= 4 else "00000002"
        assert all(expected in line and line.endswith(", ended") for line in said), said
    if said[-1].endswith("never ended"):
        os._exit(0)  # closing the device would wait for it


# A process each: a launch that never ends takes the channel with it.
for _form in itertools.product((0, 1, 2), (0, 1)):
    CASES[f"qmd_release_form[structure {_form[0]}, payload64b {_form[1]}]"] = partial(_release_form, *_form), {}


@case()
def hundred_runs_changing_values() -> None:
    """Two kernels and a signal recorded once, submitted 100 times with a new value each."""
    from tinygrad import dtypes
    from tinygrad.uop.ops import UOp

    dev = device()
    program, a, _, forth, back = _kernel_and_arguments()
    value = UOp.variable("value", 0, 0xFFFFFFFF, dtypes.uint32)
    queue = dev.hw_compute_queue_t().wait(dev.timeline_signal, value - 1).memory_barrier()
    queue.exec(program, forth, (1, 1, 1), (32, 1, 1)).exec(program, back, (1, 1, 1), (32, 1, 1))
    queue.signal(dev.timeline_signal, value)
    for _ in range(100):
        queue.submit(dev, {"value": dev.next_timeline()})
    dev.synchronize()
    assert (a.numpy() == 200).all(), a.numpy()[:4]


@case()
def changing_arguments() -> None:
    """The same kernel 300 times, each with another integer argument, none synchronised."""
    import numpy as np

    source = 'extern "C" __global__ void put(int *out, int at, int value) { out[at] = value; }'
    program = raw(source, "put", 1, 2)
    out = buffer(np.zeros(300, np.int32))
    for i in range(300):
        program(out._buf, vals=(i, i * i))
    assert (out.numpy() == np.arange(300, dtype=np.int32) ** 2).all()


@case()
def ten_thousand_launches() -> None:
    """Launches beyond every ring, without a sync."""
    import numpy as np

    source = 'extern "C" __global__ void count(int *out, int at) { if (out[0] == at) out[0] = at + 1; }'
    program = raw(source, "count", 1, 1)
    out = buffer(np.zeros(1, np.int32))
    begin = time.perf_counter()
    for i in range(10_000):
        program(out._buf, vals=(i,))
    launched = time.perf_counter()
    device().synchronize()
    print(
        f"{(launched - begin) * 100:.1f} us a launch, {(time.perf_counter() - begin) * 100:.1f} us with its run",
        end=" ",
    )
    assert out.numpy()[0] == 10_000, out.numpy()


@case()
def chained_kernels() -> None:
    """400 kernels chained by dependent QMDs in one queue, each reading what the one before wrote."""
    dev = device()
    program, a, _, _, _ = _kernel_and_arguments()
    b = buffer(__import__("numpy").zeros(32, "float32"))
    queue = dev.hw_compute_queue_t().wait(dev.timeline_signal, dev.timeline_value - 1).memory_barrier()
    for i in range(400):
        pair = (b._buf, a._buf) if i % 2 == 0 else (a._buf, b._buf)
        queue.exec(program, program.fill_kernargs(pair), (1, 1, 1), (32, 1, 1))
    queue.signal(dev.timeline_signal, dev.next_timeline()).submit(dev)
    assert (a.numpy() == 400).all(), a.numpy()[:4]


# ---- programs


@case()
def large_shared_memory() -> None:
    """One block with nearly all the shared memory that the chip gives."""
    import numpy as np

    from tegrad.nv.renderers import shared_max

    size = shared_max(device().arch)
    words = size // 4
    source = f"""
    extern __shared__ unsigned pool[];
    extern "C" __global__ void turn(unsigned *out) {{
      for (unsigned i = threadIdx.x; i < {words}u; i += blockDim.x) pool[i] = i * 2654435761u;
      __syncthreads();
      for (unsigned i = threadIdx.x; i < {words}u; i += blockDim.x) out[i] = pool[{words - 1}u - i];
    }}"""
    program = raw(source, "turn", 1, dynamic_shared=size)
    out = buffer(np.zeros(words, np.uint32))
    program(out._buf, global_size=(1, 1, 1), local_size=(256, 1, 1))
    want = (np.arange(words, dtype=np.uint64) * 2654435761 % (1 << 32)).astype(np.uint32)[::-1]
    print(f"{size} bytes", end=" ")
    assert (out.numpy() == want).all()


@case()
def blocks_that_an_sm_holds() -> None:
    """As many blocks at a time as the launch bounds ask for; also printed: with no more than one block's split."""
    import numpy as np

    from tegrad.nv.program import sm_config

    if os.environ.get("TEGRAD_BOARD"):
        print("a board runs one block after another", end=" ")
        return
    dev, asked = device(), 4
    source = f"""
    extern __shared__ unsigned pool[];
    extern "C" __global__ void __launch_bounds__(64, {asked}) hold(unsigned long long *out) {{
      unsigned long long begun, now; unsigned sm;
      asm volatile("mov.u64 %0, %%globaltimer; mov.u32 %1, %%smid;" : "=l"(begun), "=r"(sm));
      pool[threadIdx.x] = sm;
      do asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(now)); while (now - begun < 500000);
      if (threadIdx.x) return;
      out[3 * blockIdx.x] = pool[threadIdx.x], out[3 * blockIdx.x + 1] = begun, out[3 * blockIdx.x + 2] = now;
    }}"""
    program = raw(source, "hold", 1, dynamic_shared=40 << 10)
    blocks = asked * dev.sm_count

    def most() -> int:
        out = buffer(np.zeros(3 * blocks, np.uint64))
        program(out._buf, global_size=(blocks, 1, 1), local_size=(64, 1, 1))
        rows = out.numpy().reshape(blocks, 3).astype(np.int64)
        return max(
            int(((rows[:, 0] == sm) & (rows[:, 1] <= begun) & (begun < rows[:, 2])).sum()) for sm, begun, _ in rows
        )

    found = most()
    single = sm_config(program.shmem_usage, dev.sm_version)
    program.qmd.write(min_sm_config_shared_mem_size=single, target_sm_config_shared_mem_size=single)
    print(f"{found} blocks, {most()} with a split for one", end=" ")
    assert found >= asked


@case()
def module_variables() -> None:
    """`__device__` with and without a value, and `__constant__`: all have storage, and keep it across launches."""
    import numpy as np

    source = """
    __device__ int counter; __device__ int start[4] = {10, 20, 30, 40}; __constant__ int factor[2] = {3, 5};
    extern "C" __global__ void step(int *out) {
      int before = counter; __syncthreads();
      if (threadIdx.x == 0) counter = before + 1;
      out[threadIdx.x] = before * 100 + start[threadIdx.x] * factor[threadIdx.x & 1];
    }"""
    program = raw(source, "step", 1)
    out = buffer(np.zeros(4, np.int32))
    for i in range(3):
        program(out._buf, local_size=(4, 1, 1))
        assert out.numpy().tolist() == [i * 100 + v for v in (30, 100, 90, 200)], out.numpy()


@case()
def local_memory() -> None:
    """A kernel with a large array of its own for each thread, on many blocks."""
    import numpy as np

    source = """extern "C" __global__ void spill(int *out, int n) {
      int own[1000];
      for (int i = 0; i < 1000; i++) own[i] = i * n + threadIdx.x;
      int sum = 0;
      for (int i = 0; i < 1000; i++) sum += own[(i * 7 + n) % 1000];
      out[blockIdx.x * blockDim.x + threadIdx.x] = sum;
    }"""
    program = raw(source, "spill", 1, 1)
    out = buffer(np.zeros(512 * 64, np.int32))
    program(out._buf, global_size=(512, 1, 1), local_size=(64, 1, 1), vals=(3,))
    want = sum(i * 3 for i in range(1000)) + 1000 * np.arange(64)
    assert (out.numpy().reshape(512, 64) == want).all()


@case()
def misaligned_argument_is_refused() -> None:
    """A pointer that breaks a kernel's vector loads ends in an error, not in a fault of the GPU."""
    import numpy as np
    from tinygrad import Device, Tensor

    from tegrad.nv.program import LaunchError

    source = """// tegrad: align=16
    extern "C" __global__ void quad(float4 *data) { data[threadIdx.x].x += 1; }"""
    program = raw(source, "quad", 1)
    whole = buffer(np.zeros(64, np.float32))
    refused = ""
    try:
        program(whole._buf.offset(4, 64))
    except LaunchError as error:
        refused = str(error)
    assert "argument 0 of quad" in refused, "a pointer at 4 mod 16 was accepted"
    program(whole._buf.offset(16, 64), local_size=(4, 1, 1))
    assert whole.numpy()[4:20:4].tolist() == [1, 1, 1, 1]
    assert (Tensor([1.0]) + 1).numpy().tolist() == [2.0]
    Device["NV"].synchronize()


BROKEN = {
    "unmapped_read": ("out[0] = *(volatile unsigned *)0x100000ull;", 31),
    "misaligned_access": ("*(volatile unsigned long long *)((char *)out + 4) = 1;", 13),
    "trap": ("__trap();", 13),
}
"""What a kernel may do that stops it, and the notifier's code; 0x100000 is below everything that an interface maps."""


def _found_while_waiting(what: str) -> None:
    """A kernel that is stopped raises DeviceFault before the wait's time is up, and the process goes on.

    Prints how long it took, and what told of the fault.
    """
    import numpy as np
    from tinygrad import Tensor

    import tegrad.nv
    from tegrad.nv.faults import DeviceFault

    dev = device()
    does, code = BROKEN[what]
    program = raw(f'extern "C" __global__ void broken(unsigned *out) {{ {does} }}', "broken", 1)
    out = buffer(np.zeros(64, np.uint32))
    at = out._buf.va_addr
    dev.synchronize()
    begin = time.perf_counter()
    fault: Any = None
    try:
        program(out._buf)
        dev.synchronize()
    except DeviceFault as error:
        fault = error
    took = (time.perf_counter() - begin) * 1000
    print(f"after {took:.0f} ms: code {getattr(fault, 'code', None)}; {fault}", end=" ")
    assert fault is not None, "no DeviceFault"
    assert (fault.code, fault.kernel) == (code, "broken")
    where = {"unmapped_read": 0x100000, "misaligned_access": at + 4, "trap": None}[what]
    assert fault.address == where, (fault.address, where)
    del program, out
    begin = time.perf_counter()
    tegrad.nv.reopen()
    assert (Tensor([1.0]) + 1).numpy().tolist() == [2.0]
    print(f"Opened again in {(time.perf_counter() - begin) * 1000:.0f} ms.", end=" ")


for _what in BROKEN:
    CASES[f"found_while_waiting[{_what}]"] = partial(_found_while_waiting, _what), {}


@case()
def closing_after_a_fault() -> None:
    """What is closed on the way out of a DeviceFault raises nothing, and nothing of it keeps reopen() from working."""
    import gc

    import numpy as np
    from tinygrad import Tensor
    from tinygrad.device import BufferSpec

    import tegrad
    from tegrad.nv.faults import DeviceFault

    dev, spec, hooks = device(), BufferSpec(nolru=True), (sys.excepthook, sys.unraisablehook)
    recorded = tegrad.record(lambda x: x + 1, np.zeros(32, np.float32))
    recorded.run()
    own = dev.allocator.alloc(1 << 20, spec)
    program = raw('extern "C" __global__ void broken(unsigned *out) { __trap(); }', "broken", 1)
    said, raised = "", list[Any]()
    sys.excepthook = lambda *about: raised.append(about)  # a program's finalizer has nobody to raise to
    sys.unraisablehook = raised.append
    try:
        program(own)
        dev.synchronize()
    except DeviceFault as fault:
        said = str(fault)
        dev.allocator.free(own, own.size, spec)
        recorded.close()
        recorded = program = None
        gc.collect()
        tegrad.nv.reopen()
    sys.excepthook, sys.unraisablehook = hooks
    assert said, "no DeviceFault"
    assert not raised, raised
    assert (Tensor([1.0]) + 1).numpy().tolist() == [2.0]
    print(said, end=" ")


@case()
def long_kernel_is_left_alone() -> None:
    """A kernel that runs for seconds is no fault, and ends right, though the driver is asked about it meanwhile."""
    import numpy as np

    source = """extern "C" __global__ void spin(unsigned *out, int turns) {
      unsigned x = threadIdx.x;
      for (int i = 0; i < turns; i++) x = x * 1664525u + 1013904223u;
      out[threadIdx.x] = x;
    }"""
    dev, turns = device(), 20_000_000
    if not getattr(dev.iface, "unified_memory", False):
        turns = 1_000_000_000  # 4 cycles each at least
    program = raw(source, "spin", 1, 1)
    out = buffer(np.zeros(32, np.uint32))
    dev.synchronize()
    begin = time.perf_counter()
    program(out._buf, local_size=(32, 1, 1), vals=(turns,))
    asked = [_milliseconds(dev.iface.failed_sms) for _ in range(5)]
    dev.synchronize()
    took = time.perf_counter() - begin
    factor, offset = 1, 0
    for bit in f"{turns:b}":  # (factor, offset) after twice as many turns, and one more
        factor, offset = factor * factor, offset * factor + offset
        if bit == "1":
            factor, offset = factor * 1664525, offset * 1664525 + 1013904223
        factor, offset = factor % (1 << 32), offset % (1 << 32)
    print(f"{took:.2f} s, the driver answers in {', '.join(f'{ms:.2f}' for ms in asked)} ms", end=" ")
    assert out.numpy().tolist() == [(x * factor + offset) % (1 << 32) for x in range(32)]


def _milliseconds(call: Callable[[], Any]) -> float:
    begin = time.perf_counter()
    assert not call()
    return (time.perf_counter() - begin) * 1000


NAMED_BARRIERS = r"""
extern "C" __global__ void pairs(int *out) {
  __shared__ int s[128];
  int t = threadIdx.x, pair = t / 64 + 1;
  s[t] = t * t;
  asm volatile("barrier.sync %0, 64;" :: "r"(pair) : "memory");
  int other = s[t ^ 32];
  asm volatile("bar.sync 5, 128;" ::: "memory");
  out[t] = other;
}"""


@case()
def named_barriers() -> None:
    """A block whose halves meet at barriers of their own."""
    import numpy as np

    out = buffer(np.zeros(128, np.int32))
    raw(NAMED_BARRIERS, "pairs", 1)(out._buf, global_size=(1, 1, 1), local_size=(128, 1, 1))
    assert (out.numpy() == (np.arange(128) ^ 32) ** 2).all()


# ---- copies and the process


@case()
def copies() -> None:
    """64 MiB in and out, bit by bit, with their speed."""
    import numpy as np
    from tinygrad import Tensor

    data = np.random.default_rng(6).integers(0, 256, 64 << 20, dtype=np.uint8)
    (Tensor(data[:4096]).realize() + 1).numpy()
    begin = time.perf_counter()
    t = Tensor(data).realize()
    device().synchronize()
    middle = time.perf_counter()
    back = t.numpy()
    end = time.perf_counter()
    print(
        f"in {data.nbytes / 1e9 / (middle - begin):.2f} GB/s, out {data.nbytes / 1e9 / (end - middle):.2f} GB/s",
        end=" ",
    )
    assert (back == data).all()


@case()
def recordings_keep_their_order() -> None:
    """Launches of many blocks see what those before them stored, at every dependency that a recording may take."""
    from tegrad.bench.dependencies import Probe
    from tegrad.nv.replay import DEPENDENCIES

    for shape in ((1, 32), (132, 512), (1056, 256)):
        probe = Probe(device(), *shape)
        for name, dependency in DEPENDENCIES.items():
            for kernel, runs in (("shift", 20), ("gather", 4)):
                assert probe.sees(dependency, kernel, count=64, runs=runs), (name, shape, kernel)
        probe.close()


@case()
def a_recorded_network() -> None:
    """tegrad.record against numpy, with an input of its own for each of 2,000 runs."""
    import numpy as np

    from tegrad.bench import mlp

    layers = [layer.astype(np.float32) for layer in mlp.mlp_weights()]
    with mlp.recorded_network() as made:
        call = mlp.caller(made)
        for x in mlp.observations(2000):
            got, expected = call(x), x.astype(np.float32)
            for layer in layers[:-1]:
                expected = np.maximum(expected @ layer, 0)
            np.testing.assert_allclose(got, expected @ layers[-1], rtol=2e-2, atol=2e-2)


@case()
def recorded_outputs_of_every_kernel() -> None:
    """An output of the first kernel, 1 MiB that it writes across the bus, is there when the small last one is done."""
    import numpy as np

    from tegrad.nv.record import record
    from tegrad.nv.replay import DEPENDENCIES

    device()
    big, small = np.zeros(1 << 18, np.int32), np.zeros(32, np.int32)
    for name in ("chain", "chain-lean", "idle-lean", "idle-within"):
        with record(lambda x, y: (x + y[0], y + 1), big, small, dependency=DEPENDENCIES[name]) as made:
            made.inputs[0][:] = np.arange(len(big))
            where = {made.launches[0].buffers[0].cpu_view().addr, made.outputs[0].__array_interface__["data"][0]}
            assert (len(made.launches), len(where)) == (2, 1)
            for i in range(500):
                made.inputs[1][:] = i
                made.run()
                last = made.outputs[0][-4096:].copy()
                assert (last == np.arange(len(big) - 4096, len(big)) + i).all(), (name, i)
                assert (made.outputs[0] == np.arange(len(big)) + i).all(), (name, i)
                assert (made.outputs[1] == i + 1).all(), (name, i)


@case(HCQDEV_WAIT_TIMEOUT_MS="60000")
def steps_ahead_of_the_host() -> None:
    """The engine's logits, token by token and in chunks, beside those of tinygrad's operations; equal tokens twice."""
    import numpy as np

    from tegrad import models
    from tegrad.llm.engine import Engine
    from tegrad.llm.gguf import Gguf
    from tegrad.llm.model import Model
    from tegrad.llm.sampler import Sampler
    from tegrad.llm.session import Session

    prompt = [(31 * at + 7) % 500 for at in range(40)]
    with Gguf.open(models.SMALL) as file, Engine(file, 512) as engine:
        exact = Session(Model(file), 512).feed(prompt)
        chunks = engine.feed(prompt)
        engine.reset()
        steps = [engine.feed([token]) for token in prompt][-1]
        for logits in (chunks, steps):
            assert np.sqrt(((logits - exact) ** 2).mean()) < 0.05 * exact.std()
        engine.reset()
        tokens = list(engine.generate(prompt[:8], Sampler(0), 24))
        engine.reset()
        assert tokens == list(engine.generate(prompt[:8], Sampler(0), 24))
        assert engine.tokens == [*prompt[:8], *tokens[:-1]]


def mapped_drivers() -> list[str]:
    """NVIDIA's user-mode driver and runtime, where this process has them mapped."""
    maps = Path("/proc/self/maps").read_text()
    return sorted({line.split("/")[-1] for line in maps.splitlines() if "libcuda.so" in line or "libcudart" in line})


@both_renderers
def no_libcuda() -> None:
    """NVIDIA's user-mode driver is not in the process, though kernels were compiled and run."""
    one_liner()
    assert not mapped_drivers(), f"mapped: {', '.join(mapped_drivers())}"
    print(f"{type(device()).__module__}, {device().arch}", end=" ")


@case()
def tegrad_run() -> None:
    """`tegrad run` writes text of the shipped model, and NVIDIA's user-mode driver is not in its process."""
    from tegrad.cli import main

    sys.argv = ["tegrad", "run", "In the beginning", "--max-tokens", "40", "--temperature", "0"]
    code: Any = 0
    try:
        main()
    except SystemExit as end:
        code = end.code
    assert not code, f"exit code {code}"
    assert not mapped_drivers(), f"mapped: {', '.join(mapped_drivers())}"


def profiled(*words: str) -> dict[str, Any]:
    """What `tegrad profile --json` says."""
    command = [sys.executable, "-m", "tegrad", "profile", "--json", *words]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


@case()
def a_profile_of_a_token() -> None:
    """Launches one at a time take at least what the step takes, and not much more than a wait for each on top."""
    for plan in ("many", "one"):
        found = profiled("--plan", plan, "-n", "5")
        whole = sum(role["us"] for role in found["roles"]) / found["tokens"]
        launches = len(found["spans"]) // found["tokens"]
        print(f"{found['plan']}: {found['us']:.1f} us, {whole:.1f} us by {'stage' if plan == 'one' else 'launch'}")
        assert min(role["us"] for role in found["roles"]) > 0, found["roles"]
        if plan == "many" and not found["board"]:
            assert 0.9 * found["us"] < whole < found["us"] + 20 * launches, (found["us"], whole)


@case()
def a_profile_of_a_program() -> None:
    """Kernels and copies have lengths on the GPU's clock that are those of such work, and one clock for all."""
    program = (
        "import tegrad.nv; tegrad.nv.install()\n"  # where it is not installed, but on Python's path
        "from tinygrad import Tensor, TinyJit; import numpy as np\n"
        "a = Tensor(np.ones((512, 512), np.float32)).realize()\n"
        "f = TinyJit(lambda x: (x @ a).realize())\n"
        "for _ in range(6): y = f(Tensor(np.ones((512, 512), np.float32)).realize())\n"
        "assert (y.numpy() == 512).all()\n"
    )
    (found,) = profiled("--", sys.executable, "-c", program)["programs"]
    (kernel,) = found["tables"]["kernel"]
    copies = {row["name"]: row for row in found["tables"]["copy"]}
    print(kernel, copies)
    assert kernel["count"] == 6
    assert kernel["bytes"] == 6 * 3 * 512 * 512 * 4
    assert copies["NV -> TINY"]["bytes"] == 512 * 512 * 4
    if not found["board"]:
        assert 1 < kernel["us"] / 6 < 10_000
        assert 1 < copies["NV -> TINY"]["us"] < 100_000


@case()
def language_models() -> None:
    """The tests that hold logits against CPU llama.cpp, on this device: each quantization, and the shipped model."""
    import cyllama  # noqa: F401  (without it those tests would be skipped)
    import pytest

    assert pytest.main(["-q", "-p", "no:cacheprovider", "-p", "no:xdist", str(ROOT / "tests/llm/test_model.py")]) == 0


@case()
def wgmma_products() -> None:
    """Hopper's own tensor-core instructions compute what those of every chip do."""
    from gemm_products import CASES as PRODUCTS

    _products(PRODUCTS)


@case()
def few_products() -> None:
    """The kernels for few tokens compute what that for many does."""
    from gemm_products import SMALL_M as PRODUCTS

    _products(PRODUCTS)


@case(HCQDEV_WAIT_TIMEOUT_MS="60000")
def long_prompts() -> None:
    """All logits of 2,600 tokens in chunks of 2,048 and smaller ones, and of short prompts, beside exact ones: heads of
    64, 128 and, within windows, 256 elements, by the tiles and warpgroups that full-size prompts have."""
    import numpy as np

    sys.path.insert(0, str(ROOT / "tests/llm"))
    from tiny_llama import SHAPES, TYPE, Shape, write

    from tegrad.llm.cache import KvCache
    from tegrad.llm.packed import PackedModel
    from tegrad.llm.prefill import Prefill, chunk_sizes
    from tegrad.llm.reference import Reference

    positions, sizes = 3072, {"dim": 1024, "ffn": 4096, "vocab": 1031, "context": 8192}
    gemma = {**SHAPES["gemma3"].extra, "gemma3.attention.sliding_window": 400}
    shapes = {
        "heads of 64": Shape(heads=16, kv_heads=4, **sizes),
        "of 128": Shape(heads=8, kv_heads=2, **sizes),
        "of 256": replace(SHAPES["gemma3"], heads=4, kv_heads=2, head_dim=256, extra=gemma, **sizes),
    }
    for name, shape in shapes.items():
        with tempfile.TemporaryDirectory() as folder:
            path = write(Path(folder) / "model.gguf", shape, TYPE.Q6_K)
            tokens = np.random.default_rng(3).integers(0, shape.vocab, 2600).tolist()
            expected = Reference(path).logits(tokens)
            with PackedModel.load(path, "NV") as model:
                chunks = chunk_sizes(model.device.arch, positions)
                with (
                    KvCache(model.device, model.config, positions, ahead=chunks[-1]) as cache,
                    Prefill(model, cache, sizes=chunks) as prefill,
                ):
                    off = max(
                        float(np.abs(prefill.score(tokens[:count]) - expected[:count]).max() / expected.std())
                        for count in (2600, 30, 60, 120, 250)
                    )
        print(f"{name} {off:.4f} deviations;", end=" ")
        assert off < 0.03, f"{name}: {off:.3f} standard deviations of the logits"


@case(HCQDEV_WAIT_TIMEOUT_MS="60000")
def a_matrix_beyond_2_gib() -> None:
    """Few tokens by F32 weights of 2.3 GB, whose rows begin within segments. Takes 9 GB of the host's memory."""
    from gemm_products import beyond_2_gib

    off = beyond_2_gib(device())
    print(f"{off:.1e} of the largest result", end=" ")
    assert off < 2e-3  # weights become halves


def _products(cases: Any) -> None:
    from gemm_products import difference, limit

    for name, (gemm, _) in cases.items():
        off = difference(device(), cases, name)
        print(f"{name} {off:.1e};", end=" ")
        assert off < limit(gemm), f"{name}: {off:.2e} of the largest result"


def steps_in_one_launch(name: str) -> None:
    """A full-size model by one launch a step, by many and exactly, to a depth of 16,384 (depths.py)."""
    from depths import case

    case(device(), name)


def published_models() -> tuple[str, ...]:
    """Every model whose speed results/figures.json tells, and which has a step in one launch."""
    if str(ROOT) not in sys.path:
        sys.path.insert(0, str(ROOT))
    from tegrad.bench.figures import published
    from tegrad.bench.models import parse
    from tegrad.llm.errors import UnsupportedModelError
    from tegrad.llm.persistent import check_block

    found = []
    for model in published(json.loads((ROOT / "results" / "figures.json").read_text())):
        with suppress(UnsupportedModelError):
            check_block(parse(model)[0].config)
            found.append(model)
    return tuple(found)


for _model in published_models():
    _name = f"steps_in_one_launch[{_model}]"
    CASES[_name] = (
        partial(steps_in_one_launch, _model),
        {"HCQDEV_WAIT_TIMEOUT_MS": "60000", "OPENBLAS_NUM_THREADS": "1"},  # the host's part has threads of its own
    )
    TIME_LIMITS_S[_name] = 600  # a file of up to 6.6 GB is written, and its weights are expanded on the host


@case()
def attention_by_depth() -> None:
    """The attention of published models against float64, from no depth to all parts of it, many times."""
    from decode_kernels import PUBLISHED, attention

    for name in PUBLISHED:
        attention(device(), name)
        print(name, end="; ")


@case()
def sampled_tokens() -> None:
    """Tokens drawn on the device are those that the same settings, seeds and logits draw in numpy."""
    from decode_kernels import sampling, served

    sampling(device())
    print("steps that masks missed:", served(device()))


@case()
def opened_by_our_device() -> None:
    """The device is ours, over the interface and the classes of this chip."""
    dev = device()
    assert type(dev).__module__ == "tegrad.nv.device", type(dev)
    iface = dev.iface
    print(
        f"{type(iface).__module__}.{type(iface).__name__} compute {iface.compute_class:#x} gpfifo "
        f"{iface.gpfifo_class:#x} dma {iface.dma_class:#x} {dev.arch} {dev.sm_count} SMs",
        end=" ",
    )


# ---- running


def run_case(*names: str, limit: float | None = None, **more: str) -> tuple[int, str, str]:
    """Run cases in one process of their own: its exit code (-1 when it hung), what it said, its errors.

    The environment is that of the first case, with `more` on top, and the time limit its own unless said.
    """
    limit = limit or TIME_LIMITS_S.get(names[0], TIME_LIMIT_S)
    environment = {**os.environ, **ENVIRONMENT, **CASES[names[0]][1], **more}
    environment["PYTHONPATH"] = os.pathsep.join(filter(None, [str(ROOT), environment.get("PYTHONPATH", "")]))
    command = [sys.executable, __file__, *names]
    # A board that the process started keeps its stderr open for some seconds: a file has no end to wait for.
    with tempfile.TemporaryFile("w+") as errors:
        try:
            done = subprocess.run(
                command,
                env=environment,
                stdout=subprocess.PIPE,
                stderr=errors,
                text=True,
                timeout=limit,
                check=False,
            )
            code, said = done.returncode, done.stdout
        except subprocess.TimeoutExpired:
            code, said = -1, f"no end after {limit} s"
        errors.seek(0)
        return code, said.strip(), errors.read().strip()


if __name__ == "__main__":
    sys.path.insert(0, str(ROOT))
    import tegrad  # noqa: F401  (activates)

    for inside in sys.argv[1:]:
        CASES[inside][0]()
        print(f"done {inside}", file=sys.stderr)
