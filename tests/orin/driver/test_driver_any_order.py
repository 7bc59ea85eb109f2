"""Whatever order objects are made and closed in, the drivers keep serving, and at the end nothing is left."""

from __future__ import annotations

import random

import pytest
from driver_fake_gpu import FAULT
from driver_user import SPEC, Channel, User

from tegrad.orin.client import BoardKernel, board_status
from tegrad.uapi import ioctls as io
from tegrad.uapi import structs as s
from tegrad.uapi.errors import DriverError


class Churn:
    """One client that makes, uses and closes objects at random; a refused call is as good as one that works."""

    def __init__(self, kernel: BoardKernel, seed: int) -> None:
        self.random, self.user = random.Random(seed), User(kernel)
        self.doorbell = kernel.doorbell(self.user.ctrl)
        self.vms: list[int] = []
        self.tsgs: list[int] = []
        self.channels: list[Channel] = []
        self.buffers: list[int] = []
        self.handles: list[int] = []
        self.refused = self.done = 0

    def run(self, steps: int) -> None:
        deeds = [self.new, self.new, self.new, self.use, self.use, self.close, self.fault]
        for _ in range(steps):
            try:
                self.random.choice(deeds)()
                self.done += 1
            except DriverError:
                self.refused += 1
            except (IndexError, ValueError):  # nothing of that kind to choose from
                continue

    def new(self) -> None:
        user, pick = self.user, self.random
        what = pick.randrange(4)
        if what == 0:
            self.vms.append(user.address_space(end=pick.choice([0xFF00000000, 0xFFFFE00000, 0x10000000])))
        elif what == 1:
            self.tsgs.append(user.tsg())
        elif what == 2:
            self.channels.append(user.bound_channel(vm=pick.choice(self.vms), tsg=pick.choice(self.tsgs)))
        else:
            made = user.buffer(pick.choice([1, 4096, 65536, 1 << 20]), allocate=pick.random() < 0.9)
            self.buffers.append(made.fd)
            self.handles.append(made.handle)

    def use(self) -> None:
        user, pick = self.user, self.random
        what = pick.randrange(6)
        if what == 0:
            user.map(pick.choice(self.vms), pick.choice(self.buffers), flags=pick.choice([4, 4, 4 | 1 << 10, 0x20]))
        elif what == 1:
            user.unmap(pick.choice(self.vms), pick.choice([0xFEFFE00000, 0xFFFFA00000, 0x9E00000]))
        elif what == 2:
            channel = pick.choice(self.channels)
            arg = user.setup_args()
            user.kernel.ioctl(channel.fd, io.NVGPU_IOCTL_CHANNEL_SETUP_BIND, arg)
            channel.token = arg.work_submit_token
        elif what == 3:
            user.object(pick.choice(self.channels))
        elif what == 4:
            user.notifier(pick.choice(self.channels))
        else:
            fd = pick.choice(self.channels).fd
            user.kernel.ioctl(fd, io.NVGPU_IOCTL_CHANNEL_GET_USER_SYNCPOINT, s.GetUserSyncpoint())

    def close(self) -> None:
        pick = self.random
        if pick.random() < 0.3:
            self.user.free(self.handles.pop(pick.randrange(len(self.handles))))
            return
        pool: list[int] = pick.choice([self.vms, self.tsgs, self.buffers])
        if pick.random() < 0.3:
            self.user.close(self.channels.pop(pick.randrange(len(self.channels))).fd)
        else:
            self.user.close(pool.pop(pick.randrange(len(pool))))

    def fault(self) -> None:
        self.doorbell.store32(FAULT, self.random.choice(self.channels).token & 0xFFF)

    def end(self) -> None:
        self.random.shuffle(self.user.fds)
        self.doorbell.close()
        self.user.close_all()


@pytest.mark.klog_errors("(?i)mmu fault|page fault|error notifier|unbind|ctxsw timeout")
@pytest.mark.parametrize("seed", range(6))
def test_nothing_is_left(kernel: BoardKernel, seed: int) -> None:
    keep = kernel.open("/dev/host1x-fence")  # the board stays; an nvmap fd would keep the handles
    before = board_status(SPEC)
    clients = [Churn(kernel, seed), Churn(kernel, seed + 100)]
    for _ in range(40):
        for client in clients:
            client.run(6)
    assert all(client.done > 50 for client in clients)
    assert sum(client.refused for client in clients) > 5
    for client in clients:
        client.end()
    after = board_status(SPEC)
    assert after["counts"] == before["counts"]
    assert after["files"] == before["files"]
    assert after["gpu"]["mapped"] == before["gpu"]["mapped"]
    assert after["gpu"]["channels"] == before["gpu"]["channels"]
    assert after["pids"] == before["pids"]
    kernel.close(keep)
