"""Every plan of a model as launches on a `DryDevice`: a token, a step of a batch, a chunk of a prompt, a load."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, Final

from tinygrad.runtime.support.hcq import HCQBuffer

from tegrad.bench.dry import DryDevice, matrices, model
from tegrad.llm.arch import Config
from tegrad.llm.batch import Batch
from tegrad.llm.cache import KvCache
from tegrad.llm.chips import kernels_of
from tegrad.llm.formats import F16, F32, PLAIN, SEGMENT, BlockType
from tegrad.llm.gemm import TilePicker, pick_tile, pick_wgmma
from tegrad.llm.packed import WARPS, PackedModel, look_at
from tegrad.llm.persistent import MOST_POSITION_READS, NEAR_POSITIONS, PersistentPlan
from tegrad.llm.plan import DecodePlan
from tegrad.llm.prefill import Prefill, chunk_bytes
from tegrad.llm.programs import load_kernel
from tegrad.llm.sampling import Sampling, Settings
from tegrad.llm.state import LOGITS_SPEC, STATE_SPEC, States
from tegrad.nv.replay import Launch

POSITIONS: Final = 4096
"""Of the cache."""
CHUNK: Final = 512
DRAWN: Final = (Settings(temperature=0.8, top_k=40, top_p=0.9), Settings(temperature=0.8, top_p=0.9))
"""With a top-k small enough for one launch, and without."""


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
    first, *others = plan.launches(CHUNK)
    (chunk,) = first.buffers
    # As before the first launch, which moves on to the first chunk: run once, it leaves all others CHUNK tokens.
    made.device.upload(chunk, chunk_bytes(left=CHUNK))
    return [first, *others, *plan.head()]


def _load(made: PackedModel) -> list[Launch]:
    """Repacking of every matrix, and the look at its weights."""
    launches = []
    flag = made.device.allocate(4, STATE_SPEC)
    for matrix in matrices(made):
        work: list[tuple[Any, tuple[HCQBuffer, ...]]] = []
        if matrix.kind not in PLAIN:
            program = load_kernel(made.device, "repack", buffers=1, values=1, FORMAT=matrix.kind.name, WARPS=WARPS)
            work.append((program, (matrix.buffer,)))
        if matrix.kind not in (F32, F16):
            work.append((look_at(made.device, matrix.kind), (matrix.buffer, flag)))
        segments = -(-matrix.rows * matrix.columns // SEGMENT)
        grid = (-(-segments // WARPS), 1, 1)
        launches += [Launch(program, buffers, grid, (32 * WARPS, 1, 1), (segments,)) for program, buffers in work]
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
    "load": _load,
}


def plans_of(arch: str) -> list[str]:
    """The plans that a chip such as "sm_87" can run."""
    return [plan for plan in PLANS if "wgmma" not in plan or kernels_of(arch).wgmma_tokens is not None]


def launches(
    plan: str, config: Config, kind: BlockType, device: DryDevice, tied: bool = True
) -> tuple[PackedModel, list[Launch]]:
    """A plan's launches, and the model of zeros that they work on."""
    made = model(config, kind, device, tied)
    return made, PLANS[plan](made)
