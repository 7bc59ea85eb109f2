"""Mutants of section 1."""

from mutation import Edit, Item, Mutant, Start

from tegrad.conformance.s1_nodes import NODES, legacy

BUFFERS = "tegrad.orin.buffers."
N, CLIENT = "tegrad.orin.nvmap.", "tegrad.orin.client."
TABLE, CHECK_MAPPING = "tegrad.orin.nodes.NODES", "tegrad.orin.sessions.check_mapping"
TAKE_FDS, CLOSE = CLIENT + "_take_fds", CLIENT + "BoardKernel.close"
NEW = {"as": "GPU_ALLOC_AS", "tsg": "GPU_OPEN_TSG", "channel": "GPU_OPEN_CHANNEL"}
NEW_ID = "tegrad.orin.state.DriverState.new_instance_id"
NO_DEVICE = "else errno.ENODEV"
GONE = Edit(
    BUFFERS + "Buffer.drop",
    "    if self.holders == 0:",
    "    if not self.holders:\n        os.pwrite(self.fd, b'gone', 0)",
)
NO_STACK = Edit("tegrad.orin.channel.DriverChannel.release", "free_chids.append(", "free_chids.insert(0, ")
TO_NOWHERE = """for bell in list(BoardDoorbell.open):
    null = os.open("/dev/null", os.O_WRONLY)
    if bell._pipe >= 0:
        os.dup2(null, bell._pipe)
    os.close(null)"""
UNMAP_FREED = """handle = file.client.handles.get(call.value & 0xFFFFFFFF)
for vm in file.driver.vms.values():
    for mapping in list(vm.mappings.values()):
        if handle is not None and mapping.buffer is handle.buffer:
            vm.unmap(mapping)"""

MUTANTS: dict[str, Mutant | list[Mutant]] = {
    "1.1/nodes-beside": [Item(TABLE, "'/dev/host1x-fence'", ""), Item(TABLE, "'/dev/nvmap'", "")],
    "1.1/no-other-nodes": Item(TABLE, "'/dev/nvgpu/igpu0/nothing'", "OtherFile"),
    "1.1/two-nodes-suffice": Start("tegrad.orin.ctrl.open_channel", "require(False, errno.EPERM)"),
    "1.2/nvmap-has-no-mmap": Edit(CHECK_MAPPING, "errno.EPERM if isinstance(found, NvmapFile) else", ""),
    "1.2/tsg-node": [Item(TABLE, f"{path!r}", "open_channel") for path in ("/dev/nvgpu/igpu0/tsg", legacy("tsg"))],
    "1.2/channel-from-channel": Start("tegrad.orin.channel_calls.open_channel", "require(False)"),
    "1.3/instance-ids-rise": Start(NEW_ID, "return 1000000 - next(self._instance_ids)"),
    "1.3/instance-id-stays": Start(
        "tegrad.orin.topology.characteristics", "global asked\nasked = globals().get('asked', 0) + 1\ninstance += asked"
    ),
    "1.3/as-node": [Item(TABLE, f"{path!r}", "OtherFile") for path in ("/dev/nvgpu/igpu0/as", legacy("as"))],
    "1.3/channel-node": Item(TABLE, "'/dev/nvgpu/igpu0/channel'", "OtherFile"),
    "1.3/sched-node": Edit(
        "tegrad.orin.nodes.SchedFile.__init__", "require(not driver.sched_open, errno.EBUSY)", "pass"
    ),
    "1.3/nvmap-fds-share-handles": (
        Edit(N + "NvmapFile.__init__", "setdefault(process.token,", "setdefault(process.token + str(self.serial),"),
        Edit(N + "NvmapFile.release", "[self.process.token]", "[self.process.token + str(self.serial)]"),
    ),
    "1.3/handles-stay-with-one-fd": Start(
        N + "NvmapFile.release", "while self.client.handles: self.client.handles.popitem()[1].buffer.drop()"
    ),
    "1.3/handles-of-another-process": Edit(
        N + "NvmapFile.handle",
        "self.client.handles.get(number)",
        "{n: h for c in self.driver.nvmap.clients.values() for n, h in c.handles.items()}.get(number)",
    ),
    "1.4/fd-keeps-memory": GONE,
    "1.4/cpu-mapping-keeps-memory": GONE,
    "1.4/gpu-mapping-keeps-memory": Start(N + "free", UNMAP_FREED),
    "1.4/channel-keeps-address-space": Start(
        "tegrad.orin.as_file.AsFile.release",
        "for mapping in list(self.vm.mappings.values()): self.vm.unmap(mapping)",
    ),
    "1.4/channel-keeps-tsg": Start(
        "tegrad.orin.tsg_calls.TsgFile.release",
        "for channel in list(self.tsg.channels): self.tsg.unbind(channel, forced=True)",
    ),
    "1.4/ctrl-may-go": Start(
        "tegrad.orin.ctrl.CtrlFile.release", "for group in self.driver.tsgs.values(): group.runlist = 99"
    ),
    "1.4/doorbell-outlives-ctrl": Start(CLOSE, TO_NOWHERE),
    "1.4/duplicate-keeps-channel": Start(
        CLOSE, "import socket\nwith contextlib.suppress(OSError), socket.socket(fileno=os.dup(fd)) as s: s.shutdown(2)"
    ),
    "1.5/closed-channel-id-is-next": NO_STACK,
    "1.5/close-unbinds": Start(
        "tegrad.orin.tsg.Tsg.unbind", "for other in self.channels: other.faulted = other is not channel"
    ),
    "1.5/last-channel-deletes-subcontext": [
        Edit("tegrad.orin.tsg.Tsg.unbind", "if forced:", "if False:"),
        Start("tegrad.orin.tsg.Tsg.unbind", "self.subcontexts.pop(channel.veid, None)"),
    ],
    "1.5/last-nvmap-fd-drops-handles": Start(
        N + "NvmapFile.release", "if self.client.opens == 1:\n    self.client.opens = 0\n    return"
    ),
    "1.5/memory-outlives-nvmap": Start(
        N + "NvmapFile.release", "for handle in self.client.handles.values(): os.pwrite(handle.buffer.fd, bytes(8), 0)"
    ),
    "1.5/killed-process-frees-channels": NO_STACK,
    "1.5/killed-process-leaves-passed-buffers": GONE,
    "1.5/any-order-of-closes": Start(
        "tegrad.orin.ctrl.CtrlFile.release",
        "free = self.driver.free_chids\nif self.driver.channels: free.insert(0, free.pop())",
    ),
    "1.5/clean-order": Start("tegrad.orin.as_calls.unmap_buffer", "require(False)"),
}

for _name in NODES:
    MUTANTS[f"1.1/node-{_name}".replace("_", "-")] = [
        Item(TABLE, repr(path), "") for path in (f"/dev/nvgpu/igpu0/{_name}", legacy(_name))
    ]

for _kind, _ioctl in NEW.items():
    MUTANTS[f"1.2/{_kind}-fd-is-cloexec"] = Edit(
        TAKE_FDS,
        "lowest(made))",
        f"lowest(made))\n        os.set_inheritable(get_field(arg, name), row.name == {_ioctl!r})",
    )
    MUTANTS[f"1.2/{_kind}-fd-is-lowest"] = Edit(
        TAKE_FDS, "lowest(made)", f"made if row.name == {_ioctl!r} else lowest(made)"
    )
    MUTANTS[f"1.2/{_kind}-fd-has-no-mmap"] = Edit(
        CHECK_MAPPING, NO_DEVICE, f"else errno.EPERM if getattr(found, 'kind', '') == {_kind!r} else errno.ENODEV"
    )
