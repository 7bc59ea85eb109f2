#!/usr/bin/env python3
"""Walking as an inertial sensor on the chest feels it, generated: what the network learns from and is tried on.

    python examples/odometry/motion.py walk.f32 --seconds 10      a walk's samples, for the C program

Step frequency tells speed: a stride grows with it. Each step shakes the chest up and down and to and fro; every second
one turns it left or right. How strongly differs from walker to walker, so that strength alone tells no speed. The
sensor's axes are the walker's (forward, left, up), as an attitude filter would turn them.
"""

import argparse
from dataclasses import dataclass
from pathlib import Path

import numpy as np

RATE = 1000
"""Samples a second."""
GRAVITY = 9.81
FREQUENCY = (1.0, 2.5)
"""Steps a second, from a stroll to a hurry."""
PACE_S, CURVE_S = 4.0, 3.0
"""How often a walker chooses another frequency and another turn."""
TURN = 0.4
"""Standard deviation of chosen turn rates, rad/s."""
NOISE = np.array([0.05, 0.05, 0.05, 0.005, 0.005, 0.005])
BIAS = np.array([0.1, 0.1, 0.1, 0.005, 0.005, 0.005])
"""Standard deviations of a sample and of a whole walk: acceleration in m/s², turn rates in rad/s."""


@dataclass(frozen=True, slots=True)
class Walk:
    """A walk of n samples. `speed` (n,) in m/s and `turn` (n,) in rad/s are the truth.

    `imu` (n, 6): acceleration (forward, left, up; with gravity) and turn rates (roll, pitch, yaw).
    """

    imu: np.ndarray
    speed: np.ndarray
    turn: np.ndarray


def stride(frequency: np.ndarray) -> np.ndarray:
    """Metres of a step at so many steps a second."""
    return 0.35 + 0.2 * frequency


def wander(choices: np.ndarray, every_s: float, n: int) -> np.ndarray:
    """From one choice to the next without a jerk: lines, smoothed over a second."""
    knots = np.arange(len(choices)) * every_s * RATE
    lines = np.interp(np.arange(n + RATE), knots, choices)
    sums = np.cumsum(np.concatenate([[0.0], lines]))
    return (sums[RATE : RATE + n] - sums[:n]) / RATE


def generate(seconds: float, seed: int) -> Walk:
    """A walk of a walker of his own; equal seeds walk equally."""
    rng = np.random.default_rng(seed)
    n = round(seconds * RATE)
    frequency = wander(rng.uniform(*FREQUENCY, int(seconds / PACE_S) + 3), PACE_S, n)
    turn = wander(rng.normal(0, TURN, int(seconds / CURVE_S) + 3), CURVE_S, n)
    speed = frequency * stride(frequency)
    step = 2 * np.pi * np.cumsum(frequency) / RATE + rng.uniform(0, 4 * np.pi)
    shake = rng.uniform(0.7, 1.3) * frequency**1.5
    lags = rng.uniform(-0.5, 0.5, 4)
    forward = np.gradient(speed) * RATE + 0.7 * shake * np.sin(step + np.pi / 2 + lags[0])
    left = speed * turn + 0.5 * shake * np.sin(step / 2 + lags[1])
    up = GRAVITY + 1.3 * shake * (np.sin(step) + 0.3 * np.sin(2 * step + lags[2]))
    roll, pitch = 0.1 * shake * np.sin(step / 2), 0.07 * shake * np.sin(step)
    yaw = turn + 0.12 * shake * np.sin(step / 2 + lags[3])
    clean = np.stack([forward, left, up, roll, pitch, yaw], axis=1)
    imu = clean + rng.normal(0, BIAS) + rng.normal(0, NOISE, clean.shape)
    return Walk(imu.astype(np.float32), speed, turn)


def main() -> None:
    """Write a walk's samples, 6 floats each."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("file", type=Path)
    parser.add_argument("--seconds", type=float, default=10)
    parser.add_argument("--seed", type=int, default=1000)
    options = parser.parse_args()
    generate(options.seconds, options.seed).imu.astype("<f4").tofile(options.file)


if __name__ == "__main__":
    main()
