"""The engine's figures count what runs, with all checks on, and tell a cold compiler from a warm one."""

import json

import numpy as np
import pytest
from typer.testing import CliRunner

from tegrad import ptx
from tegrad.bench import engine
from tegrad.bench.engine import LOOPS, EngineBench, Loop
from tegrad.ptx import jit


@pytest.fixture(scope="module")
def bench() -> EngineBench:
    return EngineBench()


@pytest.mark.parametrize("loop", LOOPS, ids=lambda loop: loop.name)
def test_a_loop_executes_the_instructions_that_are_written(bench: EngineBench, loop: Loop) -> None:
    stats, _ = bench.launch(bench.load(loop), 7)
    assert stats.instructions == loop.lane_instructions(7)


def test_loops_run_on_memory_that_is_checked(bench: EngineBench) -> None:
    loop = next(loop for loop in LOOPS if loop.name == "load")
    kernel = bench.load(loop)
    bench._flags[3] = 0
    try:
        with pytest.raises(ptx.PtxFault, match="unmapped"):
            bench.launch(kernel, 7)
    finally:
        bench._flags[3] = 3
    bench.launch(kernel, 7)


def test_the_load_loop_reads_all_of_its_table(bench: EngineBench) -> None:
    loop = next(loop for loop in LOOPS if loop.name == "load")
    trips = engine.TABLE_BYTES // (8 * 4 * engine.CTA)
    stats, _ = bench.launch(bench.load(loop), trips)
    assert stats.bytes_read == engine.TABLE_BYTES * engine.CTAS


def test_the_second_compilation_comes_from_the_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    compiled: list[str] = []
    real = jit.compile_ir
    monkeypatch.setattr(jit, "compile_ir", lambda text, *rest: compiled.append(text) or real(text, *rest))
    cold, warm = engine.compile_times({loop.name: loop.text for loop in LOOPS[:2]})
    kernels = [text for text in compiled if "@tgx_warp(" in text and "@tgx_worker(" not in text]
    assert len(cold) == len(warm) == len(kernels) == 2


def test_the_sample_is_ptx_of_tinygrads_renderers(monkeypatch: pytest.MonkeyPatch) -> None:
    wanted = {name: engine.PROGRAMS[name] for name in ("sum-rows", "matmul-half")}
    monkeypatch.setattr(engine, "PROGRAMS", wanted)
    found = engine.kernels()
    assert {"ptx/sum-rows.0", "ptx/matmul-half.0"} <= set(found)
    assert "mma.sync" in found["ptx/matmul-half.0"]
    for text in found.values():
        assert len(ptx.load(text, None).kernels) == 1


def test_bench_ptx_prints_every_row_as_json(monkeypatch: pytest.MonkeyPatch) -> None:
    from tegrad.cli import bench as cli

    monkeypatch.setattr(engine, "LOOPS", LOOPS[:2])
    monkeypatch.setattr(engine, "SAMPLE_NS", 100_000)
    monkeypatch.setattr(engine, "kernels", lambda: {"fma": LOOPS[1].text})
    done = CliRunner().invoke(cli.app, ["ptx", "--json"])
    rows = json.loads(done.stdout.splitlines()[-1])
    assert set(rows) == {"alu", "fma", "launch", "compile", "compile-cached"}
    assert all(row["low"] <= row["median"] <= row["high"] and row["median"] > 0 for row in rows.values())


def test_the_alu_loop_computes(bench: EngineBench) -> None:
    loop = next(loop for loop in LOOPS if loop.name == "integer")
    bench.launch(bench.load(loop), 3)
    at = bench._memory.base + engine.TABLE_BYTES - bench._bytes.ctypes.data
    got = bench._bytes[at : at + 4 * engine.CTA].view(np.uint32)
    t = np.arange(engine.CTA, dtype=np.uint32)
    want = t + np.uint32(1)
    for trip in range(3):
        for _ in range(8):
            want = (want * np.uint32(5) + t) ^ np.uint32(trip)
    assert (got == want).all()
