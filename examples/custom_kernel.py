#!/usr/bin/env python3
"""A kernel of your own in CUDA C, without CUDA: compiled by NVRTC, launched through NV, then recorded and replayed.

    python examples/custom_kernel.py      the GPU of this machine, or an emulated Orin

Heat spreads over a plate whose rim keeps its temperature; a launch is one step. A kernel takes pointers, then 32-bit
integers. Exit code 0 if all steps agree with numpy's.
"""

import sys
import time

import numpy as np

import tegrad
from tegrad.nv.compilers import compile_cuda

SOURCE = """
extern "C" __global__ void spread(float *next, const float *now, int width, int height) {
  int x = blockIdx.x * blockDim.x + threadIdx.x, y = blockIdx.y * blockDim.y + threadIdx.y;
  if (x >= width || y >= height) return;
  int at = y * width + x;
  float here = now[at];
  bool rim = x == 0 || y == 0 || x == width - 1 || y == height - 1;
  next[at] = rim ? here : here + 0.2f * (now[at - 1] + now[at + 1] + now[at - width] + now[at + width] - 4 * here);
}
"""
WIDTH, HEIGHT = 200, 100
BLOCK = (32, 8, 1)
GRID = (-(-WIDTH // BLOCK[0]), -(-HEIGHT // BLOCK[1]), 1)
RUNS = 20
TOLERANCE = 1e-3
"""Degrees of a hundred: the GPU rounds a product and a sum once, numpy twice."""


def spread(now: np.ndarray) -> np.ndarray:
    """What the kernel computes, in numpy."""
    after = now.copy()
    around = now[1:-1, :-2] + now[1:-1, 2:] + now[:-2, 1:-1] + now[2:, 1:-1]
    after[1:-1, 1:-1] += np.float32(0.2) * (around - 4 * now[1:-1, 1:-1])
    return after


def main() -> int:
    """Launch, record, replay; 0 if the results are right."""
    tegrad.choose_device()
    from tegrad.nv.gpu import opened  # these import tinygrad
    from tegrad.nv.replay import Launch
    from tegrad.nv.spec import MemorySpec

    plate = np.zeros((HEIGHT, WIDTH), np.float32)
    plate[0] = 100
    gpu, spec = opened("NV"), MemorySpec()
    program = gpu.load_program(compile_cuda(SOURCE, gpu.arch), "spread", buffers=2, values=2)
    one, other = (gpu.allocate(plate.nbytes, spec) for _ in range(2))

    def wrong(buffer: object, wanted: np.ndarray) -> float:
        found = np.frombuffer(gpu.download(buffer, plate.nbytes), np.float32).reshape(plate.shape)
        return float(np.abs(found - wanted).max())

    gpu.upload(one, plate.tobytes())
    seconds = program(other, one, global_size=GRID, local_size=BLOCK, vals=(WIDTH, HEIGHT), wait=True)
    plate = spread(plate)
    errors = [wrong(other, plate)]
    print(f"one launch: {1e6 * seconds:.0f} us on {gpu.arch}, at most {errors[0]:.1e} from numpy")

    # Two steps, there and back, replayed with one doorbell.
    steps = [Launch(program, buffers, GRID, BLOCK, (WIDTH, HEIGHT)) for buffers in ((one, other), (other, one))]
    recording = gpu.record(steps)
    begun = time.perf_counter()
    for _ in range(RUNS):
        recording.wait(recording.run())
    each = (time.perf_counter() - begun) / RUNS
    for _ in range(2 * RUNS):
        plate = spread(plate)
    errors.append(wrong(other, plate))
    print(f"{RUNS} runs of two launches: {1e6 * each:.0f} us each, at most {errors[1]:.1e} from numpy")
    recording.close()
    for buffer in (one, other):
        gpu.release(buffer, spec)
    return 0 if max(errors) < TOLERANCE else 1


if __name__ == "__main__":
    sys.exit(main())
