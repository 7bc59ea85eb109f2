"""Executes PTX kernels on the CPU: `ptx.load(text).launch(grid, block, args)` on numpy arrays.

PTX text is parsed (`parser`), analysed (`analysis`) and written as LLVM IR in which a warp is a vector of 32 lanes
(`emitter`, with the semantics of each family of instructions in a module of its own); `schedule` runs warps, barriers
and CTAs; `jit` compiles and caches. Nothing here knows of a GPU's drivers, memory manager or machine code.
"""

from tegrad.ptx.errors import PtxError, PtxFault
from tegrad.ptx.launch import DEFAULT_WINDOWS, HOST, AbortFlag, Dim, Memory, Stats, Windows
from tegrad.ptx.module import LoadedKernel, Module, load
from tegrad.ptx.syntax import Param, Variable

__all__ = [
    "DEFAULT_WINDOWS", "HOST", "AbortFlag", "Dim", "LoadedKernel", "Memory", "Module", "Param", "PtxError", "PtxFault",
    "Stats", "Variable", "Windows", "load",
]  # fmt: skip
