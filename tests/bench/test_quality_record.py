"""The comparison with llama.cpp measures what it says, and our kernels are no further from exact than llama.cpp."""

import importlib.util
import json
import os
from collections import defaultdict
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from importlib.metadata import PackageNotFoundError
from pathlib import Path

import numpy as np
import pytest

from tegrad.bench import quality
from tegrad.bench.models import FORMATS, parse
from tegrad.bench.record import RecordError
from tegrad.llm.errors import ModelError
from tegrad.llm.families import ARCHES
from tegrad.llm.quality import Agreement, agreement
from tegrad.llm.reference import Past, Reference

needs_llama_cpp = pytest.mark.skipif(not importlib.util.find_spec("cyllama"), reason="cyllama is not installed")
BOARD = "agx-orin-64gb"
FEW, RECORDED = 96, 400
"""Tokens: of most tests, and of the record's rows of a board."""


def test_agreement_is_none_of_the_error_for_equal_logits() -> None:
    logits = np.random.default_rng(0).standard_normal((5, 40)).astype(np.float32)
    assert agreement(logits, logits) == Agreement(5, 0.0, 0.0, 0.0, 1.0)


def test_agreement_is_what_its_words_say() -> None:
    exact = np.log([[0.5, 0.25, 0.25], [0.2, 0.2, 0.6]])
    found = agreement(np.log([[0.25, 0.5, 0.25], [0.2, 0.2, 0.6]]), exact)
    assert found.top1 == 0.5
    assert found.max_error == pytest.approx(np.log(2))
    assert found.mean_error == pytest.approx(2 * np.log(2) / 6)
    assert found.divergence == pytest.approx((0.5 * np.log(2) - 0.25 * np.log(2)) / 2)


def test_logits_that_are_no_numbers_are_no_result() -> None:
    with pytest.raises(ModelError, match="not a number"):
        agreement(np.array([[0.0, np.nan]]), np.zeros((1, 2)))


def test_no_worse_leaves_only_single_logits_to_chance() -> None:
    base = Agreement(100, 1.0, 0.5, 0.1, 0.96)
    for fine in (base, Agreement(100, 1.2, 0.5, 0.1, 0.91), Agreement(100, 0.5, 0.2, 0.0, 1.0)):
        assert fine.no_worse(base)
    for worse in (
        Agreement(100, 1.3, 0.2, 0.0, 1.0),
        Agreement(100, 0.5, 0.51, 0.0, 1.0),
        Agreement(100, 0.5, 0.2, 0.11, 1.0),
        Agreement(100, 0.5, 0.2, 0.0, 0.85),
    ):
        assert not worse.no_worse(base)


@needs_llama_cpp
def test_an_engine_that_rounds_much_is_behind_and_an_exact_one_is_not(monkeypatch: pytest.MonkeyPatch) -> None:
    """llama.cpp rounds keys and values to halves, and activations to 8 bits."""

    def engine(noise: float) -> quality.Engine:
        @contextmanager
        def opened(path: Path, device: str, positions: int) -> Iterator[object]:
            exact = Reference(path)
            rng = np.random.default_rng(0)

            def score(tokens: list[int]) -> quality.Scored:
                logits = exact.logits(tokens, Past("F16"))[1::2]
                return range(1, len(tokens), 2), logits + noise * rng.standard_normal(logits.shape)

            yield score

        return opened

    monkeypatch.setattr(quality, "ENGINES", {"near": engine(0.0), "far": engine(1.0)})
    near, far = quality.compare("small-qwen3-0.6b-q8_0", ("near", "far"), "none", "nowhere", 24)
    assert near.ours.positions == near.llama_cpp.positions == 12
    assert near.ours.mean_error < near.llama_cpp.mean_error / 4
    assert near.within
    assert not far.within
    assert near.llama_cpp == far.llama_cpp


def test_a_board_has_the_cpus_llama_cpp_for_a_peer_even_where_a_gpus_is(monkeypatch: pytest.MonkeyPatch) -> None:
    def version(package: str) -> str:
        if package not in there:
            raise PackageNotFoundError
        return "1.2"

    there = {"llama-cpp-python", "cyllama"}
    monkeypatch.setattr(quality, "version", version)
    assert quality._peer(gpu=True).described("decode") == (
        "CUDA llama.cpp (llama-cpp-python 1.2), flash attention, steps of one token"
    )
    assert quality._peer(gpu=False).described("decode") == "CPU llama.cpp (cyllama 1.2)"
    there.remove("llama-cpp-python")
    assert quality._peer(gpu=True) == quality._peer(gpu=False)
    there.clear()
    with pytest.raises(RecordError, match="pip install cyllama"):
        quality._peer(gpu=True)


def test_a_gpus_llama_cpp_takes_prompts_beside_our_prompts_and_steps_beside_our_steps(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Its prompts run other kernels than its steps, with other roundings."""
    asked: list[tuple[str, dict[str, int]]] = []
    for llama in quality.PEERS:

        def peer(path: Path, length: int, *, package: str = llama.package, **how: int) -> AbstractContextManager[None]:
            asked.append((package, how))
            return nullcontext()

        for engine in ("prefill", "decode-q8"):
            replace(llama, peer=peer).opened(engine, Path("file"), 8)
    halves, packed = {"keys": 1, "values": 1}, {"keys": 8, "values": 8}
    assert asked == [
        ("llama-cpp-python", halves | {"at_once": 512}), ("llama-cpp-python", packed | {"at_once": 1}),
        ("cyllama", halves), ("cyllama", packed),
    ]  # fmt: skip


def test_rows_replace_those_of_the_same_model_engine_and_device(tmp_path: Path) -> None:
    def row(model: str, device: str, error: float) -> quality.QualityRow:
        side = Agreement(3, error, error, error, 1.0)
        return quality.QualityRow(model, "graph", device, side, Agreement(3, 1.0, 1.0, 1.0, 1.0), "peer", "now", "hash")

    path = tmp_path / "folder that is made" / quality.FILE
    quality.merge(path, [row("b", "X", 0.5), row("a", "X", 0.5), row("a", "Y", 0.5)])
    quality.merge(path, [row("a", "X", 2.0)])
    rows = json.loads(path.read_text())["rows"]
    assert [(r["model"], r["device"], r["ours"]["max_error"], r["within"]) for r in rows] == [
        ("a", "X", 2.0, False), ("a", "Y", 0.5, True), ("b", "X", 0.5, True),
    ]  # fmt: skip
    path.write_text("[]")
    with pytest.raises(RecordError, match="no table of rows"):
        quality.merge(path, [])


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    if "TEGRAD_BOARD" not in os.environ and not os.path.exists("/dev/nvidiactl"):
        monkeypatch.setenv("TEGRAD_BOARD", BOARD)
    import tegrad.nv
    from tegrad.nv import device

    tegrad.nv.install()
    yield "NV"
    if (opened := device._opened.get("NV")) is not None:
        opened.close()


def test_every_format_is_compared_in_two_families_and_every_family_in_two_formats() -> None:
    families, formats = defaultdict(set), defaultdict(set)
    for case in quality.CASES:
        if case != quality.SHIPPED:
            shape, kind = parse(case.removeprefix("small-"))
            families[kind].add(shape.arch)
            formats[shape.arch].add(kind)
    assert {kind for kind in FORMATS if len(families[kind]) < 2} == set()
    unknown = {"pangu-embedded", "maincoder"}  # nobody here could read their configuration files
    silent = {"gemma-embedding", "llama-embed"}  # have no logits: tests/llm/test_embeddings.py
    assert {arch for arch in ARCHES if len(formats[arch]) < 2} == unknown | silent


@needs_llama_cpp
@pytest.mark.board
def test_our_kernels_are_no_further_from_exact_than_llama_cpp(device: str) -> None:
    rows = list(quality.compare("small-1b-q4k", ("prefill", "decode"), device, "board", 42))
    assert [row.engine for row in rows if not row.within] == []
    assert [row.ours.positions for row in rows] == [42, 42]


FEW_SAY_SO = {
    "small-gemma2-2b-q4_1": set[str](),
    "small-smollm3-3b-iq4_nl": set[str](),
    "small-gemma3-1b-q5_0": {"persistent"},
    "small-gemma-2b-q8_0": set[str](),
    "small-jais2-8b-q4km": set[str](),
}
"""Models behind after few tokens, where single positions decide, and their engines that are after the record's, too."""


@needs_llama_cpp
@pytest.mark.board
@pytest.mark.long
@pytest.mark.parametrize("case", quality.CASES)
def test_no_family_or_format_is_further_from_exact_than_llama_cpp(device: str, case: str) -> None:
    count = RECORDED if case in FEW_SAY_SO else FEW
    rows = list(quality.compare(case, list(quality.ENGINES), device, "board", count))
    assert {row.engine for row in rows if not row.within} == FEW_SAY_SO.get(case, set()), rows


def test_the_command_feeds_as_many_tokens_as_the_documented_table_has(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from typer.testing import CliRunner

    from tegrad.cli import bench

    fed: list[int] = []
    monkeypatch.setattr(quality, "compare", lambda *given: fed.append(given[-1]) or iter(()))
    monkeypatch.setattr("tegrad.llm.start.choose_device", lambda: None)
    monkeypatch.setattr("tegrad.llm.device.open_device", lambda: "NV sm_00")
    assert CliRunner().invoke(bench.app, ["quality", "a", "--results", str(tmp_path)]).exit_code == 0
    assert fed == [quality.TOKENS]


def test_the_command_writes_the_table_and_fails_where_we_are_behind(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from typer.testing import CliRunner

    from tegrad.cli import bench

    side = Agreement(8, 1.0, 0.5, 0.1, 1.0)
    far = Agreement(8, 2.0, 0.6, 0.2, 0.0)

    def compare(case: str, engines: object, device: str, where: str, count: int) -> Iterator[quality.QualityRow]:
        assert (device, where, count) == ("NV", "NV sm_00", 8)
        yield quality.QualityRow(case, "decode", where, far if case == "b" else side, side, "peer", "now", "hash")

    monkeypatch.setattr(quality, "compare", compare)
    monkeypatch.setattr("tegrad.llm.start.choose_device", lambda: None)
    monkeypatch.setattr("tegrad.llm.device.open_device", lambda: "NV sm_00")
    monkeypatch.delenv("TEGRAD_BOARD", raising=False)

    def run(*arguments: str) -> int:
        command = ["quality", *arguments, "--tokens", "8", "--results", str(tmp_path)]
        return CliRunner().invoke(bench.app, command).exit_code

    assert run("a") == 0
    assert run("a", "b") == 1
    assert run("a", "--engine", "none") == 2
    rows = json.loads((tmp_path / quality.FILE).read_text())["rows"]
    assert [(row["model"], row["within"]) for row in rows] == [("a", True), ("b", False)]
