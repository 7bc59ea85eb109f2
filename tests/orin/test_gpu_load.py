"""The GPU under load: many channels at once, and what a launch costs."""

from __future__ import annotations

import struct

import pytest
from gpu_programs import ADD_ONE
from gpu_rig import STORE, ChannelRig, Rig
from qmd_fields import release_fields

CHANNELS, ROUNDS = 6, 40


@pytest.mark.parametrize("seed", [None, 1])
def test_many_channels_pass_a_value_around(seed: int | None) -> None:
    """Each channel waits for its turn, launches a grid on a shared counter, copies it, and hands on."""
    with Rig(race_seed=seed) as rig:
        rig.gpu.tsg_create(2)
        counter, turn, trail = rig.buffer(), rig.buffer(), rig.buffer(CHANNELS * ROUNDS * 8)
        qmd = rig.qmd(rig.program(ADD_ONE, "add_one"), rig.arguments(counter.va, 0))
        channels = [rig.channel(tsg=1 + i % 2).setup() for i in range(CHANNELS)]
        for step in range(CHANNELS * ROUNDS):
            channel = channels[step % CHANNELS]
            channel.acquire(turn.va, step, 0).launch(qmd)
            channel.copy(counter.va, trail.va + 4 * step, 4)
            channel.release(turn.va, step + 1, 0x01100001)
            if step % 7 == 0 or step >= CHANNELS * (ROUNDS - 1):
                channel.submit()
        assert rig.wait(lambda: turn.u64() == CHANNELS * ROUNDS, 20)
        steps = CHANNELS * ROUNDS
        assert struct.unpack_from(f"<{steps}I", trail.mem) == tuple(range(1, steps + 1))
        assert not rig.events


def test_channels_that_share_nothing_do_not_disturb_each_other() -> None:
    with Rig() as rig:
        program = rig.program(STORE, "store")
        lanes: list[tuple[ChannelRig, int]] = []
        out = rig.buffer()
        for i in range(CHANNELS):
            channel = rig.channel().setup()
            for j in range(ROUNDS):
                channel.launch(rig.qmd(program, rig.arguments(out.va + 4 * i, j + 1000 * i)))
            lanes.append((channel.release(channel.fence.va, 1).submit(), 1000 * i + ROUNDS - 1))
        assert rig.wait(lambda: all(channel.fence.u64() == 1 for channel, _ in lanes), 20)
        assert [out.u32(4 * i) for i in range(CHANNELS)] == [value for _, value in lanes]


@pytest.mark.parametrize("chip", ["agx-orin-64gb", "gh100"])
def test_four_hundred_launches_with_one_doorbell_all_run(chip: str) -> None:
    with Rig(chip) as rig:
        channel, out, sem = rig.channel().setup(), rig.buffer(), rig.buffer()
        bank, count = rig.arguments(out.va, 0), 400
        program = rig.program(ADD_ONE, "add_one")
        last = rig.qmd(program, bank, **release_fields(rig, 0, sem.va, 1))
        one = rig.qmd(program, bank, at=0xA00)
        assert channel.launch(one).run()
        for _ in range(count - 1):
            channel.launch(one)
        channel.launch(last).submit()
        assert rig.wait(lambda: sem.u32() == 1, 20)
        assert out.u32() == count + 1
