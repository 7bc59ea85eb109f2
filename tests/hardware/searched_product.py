"""What tinygrad's kernel search may choose for a product of 1,024 in halves, and what that computes.

A kernel for tensor cores with three further axes of threads has four, a block has three dimensions, and tinygrad 0.14.0
joins the warp with the next one. `python tests/hardware/searched_product.py` runs some that a search can come upon, on
whatever device DEV names, and prints the first element of each product (51.48 is right), how many of its elements are
wrong, and how often it was not what it was at first:

    DEV=NV python tests/hardware/searched_product.py              # repaired: all right
    DEV=CUDA TEGRAD=0 python tests/hardware/searched_product.py   # tinygrad's own kernels: 23.265625 for the first two

On the emulated board (TEGRAD_BOARD=gh100) give `--blocks 1`, which computes one block's part.
"""

from __future__ import annotations

import argparse
import os
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

SIZE = 1024
WRONG = 1.0
CUTS = {
    "up 1/4, 0/2, threads 1/2, 1/2, 0/4": "U1.4 U0.2 L1.2 L1.2 L0.4",
    "up 1/4, threads 1/2, 0/4, 0/4": "U1.4 L1.2 L0.4 L0.4",
    "threads 0/2, 0/2, 0/4": "L0.2 L0.2 L0.4",
    "threads 0/2, 1/2 (three axes: right)": "L0.2 L1.2",
}


def options(cut: str) -> tuple[Any, ...]:
    """tinygrad's, tensor cores first."""
    from tinygrad.codegen.opt import Opt, OptOps

    kinds = {"U": OptOps.UPCAST, "L": OptOps.LOCAL}
    parts = ((kinds[part[0]], *map(int, part[1:].split("."))) for part in cut.split())
    return (Opt(OptOps.TC, 0, (-1, 0, 1)), *(Opt(*part) for part in parts))


def program(call: Any, cut: str) -> Any:
    """The kernel of a product, cut as asked."""
    from tinygrad import Device
    from tinygrad.codegen import to_program
    from tinygrad.codegen.opt.postrange import Scheduler

    k = Scheduler(call.src[0], Device[Device.DEFAULT].renderer)
    k.convert_loop_to_global()
    for option in options(cut):
        k.apply_opt(option)
    return to_program(k.get_optimized_ast(name_override="test"), k.ren)


def main(times: int, blocks: int) -> int:
    """Run all; how many kernels were wrong."""
    import numpy as np
    from tinygrad import Device, Tensor
    from tinygrad.engine.realize import run_linear
    from tinygrad.uop.ops import Ops, UOp

    a, b = (
        np.random.default_rng(seed).standard_normal((SIZE, SIZE), dtype=np.float32).astype(np.float16)
        for seed in (0, 1)
    )
    want = a.astype(np.float32) @ b.astype(np.float32)
    inputs = [Tensor(x).realize() for x in (a, b)]
    call = (inputs[0] @ inputs[1]).schedule_linear().src[-1]
    failed = 0
    for name, cut in CUTS.items():
        made = program(call, cut)
        if blocks:
            made = made.replace(arg=replace(made.arg, global_size=(blocks, 1, 1)))
        out = Tensor(np.full((SIZE, SIZE), np.nan, np.float16)).realize()
        buffers = [UOp.from_buffer(t.uop.base.buffer) for t in (out, *inputs)]
        first, others = None, 0
        for _ in range(times):
            run_linear(UOp(Ops.LINEAR, src=(made.call(*buffers),)))
            Device[Device.DEFAULT].synchronize()
            got = out.numpy()
            others += first is not None and not np.array_equal(got, first, equal_nan=True)
            first = got if first is None else first
        assert first is not None
        done = ~np.isnan(first)
        wrong = int((np.abs(first.astype(np.float32) - want)[done] > WRONG).sum())
        failed += bool(wrong)
        print(f"{name:38} threads {made.arg.local_size} [0, 0] {first[0, 0]:.6f} wrong {wrong} of {done.sum()}, "
              f"another result {others} of {times}", flush=True)  # fmt: skip
    return failed


if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
    if os.environ.get("DEV", "").startswith("NV"):
        import tegrad  # noqa: F401  (activates)
    arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    arguments.add_argument("--times", type=int, default=20, help="runs of each kernel (default: 20)")
    arguments.add_argument("--blocks", type=int, default=0, help="blocks along x alone (default: the whole product)")
    asked = arguments.parse_args()
    sys.exit(1 if main(asked.times, asked.blocks) else 0)
