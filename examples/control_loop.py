#!/usr/bin/env python3
"""A control loop: a small network steers a cart that carries a pole, one recorded run a step.

    python examples/control_loop.py      the GPU of this machine, or an emulated Orin

The network computes a linear controller exactly (its hidden layers pass positive and negative parts on), so that the
pole stands up without any training. Exit code 0 if it stands at the end.
"""

import argparse
import math
import sys
import time

import numpy as np

import tegrad

STATES, HIDDEN = 4, 32
GAINS = np.array([-1.0, -2.0, -35.0, -8.0], np.float32)
"""Force for each unit of position, speed, angle and turning speed; the pole is 1 m long, the cart weighs 1 kg."""
STEP_S = 0.02
UPRIGHT = 0.05
"""Radians from upright that count as standing."""


def layers() -> list[np.ndarray]:
    """Weights of three layers that compute -GAINS @ state: relu(x) - relu(-x) is x."""
    split = np.zeros((STATES, HIDDEN), np.float16)
    for i in range(STATES):
        split[i, 2 * i], split[i, 2 * i + 1] = 1, -1
    last = np.zeros((HIDDEN, 1), np.float16)
    last[0 : 2 * STATES : 2, 0], last[1 : 2 * STATES : 2, 0] = -GAINS, GAINS
    return [split, np.eye(HIDDEN, dtype=np.float16), last]


def move(state: np.ndarray, force: float) -> np.ndarray:
    """The state one step later: position, speed, angle, turning speed."""
    _, speed, angle, turning = state
    pole, gravity, length = 0.1, 9.81, 0.5
    push = (force + pole * length * turning**2 * math.sin(angle)) / (1 + pole)
    spin = (gravity * math.sin(angle) - math.cos(angle) * push) / (
        length * (4 / 3 - pole * math.cos(angle) ** 2 / (1 + pole))
    )
    drive = push - pole * length * spin * math.cos(angle) / (1 + pole)
    return state + STEP_S * np.array([speed, drive, turning, spin])


def main() -> int:
    """Run the loop; 0 if the pole stands."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--steps", type=int, default=500)
    steps = parser.parse_args().steps
    tegrad.choose_device()
    from tinygrad import Tensor

    weights = [Tensor(layer, device="NV").realize() for layer in layers()]

    def policy(state: Tensor) -> Tensor:
        return (((state @ weights[0]).relu() @ weights[1]).relu() @ weights[2]).float()

    state, times = np.array([0.0, 0.0, 0.2, 0.0]), []
    with tegrad.record(policy, np.zeros((1, STATES), np.float16)) as recorded:
        for _ in range(steps):
            begun = time.perf_counter()
            recorded.inputs[0][0] = state
            recorded.run()
            force = float(recorded.outputs[0][0, 0])
            times.append(time.perf_counter() - begun)
            state = move(state, force)
    stands = abs(state[2]) < UPRIGHT
    median, p99 = (1e6 * np.quantile(times, share) for share in (0.5, 0.99))
    print(f"{steps} steps, {median:.0f} us each at the median, {p99:.0f} at p99")
    print(f"the pole is {state[2]:+.4f} rad from upright: it {'stands' if stands else 'has fallen'}")
    return 0 if stands else 1


if __name__ == "__main__":
    sys.exit(main())
