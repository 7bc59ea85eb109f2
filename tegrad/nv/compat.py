"""All that tegrad replaces in tinygrad, and all that it uses of tinygrad's own: what a port has to look at first.

tinygrad promises none of these names. `replace` is the only way by which one is replaced, and takes those of REPLACED
only; PRIVATE has the private ones that are read or called, and the functions below are their only users. Methods that
our classes override are seen in the classes. tests/nv/test_compat.py holds all three against the installed release and
against tegrad's own sources; `python tools/port.py` tells what another release has otherwise.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Mapping, Set
from typing import TYPE_CHECKING, Any, Final

from tinygrad import Device, Tensor
from tinygrad.device import Buffer
from tinygrad.dtype import DType, _to_np_dtype
from tinygrad.engine import jit
from tinygrad.runtime.support.hcq import HCQBuffer

if TYPE_CHECKING:
    from tegrad.nv.gpu import GpuMethods

NV: Final = "tinygrad.runtime.ops_nv"
REPLACED: Final[Mapping[str, str]] = {
    f"{NV}.NVDevice": "the device: its memory, channels, waits, faults and end (nv/device.py)",
    f"{NV}.NVDevice.ifaces": "TegraIface, and NVIDIA's desktop driver with Hopper's classes, before tinygrad's others",
    f"{NV}.NVAllocator": "memory by its role, small buffers from slabs, copies in one submission (nv/device.py)",
    f"{NV}.NVComputeQueue": "submissions that a Jetson's and Hopper's hosts take (nv/queues.py)",
    f"{NV}.NVCopyQueue": "as the compute queue; addresses of mapped CPU buffers",
    f"{NV}.NVSignal": "signals that are waited for in the driver (nv/queues.py)",
    f"{NV}.NVProgram": "loading of our compilers' cubins, and limits of a launch (nv/program.py)",
    f"{NV}.QMD": "launch descriptors of version 4, and 3's fields that tinygrad has wrong (nv/qmd.py)",
    f"{NV}.elf_loader": "relocations that tinygrad's loader lacks (nv/program.py)",
    f"{NV}.CUDARenderer": "tinygrad's CUDA C, repaired and compiled by NVRTC and nvJitLink (nv/renderers.py)",
    f"{NV}.PTXRenderer": "tinygrad's PTX, repaired and assembled (nv/renderers.py)",
    "tinygrad.device.Device._Device__get_canonicalized_item": "NV devices that can be closed and opened again",
    "tinygrad.engine.jit.CapturedJit.__call__": "what a TinyJit has captured is replayed as recordings (nv/jit.py)",
    "tinygrad.engine.jit.CapturedJit.free_intermediates": "gives the recordings back, too",
    "tinygrad.engine.jit._prepare_jit_inputs": "what TinyJit learns of its inputs, learned once (nv/inputs.py)",
    "tinygrad.uop.ops.UOp.contiguous_view": "views at 16-byte offsets only, which vector loads need (nv/codegen.py)",
    "tinygrad.codegen.opt.heuristic.hand_coded_optimizations": "matrix-vector products by a warp (nv/matvec.py)",
    "tinygrad.codegen.gpudims._group_dims": "blocks of more than three dimensions keep warps whole (nv/codegen.py)",
    "tinygrad.helpers.diskcache_get": "a damaged cache is a warning (nv/diskcache.py)",
    "tinygrad.helpers.diskcache_put": "a full disk is a warning",
}
"""What is replaced, and by what or what for."""
PROFILED: Final[Mapping[str, str]] = {
    "tinygrad.engine.realize.track_stats": "bytes of each call, and copies into memory that the CPU shares",
}
"""What is replaced only while a program is profiled (nv/profiling.py)."""
PRIVATE: Final[Mapping[str, str]] = {
    "tinygrad.device.Device._opened_devices": "names of the devices that are open",
    "tinygrad.device.Device._devices": "names of the devices that there are",
    "tinygrad.device.Buffer._buf": "the runtime's buffer of an allocated Buffer",
    "tinygrad.device.Buffer._bufs": "those of other devices' views of it, by device",
    "tinygrad.device.Allocator._copyin": "copies of tinygrad's own, in programs that run without us, too",
    "tinygrad.device.Allocator._copyout": "as _copyin",
    "tinygrad.device.Allocator._alloc": "memory that no cache has, in the benchmark of that",
    "tinygrad.device.Allocator._free": "as _alloc",
    "tinygrad.device.Allocator._unmap": "ends another device's mapping of a buffer",
    "tinygrad.dtype._to_np_dtype": "numpy's type of a tensor's elements",
    "tinygrad.engine.jit._copy_input": "an input that the captured work writes, copied",
    "tinygrad.engine.jit.CapturedJit._written_uops": "which inputs it writes",
    "tinygrad.runtime.support.hcq.HCQCompiled._is_cpu": "whether a buffer's owner is the CPU",
    "tinygrad.runtime.support.hcq.HCQBuffer._base": "the buffer that a view is of",
    "tinygrad.runtime.support.hcq.HCQBuffer._devs": "devices that have it mapped",
    "tinygrad.runtime.support.hcq.HCQBuffer._mappings": "how they have",
    "tinygrad.tensor.Tensor._device_seeds": "random numbers' state, of each device",
    "tinygrad.tensor.Tensor._device_rng_counters": "as _device_seeds",
}
"""Private names that are used, and what for."""

_published: dict[str, Any] = {}


def found(path: str) -> tuple[Any, str]:
    """The module or class that a dotted path's last name is of, and that name."""
    owner, _, name = path.rpartition(".")
    parts = owner.split(".")
    for count in range(len(parts), 0, -1):
        if (module := sys.modules.get(".".join(parts[:count]))) is not None:
            thing: Any = module
            for part in parts[count:]:
                thing = getattr(thing, part)
            return thing, name
    return importlib.import_module(owner), name


def published(path: str) -> Any:
    """What tinygrad itself has by a name that is replaced."""
    if path in _published:
        return _published[path]
    owner, name = found(path)
    return getattr(owner, name)


def replace(path: str, ours: Any) -> None:
    """Put ours in the place of a name of REPLACED or PROFILED. KeyError for another; doing it again changes nothing."""
    if path not in REPLACED and path not in PROFILED:
        raise KeyError(f"{path} is not among the names that tegrad replaces (nv/compat.py)")
    owner, name = found(path)
    _published.setdefault(path, getattr(owner, name))
    setattr(owner, name, ours)


def replace_everywhere(path: str, ours: Any) -> None:
    """As `replace`, also where modules of tinygrad's have imported it by its name."""
    replace(path, ours)
    name, before = path.rpartition(".")[2], _published[path]
    for title, module in list(sys.modules.items()):
        if title.partition(".")[0] == "tinygrad" and vars(module).get(name) is before:
            setattr(module, name, ours)


def restore(path: str) -> None:
    """Put tinygrad's own back, for tests that show what ours is for."""
    if path in _published:
        owner, name = found(path)
        setattr(owner, name, _published[path])


# ---- private names, each used here alone


def opened_devices() -> set[str]:
    """The names of tinygrad's devices that are open; the set itself, from which one that is closed is taken."""
    opened: set[str] = Device._opened_devices
    return opened


def known_devices() -> list[str]:
    """The names of the devices that tinygrad has."""
    return list(Device._devices)


def forget_randomness(device: str | None) -> None:
    """Drop the state of a device's random numbers, which is that of its memory."""
    for state in (Tensor._device_seeds, Tensor._device_rng_counters):
        state.pop(device, None)


def memory_of(buffer: Buffer) -> HCQBuffer:
    """A buffer's memory, allocated now if it is not yet."""
    memory: HCQBuffer = buffer.ensure_allocated()._buf
    return memory


def memory_on(buffer: Buffer, device: str) -> HCQBuffer:
    """A buffer's memory as a device sees it."""
    return buffer._bufs.get(device) or buffer.ensure_allocated()._buf


def copy_in(allocator: Any, memory: Any, data: memoryview) -> None:
    """Copy bytes to the beginning of an allocator's memory."""
    allocator._copyin(memory, data)


def copy_out(allocator: Any, out: memoryview, memory: Any) -> None:
    """Copy an allocator's memory to bytes."""
    allocator._copyout(out, memory)


def allocate_and_free(allocator: Any, size: int, options: Any) -> None:
    """Allocate memory and give it back, past every cache."""
    allocator._free(allocator._alloc(size, options), options)


def unmap(mapped: HCQBuffer, device: GpuMethods) -> None:
    """End a device's mapping of another one's buffer."""
    device.allocator._unmap(mapped)


def is_nv(device: str) -> bool:
    """Whether a device of this name is NV's: "NV", "NV:1"."""
    return device == "NV" or device.startswith("NV:")


def is_cpu(owner: Any) -> bool:
    """Whether a buffer's owner is the CPU."""
    return bool(owner._is_cpu())


def share_mappings(part: Any, whole: HCQBuffer) -> None:
    """Let a buffer be mapped where another is, as a base of its own."""
    part._base, part._devs, part._mappings = None, whole._devs, whole._mappings


def numpy_type(dtype: DType) -> Any:
    """numpy's type for a tensor's elements; None where it has none."""
    return _to_np_dtype(dtype)


def inputs_as_captured(captured: Any, uops: list[Any]) -> list[Any]:
    """A captured function's inputs, copied where its work writes to them."""
    written: Set[Any] = captured._written_uops
    if written.isdisjoint(uops):
        return uops
    return [jit._copy_input(uop) if uop in written else uop for uop in uops]
