#!/usr/bin/env python3
"""Inertial odometry at 1 kHz: a small network, recorded, turns a second of samples into speed and turn rate.

    python examples/odometry/run.py                         a generated walk, in real time
    python examples/odometry/run.py --plot odometry.png     with a plot of latencies and paths
    python examples/odometry/run.py --page page             samples come from a C program (driver.c) through this file

On an emulated Orin, where a run takes milliseconds, a generated walk's network runs every 20 ms unless `--every` says
otherwise; between two runs the walker goes on as before. Exit code 0 unless the C program stays away.
"""

import argparse
import os
import sys
import time
from pathlib import Path

import numpy as np
from motion import RATE, generate
from odometer import SHAPE, Network, Pose, Window, error, path

import tegrad

BOARD_EVERY = 20


class Odometer:
    """The recorded network with its window and its pose; how long each run took, in seconds."""

    def __init__(self, network: Network, every: int) -> None:
        from tinygrad import Tensor

        layers = [(Tensor(w, device="NV").realize(), Tensor(b, device="NV").realize()) for w, b in network.layers]

        def estimate(x: Tensor) -> Tensor:
            x = x.reshape(1, -1)
            for weight, bias in layers[:-1]:
                x = (x @ weight + bias).relu()
            return x @ layers[-1][0] + layers[-1][1]

        self._recorded = tegrad.record(estimate, np.zeros(SHAPE, np.float32))
        self._window: Window | None = None
        self._every, self._count = every, 0
        self.pose = Pose()
        self.speed = self.turn = 0.0
        self.times: list[float] = []

    def feed(self, sample: np.ndarray) -> Pose:
        """The pose after a sample of 6."""
        begun = time.perf_counter()
        self._window = self._window or Window(sample)
        window = self._window.feed(sample)
        runs = self._count % self._every == 0
        self._count += 1
        if runs:
            self._recorded.inputs[0][:] = window
            self._recorded.run()
            self.speed, self.turn = (float(value) for value in self._recorded.outputs[0][0])
        self.pose.move(self.speed, self.turn)
        if runs:
            self.times.append(time.perf_counter() - begun)
        return self.pose

    def report(self) -> None:
        """Print how long runs took, and how many of them were too long for 1 kHz."""
        microseconds = 1e6 * np.array(self.times)
        median, p99 = np.quantile(microseconds, (0.5, 0.99))
        print(f"{len(self.times)} runs, one every {self._every} ms: {median:.0f} us at the median,", end=" ")
        print(f"{p99:.0f} at p99, {microseconds.max():.0f} at worst")
        if late := int(np.sum(microseconds > 1e6 / RATE)):
            why = ": this GPU is emulated" if os.environ.get("TEGRAD_BOARD") else ""
            print(f"1 kHz is not kept by {late} of them, which took more than 1 ms{why}")


def walk(odometer: Odometer, network: Network, options: argparse.Namespace) -> None:
    """Feed a generated walk, a sample each millisecond; compare paths."""
    motion = generate(options.seconds, options.seed)
    found = np.zeros((len(motion.imu), 2))
    begun = time.perf_counter()
    for at, sample in enumerate(motion.imu):
        time.sleep(max(0.0, begun + at / RATE - time.perf_counter()))
        pose = odometer.feed(sample)
        found[at] = pose.x, pose.y
    odometer.report()
    truth, guess = path(motion.speed, motion.turn), path(network.mean_speed, motion.imu[:, 5])
    print(f"{motion.speed.sum() / RATE:.1f} m walked in {options.seconds:g} s; from the true path, rms and at the end:")
    for name, one in (("the network", found), ("mean speed and gyro", guess)):
        print("  {}: {:.2f} m, {:.2f} m".format(name, *error(one, truth)))
    if options.plot:
        plot(options.plot, odometer.times, {"truth": truth, "network": found, "mean speed and gyro": guess})


def plot(file: Path, times: list[float], paths: dict[str, np.ndarray]) -> None:
    """Latencies as a histogram, paths as lines."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(10, 4), layout="constrained")
    left, right = figure.subplots(1, 2)
    milliseconds = 1e3 * np.array(times)
    left.hist(milliseconds, bins=np.geomspace(0.8 * milliseconds.min(), 1.2 * milliseconds.max(), 50))
    left.axvline(1e3 / RATE, color="tab:red", linestyle="--", label="1 kHz")
    board = os.environ.get("TEGRAD_BOARD")
    where = f"emulated {board}" if board else "GPU"
    left.set(xscale="log", xlabel="sample to pose, ms", ylabel="runs", title=f"latency, {where}")
    left.legend(loc="upper right")
    for name, one in paths.items():
        right.plot(*one[::BOARD_EVERY].T, label=name)
    right.set(aspect="equal", xlabel="m", ylabel="m", title="path")
    right.legend(loc="upper left")
    figure.savefig(file, dpi=90)


def serve(odometer: Odometer, file: Path) -> None:
    """Answer the samples of a C program."""
    from shared_page import answer, samples, shared

    with shared(file) as page:
        for sample in samples(page):
            answer(page, odometer.feed(sample), odometer.speed, odometer.turn)
    if odometer.times:
        odometer.report()
    print(f"at ({odometer.pose.x:.3f}, {odometer.pose.y:.3f}) m in the end")


def main() -> int:
    """Record the network and feed it; 0 unless a C program stays away."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--seconds", type=float, default=5)
    parser.add_argument("--seed", type=int, default=1000, help="the walk; those from 1000 are not trained on")
    parser.add_argument("--every", type=int, help="milliseconds from one run of the network to the next")
    parser.add_argument("--plot", type=Path, help="an image to write, by matplotlib")
    parser.add_argument("--page", type=Path, help="the file that a C program shares")
    options = parser.parse_args()
    tegrad.choose_device()
    unless_said = BOARD_EVERY if os.environ.get("TEGRAD_BOARD") and not options.page else 1
    network = Network.load()
    odometer = Odometer(network, options.every or unless_said)
    if not options.page:
        walk(odometer, network, options)
        return 0
    try:
        serve(odometer, options.page)
    except TimeoutError as error:
        print(error, file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
