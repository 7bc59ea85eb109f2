"""Every plan of a model as launches on a device that only keeps books.

On a `DryDevice` plans load their kernels and lay out their buffers, and nothing runs. Kernels are compiled for the chip
that it stands for. Buffers are memory of this process that costs nothing until it is written, so that a plan of a model
of many gigabytes can be made anywhere. `Launch`es made on it say everything about a token, a step of a batch, a chunk
of a prompt or a load: which kernels, in which grids, on which buffers.
"""

from __future__ import annotations

import contextlib
import ctypes
import mmap
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace
from functools import cached_property, partial
from pathlib import Path
from typing import Any, Final, TypeAlias
from unittest.mock import patch

from tinygrad.device import TinyELF
from tinygrad.runtime.support.hcq import HCQBuffer, MMIOInterface

from tegrad import ptx
from tegrad.bench.models import stored
from tegrad.hw.chips import CHIPS, Chip
from tegrad.llm import packing, programs
from tegrad.llm.batch import Batch
from tegrad.llm.cache import KvCache
from tegrad.llm.chips import kernels_of
from tegrad.llm.config import Config, tensor_name
from tegrad.llm.formats import F16, F32, BlockType
from tegrad.llm.gemm import TilePicker, pick_tile, pick_wgmma
from tegrad.llm.gguf import Gguf, TensorInfo
from tegrad.llm.network import Spec
from tegrad.llm.packed import PackedLoader, PackedMatrix, PackedModel, arranging
from tegrad.llm.persistent import MOST_POSITION_READS, NEAR_POSITIONS, PersistentPlan
from tegrad.llm.plan import DecodePlan
from tegrad.llm.prefill import Prefill, chunk_bytes, chunk_sizes
from tegrad.llm.programs import Programs
from tegrad.llm.rope import Divisors
from tegrad.llm.sampling import Sampling, Settings
from tegrad.llm.state import LOGITS_SPEC, STATE_SPEC, States
from tegrad.nv.cubin import Cubin, read_ptx
from tegrad.nv.gpu import Bytes, Gpu, GpuMethods
from tegrad.nv.replay import Launch
from tegrad.nv.spec import MemorySpec


class DryProgram:
    """A compiled kernel."""

    def __init__(self, elf: TinyELF) -> None:
        self.name, self.lib, self.signature = elf.name, elf.lib, elf.signature

    def __call__(self, *buffers: HCQBuffer, **launch: Any) -> None:
        """Nothing runs."""

    @cached_property
    def cubin(self) -> Cubin:
        """The machine code, parsed."""
        return Cubin(self.lib)

    @property
    def dynamic_shared(self) -> int:
        """Bytes of shared memory that are given at launch."""
        section = read_ptx(self.lib)
        return section.dynamic_shared if section else 0

    @cached_property
    def ptx(self) -> ptx.Module:
        """The kernel as the board's engine runs it."""
        section = read_ptx(self.lib)
        assert section is not None, "every kernel of ours carries its PTX"
        return ptx.load(section.ptx)


class DryDevice(GpuMethods):
    """Stands for an opened NV device of a chip, for `load_kernel` and for buffers. `taken` is what is allocated."""

    def __init__(self, chip: Chip) -> None:
        self.chip, self.arch, self.device = chip, chip.arch, "NV"
        self.taken, self.closed = 0, False
        self._memory: dict[int, mmap.mmap] = {}

    @property
    def sm_count(self) -> int:
        """Of the chip, as the interface of a Jetson tells it."""
        return self.chip.sm_count

    def runtime(self, elf: TinyELF) -> DryProgram:
        """Keep a program."""
        return DryProgram(elf)

    def allocate(self, size: int, spec: MemorySpec) -> HCQBuffer:
        """A buffer of zeros."""
        memory = mmap.mmap(-1, max(size, 1))
        address = ctypes.addressof(ctypes.c_char.from_buffer(memory))
        self._memory[address] = memory
        self.taken += size
        return HCQBuffer(address, size, view=MMIOInterface(address, size), owner=self)

    def release(self, buffer: HCQBuffer, spec: MemorySpec) -> None:
        """Give a buffer back."""
        if (memory := self._memory.pop(buffer.va_addr, None)) is not None:
            self.taken -= buffer.size
            with contextlib.suppress(BufferError):
                memory.close()

    def upload(self, buffer: HCQBuffer, data: Bytes) -> None:
        """Copy at once."""
        with memoryview(data).cast("B") as given:
            buffer.cpu_view().mv[: given.nbytes] = given

    def download(self, buffer: HCQBuffer, size: int) -> bytearray:
        """Copy at once."""
        return bytearray(buffer.cpu_view().mv[:size])

    def synchronize(self) -> None:
        """Nothing is ever in flight."""

    @property
    def lends(self) -> bool:
        """Nothing is shared: what would read into its buffers copies instead."""
        return False

    def copy_parts(self, parts: Iterable[tuple[HCQBuffer, HCQBuffer, int]]) -> int:
        """Copy (target, source, bytes) at once."""
        for target, source, size in parts:
            target.cpu_view().mv[:size] = source.cpu_view().mv[:size]
        return 0

    def wait_for(self, copied: int) -> None:
        """Copies are done at once."""

    def timed(self, submit: Callable[[], object]) -> float:
        """No time passes here."""
        submit()
        return 0.0

    def gone(self, closed: str) -> Exception:
        """It is never closed, so that nobody asks."""
        return RuntimeError(closed)

    def check_usable(self) -> None:
        """It always is."""


@contextlib.contextmanager
def uncompiled(arch: str) -> Iterator[DryDevice]:
    """A device of an architecture such as "sm_87" on which plans are laid out without their kernels' code."""
    with patch.object(programs, "compile_kernel", lambda *_, **__: b""):
        yield DryDevice(replace(CHIPS["gh100"], arch=arch))


def matrices(made: PackedModel) -> list[PackedMatrix]:
    """Every matrix of a model, in the order of use; a tied output is the embedding."""
    found = [one for one in (made.embedding, made.inputs, made.inputs_matrix) if one is not None]
    for layer in made.layers:
        found += [*layer.qkv, *layer.matrices.values()]
    return found if made.output is made.embedding else [*found, made.output]


def by_address(made: PackedModel) -> dict[int, PackedMatrix]:
    """Every matrix of a model by its address on the device."""
    return {matrix.buffer.va_addr: matrix for matrix in matrices(made)}


def groups(launches: Iterable[Launch]) -> list[list[Launch]]:
    """Launches of the same program in the same grid, in the order of their first."""
    found: dict[tuple[Any, ...], list[Launch]] = {}
    for launch in launches:
        found.setdefault((launch.program.name, launch.program.lib, launch.grid, launch.block), []).append(launch)
    return list(found.values())


Formats: TypeAlias = Callable[[Spec, int | None], BlockType]
"""The format of a matrix of a layer, or of none."""


class Unwritten(Gguf):
    """The tensors of a file that nobody wrote: nowhere in particular, and whatever is read of them is 0."""

    def __init__(self, config: Config, formats: BlockType | Formats, tied: bool) -> None:
        self.path, self.tensors = Path("a shape"), {}
        for name, spec, layer, sizes in stored(config, tied):
            if not spec.multiplied:
                kind = F32
            elif isinstance(formats, BlockType):
                kind = formats if sizes[-1] % formats.elements == 0 else F16
            else:
                kind = formats(spec, layer)
            self.tensors[name] = TensorInfo(name, kind, sizes, 0)
            if spec.bias == "must":
                bias = tensor_name(spec, layer, "bias")
                self.tensors[bias] = TensorInfo(bias, F32, sizes[:1], 0)

    def read(self, offset: int, size: int) -> bytes:
        """Zeros."""
        return bytes(size)


def model(config: Config, formats: BlockType | Formats, device: Gpu, tied: bool = True) -> PackedModel:
    """A model of these sizes as if it were loaded, on any device: its weights are whatever lies in new buffers."""
    made, file = PackedModel.__new__(PackedModel), Unwritten(config, formats, tied)
    made.device, made.metadata, made.divisors = device, {}, Divisors(None, None, config.context)
    made._own, made.config, made._load = config, config.filled(), PackedLoader(file, device)
    made._allocate(file)
    return made


# ---- plans


POSITIONS: Final = 4096
"""Of the cache."""
CHUNK: Final = 512
DRAWN: Final = (
    Settings(temperature=0.8, top_k=40, top_p=0.9),
    Settings(temperature=0.8, top_p=0.9, masked=True, logprobs=5),
)
"""With a top-k small enough for one launch, and without; the latter with all that a sequence may ask for."""


def _decode(made: PackedModel) -> list[Launch]:
    """A likeliest token, at the start of the cache."""
    states = _states(made)
    plan = DecodePlan(made, states, KvCache(made.device, made.config, POSITIONS))
    sampling = Sampling(made.device, made.config.vocab)
    last = sampling.launches(states, [Settings()], logits=plan.logits, best=plan.best, best_row=plan.best_row)
    return [*plan.launches, *last]


def _persistent(positions: int, made: PackedModel) -> list[Launch]:
    """The same in one launch, with a cache of so many positions, which decide how it attends."""
    plan = PersistentPlan(made, _states(made), KvCache(made.device, made.config, positions))
    return list(plan.likeliest(Sampling(made.device, made.config.vocab)))


def _draw(made: PackedModel) -> list[Launch]:
    """What ends the steps of sequences that draw, instead."""
    logits = made.device.allocate(4 * made.config.vocab, LOGITS_SPEC)
    return list(Sampling(made.device, made.config.vocab).launches(_states(made), DRAWN, logits=logits))


def _states(made: PackedModel) -> States:
    states = States(made.device)
    states.begin(0, [1], 0, POSITIONS)
    return states


def _batch(slots: int, made: PackedModel) -> list[Launch]:
    """A step of so many sequences."""
    batch = Batch(made, slots=slots, positions=min(POSITIONS, made.config.context))
    for slot in range(slots):
        batch.states.begin(slot, [1], 0, POSITIONS)
    return batch.launches(slots)


def _prefill(pick: TilePicker, made: PackedModel) -> list[Launch]:
    """A chunk of CHUNK tokens, and the logits of the last."""
    plan = Prefill(made, KvCache(made.device, made.config, POSITIONS), pick=pick)
    embed, *others = plan.launches(CHUNK)
    made.device.upload(embed.buffers[-1], chunk_bytes(count=CHUNK))
    return [embed, *others, *plan.head()]


def _prefill_short(made: PackedModel) -> list[Launch]:
    """Chunks of fewer tokens, of each size that the chip has."""
    sizes = [size for size in chunk_sizes(made.device.arch, CHUNK) if size < CHUNK]
    plan = Prefill(made, KvCache(made.device, made.config, POSITIONS), sizes=sizes)
    launches = [launch for size in sizes for launch in plan.launches(size)]
    made.device.upload(launches[0].buffers[-1], chunk_bytes(count=sizes[0]))
    return launches


def _load(made: PackedModel) -> list[Launch]:
    """Repacking of every matrix, and the look at its weights."""
    programs, flag = Programs(made.device), made.device.allocate(4, STATE_SPEC)
    launches: list[Launch] = []
    for matrix in matrices(made):
        segments = packing.segments(matrix.rows, matrix.columns)
        launches += arranging(programs, matrix.kind, matrix.buffer, segments, flag)
    return launches


PLANS: Final[Mapping[str, Callable[[PackedModel], list[Launch]]]] = {
    "decode": _decode,
    "persistent-near": partial(_persistent, NEAR_POSITIONS),
    "persistent": partial(_persistent, POSITIONS),
    "persistent-far": partial(_persistent, MOST_POSITION_READS),
    "draw": _draw,
    "batch8": partial(_batch, 8),
    "batch32": partial(_batch, 32),
    "prefill": partial(_prefill, pick_tile),
    "prefill-wgmma": partial(_prefill, pick_wgmma),
    "prefill-short": _prefill_short,
    "load": _load,
}


def plans_of(arch: str, kind: BlockType | None = None) -> list[str]:
    """The plans that a chip such as "sm_87" can run, of a model whose matrices have a format."""
    booked = kind is not None and kind.booked
    plans = [plan for plan in PLANS if not (booked and plan.startswith("persistent"))]
    return [plan for plan in plans if "wgmma" not in plan or kernels_of(arch).wgmma]


def launches(
    plan: str, config: Config, formats: BlockType | Formats, device: DryDevice, tied: bool = True
) -> tuple[PackedModel, list[Launch]]:
    """A plan's launches, and the model of zeros that they work on."""
    made = model(config, formats, device, tied)
    return made, PLANS[plan](made)
