"""The table of roles: its two policies, what the driver is asked for, and how a role finds its way through tinygrad.

On the fake driver: what the calls carry.
"""

import ctypes
import errno
import mmap
from collections import defaultdict
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from fake import FakeKernel
from kernels import program
from tinygrad import Device, Tensor
from tinygrad.device import BufferSpec

from tegrad.nv import roles
from tegrad.nv.memory import AddressSpace, Nvmap
from tegrad.nv.replay import Launch, Recording
from tegrad.nv.roles import ROLES, Policy, PolicyError, Role
from tegrad.nv.spec import MemorySpec, allocating
from tegrad.uapi import constants as c
from tegrad.uapi import ioctls
from tegrad.uapi.errors import DriverError

COHERENCE = Path(__file__).parents[2] / "docs" / "coherence.md"
UNTOUCHED = {"code", "weights", "KV cache", "workspace", "local memory"}
"""What the CPU leaves alone between launches."""
ATTRIBUTES = {c.NVMAP_HANDLE_INNER_CACHEABLE: "inner cacheable", c.NVMAP_HANDLE_WRITE_COMBINE: "write-combine"}
FLAGS = {0: "0", c.NVGPU_AS_MAP_BUFFER_FLAGS_CACHEABLE: "CACHEABLE"}


def by_tag(tag: int) -> Role:
    return next(role for role in ROLES if role.tag == tag)


def asked(kernel: FakeKernel) -> list[tuple[Role, int | None]]:
    """Each allocation's role, by its tag, and the flags of its GPU mapping if it got one."""
    made: list[tuple[Role, int | None]] = []
    for name, arg in kernel.calls:
        if name == "NVMAP_ALLOC":
            made.append((by_tag(arg.flags >> 16), None))
        elif name == "AS_MAP_BUFFER_EX":
            made[-1] = made[-1][0], arg.flags
    return made


# ---- the table


def test_under_the_first_policy_everything_is_volatile() -> None:
    assert {role.flags(Policy.VOLATILE) for role in ROLES} == {0}


def test_under_the_second_policy_what_the_cpu_leaves_alone_is_cached_and_nothing_else() -> None:
    assert {role.name for role in ROLES if role.flags(Policy.CACHED)} == UNTOUCHED
    assert {role.flags(Policy.CACHED) for role in ROLES} == set(FLAGS)


def test_no_flag_but_cacheable_is_ever_asked_for() -> None:
    assert {role.flags(policy) for role in ROLES for policy in Policy} <= set(FLAGS)


def test_gpfifos_and_userd_are_write_combined_and_all_else_is_cached_by_the_cpu() -> None:
    assert {role.name for role in ROLES if role.nvmap == c.NVMAP_HANDLE_WRITE_COMBINE} == {"GPFIFO", "USERD"}
    assert {role.nvmap for role in ROLES} == set(ATTRIBUTES)


def test_tags_tell_roles_apart_and_are_never_zero() -> None:
    tags = [role.tag for role in ROLES]
    assert len(set(tags)) == len(tags) == len({role.label for role in ROLES})
    assert all(0 < tag <= 0xFFFF for tag in tags)
    assert all(len(role.label) < 64 for role in ROLES)


def test_what_lies_within_another_role_has_its_attribute_and_flags() -> None:
    within = {role: role.within.split(", ") for role in ROLES if role.within}
    assert within
    for role, hosts in within.items():
        for host in (next(other for other in ROLES if other.name == name) for name in hosts):
            assert (role.nvmap, role.volatile, role.cached) == (host.nvmap, host.volatile, host.cached)


def rows() -> list[str]:
    """The table as docs/coherence.md shows it."""
    head = ["role", "CPU's caches (nvmap)", "volatile", "cached", "the CPU", "the GPU", "why", "source"]
    lines = [head, ["---"] * len(head)]
    for role in ROLES:
        name = f"{role.name} (within {role.within})" if role.within else role.name
        flags = [FLAGS[role.volatile], FLAGS[role.cached]]
        lines.append([name, ATTRIBUTES[role.nvmap], *flags, role.cpu, role.gpu, role.why, role.source])
    return [f"| {' | '.join(line)} |" for line in lines]


def test_the_documentation_shows_the_table() -> None:
    expected = "\n".join(rows())
    assert expected in COHERENCE.read_text(), f"docs/coherence.md needs this table:\n{expected}"


# ---- the choice


@pytest.mark.parametrize(
    ("said", "chosen"), [(None, "volatile"), ("", "volatile"), ("volatile", "volatile"), ("cached", "cached")]
)
def test_the_variable_chooses_and_volatile_is_the_default(
    monkeypatch: pytest.MonkeyPatch, said: str | None, chosen: str
) -> None:
    if said is None:
        monkeypatch.delenv("TEGRAD_MEMORY", raising=False)
    else:
        monkeypatch.setenv("TEGRAD_MEMORY", said)
    assert roles.policy() is Policy(chosen)


def test_another_value_is_one_clear_error_before_anything_is_opened(
    fake_kernel: FakeKernel, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TEGRAD_MEMORY", "fast")
    with pytest.raises(PolicyError, match="TEGRAD_MEMORY=fast is no memory policy: set it to volatile or cached"):
        Device["NV"]
    assert fake_kernel.calls == []


# ---- what the driver is asked for


@pytest.mark.parametrize("policy", Policy)
@pytest.mark.parametrize("role", ROLES, ids=lambda role: role.name)
def test_a_role_decides_tag_attribute_and_map_flags(role: Role, policy: Policy) -> None:
    kernel = FakeKernel()
    nvmap = Nvmap(kernel, "/dev/nvmap", policy)
    space = AddressSpace(kernel, kernel._fd("as", None))
    memory = nvmap.alloc(4096, role, space)
    assert asked(kernel) == [(role, role.flags(policy))]
    flags = next(arg.flags for name, arg in kernel.calls if name == "NVMAP_ALLOC")
    assert flags & c.NVMAP_HANDLE_CACHE_FLAG == role.nvmap
    assert memory.cached == (policy is Policy.CACHED and role.name in UNTOUCHED)
    nvmap.free(memory, space)


def test_each_tag_is_named_once_for_an_nvmap_fd(monkeypatch: pytest.MonkeyPatch) -> None:
    kernel, labels = FakeKernel(), defaultdict(list)

    def named(_: Any, arg: Any) -> None:
        labels[arg.tag].append(ctypes.string_at(arg.addr, arg.len))

    monkeypatch.setattr(kernel, "nvmap_set_tag_label", named, raising=False)
    for _ in range(2):
        nvmap = Nvmap(kernel, "/dev/nvmap")
        for role in (roles.WEIGHTS, roles.TENSORS, roles.WEIGHTS):
            nvmap.free(nvmap.alloc(4096, role))
    assert labels == {roles.WEIGHTS.tag: [b"tegrad weights"] * 2, roles.TENSORS.tag: [b"tegrad tensors"] * 2}


def test_a_driver_that_refuses_a_name_is_left_alone() -> None:
    kernel = FakeKernel(fail={"NVMAP_SET_TAG_LABEL": errno.EINVAL})
    nvmap = Nvmap(kernel, "/dev/nvmap")
    nvmap.free(nvmap.alloc(4096, roles.CODE))
    with pytest.raises(DriverError):
        kernel.ioctl(nvmap.fd, ioctls.NVMAP_IOC_SET_TAG_LABEL)


# ---- the way through tinygrad


@pytest.fixture(params=Policy)
def policy(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Policy:
    """The policy of the next device."""
    monkeypatch.setenv("TEGRAD_MEMORY", request.param)
    chosen: Policy = request.param
    return chosen


def test_what_tinygrad_allocates_by_itself_has_the_role_of_where_it_comes_from(
    policy: Policy, fake_kernel: FakeKernel
) -> None:
    device = Device["NV"]
    opening = asked(fake_kernel)
    assert {role.name for role, _ in opening} == {
        "pushbuffer", "GPFIFO", "USERD", "notifier", "signals", "kernel arguments",
    }  # fmt: skip
    assert {flags for role, flags in opening if role in (roles.GPFIFO, roles.USERD, roles.NOTIFIER)} == {None}

    def new() -> list[tuple[str, int | None]]:
        """What was asked for since the last look."""
        made = [(role.name, flags) for role, flags in asked(fake_kernel)]
        fake_kernel.calls.clear()
        return made

    new()
    kept = Tensor(np.arange(4, dtype=np.int32), device="NV").realize()
    assert set(new()) == {("tensors", 0)}
    loaded = program(device, "add")
    assert set(new()) == {("code", roles.CODE.flags(policy)), ("local memory", roles.LOCAL.flags(policy))}
    signals = [device.new_signal() for _ in range(300)]
    assert {name for name, _ in new()} == {"signals"}
    queue = device.hw_compute_queue_t().signal(signals[0], 1)
    queue.bind(device)
    assert new() == [("pushbuffer", 0)]
    with Recording(device, [Launch(loaded, (kept.uop.buffer._buf,), values=(1,))]):
        assert new() == [("recording", 0)]


@pytest.mark.parametrize(("debug", "role"), [(0, roles.RECORDING), (2, roles.ARGUMENTS)])
def test_a_graphs_arguments_are_kernel_arguments(fake_kernel: FakeKernel, debug: int, role: roles.Role) -> None:
    """Those of tinygrad's graph, which runs while each kernel is told of; in a recording they lie with the QMDs."""
    from tinygrad import TinyJit
    from tinygrad.helpers import Context

    step: Any = TinyJit(lambda x: ((x + 1).contiguous() * 3).contiguous().sum().realize())
    given = Tensor(np.arange(64, dtype=np.int32), device="NV").realize()
    step(given)
    fake_kernel.calls.clear()
    with Context(DEBUG=debug):
        step(given)  # recorded
        step(given)  # replayed
    made = {role for role, _ in asked(fake_kernel)}
    assert role in made
    assert made <= {role, roles.PUSHBUFFER, roles.SIGNALS, roles.TENSORS}


def test_cpu_memory_that_the_gpu_sees_is_staging() -> None:
    kernel, own = FakeKernel(), mmap.mmap(-1, 4096)
    nvmap, address = Nvmap(kernel, "/dev/nvmap", Policy.CACHED), ctypes.addressof(ctypes.c_char.from_buffer(own))
    memory = nvmap.adopt(address, 4096, space := AddressSpace(kernel, kernel._fd("as", None)))
    assert asked(kernel) == [(roles.STAGING, 0)]
    nvmap.free(memory, space)


def test_a_freed_buffer_is_reused_in_its_own_role_only(fake_kernel: FakeKernel, fake_device: Any) -> None:
    allocator = fake_device.allocator
    kept = MemorySpec(role=roles.STATE)
    first = allocator.alloc(4096, kept)
    allocator.free(first, 4096, kept)
    assert allocator.alloc(4096).meta is not first.meta
    assert allocator.alloc(4096, MemorySpec(role=roles.LOGITS)).meta is not first.meta
    assert allocator.alloc(4096, kept).meta is first.meta
    with allocating(roles.SIGNALS):
        signals = allocator.alloc(4096, BufferSpec(host=True))
    allocator.free(signals, 4096, BufferSpec(host=True))  # as tinygrad does, which knows of no roles
    assert allocator.alloc(4096, BufferSpec(host=True)).meta is not signals.meta
    with allocating(roles.SIGNALS):
        assert allocator.alloc(4096, BufferSpec(host=True)).meta is signals.meta


def test_a_tensor_is_a_tensor_wherever_it_is_allocated(fake_kernel: FakeKernel, fake_device: Any) -> None:
    with allocating(roles.CODE):
        assert fake_device.allocator.alloc(4096).meta.role is roles.TENSORS
    assert fake_device.allocator.alloc(8192, BufferSpec(nolru=True)).meta.role is roles.TENSORS
