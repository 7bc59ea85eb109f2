"""Loading programs: shared memory to the chip's limit, one kernel per cubin, storage of module variables."""

import struct
from typing import Any

import numpy as np
import pytest
from tinygrad import Tensor, dtypes
from tinygrad.device import TinyELF
from tinygrad.helpers import Target

from tegrad.hw.chips import CHIPS
from tegrad.nv import program, toolchain
from tegrad.nv.compilers import compile_cuda, compile_ptx
from tegrad.nv.cubin import Cubin
from tegrad.nv.program import LaunchError, NVProgram, shared_usage, sm_config

ORIN, HOPPER = 0x807, 0x900


@pytest.fixture(params=["agx-orin-64gb", "gh100"])
def device(request: Any, monkeypatch: pytest.MonkeyPatch) -> Any:
    """NVDevice on the fake driver of each chip."""
    from fake import FakeKernel
    from tinygrad import Device

    import tegrad.nv
    from tegrad.nv import device as nv_device
    from tegrad.nv import iface

    tegrad.nv.install()
    kernel = FakeKernel(chip=CHIPS[request.param])
    monkeypatch.setattr(iface, "pick_kernel", lambda: kernel)
    yield Device["NV"]
    nv_device._opened["NV"].close()
    kernel.stop()
    assert set(kernel.held().values()) == {0}


def load(device: Any, source: str, name: str = "k", pointers: int = 1, **options: Any) -> NVProgram:
    lib = compile_cuda(source, device.arch, **options)
    signature = tuple((f"p{i}", i, dtypes.float, (1,)) for i in range(pointers))
    made: NVProgram = device.runtime(TinyELF(lib, name, Target("NV", arch=device.arch), signature))
    return made


def shared_kernel(size: int) -> str:
    return f"""extern "C" __global__ void k(int *o) {{
      __shared__ int s[{size // 4}]; s[threadIdx.x] = o[0]; __syncthreads(); o[1] = s[threadIdx.x + o[2]]; }}"""


POOL = """extern __shared__ int pool[];
extern "C" __global__ void k(int *o) { pool[threadIdx.x] = o[0]; __syncthreads(); o[1] = pool[o[2]]; }"""


def test_a_program_that_cannot_be_loaded_leaves_no_memory_behind(device: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its finalizer is registered at the end of a loading that went well."""

    def no_room(required: int) -> None:
        raise MemoryError("the driver has no 1 bytes left")

    held = dict(device.iface.memory)
    with monkeypatch.context() as patch:
        patch.setattr(device, "_ensure_has_local_memory", no_room)
        for _ in range(3):
            with pytest.raises(MemoryError):
                load(device, shared_kernel(4))
    assert device.iface.memory == held
    made = load(device, shared_kernel(4))
    device.synchronize()
    assert len(device.iface.memory) == len(held) + 2  # code and local memory
    del made
    assert len(device.iface.memory) == len(held) + 1


@pytest.mark.parametrize("size", [4, 1000, 48 << 10])
def test_declared_shared_memory_is_counted_once_with_the_reserve(device: Any, size: int) -> None:
    made = load(device, shared_kernel(size))
    assert made.shmem_usage == (0x400 + size + 127) // 128 * 128
    assert made.qmd.read("shared_memory_size") == made.shmem_usage


def test_shared_memory_goes_to_the_chips_own_limit(device: Any) -> None:
    chip = CHIPS["gh100" if device.arch == "sm_90" else "agx-orin-64gb"]
    made = load(device, POOL, dynamic_shared=chip.smem_per_cta)
    config = chip.smem_per_sm // 4096 + 1
    assert made.shmem_usage == chip.smem_per_cta + 0x400 == chip.smem_per_sm
    for field in ("min_sm_config", "target_sm_config", "max_sm_config"):
        assert made.qmd.read(f"{field}_shared_mem_size") == config
    with pytest.raises(LaunchError, match=rf"an SM has {chip.smem_per_sm}"):
        load(device, POOL, dynamic_shared=chip.smem_per_cta + 1024)


@pytest.mark.parametrize(
    ("size", "version", "code"),
    [
        (0x400, ORIN, 9),
        (32 << 10, ORIN, 9),
        ((32 << 10) + 128, ORIN, 17),
        (100 << 10, ORIN, 26),
        ((100 << 10) + 128, ORIN, 34),
        (164 << 10, ORIN, 42),
        (228 << 10, HOPPER, 58),
        (100 << 10, 0x806, 26),
    ],
)
def test_the_codes_of_shared_memory_splits(size: int, version: int, code: int) -> None:
    assert sm_config(size, version) == code


@pytest.mark.parametrize(("blocks", "size", "codes"), [(1, 20, (9, 9)), (3, 20, (17, 17)), (4, 60, (34, 50))])
def test_an_sm_splits_off_what_the_blocks_of_the_launch_bounds_need(
    blocks: int, size: int, codes: tuple[int, int], device: Any
) -> None:
    """The last: of blocks of 61 KiB Orin's 164 KiB hold two, Hopper's 228 KiB three."""
    source = POOL.replace("void k", f"void __launch_bounds__(128, {blocks}) k")
    made = load(device, source, dynamic_shared=size << 10)
    code = codes[device.arch == "sm_90"]
    assert [made.qmd.read(f"{edge}_sm_config_shared_mem_size") for edge in ("min", "target")] == [code, code]
    assert (
        made.qmd.read("max_sm_config_shared_mem_size")
        == CHIPS["gh100" if device.arch == "sm_90" else "agx-orin-64gb"].smem_per_sm // 4096 + 1
    )


def test_tinygrads_own_loader_fails_beyond_100_kib(device: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """What the remedy is for: with the section's true size, the upstream constructor finds no split."""
    monkeypatch.setattr(program, "without_shared", lambda cubin, kernel: _with_shared(cubin, kernel, 104000))
    with pytest.raises(ValueError, match="empty"):
        load(device, shared_kernel(4000))


def _with_shared(cubin: Cubin, kernel: str, size: int) -> bytes:
    index = next(i for i, s in enumerate(cubin.sections) if s.name == f".nv.shared.{kernel}")
    data = bytearray(cubin.data)
    struct.pack_into("<Q", data, cubin.ehdr[6] + index * 64 + 32, size)
    return bytes(data)


def test_static_and_dynamic_memory_add_up() -> None:
    source = shared_kernel(1000).replace("extern", "extern __shared__ int pool[]; extern", 1)
    source = source.replace("o[1] = s", "pool[o[3]] = 1; o[4] = pool[o[5]]; o[1] = s")
    data = compile_cuda(source, "sm_87", dynamic_shared=60_000)
    assert shared_usage(Cubin(data), "k") == (0x400 + 1008 + 60_000 + 127) // 128 * 128


def test_several_kernels_in_one_cubin_are_refused(device: Any) -> None:
    source = 'extern "C" __global__ void one() {} extern "C" __global__ void two() {}'
    lib = toolchain.nvrtc().compile(source, device.arch).cubin
    with pytest.raises(LaunchError, match="must hold one kernel"):
        device.runtime(TinyELF(lib, "one", Target("NV", arch=device.arch), ()))


def test_the_kernels_name_must_be_the_one_asked_for(device: Any) -> None:
    with pytest.raises(LaunchError, match='holds the kernel k, not other: use extern "C"'):
        load(device, POOL, name="other")


def test_registers_stack_and_constants_are_the_kernels(device: Any) -> None:
    source = """__constant__ float factor[5000]; extern "C" __global__ void k(float *o, int n) {
      float own[200]; for (int i = 0; i < 200; i++) own[i] = o[i] * factor[i]; o[0] = own[n]; }"""
    made, cubin = load(device, source), Cubin(compile_cuda(source, device.arch))
    assert made.regs_usage == cubin.registers("k")
    assert made.lcmem_usage == cubin.stack("k") + 0x240
    assert made.qmd.read("constant_buffer_valid_3") == 1
    assert made.qmd.read("constant_buffer_size_shifted4_3") == 20_000 // 16


def test_module_variables_have_storage_of_their_own(device: Any) -> None:
    source = """__device__ int empty[1000]; __device__ int start[2] = {7, 8};
    extern "C" __global__ void k(int *o) { empty[o[0]] += start[o[1]]; }"""
    made = load(device, source)
    from tegrad.hw import ptxsection

    image = device.allocator._bytes(made.lib_gpu)
    [(_, section)] = ptxsection.find(image)
    base, size = made.lib_gpu.va_addr, made.lib_gpu.size
    at = {name: va - base for name, va in section.symbols.items()}
    assert all(0 < offset <= size - 8 for offset in at.values())
    assert bytes(image[at["empty"] :][:4000]) == bytes(4000)
    assert struct.unpack_from("<2i", image, at["start"]) == (7, 8)
    code = bytes(image[section.entry - base :][: section.text_size])
    assert ptxsection.code_digest(code, section.masked) == section.digest


def test_a_misaligned_argument_is_refused_and_an_aligned_one_is_not(device: Any) -> None:
    source = '// tegrad: align=4,16\nextern "C" __global__ void k(float *a, float4 *b) { a[0] = b[0].x; }'
    made = load(device, source, pointers=2)
    whole = Tensor(np.zeros(64, np.float32), device="NV").realize().uop.base.buffer._buf
    with pytest.raises(LaunchError, match=r"argument 1 of k is at 0x\w+4, its accesses need multiples of 16"):
        made.fill_kernargs((whole, whole.offset(4, 16)))
    made.fill_kernargs((whole.offset(4, 16), whole.offset(16, 16)))


def test_a_program_without_directives_takes_any_pointer(device: Any) -> None:
    made = load(device, POOL)
    whole = Tensor(np.zeros(64, np.float32), device="NV").realize().uop.base.buffer._buf
    made.fill_kernargs((whole.offset(2, 16),))


BARRIERS = {
    "": 1,
    "bar.sync 0;": 1,
    "bar.sync 5, 128;": 6,
    "barrier.sync %t, 64;": 16,
    "bar.arrive 3, 128;": 4,
    "{ .reg .pred %p, %q; setp.eq.u32 %p, %t, 0; barrier.cta.red.and.pred %q, 2, %p; @%q st.global.u32 [%a], %t; }": 3,
}


@pytest.mark.parametrize("text", BARRIERS)
@pytest.mark.parametrize("tells", [True, False])
def test_a_block_gets_the_barriers_that_its_kernel_names(device: Any, text: str, tells: bool) -> None:
    """From the machine code, and from the PTX alone, as newer files do not tell."""
    source = f""".version 8.0
.target {device.arch}
.address_size 64
.visible .entry k(.param .u64 p0) {{ .reg .b32 %t; .reg .b64 %a; ld.param.u64 %a, [p0]; mov.u32 %t, %tid.x;
{text} st.global.u32 [%a], %t; ret; }}
"""
    lib = compile_ptx(source, device.arch, cache=False)
    with pytest.MonkeyPatch.context() as patch:
        if not tells:
            patch.setattr(Cubin, "barriers", lambda self, kernel: 0)
        signature = (("p0", 0, dtypes.float, (1,)),)
        made = device.runtime(TinyELF(lib, "k", Target("NV", arch=device.arch), signature))
    assert made.qmd.read("barrier_count") == BARRIERS[text]
