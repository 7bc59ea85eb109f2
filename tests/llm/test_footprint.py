"""The memory that a model is said to take is what the engine takes, and the context that fits is the longest one."""

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import tiny_llama
from tiny_llama import TYPE, Shape, write

from tegrad import models
from tegrad.bench.models import SHAPES, formats
from tegrad.bench.plans import DryDevice
from tegrad.bench.plans import model as packed
from tegrad.hw.chips import CHIPS
from tegrad.llm.batch import Batch
from tegrad.llm.cache import AHEAD, KvCache
from tegrad.llm.engine import Engine
from tegrad.llm.footprint import ALLOWANCE, Footprint, machine_room, module_room
from tegrad.llm.gguf import Gguf
from tegrad.llm.persistent import PersistentPlan
from tegrad.llm.plan import DecodePlan
from tegrad.llm.prefill import Prefill
from tegrad.llm.sampler import Sampler
from tegrad.llm.state import States
from tegrad.nv.memory import Memory, Nvmap

BOTH_WAYS = replace(
    tiny_llama.BOTH_WAYS["gemma-embedding"], dim=256, ffn=24576, layers=1, context=2048, extra={
        **tiny_llama.BOTH_WAYS["gemma-embedding"].extra, "gemma-embedding.attention.sliding_window": 512,
    },
)  # fmt: skip


@pytest.mark.board
@pytest.mark.parametrize("shape", [None, pytest.param(BOTH_WAYS, id="both ways")])
def test_an_engine_takes_what_is_said_but_for_the_allowance(
    device: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, shape: Shape | None
) -> None:
    from conftest import close_device

    close_device()
    live: dict[int, int] = {}
    alloc, free = Nvmap.alloc, Nvmap.free

    def counted(nvmap: Nvmap, size: int, *args: Any, **options: Any) -> Memory:
        memory = alloc(nvmap, size, *args, **options)
        live[memory.handle] = size
        return memory

    def freed(nvmap: Nvmap, memory: Memory, *args: Any) -> None:
        live.pop(memory.handle, None)
        free(nvmap, memory, *args)

    monkeypatch.setattr(Nvmap, "alloc", counted)
    monkeypatch.setattr(Nvmap, "free", freed)
    path = models.SMALL if shape is None else write(tmp_path / "model.gguf", shape, TYPE.Q8_0)
    with Gguf.open(path) as file:
        said = Footprint.of(file, q8=True)
        context = said.config.longest
        with Engine(file, device=device, q8=True) as engine:
            if shape is None:
                list(engine.generate([1, 2], Sampler(0.0), 2))
            else:
                engine.hidden([1] * 33)
            engine._prompts()
            taken = sum(live.values())
    assert said.at(context) - ALLOWANCE < taken < said.at(context)


@pytest.mark.parametrize(
    ("name", "slots", "q8"),
    [
        *(("1b-q6k", 64, False), pytest.param("1b-q6k", 8, True, marks=pytest.mark.long), ("gemma3-1b-q4km", 8, False)),
        ("gemma4-e2b-q4km", 8, False),
    ],
)
def test_a_batch_takes_what_is_said(name: str, slots: int, q8: bool) -> None:
    shape, chip = SHAPES[name.rpartition("-")[0]], DryDevice(CHIPS["agx-orin-64gb"])
    config, positions = shape.config, 8192
    made = packed(config, formats(name), chip, shape.tied)
    said = Footprint(config, chip.taken, q8).batch(positions, slots, blocks=300)
    batch = Batch(made, slots=slots, positions=positions, blocks=300, q8=q8)
    assert batch.prefill.launches(512)
    assert batch.launches(slots)
    for rope in {op.rope for op in config.network.attends}:
        batch.prefill.rows.turns(rope)
    assert said - ALLOWANCE < chip.taken < said


@pytest.mark.board
@pytest.mark.parametrize("name", ["1b-q6k", "gemma3-1b-q4km", "gemma4-e2b-q4km"])
def test_a_large_models_prompts_and_cache_take_what_is_said(name: str) -> None:
    shape, chip = SHAPES[name.rpartition("-")[0]], DryDevice(CHIPS["agx-orin-64gb"])
    config, positions = shape.config, 16384
    made = packed(config, formats(name), chip, shape.tied)
    said = Footprint(config, chip.taken)
    cache = KvCache(chip, config, positions)
    kind = PersistentPlan if config.layers_differ else DecodePlan
    plan, prompts = kind(made, States(chip), cache), Prefill(made, cache)
    for rope in {op.rope for op in config.network.attends}:
        prompts.rows.turns(rope)
    assert plan.launches
    assert said.at(positions) - ALLOWANCE < chip.taken < said.at(positions)


def test_the_longest_context_is_that_which_just_fits() -> None:
    config = SHAPES["8b"].config
    for q8 in (False, True):
        said = Footprint(config, 5 << 30, q8)
        fits = said.longest(7 << 30)
        assert fits % 256 == 0
        assert said.at(fits) <= 7 << 30 < said.at(fits + 256)
    assert Footprint(config, 5 << 30).longest(5 << 30) == 0
    assert Footprint(config, 5 << 30).longest(1 << 40) == config.longest == 131072


def test_a_module_leaves_less_than_it_has_and_a_machine_what_is_free() -> None:
    assert 6 << 30 < module_room(8) < 7 << 30
    assert 56 << 30 < module_room(64) < 60 << 30
    assert 0 < machine_room() < 1 << 50


@pytest.mark.parametrize(("shape", "kinds"), [(Shape(), {"ffn_up": TYPE.Q4_0}), (Shape(gate_bias=True), {})])
def test_gate_and_up_that_are_products_of_their_own_take_more(
    shape: Shape, kinds: dict[str, TYPE], tmp_path: Path
) -> None:
    write(tmp_path / "a.gguf", Shape(), TYPE.Q8_0)
    write(tmp_path / "b.gguf", shape, TYPE.Q8_0, kinds=kinds)
    with Gguf.open(tmp_path / "a.gguf") as usual, Gguf.open(tmp_path / "b.gguf") as apart:
        less, more = Footprint.of(usual), Footprint.of(apart)
    assert (less.gates_apart, more.gates_apart) == (False, True)
    assert more.at(64) - more.weights == less.at(64) - less.weights + AHEAD * 4 * shape.ffn


def test_the_command_says_what_fits_and_what_is_refused(tmp_path: Path) -> None:
    write(tmp_path / "a.gguf", Shape(), TYPE.Q8_0)
    write(tmp_path / "b.gguf", Shape(extra={"llama.logit_scale": 2.0}), TYPE.Q8_0)
    (tmp_path / "c.gguf").write_bytes(b"no GGUF")
    write(tmp_path / "d.gguf", Shape(), TYPE.F32)
    command = [sys.executable, "-m", "tegrad", "models", "--fit", "8", *map(str, sorted(tmp_path.iterdir()))]
    done = subprocess.run([*command, "--json"], capture_output=True, text=True, check=True)
    fits, scaled, none, floats = json.loads(done.stdout)
    assert fits["context"] == {"f16": 128, "q8_0": 128}
    assert fits["size"] == (tmp_path / "a.gguf").stat().st_size
    assert "logit_scale" in scaled["refused"]
    assert "is not a GGUF file" in none["refused"]
    assert fits["unserved"] is scaled["unserved"] is none["unserved"] is floats["refused"] is None
    assert "F32 matrices are not run" in floats["unserved"]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert "not served: prompts and batches of F32 matrices" in done.stdout.splitlines()[-1]
    command[5:] = ["1", str(tmp_path / "a.gguf")]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert done.stdout.endswith(" MB  does not fit\n")
