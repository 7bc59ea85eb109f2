"""The figures of decoding: ours around the peer's on one file, what is reached, and the others when one fails."""

import json
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tegrad.bench import decode, measures, peers, steps
from tegrad.bench.figures import TARGETS
from tegrad.bench.record import RecordError, Side, make
from tegrad.llm.plan import DecodePlan
from tegrad.llm.state import States
from tegrad.nv.faults import WaitTimeout

sys.path.append(str(Path(__file__).parents[1] / "llm"))

from tiny_llama import TYPE, Shape, write

SHAPE = Shape(dim=256, ffn=512, heads=4, kv_heads=2, vocab=301, layers=2, context=256)


def record(id: str, ours: float, peer: float, limit: float | None = None, **more: Any) -> Any:
    return make(id, "", TARGETS[id].unit, Side("tegrad", "", [ours]), peer=Side("llama.cpp", "", [peer]), limit=limit,
                larger_is_better=TARGETS[id].larger, **more)  # fmt: skip


def test_a_line_holds_ours_against_the_peer_the_goal_and_the_limit() -> None:
    line = decode.line(record("decode-1b-q4k-d0", 2400, 960, 6400))
    assert (line.ratio, line.share, line.goal, line.reached) == (2.5, 0.375, 2880, False)
    line = decode.line(record("decode-8b-q6k-d0", 480, 200, 730))
    assert line.goal == pytest.approx(0.65 * 730)
    assert line.reached


def test_a_shorter_time_reaches_its_goal() -> None:
    line = decode.line(record("load-to-first-token", 0.5, 1.0))
    assert (line.ratio, line.goal, line.reached) == (2.0, 1.0, True)


def test_a_line_reads_as_a_table() -> None:
    row = decode.line(record("decode-1b-q6k-d0", 2900, 800, 4320, others=[Side(peers.TINYGRAD, "", [100.0])]))
    assert decode.text(row).split() == [
        "decode-1b-q6k-d0", "2900", "800", "3.62", "2800", "yes", "4320", "67.1%", "tok/s", "tinygrad", "0.13", "100",
    ]  # fmt: skip
    assert len(decode.HEAD) == len(decode.text(row).split("tok/s")[0]) - 1
    assert row.reached is True


class Talker:
    """An engine that generates so many tokens at most."""

    def __init__(self, most: int = 1000) -> None:
        self.most, self.resets = most, [0][:0]

    def reset(self, keep: int = 0) -> None:
        self.resets.append(keep)

    def generate(self, prompt: list[int], settings: Any, limit: int) -> Iterator[int]:
        assert settings.greedy
        yield from range(min(limit, self.most))


def test_each_sample_begins_at_the_depth_and_the_first_does_not_count() -> None:
    engine: Any = Talker()
    found = decode.rates(engine, 40, range(16), 3)
    assert len(found) == 3
    assert min(found) > 0
    assert engine.resets == [40] * 4


def test_fewer_tokens_than_asked_for_are_no_sample() -> None:
    engine: Any = Talker(most=9)
    with pytest.raises(RecordError, match="9 tokens came where 16"):
        decode.rates(engine, 0, range(16), 3)


def test_other_tokens_than_expected_are_no_sample() -> None:
    engine: Any = Talker()
    expected = [*range(7), 8, *range(8, 16)]
    for measure in (lambda: decode.rates(engine, 0, expected, 3), lambda: decode.host_us(engine, expected, 3)):
        with pytest.raises(RecordError, match="drew 7 as token 8, where the same step gave 8 when"):
            measure()


def test_a_figure_that_fails_leaves_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    ids = ["decode-1b-q6k-d0", "decode-1b-q4k-d0", "decode-3b-q6k"]

    def take(id: str, ways: decode.Ways) -> Any:
        if id == ids[0]:
            raise WaitTimeout("the GPU did not end")
        if id == ids[1]:
            raise FileNotFoundError("llama-bench")
        return record(id, 900, 370, 1600)

    monkeypatch.setattr(decode, "take", take)
    found = list(decode.measured(ids, decode.Ways()))
    assert [row.id for row, _ in found] == ids
    assert "the GPU did not end" in decode.text(found[0][0])
    assert [kept is not None for _, kept in found] == [False, False, True]


def test_without_the_peer_nothing_is_begun(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(peers.LLAMA_FOLDER, raising=False)
    monkeypatch.setattr(decode, "provide", lambda name: pytest.fail("a model was written"))
    for id in ("decode-1b-q6k-d0", "prefill-1b-q6k-512", "batch8-1b-q6k", "load-to-first-token"):
        with pytest.raises(RecordError, match=peers.LLAMA_FOLDER):
            decode.take(id)


def test_ours_alone_is_asked_for_once_and_has_no_peer() -> None:
    order = []

    def ours() -> list[float]:
        order.append("ours")
        return [1.0]

    def peer() -> Side:
        order.append("peer")
        return Side("llama.cpp", "", [2.0])

    assert decode.around(decode.Ways(alone=True), ours, peer) == ([1.0], None)
    assert decode.around(decode.Ways(), ours, peer) == ([1.0, 1.0], Side("llama.cpp", "", [2.0]))
    assert order == ["ours", "ours", "peer", "ours"]
    assert decode.Ways(alone=True).command(TARGETS["decode-3b-q6k"]).endswith("decode-3b-q6k --alone")


def test_a_second_peer_that_fails_is_left_out(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    monkeypatch.setenv(peers.TINYGRAD_FOLDER, str(tmp_path))
    assert decode._second(Path("some.gguf")) is None
    assert "without tinygrad 0.13" in capsys.readouterr().err


def test_a_way_of_choice_stands_in_the_command() -> None:
    target = TARGETS["decode-3b-q6k"]
    assert decode.Ways().command(target) == "tegrad bench take decode-3b-q6k"
    way = decode.Ways("many", "chain-lean")
    assert way.command(target) == "tegrad bench decode decode-3b-q6k --plan many --dependency chain-lean"
    assert set(way.engine) == {"steps_per_submission", "plan", "dependency"}
    early = decode.Ways("overlapped", "chain-latch-program").engine
    assert set(early) == {"steps_per_submission", "plan", "overlapped"}
    assert decode.Ways(steps_per_submission=3).engine == {"steps_per_submission": 3}
    assert (
        decode.Ways(steps_per_submission=3).command(target)
        == "tegrad bench decode decode-3b-q6k --steps-per-submission 3"
    )
    prompts = decode.Ways("overlapped", "chain-latch-program", "wgmma")
    assert prompts.chunks == {
        "pick": decode.PICKS["wgmma"], "dependency": decode.ALL_FORMS["chain-latch-program"], "overlap": True,
    }  # fmt: skip
    assert prompts.command(target).endswith("--plan overlapped --dependency chain-latch-program --pick wgmma")
    with pytest.raises(RecordError, match="overlapped needs a dependency"):
        decode.Ways("overlapped")


class Slow(Talker):
    """An engine that works for its tokens."""

    def generate(self, prompt: list[int], settings: Any, limit: int) -> Iterator[int]:
        begun = time.process_time()
        while time.process_time() - begun < 0.02:
            pass
        time.sleep(0.05)
        yield from super().generate(prompt, settings, limit)


def test_the_hosts_time_is_that_of_its_processor() -> None:
    engine: Any = Slow()
    (sample,) = decode.host_us(engine, range(10), 1)
    assert sample >= 0.02e6 / 10


def test_runs_that_write_other_words_are_no_figure(monkeypatch: pytest.MonkeyPatch) -> None:
    words = iter(["a", "a", "b", "a", "a"])
    answer = {"device": "NV sm_87, emulated agx-orin-64gb", "steps": "kernels", "tok_s": 1.0}
    monkeypatch.setattr(measures, "_tegrad", lambda *arguments: json.dumps({**answer, "text": next(words)}))
    with pytest.raises(RecordError, match="other words each time"):
        measures.first_run()
    words = iter("aaaaa")
    assert measures.first_run().ours.samples == [1.0] * 5


@pytest.fixture
def board(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A small model that every figure is taken of, on a board, in short."""
    path = write(tmp_path / "model.gguf", SHAPE, TYPE.Q6_K, kinds={"attn_v": TYPE.Q4_K})
    for name, value in (("TEGRAD_BOARD", "agx-orin-64gb"), ("DEV", "NV")):
        monkeypatch.setenv(name, value)
    for name in (peers.TINYGRAD_FOLDER, peers.LLAMA_FOLDER):
        monkeypatch.delenv(name, raising=False)
    for name, value in (("provide", lambda name: path), ("SAMPLE_TOKENS", 4), ("REPETITIONS", 1)):
        monkeypatch.setattr(decode, name, value)
    monkeypatch.setattr("tegrad.bench.limits.READ_BYTES", 1 << 20)
    monkeypatch.setattr("tegrad.bench.gpu.PASSES", 1)
    return path


@pytest.mark.board
def test_the_gap_lies_between_steps_that_the_gpu_itself_timed(board: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    clocks = []

    class Seen(steps.Timestamps):
        def gap(self) -> float:
            clocks.append(self.clock())
            return super().gap()

    monkeypatch.setattr(decode, "Timestamps", Seen)
    taken = decode.take("token-gap-us")
    assert [clock.shape for clock in clocks] == [(4, 2)] * 2
    for clock in clocks:
        noted = clock.reshape(-1)
        assert noted[0] > 0
        assert (noted[1:] > noted[:-1]).all()
        gap = (noted[2::2] - noted[1:-1:2]).mean() / 1e3
    assert taken.ours.samples == [pytest.approx(gap)]
    assert decode.line(taken).goal == 3


@pytest.mark.board
def test_ours_is_measured_around_the_peer_on_one_file(board: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[Path, int, int]] = []

    def peer(model: Path, *, depth: int, tokens: int) -> Side:
        asked.append((model, depth, tokens))
        return Side(peers.LLAMA, "llama-bench", [800.0])

    monkeypatch.setattr(peers, "decode", peer)
    monkeypatch.setattr(peers, "program", Path)
    taken = decode.take("decode-1b-q6k-d0", decode.Ways("many"))
    assert len(taken.ours.samples) == 2
    assert min(taken.ours.samples) > 0
    assert asked == [(board, 0, 4)]
    assert taken.peer is not None
    assert not taken.others


class Tampered(States):
    """Rings from which every third token comes otherwise, as where a step hands over what it did not draw."""

    def tokens(self, slot: int, first: int, last: int) -> list[int]:
        found = super().tokens(slot, first, last)
        return [token ^ (number % 3 == 0) for number, token in enumerate(found, first)]


@pytest.mark.board
@pytest.mark.parametrize("id", ["decode-1b-q6k-d0", "host-us-per-token", "token-gap-us"])
def test_a_timed_decode_with_other_tokens_is_an_error_and_no_figure(
    board: Path, monkeypatch: pytest.MonkeyPatch, id: str
) -> None:
    monkeypatch.setattr("tegrad.llm.engine.States", Tampered)
    with pytest.raises(RecordError, match=r"drew \d+ as token 3, where the same step gave"):
        decode.take(id, decode.Ways("many", alone=True))


class WithoutAttention(DecodePlan):
    """A step of which a launch is left out: the same tokens each time, and wrong ones."""

    def _make(self) -> None:
        super()._make()
        self.launches = tuple(named.launch for named in self.named if named.kind != "attention")


@pytest.mark.board
def test_a_step_that_computes_something_else_is_an_error_and_no_figure(
    board: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(steps.PLANNERS, "many", WithoutAttention)  # type: ignore[arg-type]
    with pytest.raises(RecordError, match="below what many launches find the likeliest"):
        decode.take("decode-1b-q6k-d0", decode.Ways("many", alone=True))


def test_the_command_knows_its_figures_and_plans(monkeypatch: pytest.MonkeyPatch) -> None:
    from typer.testing import CliRunner

    from tegrad.bench import gpu
    from tegrad.cli import bench
    from tegrad.llm import start

    monkeypatch.setattr(gpu, "check_gpu", lambda: None)
    monkeypatch.setattr(start, "choose_device", lambda: None)
    for arguments, said in (
        (["decode-7b-q3k"], "no model '7b-q3k'"),
        (["mlp-1b-q6k"], "no figure mlp-1b-q6k"),
        (["decode-3b-q6k", "--plan", "some"], "many"),
        (["decode-3b-q6k", "--dependency", "some"], "chain-lean"),
        (["decode-3b-q6k", "--pick", "some"], "wgmma"),
    ):
        result = CliRunner().invoke(bench.app, ["decode", *arguments], env={"COLUMNS": "400"})
        assert result.exit_code == 2
        assert said in result.output


@pytest.mark.parametrize("board", ["", "agx-orin-64gb"])
def test_a_boards_samples_are_not_kept_beside_a_gpus(
    board: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from typer.testing import CliRunner

    from tegrad.bench import gpu
    from tegrad.cli import bench
    from tegrad.llm import start

    taken = record("decode-3b-q6k", 900, 370)
    monkeypatch.setenv("TEGRAD_BOARD", board)
    monkeypatch.setattr(gpu, "check_gpu", lambda: None)
    monkeypatch.setattr(start, "choose_device", lambda: None)
    monkeypatch.setattr(decode, "prepare", lambda ids: None)
    monkeypatch.setattr(decode, "measured", lambda ids, ways: [(decode.line(taken), taken)])
    command = ["decode", "decode-3b-q6k", "--results", str(tmp_path / "results")]
    assert CliRunner().invoke(bench.app, command, catch_exceptions=False).exit_code == 0
    assert (tmp_path / "results" / "figures.json").exists() is not bool(board)
    command += ["--out", str(tmp_path / "out")]
    assert CliRunner().invoke(bench.app, command, catch_exceptions=False).exit_code == 0
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["decode-3b-q6k.json"]


def test_any_models_speed_can_be_measured_but_is_no_figure(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from typer.testing import CliRunner

    from tegrad.bench import figures, gpu
    from tegrad.cli import bench
    from tegrad.llm import start

    made = figures.target("decode-glm4-9b-q4km"), figures.target("prefill-glm4-9b-q4km")
    assert [(one.kind, one.model, one.amount) for one in made] == [
        ("decode", "glm4-9b-q4km", 0), ("prompt", "glm4-9b-q4km", 512)
    ]  # fmt: skip
    assert decode.Ways().command(made[0]) == "tegrad bench decode decode-glm4-9b-q4km"
    ours, peer = (Side(name, "", [float(value)]) for name, value in (("tegrad", 9), ("llama.cpp", 3)))
    taken = made[0].record(ours, peer=peer)
    assert (decode.line(taken).ratio, decode.line(taken).goal) == (3.0, None)
    for module, name in ((gpu, "check_gpu"), (start, "choose_device")):
        monkeypatch.setattr(module, name, lambda: None)
    monkeypatch.setattr(decode, "prepare", lambda ids: None)
    monkeypatch.setattr(decode, "measured", lambda ids, ways: [(decode.line(taken), taken)])
    command = ["decode", taken.id, "--results", str(tmp_path / "results")]
    for more in ([], ["--out", str(tmp_path / "out")]):
        assert CliRunner().invoke(bench.app, [*command, *more], catch_exceptions=False).exit_code == 0
    assert [path.relative_to(tmp_path).as_posix() for path in tmp_path.rglob("*.json")] == [f"out/{taken.id}.json"]


@pytest.mark.board
@pytest.mark.long
@pytest.mark.parametrize(("id", "amount"), [("prefill-1b-q6k-512", 40), ("batch8-1b-q6k", 3)])
def test_prompts_and_batches_are_measured_around_their_peers(
    board: Path, monkeypatch: pytest.MonkeyPatch, id: str, amount: int
) -> None:
    monkeypatch.setattr(peers, "program", Path)
    for name in ("prefill", "batch"):
        monkeypatch.setattr(peers, name, lambda model, count: Side(peers.LLAMA, "", [float(count)]))
    monkeypatch.setitem(decode.TARGETS, id, replace(TARGETS[id], amount=amount))  # type: ignore[arg-type]
    taken = decode.take(id, decode.Ways(dependency="chain-lean"))
    assert taken.peer is not None
    assert taken.peer.samples == [amount]
    assert len(taken.ours.samples) in (6, 10)
    assert min(taken.ours.samples) > 0
    assert "--dependency chain-lean" in taken.ours.command
    assert taken.machine["gpu"] == "emulated agx-orin-64gb"
