"""tinygrad's CUDA device with this engine as the driver: real renderers and compilers, kernels run by tegrad.ptx.

`install()` must run before tinygrad opens its CUDA device. Used by tests in a process of its own.
"""

import os
import sys
import types
from pathlib import Path
from sysconfig import get_path

import numpy as np

from tegrad import ptx

KERNELS: list[str] = []
"""The PTX of every program that was loaded."""


def compiler_environment() -> dict[str, str]:
    """Where tinygrad finds NVIDIA's compilers from PyPI."""
    nvidia = Path(get_path("purelib")) / "nvidia"
    return {
        "NVRTC_PATH": str(nvidia / "cuda_nvrtc/lib/libnvrtc.so.12"),
        "NVJITLINK_PATH": str(nvidia / "nvjitlink/lib/libnvJitLink.so.12"),
        "CUDA_PATH": str(nvidia / "cuda_runtime"),
    }


def install() -> None:
    """Make `CUDA` this device."""
    from tinygrad.device import Allocator, Compiled, Program, TinyELF
    from tinygrad.renderer.cstyle import CUDARenderer
    from tinygrad.renderer.ptx import PTXRenderer

    class HostAllocator(Allocator):
        def _alloc(self, size, options):
            raw = np.zeros(size + 512, np.uint8)
            return raw[-raw.ctypes.data % 256 :]

        def _copyin(self, dest, src):
            dest[: len(src)] = np.frombuffer(src, np.uint8)

        def _copyout(self, dest, src):
            np.frombuffer(dest, np.uint8)[:] = src[: len(dest)]

        def _offset(self, buf, size, offset):
            return buf[offset : offset + size + 256]

    class EngineProgram(Program):
        def __init__(self, dev, obj):
            self.signature = obj.signature
            text = obj.lib.decode().rstrip("\0")
            KERNELS.append(text)
            self.kernel = ptx.load(text, None).kernels[obj.name]

        def __call__(self, *bufs, global_size=(1, 1, 1), local_size=(1, 1, 1), vals=(), wait=False, **kw):
            out = b"".join(b.ctypes.data.to_bytes(8, "little") for b in bufs)
            for value, (at, dt) in zip(vals, TinyELF.iter_sig(self.signature[len(bufs) :], len(bufs) * 8), strict=True):
                out = out.ljust(at, b"\0") + int(value).to_bytes(dt.itemsize, "little", signed=True)
            self.kernel.launch(tuple(global_size), tuple(local_size), out)
            return 1e-6

    class CUDADevice(Compiled):
        def __init__(self, device):
            super().__init__(device, HostAllocator(self), [CUDARenderer, PTXRenderer], EngineProgram)

    module = types.ModuleType("tinygrad.runtime.ops_cuda")
    module.CUDADevice = CUDADevice
    sys.modules["tinygrad.runtime.ops_cuda"] = module


def prepare(renderer: str) -> None:
    """Environment and installation for one renderer, PTX or CUDA."""
    os.environ.update(compiler_environment())
    os.environ.update({"DEV": f"CUDA:{renderer}:sm_87", "CCACHE": "0", "PARALLEL": "0", "CACHELEVEL": "0"})
    install()
