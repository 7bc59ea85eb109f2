"""The odometry example: its motion, its windows, its training, the weights that are shipped, and the page with C."""

import re
import shutil
from collections.abc import Callable
from pathlib import Path

import motion
import numpy as np
import odometer
import pytest
import shared_page
import train

PAGE = (Path(__file__).parents[2] / "docs/examples.md").read_text()


def test_equal_seeds_walk_equally_and_steps_tell_speed() -> None:
    one, again, other = (motion.generate(20, seed) for seed in (5, 5, 6))
    np.testing.assert_array_equal(one.imu, again.imu)
    assert not np.array_equal(one.imu, other.imu)
    spectrum = np.abs(np.fft.rfft(one.imu[:, 2] - one.imu[:, 2].mean()))
    assert motion.FREQUENCY[0] < np.argmax(spectrum) / 20 < motion.FREQUENCY[1]
    slowest, fastest = (f * motion.stride(f) for f in motion.FREQUENCY)
    assert slowest <= one.speed.min() < one.speed.max() <= fastest


def test_the_window_that_is_kept_up_is_the_one_that_was_trained_on() -> None:
    walk = motion.generate(3, 7)
    window = odometer.Window(walk.imu[0])
    kept = np.stack([window.feed(sample).copy() for sample in walk.imu])
    assert kept.shape[1:] == odometer.SHAPE
    np.testing.assert_allclose(kept, odometer.windows(walk.imu, np.arange(3000)), rtol=1e-5, atol=1e-5)
    means = walk.imu[1000:2000].reshape(50, 20, 6).mean(axis=1)[:, odometer.CHANNELS]
    np.testing.assert_allclose(kept[1999], means, rtol=1e-5, atol=1e-5)


def test_dead_reckoning_of_the_truth_is_the_path() -> None:
    pose, turn = odometer.Pose(), np.full(1000, np.pi / 2)
    walked = odometer.path(1.5, turn)
    for rate in turn:
        pose.move(1.5, rate)
    np.testing.assert_allclose(walked[-1], (pose.x, pose.y))
    np.testing.assert_allclose(walked[-1], (3 / np.pi, 3 / np.pi), atol=2e-3)  # a quarter of a circle
    assert odometer.error(walked + np.array([3, 4]), walked) == pytest.approx((5, 5))


def test_the_gradients_are_the_losss_slopes() -> None:
    rng = np.random.default_rng(0)
    weights = [rng.normal(size=shape) for shape in ((6, 5), (5,), (5, 4), (4,), (4, 2), (2,))]
    x, wanted = rng.normal(size=(3, 6)), rng.normal(size=(3, 2))

    def loss() -> float:
        network = odometer.Network(tuple(zip(weights[::2], weights[1::2], strict=True)), 0)
        return float(np.mean((network(x) - wanted) ** 2))

    for weight, gradient in zip(weights, train.gradients(weights, x, wanted), strict=True):
        at = (0,) * weight.ndim
        weight[at] += 1e-6
        above = loss()
        weight[at] -= 2e-6
        below = loss()
        weight[at] += 1e-6
        assert gradient[at] == pytest.approx((above - below) / 2e-6, rel=1e-4, abs=1e-8)


def test_a_short_training_learns_speed_and_survives_its_file(tmp_path: Path) -> None:
    x, wanted = train.examples(range(6))
    network = train.train(x, wanted, 300)
    apart = np.sqrt(np.mean((network(x) - wanted) ** 2, axis=0))
    assert apart[0] < 0.5 * wanted[:, 0].std()
    assert apart[1] < 0.5 * wanted[:, 1].std()
    network.save(tmp_path / "weights.npz")
    again = odometer.Network.load(tmp_path / "weights.npz")
    np.testing.assert_allclose(again(x), network(x), atol=0.05)
    assert again.mean_speed == pytest.approx(wanted[:, 0].mean())


def test_the_shipped_weights_are_as_good_as_the_page_says() -> None:
    assert odometer.WEIGHTS.stat().st_size < 60_000
    network, paths = odometer.Network.load(), []
    for seed in train.HELD_OUT:
        walk = motion.generate(60, seed)
        known = network(odometer.windows(walk.imu, np.arange(0, 60_000, 20))).repeat(20, axis=0)
        truth = odometer.path(walk.speed, walk.turn)
        gyro = walk.imu[:, 5]
        ways = odometer.path(*known.T), odometer.path(network.mean_speed, gyro), odometer.path(known[:, 0], gyro)
        paths.append([odometer.error(way, truth)[0] for way in ways])
    told = tuple(map(float, re.findall(r"(\d+\.\d) m\b", PAGE)))
    assert np.mean(paths, axis=0) == pytest.approx(told, abs=0.05)
    assert sum(network > other for network, other, _ in paths) == 1


def test_a_page_to_which_nobody_sends_is_given_up_and_removed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shared_page, "PATIENCE_S", 0.01)
    with shared_page.shared(tmp_path / "page") as page:
        assert (tmp_path / "page").exists()
        with pytest.raises(TimeoutError, match="no sample"):
            next(shared_page.samples(page))
        assert page.ready == 1
    assert list(tmp_path.iterdir()) == []


def end(said: str) -> list[tuple[float, float]]:
    """Where a program says that the walker is in the end."""
    return [(float(x), float(y)) for x, y in re.findall(r"^at \((\S+), (\S+)\) m in the end$", said, re.MULTILINE)]


@pytest.mark.board
@pytest.mark.skipif(shutil.which("cc") is None, reason="the driver is C, which needs a compiler (cc)")
def test_c_gets_the_poses_of_the_samples_that_it_sends(shell: Callable[[str], str], tmp_path: Path) -> None:
    commands = re.findall(r"^\$ (.*\b(?:driver|walk\.f32)\b.*)$", PAGE, re.MULTILINE)
    assert len(commands) == 3
    said = shell("\n".join(commands))
    assert re.search(r"200 samples from C and back: \d+ us at the median", said)
    assert not (tmp_path / "page").exists()
    imu = np.fromfile(tmp_path / "walk.f32", "<f4").reshape(-1, 6)
    np.testing.assert_array_equal(imu, motion.generate(0.2, 1000).imu)
    known = odometer.Network.load()(odometer.windows(imu, np.arange(200)))
    by_python, by_c = end(said)
    assert by_python == by_c
    assert by_c == pytest.approx(tuple(odometer.path(*known.T)[-1]), abs=2e-3)


@pytest.mark.skipif(shutil.which("cc") is None, reason="the driver is C, which needs a compiler (cc)")
def test_a_driver_without_samples_is_told_how_it_is_called(shell: Callable[[str], str]) -> None:
    assert "usage: driver PAGE SAMPLES" in shell(
        "cc -Wall -Wextra -Werror -o driver examples/odometry/driver.c && ! ./driver 2>&1"
    )
