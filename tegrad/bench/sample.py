"""A fixed sample of tinygrad's kernels as PTX, made by its own renderers without a GPU.

The programs are those of tinygrad's operation tests in small: what a first-tier compiler meets. CUDA sources join the
sample where NVRTC is installed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

from tinygrad import Tensor, dtypes
from tinygrad.codegen import to_program
from tinygrad.codegen.opt.tc import TensorCore, get_cuda
from tinygrad.device import Compiler
from tinygrad.helpers import Target
from tinygrad.renderer import Renderer
from tinygrad.renderer.cstyle import CUDARenderer
from tinygrad.renderer.ptx import PTXRenderer
from tinygrad.uop.ops import Ops

from tegrad.nv import toolchain

ARCH, ISA = "sm_87", "7.5"
DEVICE = "CUDA"


def _of(*shape: int, dtype: object = dtypes.float32) -> Tensor:
    return Tensor.empty(*shape, dtype=dtype, device=DEVICE)


_HALF = dtypes.float16

PROGRAMS: dict[str, Callable[[], Tensor]] = {
    "add": lambda: _of(45, 65) + _of(45, 65),
    "broadcast": lambda: _of(45, 1, 7) * _of(1, 33, 7),
    "where": lambda: (_of(500) > 0).where(_of(500), 2),
    "integers": lambda: (_of(100, dtype=dtypes.int32) * 3 + 7) // 5 % 11,
    "wide-integers": lambda: (_of(100, dtype=dtypes.int64) << 3) ^ _of(100, dtype=dtypes.int64),
    "cast-half": lambda: _of(40, 50).cast(_HALF).contiguous().cast(dtypes.float32),
    "cast-bytes": lambda: _of(40, 50).cast(dtypes.uint8).cast(dtypes.int64),
    "exp": lambda: _of(45, 65).exp(),
    "sin": lambda: _of(45, 65).sin(),
    "gelu": lambda: _of(45, 65).gelu(),
    "sum": lambda: _of(64, 1000).sum(),
    "sum-rows": lambda: _of(64, 1000).sum(1),
    "max": lambda: _of(45, 65).max(0),
    "var": lambda: _of(45, 65).var(1),
    "argmax": lambda: _of(40, 57).argmax(1),
    "cumsum": lambda: _of(5, 700).cumsum(1),
    "softmax": lambda: _of(33, 70).softmax(),
    "layernorm": lambda: _of(8, 10, 64).layernorm(),
    "matmul": lambda: _of(128, 64) @ _of(64, 96),
    "matmul-odd": lambda: _of(65, 130) @ _of(130, 77),
    "matmul-half": lambda: _of(128, 64, dtype=_HALF).matmul(_of(64, 96, dtype=_HALF), dtype=dtypes.float32),
    "matvec": lambda: _of(1, 768) @ _of(768, 768),
    "conv2d": lambda: _of(2, 3, 11, 13).conv2d(_of(4, 3, 3, 3), stride=2, padding=1),
    "conv2d-grouped": lambda: _of(1, 8, 12, 12).conv2d(_of(8, 2, 3, 3), groups=4),
    "max-pool": lambda: _of(2, 3, 16, 16).max_pool2d(),
    "pad": lambda: _of(3, 3).pad(((1, 2), (3, 4))),
    "permute": lambda: _of(5, 6, 7).permute(2, 0, 1).contiguous(),
    "cat": lambda: Tensor.cat(_of(45, 65), _of(45, 10), dim=1),
    "gather": lambda: _of(50, 8)[_of(30, dtype=dtypes.int32)],
    "sort": lambda: _of(16).sort()[0],
    "attention": lambda: _of(2, 4, 24, 16).scaled_dot_product_attention(
        _of(2, 4, 24, 16), _of(2, 4, 24, 16), is_causal=True
    ),
    "cross-entropy": lambda: _of(32, 10).sparse_categorical_crossentropy(_of(32, dtype=dtypes.int32)),
}  # fmt: skip


def _renderer(kind: type[Renderer], name: str, tensor_cores: list[TensorCore]) -> Renderer:
    """A renderer for ARCH whose "compiler" leaves the text as it is."""
    renderer = object.__new__(kind)
    Renderer.__init__(renderer, Target(DEVICE, name, ARCH))
    renderer.compiler, renderer.tensor_cores = Compiler(), tensor_cores
    return renderer


def _kernels(renderer: Renderer) -> Iterator[tuple[str, bytes]]:
    """Every kernel of the programs: "program.number" and what the renderer's compiler made of it."""
    for name, build in PROGRAMS.items():
        calls = [call.src[0] for call in build().schedule_linear().src if call.src[0].op is Ops.SINK]
        for number, ast in enumerate(calls):
            program = to_program(ast, renderer)
            yield f"{name}.{number}", next(u.arg for u in program.src if u.op is Ops.BINARY)


def _ptx(text: str) -> str:
    return text.replace("VERSION", ISA).replace("TARGET", ARCH)


def kernels() -> dict[str, str]:
    """PTX text by "renderer/program.number"; identical texts appear once."""
    rendered = _kernels(_renderer(PTXRenderer, "PTX", PTXRenderer.tc_sm80))
    found = {_ptx(text.decode()): f"ptx/{name}" for name, text in rendered}
    try:
        nvrtc, flags = toolchain.nvrtc(), [f"-I{d}" for d in toolchain.require_include_dirs()]
    except toolchain.CompilerMissing:
        return {name: text for text, name in found.items()}
    for name, text in _kernels(_renderer(CUDARenderer, "CUDA", get_cuda(ARCH))):
        found.setdefault(nvrtc.compile(text.decode(), ARCH, flags).ptx, f"cuda/{name}")
    return {name: text for text, name in found.items()}
