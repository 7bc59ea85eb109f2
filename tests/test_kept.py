"""What is kept on disk comes back as it was written, or counts as absent; a write that fails leaves nothing."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from tegrad import kept
from tegrad.errors import SettingError
from tegrad.nv import compilers

CONTENT = bytes(range(256)) * 20
DAMAGE: dict[str, Callable[[bytes], bytes]] = {
    "empty": lambda data: b"",
    "cut": lambda data: data[:-1],
    "cut within the digest": lambda data: data[:10],
    "zeroed": lambda data: bytes(len(data)),
    "zeroed from the middle on": lambda data: data[: len(data) // 2] + bytes(len(data) - len(data) // 2),
    "a bit flipped": lambda data: data[:100] + bytes([data[100] ^ 1]) + data[101:],
    "longer": lambda data: data + b"\0",
}


def _sparse(path: Path) -> None:
    path.touch()
    os.truncate(path, 1 << 40)


INSTEAD: dict[str, Callable[[Path], object]] = {
    "a pipe": os.mkfifo,
    "a device": lambda path: path.symlink_to("/dev/zero"),
    "a sparse file": _sparse,
    "a folder": os.mkdir,
    "a link to itself": lambda path: path.symlink_to(path),
}
KERNEL = '.version 8.0\n.target sm_87\n.address_size 64\n.visible .entry nothing() { ret; }\n'  # fmt: skip
FULL = """
import resource, signal, sys
from pathlib import Path
from tegrad import kept
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
resource.setrlimit(resource.RLIMIT_FSIZE, (1000, 1000))
print(kept.keep(Path(sys.argv[1]), bytes(5000)))
"""
"""A process that may not write more than 1,000 bytes to a file: as on a full disk, the write fails on the way."""


@pytest.mark.parametrize("lasting", [False, True])
def test_what_is_kept_is_found(lasting: bool, tmp_path: Path) -> None:
    path = tmp_path / "a" / "b"
    assert kept.find(path) is None
    assert kept.keep(path, CONTENT, lasting=lasting)
    assert kept.find(path) == CONTENT
    assert os.listdir(path.parent) == ["b"]


@pytest.mark.parametrize("damage", DAMAGE.values(), ids=DAMAGE)
def test_a_damaged_file_is_none(damage: Callable[[bytes], bytes], tmp_path: Path) -> None:
    path = tmp_path / "kept"
    kept.keep(path, CONTENT)
    path.write_bytes(damage(path.read_bytes()))
    assert kept.find(path) is None


@pytest.mark.parametrize("make", INSTEAD.values(), ids=INSTEAD)
def test_what_has_no_end_is_none_and_not_waited_for(make: Callable[[Path], object], tmp_path: Path) -> None:
    make(tmp_path / "kept")
    find = "import sys; from pathlib import Path; from tegrad import kept; print(kept.find(Path(sys.argv[1])))"
    done = subprocess.run(
        ["bash", "-c", 'ulimit -v 2000000; exec "$@"', "bash", sys.executable, "-c", find, str(tmp_path / "kept")],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert (done.stdout, done.stderr) == ("None\n", "")


def _nobody(uid: int) -> object:
    raise KeyError(uid)


def test_without_a_home_it_says_what_to_set(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.delenv("HOME", raising=False)
    monkeypatch.setattr("pwd.getpwuid", _nobody)
    with pytest.raises(SettingError, match="set HOME, or XDG_CACHE_HOME"):
        kept.cache_folder()
    monkeypatch.setenv("XDG_CACHE_HOME", "/elsewhere")
    assert kept.cache_folder() == Path("/elsewhere")


@pytest.mark.parametrize("damage", DAMAGE.values(), ids=DAMAGE)
def test_a_damaged_kernel_is_compiled_again_and_the_file_is_whole_then(
    damage: Callable[[bytes], bytes], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    made = compilers.compile_ptx(KERNEL, "sm_87")
    (path,) = compilers.cache_dir().iterdir()
    whole = path.read_bytes()
    path.write_bytes(damage(whole))
    assert compilers.compile_ptx(KERNEL, "sm_87") == made
    assert [(file.name, file.read_bytes()) for file in path.parent.iterdir()] == [(path.name, whole)]


def test_a_full_disk_leaves_nothing_behind(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", FULL, str(tmp_path / "kept")], capture_output=True, text=True, check=True
    )
    assert done.stdout == "False\n"
    assert list(tmp_path.iterdir()) == []


def test_a_write_that_is_interrupted_leaves_what_was_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(fd: int) -> None:
        raise KeyboardInterrupt

    path = tmp_path / "kept"
    kept.keep(path, b"before")
    monkeypatch.setattr(os, "fsync", interrupted)
    with pytest.raises(KeyboardInterrupt):
        kept.keep(path, b"after", lasting=True)
    assert kept.find(path) == b"before"
    assert list(tmp_path.iterdir()) == [path]


def test_a_file_that_is_to_last_is_on_the_disk_before_it_has_its_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[bool] = []
    monkeypatch.setattr(os, "fsync", lambda fd: seen.append((tmp_path / "kept").exists()))
    kept.keep(tmp_path / "kept", CONTENT, lasting=True)
    assert seen == [False]
