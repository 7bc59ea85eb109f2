"""Releases of NVIDIA's drivers: what tegrad knows of each, whether it was run or read, and what to do elsewhere.

Two tables, by the major version that a row begins with: L4T on a Jetson, driver branches on desktops and servers. The
doctor, the errors of a device that cannot be opened, and README's table say what stands here.

Sources: L4T r36.4.3 nvgpu, and r36.2 to r36.4.2, which have the same uapi. For the branches the 53 structures and 148
numbers that tinygrad 0.14 and tegrad use, compiled from each release's own headers (open-gpu-kernel-modules, 535.43.02
to 595.45.04) and compared with tinygrad's tables: its 570's below 580, its 580's below 610. The resource manager
refuses a control whose parameters have another size (resserv/src/rs_resource.c).
"""

import errno
import re
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

ROOT = Path("/")


class State(StrEnum):
    """Whether tegrad drives a release."""

    SUPPORTED = "supported"
    UNTRIED = "untried"
    REFUSED = "refused"


@dataclass(frozen=True, slots=True)
class Release:
    """Releases from major version `first` up to the next row's: their name, what is known, what to do.

    `python` is the one that comes with the system, where the release brings a system.
    """

    first: int
    name: str
    state: State
    meaning: str
    remedy: str = ""
    python: str = ""


SEND = "send `tegrad doctor --json`, the report of `tegrad selftest --all` and the last lines of `sudo dmesg`"
JETPACK_6 = "install JetPack 6 (L4T r36), by NVIDIA's SDK Manager or an SD card image of it"

L4T: Sequence[Release] = (
    Release(0, "JetPack 4 or older", State.REFUSED, "it knows no Orin, and tegrad no GPU before Orin's", JETPACK_6),
    Release(
        34,
        "JetPack 5",
        State.REFUSED,
        "its nvgpu differs: OPEN_TSG takes 8 bytes, not 24 (so ENOTTY), and MAP_BUFFER_EX wants the flag 0x100",
        JETPACK_6,
        python="3.8",
    ),
    Release(
        36,
        "JetPack 6",
        State.SUPPORTED,
        "tegrad is made from the sources of r36.4.3 (r36.2 to r36.4.2 have the same interface); "
        "run on the emulated board only",
        python="3.10",
    ),
    Release(
        38,
        "JetPack 7",
        State.UNTRIED,
        "r39.2 keeps nvgpu and the same nodes on an Orin; its interface was not found, so nobody knows what differs",
        f"try `tegrad selftest`, then `tegrad run`, and {SEND}",
        python="3.12",
    ),
)
"""Jetson's releases."""

UPGRADE = "install a driver of branch 580"
TRY = f"try `tegrad run`; where it fails, {UPGRADE}"

DESKTOP: Sequence[Release] = (
    Release(0, "before 535", State.UNTRIED, "not read and not run", UPGRADE),
    Release(
        535,
        "535 to 555",
        State.REFUSED,
        "they take GET_BUILD_VERSION_V2 as 776 bytes where tinygrad 0.14 sends 1032, so its first call fails (read)",
        UPGRADE,
    ),
    Release(560, "560 and 565", State.UNTRIED, "what tinygrad 0.14 sends is laid out as they expect (read)", TRY),
    Release(570, "570", State.UNTRIED, "tinygrad 0.14 has this branch's own structures (read)", TRY),
    Release(
        575,
        "575",
        State.REFUSED,
        "it takes GPFIFO_SCHEDULE as 3 bytes where tinygrad 0.14 sends 2, so no channel starts (read)",
        UPGRADE,
    ),
    Release(580, "580", State.SUPPORTED, "580.159.04 was run, on an H200"),
    Release(
        590, "590 and 595", State.UNTRIED, "as 580 but for what UVM_FREE answers, which then is not seen (read)", TRY
    ),
    Release(610, "610 and later", State.UNTRIED, "tinygrad 0.14 has structures for 610; tegrad was not run there", TRY),
)
"""Driver branches of desktops and servers."""

KERNELS: Mapping[str, int] = {"4.9": 32, "5.10": 35, "5.15": 36, "6.8": 38}
"""The kernel that comes with a release, for systems that keep no release file (JetPack-NixOS)."""


@dataclass(frozen=True, slots=True)
class Found:
    """A release as this machine tells it: its version ("36.4.3"), its row, and by what it was told."""

    version: str
    row: Release
    told_by: str


def row(table: Sequence[Release], major: int) -> Release:
    """The row of a major version."""
    return next(release for release in reversed(table) if release.first <= major)


def l4t(root: Path = ROOT) -> Found | None:
    """The L4T release of this Jetson: by its release file, else by its core package, else by its kernel; else None."""
    for path, pattern in (
        ("etc/nv_tegra_release", r"# R(\d+) \(release\), REVISION: ([\d.]+)"),
        ("var/lib/dpkg/status", r"^Package: nvidia-l4t-core\n(?:[^\n]+\n)*?Version: (\d+)\.([\d.]+)"),
    ):
        if match := re.search(pattern, _text(root / path), re.MULTILINE):
            return Found(f"{match[1]}.{match[2]}", row(L4T, int(match[1])), f"/{path}")
    kernel = re.match(r"\d+\.\d+", release := _text(root / "proc/sys/kernel/osrelease").strip())
    if tegra(root) and kernel and kernel[0] in KERNELS:
        major = KERNELS[kernel[0]]
        return Found(str(major), row(L4T, major), f"Linux {release}, the kernel of such a release")
    return None


def tegra(root: Path = ROOT) -> str:
    """The Tegra that this machine's device tree names ("tegra234" is Orin), "" elsewhere."""
    found = re.search(r"nvidia,(tegra\d+)", _text(root / "proc/device-tree/compatible"))
    return found[1] if found else ""


def desktop(root: Path = ROOT) -> Found | None:
    """NVIDIA's driver on this desktop or server; None where none is loaded."""
    for path in ("proc/driver/nvidia/version", "sys/module/nvidia/version"):
        if match := re.search(r"\b(\d{3})\.\d+(?:\.\d+)?\b", _text(root / path)):
            return Found(match[0], row(DESKTOP, int(match[1])), f"/{path}")
    return None


def trouble(found: Found | None, call: str, code: int | None) -> str:
    """Why a release may be what a failed call of a Jetson's driver comes from, and what to do; "" where it is not.

    `found` is what the machine tells; OPEN_TSG's ENOTTY tells of r34 and r35 where it tells nothing.
    """
    if call == "GPU_OPEN_TSG" and code == errno.ENOTTY and (found is None or found.row.state is State.SUPPORTED):
        return f"this driver seems to be {sentence('L4T r35', row(L4T, 35))}"
    if found is None or found.row.state is State.SUPPORTED:
        return ""
    if found.row.state is State.UNTRIED and code not in (errno.ENOTTY, errno.EINVAL):
        return ""
    return f"this is {sentence(f'L4T r{found.version}', found.row)}"


def sentence(what: str, release: Release) -> str:
    """A release in words: what it is, what that means, what to do."""
    end = f": {release.remedy}" if release.remedy else ""
    return f"{what} ({release.name}), {_STATES[release.state]}, since {release.meaning}{end}"


_STATES = {
    State.SUPPORTED: "which tegrad supports",
    State.UNTRIED: "which tegrad was not tried on",
    State.REFUSED: "which tegrad does not run on",
}


def _text(path: Path) -> str:
    with suppress(OSError):
        return path.read_bytes().decode(errors="replace")
    return ""
