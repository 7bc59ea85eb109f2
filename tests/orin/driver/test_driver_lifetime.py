"""What keeps what alive, and that nothing is left: closes, kills, forks, threads, and the board's own processes."""

from __future__ import annotations

import contextlib
import errno
import multiprocessing
import os
import signal
import socket
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from driver_user import CTRL, FAKE_GPU, NVMAP, SPEC, User, refused

from tegrad.orin import board
from tegrad.orin.client import BoardKernel, board_status
from tegrad.uapi import ioctls as io
from tegrad.uapi import structs as s

ROOT = Path(__file__).parents[3]


def counts() -> dict[str, int]:
    return dict(board_status(SPEC)["counts"])


def wait_for(what: Callable[[], object], seconds: float = 60.0) -> None:
    deadline = time.monotonic() + seconds
    while not what():
        assert time.monotonic() < deadline, "it did not happen in time"
        time.sleep(0.005)


# ---- closing --------------------------------------------------------------------------------------------------------


def test_a_mapping_keeps_its_buffer_after_handle_and_fd_are_gone(user: User) -> None:
    vm, buffer = user.address_space(), user.buffer()
    user.map(vm, buffer.fd)
    before = counts()["dmabufs"]
    user.free(buffer.handle)
    user.close(buffer.fd)
    assert counts()["dmabufs"] == before
    user.close(vm)
    assert counts()["dmabufs"] == before - 1


def test_an_address_space_lives_as_long_as_a_channel_on_it(user: User) -> None:
    made = user.channel()
    user.map(made.vm, user.buffer().fd)
    before = counts()
    user.close(made.vm)
    assert counts() == before
    user.close(made.fd)
    after = counts()
    assert after["address_spaces"] == before["address_spaces"] - 1
    assert after["gpu_mappings"] == before["gpu_mappings"] - 1


def test_a_tsg_lives_as_long_as_its_channels(user: User) -> None:
    made = user.channel()
    before = counts()["tsgs"]
    user.close(made.tsg)
    assert counts()["tsgs"] == before
    assert not user.timed_out(made)
    user.close(made.fd)
    assert counts()["tsgs"] == before - 1


def test_closing_a_channel_gives_everything_back(user: User) -> None:
    vm, tsg = user.address_space(), user.tsg()
    before = counts()
    made = user.channel(vm=vm, tsg=tsg)
    user.object(made)
    user.notifier(made)
    user.kernel.ioctl(made.fd, io.NVGPU_IOCTL_CHANNEL_GET_USER_SYNCPOINT, s.GetUserSyncpoint())
    for fd in [fd for fd in user.fds if fd not in (vm, tsg, user.ctrl, user.nvmap)]:
        user.close(fd)
    after = counts()
    for name in ("channels", "syncpoints", "kernel_mappings"):
        assert after[name] == before[name], name
    user.close(user.nvmap)
    assert counts()["dmabufs"] == before["dmabufs"]
    user.nvmap = user.open(NVMAP)


def test_the_last_nvmap_fd_of_a_process_takes_the_handles_along(user: User) -> None:
    start = counts()["nvmap_handles"]
    second = user.open(NVMAP)
    handle = user.create(4096)
    user.close(user.nvmap)
    user.nvmap = second
    user.alloc(handle)
    assert counts()["nvmap_handles"] == start + 1
    user.close(second)
    assert counts()["nvmap_handles"] == start
    user.nvmap = user.open(NVMAP)
    with refused(errno.EINVAL):
        user.alloc(handle)


def test_a_duplicated_fd_is_the_same_file(user: User) -> None:
    fd = user.address_space()
    copy = os.dup(fd)
    before = counts()["address_spaces"]
    user.close(fd)
    assert counts()["address_spaces"] == before
    assert user.map(copy, user.buffer().fd)
    os.close(copy)
    assert counts()["address_spaces"] == before - 1


def test_close_then_open_is_synchronous(user: User) -> None:
    """512 channels closed with plain close() are free for the very next call."""
    fds = [user.open_channel() for _ in range(512)]
    for _ in range(3):
        for fd in fds:
            os.close(fd)
            user.fds.remove(fd)
        fds = [user.open_channel() for _ in range(512)]
    for fd in reversed(fds):  # leave the stack of channel ids as it was
        user.close(fd)


def test_two_hundred_cycles_leave_everything_as_it_was(kernel: BoardKernel) -> None:
    def cycle() -> None:
        user = User(kernel)
        made = user.channel()
        user.object(made)
        buffer = user.buffer(65536)
        user.map(made.vm, buffer.fd)
        memory = user.mapped(buffer)
        memory[0] = 1
        kernel.munmap(ctypes_address(memory), 65536)
        doorbell = kernel.doorbell(user.ctrl)
        doorbell.store32(0x90, made.token)
        doorbell.close()
        user.close_all()

    keep = kernel.open(CTRL)
    cycle()
    before, fds, maps = board_status(SPEC), _fds(), _maps()
    for _ in range(200):
        cycle()
    after = board_status(SPEC)
    assert (after["counts"], after["files"]) == (before["counts"], before["files"])
    assert after["host"]["driver"]["fds"] == before["host"]["driver"]["fds"]
    assert abs(after["host"]["driver"]["maps"] - before["host"]["driver"]["maps"]) <= 4
    assert after["host"]["gpu"]["fds"] == before["host"]["gpu"]["fds"]
    assert after["gpu"]["mapped"] == before["gpu"]["mapped"]
    assert _fds() == fds
    assert abs(_maps() - maps) <= 4
    kernel.close(keep)


def ctypes_address(memory: object) -> int:
    import ctypes

    return ctypes.addressof(memory)  # type: ignore[arg-type]


def _fds() -> int:
    return len(os.listdir("/proc/self/fd"))


def _maps() -> int:
    return Path("/proc/self/maps").read_text().count("\n")


# ---- threads and processes ------------------------------------------------------------------------------------------


def test_many_threads_call_at_once(user: User) -> None:
    vm, failures = user.address_space(), []

    def work(number: int) -> None:
        try:
            for _ in range(40):
                buffer = user.buffer(4096 * (number + 1))
                va = user.map(vm, buffer.fd)
                user.unmap(vm, va)
                user.free(buffer.handle)
        except Exception as error:
            failures.append(error)

    before = counts()
    threads = [threading.Thread(target=work, args=(n,), daemon=True) for n in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures
    assert counts()["gpu_mappings"] == before["gpu_mappings"]
    assert counts()["nvmap_handles"] == before["nvmap_handles"]


def test_a_forked_child_is_its_own_client_and_harms_nobody(user: User) -> None:
    buffer = user.buffer()
    memory = user.mapped(buffer)
    doorbell = user.kernel.doorbell(user.ctrl)
    before = counts()
    pid = os.fork()
    if pid == 0:
        status = 1
        with contextlib.suppress(BaseException):
            mine = User(BoardKernel(SPEC))
            with refused(errno.EBADF):
                mine.get_fd(buffer.handle)
            mine.map(mine.address_space(), mine.buffer().fd)
            with pytest.raises(ValueError, match="closed"):
                doorbell.store32(0x90, 1)
            user.map(user.address_space(), buffer.fd)  # inherited fds work: they are the parent's files
            status = 0
        os._exit(status)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    wait_for(lambda: counts() == before)
    memory[0] = 5
    doorbell.store32(0x90, 0)
    doorbell.close()
    assert user.create(4096)


def _child(code: str, *arguments: str) -> subprocess.Popen[str]:
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), str(Path(__file__).parent)])}
    command = [sys.executable, "-c", textwrap.dedent(code), *arguments]
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment)


HOLD = f"""
    import sys, time
    from driver_user import User
    from tegrad.orin.client import BoardKernel, board_status, board_stop
    user = User(BoardKernel(sys.argv[1], linger=600, gpu={FAKE_GPU!r}))
    made = user.channel()
    user.notifier(made)
    user.map(made.vm, user.buffer(1 << 20).fd)
    doorbell = user.kernel.doorbell(user.ctrl)
    print(*board_status(sys.argv[1])["pids"].values(), flush=True)
    print(user.kernel.connection.address.decode().replace(chr(0), "@"), flush=True)
    time.sleep(60)
"""


def test_kill_9_of_a_client_leaves_a_shared_board_clean(shared_board: str) -> None:
    before = board_status(shared_board)
    child = _child(HOLD, shared_board)
    assert child.stdout is not None
    child.stdout.readline()
    held = board_status(shared_board)
    assert held["counts"]["channels"] == before["counts"]["channels"] + 1
    assert held["doorbell_mappings"] == 1
    child.kill()
    child.wait()
    after = board_status(shared_board)  # the very next call sees it all released
    assert after["counts"] == before["counts"]
    assert after["files"] == {}
    assert after["doorbell_mappings"] == 0
    assert User(BoardKernel(shared_board)).channel().token == 511


def test_kill_9_in_the_middle_of_a_call(shared_board: str) -> None:
    before = board_status(shared_board)
    wait = """
        arg = s.Wait(type=1, timeout=0)
        arg.condition.semaphore.dmabuf_fd = user.buffer().fd
        arg.condition.semaphore.payload = 1
        user.kernel.ioctl(made.fd, io.NVGPU_IOCTL_CHANNEL_WAIT, arg)
    """
    code = textwrap.dedent(HOLD).replace("time.sleep(60)", "") + textwrap.dedent(wait)
    child = _child("from tegrad.uapi import ioctls as io, structs as s\n" + code, shared_board)
    assert child.stdout is not None
    child.stdout.readline()
    time.sleep(0.2)  # let it sleep in the call
    assert child.poll() is None
    child.kill()
    child.wait()
    wait_for(lambda: board_status(shared_board)["counts"] == before["counts"])
    assert board_status(shared_board)["files"] == {}


def test_nonsense_on_a_session_harms_nobody(shared_board: str) -> None:
    sock = board.connect(board.named_address(shared_board))
    assert sock is not None
    for nonsense in (b"x", b"\0" * 16, b"\xff" * 64, bytes([17, 0, 5, 0]) + bytes(12)):
        sock.send(nonsense)
        near, far = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        socket.send_fds(sock, [nonsense], [far.fileno()])
        near.close()
        far.close()
    assert board_status(shared_board)["sessions"] == 2
    sock.close()
    assert User(BoardKernel(shared_board)).create(4096)


def _gone(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] == "Z"
    except OSError:
        return True


@pytest.mark.parametrize("blow", [signal.SIGKILL, signal.SIGINT, signal.SIGTERM])
def test_a_private_board_ends_after_its_client(blow: signal.Signals) -> None:
    child = _child(HOLD, "agx-orin-64gb:1GiB")
    assert child.stdout is not None
    pids = [int(word) for word in child.stdout.readline().split()]
    address = child.stdout.readline().strip()
    assert len(pids) == 2
    assert address in _board_sockets()
    assert not any(_gone(pid) for pid in pids)
    child.send_signal(blow)
    child.wait()
    wait_for(lambda: all(_gone(pid) for pid in pids))  # it does not linger: nobody can come back
    assert address not in _board_sockets()


def _board_sockets() -> set[str]:
    lines = Path("/proc/net/unix").read_text().splitlines()
    return {line.rsplit(" ", 1)[-1] for line in lines if "@tegrad-" in line}


def test_ctrl_c_at_the_terminal_does_not_reach_the_board() -> None:
    child = _child(HOLD, "agx-orin-64gb:1GiB")
    assert child.stdout is not None
    pids = [int(word) for word in child.stdout.readline().split()]
    assert all(os.getsid(pid) != os.getsid(0) for pid in pids)
    assert all(Path(f"/proc/{pid}/cwd").readlink() == Path("/") for pid in pids)
    child.kill()
    child.wait()


def test_a_private_board_lingers_after_the_last_close_and_comes_back() -> None:
    spec, linger = "agx-orin-64gb:9GiB", 1.0
    kernel = BoardKernel(spec, linger=linger, gpu=FAKE_GPU)
    for _ in range(10):
        user = User(kernel)
        pids = set(board_status(spec)["pids"].values())
        closed = time.monotonic()
        user.close_all()
        user = User(kernel)
        now = set(board_status(spec)["pids"].values())
        if now == pids or time.monotonic() - closed < linger:
            break
        user.close_all()  # a busy machine: we came too late
    assert now == pids
    time.sleep(1.5 * linger)
    assert not any(_gone(pid) for pid in pids)  # something is open
    user.close_all()
    wait_for(lambda: all(_gone(pid) for pid in pids))
    third = User(user.kernel)
    assert set(board_status(spec)["pids"].values()).isdisjoint(pids)
    third.close_all()


def test_the_gpu_process_goes_with_the_driver() -> None:
    child = _child(HOLD, "agx-orin-64gb:1GiB")
    assert child.stdout is not None
    driver, gpu = (int(word) for word in child.stdout.readline().split())
    os.kill(driver, signal.SIGKILL)
    wait_for(lambda: _gone(gpu))
    child.kill()
    child.wait()


def test_a_dead_board_is_enodev_and_the_next_open_starts_another() -> None:
    spec = "agx-orin-64gb:13GiB"
    user = User(BoardKernel(spec, linger=0.2, gpu=FAKE_GPU))
    pid = board_status(spec)["pids"]["driver"]
    os.kill(pid, signal.SIGKILL)
    wait_for(lambda: _gone(pid))
    with refused(errno.ENODEV):
        user.create(4096)
    fresh = User(user.kernel)
    assert fresh.create(4096)
    fresh.close_all()
    user.close_all()


def test_a_private_board_starts_with_little_work() -> None:
    code = f"""
        import os, time
        from pathlib import Path
        from tegrad.orin.client import BoardKernel, board_status
        spec = "orin-nano-8gb"
        kernel = BoardKernel(spec, linger=0.2, gpu={FAKE_GPU!r})
        kernel.close(kernel.open("/dev/nvmap"))
        ticks = 0
        for pid in board_status(spec)["pids"].values():
            ticks += sum(map(int, Path(f"/proc/{{pid}}/stat").read_text().rpartition(")")[2].split()[11:13]))
        print(time.process_time() + ticks / os.sysconf("SC_CLK_TCK"))
    """
    assert min(float(_child(code).communicate()[0]) for _ in range(3)) < 1.5  # seconds of CPU


def test_a_spawned_process_reaches_the_same_shared_board(shared_board: str) -> None:
    context = multiprocessing.get_context("spawn")
    with context.Pool(1) as pool:
        assert pool.apply(_spawned, (shared_board,)) == board_status(shared_board)["pids"]["driver"]


def _spawned(name: str) -> int:
    return int(board_status(name)["pids"]["driver"])
