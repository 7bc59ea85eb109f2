"""persistent.cu on the board, stage by stage against its interpreter, and whole steps; it stays in its buffers."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tiny_llama
from decode_steps import TOKENS, errors, read
from interpreter import Interpreter, Travelling
from networks import Made, Shape, make
from numpy.typing import NDArray
from operands import Operands
from small_tunings import SMALL
from tiny_llama import MIXED, SHAPES, TYPE, write

from tegrad.llm import persistent
from tegrad.llm.cache import KvCache
from tegrad.llm.engine import Engine
from tegrad.llm.errors import UnsupportedModelError
from tegrad.llm.formats import BF16, F16, F32, Q4_0, Q4_K, Q5_0, Q5_K, Q6_K, Q8_0
from tegrad.llm.gguf import Gguf
from tegrad.llm.packed import PackedModel
from tegrad.llm.persistent import Persistent, PersistentPlan, Tuning, prove
from tegrad.llm.plan import DecodePlan
from tegrad.llm.reference import Reference
from tegrad.llm.rope import Temperature
from tegrad.llm.sampling import HISTORY, Settings
from tegrad.llm.schedule import UNIT, Op, ScheduleError, Vector
from tegrad.llm.schedule_build import build
from tegrad.llm.schedule_proof import validate
from tegrad.llm.state import RING, State, States
from tegrad.nv.program import LaunchError
from tegrad.nv.replay import Recording

pytestmark = pytest.mark.board


@pytest.fixture
def operands(opened: Any, request: pytest.FixtureRequest) -> Iterator[Operands]:
    made = Operands(opened, request.param)
    yield made
    made.check()
    made.free()


GEMMA = replace(SHAPES["gemma3"], layers=4)
GEMMA4 = replace(SHAPES["gemma4 small"], layer_input=256)
QWEN35 = replace(SHAPES["qwen35"], eps=1e-2)


class Rig:
    """A network on the device, its kernel and its interpreter."""

    def __init__(self, operands: Operands, shape: Shape, ctas: int, tuning: Tuning = SMALL, **more: Any) -> None:
        self.operands, self.buffers = operands, {}
        self.made: Made = make(shape, self._put)
        self.program = build(
            self.made.network, ctas, more.pop("parts", None), more.pop("shares", 1), more.pop("spared", 0)
        )
        validate(self.program)
        self.kernel = Persistent(self.program, operands.device.arch, shape.positions, tuning=tuning, **more)
        self.loaded = self.kernel.load(operands.device)
        self.words = operands.put(self.kernel.words.view(np.uint8))
        self.space = operands.zeros(self.kernel.space_bytes, np.uint8)
        self.state, self.ring = operands.zeros(64, np.uint8), operands.zeros(RING, np.uint64)
        self.history, self.ends = operands.zeros(HISTORY, np.int32), operands.zeros(1, np.int32)
        self.logits = operands.zeros(shape.vocab, np.float32)
        self.rope = self.buffers[self.made.rope_address]
        self.interpreter = Interpreter(self.program, self.made.weights, shape.positions, self.split)

    def _put(self, array: NDArray[Any]) -> int:
        buffer = self.operands.put(array)
        self.buffers[buffer.va_addr] = buffer
        return buffer.va_addr

    def split(self, cached: int, layer: int) -> list[tuple[int, int]]:
        """attend::range of attention.cuh."""
        tuning, net, defines = self.kernel.tuning, self.program.network, self.kernel.defines
        if cached <= tuning.attention_rows:
            return [(0, cached)]
        loads = defines["SECOND_ATTENTION_LOADS"] if net.second_kind(layer) else tuning.attention_loads
        tile = max(1, 256 // net.config.at(layer).head_dim) * loads
        limit = min(max(1, -(-cached // (tuning.attention_warps * tile))), self.program.splits)
        share = (cached + limit - 1) // limit
        rows = (share + tile - 1) // tile * tile
        count = -(-cached // rows) if rows else 1
        return [(min(at * rows, cached), min((at + 1) * rows, cached)) for at in range(count)]

    def store(self, buffer: Any, array: NDArray[Any]) -> None:
        data = np.ascontiguousarray(array).view(np.uint8).reshape(-1)
        self.operands.device.allocator._copyin(buffer, memoryview(data.tobytes()))

    def begin(self, token: int, position: int) -> None:
        """The state of a step, and a workspace as new."""
        state = State(position=position, token=token, limit=self.made.shape.positions, active=1)
        self.store(self.state, np.frombuffer(bytes(state), np.uint8))
        self.store(self.space, np.zeros(self.kernel.space_bytes, np.uint8))

    def launch(self, stages: int | None = None) -> None:
        """Run a step, or its first stages."""
        buffers = (self.words, self.space, self.state, self.ring, self.history, self.ends, self.rope, self.logits)
        count = len(self.program.stages) if stages is None else stages
        sizes = {"global_size": self.kernel.grid, "local_size": self.kernel.block}
        self.loaded(*buffers, self.logits, vals=(count, 1), wait=True, **sizes)

    def vector(self, vector: Vector, floats: bool) -> Travelling:
        """What travels, as the kernel left it in its workspace."""
        whole = self.operands.get(self.space, self.kernel.space_bytes, np.uint8)
        size = self.program.network.sizes[vector]
        return Travelling.arrived(size, whole[self.kernel.layout.vectors[vector] :], floats)

    def cache(self, layer: int) -> tuple[NDArray[Any], NDArray[Any]]:
        shape = self.interpreter.keys[layer].shape
        if len(ring := self.interpreter.rings[layer]):
            kept = self.operands.get(self.buffers[self.made.caches[layer][0]], ring.shape, np.float32)
            return kept, kept
        keys, values = (self.operands.get(self.buffers[at], shape, np.float16) for at in self.made.caches[layer])
        return keys, values

    def fill_cache(self, position: int) -> None:
        """Random keys and values before a position, or what is convolved; what lies after them is no number."""
        rng = np.random.default_rng(3)
        for layer, ring in enumerate(self.interpreter.rings):
            if len(ring):
                ring[:] = np.nan
                before = np.arange(max(0, position + 1 - self.made.shape.taps), position) % len(ring)
                ring[before] = rng.standard_normal((len(before), ring.shape[1]))
                self.store(self.buffers[self.made.caches[layer][0]], ring)
            if len(states := self.interpreter.states[layer]):
                states[:] = np.nan
                states[position % 2] = 0.3 * rng.standard_normal(states[0].shape)
                self.store(self.buffers[self.made.caches[layer][1]], states)
        for index, side in enumerate((self.interpreter.keys, self.interpreter.values)):
            for layer, (kept, addresses) in enumerate(zip(side, self.made.caches, strict=True)):
                if len(self.interpreter.rings[layer]):
                    continue
                kept[:] = np.nan
                window = self.program.network.layers[layer].window or position + 1
                rows = np.arange(max(0, position + 1 - window), position) % kept.shape[1]
                kept[:, rows] = rng.standard_normal(kept[:, rows].shape)
                self.store(self.buffers[addresses[index]], kept)


def check_stages(rig: Rig, token: int, position: int) -> None:
    """Every stage alone: the interpreter computes it from what the kernel had before it, and both publish the same."""
    rig.interpreter.begin(token, position)
    for at, stage in enumerate(rig.program.stages):
        if stage.op is Op.SAMPLE:
            break
        rig.begin(token, position)
        rig.launch(at + 1)
        for ins in stage.instructions:
            rig.interpreter.execute(ins)
        spans = [ins.output for ins in stage.instructions if ins.output is not None]
        if stage.op is Op.APART or (stage.op is Op.GATE and not spans):
            continue  # the stage after it publishes what comes of this one's
        if stage.op is Op.LOGITS:
            if not spans:
                continue
            got = rig.operands.get(rig.logits, rig.made.shape.vocab, np.float32)
            np.testing.assert_allclose(
                got, rig.interpreter.logits, rtol=1e-4, atol=1e-4 * np.abs(got).max(), err_msg=str(at)
            )
            continue
        vector = spans[0].vector
        got, made = rig.vector(vector, stage.floats), rig.interpreter.vectors[vector]
        name = f"{stage.op.name} of layer {stage.layer}"
        if stage.floats:
            size = np.abs(made.floats).max()
            np.testing.assert_allclose(got.floats, made.floats, rtol=1e-4, atol=1e-5 * size, err_msg=name)
        else:
            # Scales travel with 10 bits: peaks that differ in their last bits may differ by a code, of 512 at least.
            np.testing.assert_allclose(got.scale, made.scale, rtol=1 / 511, err_msg=name)
            written = rig.program.network.written(stage, vector)
            error = np.abs(got.staged(False) - made.staged(False))[:written] / np.repeat(made.scale, UNIT)[:written]
            assert error.max() < 1.1 + 127 / 511, name  # one level, and 127 of them with scales a code apart
            assert (error > 0.1).mean() < 0.05, name
            same = np.repeat(got.scale == made.scale, UNIT) & (got.q == made.q)
            assert not rig.kernel.defines["SPLIT_SETS"] or (got.quarter != made.quarter)[same].mean() < 0.1, name
            np.testing.assert_allclose(got.squares, made.squares, rtol=2e-3, err_msg=name)
        got.stage = made.stage
        rig.interpreter.vectors[vector] = got
        if stage.op in (Op.CONVOLVE, Op.DELTA):
            ring = rig.interpreter.rings[stage.layer]
            kept, _ = rig.cache(stage.layer)
            if len(states := rig.interpreter.states[stage.layer]):
                found = rig.operands.get(rig.buffers[rig.made.caches[stage.layer][1]], states.shape, np.float32)
                np.testing.assert_allclose(
                    found, states, rtol=2e-4, atol=2e-4 * np.nanmax(np.abs(states)), err_msg=name
                )
            np.testing.assert_allclose(kept, ring, rtol=1e-4, atol=1e-4 * np.nanmax(np.abs(ring)), err_msg=name)
        if stage.op is Op.ATTEND:
            for mine, theirs in zip(
                rig.cache(stage.layer), (rig.interpreter.keys, rig.interpreter.values), strict=True
            ):
                np.testing.assert_allclose(
                    mine.astype(np.float32), theirs[stage.layer].astype(np.float32), rtol=2e-3, atol=1e-3, err_msg=name
                )


CASES: dict[str, tuple[Shape, int, int, dict[str, Any]]] = {
    # rows of an eighth of a segment; more CTAs than some stages have units for
    "small": (Shape(), 6, 20, {}),
    # a layer that rotates nothing, and one after it; embeddings times a number
    "unturned": (Shape(layers=3, unturned=2, embedding_scale=7.5), 6, 20, {}),
    # queries that grow with their position
    "temperature": (Shape(temperature=Temperature(1.5, 7)), 6, 50, {}),
    # rows of 3/8 of a segment, and of one and a half; values and down in another format; biases, qk norms, other rope;
    # two parts of attention, joined; each vector three times; two segments of a tile for each consumer
    "mixed": (
        Shape(768, 3072, 4, 2, 64, 1, 520, Q4_K, Q6_K, Q6_K, bias=True, qk_norm=True, halves=True, positions=128),
        5, 100, {"shares": 2, "parts": 2, "tuning": replace(SMALL, replicas=3, per_tile=2)},
    ),
    # whole segments; counters instead of packets, two tiles on their way
    "counters": (
        Shape(2048, 4096, 4, 2, 64, 1, 72, Q8_0, positions=128),
        4, 100, {"tuning": replace(SMALL, epoch_flags=0, in_flight=2, consumers=5)},
    ),
    # more logits than fit shared memory at once; rows of a quarter of a segment
    "by turns": (Shape(layers=3, kind=Q4_K, value_kind=Q6_K, down_kind=Q6_K, others_in=(0, 2)), 6, 20, {}),
    "logits": (Shape(512, 512, 4, 2, 64, 1, 25000, Q4_K), 2, 3, {}),
    # keys and values through the pipeline: parts of several tiles and a rest, four query heads together
    "pipeline": (
        Shape(512, 512, 8, 2, 64, 1, 264, positions=256), 6, 237, {"tuning": replace(SMALL, attention_pipeline=1)},
    ),
    "tensor": (
        Shape(512, 512, 8, 2, 64, 1, 264, qk_norm=True, positions=256), 7, 251,
        {"tuning": replace(SMALL, attention_pipeline=2, pipeline_stages=2)},
    ),
    # plain rows, below and above a segment's width; each vector eight times
    "plain": (Shape(512, 4096, 4, 2, 64, 1, 72, F16), 3, 40, {"tuning": replace(SMALL, replicas=8, per_tile=2)}),
    # up in another format than gate in one layer of three, whose units stay together by two and by four
    "up by itself": (
        Shape(640, 1280, 4, 2, 64, 3, 72, Q4_K, others_in=(1,), up_kind=Q6_K), 5, 40,
        {"tuning": replace(SMALL, replicas=3)},
    ),
    "up by itself after norms": (
        Shape(512, 768, 4, 2, 64, 2, 72, Q8_0, post_norms=True, up_kind=Q4_0, positions=128), 4, 40, {},
    ),
    "up by itself beside attention": (
        Shape(512, 768, 4, 2, 64, 2, 72, Q8_0, by_mean=True, parallel=True, up_kind=Q5_K), 5, 40, {},
    ),
    # the other formats
    "packed": (Shape(512, 1024, 4, 2, 64, 1, 72, Q4_0, Q5_K, BF16), 5, 40, {}),
    # rows of 9 and of 10 chunks: lanes' sums stay apart, or pairs of them; 32 and 16 rows stay together
    "narrow": (Shape(576, 640, 9, 3, 64, 1, 301, Q5_0), 5, 40, {"tuning": replace(SMALL, per_tile=2)}),
    "floats": (Shape(256, 512, 4, 2, 64, 1, 72, F32), 5, 40, {}),
    # norms after blocks; rings of fewer rows than positions, whose windows go round, and angles of their own; caps
    "gemma": (
        Shape(
            512, 768, 4, 2, 64, 3, 72, Q4_K, down_kind=Q6_K, qk_norm=True, halves=True, positions=200, post_norms=True,
            window=50, score_cap=5.0, logit_cap=20.0,
        ), 5, 150, {"shares": 2, "tuning": replace(SMALL, replicas=3)},
    ),
    "gemma pipeline": (
        Shape(512, 512, 4, 2, 128, 2, 72, positions=200, post_norms=True, window=60),
        5, 150, {"tuning": replace(SMALL, attention_pipeline=2, per_tile=2, pipeline_stages=2)},
    ),
    "wide heads": (
        Shape(512, 512, 4, 2, 256, 2, 72, F16, positions=200, post_norms=True, window=60, score_cap=5.0),
        5, 170, {"tuning": replace(SMALL, attention_pipeline=1, attention_loads=8, epoch_flags=0)},
    ),
    # heads of two kinds, the wider in two groups; layers that take keys and values of earlier ones, that read a vector
    # of their own, and that scale the stream
    "gemma4": (
        Shape(
            512, 768, 4, 1, 512, 6, 72, Q4_K, down_kind=Q6_K, qk_norm=True, halves=True, positions=200, post_norms=True,
            window=50, local=(256, 1), shared=2, layer_input=256, scaled=True, logit_cap=20.0,
        ), 9, 150, {"tuning": replace(SMALL, replicas=3)},
    ),
    "gemma4 pipeline": (
        Shape(
            512, 768, 4, 1, 512, 5, 72, Q8_0, qk_norm=True, halves=True, positions=200, post_norms=True, window=50,
            local=(256, 2), shared=1, layer_input=128, scaled=True,
        ), 8, 180, {"tuning": replace(SMALL, attention_pipeline=1, epoch_flags=0, per_tile=2, attention_loads=4)},
    ),
    # values that are keys, in layers with fewer KV heads and wider ones
    "gemma4 large": (
        Shape(
            512, 512, 4, 2, 128, 2, 72, F16, qk_norm=True, halves=True, positions=200, post_norms=True, window=60,
            local=(64, 4), values_are_keys=True, scaled=True,
        ), 10, 170, {"shares": 2},
    ),
    # the same number and size of heads in all layers
    "values that are keys": (
        Shape(
            512, 512, 4, 2, 64, 4, 72, Q8_0, qk_norm=True, halves=True, positions=200, post_norms=True, window=60,
            values_are_keys=True, scaled=True,
        ), 10, 170, {"shares": 2},
    ),
    # layer norms and biases everywhere, no gate, no mean in the stream
    "starcoder": (
        Shape(512, 1024, 4, 2, 64, 2, 264, Q4_K, down_kind=Q6_K, halves=True, by_mean=True, gated=False, logit_cap=9.0),
        5, 40, {},
    ),
    "starcoder floats": (
        Shape(512, 512, 4, 2, 64, 1, 72, F16, by_mean=True, gated=False, embedding_scale=7.5),
        3, 20, {"tuning": replace(SMALL, epoch_flags=0)},
    ),
    # attention and feed-forward beside each other, with a gate and without
    "cohere": (
        Shape(
            512, 768, 4, 2, 64, 3, 264, Q4_K, down_kind=Q6_K, by_mean=True, parallel=True, unturned=3, positions=200,
            window=50,
        ), 5, 150, {"shares": 2, "spared": 12 << 10},
    ),
    "phi2": (
        Shape(512, 1024, 4, 4, 64, 2, 72, F16, halves=True, by_mean=True, parallel=True, gated=False), 5, 40,
        {"tuning": replace(SMALL, epoch_flags=0)},
    ),
    # layers that convolve, beside those that attend: around their rings, and before there are as many tokens as taps
    "lfm2": (
        Shape(512, 768, 8, 2, 64, 3, 264, Q4_K, down_kind=Q6_K, qk_norm=True, halves=True, taps=3, ring=8), 5, 40, {},
    ),
    "lfm2 begins": (Shape(256, 512, 4, 2, 64, 3, 264, qk_norm=True, halves=True, taps=4, ring=64), 7, 2, {}),
    "lfm2 floats": (
        Shape(512, 512, 8, 2, 64, 2, 72, F16, taps=3, ring=64), 3, 0, {"tuning": replace(SMALL, epoch_flags=0)},
    ),
    # delta nets beside gated heads: two heads of values for one of keys, products of two formats, columns by turns
    "qwen35": (
        Shape(
            512, 768, 8, 2, 64, 3, 264, Q4_K, value_kind=Q6_K, down_kind=Q6_K, qk_norm=True, halves=True, taps=4,
            ring=5, delta=(8, 4, 64),
        ), 9, 40, {"shares": 2},
    ),
    "qwen35 begins": (
        Shape(512, 512, 8, 2, 64, 2, 264, Q8_0, qk_norm=True, taps=4, ring=5, delta=(4, 2, 128)), 7, 0,
        {"tuning": replace(SMALL, epoch_flags=0, replicas=3)},
    ),
    "qwen35 pipeline": (
        Shape(512, 512, 8, 2, 64, 2, 72, F16, qk_norm=True, taps=3, ring=4, delta=(16, 4, 32), positions=256), 16, 201,
        {"tuning": replace(SMALL, attention_pipeline=2, pipeline_stages=2)},
    ),
    "lfm2 narrow": (
        Shape(576, 640, 9, 3, 64, 3, 301, Q8_0, taps=2, ring=64, positions=128), 5, 100,
        {"tuning": replace(SMALL, replicas=8, per_tile=2), "shares": 3},
    ),
    "ungated": (Shape(768, 1536, 4, 2, 64, 1, 264, Q8_0, gated=False), 6, 20, {}),
    # no norm before blocks; queries and keys normed whole
    "olmo": (
        Shape(
            512, 512, 4, 4, 64, 2, 72, Q8_0, value_kind=Q6_K, joined=False, qk_norm=True, positions=128,
            post_norms=True, normed=False, whole_norms=True,
        ), 5, 100, {},
    ),
}  # fmt: skip


OFTEN = (
    "qwen35", "lfm2", "gemma4", "values that are keys", "up by itself", "temperature", "mixed", "pipeline", "tensor",
    "plain", "packed", "narrow", "starcoder",
)  # fmt: skip


def cases() -> Iterator[Any]:
    """Each case with its buffers flush to one side of their pages; with the other side where time is plenty."""
    for at, name in enumerate(CASES):
        for side, flush in enumerate(("end", "start")):
            often = name in OFTEN and side == at % 2
            yield pytest.param(flush, name, marks=() if often else pytest.mark.long, id=f"{name}-{flush}")


@pytest.mark.parametrize(("operands", "name"), list(cases()), indirect=["operands"])
def test_every_stage_publishes_what_its_interpreter_does(operands: Operands, name: str) -> None:
    shape, ctas, position, more = CASES[name]
    rig = Rig(operands, shape, ctas, **more)
    rig.fill_cache(position)
    check_stages(rig, 7, position)
    # The same step again and again: a packet that was read before all of it was there would show in some bit.
    steps = []
    for _ in range(30):
        rig.begin(7, position)
        rig.launch()
        steps.append(rig.operands.get(rig.logits, shape.vocab, np.float32).copy())
    np.testing.assert_array_equal(np.array(steps), np.array(steps[:1] * len(steps)))
    # A whole step, and two more after it: each hands its token over to the next.
    rig.begin(7, position)
    for at in range(3):
        rig.launch()
        state = State.from_buffer_copy(rig.operands.get(rig.state, 64, np.uint8).tobytes())
        logits = rig.operands.get(rig.logits, shape.vocab, np.float32)
        assert (state.position, state.written, state.token) == (position + at + 1, at + 1, int(logits.argmax()))
        assert rig.operands.get(rig.ring, RING, np.uint64)[at] == (at + 1) << 32 | state.token
        assert rig.operands.get(rig.space, rig.kernel.space_bytes, np.uint8)[0] == at + 1


@pytest.mark.parametrize(
    ("shape", "kind", "kinds", "q8"),
    [
        pytest.param(SHAPES["plain"], TYPE.Q4_K, MIXED, False, id="llama Q4_K_M"),
        pytest.param(SHAPES["qwen2"], TYPE.Q8_0, {}, False, id="qwen2 Q8_0", marks=pytest.mark.long),
        pytest.param(replace(SHAPES["qwen3"], heads=4), TYPE.Q6_K, {}, True, id="qwen3 Q6_K", marks=pytest.mark.long),
        pytest.param(SHAPES["qwen2"], TYPE.BF16, {}, False, id="qwen2 BF16", marks=pytest.mark.long),
        pytest.param(GEMMA, TYPE.Q4_K, MIXED, False, id="gemma3 Q4_K_M"),
        pytest.param(SHAPES["gemma2"], TYPE.Q6_K, {}, True, id="gemma2 Q6_K", marks=pytest.mark.long),
        pytest.param(SHAPES["gemma4 small"], TYPE.Q8_0, {}, False, id="gemma4 small Q8_0"),
        pytest.param(
            GEMMA4, TYPE.F16, {"per_layer_model_proj": TYPE.Q8_0}, True, id="gemma4 small F16", marks=pytest.mark.long
        ),
        pytest.param(SHAPES["gemma4"], TYPE.Q4_K, MIXED, False, id="gemma4 Q4_K_M", marks=pytest.mark.long),
        pytest.param(SHAPES["olmo2"], TYPE.Q8_0, {}, False, id="olmo2 Q8_0"),
        pytest.param(SHAPES["olmo3"], TYPE.F16, {}, True, id="olmo3 F16", marks=pytest.mark.long),
        pytest.param(SHAPES["glm4"], TYPE.Q8_0, {}, False, id="glm4 Q8_0"),
        # Of all products the last one of a block leaves the most row sums, as in OLMo 2 and 3 7B and GLM-4 9B.
        pytest.param(replace(SHAPES["olmo2"], ffn=1088), TYPE.Q8_0, {}, False, id="olmo2 Q8_0, rows of 17 segments"),
        pytest.param(SHAPES["sixteen to a group"], TYPE.Q4_K, {}, False, id="Q4_K, group of 16"),
        pytest.param(SHAPES["hunyuan"], TYPE.Q8_0, {}, False, id="hunyuan Q8_0"),
        pytest.param(QWEN35, TYPE.Q4_K, {"ffn_down": TYPE.Q6_K, "attn_qkv": TYPE.Q5_K}, False, id="qwen35 Q4_K"),
        pytest.param(QWEN35, TYPE.Q8_0, {}, True, id="qwen35 Q8_0", marks=pytest.mark.long),
        pytest.param(QWEN35, TYPE.F16, {}, False, id="qwen35 F16", marks=pytest.mark.long),
        pytest.param(SHAPES["lfm2"], TYPE.Q4_K, {"ffn_down": TYPE.Q6_K}, False, id="lfm2 Q4_K"),
        pytest.param(SHAPES["lfm2"], TYPE.Q8_0, {}, True, id="lfm2 Q8_0", marks=pytest.mark.long),
        pytest.param(SHAPES["lfm2"], TYPE.F16, {}, False, id="lfm2 F16", marks=pytest.mark.long),
        pytest.param(SHAPES["starcoder2"], TYPE.Q4_K, {}, False, id="starcoder2 Q4_K"),
        pytest.param(SHAPES["starcoder2"], TYPE.F16, {}, False, id="starcoder2 F16", marks=pytest.mark.long),
        pytest.param(SHAPES["nemotron"], TYPE.Q8_0, {}, True, id="nemotron Q8_0", marks=pytest.mark.long),
        pytest.param(SHAPES["arcee"], TYPE.Q6_K, {}, False, id="arcee Q6_K", marks=pytest.mark.long),
        pytest.param(SHAPES["cohere2"], TYPE.Q4_K, {}, False, id="cohere2 Q4_K"),
        pytest.param(SHAPES["phi2"], TYPE.Q8_0, {}, False, id="phi2 Q8_0", marks=pytest.mark.long),
        pytest.param(SHAPES["command-r"], TYPE.F16, {}, True, id="command-r F16", marks=pytest.mark.long),
        pytest.param(SHAPES["chatglm"], TYPE.Q4_0, {}, False, id="chatglm Q4_0", marks=pytest.mark.long),
        pytest.param(SHAPES["gemma"], TYPE.Q4_K, {}, False, id="gemma Q4_K", marks=pytest.mark.long),
        pytest.param(SHAPES["minicpm"], TYPE.Q8_0, {}, False, id="minicpm Q8_0", marks=pytest.mark.long),
        pytest.param(SHAPES["exaone4"], TYPE.Q6_K, {}, False, id="exaone4 Q6_K", marks=pytest.mark.long),
    ],
)
def test_a_plan_of_the_engine_errs_as_little_as_the_many_kernels(
    opened: Any, tmp_path: Path, shape: tiny_llama.Shape, kind: TYPE, kinds: dict[str, TYPE], q8: bool
) -> None:
    path = write(tmp_path / "model.gguf", shape, kind, kinds=kinds)
    exact = Reference(path).logits(TOKENS)
    got = []
    with PackedModel.load(path, "NV") as model, KvCache(opened, model.config, 64, q8=q8) as cache:
        states = States(opened)
        with (
            PersistentPlan(model, states, cache, tuning=SMALL, ctas=4) as plan,
            Recording(opened, plan.launches) as step,
        ):
            for position, token in enumerate(TOKENS):
                states.write(0, State(position=position, token=token, limit=64, active=1))
                step.wait(step.run())
                got.append(read(opened, plan.logits, model.config.vocab, np.float32))
        states.close()
    largest, mean = errors(np.array(got), exact)
    assert mean < 0.03
    assert largest < 0.15


@pytest.mark.parametrize("operands", ["end"], indirect=True)
def test_half_an_epoch_tells_packets_apart_where_it_goes_round(operands: Operands) -> None:
    """Steps whose epochs pass a multiple of 65536 give the bits of a workspace's first steps."""
    rig = Rig(operands, Shape(), 6)
    assert rig.kernel.defines["SPLIT_SETS"]
    found = []
    for step in (0, 0x10000 // len(rig.program.stages) - 1):
        rig.begin(7, 0)
        rig.store(rig.space.offset(0, 4), np.array([step], np.uint32))
        for _ in range(3):
            rig.launch()
            found.append(rig.operands.get(rig.logits, rig.made.shape.vocab, np.float32).copy())
    np.testing.assert_array_equal(found[:3], found[3:])
    space = rig.operands.get(rig.space, rig.kernel.space_bytes, np.uint8)
    assert space[:4].view(np.uint32)[0] == 0x10000 // len(rig.program.stages) + 2


def test_packets_of_sums_are_no_halves_of_sets() -> None:
    """A program with norms after blocks, all of whose sets of 16 one CTA writes, needs nothing for halves."""
    kernels = (Persistent(build(make(Shape(post_norms=True)).network, ctas), "sm_87", 64) for ctas in (4, 6))
    assert [kernel.defines["SPLIT_SETS"] for kernel in kernels] == [False, True]


def test_a_proof_is_made_once_and_only_for_what_was_proved(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    program = build(make(Shape()).network, 6)
    prove(program)
    ins = program.stages[4].instructions[1]
    wrong = program.replaced(ins._replace(waits=()))
    with pytest.raises(ScheduleError, match="does not wait for it"):
        prove(wrong)
    monkeypatch.setattr(persistent, "validate", lambda program: pytest.fail("it was proved before"))
    prove(build(make(Shape(), seed=2).network, 6))


def test_what_the_kernel_has_no_word_for_is_refused_by_name(opened: Any, tmp_path: Path) -> None:
    halves, blocks = dict[str, TYPE](), {"attn_qkv.weight": TYPE.Q8_0}
    for name, kinds, said in (
        ("gpt2", halves, "does not run gpt2: its norm, gate or positions differ"),
        ("stablelm", halves, "does not run stablelm: its norm, gate or positions differ"),
        ("gptneox", halves, "does not run gptneox: its norm, gate or positions differ"),
        ("grouped", halves, "attn_output has a bias"),
        ("phi2", blocks, "multiply one vector, some in blocks and some not"),
        ("phi2", {"ffn_up.weight": TYPE.Q8_0}, "multiply one vector, some in blocks and some not"),
    ):
        path, states = write(tmp_path / f"{name}.gguf", SHAPES[name], TYPE.F16, kinds=kinds), States(opened)
        with (
            PackedModel.load(path, "NV") as model,
            KvCache(opened, model.config, 64) as cache,
            pytest.raises(UnsupportedModelError, match=said),
        ):
            PersistentPlan(model, states, cache, ctas=4)
        states.close()


@pytest.mark.long
def test_the_engine_streams_the_same_tokens_with_either_plan(device: str, tmp_path: Path) -> None:
    path = write(tmp_path / "model.gguf", tiny_llama.Shape(layers=1, vocab=301), TYPE.Q6_K)
    streams = []
    for plan in (DecodePlan, partial(PersistentPlan, tuning=SMALL, ctas=4)):
        with Gguf.open(path) as file, Engine(file, device=device, plan=plan) as engine:
            streams.append(list(engine.generate([5, 17, 200], Settings(), 8)))
            logits = engine.feed([3])
            assert list(engine.generate([4], Settings(temperature=0.8, top_k=5), 2, seed=3))
            assert len(engine.tokens) == 3 + 8 - 1 + 1 + 1 + 1
            streams.append(list(np.argsort(logits)[-3:]))
    assert streams[:2] == streams[2:]


@pytest.mark.parametrize("operands", ["end"], indirect=True)
def test_a_wait_that_never_ends_is_given_up_and_reported(operands: Operands) -> None:
    """With a limit on polls: the launch ends although what an instruction waits for never comes, and says which."""
    rig = Rig(operands, Shape(layers=1), 6, replace(SMALL, backoff=0, spin_limit=4_000_000))

    def stuck() -> list[str]:
        return rig.kernel.stuck(rig.operands.get(rig.space, rig.kernel.space_bytes, np.uint8).tobytes())

    rig.begin(1, 5)
    rig.launch()
    assert not stuck()
    words = rig.kernel.words
    at = next(index for index, stage in enumerate(rig.program.stages) if stage.op is Op.GATE)
    words[at]["wait"][2] = at + 1  # a stage that waits for this one
    rig.store(rig.words, words.view(np.uint8))
    rig.launch()
    told = [line for line in stuck() if f"stage {at} (GATE of layer 0) on CTA 2: " in line]
    assert len(told) == 1
    assert f"waits for packets of stage {at + 1}, " in told[0]


@pytest.mark.parametrize("shared", [0, 48 << 10])
def test_more_ctas_than_the_chip_has_sms_are_refused(opened: Any, shared: int) -> None:
    """Whatever shared memory would hold: two on an SM may not have the registers, and wait for ever."""
    program = build(make(Shape()).network, opened.sm_count + 1)
    told = f"{opened.sm_count + 1} CTAs wait for each other, but {opened.sm_count} SMs hold 1 each"
    with pytest.raises(LaunchError, match=told):
        Persistent(program, opened.arch, 64, tuning=SMALL, shared=shared).load(opened)


def test_rows_that_shared_memory_does_not_hold_are_refused(opened: Any) -> None:
    """An Orin's 16 CTAs have more rows each than an H200's 132, of Mistral Small for one: its step is many launches."""
    kernel = Persistent(build(make(Shape()).network, 6), opened.arch, 64, tuning=SMALL, shared=16 << 10)
    with pytest.raises(UnsupportedModelError, match=r"too little shared memory for the persistent step's 6 CTAs"):
        kernel.load(opened)


def test_tiles_of_any_format_leave_room_for_a_ring() -> None:
    for kind in (Q6_K, Q4_K, Q8_0, F16, F32):
        tuning = Tuning.suited([Q6_K, kind])
        assert tuning.consumers * kind.segment_bytes <= 40 << 10
        assert tuning.attention_warps <= tuning.consumers
