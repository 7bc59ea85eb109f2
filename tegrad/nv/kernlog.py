"""What the kernel log says about a fault of ours: nvgpu has no ioctl that tells an address, a refused QMD or a method.

The driver logs a fault as a block of lines that ends with one `error notifier set to ...` per channel. Reading the log
often needs a privilege; without it a fault is reported with less detail. Line shapes: L4T r36.4.3 nvgpu.
"""

import re
import time
from collections.abc import Collection, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass

from tegrad.hw.faults import SkedBit, bit_names
from tegrad.uapi.errors import DriverError
from tegrad.uapi.kernel import Kernel
from tegrad.uapi.kmsg import records

BLOCK_END_WAIT_S = 0.05
"""How long to wait for the end of a block: the driver writes the notifier just before the line about it."""

_NOTIFIER = re.compile(r"error notifier set to \d+ for ch (\d+)")
_MMU = re.compile(
    r"\[MMU FAULT\].*ch id:\s*(\d+), fault addr:\s*(0x[0-9a-fA-F]+)(?:.*fault type: (.+), access type: (.+))?"
)
_CLIENT = re.compile(r"\[MMU FAULT\].*client type:\s*(\w+), client id:\s*(\S+), gpc id if client type is gpc:\s*(\d+)")
_SKED = re.compile(r"sked exception: esr (0x[0-9a-fA-F]+)")
_REASON = re.compile(
    r"(PBDMA intr \w+|ctxnotvalid|hce_\w+|(?:class error|invalid (?:method )?class) .*|ce launch error.*)"
)
_KERNEL = re.compile(r"in kernel (\w+)")
_THREAD = re.compile(r"CTA \([\d, ]+\), thread \([\d, ]+\) \(warp \d+, lane \d+\)")
_EXACT = re.compile(r"\b(?:read|write|atomic) of \d+ bytes at (0x[0-9a-f]+)")


@dataclass(frozen=True, slots=True)
class FaultReport:
    """One fault as the log tells it; what it does not tell is None or empty.

    `address` is the page's in an MMU fault and exact where a line gives the access itself; `reason` the cause in the
    driver's words; `kernel` and `thread` are known only where something below tells them. `lines` is the whole block.
    """

    lines: tuple[str, ...]
    address: int | None = None
    reason: str = ""
    kernel: str | None = None
    thread: str | None = None


def position(kernel: Kernel) -> int:
    """The sequence number after the last line of now: what comes later is news."""
    with suppress(DriverError):
        return max((record.sequence + 1 for record in records(kernel)), default=0)
    return 0


def fault_report(kernel: Kernel, channels: Collection[int], since: int = 0) -> FaultReport | None:
    """The last fault of one of these channels (by id) that was logged from `since` on.

    None if the log may not be read or says nothing of one.
    """
    deadline = time.monotonic() + BLOCK_END_WAIT_S
    block: Sequence[str] = ()
    with suppress(DriverError):
        while True:
            block = _block(kernel, channels, since) or block
            if any(_NOTIFIER.search(line) for line in block) or time.monotonic() > deadline:
                break
            time.sleep(BLOCK_END_WAIT_S / 20)
    return _read(block) if block else None


def _block(kernel: Kernel, channels: Collection[int], since: int) -> Sequence[str]:
    """The last block of lines that is about one of the channels."""
    found: Sequence[str] = ()
    for block in _blocks(record.text for record in records(kernel, since)):
        about = {int(match[1]) for line in block for match in (_NOTIFIER.search(line), _MMU.search(line)) if match}
        if about & set(channels):
            found = block
    return found


def _blocks(lines: Iterable[str]) -> list[list[str]]:
    """Lines up to and with the notifier lines that end a fault; the rest is the last block."""
    blocks: list[list[str]] = [[]]
    for line in lines:
        if not _NOTIFIER.search(line) and blocks[-1] and _NOTIFIER.search(blocks[-1][-1]):
            blocks.append([])
        blocks[-1].append(line)
    return blocks


def _read(block: Sequence[str]) -> FaultReport:
    text = "\n".join(block)
    exact, page = _EXACT.search(text), _MMU.search(text)
    address = int(exact[1], 16) if exact else int(page[2], 16) if page else None
    kernel, thread = _KERNEL.search(text), _THREAD.search(text)
    return FaultReport(
        tuple(block), address, _reason(text), kernel[1] if kernel else None, thread[0] if thread else None
    )


def _reason(text: str) -> str:
    if page := _MMU.search(text):
        client = _CLIENT.search(text)
        by = "" if client is None else f" by {client[1]} client {client[2]}"
        return f"{page[4]} ({page[3]}){by}" if page[3] else by.strip()
    if sked := _SKED.search(text):
        bits = (name.lower().replace("_", " ") for name in bit_names(SkedBit, int(sked[1], 16)))
        return f"launch refused: {', '.join(bits)}"
    other = _REASON.search(text)
    return other[1].strip() if other else ""
