"""The persistent kernel for a program: macros, memory and launch.

All CTAs of the launch wait for each other, so that all of them must be on the chip at once: `Persistent` refuses more
CTAs than the device's SMs hold.
"""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from importlib import resources
from typing import Any, Final, Self

import numpy as np
from numpy.typing import NDArray

from tegrad.hw.chips import Chip, by_arch
from tegrad.llm import delta, inputs
from tegrad.llm.attention import MOST_HEAD_DIM, Scoring
from tegrad.llm.biases import Biases
from tegrad.llm.cache import KvCache
from tegrad.llm.chips import TUNED
from tegrad.llm.closing import Closing
from tegrad.llm.config import Config
from tegrad.llm.errors import UnsupportedModelError, UntunedChipError
from tegrad.llm.formats import FORMATS, PLAIN, SEGMENT, SET, BlockType
from tegrad.llm.macros import ACTIVATIONS, QK_NORMS, ROPES, WIDE, number
from tegrad.llm.network import (
    Add,
    Attend,
    Block,
    Convolve,
    Convolving,
    Delta,
    Gate,
    InputGate,
    Norm,
    NormKind,
    Project,
)
from tegrad.llm.network import Network as Operations
from tegrad.llm.packed import PackedMatrix, PackedModel
from tegrad.llm.programs import load_kernel
from tegrad.llm.rope import Rope
from tegrad.llm.sampling import Sampling
from tegrad.llm.schedule import Heads, Layer, Matrix, Network, Op, Program, Vector, key_of, run_rows, stream_segment
from tegrad.llm.schedule_build import build, pieces_per_row
from tegrad.llm.schedule_proof import validate
from tegrad.llm.schedule_words import REPORT_BYTES, RUNS, WorkspaceLayout, encode, workspace_layout
from tegrad.llm.state import LOGITS_SPEC, States
from tegrad.llm.workspace import Workspace
from tegrad.nv.compilers import CompileFailed, cache_dir
from tegrad.nv.gpu import Buffer, Gpu
from tegrad.nv.program import SHARED_RESERVE, LaunchError
from tegrad.nv.replay import Launch

NEAR_POSITIONS: Final = 256
"""Positions of a cache up to which attention loads keys and values itself; those of more, and of heads of more than
WIDE elements, come through the pipeline."""
MOST_POSITION_READS: Final = 16384
"""Such positions, times the CTAs that each read all of them for a group of the query heads, at most,"""
MOST_WIDE_READS: Final = 131072
"""and where heads have more than WIDE elements. At 15,000 positions eight groups were quicker than four; more positions
were not tried."""
Q8_POSITION_MULTIPLE: Final = 8
"""Positions that a q8_0 cache's must be a multiple of, so that the scales of a tile are whole pieces of 16 bytes."""
BUFFERS: Final = ("program", "workspace", "states", "rings", "histories", "ends", "rope", "logits", "timestamps")
CROWDED: Final = "shared memory holds less than two tiles"
"""What a static_assert of the kernel says."""
WAITING: Final = ("packets", "a counter", "a tile of weights", "a free stage", "a tile on its way")
"""What a wait is for, in the order of the kernel's `enum Waiting`; of the pipeline's, the number is the tile's."""
_RULES: Final = ("schedule", "schedule_build", "schedule_proof", "schedule_words", "network")
"""Modules that a proof depends on: where one changes, programs are proved anew."""


@dataclass(frozen=True, slots=True)
class Tuning:
    """What may be chosen freely; `bench` finds the best by measuring. Names are the kernel's macros in lower case."""

    consumers: int = 8
    per_tile: int = 2
    """Segments of a tile that a consumer takes: 1, 2 or 4."""
    epilogue: int = 4
    pipeline_stages: int = 32
    """Stages of the pipeline at most, of a segment for each consumer; shared memory bounds them too."""
    in_flight: int = 2
    """Tiles on their way at most."""
    epoch_flags: int = 1
    """1: readers poll packets for the flag of the epoch; 0: they poll counters, which are stored after a fence."""
    polled: int = 2
    """Sets of 16 elements that an epilogue thread waits for together: each further round is a trip to L2."""
    backoff: int = 0
    """ns between polls."""
    attention_warps: int = 8
    attention_loads: int = 2
    attention_rows: int = 384
    """Cached positions that one CTA takes alone: to join splits costs more."""
    head_groups: int = 4
    """CTAs that share a KV head's query heads, at most: fewer registers each, but keys and values are read again."""
    attention_pipeline: int = 0
    """1: keys and values come through the pipeline, ahead of their turn; 2: tensor cores attend, where they can; 0:
    each lane loads its own when their turn comes."""
    spared: int = 144 << 10
    """Bytes of gate and up that a CTA streams less where it attends to a short context beside them: what the others
    stream meanwhile. Of parallel blocks only."""
    evict_first: int = 1
    """Weights leave L2 first, so that what passes between CTAs stays there; of bulk copies only."""
    replicas: int = 8
    """Copies of what all CTAs read, 8 at most, so that not all of them poll the same lines of L2."""
    bulk: int | None = None
    """Bulk copies, which only sm_90 has; None: where there are."""
    spin_limit: int = 0
    """Polls after which a wait is given up, so that a step that would hang ends with reports; 0: waits are for ever."""

    @property
    def threads(self) -> int:
        """Threads of a CTA."""
        return 32 * (self.consumers + self.epilogue + 1)

    @classmethod
    def suited(
        cls,
        kinds: Iterable[BlockType],
        positions: int = 0,
        *,
        q8: bool = False,
        heads: Sequence[int] = (64,),
        rings: bool = False,
    ) -> Self:
        """What was best for models of these formats, and heads of so many elements, on an H200 (docs/notebook.md); its
        tiles leave room for a pipeline.

        Floats want more warps that stage, since they travel as they are, and poll more of them; small segments more
        that multiply, where attention needs no ring.
        """
        widest, made = max(kind.segment_bytes for kind in kinds), cls()
        # pieces of scales in every tile; in rings it may begin at any row
        whole = positions % Q8_POSITION_MULTIPLE == 0 and all(size & (size - 1) == 0 for size in heads)
        whole = whole and (all(size % 256 == 0 for size in heads) or not rings)
        wide = max(heads) > WIDE
        pipelined = (positions > NEAR_POSITIONS or wide) and (whole or not q8)
        if widest >= 4096:
            consumers = 32768 // widest
            made = cls(consumers=consumers, per_tile=1, attention_warps=consumers, epilogue=7, backoff=20)
        elif widest < 1280 and not pipelined:
            made = cls(consumers=16, per_tile=1, attention_warps=16, epilogue=3, polled=3)
        if max(heads) > 128:  # a row takes a whole warp
            made = replace(made, attention_loads=4)
        if wide and widest < 4096:  # with twelve warps a thread has 168 registers
            made = replace(made, epilogue=3)
        reads = MOST_WIDE_READS if wide else MOST_POSITION_READS
        return replace(made, attention_pipeline=2, head_groups=max(1, reads // positions)) if pipelined else made


def tuning_for(
    config: Config, kinds: Iterable[BlockType], positions: int, *, reach: int = 0, q8: bool = False
) -> Tuning:
    """The tuning for a model of matrices in these formats, with a cache of so many positions, of which `reach` will be
    used, if not all."""
    positions = positions if (reach or positions) > NEAR_POSITIONS else reach or positions
    rings = any(op.window_within(positions) for op in config.network.attends)
    heads = [config.at(at).head_dim for at, op in enumerate(config.network.mixers) if isinstance(op, Attend)]
    return Tuning.suited(kinds, positions, q8=q8, heads=heads, rings=rings)


def fixed(matrices: Iterable[Matrix], consumers: int) -> bool:
    """Whether a consumer's segments, so many apart, all begin in the same column of their matrix."""
    return all(consumers * SEGMENT % matrix.columns == 0 for matrix in matrices if matrix.kind not in PLAIN)


@dataclass(frozen=True)
class Persistent:
    """A program's kernel for a chip and a cache of so many positions."""

    program: Program
    arch: str
    positions: int
    cache_q8: bool = False
    timestamps: bool = False
    tuning: Tuning = field(default_factory=Tuning)
    shared: int | None = None
    """Bytes of shared memory for a CTA; all that the chip gives one unless said."""

    @property
    def layout(self) -> WorkspaceLayout:
        """Where the kernel keeps what passes between CTAs."""
        return workspace_layout(self.program)

    @property
    def space_bytes(self) -> int:
        """Bytes of the workspace: the layout, and once more for each further copy of the vectors in it."""
        return self.layout.nbytes * self.tuning.replicas

    @property
    def words(self) -> NDArray[Any]:
        """The program as the kernel reads it."""
        return encode(self.program, FORMATS)

    @property
    def defines(self) -> Mapping[str, Any]:
        """The kernel's macros."""
        net, program, tuning = self.program.network, self.program, self.tuning
        config, model, attend = net.config, net.model, turning(net.model)
        matrices = list(net.matrices())
        kinds = {matrix.kind for matrix in (*matrices, net.embedding)}
        packed = {matrix.kind for matrix in matrices} - set(PLAIN)
        own = max(ins.output.elements for ins in program.stages[0].instructions if ins.output is not None)
        made: dict[str, Any] = {
            "CTAS": program.ctas, "STAGES": len(program.stages), "SPLITS": program.splits,
            "VOCAB": net.output.rows, "PRODUCT_FORMATS": len(packed), "DIM": config.dim, "HEADS": config.heads,
            "POSITIONS": self.positions, "ROPE": ROPES[attend.rotation], "EPS": number(config.eps),
            "QK_NORM": QK_NORMS[attend.norms], "CACHE_Q8": self.cache_q8,
            "ACTIVATION": ACTIVATIONS[model.gate.activation],
            "JOINS": self.layout.joins, "COUNTERS": self.layout.counters, "REPORTS": self.layout.reports,
            "COLUMNS": max(m.columns for m in matrices),
            "OWN": own, "SPLIT_SETS": _splits_sets(program), "SUMS": _most_sums(program), "SHARED": self.shared_bytes,
            "TIMESTAMPS": self.timestamps, "REPLICA_BYTES": self.layout.nbytes,
            "SPLIT_FROM": tuning.attention_rows, "FIXED": fixed(matrices, tuning.consumers),
            "ATTENTION_SYNC()": "barrier_sync<ATTENTION_WARPS_READY>(32*ATTENTION_WARPS)",
        }  # fmt: skip
        made |= {f"USES_{kind.name}": 1 for kind in kinds}
        made |= self._heads
        made |= Scoring.of(config.at(0), replace(attend, window=None), self.positions).defines
        if any(matrix.columns % 256 for matrix in matrices if matrix.kind not in PLAIN):
            made["NARROW"] = 1
        if attend.query_norm is not None and config.head_eps != config.eps:
            made["QK_EPS"] = number(config.head_eps)
        if model.embed.scale != 1:
            made["EMBEDDING_SCALE"] = number(model.embed.scale)
        if model.logits.cap is not None:
            made["LOGIT_CAP"] = number(model.logits.cap)
        if model.convolves:
            rings = {layer.ring for layer in net.layers} - {0}
            made |= {"TAPS": max(op.window for op in model.mixers if isinstance(op, Convolve)), "TAP_ROWS": max(rings)}
        if model.attends[0].gated:
            made["GATED"] = 1
        for op, layer in zip(model.mixers, net.layers, strict=True):
            if isinstance(op, Delta):
                made |= delta.macros(config, op, layer.ring)
        if turns := max(layer.turn for layer in net.layers):
            made["ANGLE_TABLES"] = 1 + turns
        given = {
            "POST_NORMS": model.sets_apart, "BY_MEAN": model.by_mean, "UNNORMED": model.project(0).norm is None,
            "UNGATED": model.gate.gate is None, "PARALLEL": model.parallel,
            "RINGS": any(one.rows for one in net.layers), "LAYER_INPUTS": model.embed.inputs is not None,
            "SCALED": model.last_add.scale is not None, "UNIT_VALUES": attend.unit_values,
        }  # fmt: skip
        made |= {"UPS": most} if (most := _most_ups(program)) else {}
        made |= {name: 1 for name, there in given.items() if there}
        for name in Tuning.__dataclass_fields__:
            if (value := getattr(tuning, name)) is not None:
                made[name.upper()] = value
        return made

    @property
    def _heads(self) -> Mapping[str, Any]:
        """The macros of each kind of heads."""
        net, program = self.program.network, self.program
        pairs: dict[bool, int] = {}
        for at, op in enumerate(net.model.mixers):
            if isinstance(op, Attend):
                pairs[net.second_kind(at)] = max(pairs.get(net.second_kind(at), 0), op.rope.dim // 2)
        made: dict[str, Any] = {}
        for second, kind in enumerate(net.heads):
            groups = program.second_groups if second else program.head_groups
            own = {"HEAD_DIM": kind.elements, "KV_HEADS": kind.with_keys * groups, "CACHE_HEADS": kind.with_keys,
                   "ROPE_PAIRS": pairs[bool(second)]}  # fmt: skip
            made |= {f"{'SECOND_' * second}{name}": value for name, value in own.items()}
        if len(net.heads) > 1:
            loads = self.tuning.attention_loads
            made |= {
                "TURN_PAIRS": max(pairs.values()), "ATTENTION_SCALE": number(net.model.attends[0].scale),
                "SECOND_ATTENTION_LOADS": max(1, loads // 2) if net.heads[-1].elements > WIDE else loads,
            }  # fmt: skip
        if net.shared_at or len(net.heads) > 1 or any(op.values_are_keys for op in net.model.attends):
            made["KEYS_PLACED"] = 1
        return made

    def stuck(self, workspace: bytes | bytearray) -> list[str]:
        """Which waits a workspace reports as given up, one of each CTA at most; always empty without `spin_limit`."""
        layout, stages = self.layout, self.program.stages
        words = np.frombuffer(workspace, "<u4", REPORT_BYTES // 4 * self.program.ctas, layout.reports).reshape(
            -1, REPORT_BYTES // 4
        )
        told = []
        for cta, (waiting, at, warp, wanted, found, step, *_) in enumerate(words.tolist()):
            if not waiting:
                continue
            what = WAITING[waiting - 1]
            if what == "packets":
                what += f" of stage {(wanted - 1) % len(stages)}"
            told.append(
                f"step {step}, stage {at} ({stages[at].op.name} of layer {stages[at].layer}) on CTA {cta}: warp {warp} "
                f"waits for {what}, wanted {wanted}, found {found}"
            )
        return told

    @property
    def chip(self) -> Chip:
        """A chip of the architecture. UntunedChipError where there is none."""
        if (chip := by_arch(self.arch)) is None:
            raise UntunedChipError(f"a step in one launch has no tuning for {self.arch}; tuned are {', '.join(TUNED)}")
        return chip

    @property
    def shared_bytes(self) -> int:
        """Dynamic shared memory of a CTA."""
        return self.shared or self.chip.smem_per_cta

    def load(self, device: Gpu) -> Any:
        """The kernel, loaded on an opened NV device; LaunchError where its CTAs cannot all be on the chip at once,
        UnsupportedModelError where a CTA's shared memory does not hold what its rows need."""
        sms, chip = _sms(device), self.chip
        fit = min(
            chip.smem_per_sm // (self.shared_bytes + SHARED_RESERVE), 32 * chip.warps_per_sm // self.tuning.threads, 1
        )  # never two on an SM: it may lack the registers
        if self.program.ctas > sms * fit:
            raise LaunchError(
                f"the persistent step's {self.program.ctas} CTAs wait for each other, but {sms} SMs hold {fit} each: "
                "build its program for fewer CTAs"
            )
        try:
            return load_kernel(
                device, "persistent", buffers=len(BUFFERS), values=2, dynamic_shared=self.shared_bytes, **self.defines
            )
        except CompileFailed as failed:
            if CROWDED not in str(failed):
                raise
            raise UnsupportedModelError(
                f"{self.arch} has too little shared memory for the persistent step's {self.program.ctas} CTAs"
            ) from None

    @property
    def grid(self) -> tuple[int, int, int]:
        """CTAs of the launch."""
        return self.program.ctas, 1, 1

    @property
    def block(self) -> tuple[int, int, int]:
        """Threads of a CTA."""
        return self.tuning.threads, 1, 1


def _sms(device: Gpu) -> int:
    """SMs of an opened device."""
    return int(device.sm_count)


def _splits_sets(program: Program) -> bool:
    """Whether two CTAs may write halves of 16 elements, each with a scale of its own."""
    outputs = (ins.output for stage in program.stages if not stage.floats for ins in stage.instructions)
    return any(
        out.first % SET or out.elements % SET
        for out in outputs
        if out is not None and out.vector not in (Vector.TOP, Vector.SQUARES)
    )


def _most_ups(program: Program) -> int:
    """Rows of up that an instruction leaves to the next at most."""
    gates = (ins for stage in program.stages if stage.op is Op.GATE for ins in stage.instructions)
    return max((run_rows(ins)[1] for ins in gates if ins.runs and ins.output is None), default=0)


def _most_sums(program: Program) -> int:
    """Row sums that an instruction leaves in shared memory at most."""
    most = 0
    for stage in program.stages:
        if stage.op in (Op.PROJECT, Op.ADD, Op.APART, Op.GATE, Op.LOGITS, Op.CONVOLVE):
            sizes = {id(matrix): stream_segment(matrix) for matrix in stage.matrices}
            for ins in stage.instructions:
                if ins.op is stage.op:
                    weights = sum([run.segments * sizes[id(run.matrix)] for run in ins.runs])
                    matrix = ins.runs[0].matrix
                    most = max(most, -(-weights * pieces_per_row(matrix) // matrix.columns))
    return most


class PersistentPlan(Closing):
    """One decode step of the sequence in slot 0 of `states` as one launch, after those that make layers' own inputs
    where there are any (`inputs.launches`). Close it when no step is in flight.

    `launches` leaves logits to sample from; `likeliest` is a step that ends with the likeliest token by itself.
    Everything given stays the caller's. `ctas` is the device's SMs, and `tuning` one that suits the model, unless said.
    UnsupportedModelError, LaunchError, MemoryError, and ScheduleError if the program were wrong.
    """

    best = best_row = None

    def __init__(
        self, model: PackedModel, states: States, cache: KvCache, *, tuning: Tuning | None = None,
        reach: int | None = None, ctas: int | None = None, timestamps: bool = False,
    ) -> None:  # fmt: skip
        """`reach` is how many positions of the cache will be used, if not all: the tuning suits these. It is right
        beyond."""
        self.model, self.config, self.device = model, model.config, model.device
        self._states = states
        self._workspace = Workspace(self.device)
        with self._closed_on_error():
            self._make(cache, tuning, reach or cache.positions, ctas or _sms(self.device), timestamps)

    def likeliest(self, sampling: Sampling) -> tuple[Launch, ...]:
        """A whole step."""
        return (*self._input_launches, self._launch(sampling.finish, greedy=True))

    def stuck(self) -> list[str]:
        """The waits that steps have given up, where `tuning.spin_limit` bounds them; waits for the device."""
        if not self.kernel.tuning.spin_limit:
            return []
        self.device.synchronize()
        return self.kernel.stuck(self.device.download(self._space, self.kernel.layout.nbytes))

    def close(self) -> None:
        """Free the plan's buffers. Closing twice is harmless."""
        self._workspace.close()

    def _make(self, cache: KvCache, tuning: Tuning | None, reach: int, ctas: int, timestamps: bool) -> None:
        config, net, workspace = self.config, self.config.network, self._workspace
        self._input_launches, layer_inputs = tuple[Launch, ...](), None
        if net.embed.inputs is not None:
            layer_inputs = workspace.take(inputs.bytes_of(self.model, 1))
            self._input_launches = inputs.launches(self.model, self._states.states, workspace, layer_inputs)
        made = network(self.model, cache, workspace, layer_inputs)
        if tuning is None:
            kinds = (matrix.kind for matrix in made.matrices())
            tuning = tuning_for(config, kinds, cache.positions, reach=reach, q8=cache.q8)
        program = build(made, ctas, head_groups=tuning.head_groups, spared=tuning.spared)
        self.kernel = Persistent(
            program, self.device.arch, cache.positions, cache.q8, timestamps=timestamps, tuning=tuning
        )
        words = self.kernel.words
        prove(program, words)
        self._program = self.kernel.load(self.device)
        self._words = workspace.put(words)
        self._space = workspace.put(np.zeros(self.kernel.space_bytes, np.uint8))
        self._rope = workspace.put(angle_tables(net, cache.positions, self.model.divisors.of(cache.positions)))
        self.logits = workspace.take(4 * config.vocab, LOGITS_SPEC)
        self.timestamps = workspace.take(32 * ctas * len(program.stages)) if timestamps else self.logits
        """Where asked for: u64 (ctas, stages, 4), cycles of each SM."""
        self.launches = (*self._input_launches, self._launch((self.logits, self.logits), greedy=False))

    def _launch(self, finish: tuple[Buffer, Buffer], *, greedy: bool) -> Launch:
        buffers = (self._words, self._space, self._states.states, self._states.rings, *finish, self._rope, self.logits,
                   self.timestamps)  # fmt: skip
        values = (len(self.kernel.program.stages), int(greedy))
        return Launch(self._program, buffers, self.kernel.grid, self.kernel.block, values)


def network(model: PackedModel, cache: KvCache, workspace: Workspace, layer_inputs: Buffer | None = None) -> Network:
    """A loaded model as the schedule sees it, with what layers read beside the stream, float32 (layers, elements);
    UnsupportedModelError for what the kernel has no word for."""
    config, net = model.config, model.config.network
    check_block(config)

    def matrix(name: str, packed: PackedMatrix) -> Matrix:
        return Matrix(name, packed.kind, packed.rows, packed.columns, packed.buffer.va_addr)

    biases = Biases(model, workspace)
    as_it_is = net.project(0).norm is None or net.embed.inputs is not None
    ones = workspace.put(np.ones(config.dim, np.float32)).va_addr if as_it_is else 0
    windows = [(isinstance(op, Attend) and op.window_within(cache.positions)) or 0 for op in net.mixers]
    ropes = _ropes(net)
    layers = []
    for at, (op, layer, kept) in enumerate(zip(net.mixers, model.layers, cache.layers, strict=True)):
        matrices = {"qkv": tuple(matrix(f"blk.{at}.qkv.{index}", packed) for index, packed in enumerate(layer.qkv))}
        for one in net.blocks[at]:
            if isinstance(one, Add | Gate | InputGate):
                own = (matrix(f"blk.{at}.{spec.name}", layer.matrices[spec.name]) for spec in one.matrices)
                matrices[key_of(one)] = tuple(own)
        vectors = {name: vector.va_addr for name, vector in layer.vectors.items()}
        for one in net.blocks[at]:
            if isinstance(one, Add) and one.norm is not None and one.scale is not None:  # it lies behind the norm's
                vectors[one.scale.name] = vectors[one.norm.spec.name] + 4 * config.dim
        if isinstance(op, Attend):
            where = {"turn": ropes.index(op.rope), "rows": kept.rows if any(windows) else 0, "window": windows[at]}
        else:
            where = {"ring": kept.rows, "state": 0 if kept.state is None else kept.state.va_addr}
        if layer_inputs is not None:
            where["layer_input"] = layer_inputs.va_addr + 4 * config.layer_input * at
        layers.append(
            Layer(
                matrices, vectors, {key_of(one): biases.of(at, one) for one in net.blocks[at]},
                kept.keys.va_addr, kept.values.va_addr, kept.key_scales.va_addr, kept.value_scales.va_addr, **where,
            )
        )  # fmt: skip
    embedding = matrix("token_embd", model.embedding)
    last = embedding if model.output is model.embedding else matrix("output", model.output)
    output_norm = model.vectors[net.logits.norm.spec.name].va_addr
    return Network(config, embedding, tuple(layers), last, output_norm, ones, biases.of(config.layers, net.logits))


def check_block(config: Config) -> None:
    """UnsupportedModelError where a model's block is not the one that the kernel runs: one of RMS norms, or of layer
    norms without a bias where there is a gate, and rotated heads, alike in all layers but for windows, angles, and
    whose keys and values they attend to. Heads are of one or two kinds. Where it is parallel, both that read the stream
    have the same layer norm. What stands in the place of attention does so with RMS norms before blocks alone, and as
    many elements as heads mix."""
    net, turned = config.network, turning(config.network)
    alike = [_as_in(turned, op) for op in net.attends]
    kinds: dict[Heads, set[int]] = {}
    for at, mixer in enumerate(net.mixers):
        if isinstance(mixer, Attend):
            turned_by = {mixer.rope.dim} if mixer.rotation != "none" else set()
            kinds.setdefault(Heads(config.at(at).head_dim, config.at(at).kv_heads), set()).update(turned_by)
    few = len(kinds) <= 2 and all(len(widths) <= 1 for widths in kinds.values())
    if alike != list(net.attends) or not few or (len(kinds) == 2 and turned.norms == "whole"):
        raise UnsupportedModelError(f"the persistent step does not run {config.arch.name}: its layers differ")
    if max(kind.elements for kind in kinds) > MOST_HEAD_DIM:
        raise UnsupportedModelError(f"the persistent step does not run heads of more than {MOST_HEAD_DIM} elements")
    other = {config.size("mixed")} != {config.dim if isinstance(op, Convolve) else op.heads * op.width
                                       for op in net.mixers if not isinstance(op, Attend)}  # fmt: skip
    apart = len(net.attends) < net.layers and (net.sets_apart or net.parallel or other)
    apart = apart or (turned.gated and turned.norms == "whole")
    known = all(_known_block(net, block) for block in net.blocks) and not apart
    if turned.rotation != "none" and net.embed.positions is None and known:
        return
    raise UnsupportedModelError(
        f"the persistent step does not run {config.arch.name}: its norm, gate or positions differ"
    )


def _as_in(attend: Attend, other: Attend) -> Attend:
    """An attention with what may differ from layer to layer as another one has it."""
    made = replace(
        attend, rotation=other.rotation, rope=other.rope, window=other.window, source=other.source,
        values_are_keys=other.values_are_keys,
    )  # fmt: skip
    return made if other.source is None else replace(made, key_norm=other.key_norm, unit_values=other.unit_values)


def _known_block(net: Operations, block: Block) -> bool:
    """Whether the kernel runs the block's operations in their order, with the norms that they have."""
    match block:
        case (
            Project() as project,
            Attend() | Convolving(),
            Add(reads="mixed") as first,
            Gate() as gated,
            Add() as last,
            *own,
        ) if _of_input(own, last):
            alike = _kind(project.norm) == _kind(gated.norm) and _kind(first.norm) == _kind(last.norm)
        case (Project() as project, Gate() as gated, Attend(), Add(reads="hidden") as first, Add() as last):
            alike = net.by_mean and project.norm == gated.norm
        case _:
            return False
    after = {_kind(first.norm), _kind(last.norm)}
    if not net.by_mean:
        return alike and {*after, _kind(project.norm), _kind(net.logits.norm)} <= {"rms", None}
    biased = gated.norm is None or gated.norm.spec.bias != "none"
    return alike and after == {None} and _kind(project.norm) == "layer" and not (biased and gated.gate)


def _of_input(ops: Sequence[Any], last: Add) -> bool:
    """Whether nothing follows the feed-forward, or what a layer's own input adds, normed as that does."""
    if not ops:
        return True
    gate, add = ops
    return isinstance(gate, InputGate) and isinstance(add, Add) and _kind(add.norm) == _kind(last.norm) is not None


def _kind(norm: Norm | None) -> NormKind | None:
    return None if norm is None else norm.kind


def turning(net: Operations) -> Attend:
    """The first layer's attention that rotates heads, or the first one's."""
    return next((op for op in net.attends if op.rotation != "none"), net.attends[0])


def _ropes(net: Operations) -> list[Rope]:
    """The different ones, in the order of the layers."""
    return list(dict.fromkeys(op.rope for op in net.attends))


def angle_tables(net: Operations, positions: int, divisors: NDArray[np.float32] | None = None) -> NDArray[np.float32]:
    """Cosines and sines (ropes, 2, positions, pairs) of each rope; where nothing is rotated, of no angle."""
    ropes = _ropes(net)
    made = np.zeros((len(ropes), 2, positions, max(rope.dim for rope in ropes) // 2), np.float32)
    made[:, 0] = 1
    for table, rope in zip(made, ropes, strict=True):
        table[:, :, : rope.dim // 2] = rope.tables(positions, divisors)
    return made


def prove(program: Program, words: NDArray[Any] | None = None) -> None:
    """Validate a program, once for each of its kind: a file in the cache remembers the proof. ScheduleError.

    `words` is its encoding, if that is at hand.
    """
    words = encode(program, FORMATS) if words is None else words.copy()
    for name in ("norm", "bias", "extra"):
        words[name] = 0
    # Addresses of weights count from their matrix, so that what was proved is proved wherever the weights lie.
    addresses = words["runs"]["address"]
    for at, stage in enumerate(program.stages):
        firsts = ([run.first for run in ins.runs] for ins in stage.instructions)
        addresses[at] = [[*of, *(0,) * (RUNS - len(of))] for of in firsts]
    names = sorted(
        {(matrix.name, matrix.kind.name, matrix.rows, matrix.columns) for matrix in program.network.matrices()}
    )
    rules = b"".join(resources.files("tegrad.llm").joinpath(f"{name}.py").read_bytes() for name in _RULES)
    digest = hashlib.sha256(
        words.tobytes() + repr((names, program.splits, program.head_groups, program.second_groups)).encode() + rules
    ).hexdigest()
    known = cache_dir().parent / "proofs" / digest
    if not known.exists():
        validate(program)
        with contextlib.suppress(OSError):  # a cache that cannot be written is no error
            known.parent.mkdir(parents=True, exist_ok=True)
            known.touch()
