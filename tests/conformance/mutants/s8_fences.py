"""Mutants of section 8."""

from mutation import Edit, Item, Mutant

FENCES = "tegrad.orin.fences."
FENCE = "tegrad.orin.syncpoint."
CREATE, EXTRACT, TRIGGER = FENCES + "create_fence", FENCES + "fence_extract", FENCES + "trigger_pollfd"
REACHED = FENCE + "Syncpoints.reached"
ARM = "fence.arm(arg.id, arg.threshold)"

MUTANTS: dict[str, Mutant | list[Mutant]] = {
    "8/fence-reached": Edit(FENCES + "FenceFile.arm", "self.look(number)", "pass"),
    "8/fence-ahead": Edit(CREATE, ARM, "fence.make_readable()"),
    "8/fence-wraps": [
        Edit(REACHED, "(self.values[number] - threshold) % WRAP < WRAP // 2", "self.values[number] >= threshold"),
        Edit(REACHED, "WRAP // 2", "WRAP // 4"),
    ],
    "8/fence-wakes": [
        Edit(FENCE + "Syncpoints.advance", "for fence in list(self.fences):", "for fence in ():"),
        Edit(FENCE + "Syncpoint.make_safe", "self.pool.advance(self.id, SAFE_STEP)", "pass"),
    ],
    "8/fence-unknown": Edit(CREATE, "require(arg.id < SYNCPOINT_COUNT)", "arg.id %= SYNCPOINT_COUNT"),
    "8/fence-reserved": Edit(CREATE, "require(arg.reserved[0] == 0)", "pass"),
    "8/fence-of-others": Edit(
        CREATE,
        "require(arg.id < SYNCPOINT_COUNT)",
        "require(arg.id < SYNCPOINT_COUNT and file.driver.channels and file.process.pid in "
        "[c.process.pid for c in file.driver.channels.values()])",
    ),
    "8/extract-fence": [
        Edit(EXTRACT, "fence.id, fence.threshold", "fence.threshold, fence.id"),
        Edit(EXTRACT, "arg.num_fences = 1", "pass"),
    ],
    "8/extract-count": Edit(EXTRACT, "arg.num_fences = 1", "pass"),
    "8/extract-signalled": Edit(EXTRACT, "require(fence)", "require(fence and fence.waits)"),
    "8/extract-closed": Edit(EXTRACT, "require(fence)", "require(fence, errno.EBADF)"),
    "8/extract-no-fence": Edit(EXTRACT, "require(fence)", "require(fence, errno.ENOTTY)"),
    "8/extract-bad-address": Edit(EXTRACT, "require(left == 0, errno.EFAULT)", "pass"),
    "8/pollfd-idle": Edit(
        FENCES + "create_pollfd",
        'call.install("fd", PollFile(file.driver, file.process))',
        'made = PollFile(file.driver, file.process); made.make_readable(); call.install("fd", made)',
    ),
    "8/pollfd-triggered": Edit(TRIGGER, "found.arm(", "found.make_readable(); (lambda *_: None)("),
    "8/pollfd-reached": Edit(FENCES + "FenceFile.arm", "self.look(number)", "pass"),
    "8/pollfd-several": Edit(TRIGGER, "require(found)", "require(found and not found.waits)"),
    "8/pollfd-refused": [
        Edit(TRIGGER, "require(found)", "found = found or PollFile(file.driver, file.process)"),
        Edit(TRIGGER, "require(call.arg.id < SYNCPOINT_COUNT)", "call.arg.id %= SYNCPOINT_COUNT"),
    ],
    "8/fence-unknown-command": Item(
        "tegrad.orin.files.DECODERS", '"fence"', 'Decoder("X", 0, 255, None, errno.EINVAL)'
    ),
}
