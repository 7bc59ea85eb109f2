"""Where this process runs models, settled before tinygrad is imported, and what runs a model there."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from glob import glob
from typing import TYPE_CHECKING, Final

from tegrad import kept
from tegrad.llm.errors import ModelError, UnsupportedModelError
from tegrad.nv.kernel import CTRL_NODE, DESKTOP_NODE, emulated

if TYPE_CHECKING:
    from tegrad.llm.engine import Engine
    from tegrad.llm.gguf import Gguf, Progress
    from tegrad.llm.session import Session

GPU_FILES: Final = (CTRL_NODE, DESKTOP_NODE)
"""What a Jetson's and a desktop's NVIDIA driver offer."""
EMULATED: Final = "agx-orin-64gb"
EMULATED_WAIT_MS: Final = "600000"
"""Without progress until a board's GPU counts as hung, unless said: a real prompt is a minute's kernel."""


def say(note: str) -> None:
    """One line on stderr, as the commands say it."""
    print(f"tegrad: {note}", file=sys.stderr)


def choose_gpu(number: int) -> None:
    """Let this process and those that it starts have one GPU alone, by its number from 0, before tinygrad is
    imported. It is the only one of programs that use CUDA, too: the benches' peers."""
    first, *others = (os.environ.get("DEV") or "NV").split(";")
    interface, _, device = first.rpartition("+")
    os.environ["DEV"] = ";".join((f"{interface.partition(':')[0]}:{number}+{device}", *others))
    os.environ |= {"CUDA_DEVICE_ORDER": "PCI_BUS_ID", "CUDA_VISIBLE_DEVICES": str(number)}


def gpus() -> int | None:
    """How many GPUs this machine has; None where there is none, and each process may have an emulated one."""
    if emulated() or not any(map(os.path.exists, GPU_FILES)):
        return None
    return len(glob("/dev/nvidia[0-9]*")) or 1


def choose_device(device: str | None = None, tell: Callable[[str], None] = say) -> None:
    """Settle where this process runs, before tinygrad is imported: NV unless `device` or DEV says otherwise, an
    emulated Orin if there is no GPU. What a user should know goes to `tell`, stderr unless said."""
    _keep_kernels(tell)
    _compile_here()
    from tegrad.nv import import_tinygrad, install

    if settle_device(device, tell):
        install()
    else:
        import_tinygrad()


def settle_device(device: str | None = None, tell: Callable[[str], None] = say) -> bool:
    """The variables by which `choose_device` settles it, for processes that this one starts, too; whether it is NV."""
    os.environ["DEV"] = os.environ.get("DEV") or "NV"
    target = device or os.environ["DEV"]
    if target.rpartition("+")[2].partition(":")[0].upper() != "NV":
        return False
    if not os.environ.get("TEGRAD_BOARD") and not any(os.path.exists(name) for name in GPU_FILES):
        os.environ["TEGRAD_BOARD"] = EMULATED
        tell(f"no GPU found, running on an emulated {EMULATED} (TEGRAD_BOARD, or DEV, chooses another)")
    if os.environ.get("TEGRAD_BOARD"):
        os.environ.setdefault("HCQDEV_WAIT_TIMEOUT_MS", EMULATED_WAIT_MS)
    return True


def _keep_kernels(tell: Callable[[str], None]) -> None:
    """Turn tinygrad's cache off where its folder cannot be written: it would raise at the first kernel."""
    folder = kept.cache_folder() / "tinygrad"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        writable = os.access(folder, os.W_OK)
    except OSError:
        writable = False
    if not writable and "CACHEDB" not in os.environ:
        os.environ["CACHELEVEL"] = "0"
        tell(f"{folder} cannot be written, so kernels are compiled anew each time")


def _compile_here() -> None:
    """Let tinygrad compile in this process: each of its workers imports tinygrad first, which takes longer than a
    model's few dozen kernels. Kernel search (BEAM) keeps the workers."""
    if not os.environ.get("BEAM"):
        os.environ.setdefault("PARALLEL", "0")


def described(device: str) -> str:
    """The device in words, as the figures name it."""
    board = os.environ.get("TEGRAD_BOARD")
    return f"{device}, emulated {board}" if board and device.startswith("NV") else device


def speaker(
    file: Gguf,
    context: int | None = None,
    device: str | None = None,
    *,
    q8: bool = False,
    reach: int | None = None,
    progress: Progress | None = None,
    tell: Callable[[str], None] = say,
) -> tuple[Engine | Session, str]:
    """A conversation on a device, the one that DEV names unless said, and what runs its steps.

    That is our kernels ("kernels") where they run the device and the model, else tinygrad's operations ("operations").
    `q8` keeps keys and values in q8_0, for which ModelError where our kernels do not run; `reach` and `progress` are
    `Engine`'s. Why tinygrad's operations run in our kernels' place goes to `tell`.
    """
    from tegrad.llm import engine
    from tegrad.nv.toolchain import CompilerMissing

    if engine.suits_named(device):
        try:
            made = engine.Engine(file, context, device=device, q8=q8, reach=reach, progress=progress)
            return made, "kernels"
        except (UnsupportedModelError, CompilerMissing) as error:
            if q8:
                raise ModelError(f"{error}; tinygrad's own kernels have no q8_0 cache: choose f16") from error
            tell(f"{error}; tinygrad's own kernels run it instead")
    elif q8:
        raise ModelError("only our own kernels have a q8_0 cache, and they do not run this device: choose f16")
    from tegrad.llm.model import Model
    from tegrad.llm.session import Session

    return Session(Model(file, device, progress=progress), context), "operations"
