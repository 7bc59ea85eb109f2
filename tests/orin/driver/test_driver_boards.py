"""Boards as a whole: specs, names, the command, other chips, and the memory limit."""

from __future__ import annotations

import ctypes
import errno
import fcntl
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
from driver_user import FAKE_GPU, User, refused

from tegrad.hw.chips import CHIPS
from tegrad.orin import board, buffers, server
from tegrad.orin.board import BoardError, parse_size, parse_spec
from tegrad.orin.client import BoardKernel, board_log, board_status, board_stop
from tegrad.orin.driver import Driver
from tegrad.orin.files import FOREIGN
from tegrad.orin.steps import Errno
from tegrad.uapi import ioctls as io
from tegrad.uapi import kmsg
from tegrad.uapi import structs as s

ROOT = Path(__file__).parents[3]
GIB = 1 << 30


def test_specs() -> None:
    assert parse_spec("agx-orin-64gb").memory == 64 * GIB
    assert parse_spec("orin-nano-8gb:512M").memory == 512 << 20
    assert parse_spec("gh100").chip is CHIPS["gh100"]
    assert parse_spec("my-board").chip is None
    for bad in ("", "two words", "../x", "agx-orin-64gb:lots", "agx-orin-64gb:0", "agx-orin-64gb:12"):
        with pytest.raises(BoardError):
            parse_spec(bad)


@pytest.mark.parametrize(
    ("text", "size"),
    [("512M", 512 << 20), ("8GiB", 8 * GIB), ("8 gb", 8 * GIB), ("67108864", 64 << 20), ("65536KiB", 64 << 20)],
)
def test_sizes(text: str, size: int) -> None:
    assert parse_size(text) == size


def test_a_name_that_nobody_started_says_how_to() -> None:
    with pytest.raises(BoardError, match="tegrad board start nobody-has-this"):
        BoardKernel("nobody-has-this").open("/dev/nvmap")


@pytest.fixture
def gh100() -> Iterator[User]:
    made = User(BoardKernel("gh100:4GiB", linger=0.2, gpu=FAKE_GPU))
    yield made
    made.close_all()


def test_another_chip_on_the_same_seam(gh100: User) -> None:
    found = s.GpuCharacteristics()
    arg = s.GpuGetCharacteristics(ctypes.sizeof(found), ctypes.addressof(found))
    gh100.kernel.ioctl(gh100.ctrl, io.NVGPU_GPU_IOCTL_GET_CHARACTERISTICS, arg)
    assert (found.compute_class, found.sm_arch_sm_version) == (0xCBC0, 0x900)
    assert found.num_gpc * found.num_tpc_per_gpc * 2 == 132
    made = gh100.channel()
    gh100.object(made, 0xCBC0)
    with refused(errno.EINVAL):
        gh100.object(made, 0xC7C0)


@pytest.fixture
def whole() -> Iterator[User]:
    """A client of a board with the GPU that executes."""
    made = User(BoardKernel("orin-nano-8gb:4GiB", linger=0.2))
    yield made
    made.close_all()


def test_an_address_space_may_be_as_large_as_the_page_tables(whole: User) -> None:
    most = (1 << 49) - (1 << 32)
    for end in (1 << 41, 1 << 47, most):  # the driver's own range lies above
        vm = whole.address_space(end=end)
        whole.channel(vm=vm)
        va = whole.map(vm, whole.buffer().fd)
        assert 1 << 40 < va < end
        whole.unmap(vm, va)
    with refused(errno.ENOMEM):
        whole.address_space(end=most + (1 << 21))


def test_the_memory_limit_is_the_specs() -> None:
    user = User(BoardKernel("orin-nano-8gb:64MiB", linger=0.2, gpu=FAKE_GPU))
    held = user.buffer(48 << 20)
    second = user.create(17 << 20)
    with refused(errno.ENOMEM):
        user.alloc(second)
    user.close(held.fd)
    user.free(held.handle)
    user.alloc(second)
    user.close_all()


def test_the_hosts_free_memory_is_a_limit_too(monkeypatch: pytest.MonkeyPatch) -> None:
    memory = buffers.Memory(64 * GIB, "test")
    monkeypatch.setattr(buffers, "host_idle", lambda: 0)
    monkeypatch.setattr(buffers, "host_free", lambda: buffers.HOST_MARGIN + (8 << 20))
    first, second, third = (memory.create(size << 20).hold() for size in (6, 4, 2))
    memory.allocate(first, 4096, 0, 0)
    with pytest.raises(Errno) as refusal:
        memory.allocate(second, 4096, 0, 0)  # 6 MiB are promised and not touched yet
    assert refusal.value.number == errno.ENOMEM
    memory.allocate(third, 4096, 0, 0)
    os.posix_fallocate(first.fd, 0, 6 << 20)  # once touched they are no longer in what is free
    memory.allocate(second, 4096, 0, 0)
    for buffer in (first, second, third):
        buffer.drop()
    assert memory.taken == 0


def _command_line(pid: int) -> bytes:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return b""


def test_a_files_inode_number_on_another_device_is_not_that_file() -> None:
    memory = buffers.Memory(GIB, "test")
    with open("/dev/null") as null:
        number = os.fstat(null.fileno()).st_ino
        files = {(0, number): object()}
        found = Driver.resolve(SimpleNamespace(state=SimpleNamespace(memory=memory)), null.fileno(), files)  # type: ignore[arg-type]
    assert found is FOREIGN


def test_the_log_reads_like_dev_kmsg() -> None:
    user = User(BoardKernel("agx-orin-64gb:2GiB", linger=0.2, gpu=FAKE_GPU))
    with refused(errno.ENOTTY):
        user.kernel.ioctl(user.tsg(), io.NVGPU_TSG_IOCTL_READ_ALL_SM_ERROR_STATES, s.TsgReadAllSmErrorState())
    fd = user.open("/dev/kmsg")
    records = os.read(fd, 1 << 16).decode().splitlines()
    shown = board_log("agx-orin-64gb:2GiB")
    assert len(records) == len(shown)
    head, _, text = records[-1].partition(";")
    level, sequence, us, flags = head.split(",")
    assert (level, int(sequence), flags) == ("3", len(records) - 1, "-")
    assert shown[-1] == f"[{int(us) / 1e6:12.6f}] {text}"
    user.close_all()


# ---- the command --------------------------------------------------------------------------------------------------


def _tegrad(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "tegrad", "board", *arguments]
    return subprocess.run(command, capture_output=True, text=True, cwd=ROOT, check=False, timeout=60)


def test_the_board_command() -> None:
    name = f"cli-{os.getpid()}"
    started = _tegrad("start", name, "--chip", "orin-nano-8gb", "--memory", "1GiB")
    assert started.returncode == 0, started.stderr
    try:
        again = _tegrad("start", name)
        assert again.returncode == 1
        assert "running already" in again.stderr
        assert name in board.running()
        user = User(BoardKernel(name))
        user.buffer(8192)
        shown = _tegrad("status", name).stdout
        assert "orin-nano-8gb" in shown
        assert "nvmap_handles=1" in shown
        assert str(os.getpid()) in shown
        line = next(line for line in _tegrad("list").stdout.splitlines() if line.startswith(name))
        assert "orin-nano-8gb" in line
        assert str(os.getpid()) in line
        assert _tegrad("log", name).returncode == 0
    finally:
        assert _tegrad("stop", name).returncode == 0
    assert name not in board.running()
    gone = _tegrad("status", name)
    assert gone.returncode == 1
    assert gone.stderr.startswith("tegrad: no board named")


def test_a_board_that_listens_no_more_is_not_running() -> None:
    name = f"gone-{os.getpid()}"
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as client:
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener:
            listener.bind(board.named_address(name))
            assert name not in board.running()
            listener.listen(1)
            assert name in board.running()
            client.connect(board.named_address(name))
            accepted, _ = listener.accept()
        with accepted:
            assert name not in board.running()


def test_a_board_gives_up_its_name_before_anything_of_it_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody is let in while its GPU ends, and whoever sees the board end does not find it running."""
    listener, session = socket.socketpair()  # an exit closes the newest fds first: the session, then the listener
    open_at_end: list[bool] = []

    def note() -> None:
        open_at_end.extend(sock.fileno() != -1 for sock in (listener, session))

    def leave(status: int) -> None:
        note()
        raise SystemExit(status)

    with listener, session, socket.socket() as events:
        state = SimpleNamespace(gpu=SimpleNamespace(events=events))
        monkeypatch.setattr(server, "Driver", lambda *_, **__: SimpleNamespace(state=state, close=note))
        monkeypatch.setattr(signal, "signal", lambda *_: None)
        monkeypatch.setattr(os, "_exit", leave)
        with pytest.raises(SystemExit):
            server.serve(CHIPS["orin-nano-8gb"], GIB, listener, linger=0.0, gpu=FAKE_GPU)
    assert open_at_end == [False, True] * 2


@pytest.mark.parametrize(
    "arguments",
    [("start", "gh100"), ("start", "x", "--chip", "nope"), ("start", "x", "--memory", "3Q"), ("stop", "xyz")],
)
def test_bad_input_is_one_sentence(arguments: tuple[str, ...]) -> None:
    done = _tegrad(*arguments)
    assert done.returncode != 0
    assert len(done.stderr.strip().splitlines()) == 1


def test_a_log_longer_than_a_message_comes_whole() -> None:
    spec = "agx-orin-64gb:2GiB"
    user = User(BoardKernel(spec, linger=0.2, gpu=FAKE_GPU))
    for _ in range(600):
        with refused(errno.ENOTTY):
            user.kernel.ioctl(user.nvmap, io.NVMAP_IOC_GET_ID, s.CreateHandle())
    lines = board_log(spec)
    assert len([line for line in lines if "Unknown NVMAP_IOC" in line]) == 600
    assert board_log(spec, since=len(lines)) == []
    user.close_all()


def test_a_boards_log_is_kept_when_it_has_ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TEGRAD_BOARD_LOG", str(tmp_path / "logs"))
    spec = "agx-orin-64gb:832MiB"
    user = User(BoardKernel(spec, linger=0.2, gpu=FAKE_GPU))
    with refused(errno.ENOTTY):
        user.kernel.ioctl(user.nvmap, io.NVMAP_IOC_GET_ID, s.CreateHandle())
    lines = board_log(spec)
    (path,) = (tmp_path / "logs").iterdir()
    assert path.name.startswith(f"{os.getpid()}-")
    with path.open() as file:
        with pytest.raises(BlockingIOError):
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        user.close_all()
        board_stop(spec)
        fcntl.flock(file, fcntl.LOCK_EX)  # comes when the board has ended
        kept = [found for line in file if (found := kmsg.parse(line.rstrip("\n")))]
    assert [f"[{record.us / 1e6:12.6f}] {record.text}" for record in kept][: len(lines)] == lines != []


def test_a_folder_that_cannot_keep_logs_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("TEGRAD_BOARD_LOG", str(tmp_path / "file"))
    with pytest.raises(BoardError, match=f"TEGRAD_BOARD_LOG={tmp_path}/file takes no log: File exists"):
        BoardKernel("agx-orin-64gb:896MiB").open("/dev/nvmap")


def test_stop_ends_the_processes_and_their_clients_notice() -> None:
    name = f"stop-{os.getpid()}"
    board.start(CHIPS["orin-nano-8gb"], GIB, name=name, linger=None, gpu=FAKE_GPU)
    user = User(BoardKernel(name))
    pids = board_status(name)["pids"].values()
    board_stop(name)
    # Nobody waits for a daemon but init, so an entry without a command line may remain.
    assert not any(_command_line(pid) for pid in pids)
    with refused(errno.ENODEV):
        user.create(4096)
    with pytest.raises(BoardError):
        user.open("/dev/nvmap")


def test_a_board_cannot_be_started_in_two_ways_in_one_process() -> None:
    spec = "agx-orin-64gb:768MiB"
    BoardKernel(spec, linger=0.3)
    BoardKernel(spec, linger=0.3)
    BoardKernel(spec)  # whatever there is
    with pytest.raises(BoardError, match="another way"):
        BoardKernel(spec, linger=0.4)
