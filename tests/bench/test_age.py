"""A row older than the code that it measures says so, counted from git; where nobody can tell, nothing is said."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType

import pytest

from tegrad.bench import record as records
from tegrad.bench.figures import FAMILIES, Age, Results, age, as_json, paths
from tegrad.bench.measures import MEASURES
from tegrad.bench.record import SOURCES, History, Side, digest_of, make

REPOSITORY = Path(__file__).parents[2]
needs_git = pytest.mark.skipif(shutil.which("git") is None, reason="needs git")
OTHER = Side("tegrad", "tegrad bench", [1.0])


class Repository:
    """A repository of its own, with a package and a results folder."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.git("init", "--quiet")

    def git(self, *arguments: str) -> str:
        kept = {name: value for name, value in os.environ.items() if not name.startswith("GIT_")}
        names = {f"GIT_{who}_{what}": "a@b" for who in ("AUTHOR", "COMMITTER") for what in ("NAME", "EMAIL")}
        command = ["git", "-C", str(self.root), "-c", "commit.gpgsign=false", *arguments]
        nowhere = {"GIT_CONFIG_GLOBAL": os.devnull, "GIT_CONFIG_SYSTEM": os.devnull}
        done = subprocess.run(command, capture_output=True, text=True, check=True, env=kept | names | nowhere)
        return done.stdout.strip()

    def commit(self, files: Mapping[str, str] = MappingProxyType({})) -> str:
        """Files by their path, and whatever else has changed."""
        for name, text in files.items():
            path = self.root / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)
        self.git("add", "--all")
        self.git("commit", "--quiet", "--allow-empty", "-m", "-")
        return self.git("rev-parse", "HEAD")

    def digest(self) -> str:
        package = self.root / "tegrad"
        files = [path for path in package.rglob("*") if path.suffix in SOURCES]
        return digest_of((path.relative_to(package), path.read_bytes()) for path in files)


@pytest.fixture
def repository(tmp_path: Path) -> Repository:
    return Repository(tmp_path)


def row(results: Results, id: str = "decode-x") -> dict:
    return next(row for row in results.stored() if row["id"] == id)


@needs_git
def test_only_commits_that_change_what_a_row_measures_count(repository: Repository) -> None:
    taken = repository.commit({"tegrad/llm/engine.py": "1", "tegrad/ptx/core.py": "1"})
    results = Results(repository.root / "results")
    results.add(replace(make("decode-x", "", "tok/s", OTHER), commit=taken))
    repository.commit()
    assert results.age(row(results)) == Age(taken, True, 0)
    repository.commit({"tegrad/ptx/core.py": "2", "tegrad/llm/tokenizer.py": "1"})
    assert results.age(row(results)).mark == ""
    repository.commit({"tegrad/llm/engine.py": "2"})
    assert results.age(row(results)).mark == "older than its code: 1 commit"
    repository.commit({"tegrad/nv/queues.py": "1"})
    assert results.age(row(results)).mark == "older than its code: 2 commits"
    # What is again as it was is no other code.
    repository.commit({"tegrad/llm/engine.py": "1"})
    repository.git("rm", "--quiet", "tegrad/nv/queues.py")
    repository.commit()
    assert results.age(row(results)).mark == ""


@needs_git
def test_samples_without_a_known_commit_count_from_the_one_that_brought_them(repository: Repository) -> None:
    repository.commit({"tegrad/llm/engine.py": "1"})
    results = Results(repository.root / "results")
    results.add(replace(make("decode-x", "", "tok/s", OTHER), commit="", versions={}))
    assert results.age(row(results)) is None  # not committed yet
    brought = repository.commit({"tegrad/llm/engine.py": "2"})
    assert results.age(row(results)) == Age(brought, False, 0)
    repository.commit({"tegrad/llm/engine.py": "3"})
    # The file written anew, with the same samples, is not younger for it.
    samples = results.root / row(results)["samples"]
    samples.write_text(json.dumps(json.loads(samples.read_text())))
    repository.commit()
    results.recompute()
    assert results.age(row(results)) == Age(brought, False, 1)
    assert results.age(row(results)).mark == "older than its code: at least 1 commit"
    # So do those whose commit is in another history.
    elsewhere = make("decode-x", "", "tok/s", OTHER)
    results.add(replace(elsewhere, commit="1" * 40, date="2026-01-02T03:04:05Z"))
    brought = repository.commit()
    assert results.age(row(results)) == Age(brought, False, 0)


@needs_git
def test_samples_from_elsewhere_get_the_commit_whose_sources_they_name(repository: Repository) -> None:
    repository.commit({"tegrad/llm/engine.py": "1", "tegrad/notes.txt": "1"})
    measured, digest = repository.commit({"tegrad/notes.txt": "2"}), repository.digest()
    repository.commit({"tegrad/llm/engine.py": "2"})
    results = Results(repository.root / "results")
    record = replace(make("decode-x", "", "tok/s", OTHER), commit="", versions={"tegrad_sources": digest})
    results.add(record)
    assert row(results)["commit"] == measured
    assert results.age(row(results)).mark == "older than its code: 1 commit"
    results.add(replace(record, versions={"tegrad_sources": "0" * 16}))
    assert row(results)["commit"] is None


@needs_git
def test_a_measurement_knows_its_commit_where_the_sources_are_committed(
    repository: Repository, monkeypatch: pytest.MonkeyPatch
) -> None:
    commit = repository.commit({"tegrad/llm/engine.py": "1"})
    monkeypatch.setattr(records, "PACKAGE", repository.root / "tegrad")
    assert make("decode-x", "", "tok/s", OTHER).commit == commit
    (repository.root / "tegrad" / "llm" / "engine.py").write_text("changed")
    assert make("decode-x", "", "tok/s", OTHER).commit == ""


@needs_git
def test_a_package_in_a_repository_that_does_not_hold_it_has_no_commit(
    repository: Repository, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As one that is installed into an ignored folder of somebody's project."""
    repository.commit({".gitignore": "/venv/\n"})
    package = repository.root / "venv" / "tegrad"
    package.mkdir(parents=True)
    (package / "engine.py").write_text("1")
    monkeypatch.setattr(records, "PACKAGE", package)
    assert make("decode-x", "", "tok/s", OTHER).commit == ""


@needs_git
def test_a_shallow_clone_and_a_folder_without_a_repository_say_nothing(repository: Repository, tmp_path: Path) -> None:
    taken = repository.commit({"tegrad/llm/engine.py": "1"})
    results = Results(repository.root / "results")
    results.add(replace(make("decode-x", "", "tok/s", OTHER), commit=taken))
    repository.commit({"tegrad/llm/engine.py": "2"})
    assert results.age(row(results)).commits == 1
    shallow = tmp_path / "shallow"
    repository.git("clone", "--quiet", "--depth=1", f"file://{repository.root}", str(shallow))
    assert Results(shallow / "results").age(row(results)) is None
    assert History(shallow).holding(repository.digest(), "2026-01-01T00:00:00Z") == ""
    shutil.rmtree(shallow / ".git")
    alone = Results(shallow / "results")
    with pytest.MonkeyPatch.context() as patch:  # else the repository around the folder would be found
        patch.setenv("GIT_CEILING_DIRECTORIES", str(tmp_path))
        assert alone.age(row(results)) is None
        alone.add(replace(make("decode-x", "", "tok/s", OTHER), commit=""))
        assert row(alone)["commit"] is None


def test_without_git_nothing_is_known(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    assert age(History(REPOSITORY), "decode-x", REPOSITORY / "results", "2026") is None
    assert make("decode-x", "", "tok/s", OTHER).commit == ""
    assert as_json({"id": "x"}, None) == {
        "id": "x", "counted_from": None, "counted_from_taken": None, "older_by_commits": None,
    }  # fmt: skip


@needs_git
def test_a_hooks_repository_is_not_taken_for_the_folders(
    repository: Repository, monkeypatch: pytest.MonkeyPatch
) -> None:
    repository.commit({"tegrad/llm/engine.py": "1"})
    monkeypatch.setenv("GIT_DIR", "/nowhere")
    assert History(repository.root).known


def test_every_figure_belongs_to_a_family_whose_paths_are_there() -> None:
    for id in {*MEASURES, *(row["id"] for row in Results(REPOSITORY / "results").stored())}:
        assert paths(id)
    for patterns, found in FAMILIES.items():
        for path in found:
            assert (REPOSITORY / path.removeprefix(":(exclude)")).exists(), (patterns, path)
    with pytest.raises(LookupError, match="belongs to no family"):
        paths("something-else")


def test_the_command_marks_old_rows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from tegrad.cli.bench import figures

    results = Results(tmp_path / "results")
    for id in ("decode-old", "decode-new"):
        results.add(replace(make(id, "", "tok/s", OTHER), commit=""))
    known = {"decode-old": Age("c" * 40, True, 12), "decode-new": Age("c" * 40, True, 0)}
    monkeypatch.setattr(Results, "age", lambda self, row: known[row["id"]])
    figures(results.root, measure=False, json_=True)
    new, old, rows = capsys.readouterr().out.strip().splitlines()
    assert old.endswith("  older than its code: 12 commits")
    assert "older" not in new
    assert [row["older_by_commits"] for row in json.loads(rows)] == [0, 12]
    assert [row["counted_from"] for row in json.loads(rows)] == ["c" * 40] * 2
