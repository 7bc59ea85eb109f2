"""tinygrad's CUDA and PTX renderers with our compilers behind them and their gaps closed.

Importing this module installs the codegen patches (`tegrad.nv.codegen`): a renderer is pickled as (class, target), so
tinygrad's spawned compile workers import it too and compile exactly as the parent does.

The class names decide how `DEV` names them: `NVCUDARenderer` is `DEV=NV:CUDA`, `NVPTXRenderer` is `DEV=NV:PTX`.
"""

import re
from collections.abc import Callable, Sequence
from typing import Any, ClassVar

from tinygrad.codegen.opt import tc
from tinygrad.device import CompileError, Compiler
from tinygrad.dtype import AddrSpace, dtypes
from tinygrad.helpers import Target
from tinygrad.renderer import Renderer
from tinygrad.renderer.cstyle import CUDARenderer
from tinygrad.renderer.ptx import PTXRenderer
from tinygrad.uop.ops import Ops, UOp

from tegrad.hw.chips import by_arch
from tegrad.nv import codegen, compilers, toolchain
from tegrad.nv.directives import Directives

codegen.install()

STATIC_SHARED_MAX = 48 << 10
"""Shared memory that a kernel may declare with a size; more must be `extern` and is given at launch."""
_POOL = "tegrad_shared"


_BITS = "union U { F f; T t; }; U u; u.f = v; return u.t;"
_OPAQUE_BITS = (
    "union U { F f; T t; unsigned short h; }; U u; u.f = v; "
    'if (sizeof(F) == 2) asm("cvt.u16.u16 %0, %0;" : "+h"(u.h)); return u.t;'
)
"""tinygrad's reinterpretation of a value, and ours, through which NVIDIA's assembler cannot see.

ptxas (12.6, 12.9 and 13.0; sm_87 and sm_90) stores the low byte of a half or bfloat16 that was just converted by
converting the number to an integer: F2I.U8.F16. On an H200 such bytes were wrong; the move costs no instruction.
"""


class KernelCompileError(compilers.CompileFailed, CompileError):  # type: ignore[misc]
    """NVIDIA's compiler refused a kernel: both ours and the error that tinygrad's kernel search expects."""


class CubinCompiler(Compiler):  # type: ignore[misc]
    """tinygrad's Compiler interface over one of our compile functions; results are cached by `key` and source."""

    def __init__(self, arch: str, key: str, compile_source: Callable[[str], bytes]) -> None:
        super().__init__(f"tegrad_{arch}_{key[:32]}")
        self.arch, self._compile = arch, compile_source

    def compile(self, src: str) -> bytes:
        """A cubin of one kernel with `.tegrad.ptx`; KernelCompileError with the compiler's log."""
        try:
            return self._compile(src)
        except compilers.CompileFailed as error:
            raise KernelCompileError(str(error)) from error

    def disassemble(self, lib: bytes) -> None:
        """Print the machine code (needs nvdisasm on the PATH)."""
        from tinygrad.runtime.support.compiler_cuda import cuda_disassemble

        cuda_disassemble(lib, self.arch)


def shared_max(arch: str) -> int:
    """Bytes of shared memory that one block may use on `arch`; tinygrad's own limit for chips without a row."""
    chip = by_arch(arch)
    return STATIC_SHARED_MAX if chip is None else chip.smem_per_cta


def beam_suffix(name: str, key: str) -> str:
    """What tinygrad's kernel search keys its results with beside the kernel: it knows no architecture of its own.

    `key` is the compiler's, which holds the architecture and the compiler's version.
    """
    return f"{name}_{codegen.made_by()}_{key[:16]}"


def pointer_alignment(uops: Sequence[UOp]) -> tuple[int, ...]:
    """For each pointer parameter, in the order of the kernel's signature, the bytes of the widest access through it."""
    pointers = [u for u in uops if u.op is Ops.PARAM and u.addrspace is AddrSpace.GLOBAL]
    widest = {u: u.dtype.itemsize for u in pointers}
    for access in uops:
        if access.op in (Ops.INDEX, Ops.SHRINK) and (base := _parameter(access)) in widest:
            widest[base] = max(widest[base], access.max_numel() * access.dtype.itemsize)
    return tuple(widest[u] for u in sorted(pointers, key=lambda u: u.arg.slot))


def _parameter(access: UOp) -> UOp:
    while access.op is not Ops.PARAM and access.src:
        access = access.src[0]
    return access


def _shared_layout(uops: Sequence[UOp]) -> tuple[dict[int, int], int]:
    """Offset of each shared buffer (by slot) in one pool, 16-byte aligned, and the size of the pool."""
    offsets, size = {}, 0
    for u in uops:
        if u.op is Ops.BUFFER and u.addrspace is AddrSpace.LOCAL:
            offsets[u.arg.slot] = size
            size += (u.max_numel() * u.dtype.itemsize + 15) // 16 * 16
    return offsets, size


class NVCUDARenderer(CUDARenderer):  # type: ignore[misc]
    """CUDA C++ through NVRTC."""

    def __init__(self, target: Target) -> None:
        Renderer.__init__(self, target)
        toolchain.require_include_dirs()
        options = ["--minimal"] if toolchain.nvrtc().version >= (12, 4) else []
        arch: str = target.arch
        key = compilers.cuda_key(arch, options)
        self.compiler = CubinCompiler(arch, key, lambda src: compilers.compile_cuda(src, arch, options, cache=False))
        self.tensor_cores = tc.get_cuda(arch)
        self.shared_max = shared_max(arch)
        self.suffix = beam_suffix("CUDA", key)

    def render_kernel(
        self, function_name: str, kernel: list[str], bufs: Any, uops: list[UOp], prefix: list[str] | None = None
    ) -> str:
        """The kernel's source; its shared buffers move into one `extern` pool when they exceed the static limit."""
        offsets, size = _shared_layout(uops)
        dynamic = size if size > STATIC_SHARED_MAX else 0
        if dynamic:
            starts = iter(offsets.values())
            kernel = [self._pooled(line, starts) for line in kernel]
        source: str = super().render_kernel(function_name, kernel, bufs, uops, prefix).replace(_BITS, _OPAQUE_BITS)
        if dynamic:
            source = f"extern __shared__ __align__(16) unsigned char {_POOL}[];\n{source}"
        return f"{Directives(dynamic, pointer_alignment(uops))}{source}"

    def _pooled(self, line: str, starts: Any) -> str:
        """`__shared__ __align__(16) float buf0[64];` becomes a pointer into the pool."""
        found = re.fullmatch(rf"(\s*){re.escape(self.smem_prefix)}(.+) (\w+)\[\d+\];", line)
        if found is None:
            return line
        indent, dtype, name = found.groups()
        return f"{indent}{dtype}* {name} = ({dtype}*)({_POOL}+{next(starts)});"


def _exact(operation: str) -> Callable[..., str]:
    """`rcp` and `sqrt` have no approximate form in double precision; the rounded one is exact."""

    def render(dest: str, source: str, dtype: Any, name: str) -> str:
        mode = ".rn" if dtype == dtypes.double else ".approx"
        return f"{operation}{mode}.{name} {dest}, {source};"

    return render


class NVPTXRenderer(PTXRenderer):  # type: ignore[misc]
    """PTX through nvJitLink, with the double-precision operations that tinygrad renders illegally repaired.

    It has no sine, so that tinygrad takes its own, which is right for every angle: the PTX ISA bounds the error of
    `sin.approx.f32` within [-pi, pi] only.
    """

    code_for_op: ClassVar[dict[Ops, Callable[..., Any]]] = {
        **{op: render for op, render in PTXRenderer.code_for_op.items() if op is not Ops.SIN},
        **({Ops.RECIPROCAL: _exact("rcp"), Ops.SQRT: _exact("sqrt")} if codegen.active("double") else {}),
    }
    if codegen.active("double"):
        extra_matcher = codegen.double_transcendentals + PTXRenderer.extra_matcher

    def __init__(self, target: Target) -> None:
        Renderer.__init__(self, target)
        arch: str = target.arch
        version = int(re.sub(r"\D", "", arch))
        key = compilers.ptx_key(arch)
        self.compiler = CubinCompiler(arch, key, lambda src: compilers.compile_ptx(src, arch, cache=False))
        self.tensor_cores = PTXRenderer.tc_sm80 if version >= 80 else tc.cuda_sm75 if version >= 75 else []
        self.shared_max = shared_max(arch)
        self.suffix = beam_suffix("PTX", key)
        isa = "8.7" if version >= 120 else "7.8" if version >= 89 else "7.5"
        self.kernel_prefix = PTXRenderer.kernel_prefix.replace("VERSION", isa).replace("TARGET", arch)

    def render_kernel(self, kernel: list[str], function_name: str, bufs: Any, regs: Any, uops: list[UOp]) -> str:
        """The kernel's PTX; its shared buffers move into one `.extern` pool when they exceed the static limit."""
        offsets, size = _shared_layout(uops)
        dynamic = size if size > STATIC_SHARED_MAX else 0
        if dynamic:
            kernel = [pooled for line in kernel for pooled in self._pooled(line, offsets)]
        text: str = super().render_kernel(kernel, function_name, bufs, regs, uops)
        if dynamic:
            text = text.replace(".visible .entry", f".extern .shared .align 16 .b8 {_POOL}[];\n.visible .entry", 1)
        return f"{Directives(dynamic, pointer_alignment(uops))}{text}"

    @staticmethod
    def _pooled(line: str, offsets: dict[int, int]) -> list[str]:
        """Drop the declaration `.shared ... local0[..]`, and take its address from the pool."""
        if line.startswith(".shared "):
            return []
        if found := re.fullmatch(r"mov\.u64 (\S+), local(\d+)\[0\];", line):
            return [f"mov.u64 {found[1]}, {_POOL};", f"add.u64 {found[1]}, {found[1]}, {offsets[int(found[2])]};"]
        return [line]
