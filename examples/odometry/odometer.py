"""From samples to a path: the window that the network sees, the network in numpy, and dead reckoning."""

import math
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from motion import RATE

WINDOW, THIN = RATE, 20
"""Samples that the network looks back on; of so many it sees their mean."""
CHANNELS = (0, 2, 5)
"""What it sees of a sample: acceleration forward and up, turn rate."""
SHAPE = (WINDOW // THIN, len(CHANNELS))
WEIGHTS = Path(__file__).with_name("weights.npz")


@dataclass(frozen=True, slots=True)
class Network:
    """Layers of weights (inputs, outputs) and biases, all float32, and the mean speed of what it was trained on."""

    layers: tuple[tuple[np.ndarray, np.ndarray], ...]
    mean_speed: float

    @classmethod
    def load(cls, path: Path = WEIGHTS) -> "Network":
        """What `save` wrote."""
        with np.load(path) as file:
            arrays = [file[f"arr_{i}"].astype(np.float32) for i in range(len(file.files) - 1)]
            return cls(tuple(zip(arrays[::2], arrays[1::2], strict=True)), float(file["mean_speed"]))

    def save(self, path: Path) -> None:
        """In half precision."""
        halves = [array.astype(np.float16) for layer in self.layers for array in layer]
        np.savez(path, *halves, mean_speed=np.float32(self.mean_speed))

    def __call__(self, windows: np.ndarray) -> np.ndarray:
        """Speed and turn rate (n, 2) at the ends of windows (n, *SHAPE), in numpy."""
        x = windows.reshape(len(windows), -1)
        for weight, bias in self.layers[:-1]:
            x = np.maximum(x @ weight + bias, 0)
        weight, bias = self.layers[-1]
        return x @ weight + bias


class Window:
    """The last second, thinned, kept up at a few microseconds a sample: each lies in it twice, so no copy ever wraps.

    Before its second sample a window is full of the first one.
    """

    def __init__(self, first: np.ndarray) -> None:
        seen = first[list(CHANNELS)]
        self._raw = np.tile(seen, (THIN, 1))
        self._sum = THIN * seen.astype(np.float64)
        self._means = np.tile(seen, (2 * WINDOW, 1))
        self._count = 0

    def feed(self, sample: np.ndarray) -> np.ndarray:
        """The window (SHAPE) that ends with a sample of 6: a view, good until the next one."""
        oldest, at = self._raw[self._count % THIN], self._count % WINDOW
        seen = sample[list(CHANNELS)]
        self._sum += seen - oldest.astype(np.float64)
        oldest[:] = seen
        self._means[at] = self._means[at + WINDOW] = self._sum / THIN
        self._count += 1
        return self._means[at + THIN : at + WINDOW + 1 : THIN]


def windows(imu: np.ndarray, ends: np.ndarray) -> np.ndarray:
    """The windows (len(ends), *SHAPE) of a walk's samples (n, 6) that end with these, as `Window` makes them."""
    seen = imu[:, CHANNELS].astype(np.float64)
    padded = np.concatenate([np.tile(seen[0], (WINDOW + THIN, 1)), seen])
    sums = np.cumsum(padded, axis=0)
    means = (sums[THIN:] - sums[:-THIN]) / THIN  # that of a sample stands WINDOW after it
    back = np.arange(-WINDOW + THIN, 1, THIN)
    return means[WINDOW + ends[:, None] + back].astype(np.float32)


@dataclass(slots=True)
class Pose:
    """Where the walker is, in metres, and where he looks, in radians."""

    x: float = 0.0
    y: float = 0.0
    heading: float = 0.0

    def move(self, speed: float, turn: float) -> None:
        """Go on for a sample's time."""
        self.heading += turn / RATE
        self.x += speed * math.cos(self.heading) / RATE
        self.y += speed * math.sin(self.heading) / RATE


def path(speed: np.ndarray | float, turn: np.ndarray) -> np.ndarray:
    """Positions (n, 2) after each sample, of a whole walk at once."""
    heading = np.cumsum(turn) / RATE
    return np.cumsum(np.stack([speed * np.cos(heading), speed * np.sin(heading)], axis=1), axis=0) / RATE


def error(found: np.ndarray, truth: np.ndarray) -> tuple[float, float]:
    """Metres between two paths (n, 2): root mean square, and at the end."""
    apart = np.linalg.norm(found - truth, axis=1)
    return float(np.sqrt(np.mean(apart**2))), float(apart[-1])
