"""`tegrad profile` as its user meets it: a token of a model by role and layer, a program's kernels, a trace of both."""

import json
import os
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "llm"))
from tiny_llama import SHAPES, TYPE, Shape, write

pytestmark = pytest.mark.board

SHAPE = Shape(dim=256, ffn=512, heads=4, kv_heads=2, vocab=301, layers=2, context=48)
ROLES = ["embed", "qkv", "attention", "output", "gate", "down", "logits", "sample"]


def profile(*words: str, **variables: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "DEV": "NV", "TEGRAD_BOARD": "agx-orin-64gb", **variables}
    command = [sys.executable, "-m", "tegrad", "profile", *words]
    return subprocess.run(command, env=environment, capture_output=True, text=True, check=False)


def shown(trace: Path) -> dict[str, list[Any]]:
    """A trace's spans by their track."""
    events = json.loads(trace.read_text())["traceEvents"]
    names = {event["tid"]: event["args"]["name"] for event in events if event["name"] == "thread_name"}
    found: dict[str, list[Any]] = {}
    for event in events:
        if event["ph"] == "X":
            found.setdefault(names[event["tid"]], []).append(event)
    return found


def test_a_token_is_shown_by_role_and_layer_with_its_bytes_and_what_the_board_counts(tmp_path: Path) -> None:
    path, trace = write(tmp_path / "model.gguf", SHAPE, TYPE.Q6_K, kinds={"attn_v": TYPE.Q4_K}), tmp_path / "t.json"
    done = profile("--model", str(path), "-n", "2", "--depth", "9", "--json", "-o", str(trace))
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert (found["plan"], found["depth"], found["tokens"]) == ("many launches", 9, 2)
    assert [role["name"] for role in found["roles"]] == ROLES
    assert [role["count"] for role in found["roles"]] == [2 * count for count in (1, 2, 2, 2, 2, 2, 1, 1)]
    assert min(role["us"] for role in found["roles"]) > 0
    assert min(role["instructions"] for role in found["roles"]) > 0
    roles = {role["name"]: role for role in found["roles"]}
    read = {name: role["bytes"] / 2 for name, role in roles.items() if "bytes" in role}
    row = 210  # bytes of 256 weights in Q6_K
    assert read["output"] == 2 * 256 * row
    assert read["gate"] == 2 * 2 * 512 * row
    assert read["down"] == 2 * 256 * 2 * row
    assert read["logits"] == 304 * row  # rows are packed in eights
    assert read["attention"] == 2 * 10 * 2 * 2 * 64 * 2  # layers, positions, keys and values, heads of 64 halves
    assert roles["gate"]["read"] >= roles["gate"]["bytes"], "lanes read at least the weights"
    layers = [(span["role"], span["layer"]) for span in found["spans"]][:12]
    assert layers[:7] == [("embed", None), *((role, 0) for role in ROLES[1:6]), ("qkv", 1)]
    assert layers[-1] == ("logits", None)
    tracks = shown(trace)
    assert [event["name"] for event in tracks["host"]] == ["submit", "wait"] * 2
    assert len(tracks["GPU"]) == 2 * 13
    assert tracks["GPU"][1]["name"] == "qkv 0"
    assert tracks["GPU"][1]["args"]["kernel"] == "matvec"
    ends = [event["ts"] + event["dur"] for event in tracks["GPU"]]
    assert all(end <= after["ts"] + 1e-3 for end, after in zip(ends, tracks["GPU"][1:], strict=False))


def test_tables_tell_that_a_boards_times_are_none_of_a_gpus(tmp_path: Path) -> None:
    path = write(tmp_path / "model.gguf", SHAPE, TYPE.Q8_0)
    done = profile("--model", str(path), "-n", "1", "--layers", "--peak", "3000", "-o", str(tmp_path / "t.svg"))
    assert done.returncode == 0, done.stderr
    bars = re.findall(r"<title>(.*?):", (tmp_path / "t.svg").read_text())
    assert bars == ["all", "embed", "layer 0", "layer 1", "logits", "sample", *ROLES[1:6] * 2]
    roles, layers = done.stdout.split("\n\n")[1:3]
    assert [line.split()[0] for line in roles.splitlines()] == ["role", *ROLES, "all"]
    assert [line.split()[0] for line in layers.splitlines()] == ["layer", "embed", "0", "1", "logits", "sample", "all"]
    assert "GB/s" not in done.stdout
    assert "On an emulated board (agx-orin-64gb): times are the emulation's" in done.stdout


@pytest.mark.long
def test_a_step_in_one_launch_is_shown_by_its_stages(tmp_path: Path) -> None:
    path, trace = write(tmp_path / "model.gguf", SHAPE, TYPE.Q6_K), tmp_path / "t.json"
    done = profile("--model", str(path), "-n", "1", "--plan", "one", "-o", str(trace), "--json")
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found["plan"] == "one launch"
    assert [role["name"] for role in found["roles"]] == ROLES[:-1]
    assert [role["count"] for role in found["roles"]] == [1, 2, 2, 2, 2, 2, 1]
    tracks = shown(trace)
    assert [event["name"] for event in tracks["GPU"]] == ["step"]
    assert tracks["GPU"][0]["args"]["instructions"] > 0
    assert {name for name in tracks if name.startswith("CTA")} == {f"CTA {2 * at}" for at in range(8)}
    assert {"waits", "works", "finishes", "qkv 1"} <= {event["name"] for event in tracks["CTA 0"]}


def test_a_step_in_one_launch_is_shown_without_what_is_launched_before_it(tmp_path: Path) -> None:
    """A model whose layers have inputs of their own makes these first."""
    path = write(tmp_path / "model.gguf", replace(SHAPES["gemma4 small"], layers=2, shared=0), TYPE.Q8_0)
    done = profile("--model", str(path), "-n", "1", "--json", TEGRAD_BOARD="gh100")
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found["plan"] == "one launch"
    assert {role["name"]: role["count"] for role in found["roles"]}["gate"] == 4


def test_a_depth_beyond_the_context_is_refused(tmp_path: Path) -> None:
    path = write(tmp_path / "model.gguf", SHAPE, TYPE.Q8_0)
    done = profile("--model", str(path), "--depth", "46")
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == "tegrad: 50 positions exceed the context of 48: choose a smaller --depth\n"


PROGRAM = """
import sys
from tinygrad import Tensor
print((Tensor([1, 2, 3]) + Tensor([4, 5, 6])).tolist())
sys.exit(int(sys.argv[1]))
"""


def test_a_programs_kernels_and_host_work_are_shown_and_its_exit_code_is_passed_on(tmp_path: Path) -> None:
    (program := tmp_path / "program.py").write_text(PROGRAM)
    trace = tmp_path / "t.json"
    done = profile("-o", str(trace), "--", sys.executable, str(program), "7")
    assert (done.returncode, done.stderr) == (7, "")
    lines = done.stdout.splitlines()
    assert lines[:2] == ["[5, 7, 9]", "program.py 7"]
    heads = [line.split()[0] for line, before in zip(lines[1:], lines, strict=False) if not before and line]
    assert heads == ["kernel", "copy", "host", "On"]
    (kernel,) = (line.split() for line in lines if line.startswith("E_3"))
    assert kernel[1] == "1"
    tracks = shown(trace)
    assert [event["name"] for event in tracks["NV"]] == [kernel[0]]
    assert tracks["NV"][0]["args"] == {"kind": "kernel", "bytes": 36}


def test_a_command_that_uses_no_gpu_or_is_not_there_is_told(tmp_path: Path) -> None:
    done = profile("--", sys.executable, "-c", "print(1)")
    assert (done.returncode, done.stdout) == (0, "1\n\n")
    assert done.stderr.startswith(
        "tegrad: nothing to show: no Python process of the command opened tinygrad's NV device"
    )
    done = profile("--", str(tmp_path / "nothing"))
    assert done.returncode == 1
    assert done.stderr.startswith("tegrad: cannot run ")


def test_what_our_kernels_do_not_run_is_refused_with_the_way_on(tmp_path: Path) -> None:
    done = profile(DEV="CPU")
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.endswith("they do not run this device: choose DEV=NV\n")
    path = write(tmp_path / "model.gguf", replace(SHAPE, head_dim=20), TYPE.F16)
    done = profile("--model", str(path))
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.endswith(f"profile a run of it: tegrad profile -- tegrad run {path}\n")


def test_a_model_that_is_not_there_is_refused_before_a_device_is_opened() -> None:
    done = profile("--model", "none.gguf", TEGRAD_BOARD="no-such-board")
    assert (done.returncode, done.stdout) == (2, "")
    assert "none.gguf" in done.stderr
    assert "no-such-board" not in done.stderr


@pytest.mark.parametrize(
    ("name", "why"), [("t.svg", "a picture shows a model's token"), ("none/t.json", "cannot write none/t.json")]
)
def test_a_file_that_cannot_be_written_is_refused_before_anything_runs(name: str, why: str) -> None:
    done = profile("-o", name, "--", sys.executable, "-c", "print(1)")
    assert (done.returncode, done.stdout) == (2, "")
    assert why in done.stderr
