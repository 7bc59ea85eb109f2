"""The drivers of a machine: their release, their nodes, and what MIG and containers make of them.

Every check takes the root folder that it reads (`/`), and yields nothing where it has nothing to say.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Literal

from tegrad.diag.finding import Finding
from tegrad.hw.chips import CHIPS
from tegrad.uapi.releases import ROOT, Found, State, desktop, l4t, sentence, tegra

JETSON_NODES = ("dev/nvgpu/igpu0/ctrl", "dev/nvmap")
NVIDIA_NODES = ("dev/nvidiactl", "dev/nvidia-uvm")
ORIN = "tegra234"
CONTAINER_MARKS = re.compile(r"docker|containerd|kubepods|libpod|lxc")
MIG_CONFIG = {"nvidia-cap1", "nvidia-cap2"}
"""Nodes of MIG's own configuration and monitor; those of instances have higher numbers (nvidia-caps/mig-minors)."""
STATES: Mapping[State, Literal["ok", "warn", "missing"]] = {
    State.SUPPORTED: "ok",
    State.UNTRIED: "warn",
    State.REFUSED: "missing",
}


def release(root: Path = ROOT) -> Iterator[Finding]:
    """The L4T release of a Jetson, and what it means."""
    found, chip = l4t(root), tegra(root)
    if chip and chip != ORIN:
        orins = ", ".join(one.name for one in CHIPS.values() if one.chip == "ga10b")
        remedy = "run on the emulated board: TEGRAD_BOARD=agx-orin-64gb"
        yield Finding("release", "missing", f"this Jetson is no Orin ({chip}): tegrad drives {orins}", remedy)
    elif found is not None:
        yield _told("release", "L4T r" + found.version, found)
    elif chip:
        text = "the L4T release is told by no file, package or kernel here; tegrad is made for r36"
        yield Finding("release", "warn", text, "see README's table of releases")


def driver(root: Path = ROOT) -> Iterator[Finding]:
    """The branch of NVIDIA's driver on a desktop or server, and what it means."""
    if (found := desktop(root)) is not None:
        yield _told("driver", "NVIDIA's driver " + found.version, found)


def jetson(root: Path = ROOT) -> Iterator[Finding]:
    """A Jetson's nodes."""
    model = root / "proc/device-tree/model"
    name = model.read_bytes().rstrip(b"\0").decode() if model.exists() else "Jetson"
    hand_in = "docker run --runtime nvidia" if contained(root) else "load the driver's modules"
    yield from nodes(
        "jetson", name, [root / node for node in JETSON_NODES],
        "no Jetson GPU driver (/dev/nvgpu, /dev/nvmap) on this machine", hand_in,
    )  # fmt: skip


def nvidia(root: Path = ROOT) -> Iterator[Finding]:
    """A desktop driver's nodes: the GPU that is handed to a container need not be number 0."""
    gpus = sorted(path for path in (root / "dev").glob("nvidia[0-9]*") if path.name[6:].isdigit())
    wanted = [*(root / node for node in NVIDIA_NODES), *(gpus or [root / "dev/nvidia0"])]
    make = "sudo nvidia-modprobe -u -c=0 (it makes them; on the host of a container, which then hands them in)"
    yield from nodes("nvidia", "NVIDIA driver", wanted, "no NVIDIA desktop or server driver on this machine", make)


def container(root: Path = ROOT) -> Iterator[Finding]:
    """Whether this is a container: then nodes that are missing were not handed in, whatever the host has."""
    if not contained(root):
        return
    if any((root / node).exists() for node in (*JETSON_NODES, *NVIDIA_NODES)):
        yield Finding("container", "ok", "a container, which the GPU's nodes were handed to; it needs no CUDA inside")
    elif tegra(root) or desktop(root):
        what = "a container on a machine with NVIDIA's driver, without the GPU's nodes"
        yield Finding("container", "warn", what, "docker run --gpus all (on a Jetson: --runtime nvidia)")
    else:
        yield Finding("container", "ok", "a container; no driver of NVIDIA's is seen from inside")


def mig(root: Path = ROOT) -> Iterator[Finding]:
    """MIG instances, by the driver's capabilities or by the nodes of theirs that a container was given.

    tinygrad 0.14 allocates no partition object (AMPERE_SMC_PARTITION_REF), so no instance is ever subscribed to (read).
    """
    per_gpu = sorted((root / "proc/driver/nvidia/capabilities").glob("gpu*"))
    cut = [gpu.name for gpu in per_gpu if any((gpu / "mig").glob("gi*"))]
    given = {node.name for node in (root / "dev/nvidia-caps").glob("nvidia-cap*")} - MIG_CONFIG
    if not cut and not given:
        return
    whole = len(per_gpu) - len(cut)
    which = ", ".join(cut) or "a GPU"
    remedy = "sudo nvidia-smi -mig 0, or a GPU without MIG"
    text = f"MIG instances on {which}: tegrad opens whole GPUs and no instance"
    yield Finding("mig", "warn" if whole else "missing", text, remedy)


def contained(root: Path = ROOT) -> bool:
    """Whether this process is in a container, as far as its file system tells."""
    marked = any((root / mark).exists() for mark in (".dockerenv", "run/.containerenv"))
    with suppress(OSError):
        return marked or bool(CONTAINER_MARKS.search((root / "proc/1/cgroup").read_text()))
    return marked


def nodes(name: str, what: str, wanted: Sequence[Path], absent: str, make: str) -> Iterator[Finding]:
    """A driver's device nodes: present and open to this user, present but closed, or absent."""
    there = [node for node in wanted if node.exists()]
    if not there:
        yield Finding(name, "warn", absent)
        return
    if len(there) < len(wanted):
        lacking = ", ".join(str(node) for node in wanted if node not in there)
        yield Finding(name, "warn", f"{what}: {lacking} is missing", make)
        return
    closed = [node for node in there if not os.access(node, os.R_OK | os.W_OK)]
    if closed:
        remedy = f"sudo usermod -aG {closed[0].group()} $USER, then log in again"
        yield Finding(name, "warn", f"{what}: no permission for {closed[0]}", remedy)
        return
    yield Finding(name, "ok", f"{what}: {', '.join(map(str, there))}")


def _told(name: str, what: str, found: Found) -> Finding:
    row = found.row
    text = sentence(what, row).removesuffix(f": {row.remedy}" if row.remedy else "")
    return Finding(name, STATES[row.state], f"{text} [{found.told_by}]", row.remedy)
