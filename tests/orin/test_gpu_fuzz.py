"""Whatever a client puts into pushbuffers and launch descriptors: a fault at worst, never a defect of the GPU."""

from __future__ import annotations

import random
import time
from collections.abc import Iterator

import pytest
from gpu_rig import STORE, ChannelRig, Rig

from tegrad.hw.classes import BY_CLASS
from tegrad.hw.gpfifo import Subchannel
from tegrad.hw.qmd import LAYOUTS, Qmd
from tegrad.orin.events import FatalEvent, TsgAborted

CHIPS = ("agx-orin-64gb", "gh100")


@pytest.fixture(params=CHIPS)
def rig(request: pytest.FixtureRequest) -> Iterator[Rig]:
    with Rig(request.param) as rig:
        yield rig


def settle(rig: Rig, channel: ChannelRig, seconds: float = 0.02) -> None:
    """Wait until the channel is dead, done, or has had its time; then close it and look at what was reported."""
    deadline = time.monotonic() + seconds
    while channel.fence.u64() == 0 and not rig.of(FatalEvent) and time.monotonic() < deadline:
        time.sleep(0.0002)
    rig.gpu.channel_destroy(channel.chid)
    for event in rig.of(TsgAborted):
        assert isinstance(event, TsgAborted)
        assert "defect" not in event.detail, event.detail
    rig.events.clear()


def random_word(draw: random.Random, addresses: list[int]) -> int:
    kind = draw.random()
    if kind < 0.3:
        return draw.choice(addresses) & 0xFFFFFFFF
    if kind < 0.5:
        return draw.choice(addresses) >> draw.choice((32, 8))
    return draw.getrandbits(32) if kind < 0.7 else draw.randrange(64)


@pytest.mark.parametrize("seed", range(6))
def test_random_methods(rig: Rig, seed: int) -> None:
    draw = random.Random(seed)
    target = rig.buffer(1 << 16)
    addresses = [target.va + draw.randrange(0, 1 << 16, 4) for _ in range(8)] + [0, 1 << 39, (1 << 40) - 4]
    classes = {
        Subchannel.COMPUTE: rig.chip.compute_class,
        Subchannel.COPY: rig.chip.dma_class,
        0: rig.chip.gpfifo_class,
    }
    offsets = {
        subch: [m.offset for m in BY_CLASS[class_id].values() if m.offset] for subch, class_id in classes.items()
    }
    for _ in range(25):
        channel = rig.channel().setup()
        for _ in range(draw.randrange(1, 40)):
            subch = draw.choice(list(classes))
            offset = draw.choice(offsets[subch]) if draw.random() < 0.97 else draw.randrange(0, 0x4000, 4)
            data = [random_word(draw, addresses) for _ in range(draw.randrange(1, 4))]
            channel.method(subch, offset, *data, op=draw.choice((1, 1, 1, 3, 5)))
        if draw.random() < 0.1:
            channel.words += [draw.getrandbits(32) for _ in range(5)]
        channel.release(channel.fence.va, 1).submit()
        settle(rig, channel)
    assert rig.channel().run()


@pytest.mark.parametrize("seed", range(4))
def test_random_launch_descriptors(rig: Rig, seed: int) -> None:
    draw = random.Random(seed)
    program, out = rig.program(STORE, "store"), rig.buffer()
    layout = LAYOUTS[rig.chip.qmd]
    for _ in range(25):
        bank = rig.arguments(out.va, 1)
        qmd = rig.qmd(program, bank)
        mem = bytearray(bank.mem[0x800 : 0x800 + layout.size])
        for _ in range(draw.randrange(1, 6)):
            if draw.random() < 0.3:
                mem[draw.randrange(layout.size)] = draw.getrandbits(8)
            else:
                name, (hi, lo) = draw.choice(list(layout.bits.items()))
                Qmd(layout, mem).write(**{name: draw.getrandbits(hi - lo + 1)})
        bank.put(bytes(mem), 0x800)
        channel = rig.channel().setup().launch(qmd)
        channel.release(channel.fence.va, 1).submit()
        settle(rig, channel)
    assert rig.channel().run()
