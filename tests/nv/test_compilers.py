"""Compiling: where NVIDIA's compilers are found, what is appended to their cubins, what the caches are keyed by."""

import hashlib
import os
import shutil
import struct
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from elftools.elf.elffile import ELFFile

from tegrad.hw import bank0, ptxsection
from tegrad.nv import compilers, cubin, directives, toolchain
from tegrad.nv.cubin import Cubin, read_ptx

ARCHES = ("sm_87", "sm_90")
SOURCE = """
#include <cuda_fp16.h>
__device__ float table[300]; __device__ int start[4] = {1, 2, 3, 4}; __constant__ float factor[64];
extern "C" __global__ void k(float *o, const half *h, int n) {
  __shared__ float s[1000];
  s[threadIdx.x] = o[threadIdx.x] + table[n] + start[n & 3] + factor[n];
  __syncthreads();
  o[threadIdx.x] = s[(threadIdx.x * 100) % 1000] + __half2float(h[n]);
  table[n] = 2;
}
"""
NEEDS_HELPERS = """.version 7.8
.target {arch}
.address_size 64
.visible .entry k(.param .u64 a, .param .u64 n) {{
  .reg .f64 %f<4>; .reg .u64 %r<8>;
  ld.param.u64 %r1, [a]; ld.param.u64 %r2, [n];
  ld.global.f64 %f1, [%r1]; rcp.rn.f64 %f2, %f1; st.global.f64 [%r1], %f2;
  ld.global.u64 %r3, [%r1+8]; rem.u64 %r4, %r3, %r2; st.global.u64 [%r1+8], %r4;
  ret;
}}
"""


@pytest.fixture(scope="module")
def made() -> dict[tuple[str, str], bytes]:
    """The source compiled by both ways for both architectures."""
    cuda = {("cuda", arch): compilers.compile_cuda(SOURCE, arch, cache=False) for arch in ARCHES}
    ptx = {("ptx", arch): compilers.compile_ptx(_section(cuda["cuda", arch]).ptx, arch, cache=False) for arch in ARCHES}
    return cuda | ptx


def _section(data: bytes) -> ptxsection.PtxSection:
    section = read_ptx(data)
    assert section is not None
    return section


def both(test: Any) -> Any:
    return pytest.mark.parametrize("arch", ARCHES)(pytest.mark.parametrize("way", ["cuda", "ptx"])(test))


def load(data: bytes, base: int) -> bytearray:
    """What a loader does with a cubin at address `base`: tinygrad's image, 64-bit and half relocations applied."""
    from tegrad.nv.program import load_elf

    image, _, relocations = load_elf(data, force_section_align=128)
    image = bytearray(image)
    for at, target, kind, _ in relocations:
        value = base + target
        if kind == cubin.R_CUDA_64:
            struct.pack_into("<Q", image, at, value)
        else:
            half = value & 0xFFFFFFFF if kind == cubin.R_CUDA_ABS32_LO else value >> 32
            struct.pack_into("<I", image, at + 4, half)
    return image


# ---- the appended section


@both
def test_the_section_is_loaded_progbits_and_elftools_agrees(made: dict[Any, bytes], way: str, arch: str) -> None:
    import io

    elf = ELFFile(io.BytesIO(made[way, arch]))
    section = elf.get_section_by_name(".tegrad.ptx")
    assert section["sh_type"] == "SHT_PROGBITS"
    assert section["sh_flags"] == 2  # SHF_ALLOC
    assert section["sh_addralign"] == ptxsection.ALIGN
    assert ptxsection.unpack(section.data()).name == "k"
    relocations = elf.get_section_by_name(".rela.tegrad.ptx")
    assert elf.get_section(relocations["sh_info"]).name == ".tegrad.ptx"
    symbols = elf.get_section(relocations["sh_link"])
    assert {symbols.get_symbol(r["r_info_sym"]).name for r in relocations.iter_relocations()} == {
        "k",
        "table",
        "start",
        "factor",
    }


@both
def test_nvidias_sections_keep_their_bytes(made: dict[Any, bytes], way: str, arch: str) -> None:
    ptx = _section(made["cuda", arch]).ptx
    original = (
        toolchain.nvrtc().compile(SOURCE, arch, [f"-I{d}" for d in toolchain.include_dirs()]).cubin
        if way == "cuda"
        else toolchain.nvjitlink().compile(ptx, arch)
    )
    before, after = Cubin(original), Cubin(made[way, arch])
    assert [s.name for s in after.sections] == [*(s.name for s in before.sections), ".tegrad.ptx", ".rela.tegrad.ptx"]
    for old, new in zip(before.sections, after.sections, strict=False):
        if old.name != ".shstrtab":
            assert before.content(old) == after.content(new), old.name
            if old.name != ".nv.global":
                assert old == new
    assert original[:40] == made[way, arch][:40]
    assert original[64 : len(original)] == made[way, arch][64 : len(original)]


@both
def test_a_loaded_image_holds_the_section_with_real_addresses(made: dict[Any, bytes], way: str, arch: str) -> None:
    base = 0x12_3450_0000
    image = load(made[way, arch], base)
    [(_, section)] = ptxsection.find(image)
    text = section.entry - base
    assert ptxsection.code_digest(image[text : text + section.text_size], section.masked) == section.digest
    assert [offset for offset, _ in ptxsection.find(image, entry=section.entry)] != []
    start = section.symbols["start"] - base
    assert struct.unpack_from("<4i", image, start) == (1, 2, 3, 4)
    assert image[section.symbols["table"] - base :][:1200] == bytes(1200)
    assert len({*section.symbols.values()}) == 3
    assert section.param_base == {"sm_87": 0x160, "sm_90": 0x210}[arch]
    assert section.static_shared == 4000
    assert ".visible .entry k" in section.ptx


def test_relocated_machine_code_still_has_its_digest(made: dict[Any, bytes]) -> None:
    """nvJitLink puts addresses into instructions: without the mask the digest would depend on where code is loaded."""
    section = _section(made["ptx", "sm_87"])
    assert section.masked
    for base in (0x40_0000, 0x7F_0000_0000):
        image = load(made["ptx", "sm_87"], base)
        [(_, there)] = ptxsection.find(image)
        text = bytes(image[there.entry - base :][: there.text_size])
        assert ptxsection.code_digest(text, there.masked) == section.digest
        assert ptxsection.code_digest(text) != section.digest


def test_addends_of_relocations_are_kept() -> None:
    from tinygrad.runtime.support.elf import elf_loader

    from tegrad.nv.program import load_elf

    data = toolchain.nvjitlink().compile(NEEDS_HELPERS.format(arch="sm_87"), "sm_87")
    _, _, plain = elf_loader(data, force_section_align=128)
    _, _, folded = load_elf(data, force_section_align=128)
    assert any(addend for *_, addend in plain)
    assert [(a, t + addend, k, 0) for a, t, k, addend in plain] == folded


@pytest.mark.parametrize("arch", ARCHES)
def test_kernels_that_need_helpers_are_assembled_into_one_function(arch: str) -> None:
    text = NEEDS_HELPERS.format(arch=arch)
    assert Cubin(toolchain.nvjitlink().compile(text, arch)).helpers
    data = compilers.compile_ptx(text, arch, cache=False)
    assert Cubin(data).helpers == []
    assert Cubin(data).kernels == ["k"]


def test_two_kernels_in_one_source_are_refused() -> None:
    source = 'extern "C" __global__ void one() {} extern "C" __global__ void two() {}'
    with pytest.raises(compilers.CompileFailed, match=r"must hold one kernel, this one holds 2 \(.*one.*\)"):
        compilers.compile_cuda(source, "sm_87", cache=False)


def test_a_function_that_is_not_inlined_stays_in_the_kernel() -> None:
    source = """__noinline__ __device__ float f(float x, int n) { for (int i = 0; i < n; i++) x = x * x + i; return x; }
    extern "C" __global__ void k(float *o, int n) { o[0] = f(o[0], n) + f(o[1], n + 1); }"""
    assert Cubin(compilers.compile_cuda(source, "sm_87", cache=False)).helpers == []


def test_registers_and_stack_are_the_kernels() -> None:
    source = """extern "C" __global__ void k(int *o, int n) {
      int own[200]; for (int i = 0; i < 200; i++) own[i] = i * n; o[0] = own[n]; }"""
    data = Cubin(compilers.compile_cuda(source, "sm_87", cache=False))
    assert data.stack("k") >= 800
    assert 0 < data.registers("k") < 256
    assert data.arch == 87


def bank0_words(arch: str, expression: str) -> set[int]:
    """Offsets in constant bank 0 that a kernel moves to registers to store a value."""
    source = f'extern "C" __global__ void k(int *out) {{ *out = {expression}; }}'
    elf = Cubin(compilers.compile_cuda(source, arch))
    text = elf.find(".text.k")
    assert text is not None
    code = bytes(elf.content(text))
    instructions = [int.from_bytes(code[i : i + 16], "little") for i in range(0, len(code), 16)]
    # MOV, IMAD.MOV and LDC with a constant operand: the word's index in bits 53:40, the bank in 58:54.
    return {(w >> 40 & 0x3FFF) * 4 for w in instructions if w & 0xFFF in (0xA02, 0x624, 0xB82) and w >> 54 & 31 == 0}


@pytest.mark.parametrize("arch", ARCHES)
def test_machine_code_reads_its_dimensions_from_constant_bank_0(arch: str) -> None:
    usual = bank0_words(arch, "0")
    for start, name in ((bank0.BLOCK_DIM, "blockDim"), (bank0.GRID_DIM, "gridDim")):
        for i, axis in enumerate("xyz"):
            assert bank0_words(arch, f"{name}.{axis}") - usual == {start + 4 * i}
    assert bank0.STACK_TOP in usual


@pytest.mark.parametrize("data", [b"", b"\x7fELF", b"MZ" * 100, b"\x7fELF\x02\x01" + bytes(100)])
def test_what_is_no_cubin_is_refused(data: bytes) -> None:
    with pytest.raises(cubin.BadCubin):
        cubin.with_ptx(data, "")


# ---- errors and options


def test_the_compilers_log_is_in_the_error() -> None:
    with pytest.raises(compilers.CompileFailed, match='identifier "nonsense" is undefined'):
        compilers.compile_cuda('extern "C" __global__ void k() { nonsense(); }', "sm_87", cache=False)
    with pytest.raises(compilers.CompileFailed, match="sm_8x"):
        compilers.compile_ptx(NEEDS_HELPERS.format(arch="sm_87"), "sm_8x", cache=False)


def test_an_error_whose_log_cannot_be_had_is_that_error_all_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    nvrtc = toolchain.Nvrtc()
    monkeypatch.setattr(nvrtc._lib, "nvrtcGetProgramLogSize", lambda program, size: 1)
    with pytest.raises(compilers.CompileFailed, match=r"NVRTC_ERROR_COMPILATION while compiling for sm_87:\n$"):
        nvrtc.compile("nonsense", "sm_87")


def test_dynamic_shared_memory_comes_from_the_call_or_from_the_source() -> None:
    source = (
        'extern __shared__ int pool[]; extern "C" __global__ void k(int *o) { pool[threadIdx.x] = 1; o[0] = pool[0]; }'
    )
    by_call = _section(compilers.compile_cuda(source, "sm_87", dynamic_shared=5000, cache=False))
    by_line = _section(compilers.compile_cuda(f"// tegrad: dynamic_shared=6000\n{source}", "sm_87", cache=False))
    assert (by_call.dynamic_shared, by_line.dynamic_shared) == (5000, 6000)
    assert directives.parse(by_line.ptx).dynamic_shared == 6000


def test_directives_survive_printing_and_parsing() -> None:
    wanted = directives.Directives(104000, (16, 4, 8))
    assert directives.parse(f"\n{wanted}.version 8.0") == wanted
    assert str(directives.Directives()) == ""
    assert directives.parse("// nothing here") == directives.Directives()
    with pytest.raises(ValueError, match="colour"):
        directives.parse("// tegrad: colour=red")


# ---- finding the compilers


def test_the_wheels_are_found_without_any_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("CUDA_HOME", "CUDA_PATH", "LD_LIBRARY_PATH", "NVRTC_PATH", "NVJITLINK_PATH"):
        monkeypatch.delenv(name, raising=False)
    assert "NVRTC 1" in compilers.describe()
    assert (toolchain.include_dirs()[0] / "cuda_fp16.h").is_file()
    assert os.access(toolchain.find_program("ptxas"), os.X_OK)


def cu13(site: Path, *, without: str = "") -> Path:
    """`nvidia/cu13` of a folder of wheels, as CUDA 13's lay it out; its libraries are this machine's."""
    root = site / "nvidia" / "cu13"
    builtins = next(toolchain.nvrtc().path.parent.glob("libnvrtc-builtins.so*"))
    files = {
        "include/cuda_fp16.h": None,
        "include/crt/mma.h": None,
        "bin/ptxas": None,
        "lib/libnvrtc.so.13": toolchain.nvrtc().path,
        "lib/libnvrtc-builtins.so.13.0": builtins,
        "lib/libnvJitLink.so.13": toolchain.nvjitlink().path,
    }
    for name, real in files.items():
        if name == without:
            continue
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).symlink_to(real) if real else (root / name).touch()
    return root


@pytest.fixture
def no_toolkit(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("CUDA_HOME", "CUDA_PATH"):
        monkeypatch.delenv(name, raising=False)


def test_the_cu13_layout_is_found(no_toolkit: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    root = cu13(tmp_path)
    monkeypatch.setattr(sys, "path", [str(tmp_path)])
    assert toolchain.Nvrtc().path == root / "lib" / "libnvrtc.so.13"
    assert toolchain.include_dirs() == (root / "include",)
    assert toolchain.find_program("ptxas") == root / "bin" / "ptxas"


@pytest.mark.parametrize("lacking", ["bin/ptxas", "lib/libnvrtc-builtins.so.13.0", "include/cuda_fp16.h"])
def test_a_layout_that_lacks_something_is_not_taken_in_part(
    lacking: str, no_toolkit: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As torch's wheels, which bring NVRTC, nvJitLink and headers of CUDA 13 and no assembler."""
    root = cu13(tmp_path, without=lacking)
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])
    assert root not in toolchain.roots()
    parts = [toolchain.Nvrtc().path, toolchain.NvJitLink().path, *toolchain.include_dirs()]
    assert len({part.relative_to(Path(sys.prefix)).parts[:4] for part in parts}) == 1
    assert toolchain.nvrtc().compile(SOURCE, "sm_87", [f"-I{d}" for d in toolchain.include_dirs()]).cubin


def test_without_a_whole_layout_what_there_is_is_taken(
    no_toolkit: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    root = cu13(tmp_path, without="bin/ptxas")
    monkeypatch.setattr(sys, "path", [str(tmp_path)])
    monkeypatch.setattr(toolchain, "_toolkits", lambda: iter([(tmp_path / "none",)]))
    toolchain._roots.cache_clear()
    try:
        assert toolchain.roots() == [root]
    finally:
        toolchain._roots.cache_clear()


LOADED = """
import sys
from tegrad.nv import toolchain
toolchain.Nvrtc()
print(*(line.split()[-1] for line in open("/proc/self/maps") if "builtins" in line))
"""


def test_what_nvrtc_opens_by_name_is_loaded_from_beside_it() -> None:
    """NVRTC 13.0 of the wheels looks only where the system's libraries are."""
    done = subprocess.run([sys.executable, "-c", LOADED], capture_output=True, text=True, check=True)
    assert {Path(name).parent for name in done.stdout.split()} == {toolchain.nvrtc().path.parent}


def test_a_toolkit_that_the_user_names_comes_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "lib64").mkdir()
    shutil.copy(toolchain.nvjitlink().path, tmp_path / "lib64" / "libnvJitLink.so.12")
    monkeypatch.setenv("CUDA_HOME", str(tmp_path))
    assert toolchain.NvJitLink().path == tmp_path / "lib64" / "libnvJitLink.so.12"


def test_what_is_missing_is_said_with_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(toolchain, "roots", list)
    for attempt in (toolchain.Nvrtc, toolchain.NvJitLink, toolchain.require_include_dirs):
        with pytest.raises(toolchain.CompilerMissing, match=r"pip install .*\[compilers\]'"):
            attempt()


# ---- caches


def test_a_second_compilation_is_read_from_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    first = compilers.compile_cuda(SOURCE, "sm_87")
    with monkeypatch.context() as patch:
        patch.setattr(toolchain.Nvrtc, "compile", lambda *_, **__: pytest.fail("compiled again"))
        assert compilers.compile_cuda(SOURCE, "sm_87") == first
    assert compilers.compile_cuda(SOURCE, "sm_87", ["--use_fast_math"]) != b""
    assert len(list((tmp_path / "tegrad" / "cubin").iterdir())) == 2


def test_a_cache_that_cannot_be_written_is_no_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    blocked = tmp_path / "file"
    blocked.write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(blocked))
    assert compilers.compile_cuda(SOURCE, "sm_87")


def test_keys_carry_all_that_decides_a_cubin(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    keys = {compilers.cuda_key("sm_87"), compilers.cuda_key("sm_90"), compilers.cuda_key("sm_87", ["-G"])}
    keys |= {compilers.ptx_key("sm_87"), compilers.ptx_key("sm_90")}
    with monkeypatch.context() as patch:
        patch.setattr(compilers, "REVISION", compilers.REVISION + 1)
        keys |= {compilers.cuda_key("sm_87"), compilers.ptx_key("sm_87")}
    with monkeypatch.context() as patch:
        patch.setattr(toolchain.nvrtc(), "version", (99, 0))
        patch.setattr(toolchain.nvjitlink(), "version", (99, 0))
        keys |= {compilers.cuda_key("sm_87"), compilers.ptx_key("sm_87")}
    with monkeypatch.context() as patch:
        (tmp_path / "cuda_fp16.h").write_text("")
        patch.setattr(toolchain, "include_dirs", lambda: (tmp_path,))
        keys.add(compilers.cuda_key("sm_87"))
    assert len(keys) == 10
    assert all(len(key) == len(hashlib.sha256().hexdigest()) for key in keys)
    assert compilers.cuda_key("sm_87") == compilers.cuda_key("sm_87")
