"""`tegrad board exec`: programs that know nothing of tegrad, on a board."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from exec_programs import built_client

from tegrad.hw.chips import CHIPS
from tegrad.orin import board, preload
from tegrad.orin import client as client_module
from tegrad.orin.connection import Connection
from tegrad.orin.preload import PreloadError
from tegrad.orin.wire import Message, Op
from tegrad.uapi.ioctls import ROWS

ROOT = Path(__file__).parents[2]
LIMIT_S = 120.0
pytestmark = pytest.mark.skipif(shutil.which("cc") is None, reason="the preload library is built by a C compiler (cc)")


def environment(**more: str) -> dict[str, str]:
    return {k: v for k, v in os.environ.items() if k != "TEGRAD_BOARD"} | {"PYTHONPATH": str(ROOT)} | more


def execute(*command: str, **more: str) -> subprocess.CompletedProcess[str]:
    """Run a program under the command."""
    line = [sys.executable, "-m", "tegrad", "board", "exec", *command]
    return subprocess.run(line, env=environment(**more), capture_output=True, text=True, timeout=LIMIT_S, check=False)


@pytest.fixture(scope="module")
def client(tmp_path_factory: pytest.TempPathFactory) -> str:
    return built_client(tmp_path_factory.mktemp("exec"))


TOLD = """\
fds 3 4, cloexec 1 0
node 1, folder 1, access ok
an open one 1, another file 0
absent ENOENT, other ok
fixed 1, same memory 1
msync EINVAL
masks f f
masks to a page that is read-only: 8
block nowhere: EFAULT
block read-only: EFAULT
unknown request: ENOTTY EINVAL
sync ok, without a direction EINVAL, of another file ENOTTY
a pipe: ENOTTY, no fd: EBADF
by dlsym: ok
the next after us: 1
"""


def test_a_c_program_finds_a_jetson(client: str) -> None:
    done = execute("--", client)
    assert done.stdout.startswith(TOLD), done.stdout + done.stderr
    rest = done.stdout.removeprefix(TOLD).splitlines()
    assert rest == [
        rest[0],
        "registers EBUSY, class c461",
        "time 1, nothing 0",
        "a wait ends by a signal: EINTR",
        "rung 1 1",
        "after closefrom 1",
        "after a long load 1",
        "child: ok",
        f"child ended by {signal.SIGSEGV.value}",
        "mapped again 1",
        "its handler 1",
        "own handler 0x10",
        "its handler ended it with 5",
        "exec: 4 ok",
        "a buffer ok",
    ], done.stderr
    assert rest[0].endswith("cloexec 1")
    assert done.returncode == 3


def gone(pid: int, seconds: float = 20.0) -> bool:
    """Whether a process ends in time; nobody may collect it here."""
    deadline = time.monotonic() + seconds
    while not (over := _over(pid)) and time.monotonic() < deadline:
        time.sleep(0.02)
    return over


def _over(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except OSError:
        return True


@pytest.mark.board
def test_our_own_client_believes_that_it_is_on_a_jetson() -> None:
    done = execute(sys.executable, str(ROOT / "examples" / "bringup.py"), TEGRAD_BOARD="orin-nano-8gb")
    assert done.stdout.splitlines()[-1] == "21/21 passed", done.stdout + done.stderr
    assert "ok     topology: 1 GPCs, 4 TPCs, 8 SMs" in done.stdout  # TEGRAD_BOARD says which board, to the command only


def test_the_exit_code_is_the_programs_and_the_board_ends_with_it() -> None:
    done = execute("--", "sh", "-c", "echo $TEGRAD_EXEC; echo $TEGRAD_BOARD; echo told >&2; exit 41")
    driver, board_name = done.stdout.splitlines()
    assert (done.returncode, done.stderr, board_name) == (41, "told\n", "")
    assert gone(int(driver.partition(":")[0]))


TWO_BOARDS = """
import os
from tegrad.orin.client import BoardKernel
from tegrad.uapi import ioctls as io, structs as s
from tegrad.uapi.kernel import MAP_SHARED, PROT_READ, PROT_WRITE, LinuxKernel

for kernel in (LinuxKernel(), BoardKernel("orin-nano-8gb:1GiB"), LinuxKernel()):
    nvmap, ctrl = kernel.open("/dev/nvmap"), kernel.open("/dev/nvgpu/igpu0/ctrl")
    create, sms = s.CreateHandle(size=4096), s.GpuNumVsms()
    kernel.ioctl(nvmap, io.NVMAP_IOC_CREATE, create)
    alloc = s.AllocHandle(handle=create.handle, heap_mask=1 << 30, flags=0x9000002, align=4096, numa_nid=-1)
    kernel.ioctl(nvmap, io.NVMAP_IOC_ALLOC, alloc)
    get = s.CreateHandle(handle=create.handle)
    kernel.ioctl(nvmap, io.NVMAP_IOC_GET_FD, get)
    address = kernel.mmap(get.fd, 4096, PROT_READ | PROT_WRITE, MAP_SHARED)
    bell = kernel.doorbell(ctrl)
    kernel.ioctl(ctrl, io.NVGPU_GPU_IOCTL_NUM_VSMS, sms)
    print(sms.num_vsms, hex(bell.load32(0)))
    bell.close()
    kernel.munmap(address, 4096)
    for fd in (get.fd, ctrl, nvmap):
        kernel.close(fd)
"""


def test_another_board_of_the_programs_own_is_left_alone() -> None:
    done = execute(sys.executable, "-c", TWO_BOARDS)
    assert done.stdout.splitlines() == ["16 0xc461", "8 0xc461", "16 0xc461"], done.stderr


def test_ctrl_c_leaves_nothing_behind() -> None:
    # The shell runs another program in its place, which has no device open while it is waited for.
    line = [sys.executable, "-m", "tegrad", "board", "exec", "--", "sh", "-c", "echo $TEGRAD_EXEC; exec sleep 100"]
    with subprocess.Popen(
        line, env=environment(), stdout=subprocess.PIPE, text=True, start_new_session=True
    ) as program:
        assert program.stdout is not None
        driver = int(program.stdout.readline().partition(":")[0])
        assert os.path.exists(f"/proc/{driver}")
        os.killpg(program.pid, signal.SIGINT)
        assert program.wait(LIMIT_S) == -signal.SIGINT
    assert gone(driver)


def test_a_board_that_is_kept_ends_with_the_process_and_not_before() -> None:
    held = Connection("agx-orin-64gb:5GiB", linger=0.1)
    with subprocess.Popen(["sleep", "100"]) as program:
        pidfd = os.pidfd_open(program.pid)
        held.call(Message(Op.KEEP, fds=[pidfd]))
        os.close(pidfd)
        time.sleep(0.5)
        assert os.path.exists(f"/proc/{held.pid}")
        program.kill()
    assert gone(held.pid)


def test_a_shared_board_is_one_for_all() -> None:
    name = f"exec-{os.getpid()}"
    code = "import os; os.open('/dev/nvhost-ctrl-gpu', os.O_RDWR); print(open('/proc/self/comm').read())"
    board.start(CHIPS["orin-nx-16gb"], 1 << 30, name=name, linger=None)
    try:
        done = [execute("--board", name, sys.executable, "-c", code) for _ in range(2)]
        assert [d.returncode for d in done] == [0, 0], done[0].stderr
        assert client_module.board_status(name)["memory_limit"] == 1 << 30
    finally:
        client_module.board_stop(name)


@pytest.mark.parametrize(
    ("command", "code", "said"),
    [
        (["no-such-program"], 127, "there is no program 'no-such-program'"),
        (["{static}"], 1, "is linked statically, so nothing can be preloaded"),
        (["--board", "nobody-has-this", "true"], 1, "tegrad board start nobody-has-this"),
        (["--board", "two words", "true"], 2, "names no board"),
    ],
)
def test_what_cannot_run_says_why(tmp_path: Path, command: list[str], code: int, said: str) -> None:
    static = tmp_path / "static"
    if "{static}" in command:
        (tmp_path / "s.c").write_text("int main(void) { return 0; }")
        subprocess.run(["cc", "-static", "-o", static, tmp_path / "s.c"], check=True)
    done = execute(*(part.format(static=static) for part in command))
    assert done.returncode == code
    assert said in done.stderr
    assert done.stderr.count("\n") == 1


def test_a_script_is_judged_by_its_interpreter(tmp_path: Path) -> None:
    interpreter, script = tmp_path / "static", tmp_path / "script"
    interpreter.write_bytes(b"\x7fELF" + Path("/proc/self/exe").read_bytes()[4:20] + bytes(4000))
    script.write_text(f"#!{interpreter} -x\n")
    for path in (interpreter, script):
        with pytest.raises(PreloadError, match="linked statically"):
            preload.check_program(str(path))
    interpreter.write_bytes(b"\x7fELF" + bytes(4000))
    with pytest.raises(PreloadError, match="another machine"):
        preload.check_program(str(interpreter))
    script.write_text("#!/bin/sh\n")
    preload.check_program(str(script))


def test_without_a_compiler_it_says_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CC", raising=False)
    with pytest.raises(PreloadError, match=r"no C compiler.*apt install gcc"):
        preload.library(tmp_path)
    monkeypatch.setenv("CC", "/bin/false")
    with pytest.raises(PreloadError, match="/bin/false cannot build the preload library"):
        preload.library(tmp_path)
    assert list(tmp_path.iterdir()) == []
    with pytest.raises(PreloadError, match="XDG_CACHE_HOME"):
        preload.library(tmp_path / "two words")


def test_the_library_is_built_once(tmp_path: Path) -> None:
    made = preload.library(tmp_path)
    stamp = made.stat().st_mtime_ns
    assert preload.library(tmp_path) == made
    assert made.stat().st_mtime_ns == stamp
    assert list(tmp_path.iterdir()) == [made]


DAMAGE: dict[str, Callable[[bytes], bytes]] = {
    "empty": lambda data: b"",
    "cut": lambda data: data[:5000],
    "zeroed": lambda data: bytes(len(data)),
    "a byte changed": lambda data: data[:4] + bytes([data[4] ^ 3]) + data[5:],
}


@pytest.mark.parametrize("damage", DAMAGE.values(), ids=DAMAGE)
def test_a_damaged_library_is_built_again(damage: Callable[[bytes], bytes], tmp_path: Path) -> None:
    made = preload.library(tmp_path)
    made.write_bytes(damage(made.read_bytes()))
    assert preload.library(tmp_path) == made
    loaded = subprocess.run(["/bin/true"], env={"LD_PRELOAD": str(made)}, capture_output=True, check=False)
    assert (loaded.returncode, loaded.stderr) == (0, b"")
    assert list(tmp_path.iterdir()) == [made]


def test_the_table_names_every_fd_of_every_block() -> None:
    text = preload.header()
    for row in ROWS:
        for name in row.fds_in + row.fds_out:
            assert 0 <= preload.offset(row, name) <= row.size - 4
        assert f"{row.request:#x}," in text
