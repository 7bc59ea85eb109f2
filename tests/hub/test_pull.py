"""Pulling from a hub of our own: what is fetched, resumed, refused, listed, found and removed."""

import fcntl
import hashlib
import json
import os
import random
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import BinaryIO

import pytest
from hub_server import COMMIT, Hub, Repository, Server

pytest.importorskip("huggingface_hub")

from tegrad import models
from tegrad.hub import cache, download
from tegrad.hub.download import DownloadError, pull
from tegrad.hub.names import ModelNameError

REPO = "owner/Some-Model-GGUF"


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    """A hub, an empty cache, and no wait between two tries."""
    with Server() as hub:
        for name in ("HF_HUB_CACHE", "HUGGINGFACE_HUB_CACHE", "HF_TOKEN", "HUGGING_FACE_HUB_TOKEN"):
            monkeypatch.delenv(name, raising=False)
        for name, value in {
            "HF_HOME": str(tmp_path),
            "HF_ENDPOINT": hub.url,
            "NO_PROXY": "127.0.0.1,localhost",
        }.items():
            monkeypatch.setenv(name, value)
        monkeypatch.setattr("huggingface_hub.file_download.time.sleep", lambda _: None)
        monkeypatch.setattr("huggingface_hub.constants.DOWNLOAD_CHUNK_SIZE", 100_000)
        monkeypatch.setattr("huggingface_hub.constants.HF_HUB_DISABLE_TELEMETRY", True)
        hub.repositories[REPO] = Repository(
            {f"Some-Model-{kind}.gguf": random.Random(kind).randbytes(1 << 20) for kind in ("Q4_K_M", "Q8_0")}
            | {f"x-F16-0000{number}-of-00002.gguf": bytes([number]) * 999 for number in (1, 2)}
            | {"mmproj-F16.gguf": b"image", "README.md": b"words"}
        )
        yield hub


def test_a_model_is_fetched_into_the_librarys_cache_and_not_again(hub: Hub, tmp_path: Path) -> None:
    got = pull(REPO)
    assert got.model.name == f"{REPO}:Q4_K_M"
    assert got.path == tmp_path / f"hub/models--owner--Some-Model-GGUF/snapshots/{COMMIT}/Some-Model-Q4_K_M.gguf"
    assert got.path.read_bytes() == hub.repositories[REPO].files[got.path.name]
    assert pull(REPO).path == got.path
    assert len(hub.ranges) == 1
    assert not list(tmp_path.rglob("*.incomplete"))


def test_the_librarys_own_scan_sees_it(hub: Hub, tmp_path: Path) -> None:
    from huggingface_hub import scan_cache_dir

    pull(f"{REPO}:q8_0")
    (repo,) = scan_cache_dir(tmp_path / "hub").repos
    assert (repo.repo_id, repo.size_on_disk, set(repo.refs)) == (REPO, 1 << 20, {"main"})


def test_a_model_in_parts_comes_whole(hub: Hub) -> None:
    first = pull(f"{REPO}:F16").path
    assert first.name == "x-F16-00001-of-00002.gguf"
    assert first.with_name("x-F16-00002-of-00002.gguf").read_bytes() == bytes([2]) * 999
    assert [each.model.size for each in cache.here()] == [1998]


def test_a_connection_that_breaks_is_gone_on_with(hub: Hub) -> None:
    hub.breaks = [300_000, 0, 0, 200_000]
    got = pull(REPO)
    assert hub.ranges == [None, "bytes=300000-", "bytes=300000-", "bytes=300000-", "bytes=500000-"]
    assert got.path.read_bytes() == hub.repositories[REPO].files[got.path.name]


def test_what_an_interrupted_pull_has_brought_is_kept_for_the_next(hub: Hub) -> None:
    hub.breaks = [300_000] + [0] * 100
    with pytest.raises(DownloadError, match="the next pull goes on behind it"):
        pull(REPO)
    assert cache.here() == []
    hub.breaks, hub.ranges = [], []
    got = pull(REPO)
    assert hub.ranges == ["bytes=300000-"]
    assert got.path.read_bytes() == hub.repositories[REPO].files[got.path.name]


def test_bytes_that_are_not_the_hubs_are_thrown_away(hub: Hub) -> None:
    hub.breaks = [300_000] + [0] * 100
    with pytest.raises(DownloadError):
        pull(REPO)
    (part,) = cache.folder().rglob("*.incomplete")
    part.write_bytes(bytes(300_000))
    hub.breaks = []
    with pytest.raises(DownloadError, match="other bytes than the hub has: pull it again"):
        pull(REPO)
    assert pull(REPO).path.exists()


def test_a_pull_that_waited_for_one_whose_bytes_were_wrong_begins_anew(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first took the part away that the second had opened."""
    good, damaged = b"GGUF" + bytes(1000), bytes(1004)
    etag, waits, flock = hashlib.sha256(good).hexdigest(), threading.Event(), fcntl.flock

    def source(write: Callable[[BinaryIO], object]) -> download._Source:
        made = download._Source.__new__(download._Source)
        made.etag, made.size, made.file = etag, len(good), "x.gguf"
        made.blob, made.part = tmp_path / etag, tmp_path / f"{etag}.incomplete"
        monkeypatch.setattr(made, "_read", lambda out: (write(out), out.flush()), raising=False)
        return made

    def damage(out: BinaryIO) -> None:
        second.start()
        assert waits.wait(30)
        out.write(damaged)

    def locked(file: BinaryIO, how: int) -> None:
        if threading.current_thread() is second:
            waits.set()
        flock(file, how)

    one, other = source(damage), source(lambda out: out.write(good[out.tell() :]))
    second = threading.Thread(target=other.fetch)
    monkeypatch.setattr(download.fcntl, "flock", locked)
    with pytest.raises(DownloadError, match="came with other bytes"):
        one.fetch()
    second.join(30)
    assert other.blob.read_bytes() == good
    assert [path.name for path in tmp_path.iterdir()] == [etag]


def test_a_gated_repository_needs_a_token_which_storage_is_not_shown(hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    hub.repositories[REPO].gated = True
    with pytest.raises(
        DownloadError, match=f"is gated: accept its terms on {hub.url}/{REPO}, and put a token .*HF_TOKEN"
    ):
        pull(REPO)
    monkeypatch.setenv("HF_TOKEN", "hf_secret")
    assert pull(REPO).path.exists()
    assert hub.tokens == {None}


def test_a_private_repository_is_not_there_without_its_token(hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    hub.repositories[REPO].token = "hf_secret"
    with pytest.raises(DownloadError, match="is not there, or private"):
        pull(REPO)
    monkeypatch.setenv("HF_TOKEN", "hf_secret")
    assert pull(REPO).path.exists()


@pytest.mark.parametrize(
    ("name", "revision", "said"),
    [
        ("owner/nothing", None, "is not there, or private: check the name"),
        (REPO, "v9", "has no revision v9"),
        (f"{REPO}:Q5_0", None, f"has no Q5_0; it has {REPO}:Q4_K_M, {REPO}:Q8_0, {REPO}:F16"),
        ("owner/weights", None, "has no model in GGUF format among its 1 files"),
        ("Some-Model", None, "is no name on the hub: tegrad pull OWNER/REPO:QUANT"),
        ("owner/a..b", None, "is no name on the hub"),
    ],
)
def test_what_there_is_not_is_said_with_the_next_step(hub: Hub, name: str, revision: str | None, said: str) -> None:
    hub.repositories["owner/weights"] = Repository({"model.safetensors": b"1"})
    with pytest.raises((DownloadError, ModelNameError), match=said.replace("(", r"\(")):
        pull(name, revision)
    assert hub.ranges == []


def test_a_revision_is_pulled(hub: Hub) -> None:
    assert pull(REPO, "v1").path == cache.located(REPO)
    assert {path.name for path in cache.folder().glob("*/refs/*")} == {"v1"}


def test_a_disk_too_small_is_said_before_anything_is_read(hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shutil.disk_usage", lambda _: SimpleNamespace(free=1000))
    with pytest.raises(DownloadError, match=r"needs 0.0 GB more, and .* has 0.0 GB free: make room"):
        pull(REPO)
    assert hub.ranges == []


def test_a_server_that_is_not_there_is_said(monkeypatch: pytest.MonkeyPatch, hub: Hub) -> None:
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")
    with pytest.raises(DownloadError, match=r"cannot reach http://127.0.0.1:9 .*: look at the network"):
        pull(REPO)


@pytest.mark.parametrize("text", [REPO, "Some-Model-GGUF", "some-model", "some-model:q4_k_m", "owner/some-model"])
def test_a_name_may_be_short(hub: Hub, text: str) -> None:
    pull(REPO)
    pull(f"{REPO}:Q8_0")
    assert cache.located(text).name == "Some-Model-Q4_K_M.gguf"


def test_a_path_is_a_path_and_an_ambiguous_name_lists_what_it_may_be(
    hub: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hub.repositories["other/some-model"] = hub.repositories[REPO]
    pull(f"{REPO}:Q8_0")
    pull("other/some-model:Q8_0")
    with pytest.raises(
        ModelNameError, match=r"may be several models: choose one of other/some-model:Q8_0, owner/Some.*:Q8_0"
    ):
        cache.located("some-model")
    with pytest.raises(ModelNameError, match=r"other is no file.*`tegrad models` lists"):
        cache.located("other")
    monkeypatch.chdir(tmp_path)
    (tmp_path / "some-model").touch()
    assert cache.located("some-model") == Path("some-model")
    assert cache.located("not/here.gguf") == Path("not/here.gguf")


def test_removing_frees_what_nothing_else_uses(hub: Hub) -> None:
    pull(REPO)
    pull(f"{REPO}:Q8_0")
    with pytest.raises(ModelNameError, match="choose one of"):
        cache.remove(REPO)
    assert cache.remove("some-model:Q8_0")[1] == 1 << 20
    assert [each.model.tag for each in cache.here()] == ["Q4_K_M"]
    cache.remove(REPO)
    assert cache.here() == []
    assert not list(cache.folder().glob("models--*"))


def test_removing_leaves_copies_of_the_repository_with_the_same_commit_alone(hub: Hub) -> None:
    names = [f"owner{number}/copy" for number in range(5)]
    for name in names:
        hub.repositories[name] = Repository({"copy-F16.gguf": name.encode()})
        pull(name)
    while names:
        cache.remove(names.pop())
        assert [each.path.read_text() for each in cache.here()] == names


def test_without_the_library_it_is_said_what_to_install(hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    with pytest.raises(ModelNameError, match=r"needs the Hugging Face hub's library: pip install .*\[hub\]"):
        pull(REPO)


def test_the_cache_is_where_the_library_has_it() -> None:
    code = """if True:
        import os
        from tegrad.hub.cache import folder
        from huggingface_hub.constants import HF_HUB_CACHE
        print(folder() == __import__("pathlib").Path(HF_HUB_CACHE), folder())
    """
    for variables in ({}, {"XDG_CACHE_HOME": "/x"}, {"HF_HOME": "~/h"}, {"HF_HUB_CACHE": "$HOME/c", "HF_HOME": "/h"}):
        clean = {name: value for name, value in os.environ.items() if not name.startswith(("HF_", "XDG_", "HUGGING"))}
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True,
                              env=clean | variables)  # fmt: skip
        assert done.stdout.startswith("True"), done.stdout


def command(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-m", "tegrad", *arguments], capture_output=True, text=True, check=False,
                          env=os.environ | environment | {"HF_HUB_DISABLE_TELEMETRY": "1"})  # fmt: skip


def test_ctrl_c_leaves_what_has_come_and_the_next_pull_goes_on_behind_it(hub: Hub, tmp_path: Path) -> None:
    whole, piece = random.Random(1).randbytes(25 << 20), 10 << 20
    hub.repositories[REPO] = Repository({"Some-Model-Q8_0.gguf": whole})
    hub.stall = 2 * piece + 1000
    with subprocess.Popen([sys.executable, "-m", "tegrad", "pull", REPO], stdout=subprocess.PIPE,
                          stderr=subprocess.PIPE, text=True) as process:  # fmt: skip
        blobs, end = cache.folder(), time.monotonic() + 60
        while time.monotonic() < end and sum(part.stat().st_size for part in blobs.rglob("*.incomplete")) < 2 * piece:
            time.sleep(0.02)
        process.send_signal(signal.SIGINT)
        assert (*process.communicate(timeout=30), process.returncode) == ("", "", 130)
    (left,) = (path for path in tmp_path.rglob("*") if path.is_file())
    assert (left.suffix, left.stat().st_size) == (".incomplete", 2 * piece)
    assert json.loads(command("models", "--json").stdout) == []
    done = command("pull", REPO, "--json")
    assert (done.returncode, done.stderr) == (0, "")
    assert hub.ranges == [None, f"bytes={2 * piece}-"]
    assert Path(json.loads(done.stdout)["path"]).read_bytes() == whole
    assert not list(tmp_path.rglob("*.incomplete"))


def test_the_command_pulls_lists_and_removes(hub: Hub, tmp_path: Path) -> None:
    hub.repositories["owner/small"] = Repository({"small-F16.gguf": models.SMALL.read_bytes()})
    done = command("pull", "owner/small")
    assert (done.returncode, done.stderr) == (0, "")
    path, run = done.stdout.splitlines()
    assert run == 'tegrad run owner/small:F16 "Once upon a time"'
    (row,) = json.loads(command("models", "--json").stdout)
    size = models.SMALL.stat().st_size
    assert row == {"name": "owner/small:F16", "size": size, "quantization": "F16", "path": path}
    offline = command("pull", "owner/small", HF_HUB_OFFLINE="1")
    assert offline.stdout == done.stdout
    refused = command("pull", REPO, HF_HUB_OFFLINE="1")
    assert (refused.returncode, refused.stderr) == (
        1,
        f"tegrad: HF_HUB_OFFLINE is set, and {REPO} is not here: unset it to pull\n",
    )
    (text := tmp_path / "text").write_text("In the beginning")
    loss = command("eval", "small", "--text", str(text), "--tokens", "0", "--json")
    assert json.loads(loss.stdout)["model"] == "small-F16.gguf"
    assert command("models", "rm", "small").stdout == f"removed owner/small:F16, {size / 1e6:,.0f} MB\n"
    assert command("run", "small", "hi").stderr.startswith(
        "tegrad: small is no file, and no model of that name is here"
    )
