"""What a command is started with: closed or full streams, no working directory, limits, settings, interrupts.

Each ends with its result or with one sentence, and never with a traceback. `board chips` stands for what prints,
`conformance --list` for what prints much, `board start` for what starts a board.
"""

import errno
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tegrad.cli import surroundings
from tegrad.errors import TegradError

COMMANDS = {
    "help": "--help",
    "run": "run --help",
    "eval": "eval --help",
    "doctor": "doctor --help",
    "klog": "klog --help",
    "bench": "bench --help",
    "conformance": "conformance --list",
    "selftest": "selftest --list",
    "board": "board chips",
}
"""One that prints, of every command."""
FEW = [command if name in ("help", "conformance", "board") else pytest.param(command, marks=pytest.mark.long)
       for name, command in COMMANDS.items()]  # fmt: skip
"""What typer prints, what prints much and what prints, where the others differ in nothing."""
TIMEOUT_S = 600


def shell(script: str, cwd: Path | None = None, **variables: str) -> subprocess.CompletedProcess[str]:
    """Run a line of bash, in which `tegrad` is the command."""
    own = {name: value for name, value in os.environ.items() if name not in ("DEV", "TEGRAD_BOARD")}
    path = os.pathsep.join(map(os.path.abspath, sys.path))
    return subprocess.run(
        ["bash", "-c", f'tegrad() {{ "{sys.executable}" -m tegrad "$@"; }}; {script}'],
        env={**own, "PYTHONPATH": path, **variables}, cwd=cwd, stdin=subprocess.DEVNULL, capture_output=True, text=True,
        timeout=TIMEOUT_S, check=False,
    )  # fmt: skip


def assert_one_sentence(done: subprocess.CompletedProcess[str], said: str, code: int = 1) -> None:
    """It ended with this code, and told this in a line of its own."""
    lines = [line for line in done.stderr.splitlines() if not line.startswith("tegrad: no GPU found")]
    assert (done.returncode, len(lines)) == (code, 1), done.stderr
    assert lines[0].startswith("tegrad: ")
    assert said in lines[0]


@pytest.mark.parametrize("command", COMMANDS.values(), ids=COMMANDS)
def test_a_full_standard_output_is_told(command: str) -> None:
    assert_one_sentence(shell(f"tegrad {command} > /dev/full"), "cannot write to standard output: No space left")


@pytest.mark.parametrize("streams", ["<&- 2>&-", "2>/dev/full"])
@pytest.mark.parametrize("command", FEW, ids=COMMANDS)
def test_streams_that_nothing_is_told_or_read_by_change_nothing(command: str, streams: str) -> None:
    done = shell(f"tegrad {command} {streams}")
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout


@pytest.mark.parametrize("streams", [">&-", "| true"])
@pytest.mark.parametrize("command", FEW, ids=COMMANDS)
def test_a_reader_that_has_seen_enough_is_told_nothing(command: str, streams: str) -> None:
    assert shell(f"tegrad {command} {streams}").stderr == ""


@pytest.mark.parametrize("streams", ["2>&-", "2>/dev/full"])
def test_a_usage_error_is_one_where_nobody_can_be_told(streams: str) -> None:
    assert shell(f"tegrad frobnicate {streams}").returncode == 2


@pytest.mark.board
@pytest.mark.parametrize("streams", ["2>&-", "<&-", ">&-", "<&- >&- 2>&-"])
def test_a_board_starts_with_closed_streams(streams: str) -> None:
    """Its listening socket had the number of a stream, in whose place the board has its own."""
    name = f"closed-{os.getpid()}"
    done = shell(f"tegrad board start {name} {streams}; tegrad board status {name}; tegrad board stop {name}")
    assert f"{name}: stopped" in done.stdout, done.stderr


def test_a_prompt_from_a_closed_standard_input() -> None:
    assert_one_sentence(shell("tegrad run - <&-"), "standard input is closed", code=2)


def test_a_prompt_of_50_mb_is_refused_before_anything_is_opened() -> None:
    done = shell("head -c 50000000 /dev/zero | tegrad run -")
    assert_one_sentence(done, "more than 16 MiB", code=2)


def test_a_prompt_that_cannot_fit_is_not_encoded() -> None:
    done = shell("head -c 16000000 /dev/zero | tr '\\0' a | tegrad run -", DEV="CPU")
    assert_one_sentence(done, "a prompt of 16000000 bytes is more than the context of", code=2)


@pytest.mark.board
def test_a_working_directory_that_is_gone_is_not_needed(tmp_path: Path) -> None:
    name = f"gone-{os.getpid()}"
    script = f"mkdir here; cd here; rmdir ../here; tegrad board start {name} && tegrad board stop {name}"
    done = shell(script, cwd=tmp_path)
    assert (done.returncode, done.stderr) == (0, "")


STARTS = ["run hi", "conformance --section 1 --out /dev/null", "board start limited", "board exec true"]
"""Commands that start a board, besides klog."""


@pytest.mark.board
@pytest.mark.parametrize(
    ("limit", "said", "command"),
    [
        ("-n 16", "needs 256 open files: raise `ulimit -n`", "klog"),
        ("-n 24", "needs 256 open files: raise `ulimit -n`", "klog"),
        ("-f 1000", "needs files in memory of 1 GiB: raise `ulimit -f`", "klog"),
        *(("-v 8000000", "needs 1.25 TiB of addresses, without using as much", word) for word in ("klog", *STARTS)),
    ],
)
def test_a_board_says_which_limit_keeps_it_from_starting(command: str, limit: str, said: str) -> None:
    done = shell(f"ulimit {limit}; tegrad {command}", TEGRAD_BOARD="agx-orin-64gb", CACHELEVEL="0")
    assert_one_sentence(done, said)


@pytest.mark.board
@pytest.mark.klog_errors("unbind")  # whatever ran when the program ended may not give way in 100 ms
def test_the_doctor_has_a_finding_for_a_setting_that_means_nothing() -> None:
    done = shell("tegrad doctor", HCQDEV_WAIT_TIMEOUT_MS="x")
    assert (done.returncode, done.stderr) == (1, "")
    assert "invalid literal for int() with base 10: 'x'" in done.stdout


@pytest.mark.parametrize("files", [5, 6, 8, 12])
def test_too_few_files_for_the_command_itself(files: int) -> None:
    said = f"needs 16 open files: `ulimit -n` allows {files} here: raise it"
    assert_one_sentence(shell(f"ulimit -n {files}; tegrad doctor"), said)


@pytest.mark.parametrize("command", ["run hi", "eval --tokens 1"])
def test_too_few_addresses_for_the_command_itself(command: str) -> None:
    for limit in (130000, 150000, 160000, 500000):
        said = f"needs 512 MiB of addresses: `ulimit -v` allows {limit >> 10} MiB here: raise it"
        assert_one_sentence(shell(f"ulimit -v {limit}; tegrad {command}"), said)


def test_whatever_fails_with_all_addresses_spent_names_the_limit() -> None:
    spend = """if True:
        import mmap, resource
        from tegrad.cli.surroundings import sentence
        assert sentence(SystemError("error return without exception set")) is None
        resource.setrlimit(resource.RLIMIT_AS, (640 << 20, 640 << 20))
        assert sentence(SystemError("error return without exception set")) is None
        held = []
        try:
            while True:
                held.append(mmap.mmap(-1, 8 << 20))
        except OSError:
            print(sentence(SystemError("error return without exception set")))
    """
    done = subprocess.run([sys.executable, "-c", spend], capture_output=True, text=True, check=False)
    assert done.stdout == "out of memory: `ulimit -v` allows 640 MiB here: raise it\n", done.stderr


@pytest.mark.parametrize(
    ("variables", "said"),
    [
        ({"DEV": "NV:FOO"}, "NV has no renderer 'FOO'"),
        ({"DEV": "XX+NV"}, "NV has no interface 'XX'"),
        ({"DEV": "NV:PTX:x"}, "DEV=NV:PTX:x cannot be: "),
        ({"DEV": "NO"}, "there is no device NO"),
        ({"DEV": "NULL"}, "the device NULL computes nothing: choose (DEV=) one of "),
        ({"NV_CC": "x"}, "NV_CC=x is deprecated, use DEV='NV:x' instead"),
        ({"DEV": "a+b+NV"}, "DEV=a+b+NV names no device"),
        ({"BEAM": "x"}, "tinygrad takes no BEAM=x"),
        ({"DEV": "CPU", "DEBUG": "x"}, "tinygrad takes no DEBUG=x"),
        ({"TEGRAD_BOARD": "x y"}, "'x y' names no board"),
        ({"TEGRAD_BOARD": "orin-nano-8gb:x"}, "'x' is no memory size"),
        ({"TEGRAD_BOARD": "orin-nano-8gb:1M"}, "too little memory"),
        ({"TEGRAD_BOARD": "orin-nano-8gb:9999GiB"}, "more memory than a board can address"),
        ({"TEGRAD_MEMORY": "x"}, "TEGRAD_MEMORY=x is no memory policy"),
        ({"TEGRAD_RACE": "x"}, "TEGRAD_RACE=x is no seed"),
        ({"TEGRAD_L2": "x"}, "TEGRAD_L2=x means nothing"),
        ({"TEGRAD_REPAIRS_OFF": "x"}, "TEGRAD_REPAIRS_OFF names x"),
        ({"TEGRAD_BOARD_LOG": "/dev/null"}, "TEGRAD_BOARD_LOG=/dev/null takes no log"),
        *(
            pytest.param(variables, said, marks=pytest.mark.long)  # in the words of others
            for variables, said in (
                ({"DEV": "NV:1"}, "NV has no renderer '1'"),
                ({"DEV": "DISK"}, "the device DISK computes nothing: choose (DEV=) one of "),
                ({"DEV": "CPU:a:b:c"}, "DEV=CPU:a:b:c names no device"),
                ({"HCQDEV_WAIT_TIMEOUT_MS": "x"}, "tinygrad takes no HCQDEV_WAIT_TIMEOUT_MS=x"),
            )
        ),
    ],
    ids=lambda value: ",".join(f"{a}={b}" for a, b in value.items()) if isinstance(value, dict) else "",
)
@pytest.mark.board
def test_a_setting_that_means_nothing(variables: dict[str, str], said: str) -> None:
    assert_one_sentence(shell("tegrad run hi -n 1", **variables), said, code=2)


def test_an_empty_dev_is_none() -> None:
    code = "import os; from tegrad.llm.start import choose_device; choose_device(); print(os.environ['DEV'])"
    done = subprocess.run(
        [sys.executable, "-c", code], env={**os.environ, "DEV": ""}, capture_output=True, text=True, check=True
    )
    assert done.stdout == "NV\n"


@pytest.mark.parametrize("command", ["run {path} hi", "eval {path}"])
def test_a_pipe_is_no_model(tmp_path: Path, command: str) -> None:
    os.mkfifo(path := tmp_path / "model.gguf")
    done = shell(f"tegrad {command.format(path=path)}", DEV="CPU")
    assert_one_sentence(done, "model.gguf is a pipe or a device: give the path of a GGUF file", code=2)


BLOCKED = """
import sys, time
from tegrad.cli import entry
from tegrad.llm.gguf import Gguf
def blocked(path):
    print("opening", file=sys.stderr)
    time.sleep({seconds})
Gguf.open = blocked
sys.argv = ["tegrad", "run", "model.gguf", "hi"]
entry()
"""


def test_ctrl_c_does_not_wait_for_a_file_that_blocks() -> None:
    process = subprocess.Popen(
        [sys.executable, "-c", BLOCKED.format(seconds=10 * TIMEOUT_S)],
        env={**os.environ, "DEV": "CPU"}, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    assert process.stderr is not None
    assert process.stderr.readline() == "opening\n"
    process.send_signal(signal.SIGINT)
    _, said = process.communicate(timeout=TIMEOUT_S)
    assert (process.returncode, said) == (130, "")


FINALIZED = """
import os, signal, time
from tegrad.cli import surroundings
class Finalized:
    def __del__(self):
        os.kill(os.getpid(), signal.SIGINT)
surroundings.prepare()
Finalized()
try:
    time.sleep({seconds})
except KeyboardInterrupt:
    print("closed")
"""


def test_ctrl_c_that_falls_into_a_finalizer_is_not_lost() -> None:
    """Python prints what a finalizer raises and goes on; tinygrad has finalizers."""
    code = FINALIZED.format(seconds=10 * TIMEOUT_S)
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=TIMEOUT_S, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (0, "closed\n", "")


def test_ctrl_c_while_the_command_is_imported_says_nothing() -> None:
    code = (
        "import os, signal, sys\n"
        "class Finder:\n"
        "    def find_spec(self, name, *rest):\n"
        "        if name == 'typer': os.kill(os.getpid(), signal.SIGINT)\n"
        "sys.meta_path.insert(0, Finder())\n"
        "from tegrad.__main__ import entry\n"
        "entry()\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=TIMEOUT_S, check=False)
    assert (done.returncode, done.stderr) == (130, "")


def test_llvmlite_is_asked_for_when_the_board_is() -> None:
    code = (
        "import sys; sys.modules['llvmlite'] = None; sys.argv = ['tegrad', *sys.argv[1:]]\n"
        "from tegrad.cli import entry; entry()"
    )
    for command in (["run", "hi"], ["board", "start", "none"], ["board", "exec", "true"], ["klog"]):
        done = subprocess.run(
            [sys.executable, "-c", code, *command], env={**os.environ, "TEGRAD_BOARD": "agx-orin-64gb"},
            capture_output=True, text=True, timeout=TIMEOUT_S, check=False,
        )  # fmt: skip
        assert_one_sentence(done, "the emulated board needs the package llvmlite, which is not installed: pip install")


@pytest.mark.board
@pytest.mark.klog_errors("")
@pytest.mark.parametrize("victim", ["driver", "gpu"])
def test_a_board_that_is_killed_under_a_model(victim: str, tmp_path: Path) -> None:
    """Not a traceback for every buffer that was to be given back."""
    environment = {**os.environ, "TEGRAD_BOARD": "agx-orin-64gb", "DEV": "NV"}
    process = subprocess.Popen(
        [sys.executable, "-m", "tegrad", "run", "In the beginning", "-n", "100000"],
        env={**environment, "MARK": str(tmp_path)}, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    assert process.stdout is not None
    assert process.stdout.read(1)
    driver, gpu = _board_of(str(tmp_path))
    os.kill(driver if victim == "driver" else gpu, signal.SIGKILL)
    _, said = process.communicate(timeout=TIMEOUT_S)
    done = subprocess.CompletedProcess([], process.returncode, "", said)
    assert_one_sentence(done, "the emulated board is gone" if victim == "driver" else "GPU fault: ")


def _board_of(mark: str) -> tuple[int, int]:
    """The processes of the board that a command with this MARK started: driver, and GPU, which is its child."""
    found = {}
    for process in Path("/proc").glob("[0-9]*"):
        try:
            mine = f"MARK={mark}".encode() in (process / "environ").read_bytes()
            if mine and b"tegrad.orin" in (process / "cmdline").read_bytes():
                found[int(process.name)] = int((process / "stat").read_text().rsplit(")", 1)[1].split()[1])
        except OSError:
            continue
    (gpu,) = (pid for pid, parent in found.items() if parent in found)
    return found[gpu], gpu


def compile_cached(source: str) -> None:
    """What an error of a compiler of tinygrad's passes."""
    raise RuntimeError(f"src:1:1: error: {source}\nand where")


@pytest.mark.parametrize(("wanted", "known"), [("CPU:LLVM", True), ("NV", False), ("MOCK+NV:CUDA", False), ("", False)])
def test_a_compiler_that_fails_is_a_sentence_where_dev_names_it(
    monkeypatch: pytest.MonkeyPatch, wanted: str, known: bool
) -> None:
    monkeypatch.setenv("DEV", wanted)
    with pytest.raises(RuntimeError) as caught:
        compile_cached("no such type")
    said = surroundings.sentence(surroundings.told(caught.value))
    sentence = "the compiler of DEV=CPU:LLVM fails on this machine (src:1:1: error: no such type): choose another DEV"
    assert said == (sentence if known else None)


def test_what_has_no_memory_left_imports_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "tegrad.nv", None)  # an import of it fails
    spent = MemoryError()
    assert surroundings.told(spent) is spent


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (TegradError("no"), "no"),
        (MemoryError(), "out of memory: choose a smaller model or context"),
        (OSError(errno.EMFILE, "Too many open files"), "raise `ulimit -n`"),
        (OSError(errno.EEXIST, "File exists", "x"), "x: File exists: choose another place"),
        (OSError(errno.EISDIR, "Is a directory", "x"), "x: Is a directory: choose another place"),
        (OSError(errno.ENOTDIR, "Not a directory", "x/y"), "x/y: Not a directory: choose another place"),
        (OSError(errno.ENOSPC, "No space left on device", "x"), "x: No space left on device: make room on the disk"),
        (FileNotFoundError(errno.ENOENT, "No such file or directory", "y"), "y: No such file or directory: run tegrad"),
        (ModuleNotFoundError("No module named 'jinja2'", name="jinja2"), "the package jinja2 cannot be loaded"),
    ],
)
def test_what_the_machine_lacks_is_a_sentence(error: Exception, said: str) -> None:
    assert said in (surroundings.sentence(error) or "")


@pytest.mark.parametrize("error", [ValueError("x"), ImportError("no name", name="tegrad.llm.gguf"), KeyError("x")])
def test_faults_of_ours_keep_their_traceback(error: Exception) -> None:
    assert surroundings.sentence(error) is None
