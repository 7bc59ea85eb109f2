"""Running the shipped model asks the driver for what the table of roles says, under both policies."""

import gc
from collections.abc import Iterator

import numpy as np
import pytest
from boards import close_device

import tegrad
from tegrad import models
from tegrad.llm.engine import Engine
from tegrad.llm.gguf import Gguf
from tegrad.llm.sampling import Settings
from tegrad.nv import iface, roles
from tegrad.nv.roles import ROLES, Policy, Role
from tegrad.uapi.trace import Call, Tracer

pytestmark = pytest.mark.board


class Trace:
    """What a device asked its driver for."""

    def __init__(self, tracer: Tracer) -> None:
        self._tracer = tracer

    @property
    def flushes(self) -> int:
        return sum(call.name == "GPU_FLUSH_L2" for call in self._tracer.calls)

    def count(self, role: Role) -> int:
        """How many buffers a role got."""
        allocated = (call.arguments for call in self._tracer.calls if call.name == "NVMAP_ALLOC" and not call.error)
        return sum(int(str(given["flags"])) >> 16 == role.tag for given in allocated)

    def buffers(self) -> set[tuple[Role, int | None]]:
        """Roles by the tags of allocations, and the flags of the buffers' GPU mappings."""
        found: dict[object, Role] = {}
        handles: dict[object, object] = {}
        everything: set[tuple[Role, int | None]] = set()
        for call in self._tracer.calls:
            given = call.arguments
            if call.error:
                continue
            if call.name == "NVMAP_ALLOC":
                found[given["handle"]] = _by_tag(int(str(given["flags"])) >> 16)
            elif call.name == "NVMAP_GET_FD":
                handles[_after(call, "fd")] = given["handle"]
            elif call.name == "AS_MAP_BUFFER_EX":
                handle = handles[given["dmabuf_fd"]]
                everything.add((found[handle], int(str(given.get("flags", 0)))))  # zeros are not shown
            elif call.name == "CHANNEL_SETUP_BIND":
                everything |= {(found[handles[given[name]]], None) for name in ("gpfifo_dmabuf_fd", "userd_dmabuf_fd")}
            elif call.name == "CHANNEL_SET_ERROR_NOTIFIER":
                everything.add((found[handles[given["mem"]]], None))
        return everything


def _after(call: Call, name: str) -> object:
    return call.written.get(name, call.arguments.get(name))


def _by_tag(tag: int) -> Role:
    return next(role for role in ROLES if role.tag == tag)


@pytest.fixture(params=Policy)
def traced(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[Policy, Trace]]:
    """A board under a policy, and what is asked of it."""
    from tegrad.orin.client import BoardKernel

    monkeypatch.setenv("TEGRAD_MEMORY", request.param)
    tegrad.nv.install()
    close_device()
    tracer = Tracer(BoardKernel("agx-orin-64gb"))
    monkeypatch.setattr(iface, "pick_kernel", lambda: tracer)
    monkeypatch.setenv("DEV", "NV")
    yield request.param, Trace(tracer)
    gc.collect()
    close_device()


def test_every_buffer_of_a_run_is_what_the_table_says(traced: tuple[Policy, Trace]) -> None:
    policy, trace = traced
    with Gguf.open(models.SMALL) as file, Engine(file, device="NV") as engine:
        assert len(list(engine.generate([3, 4, 5], Settings(), 3))) == 3
        engine.feed([7])
    with tegrad.record(lambda x: (x + 1).contiguous(), np.arange(4, dtype=np.float32)) as recorded:
        recorded.inputs[0][:] = 3
        recorded.run()
        assert recorded.outputs[0].tolist() == [4] * 4
    # Where local memory grows, something is submitted between a program's mapping and the copy of its code.
    assert trace.flushes == (trace.count(roles.LOCAL) if policy is Policy.CACHED else 0)
    seen = trace.buffers()
    assert {role for role, _ in seen} == {role for role in ROLES if not role.within and role is not roles.STAGING}
    unmapped = {roles.GPFIFO, roles.USERD, roles.NOTIFIER}
    assert seen == {(role, None if role in unmapped else role.flags(policy)) for role, _ in seen}
