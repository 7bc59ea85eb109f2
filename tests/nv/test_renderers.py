"""Our renderers: chosen by name, picklable, double precision that assembles, shared memory beyond 48 KiB."""

import os
import pickle
import re
import struct
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from tinygrad import Tensor, dtypes
from tinygrad.codegen import to_program
from tinygrad.codegen.opt import Opt, OptOps
from tinygrad.helpers import Target
from tinygrad.uop.ops import Ops, UOp

from tegrad.hw.chips import CHIPS
from tegrad.nv import codegen, renderers, toolchain
from tegrad.nv.cubin import Cubin, read_ptx

pytestmark = pytest.mark.usefixtures("null_device")
ARCHES = ("sm_87", "sm_90")
CLASSES = (renderers.NVCUDARenderer, renderers.NVPTXRenderer)


@pytest.fixture(params=[(c, a) for c in CLASSES for a in ARCHES], ids=lambda p: f"{p[0].__name__}-{p[1]}")
def renderer(request: Any) -> Any:
    return request.param[0](Target("NV", arch=request.param[1]))


def kernels(*tensors: Tensor) -> list[UOp]:
    """The kernel ASTs of a computation."""
    linear = tensors[0].schedule_linear(*tensors[1:])
    return [call.src[0] for call in linear.src if call.src[0].op is Ops.SINK]


def compiled(ast: UOp, renderer: Any) -> tuple[str, bytes]:
    program = to_program(ast, renderer)
    return program.src[2].arg, program.src[3].arg


def empty(*shape: int, dtype: Any = dtypes.float) -> Tensor:
    return Tensor.empty(*shape, dtype=dtype, device="NULL")


def test_the_device_lists_them_under_tinygrads_names(fake_device: Any) -> None:
    assert type(fake_device.renderer) is renderers.NVCUDARenderer
    names = [fake_device._renderer_name(r) for r in fake_device.renderers]
    assert names == ["CUDA", "PTX", "CC", "NAK"]
    assert fake_device.renderers[:2] == [renderers.NVCUDARenderer, renderers.NVPTXRenderer]


def test_a_pickled_renderer_is_the_same_renderer(renderer: Any) -> None:
    copy = pickle.loads(pickle.dumps(renderer))
    assert type(copy) is type(renderer)
    assert copy.target == renderer.target
    assert copy.compiler.cachekey == renderer.compiler.cachekey


def test_cache_keys_tell_architectures_and_renderers_apart() -> None:
    made = [c(Target("NV", arch=a)) for c in CLASSES for a in ARCHES]
    assert len({r.compiler.cachekey for r in made}) == 4
    assert len({r.suffix for r in made}) == 4


def test_search_results_of_other_patches_or_compilers_are_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    before = renderers.NVPTXRenderer(Target("NV", arch="sm_87")).suffix
    monkeypatch.setattr(codegen, "REVISION", codegen.REVISION + 1)
    patched = renderers.NVPTXRenderer(Target("NV", arch="sm_87")).suffix
    monkeypatch.setattr(toolchain.nvjitlink(), "version", (99, 0))
    compiled_anew = renderers.NVPTXRenderer(Target("NV", arch="sm_87")).suffix
    assert len({before, patched, compiled_anew}) == 3


@pytest.mark.parametrize("renderer", CLASSES)
def test_search_results_with_other_repairs_are_not_used(renderer: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    made = set()
    for off in ("", "views", "double", "matvec", "views,matvec", "views,double,matvec"):
        monkeypatch.setenv(codegen.SWITCH, off)
        made.add(renderer(Target("NV", arch="sm_87")).suffix)
    assert len(made) == 6
    monkeypatch.setenv(codegen.SWITCH, "matvec,views")
    assert renderer(Target("NV", arch="sm_87")).suffix in made, "the order of the names does not count"


@pytest.mark.parametrize(("arch", "kib"), [("sm_87", 163), ("sm_90", 227), ("sm_75", 48)])
def test_shared_memory_goes_to_the_chips_limit(arch: str, kib: int) -> None:
    assert renderers.shared_max(arch) == kib << 10
    assert {c.smem_per_cta for c in CHIPS.values() if c.arch == arch} <= {kib << 10}


def test_usual_kernels_compile_with_their_ptx(renderer: Any) -> None:
    a = empty(128, 128)
    for result in (a @ a, a.half() @ a.half(), a.softmax(), a.cumsum(0), a.argmax(1), a.relu()):
        for ast in kernels(result):
            source, lib = compiled(ast, renderer)
            section = read_ptx(lib)
            assert section is not None
            assert section.name == Cubin(lib).kernels[0]
            assert section.name in source


@pytest.mark.parametrize(
    "name",
    ["reciprocal", "sqrt", "exp2", "log2", "sin", "exp", "rsqrt", "tan", "tanh", "erf", "atanh", "round", "half"],
)
def test_double_precision_assembles(renderer: Any, name: str) -> None:
    for ast in kernels(getattr(empty(64, dtype=dtypes.double), name)()):
        source, lib = compiled(ast, renderer)
        assert read_ptx(lib) is not None
        assert not re.search(r"approx\S*\.f64", source)


@pytest.mark.parametrize("dtype", [dtypes.half, dtypes.float, dtypes.double])
@pytest.mark.parametrize("name", ["sin", "cos", "tan"])
def test_a_sine_is_never_approximate_in_ptx(name: str, dtype: Any) -> None:
    renderer = renderers.NVPTXRenderer(Target("NV", arch="sm_87"))
    [ast] = kernels(getattr(empty(64, dtype=dtype), name)())
    assert not re.search(r"\b(sin|cos)\.", compiled(ast, renderer)[0])


@pytest.mark.parametrize("name", ["reciprocal", "sqrt", "exp2", "log2"])
def test_single_precision_stays_approximate_in_ptx(name: str) -> None:
    renderer = renderers.NVPTXRenderer(Target("NV", arch="sm_87"))
    [ast] = kernels(getattr(empty(64), name)())
    assert re.search(r"approx\S*\.f32", compiled(ast, renderer)[0])


F2I = 0x305
"""Machine code of a conversion to an integer (nvdisasm of sm_87 and sm_90): the low 12 bits of an instruction."""


def opcodes(lib: bytes) -> set[int]:
    cubin = Cubin(lib)
    text = cubin.find(f".text.{cubin.kernels[0]}")
    assert text is not None
    return {word & 0xFFF for word, _ in struct.iter_unpack("<QQ", cubin.content(text))}


@pytest.mark.parametrize("wide", [dtypes.float, dtypes.double])
@pytest.mark.parametrize("narrow", [dtypes.half, dtypes.bfloat16])
def test_bytes_of_a_rounded_number_are_not_converted(renderer: Any, wide: Any, narrow: Any) -> None:
    """ptxas stores the low byte of a value that it has just rounded to 16 bits as if the number were asked for."""
    [ast] = kernels(empty(16, dtype=wide).cast(narrow).bitcast(dtypes.uint8).contiguous())
    assert F2I not in opcodes(compiled(ast, renderer)[1])


def test_without_the_opaque_move_the_bytes_are_converted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(renderers, "_OPAQUE_BITS", renderers._BITS)
    [ast] = kernels(empty(48).cast(dtypes.half).bitcast(dtypes.uint8).contiguous())  # a shape not compiled before
    assert F2I in opcodes(compiled(ast, renderers.NVCUDARenderer(Target("NV", arch="sm_87")))[1])


def grouped(renderer: Any, upcast: int) -> tuple[str, bytes]:
    """A reduction whose 64 x 16 threads leave `upcast` partial sums each in shared memory: 4 KiB times `upcast`."""
    [ast] = kernels(empty(1024, 1024).sum(1))
    options = (Opt(OptOps.GROUPTOP, 0, 64), Opt(OptOps.LOCAL, 0, 16), Opt(OptOps.UPCAST, 0, upcast))
    return compiled(ast.replace(arg=replace(ast.arg, opts_to_apply=options)), renderer)


def test_shared_memory_beyond_48_kib_is_given_at_launch(renderer: Any) -> None:
    source, lib = grouped(renderer, 16)
    section = read_ptx(lib)
    assert section is not None
    assert section.dynamic_shared == 64 << 10
    assert section.static_shared == 0
    assert "tegrad_shared" in section.ptx
    assert f"// tegrad: dynamic_shared={64 << 10}" in source


def test_shared_memory_up_to_48_kib_is_declared(renderer: Any) -> None:
    section = read_ptx(grouped(renderer, 8)[1])
    assert section is not None
    assert (section.dynamic_shared, section.static_shared) == (0, 32 << 10)


def test_pools_keep_buffers_apart() -> None:
    lines = [
        ".shared .align 16 .b8 local0[20];",
        "mov.u64 %local_u64_0, local0[0];",
        ".shared .align 16 .b8 local1[8];",
        "mov.u64 %local_u64_1, local1[0];",
        "add.f32 %a, %b, %c;",
    ]
    pooled = [p for line in lines for p in renderers.NVPTXRenderer._pooled(line, {0: 0, 1: 32})]
    assert pooled == [
        "mov.u64 %local_u64_0, tegrad_shared;",
        "add.u64 %local_u64_0, %local_u64_0, 0;",
        "mov.u64 %local_u64_1, tegrad_shared;",
        "add.u64 %local_u64_1, %local_u64_1, 32;",
        "add.f32 %a, %b, %c;",
    ]


def test_alignment_of_arguments_is_stated(renderer: Any) -> None:
    from tegrad.nv.directives import parse

    [ast] = kernels(empty(4096) + 1)
    assert parse(compiled(ast, renderer)[0]).align == (16, 16)
    [ast] = kernels(empty(4096, dtype=dtypes.half) + 1)
    assert parse(compiled(ast, renderer)[0]).align == (8, 8)
    [ast] = kernels(empty(4096, dtype=dtypes.uint8) + 1)
    assert parse(compiled(ast, renderer)[0]).align == ()


def test_a_refused_source_is_an_error_for_tinygrad_and_for_us() -> None:
    from tinygrad.device import CompileError

    from tegrad.errors import TegradError

    compiler = renderers.NVCUDARenderer(Target("NV", arch="sm_87")).compiler
    with pytest.raises(CompileError) as caught:
        compiler.compile("nonsense")
    assert isinstance(caught.value, TegradError)


WORKER = """
import os
from tinygrad import Tensor, dtypes
from tinygrad.engine import worker
from tinygrad.helpers import Target
from tinygrad.uop.ops import Ops
from tegrad.nv import renderers


def main():
    pool = worker.get_worker_pool()
    made = [Tensor.empty(64 + i, dtype=dtypes.double, device="NULL").sin().exp2().reciprocal() for i in range(2)]
    asts = [c.src[0] for c in made[0].schedule_linear(*made[1:]).src if c.src[0].op is Ops.SINK]
    renderer = renderers.NVPTXRenderer(Target("NV", arch="sm_87"))
    from tinygrad.codegen import to_program
    done = pool.starmap(to_program, [(ast, renderer) for ast in asts])
    from tegrad.nv.cubin import read_ptx
    print(len(done), all(read_ptx(p.src[3].arg) for p in done), any("approx.f64" in p.src[2].arg for p in done))
    worker.terminate_worker_pool()


main()
"""


def test_spawned_workers_compile_with_the_patches(tmp_path: Path) -> None:
    script = tmp_path / "compile_in_workers.py"
    script.write_text(WORKER)
    root = str(Path(__file__).resolve().parents[2])
    environment = {**os.environ, "PYTHONPATH": root, "PARALLEL": "1", "DEV": "NULL", "CCACHE": "0"}
    done = subprocess.run([sys.executable, str(script)], env=environment, capture_output=True, text=True, timeout=600)
    assert done.stdout.split() == ["2", "True", "False"], done.stderr[-2000:]
