"""The persistent kernel for a program: macros, memory and launch.

All CTAs of the launch wait for each other, so that all of them must be on the chip at once: `Persistent` refuses more
CTAs than the device's SMs hold.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from tegrad.hw.chips import by_sm_version
from tegrad.llm.attention import ROPES
from tegrad.llm.errors import UnsupportedModelError
from tegrad.llm.gguf import BF16, F16, F32, Q4_0, Q4_K, Q5_K, Q6_K, Q8_0, BlockType
from tegrad.llm.programs import load_kernel
from tegrad.llm.schedule import Op, Program, Workspace, encode, pieces_per_row, workspace
from tegrad.nv.program import LaunchError

FORMATS: Final[tuple[BlockType, ...]] = (Q6_K, Q5_K, Q4_K, Q8_0, Q4_0, F16, BF16, F32)
"""In the order of the kernel's `enum Format`."""
BUFFERS: Final = ("program", "workspace", "states", "rings", "rope", "logits", "stamps")
RESERVED: Final = 1 << 10
"""Shared memory that the hardware keeps of a CTA's."""


@dataclass(frozen=True, slots=True)
class Tuning:
    """What may be chosen freely; `bench` finds the best by measuring. Names are the kernel's macros in lower case."""

    consumers: int = 16
    service: int = 3
    ring_tile: int = 16
    """Segments of a tile."""
    ring_slots: int = 32
    """Tiles of the ring at most; shared memory bounds them too."""
    in_flight: int = 1
    """Tiles on their way at most."""
    handover: int = 1
    """1: packets, which readers poll; 0: counters behind a fence."""
    backoff: int = 0
    """ns between polls."""
    attention_warps: int = 8
    attention_loads: int = 2
    evict_first: int = 0
    bulk: int | None = None
    """Bulk copies, which only sm_90 has; None: where there are."""

    @property
    def threads(self) -> int:
        """Threads of a CTA."""
        return 32 * (self.consumers + self.service + 1)


@dataclass(frozen=True)
class Persistent:
    """A program's kernel for a chip. `attention` holds attention.cuh's macros, of which POSITIONS and EPS."""

    program: Program
    sm_version: int
    positions: int
    rope: str
    rope_pairs: int
    eps: float
    qk_norm: bool = False
    cache_q8: bool = False
    activation: str = "silu"
    greedy: bool = True
    store_logits: bool = False
    stamps: bool = False
    tuning: Tuning = field(default_factory=Tuning)
    shared: int | None = None
    """Bytes of shared memory for a CTA; all that the chip gives one unless said."""

    @property
    def room(self) -> Workspace:
        """Where the kernel keeps what passes between CTAs."""
        return workspace(self.program)

    @property
    def words(self) -> NDArray[Any]:
        """The program as the kernel reads it."""
        return encode(self.program, FORMATS)

    @property
    def defines(self) -> Mapping[str, Any]:
        """The kernel's macros."""
        net, program, tuning = self.program.network, self.program, self.tuning
        matrices = list(net.matrices())
        kinds = {matrix.kind for matrix in (*matrices, net.embedding)}
        own = max(ins.output.count for ins in program.stages[0].instructions if ins.output is not None)
        made: dict[str, Any] = {
            "CTAS": program.ctas, "STAGES": len(program.stages), "SPLITS": program.parts, "DIM": net.dim,
            "HEADS": net.heads, "KV_HEADS": net.kv_heads, "HEAD_DIM": net.head_dim, "POSITIONS": self.positions,
            "ROPE": ROPES[self.rope], "ROPE_PAIRS": self.rope_pairs, "EPS": f"{self.eps:.9e}f",
            "QK_NORM": self.qk_norm, "CACHE_Q8": self.cache_q8, "ACTIVATION": {"silu": 1, "gelu": 2}[self.activation],
            "JOINS": self.room.joins, "COUNTERS": self.room.counters, "COLUMNS": max(m.columns for m in matrices),
            "OWN": own, "SUMS": _most_sums(program), "SHARED": self.shared_bytes, "GREEDY": self.greedy,
            "STORE_LOGITS": self.store_logits, "STAMPS": self.stamps,
            "ATTENTION_SYNC()": "barrier_sync<ATTENTION_MEET>(32*ATTENTION_WARPS)",
        }  # fmt: skip
        made |= {f"USES_{kind.name}": 1 for kind in kinds}
        for name in Tuning.__dataclass_fields__:
            if (value := getattr(tuning, name)) is not None:
                made[name.upper()] = value
        return made

    @property
    def shared_bytes(self) -> int:
        """Dynamic shared memory of a CTA."""
        return self.shared or by_sm_version(self.sm_version).smem_per_cta

    def load(self, device: Any) -> Any:
        """The kernel, loaded on an opened NV device; LaunchError where its CTAs cannot all be on the chip at once."""
        sms = device.num_gpcs * device.num_tpc_per_gpc * device.num_sm_per_tpc
        chip = by_sm_version(device.sm_version)
        fit = min(chip.smem_per_sm // (self.shared_bytes + RESERVED), 32 * chip.warps_per_sm // self.tuning.threads)
        if self.program.ctas > sms * fit:
            raise LaunchError(
                f"the persistent step's {self.program.ctas} CTAs wait for each other, but {sms} SMs hold {fit} each: "
                "build its program for fewer CTAs"
            )
        return load_kernel(
            device, "persistent", buffers=len(BUFFERS), values=1, dynamic_shared=self.shared_bytes, **self.defines
        )

    @property
    def grid(self) -> tuple[int, int, int]:
        """CTAs of the launch."""
        return self.program.ctas, 1, 1

    @property
    def block(self) -> tuple[int, int, int]:
        """Threads of a CTA."""
        return self.tuning.threads, 1, 1


def _most_sums(program: Program) -> int:
    """Row sums that an instruction leaves in shared memory at most."""
    most = 0
    for stage in program.stages:
        for ins in stage.instructions:
            if ins.op in (Op.PROJECT, Op.ADD, Op.GATE, Op.LOGITS):
                rows = [run.segments * _weights(run) // run.matrix.columns for run in ins.runs]
                most = max(most, sum(rows) * pieces_per_row(ins.runs[0].matrix))
    return most


def _weights(run: Any) -> int:
    from tegrad.llm.schedule import stream_segment

    return stream_segment(run.matrix)


def check(network_biases: Mapping[str, bool]) -> None:
    """Refuse by name what the kernel has no word for."""
    for name, present in network_biases.items():
        if present:
            raise UnsupportedModelError(f"{name} has a bias, which the persistent step does not add")


def zeros(size: int) -> NDArray[np.uint8]:
    """The workspace before the first step."""
    return np.zeros(size, np.uint8)
