#!/usr/bin/env python3
"""A camera loop: frames go straight into the memory of a recorded network, which finds edges and paints them red.

    python examples/camera.py                  frames of /dev/video0, or generated ones where there is none
    python examples/camera.py --generated      generated ones; the last frame's overlay goes to overlay.ppm

The camera is read by linuxpy (`pip install linuxpy`) in YUYV, which nearly all of them have: two bytes a pixel, the
first of which is its brightness. Generated frames have the same form. No camera was tried; only generated frames were.
"""

import argparse
import os
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np

import tegrad

CAMERA = "/dev/video0"
WIDTH, HEIGHT = 320, 240
EDGE = 100.0
"""From this slope on (Sobel's, of brightness 0 to 255) a pixel is an edge."""
SOBEL = np.array([[-1, 0, 1], [-2, 0, 2], [-1, 0, 1]], np.float32)


class CameraError(Exception):
    """There is no picture, and why."""


def draw(number: int, into: np.ndarray) -> None:
    """Write the frame of this number into (HEIGHT, WIDTH, 2) bytes: a disc that goes round over a slope of grey."""
    y, x = np.mgrid[:HEIGHT, :WIDTH]
    disc = (x - 160 - 80 * np.cos(number / 8)) ** 2 + (y - 120 - 60 * np.sin(number / 8)) ** 2 < 40**2
    into[..., 0] = np.where(disc, 230, x // 4)
    into[..., 1] = 128


def generated(into: np.ndarray) -> Iterator[None]:
    """Frames without end, each in `into` when this yields."""
    number = 0
    while True:
        draw(number, into)
        yield
        number += 1


def camera(into: np.ndarray) -> Iterator[None]:
    """A camera's frames, each in `into` when this yields. CameraError."""
    try:
        from linuxpy.video.device import Device, MemoryMap, VideoCapture
    except ImportError as error:
        raise CameraError("linuxpy reads the camera: pip install linuxpy, or use --generated") from error
    target = memoryview(into).cast("B")
    with Device(CAMERA, blocking=True) as device:
        capture = VideoCapture(device, buffer_type=MemoryMap)
        capture.set_format(WIDTH, HEIGHT, "YUYV")
        if (form := capture.get_format()).size != into.nbytes or form.pixel_format.name != "YUYV":
            raise CameraError(f"{CAMERA} has no frames of {WIDTH} x {HEIGHT} in YUYV: use --generated")
        with capture:
            while True:
                capture.buffer.raw_read(into=target)
                yield


def main() -> int:
    """Record the network, run it on each frame, write the last overlay; 1 where the camera cannot be read."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--frames", type=int, default=20)
    parser.add_argument("--generated", action="store_true", help="no camera, though there is one")
    parser.add_argument("--out", type=Path, default=Path("overlay.ppm"))
    options = parser.parse_args()
    tegrad.choose_device()
    from tinygrad import Tensor

    sobel = Tensor(np.stack([SOBEL, SOBEL.T])[:, None], device="NV").realize()

    def overlay(frame: Tensor) -> Tensor:
        bright = frame[:, :, 0]
        slopes = bright.float().reshape(1, 1, HEIGHT, WIDTH).conv2d(sobel)
        steep = slopes.square().sum(axis=1).sqrt().reshape(HEIGHT - 2, WIDTH - 2)
        edge = (steep > EDGE).pad(((1, 1), (1, 1)))
        rest = edge.where(0, bright)
        return Tensor.stack(edge.where(255, bright), rest, rest, dim=2).cast("uint8").contiguous()

    times = []
    with tegrad.record(overlay, np.zeros((HEIGHT, WIDTH, 2), np.uint8)) as recorded:
        frames = generated if options.generated or not os.path.exists(CAMERA) else camera
        try:
            for _, _ in zip(range(options.frames), frames(recorded.inputs[0]), strict=False):
                begun = time.perf_counter()
                recorded.run()
                times.append(time.perf_counter() - begun)
        except (CameraError, OSError) as error:
            print(error, file=sys.stderr)
            return 1
        picture = recorded.outputs[0]
        options.out.write_bytes(b"P6 %d %d 255\n" % (WIDTH, HEIGHT) + picture.tobytes())
    red = int(np.sum(picture[..., 0] > picture[..., 1]))
    print(f"{len(times)} {frames.__name__} frames, {1e6 * np.median(times):.0f} us each at the median")
    print(f"the last has {red} pixels of edges: {options.out}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
