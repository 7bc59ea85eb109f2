#!/usr/bin/env python3
"""Train the odometer's network on generated walks, in plain numpy: half a minute on one core.

    python examples/odometry/train.py      writes the weights beside this file

Two hidden layers, Adam, squared errors of speed and turn rate at a window's end.
"""

import argparse
import os
from itertools import pairwise
from pathlib import Path

os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")  # products so small that threads only wait for each other

import numpy as np
from motion import RATE, generate
from odometer import SHAPE, WEIGHTS, Network, windows

SIZES = (SHAPE[0] * SHAPE[1], 64, 32, 2)
WALKS, WALK_S, EVERY = 300, 20, 50
"""Walks, their seconds, and samples from one window to the next."""
HELD_OUT = range(1000, 1010)
"""Seeds of walks that are not trained on."""
BATCH, PEAK, DECAYS = 256, 2e-3, (0.9, 0.999)


def examples(seeds: range) -> tuple[np.ndarray, np.ndarray]:
    """Windows (n, *SHAPE) of walks, with speed and turn rate (n, 2) at their ends."""
    ends = np.arange(0, WALK_S * RATE, EVERY)
    walks = [generate(WALK_S, seed) for seed in seeds]
    truth = [np.stack([walk.speed[ends], walk.turn[ends]], axis=1) for walk in walks]
    return np.concatenate([windows(walk.imu, ends) for walk in walks]), np.concatenate(truth).astype(np.float32)


def gradients(weights: list[np.ndarray], x: np.ndarray, wanted: np.ndarray) -> list[np.ndarray]:
    """Of the mean squared error by each of `weights` (weight, bias, weight, ...)."""
    seen = [x]
    for weight, bias in zip(weights[:-2:2], weights[1:-2:2], strict=True):
        seen.append(np.maximum(seen[-1] @ weight + bias, 0))
    back = 2 * (seen[-1] @ weights[-2] + weights[-1] - wanted) / wanted.size
    found = []
    for layer in reversed(range(len(seen))):
        found += [back.sum(axis=0), seen[layer].T @ back]
        back = back @ weights[2 * layer].T * (seen[layer] > 0)
    return found[::-1]


def train(x: np.ndarray, wanted: np.ndarray, steps: int) -> Network:
    """Fit inputs (n, *SHAPE) to (n, 2). What inputs are scaled by becomes a part of the first layer."""
    rng = np.random.default_rng(0)
    x = x.reshape(len(x), -1)
    mean, scale = x.mean(axis=0), x.std(axis=0)
    x = (x - mean) / scale
    pairs = pairwise(SIZES)
    weights = [array for a, b in pairs for array in (rng.normal(0, (2 / a) ** 0.5, (a, b)), np.zeros(b))]
    weights = [array.astype(np.float32) for array in weights]
    first, second = ([np.zeros_like(array) for array in weights] for _ in range(2))
    for step in range(1, steps + 1):
        rate = PEAK * (1 + np.cos(np.pi * step / steps)) / 2
        chosen = rng.integers(0, len(x), BATCH)
        for at, gradient in enumerate(gradients(weights, x[chosen], wanted[chosen])):
            first[at] += (1 - DECAYS[0]) * (gradient - first[at])
            second[at] += (1 - DECAYS[1]) * (gradient**2 - second[at])
            moment, power = first[at] / (1 - DECAYS[0] ** step), second[at] / (1 - DECAYS[1] ** step)
            weights[at] -= rate * moment / (np.sqrt(power) + 1e-8)
    weights[0] = (weights[0] / scale[:, None]).astype(np.float16).astype(np.float32)  # rounded before its bias is
    weights[1] = weights[1] - mean @ weights[0]
    return Network(tuple(zip(weights[::2], weights[1::2], strict=True)), float(wanted[:, 0].mean()))


def main() -> None:
    """Train, say how good it is on other walks, write the weights."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--steps", type=int, default=30000)
    parser.add_argument("--out", type=Path, default=WEIGHTS)
    options = parser.parse_args()
    network = train(*examples(range(WALKS)), options.steps)
    x, truth = examples(HELD_OUT)
    speed, turn = np.sqrt(np.mean((network(x) - truth) ** 2, axis=0))
    guess = np.sqrt(np.mean((truth[:, 0] - network.mean_speed) ** 2))
    network.save(options.out)
    print(f"walks that were not trained on: speed within {speed:.3f} m/s, turn rate within {turn:.3f} rad/s (rms)")
    print(f"the mean speed is within {guess:.3f} m/s; {options.out} has {options.out.stat().st_size} bytes")


if __name__ == "__main__":
    main()
