"""What docs/examples.md shows runs as it stands there, on the emulated board with no variable set."""

import re
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs/examples.md").read_text()
ROWS = re.findall(r"^\| `(.*?)` \|", PAGE, re.MULTILINE)
BLOCKS = ["\n".join(re.findall(r"^\$ (.*)$", block, re.MULTILINE)) for block in PAGE.split("```console")[1:]]
SAID = {
    "control_loop.py": r"it stands",
    "chat.py": r"> \w+",
    "custom_kernel.py": r"20 runs of two launches: \d+ us",
    "odometry/run.py": r"1 kHz is not kept.*: this GPU is emulated",
    "train_small.py": r"prepare",
    "odometry/train.py": r"speed within 0\.0\d+ m/s",
}
"""What each command prints when it does what the page says."""
LONG = ("odometry/train.py", "--seconds 60")


ELSEWHERE = ("bringup.py", "camera.py", "odometry/driver.c")
"""tests/test_bringup.py runs this one; test_the_camera_..., below; test_odometry.py."""


def script(command: str) -> str:
    """What a command begins with, below examples/."""
    return re.findall(r"examples/(\S+)", command)[0]


COMMANDS = [
    pytest.param(command.replace("\\|", "|"), marks=[pytest.mark.long] * any(part in command for part in LONG))
    for command in ROWS + BLOCKS
    if script(command) not in ELSEWHERE
]


@pytest.mark.board
@pytest.mark.parametrize("command", COMMANDS, ids=script)
def test_a_command_of_the_page_runs(shell: Callable[[str], str], command: str) -> None:
    assert re.search(SAID[script(command)], shell(command))


def test_every_example_is_on_the_page() -> None:
    scripts = {path.name for path in (ROOT / "examples").glob("*.py")} - {"bringup_gpu.py"}
    assert [name for name in scripts if f"examples/{name}" not in "\n".join(ROWS)] == []
    assert len(BLOCKS) == 3


def test_the_chat_has_about_twenty_lines() -> None:
    source = (ROOT / "examples/chat.py").read_text().split('"""')[2]
    assert len(source.strip().splitlines()) <= 20


@pytest.mark.board
def test_the_camera_paints_the_edges_that_numpy_finds(shell: Callable[[str], str], tmp_path: Path) -> None:
    import camera

    said = shell(next(row for row in ROWS if script(row) == "camera.py"))
    header, picture = (tmp_path / "overlay.ppm").read_bytes().split(b"\n", 1)
    assert header == f"P6 {camera.WIDTH} {camera.HEIGHT} 255".encode()
    found = np.frombuffer(picture, np.uint8).reshape(camera.HEIGHT, camera.WIDTH, 3)
    frame = np.zeros((camera.HEIGHT, camera.WIDTH, 2), np.uint8)
    camera.draw(19, frame)
    bright = frame[..., 0].astype(np.float64)
    across = [bright[:, 2:] - bright[:, :-2], bright[2:] - bright[:-2]]
    slopes = [across[0][:-2] + 2 * across[0][1:-1] + across[0][2:],
              across[1][:, :-2] + 2 * across[1][:, 1:-1] + across[1][:, 2:]]  # fmt: skip
    edge = np.pad(np.hypot(*slopes) > camera.EDGE, 1)
    assert 200 < edge.sum() < 2000
    np.testing.assert_array_equal(found[..., 0], np.where(edge, 255, frame[..., 0]))
    np.testing.assert_array_equal(found[..., 1], np.where(edge, 0, frame[..., 0]))
    np.testing.assert_array_equal(found[..., 2], found[..., 1])
    assert f"{edge.sum()} pixels" in said


def test_a_camera_without_its_library_names_it(monkeypatch: pytest.MonkeyPatch) -> None:
    import sys

    import camera

    monkeypatch.setitem(sys.modules, "linuxpy.video.device", None)
    with pytest.raises(camera.CameraError, match=r"pip install linuxpy.*--generated"):
        next(camera.camera(np.zeros((240, 320, 2), np.uint8)))
