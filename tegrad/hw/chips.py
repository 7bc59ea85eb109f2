"""The chips and boards tegrad knows. Adding one is adding a row; llm/chips.py has what our kernels do on it.

Sources, by field:
- class numbers, architecture, litter (2 GPC x 4 TPC x 2 SM of ga10b): L4T r36.4.3 nvgpu driver source
  (hal/init/hal_ga10b_litter.c, hw_proj_ga10b.h), see tests/data/ga10b-hw.json.
- SM and SPA version, revision, L2 size, maximum clock of AGX Orin: readings of a 64 GB developer kit under r36.4.
- warps, blocks, registers and shared memory per SM, shared memory per CTA: CUDA C++ Programming Guide, "Technical
  Specifications per Compute Capability", 8.7 (48, 16, 64 K, 164 KB, 163 KB), 9.0 (64, 32, 64 K, 228 KB, 227 KB).
- memory size and bandwidth, clock and SM count of the Orin modules: NVIDIA Jetson Orin series data sheets (128 CUDA
  cores an SM: 2048, 1792, 1024 and 512; 204.8, 102.4 and 51.2 GB/s; Nano at its "Super" setting). What the sheets leave
  out (L2, revision, which TPCs are absent) is AGX Orin's, or inferred, and not verified for the smaller modules.
- gh100: NVIDIA H200 data sheet (141 GB HBM3e, 4.8 TB/s), H100 architecture white paper (132 SMs enabled, 2 SMs a TPC,
  50 MB L2; the PCIe card: 114, 80 GB HBM2e, 2 TB/s), classes as NVIDIA open-gpu-doc and the resource manager name them.
- address space: va_end leaves the driver its own 4 GiB below 2^40 and stays clear of bits the hardware drops; the
  windows are the addresses of the shader windows that the setup methods take, 4 GiB apart.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType

KIB, GIB = 1 << 10, 1 << 30


@dataclass(frozen=True, slots=True)
class Chip:
    """One board: its chip, the numbers of its classes, its address space, its size. Sizes are bytes, clocks Hz."""

    name: str
    chip: str
    arch: str
    sm_version: int
    spa_version: int
    compute_class: int
    gpfifo_class: int
    dma_class: int
    threed_class: int
    twod_class: int
    i2m_class: int
    usermode_class: int
    qmd: str
    sass_version: int
    num_gpc: int
    tpc_per_gpc: int
    sm_per_tpc: int
    warps_per_sm: int
    blocks_per_sm: int
    regs_per_sm: int
    smem_per_sm: int
    smem_per_cta: int
    l2_bytes: int
    mem_bytes: int
    mem_bandwidth: int
    max_freq_hz: int
    gpu_arch: int
    gpu_impl: int
    gpu_rev: int
    va_bits: int = 40
    va_start: int = 0x200000
    va_end: int = 0xFF00000000
    shared_window: int = 0xFE00000000
    local_window: int = 0xFD00000000
    window_size: int = 1 << 32
    tpcs_absent: int = 0
    """TPCs that the module lacks, of the last GPC."""

    @property
    def sm_count(self) -> int:
        """Streaming multiprocessors of the whole module; a device may have fewer that work, and says so itself."""
        return (self.num_gpc * self.tpc_per_gpc - self.tpcs_absent) * self.sm_per_tpc

    @property
    def tpc_masks(self) -> list[int]:
        """The TPCs of each GPC, a bit each."""
        whole = (1 << self.tpc_per_gpc) - 1
        return [whole] * (self.num_gpc - 1) + [whole >> self.tpcs_absent]


_AGX_ORIN = Chip(
    name="agx-orin-64gb",
    chip="ga10b",
    arch="sm_87",
    sm_version=0x807,
    spa_version=0x806,
    compute_class=0xC7C0,
    gpfifo_class=0xC76F,
    dma_class=0xC7B5,
    threed_class=0xC797,
    twod_class=0x902D,
    i2m_class=0xA140,
    # Turing's id; ga10b's own was never read, and no client looks at it.
    usermode_class=0xC461,
    qmd="V3",
    sass_version=0x87,
    num_gpc=2,
    tpc_per_gpc=4,
    sm_per_tpc=2,
    warps_per_sm=48,
    blocks_per_sm=16,
    regs_per_sm=65536,
    smem_per_sm=164 * KIB,
    smem_per_cta=163 * KIB,
    l2_bytes=4 << 20,
    mem_bytes=64 * GIB,
    mem_bandwidth=204_800_000_000,
    max_freq_hz=1_300_000_000,
    gpu_arch=0x170,
    gpu_impl=0xB,
    gpu_rev=0xA1,
)

_GH100 = Chip(
    name="gh100",
    chip="gh100",
    arch="sm_90",
    sm_version=0x900,
    spa_version=0x900,
    compute_class=0xCBC0,
    gpfifo_class=0xC86F,
    dma_class=0xC8B5,
    threed_class=0xCB97,
    twod_class=0x902D,
    i2m_class=0xA140,
    usermode_class=0xC661,
    qmd="V4",
    sass_version=0x90,
    # An H200 has 8 GPCs with 16 or 18 SMs each, 132 in all, which no product gives; 6 x 11 x 2 has the right sum.
    num_gpc=6,
    tpc_per_gpc=11,
    sm_per_tpc=2,
    warps_per_sm=64,
    blocks_per_sm=32,
    regs_per_sm=65536,
    smem_per_sm=228 * KIB,
    smem_per_cta=227 * KIB,
    l2_bytes=50 << 20,
    mem_bytes=141_000_000_000,
    mem_bandwidth=4_800_000_000_000,
    max_freq_hz=1_980_000_000,
    gpu_arch=0x180,
    gpu_impl=0x0,
    gpu_rev=0xA1,
)

_ORIN_NX = replace(
    _AGX_ORIN,
    name="orin-nx-16gb",
    num_gpc=1,
    mem_bytes=16 * GIB,
    mem_bandwidth=102_400_000_000,
    max_freq_hz=918_000_000,
)
_ORIN_NANO = replace(_ORIN_NX, name="orin-nano-8gb", mem_bytes=8 * GIB, max_freq_hz=1_020_000_000)

CHIPS: Mapping[str, Chip] = MappingProxyType(
    {
        chip.name: chip
        for chip in (
            _AGX_ORIN,
            replace(_AGX_ORIN, name="agx-orin-32gb", tpcs_absent=1, mem_bytes=32 * GIB, max_freq_hz=930_000_000),
            _ORIN_NX,
            replace(_ORIN_NX, name="orin-nx-8gb", mem_bytes=8 * GIB, max_freq_hz=765_000_000),
            _ORIN_NANO,
            replace(_ORIN_NANO, name="orin-nano-4gb", tpcs_absent=2, mem_bytes=4 * GIB, mem_bandwidth=51_200_000_000),
            _GH100,
            replace(
                _GH100,
                name="h100-pcie",
                tpcs_absent=9,
                mem_bytes=80_000_000_000,
                mem_bandwidth=2_000_000_000_000,
                max_freq_hz=1_755_000_000,
            ),
        )
    }
)
"""Every board by name."""


def by_arch(arch: str) -> Chip | None:
    """The first board of an architecture such as "sm_87", which may have more SMs than the device at hand."""
    return next((chip for chip in CHIPS.values() if chip.arch == arch), None)


def by_sm_version(version: int) -> Chip:
    """The first board with this SM version (0x807 is sm_87), as the driver's characteristics report it.

    KeyError for a version no row has.
    """
    for chip in CHIPS.values():
        if chip.sm_version == version:
            return chip
    raise KeyError(f"no chip with SM version {version:#x}; known: " + ", ".join(c.arch for c in CHIPS.values()))
