"""The opened NV device, buffers on it and kernels by hand.

tinygrad is imported inside: the environment decides what it does.
"""

from typing import Any


def device() -> Any:
    """The opened NV device."""
    from tinygrad import Device

    return Device["NV"]


def buffer(values: Any) -> Any:
    """An NV buffer that holds a numpy array."""
    from tinygrad import Tensor

    return Tensor(values).realize().uop.base.buffer


def raw(source: str, name: str, pointers: int, ints: int = 0, **options: Any) -> Any:
    """A hand-written CUDA kernel as a program: pointers first, then 32-bit integers."""
    from tinygrad import dtypes
    from tinygrad.device import TinyELF
    from tinygrad.helpers import Target

    from tegrad.nv.compilers import compile_cuda

    dev = device()
    signature = [(f"p{i}", i, dtypes.float, (1,)) for i in range(pointers)]
    signature += [(f"n{i}", pointers + i, dtypes.int, ()) for i in range(ints)]
    lib = compile_cuda(source, dev.arch, cache=False, **options)
    return dev.runtime(TinyELF(lib, name, Target("NV", arch=dev.arch), tuple(signature)))
