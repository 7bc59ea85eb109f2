"""What a self-test runs on: which driver is below, since some stages have meaning on one of them alone."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path

from tegrad.conformance.rig import CTRL, LEGACY_CTRL, NVMAP
from tegrad.nv.kernel import board_asked
from tegrad.uapi.releases import ROOT, desktop, tegra

SERVER_NODE = "/dev/nvidiactl"


class Place(StrEnum):
    """A driver that tegrad runs on."""

    ORIN = "an Orin's driver (nvgpu)"
    SERVER = "NVIDIA's driver of desktops and servers"


ANYWHERE = (Place.ORIN, Place.SERVER)


def place(root: Path = ROOT) -> Place:
    """The driver of this machine, or of the board that was asked for; an Orin's where there is none.

    An Orin may have the nodes of its display's driver too, which is NVIDIA's for desktops: its own come first.
    """
    nodes = (NVMAP, CTRL, LEGACY_CTRL)
    if board_asked() or tegra(root) or any((root / node[1:]).exists() for node in nodes):
        return Place.ORIN
    return Place.SERVER if desktop(root) or (root / SERVER_NODE[1:]).exists() else Place.ORIN
