"""Mutants of section 6: most of them in the GPU's process."""

from mutation import Edit, Mutant, Start

H, DECODE = "tegrad.orin.host.HostChannel.", "tegrad.hw.gpfifo.decode_gp_entry"
S = "tegrad.orin.scheduler.Scheduler."
NO_CHECK = "pass"
RING = S + "_ring"
OPCODES = "not in (GpOpcode.NOP, GpOpcode.GP_CRC, GpOpcode.PB_CRC)"


def _refused(condition: str) -> Mutant:
    """An entry of which this is true kills its channel."""
    return Start(H + "_entry", f"if {condition}: raise self._pbdma(PbdmaIntr0.GPENTRY, 'mutant')")


MUTANTS: dict[str, Mutant | list[Mutant]] = {
    "3.9/doorbell-of-another-process": Start(
        "tegrad.orin.ctrl.mmap_registers_check",
        "owners = [c.process for c in file.driver.channels.values()]\nrequire(not owners or file.process in owners)",
    ),
    "6.1/entry-runs": Edit(H + "_entry", "if entry.dwords:", "if False:"),
    "6.1/nop-entry": _refused("not raw"),
    "6.1/opcode-2": _refused("raw == 2 << 32"),
    "6.1/opcode-3": _refused("raw == 3 << 32"),
    "6.1/illegal-opcode": Edit(H + "_entry", OPCODES, "not in (0, 1, 2, 3)"),
    "6.1/unknown-opcode": Edit(H + "_entry", OPCODES, "== 1"),
    "6.1/sync-entry": _refused("raw >> 63"),
    "6.1/subroutine-entry": _refused("raw >> 41 & 1"),
    "6.1/conditional-entry": _refused("raw & 1"),
    "6.1/entry-length": Edit(H + "_entry", "self._fetch(entry.va, entry.dwords)", "self._fetch(entry.va, 12)"),
    "6.1/long-entry": Edit(
        H + "_entry", "self._fetch(entry.va, entry.dwords)", "self._fetch(entry.va, entry.dwords & 0xFFF)"
    ),
    "6.1/entry-at-the-limit": Edit(H + "_entry", "entry.va + 4 * entry.dwords >= VA_LIMIT", "False"),
    "6.1/unmapped-pushbuffer": Start(H + "_fetch", "return []"),
    "6.1/put-outside-the-ring": Edit(
        H + "_put", "if put >= self._entries:", "if put >= self._entries:\n        return 0"
    ),
    "6.2/get-follows-put": Edit(H + "_advance", "self._userd[Userd.GP_GET >> 2] = self._get", NO_CHECK),
    "6.2/put-is-at-0x8c": Edit(H + "_put", "return put", "return 2"),
    "6.2/reference": Edit(H + "_set_reference", "self._userd[Userd.REF >> 2] = data", NO_CHECK),
    "6.2/put-is-the-clients": Edit(H + "_put", "return put", "self._userd[Userd.GP_PUT >> 2] = 0\n    return put"),
    "6.3/put-is-not-polled": (
        Edit(H + "_main", "while not self.rung:", "while not self.rung and self._get == self._put():"),
        Edit(S + "_runnable", "(channel.state is not Wait.DOORBELL or channel.rung)", "True"),
    ),
    "6.3/one-doorbell-for-many": Edit(H + "_main", "while self._get != put:", "if self._get != put:"),
    "6.3/empty-doorbell": Edit(
        H + "_main",
        "put = self._put()\n",
        "put = self._put()\n        if put == self._get: raise self._pbdma(PbdmaIntr0.GPPTR, 'mutant')\n",
    ),
    "6.3/bad-token": Edit(RING, "channel is not None and channel.token == value", "channel is not None"),
    "6.3/ring-wraps": Edit(H + "_advance", "(self._get + 1) % self._entries", "min(self._get + 1, self._entries - 1)"),
    "6.3/full-ring": Edit(H + "_put", "return put", "return min(put, self._entries - 2)"),
    "6.3/smallest-ring": Start(
        H + "_fetch_entry", "if self._entries < 4: raise self._pbdma(PbdmaIntr0.GPPTR, 'mutant')"
    ),
    "6.3/doorbell-of-one-channel": Edit(
        RING, "channel.rung = True", "[setattr(c, 'rung', True) for c in self._channels.values()]"
    ),
    "6.3/disabled-channel": [
        Edit(S + "_runnable", "channel.enabled and", ""),
        Start("tegrad.orin.channel_calls.enable", "return"),
    ],
    "6.3/disabled-group": [
        Start("tegrad.orin.tsg_calls.disable", "return"),
        Edit("tegrad.orin.channel_calls.enable", "True", "False"),
    ],
    "6.3/preempt-enables": Edit(
        "tegrad.orin.channel_calls.preempt", 'file.driver.tell_gpu("tsg_enable", tsg.id)', NO_CHECK
    ),
    "6.3/doorbell-after-a-fault": (
        Edit("tegrad.orin.tsg.Tsg.recover", 'self.driver.tell_gpu("tsg_abort", self.id)', NO_CHECK),
        Edit("tegrad.orin.channel.DriverChannel.kill", "self.stop()", NO_CHECK),
    ),
}
