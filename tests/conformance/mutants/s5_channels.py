"""Mutants of section 5."""

from mutation import Edit, Item, Mutant, Start, Value

CC = "tegrad.orin.channel_calls."
SC = "tegrad.orin.share_calls."
TC = "tegrad.orin.tsg_calls."
C, T, S, W = "tegrad.orin.channel.", "tegrad.orin.tsg.", "tegrad.orin.sharing.", "tegrad.orin.waiting."
CONTEXT = "tegrad.orin.context.GraphicsContext."
MODES = "tegrad.orin.preemption.Modes."
KNOWN = "tegrad.orin.engine_classes.known"
ENTRIES, CHECKS = CC + "_entry_checks", CC + "_ring_checks"
SETUP, OBJECT, NOTIFIER = (
    CC + "setup_bind",
    CC + "alloc_obj_ctx",
    CC + "set_error_notifier",
)
BIND, CREATE = T + "Tsg.bind", TC + "create_subcontext"
PREEMPTION = MODES + "_set"
SM = TC + "read_single_sm_error_state"
NO_CHECK = "pass"


def _accepts(function: str) -> Mutant:
    """The call succeeds and does nothing."""
    return Start(function, "return")


def _refuses(function: str) -> Mutant:
    """The call fails."""
    return Start(function, "import errno; from tegrad.orin.files import Errno; raise Errno(errno.EPERM)")


def _lacks(function: str, what: str, other: str) -> Mutant:
    """The call succeeds, and does nothing, on a channel without the one and with the other."""
    return Start(function, f"if not file.channel.{what} and file.channel.{other}: return")


def _no_class(number: str) -> Mutant:
    """ALLOC_OBJ_CTX does not know this class."""
    return Start(OBJECT, f"require(call.arg.class_num != {number})")


CLASSES: dict[str, Mutant | list[Mutant]] = {
    f"5.5/class-{name}": _no_class(f"0x{name}") for name in ("c7c0", "c7b5", "c797", "c76f", "c637")
}

RINGS: dict[str, Mutant | list[Mutant]] = {
    "5.3/setup-gpfifo-fd-0": Edit(SETUP, "arg.gpfifo_dmabuf_fd != 0 and", ""),
    "5.3/setup-userd-fd-0": Edit(SETUP, " and arg.userd_dmabuf_fd != 0", ""),
    "5.3/setup-gpfifo-offset": Edit(SETUP, "arg.gpfifo_dmabuf_offset == 0 and", ""),
    "5.3/setup-userd-offset": Edit(SETUP, " and arg.userd_dmabuf_offset == 0", ""),
    "5.3/setup-gpfifo-not-open": Start(SETUP, "require(call.files['gpfifo_dmabuf_fd'] is not None)"),
    "5.3/setup-userd-not-open": Start(SETUP, "require(call.files['userd_dmabuf_fd'] is not None)"),
    "5.3/setup-gpfifo-no-dmabuf": Start(
        SETUP, "require(isinstance(call.files['gpfifo_dmabuf_fd'], (Buffer, type(None))), errno.EBADF)"
    ),
    "5.3/setup-userd-no-dmabuf": Start(
        SETUP, "require(isinstance(call.files['userd_dmabuf_fd'], (Buffer, type(None))), errno.EBADF)"
    ),
    "5.3/setup-gpfifo-no-memory": Edit(SETUP, "gpfifo.allocated, errno.ENOMEM", "gpfifo.allocated"),
    "5.3/setup-userd-no-memory": Edit(SETUP, "userd.allocated, errno.ENOMEM", "userd.allocated"),
}

SHARING: dict[str, Mutant | list[Mutant]] = {
    "5.2/share-ids-of-0": Edit(
        SC + "get_share_token",
        "require(arg.source_device_instance_id and arg.target_device_instance_id)",
        "require(arg.source_device_instance_id and arg.target_device_instance_id, errno.ENOENT)",
    ),
    "5.2/share-unauthorized": Edit(
        SC + "get_share_token", "require(arg.source_device_instance_id in tsg.instances)", NO_CHECK
    ),
    "5.2/share-unknown-target": Edit(
        SC + "get_share_token", "require(arg.target_device_instance_id in file.driver.instances)", NO_CHECK
    ),
    "5.2/share-opens": Edit("tegrad.orin.ctrl.open_tsg", "shared_tsg(file.driver, call.arg, file.instance.id) or", ""),
    "5.2/share-across-processes": Edit(
        "tegrad.orin.ctrl.open_tsg", "shared_tsg(file.driver, call.arg, file.instance.id) or", ""
    ),
    "5.2/share-once": Edit(S + "Instance.take", "self.tokens.remove(token)\n    token.tsg.token_count -= 1", NO_CHECK),
    "5.2/share-target-only": Edit(
        S + "Instance.take", "(t.number, t.target) == (number, target)", "t.number == number"
    ),
    "5.2/share-revoked": Edit(
        SC + "revoke_share_token",
        "source.take(arg.share_token, arg.target_device_instance_id, tsg)",
        "needed(source)",
    ),
    "5.2/share-revoke-unknown": _accepts(SC + "revoke_share_token"),
    "5.2/share-ends-with-its-fd": Edit(
        TC + "TsgFile.release",
        "self.instance.revoke(self.tsg)",
        "self.tsg.hold()",  # or the token would lead to what is no more
    ),
    "5.2/share-keeps-the-tsg": Edit(S + "shared_tsg", ".hold()", ".__class__(driver)"),
    "5.2/share-64-tokens": [
        Edit(SC + "get_share_token", "MAX_TOKENS, errno.ENOSPC", "63, errno.ENOSPC"),
        Edit(SC + "get_share_token", "MAX_TOKENS, errno.ENOSPC", "65, errno.ENOSPC"),
        Edit(SC + "get_share_token", "MAX_TOKENS, errno.ENOSPC", "MAX_TOKENS"),
    ],
}

MUTANTS: dict[str, Mutant | list[Mutant]] = {
    **CLASSES,
    **RINGS,
    **SHARING,
    # 5.1
    "5.1/one-address-space-a-channel": Edit(
        "tegrad.orin.as_calls.bind_channel", "require(channel.channel.vm is None)", NO_CHECK
    ),
    "5.1/object-before-setup": Start(OBJECT, "require(file.channel.set_up)"),
    "5.1/compute-and-copy-in-one-tsg": Start(
        OBJECT, "require(not any(c.classes for c in file.channel.tsg.channels if c is not file.channel))"
    ),
    "5.1/notifier-needs-nothing": Start(NOTIFIER, "require(file.channel.tsg is not None)"),
    # 5.2
    "5.2/sync-subcontext-is-0": Edit(CREATE, "range(1)\n", "range(2, 3)\n"),
    "5.2/one-sync-subcontext": Edit(CREATE, "None), errno.ENOSPC)", "None))"),
    "5.2/async-subcontexts-from-1": [
        Edit(CREATE, "range(1, MAX_SUBCONTEXTS)", "range(0, MAX_SUBCONTEXTS)"),
        Edit(CREATE, "range(1, MAX_SUBCONTEXTS)", "range(max([0, *taken]) + 1, MAX_SUBCONTEXTS)"),
    ],
    "5.2/subcontexts-64": [
        Edit(CREATE, "(*candidates, 0)", "candidates"),
        Edit(CREATE, "range(1, MAX_SUBCONTEXTS)", "range(1, MAX_SUBCONTEXTS + 1)"),
    ],
    "5.2/subcontext-types": Edit(CREATE, "elif arg.type == k.NVGPU_TSG_SUBCONTEXT_TYPE_ASYNC:", "elif True:"),
    "5.2/subcontext-needs-address-space": Edit(CREATE, "require(address_space)", "require(address_space, errno.EBADF)"),
    "5.2/delete-used-subcontext": Edit(TC + "delete_subcontext", "require(veid not in tsg.occupied)", NO_CHECK),
    "5.2/delete-veid-64": Edit(TC + "delete_subcontext", "require(veid < MAX_SUBCONTEXTS)", NO_CHECK),
    "5.2/bind-needs-channel": Edit(TC + "bind_channel_ex", "require(found)", "require(found, errno.EBADF)"),
    "5.2/bind-veid-64": Edit(BIND, "require(veid < MAX_SUBCONTEXTS)", "require(veid < MAX_SUBCONTEXTS, errno.ENOSPC)"),
    "5.2/bind-other-address-space": Edit(
        BIND, "self.subcontexts.get(veid) is channel.vm", "self.subcontexts.get(veid) is not None"
    ),
    "5.2/bind-unknown-veid": Edit(BIND, "self.subcontexts.get(veid)", "self.subcontexts.setdefault(veid, channel.vm)"),
    "5.2/bind-bound-channel": Edit(
        BIND,
        "require(channel.tsg is None)",
        "require(channel.tsg is None, errno.EBUSY)",
    ),
    "5.2/bind-128-channels": [
        Edit(BIND, "require(len(self.channels) < MAX_CHANNELS)", NO_CHECK),
        Edit(BIND, "len(self.channels) < MAX_CHANNELS", "len(self.channels) < MAX_CHANNELS - 1"),
    ],
    "5.2/bind-makes-veid-0": Edit(BIND, "self.runlist = channel.runlist", "self.subcontexts.pop(0, None)"),
    "5.2/bind-without-address-space": Start(BIND, "require(channel.vm is not None)"),
    "5.2/bound-is-serviceable": Edit(C + "DriverChannel.serviceable", "self.tsg is not None", "self.set_up"),
    "5.2/plain-bind": _refuses(TC + "bind_channel"),
    "5.2/failed-bind-leaves-veid": Edit(TC + "bind_channel", "found.channel.veid", "0"),
    "5.2/unbind-stranger": Edit(
        TC + "unbind_channel",
        "require(found and found.channel.tsg is file.tsg)",
        "require(found and found.channel.tsg is file.tsg, errno.ENOENT)",
    ),
    "5.2/unbound-is-unserviceable": _accepts(TC + "unbind_channel"),
    "5.2/unbind-leaves-subcontext": Edit(T + "Tsg.unbind", "if forced:", "if True:"),
    "5.2/tsg-enable": _refuses(TC + "enable"),
    "5.2/tsg-disable": _refuses(TC + "disable"),
    "5.2/tsg-preempt": _refuses(TC + "preempt"),
    "5.2/timeslice-default": Value(T + "TIMESLICE_DEFAULT_US", "2000"),
    "5.2/timeslice-low": [
        Value(TC + "TIMESLICE_MIN_US", "999"),
        Value(TC + "TIMESLICE_MIN_US", "1001"),
    ],
    "5.2/timeslice-high": [
        Value(TC + "TIMESLICE_MAX_US", "50001"),
        Value(TC + "TIMESLICE_MAX_US", "49999"),
    ],
    "5.2/timeslice-is-told": Edit(TC + "set_timeslice", "file.tsg.timeslice_us = call.arg.timeslice_us", NO_CHECK),
    "5.2/interleave-levels": [
        Edit(TC + "set_runlist_interleave", "k.NVGPU_RUNLIST_INTERLEAVE_NUM_LEVELS", "2"),
        Edit(
            TC + "set_runlist_interleave",
            "require(call.arg.level < k.NVGPU_RUNLIST_INTERLEAVE_NUM_LEVELS)",
            "call.arg.level = min(call.arg.level, 2)",
        ),
    ],
    "5.2/event-command": Edit(
        "tegrad.orin.tsg_events.event_id_ctrl",
        "require(arg.cmd == k.NVGPU_IOCTL_CHANNEL_EVENT_ID_CMD_ENABLE)",
        NO_CHECK,
    ),
    "5.2/event-id": Edit(
        "tegrad.orin.tsg_events.event_id_ctrl", "require(arg.event_id < k.NVGPU_IOCTL_CHANNEL_EVENT_ID_MAX)", NO_CHECK
    ),
    "5.2/event-fds-are-new": Start(
        "tegrad.orin.tsg_events.event_id_ctrl",
        "require(call.arg.event_id not in [f.event for f in file.tsg.event_files])",
    ),
    "5.2/event-fd-is-quiet": Edit(
        "tegrad.orin.tsg_events.EventFile.__init__",
        "tsg.event_files.append(self)",
        "tsg.event_files.append(self)\n    self.make_readable()",
    ),
    "5.2/blocking-sync-event": Edit(
        "tegrad.orin.recovery.non_stall", "channel.tsg.post(k.NVGPU_IOCTL_CHANNEL_EVENT_ID_BLOCKING_SYNC)", NO_CHECK
    ),
    "5.2/sm-out-of-range": [
        Edit(SM, "require(arg.sm_id < file.driver.chip.sm_count)", NO_CHECK),
        Edit(SM, "file.driver.chip.sm_count", "file.driver.chip.sm_count - 1"),
    ],
    "5.2/sm-record-of-24-bytes": Edit(SM, "[: arg.record_size]", ".ljust(arg.record_size, b'\\0')"),
    "5.2/sm-record-size": Edit(SM, "[: arg.record_size]", ""),
    "5.2/sm-record-of-0-bytes": Edit(SM, "[: arg.record_size]", ""),
    "5.2/no-read-all": Item(
        TC + "HANDLERS", "io.NVGPU_TSG_IOCTL_READ_ALL_SM_ERROR_STATES.request", "read_single_sm_error_state"
    ),
    "5.2/l2-ways": Edit(TC + "set_l2_max_ways", "require(call.arg.max_ways <= L2_WAYS)", NO_CHECK),
    "5.2/l2-ways-are-told": Edit(TC + "set_l2_max_ways", "l2_ways = call.arg.max_ways", "l2_ways = L2_WAYS"),
    "5.2/l2-sector-promotion": [
        Edit(TC + "set_l2_sector_promotion", "require(call.arg.promotion_flag in SECTOR_PROMOTIONS)", NO_CHECK),
        Edit(TC + "set_l2_sector_promotion", "in SECTOR_PROMOTIONS", "in SECTOR_PROMOTIONS[:2]"),
    ],
    "5.2/domain-reserved": Edit(
        TC + "bind_scheduling_domain", "require(not call.arg.reserved0 and not any(call.arg.reserved))", NO_CHECK
    ),
    "5.2/domain-fd": Edit(TC + "bind_scheduling_domain", "errno.ENOENT", "errno.EBADF"),
    # 5.3
    "5.3/setup-one-entry": [
        Edit(ENTRIES, "2 if", "0 if"),
        Edit(ENTRIES, "2 if", "4 if"),
    ],
    "5.3/setup-power-of-two": Edit(ENTRIES, "entries & (entries - 1) == 0 and", ""),
    "5.3/setup-too-many": Edit(ENTRIES, " and entries <= MAX_GPFIFO_ENTRIES", ""),
    "5.3/setup-needs-address-space": [
        Edit(CHECKS, "needed(channel.vm)", "needed(channel.vm, errno.ENODEV)"),
        _lacks(SETUP, "vm", "tsg"),
    ],
    "5.3/setup-needs-tsg": [
        Edit(CHECKS, "needed(channel.tsg)", "needed(channel.tsg, errno.ENODEV)"),
        _lacks(SETUP, "tsg", "vm"),
    ],
    "5.3/setup-once": Edit(CHECKS, "require(not channel.set_up, errno.EEXIST)", "require(not channel.set_up)"),
    "5.3/setup-once-first": Start(SETUP, "require(call.arg.gpfifo_dmabuf_fd)"),
    "5.3/setup-needs-watchdog-off": Edit(CHECKS, "require(not (deterministic and channel.watchdog))", NO_CHECK),
    "5.3/setup-needs-deterministic": Edit(CHECKS, "require(not usermode or deterministic)", NO_CHECK),
    "5.3/setup-small-ring": Edit(SETUP, "require(gpfifo.length >= max(MIN_GPFIFO_BYTES, entries * 8))", NO_CHECK),
    "5.3/setup-can-be-repeated": Edit(CHECKS, "return vm, tsg", "channel.set_up = True\n    return vm, tsg"),
    "5.3/setup-fail-line": Edit("tegrad.orin.klog.KernelLog.failing", 'self.error(function, "fail")', NO_CHECK),
    "5.3/setup-token": Edit(SETUP, "token(channel.chid, channel.runlist)", "channel.chid + 600"),
    "5.3/setup-addresses-are-0": Edit(SETUP, "arg.gpfifo_gpu_va = arg.userd_gpu_va", "arg.userd_gpu_va"),
    "5.3/setup-unknown-flags": Start(SETUP, "require(call.arg.flags < 0x20)"),
    "5.3/setup-maps-the-ring": Edit(
        "tegrad.orin.address_space.AddressSpace.map_kernel", "self.take_kernel(buffer.length)", "self.take_kernel(4096)"
    ),
    "5.3/kernel-ring-entries": Edit(ENTRIES, "else 4", "else 2"),
    "5.7/gpfifo-ex-entries": Edit(CC + "alloc_gpfifo_ex", "_entry_checks(arg.num_entries, arg.flags)", NO_CHECK),
    "5.7/gpfifo-ex-usermode": Edit(CC + "alloc_gpfifo_ex", "raise Errno(errno.EINVAL)", "return"),
    "5.7/gpfifo-ex-once": Edit(CHECKS, "require(not channel.set_up, errno.EEXIST)", "require(not channel.set_up)"),
    # 5.4
    "5.4/wdt-neither": Edit(CC + "wdt", "require(bool(on) != bool(off))", "require(not (on and off))"),
    "5.4/wdt-both": Edit(CC + "wdt", "require(bool(on) != bool(off))", "require(on or off)"),
    "5.4/wdt-other-bits": Start(CC + "wdt", "require(call.arg.wdt_status < 16)"),
    "5.4/wdt-deterministic": Edit(CC + "wdt", "require(not (file.channel.set_up and on))", NO_CHECK),
    "5.4/wdt-default": Edit(C + "DriverChannel.__init__", "self.watchdog = True", "self.watchdog = False"),
    # 5.5
    "5.5/older-classes": Edit(KNOWN, " or number in OLDER", ""),
    "5.5/unknown-class": Edit(OBJECT, "require(engine_classes.known(chip, arg.class_num))", NO_CHECK),
    "5.5/object-needs-address-space": [
        Edit(OBJECT, "needed(channel.vm)", "needed(channel.vm, errno.ENODEV)"),
        _lacks(OBJECT, "vm", "tsg"),
    ],
    "5.5/object-needs-tsg": [
        Edit(OBJECT, "needed(channel.tsg)", "needed(channel.tsg, errno.ENODEV)"),
        _lacks(OBJECT, "tsg", "vm"),
    ],
    "5.5/graphics-off-veid-0": [
        Edit(OBJECT, "require(object_allowed(channel, tsg.channels))", NO_CHECK),
        Edit(OBJECT, "require(object_allowed(channel, tsg.channels))", "require(not channel.veid)"),
    ],
    "5.5/object-id-is-not-written": Start(OBJECT, "call.arg.obj_id = 1"),
    "5.5/gfxp-and-cilp": Edit(PREEMPTION, "require(not (graphics == GFXP and compute == CILP))", NO_CHECK),
    "5.5/two-objects": Start(OBJECT, "require(not file.channel.classes)"),
    # 5.6
    "5.6/preemption-needs-object": Edit(
        CC + "set_preemption_mode",
        "require(channel.last_class)",
        "require(channel.last_class, errno.ENOENT)",
    ),
    "5.6/preemption-needs-tsg": Edit(
        CC + "set_preemption_mode", "needed(channel.tsg)", "needed(channel.tsg, errno.ENOENT)"
    ),
    "5.6/preemption-of-nothing": Edit(
        MODES + "change", "if not graphics and not compute:", "if not graphics and not compute:\n        require(False)"
    ),
    "5.6/preemption-rises": Start(MODES + "change", "require(compute <= CTA)"),
    "5.6/preemption-does-not-fall": Edit(PREEMPTION, " and compute >= self.compute", ""),
    "5.6/preemption-of-both": Edit(PREEMPTION, "require(not (graphics == GFXP and compute == CILP))", NO_CHECK),
    "5.6/preemption-unknown": [
        Edit(PREEMPTION, "graphics & GRAPHICS_MODES and", ""),
        Edit(PREEMPTION, "compute & COMPUTE_MODES and", ""),
    ],
    # 5.7
    "5.7/notifier-mem-0": Edit(NOTIFIER, "require(arg.mem)", "require(arg.mem, errno.EBADF)"),
    "5.7/notifier-bad-fd": Edit(
        NOTIFIER, 'needed(dmabuf_or_none(call, "mem"))', 'needed(dmabuf_or_none(call, "mem"), errno.EBADF)'
    ),
    "5.7/notifier-outside": [
        Edit(NOTIFIER, "require(arg.offset + NOTIFIER_SIZE <= buffer.length)", NO_CHECK),
        Edit(NOTIFIER, "arg.offset + NOTIFIER_SIZE <=", "arg.offset + NOTIFIER_SIZE <"),
    ],
    "5.7/notifier-is-zeroed": [
        Edit(C + "Notifier.clear", "bytes(NOTIFIER_SIZE)", "b''"),
        Edit(C + "Notifier.clear", "bytes(NOTIFIER_SIZE)", "bytes(2 * NOTIFIER_SIZE)"),
        Start(NOTIFIER, "require(call.arg.size)"),
    ],
    "5.7/notifier-old-goes-first": Edit(NOTIFIER, "    channel.set_notifier(None)\n", ""),
    "5.7/notifier-keeps-its-buffer": Start(C + "DriverChannel.fault", "self.set_notifier(None)"),
    "5.7/syncpoint-is-made-once": Edit(
        CC + "get_user_syncpoint",
        "if channel.syncpoint is None:",
        "if channel.syncpoint is not None:\n        channel.syncpoint.release()\n    if True:",
    ),
    "5.7/syncpoints-differ": Edit(CC + "get_user_syncpoint", "channel.syncpoint.id", "7"),
    "5.7/syncpoint-in-the-drivers-range": Edit(CC + "get_user_syncpoint", "channel.syncpoint.gpu_va\n", "0x10000000\n"),
    "5.7/submit-usermode": Edit(CC + "submit_gpfifo", "require(not file.channel.set_up)", NO_CHECK),
    "5.7/submit-unserviceable": Edit(
        CC + "submit_gpfifo", "require(file.channel.serviceable, errno.ETIMEDOUT)", NO_CHECK
    ),
    "5.7/submit-without-ring": Edit(CC + "submit_gpfifo", "raise Errno(errno.ENOMEM)", "raise Errno(errno.EINVAL)"),
    "5.7/timedout-after-reset": Edit(C + "DriverChannel.serviceable", " and not self.faulted", ""),
    "5.7/timeouts": [
        Start(CC + "set_timeout", "require(call.arg.timeout)"),
        Start(CC + "set_timeout", "require(call.arg.timeout <= 3000)"),
    ],
    "5.7/wait-unserviceable": Edit(W + "wait", "require(channel.serviceable, errno.ETIMEDOUT)", NO_CHECK),
    "5.7/wait-type": Edit(
        W + "wait",
        "require(kind == k.NVGPU_WAIT_TYPE_NOTIFIER)",
        "require(kind == k.NVGPU_WAIT_TYPE_NOTIFIER, errno.ENOSYS)",
    ),
    "5.7/wait-bad-fd": Edit(
        W + "_semaphore",
        'needed(dmabuf_or_none(call, "condition.semaphore.dmabuf_fd"))',
        'needed(dmabuf_or_none(call, "condition.semaphore.dmabuf_fd"), errno.EBADF)',
    ),
    "5.7/wait-odd-offset": Edit(W + "_semaphore", "require(where.offset % 4 == 0)", "where.offset &= 0xFFFFFFFC"),
    "5.7/wait-outside": [
        Edit(W + "_semaphore", "where.offset + 4 <= buffer.length and", ""),
        Edit(W + "_semaphore", "where.offset + 4 <= buffer.length", "where.offset + 16 <= buffer.length"),
    ],
    "5.7/wait-is-over": Edit(W + "_semaphore", "lambda: os.pread(buffer.fd, 4, offset) == wanted", "lambda: False"),
    "5.7/wait-times-out": Edit(
        W + "_sleep", "require(in_time or done(), errno.ETIMEDOUT)", "require(in_time, errno.EIO)"
    ),
    "5.7/wait-of-a-killed-channel": [
        Edit(C + "DriverChannel.wake", "self.semaphore_waiters.wake()", NO_CHECK),
        Edit(W + "_sleep", "return None", "require(channel.serviceable, errno.EIO)"),
    ],
    "5.7/wait-does-not-lock": Start(
        CC + "get_timedout", "require(not file.channel.semaphore_waiters.waiters, errno.EBUSY)"
    ),
    "5.7/wait-for-notifier": Edit(W + "_notifier", "os.pwrite(buffer.fd, seen[:14], offset)", NO_CHECK),
    "5.7/wait-for-notifier-times-out": Edit(W + "_notifier", "raise Errno(errno.EINTR) from None", "raise"),
    "5.7/wait-notifier-outside": Edit(
        W + "_notifier", "NOTIFICATION.size <= buffer.length", "NOTIFICATION.size <= buffer.length, errno.ENOMEM"
    ),
    "5.7/wait-wakes-at-the-interrupt": Edit(
        "tegrad.orin.recovery.non_stall", "channel.semaphore_waiters.wake()", NO_CHECK
    ),
    "5.7/channel-enable": _refuses(CC + "enable"),
    "5.7/channel-disable": _refuses(CC + "disable"),
    "5.7/channel-preempt": _refuses(CC + "preempt"),
    "5.7/preempt-needs-tsg": _accepts(CC + "preempt"),
    "5.7/force-reset": [
        Edit(CC + "force_reset", "NotifierCode.RESETCHANNEL_VERIF_ERROR", "NotifierCode.GR_EXCEPTION"),
        Edit("tegrad.orin.tsg.Tsg.recover", "for channel in list(self.channels):", "for channel in self.channels[:1]:"),
        Edit(C + "Notifier.set", '"<H", NOTIFIER_ERROR', '"<H", 1'),
        _accepts(CC + "force_reset"),
    ],
    "5.7/force-reset-of-one": Edit(
        "tegrad.orin.tsg.Tsg.recover",
        "for channel in list(self.channels):",
        "for channel in list(self.driver.channels.values()):",
    ),
    "5.7/no-boosted-context": _accepts(CC + "set_boosted_ctx"),
    "5.7/set-nvmap-fd": Start(CC + "accept", "require(call.files['fd'] is not None)"),
    "5.7/no-channel-event-id-ctrl": Item(CC + "HANDLERS", "io.NVGPU_IOCTL_CHANNEL_EVENT_ID_CTRL.request", "accept"),
    "5.7/no-channel-set-runlist-interleave": Item(
        CC + "HANDLERS", "io.NVGPU_IOCTL_CHANNEL_SET_RUNLIST_INTERLEAVE.request", "accept"
    ),
    "5.7/zcull-needs-tsg": _accepts(CC + "zcull_bind"),
    "5.7/syncpoint-of-a-closed-channel": Edit(
        "tegrad.orin.syncpoint.Syncpoint.make_safe", "self.pool.advance(self.id, SAFE_STEP)", NO_CHECK
    ),
}
