"""tinygrad's cache on a disk that is full, damaged or not there: programs run, and are told once."""

import os
import resource
import subprocess
import sys
from pathlib import Path

import pytest

CODE = """
import tegrad.nv
tegrad.nv.install()
from tinygrad import device, helpers
from tinygrad.codegen.opt import search
assert device.diskcache_get is search.diskcache_get is helpers.diskcache_get
for key in range(300):
    assert device.diskcache_get("kept", str(key)) in (None, bytes(1000))
    assert device.diskcache_put("kept", str(key), bytes(1000)) == bytes(1000)
calls = []
@helpers.diskcache
def made(x): calls.append(x); return x + 1
assert (made(1), made(1)) == (2, 2)
print(len(calls))
"""
"""Values are made, kept and found again, by every way that tinygrad has."""


def run(cache: Path, code: str = CODE, before: object = None) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", code], env={**os.environ, "CACHEDB": str(cache)}, preexec_fn=before,  # type: ignore[call-overload,no-any-return]
        capture_output=True, text=True, timeout=600, check=True,
    )  # fmt: skip


def test_a_sound_cache_is_used(tmp_path: Path) -> None:
    done = run(tmp_path / "cache.db")
    assert (done.stdout, done.stderr) == ("1\n", "")


def _garbage(folder: Path) -> Path:
    (path := folder / "cache.db").write_bytes(b"no data base" * 1000)
    return path


@pytest.mark.parametrize("place", [_garbage, lambda folder: folder, lambda folder: Path("/proc/none/cache.db")])
def test_a_cache_that_cannot_be_used_is_switched_off_and_said_once(tmp_path: Path, place) -> None:  # type: ignore[no-untyped-def]
    done = run(place(tmp_path))
    assert done.stdout == "2\n"
    assert done.stderr.count("cannot be used") == 1
    assert "make room on the disk, or delete that file" in done.stderr


def test_a_disk_that_is_full(tmp_path: Path) -> None:
    """A limit to the size of files stands for it: both end in an error of SQLite's when it writes."""
    done = run(tmp_path / "cache.db", before=lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (100000, 100000)))
    assert done.stdout == "2\n"
    assert done.stderr.count("cannot be used") == 1


def test_a_damaged_value_is_made_again(tmp_path: Path) -> None:
    run(tmp_path / "cache.db")
    spoil = (
        "import os, sqlite3; c = sqlite3.connect(os.environ['CACHEDB'])\n"
        "for table, in c.execute(\"select name from sqlite_master where type='table'\").fetchall():\n"
        "    c.execute(f\"update '{table}' set val = x'ffff'\")\n"
        "c.commit()"
    )
    run(tmp_path / "cache.db", spoil)
    assert run(tmp_path / "cache.db").stdout == "2\n"
