"""Stage 1: what this machine is. Reads files and, of an Orin, opens nodes; no ioctl is made."""

from __future__ import annotations

import grp
import os
import platform
import re
from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path

from tegrad._python import complaint
from tegrad.conformance.rig import CTRL, FENCE, LEGACY_CTRL, NVMAP
from tegrad.diag import drivers
from tegrad.diag.finding import Finding
from tegrad.diag.selftest.child import NEEDS
from tegrad.diag.selftest.place import Place, place
from tegrad.diag.selftest.stage import Notes, Value
from tegrad.errors import TegradError
from tegrad.machine import Clock, clocks, power_mode, text
from tegrad.nv.kernel import pick_kernel
from tegrad.uapi.releases import ROOT, l4t

PAGE = 4096
"""Bytes of a page that tegrad is made for; Jetson's kernels have it."""
ON_A_BOARD = "on a machine without a Jetson's GPU: TEGRAD_BOARD=agx-orin-64gb tegrad selftest"


def machine(notes: Notes, root: Path = ROOT) -> None:
    """Release, kernel, page size, Python, groups, nodes, power mode, clocks."""
    here = place(root)
    notes.fact("here is", str(here))
    with notes.step("release"):
        if here is Place.ORIN:
            found = l4t(root)
            notes.fact("l4t", f"r{found.version} ({found.row.name}), by {found.told_by}" if found else "none found")
            _judge(notes, "a release that tegrad drives", drivers.release(root))
        else:
            if models := sorted(chips(root)):
                notes.fact("chip", ", ".join(models))
            _judge(notes, "a driver that tegrad drives", drivers.driver(root))
            _judge(notes, "a whole GPU", drivers.mig(root))
    with notes.step("kernel and Python"):
        size = os.sysconf("SC_PAGE_SIZE")
        notes.fact("kernel", f"{platform.system()} {platform.release()} {platform.machine()}")
        notes.fact("page size", size)
        notes.fact("python", platform.python_version())
        notes.fact("groups", sorted(_groups()))
        notes.expect(size == PAGE, f"pages of {PAGE} bytes", f"{size} bytes", "boot a kernel with 4 KiB pages")
        notes.expect(not complaint(), "a Python that tegrad runs on", platform.python_version(), complaint())
    with notes.step("what stages need"):
        for name, lacks in NEEDS.items():
            notes.fact(name, lacks() or "there")
    with notes.step("power and clocks"):
        if mode := power_mode(root):
            notes.fact("power mode", str(mode))
        notes.fact("clocks", {one.name: _told(one) for one in clocks(root)})
    with notes.step("nodes"):
        if here is Place.ORIN:
            _nodes(notes)
        else:
            _server_nodes(notes, root)


def _told(clock: Clock) -> dict[str, Value]:
    """What is known of a clock, but for its name."""
    return {name: value for name, value in asdict(clock).items() if value and name != "name"}


def chips(root: Path) -> Iterator[str]:
    """The GPUs by name, as NVIDIA's driver of desktops and servers tells; nothing where a container hides it."""
    for path in (root / "proc/driver/nvidia/gpus").glob("*/information"):
        if name := re.search(r"^Model:\s*(.+)$", text(path), re.MULTILINE):
            yield name[1].strip()


def _nodes(notes: Notes) -> None:
    kernel = pick_kernel()
    there = {path: kernel.exists(path) for path in (NVMAP, CTRL, LEGACY_CTRL, FENCE)}
    notes.fact("nodes", there)
    ctrl = CTRL if there[CTRL] else LEGACY_CTRL
    for path in (NVMAP, ctrl):
        notes.expect(there[path], f"the node {path}", f"no such node; {ON_A_BOARD}")
        try:
            kernel.close(kernel.open(path))
        except TegradError as error:
            notes.expect(False, f"{path} opens", error, "sudo usermod -aG video $USER, then log in again")
    if not there[FENCE]:
        notes.line(f"no {FENCE}: waits use CHANNEL_WAIT or the clock")


def _server_nodes(notes: Notes, root: Path) -> None:
    for finding in drivers.nvidia(root):
        notes.fact("nodes", finding.detail)
        notes.expect(finding.state == "ok", "the driver's nodes, open to this user", finding.detail, finding.remedy)


def _judge(notes: Notes, expected: str, findings: Iterable[Finding]) -> None:
    for finding in findings:
        notes.expect(finding.state != "missing", expected, finding.detail, finding.remedy)
        if finding.state == "warn":
            notes.line(": ".join(filter(None, (finding.detail, finding.remedy))))
        else:
            notes.fact(finding.name, finding.detail)


def _groups() -> Iterator[str]:
    for number in os.getgroups():
        with suppress(KeyError):
            yield grp.getgrgid(number).gr_name
