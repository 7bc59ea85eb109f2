"""tools/aarch64: shards keep their order, a run that is cut off goes on, and the record counts what journals say."""

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

TOOL = Path(__file__).parents[1] / "tools" / "aarch64"
pytestmark = [
    pytest.mark.skipif(not TOOL.exists(), reason="tools/ is a checkout's"),
    pytest.mark.long,  # a tool that is run by hand
]

FILE = """
import os, pytest
def test_good(): pass
def test_bad(): assert os.path.exists("mended"), "not mended"
def test_away(): pytest.skip("no such thing here")
def test_dies():
    if not os.path.exists("mended"): os.kill(os.getpid(), 9)
def test_after(): pass
"""


@pytest.fixture
def tool(monkeypatch: pytest.MonkeyPatch) -> None:
    """The tool's modules, importable by their own names."""
    monkeypatch.syspath_prepend(str(TOOL))
    for name in ("outcomes", "shards", "record", "root", "left_out"):
        monkeypatch.delitem(sys.modules, name, raising=False)


class Here:
    """A root that is this machine: commands run in a folder without entering anything."""

    def __init__(self, folder: Path) -> None:
        self.journals = self.folder = folder

    def command(self, *command: str) -> list[str]:
        """The command, in the folder, with the journal where it really is."""
        enter = f'cd {self.folder}; export AARCH64_JOURNAL="{self.folder}/${{AARCH64_JOURNAL##*/}}"; exec "$@"'
        path = f"PYTHONPATH={TOOL}"
        return ["sh", "-c", enter, "sh", "env", path, sys.executable, "-m", *command, "--rootdir=.", "-c/dev/null"]


@pytest.fixture
def here(tmp_path: Path, tool: None, monkeypatch: pytest.MonkeyPatch) -> Here:
    """Such a root, with one file of tests in it."""
    import root

    monkeypatch.setattr(root, "ENVIRONMENT", {"PATH": os.environ["PATH"]})
    (tmp_path / "test_shard.py").write_text(FILE)
    return Here(tmp_path)


def counts(path: Path) -> dict[str, str]:
    """The outcome of each test of a journal, by its short name."""
    from outcomes import outcomes

    return {test.partition("::")[2]: line["outcome"] for test, line in outcomes(path).items()}


def test_a_signal_is_charged_to_its_test_and_a_second_call_asks_again_only_what_failed(here: Here) -> None:
    from outcomes import is_complete, outcomes
    from shards import Shard, journal, run_shard

    shard = Shard("test_shard.py")
    path = journal(here, shard)
    run_shard(here, shard, "one", limit_s=30)
    first = {"test_good": "passed", "test_bad": "failed", "test_away": "skipped", "test_after": "passed"}
    assert counts(path) == first | {"test_dies": "killed"}
    known = outcomes(path)
    assert known["test_shard.py::test_dies"]["reason"] == "signal 9"
    assert "not mended" in known["test_shard.py::test_bad"]["reason"]
    assert known["test_shard.py::test_away"]["reason"] == "no such thing here"
    assert not is_complete(path)

    (here.folder / "mended").touch()
    run_shard(here, shard, "two", limit_s=30)
    assert counts(path) == first | {"test_dies": "passed", "test_bad": "passed"}
    again = {test for test, line in outcomes(path).items() if line["commit"] == "two"}
    assert again == {"test_shard.py::test_bad", "test_shard.py::test_dies"}
    assert is_complete(path)


def test_a_test_over_its_limit_is_ended(here: Here) -> None:
    from outcomes import outcomes
    from shards import Shard, journal, run_shard

    (here.folder / "test_quick.py").write_text("def test_quick(): pass\n")
    (here.folder / "test_slow.py").write_text("import time\ndef test_slow(): time.sleep(600)\ndef test_next(): pass\n")
    start = time.monotonic()
    run_shard(here, Shard("test_quick.py"), "one", limit_s=300)
    limit = 3 + 3 * round(time.monotonic() - start)  # to start and to collect counts, too: slow where all is emulated
    run_shard(here, Shard("test_slow.py"), "one", limit_s=limit)
    ended = outcomes(journal(here, Shard("test_slow.py")))
    assert ended["test_slow.py::test_slow"]["reason"] == f"took longer than {limit} s"
    assert ended["test_slow.py::test_next"]["outcome"] == "passed"


def test_a_file_that_cannot_be_collected_fails_until_it_can(here: Here) -> None:
    from outcomes import is_complete
    from shards import Shard, journal, run_shard

    (here.folder / "test_broken.py").write_text("import no_such_module\n")
    shard = Shard("test_broken.py")
    path = journal(here, shard)
    run_shard(here, shard, "one", limit_s=30)
    assert counts(path) == {"": "failed"}
    (here.folder / "test_broken.py").write_text("def test_it(): pass\n")
    run_shard(here, shard, "two", limit_s=30)
    assert counts(path) == {"test_it": "passed"}
    assert is_complete(path)


def test_a_file_that_is_skipped_as_a_whole_is_counted_with_its_reason(here: Here) -> None:
    from outcomes import is_complete, outcomes
    from shards import Shard, journal, run_shard

    (here.folder / "test_absent.py").write_text(
        "import pytest\npytest.importorskip('no_such_module', reason='not here')\n"
    )
    path = journal(here, Shard("test_absent.py"))
    run_shard(here, Shard("test_absent.py"), "one", limit_s=30)
    assert [(line["outcome"], line["reason"]) for line in outcomes(path).values()] == [("skipped", "not here")]
    assert is_complete(path)


def test_every_file_of_tests_is_in_one_shard_and_quick_folders_come_first(tool: None) -> None:
    from shards import ORDER, all_shards

    shards = all_shards()
    listed = subprocess.run(["git", "ls-files", "tests"], cwd=TOOL.parents[1], capture_output=True, text=True).stdout
    files = {line for line in listed.split() if Path(line).name.startswith("test_") and line.endswith(".py")}
    assert files <= {shard.file for shard in shards}
    assert len({shard.name for shard in shards}) == len(shards)
    turns = [shard.turn()[0] for shard in shards]
    assert turns == sorted(turns)
    assert ORDER[0] == shards[0].folder == "uapi"


def test_the_record_counts_by_folder_and_names_what_did_not_pass(tool: None, tmp_path: Path) -> None:
    from record import merge
    from shards import Shard

    def journal(name: str, *lines: dict) -> Path:
        path = tmp_path / name
        path.write_text("".join(json.dumps(line) + "\n" for line in lines))
        return path

    ended = {"reason": "", "seconds": 1.5}
    hw = journal(
        "hw",
        {"commit": "a", "date": "2026-01-01T00:00:00Z"},
        {"collected": ["h::one", "h::two"]},
        {"test": "h::one", "outcome": "passed", **ended},
        {"test": "h::gone", "outcome": "failed", **ended},
        {"commit": "b", "date": "2026-01-02T00:00:00Z"},
        {"collected": ["h::one", "h::two"]},
        {"test": "h::two", "outcome": "left out", **ended, "reason": "no ptrace"},
    )
    nv = journal(
        "nv",
        {"commit": "b", "date": "2026-01-03T00:00:00Z"},
        {"collected": ["n::one", "n::two"]},
        {"test": "n::one", "outcome": "passed", **ended},
    )
    long = journal("long", {"commit": "b", "date": "2026-01-02T00:00:00Z"}, {"collected": []})
    found = merge(
        {Shard("tests/hw/test_h.py"): hw, Shard("tests/nv/test_n.py"): nv, Shard("tests/hw/test_long.py"): long}
    )
    assert found["totals"] == {"passed": 2, "failed": 0, "killed": 0, "skipped": 0, "left out": 1}
    assert found["folders"]["hw"] == {"passed": 1, "failed": 0, "killed": 0, "skipped": 0, "left out": 1, "seconds": 3}
    assert found["left out"] == {"no ptrace": ["h::two"]}
    assert found["passed_by_commit"] == {"a": 1, "b": 1}
    assert found["files not run to the end"] == ["tests/nv/test_n.py"]
    assert (found["begun"], found["ended"]) == ("2026-01-01T00:00:00Z", "2026-01-03T00:00:00Z")


def test_every_pattern_of_what_is_left_out_has_a_cause_and_a_test(tool: None) -> None:
    import re

    from left_out import LEFT_OUT, cause_of

    sources = {path.relative_to(TOOL.parents[1]).as_posix() for path in (TOOL.parents[1] / "tests").rglob("test_*.py")}
    for pattern, cause in LEFT_OUT:
        assert cause
        file = pattern.partition("::")[0]
        assert any(re.fullmatch(file, source) for source in sources), pattern
    assert cause_of("tests/hw/test_chip_rows.py::test_anything") is None


def test_a_qemu_that_would_take_all_memory_is_refused(tool: None, monkeypatch: pytest.MonkeyPatch) -> None:
    import root

    monkeypatch.setattr(root.os, "geteuid", lambda: 0)
    monkeypatch.setattr(root.shutil, "which", lambda program: program)
    monkeypatch.setattr(root, "qemu_version", lambda: "7.2.22")
    with pytest.raises(root.RootError, match="qemu-user 7 is too old, 8 or newer"):
        root.register()


def test_a_qemu_whose_package_leaves_registering_to_systemd_is_registered_without_it(
    tool: None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    import root

    started: list[list[str]] = []
    (tmp_path / "register").symlink_to("qemu-aarch64")  # as the kernel makes one of the other
    (tmp_path / "format").write_text(":qemu-aarch64:flags: POF")
    monkeypatch.setattr(root, "REGISTERED", tmp_path / "qemu-aarch64")
    monkeypatch.setattr(root, "FORMAT", tmp_path / "format")
    monkeypatch.setattr(root.os, "geteuid", lambda: 0)
    monkeypatch.setattr(root.shutil, "which", lambda program: program)
    monkeypatch.setattr(root, "qemu_version", lambda: "10.0.2")
    monkeypatch.setattr(root.subprocess, "run", lambda command, **_: started.append(command))
    root.register()
    assert [command[0] for command in started] == ["mount"]
    assert (tmp_path / "qemu-aarch64").read_text() == (tmp_path / "format").read_text()
