"""Small random networks for the tests of the persistent step: a schedule's network, its bytes and its numbers."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import packs
from interpreter import Weights
from numpy.typing import NDArray

from tegrad.llm.arch import LayerForm
from tegrad.llm.config import Config
from tegrad.llm.families import GEMMA3, GEMMA4, LFM2, LLAMA, OLMO2, QWEN3, QWEN3_5
from tegrad.llm.formats import Q6_K, BlockType
from tegrad.llm.network import Attend, Convolve, Delta, Mixer
from tegrad.llm.packing import segments
from tegrad.llm.persistent import angle_tables
from tegrad.llm.rope import UNTURNED, Rope, Temperature
from tegrad.llm.schedule import Layer, Matrix, Network, key_of

Put = Callable[[NDArray[Any]], int]
"""Places an array on the device; returns its address."""


def nowhere(_: NDArray[Any]) -> int:
    """For networks that no kernel runs."""
    return 0


@dataclass
class Shape:
    """Sizes and formats of a network; the widths are what the kernel's ways depend on."""

    dim: int = 256
    ffn: int = 512
    heads: int = 4
    kv_heads: int = 2
    head_dim: int = 64
    layers: int = 2
    vocab: int = 264
    kind: BlockType = Q6_K
    value_kind: BlockType | None = None
    """Of the values' matrix, where it differs from the queries' and keys'."""
    down_kind: BlockType | None = None
    others_in: tuple[int, ...] = (0, 1, 2, 3)
    """The layers with these two, and with `up_kind`."""
    joined: bool = True
    """Queries, keys and values in one matrix where they are of one kind."""
    bias: bool = False
    qk_norm: bool = False
    halves: bool = False
    unturned: int | None = None
    """Of so many layers the last one rotates nothing."""
    post_norms: bool = False
    normed: bool = True
    """Whether layers norm what they read of the stream."""
    by_mean: bool = False
    """Layer norms; then all products are biased, but those of a gate."""
    up_kind: BlockType | None = None
    """Of up's matrix, where it differs from the gate's."""
    parallel: bool = False
    """Attention and feed-forward read the same stream through the same norm."""
    gated: bool = True
    whole_norms: bool = False
    window: int | None = None
    """Of every other layer, from the first on, whose cache then is a ring of `ring` rows, and whose angles differ."""
    ring: int = 64
    local: tuple[int, int] | None = None
    """Elements of a head, and heads of keys, of these layers."""
    shared: int = 0
    """Of so many last layers each takes keys and values of the one of its kind before all of them."""
    values_are_keys: bool = False
    """Of the layers without a window."""
    layer_input: int = 0
    """Elements that each layer reads beside the stream."""
    scaled: bool = False
    """Each layer ends with a scale of the stream; values are normed."""
    taps: int = 0
    """Of every other layer, from the first on, which convolves with a ring of so many rows."""
    delta: tuple[int, int, int] = (0, 0, 0)
    """Heads, heads of keys and their elements of such layers, which are delta nets then; what others mix is gated."""
    score_cap: float | None = None
    logit_cap: float | None = None
    embedding_scale: float = 1.0
    temperature: Temperature | None = None
    """Of queries."""
    positions: int = 64
    eps: float = 0.25
    """So large that nothing is right without it."""

    @property
    def config(self) -> Config:
        """A model's of these sizes."""
        heads = OLMO2 if self.whole_norms else QWEN3
        norms = {"query_norm": heads.query_norm, "key_norm": heads.key_norm} if self.qk_norm else {}
        arch = replace(LLAMA, rope="halves" if self.halves else "interleaved", **norms)
        if self.post_norms:
            arch = replace(arch, attn_post_norm=GEMMA3.attn_post_norm, ffn_post_norm=GEMMA3.ffn_post_norm)
        if self.by_mean:
            arch = replace(arch, norm="layer")
        if self.parallel:
            arch = replace(arch, parallel=True, ffn_norm=arch.attn_norm)
        if not self.gated:
            arch = replace(arch, gate=None)
        if self.layer_input:
            arch = replace(arch, per_layer=GEMMA4.per_layer)
        if self.scaled:
            arch = replace(arch, layer_scale=GEMMA4.layer_scale, unit_values=True, score_scale=0.3)
        if not self.normed:
            arch = replace(arch, attn_norm=None, ffn_norm=None)
        rope = Rope(self.head_dim, 10000.0)
        forms = (LayerForm(rope),) * self.layers
        if self.unturned is not None:
            forms = tuple(LayerForm(rope if (at + 1) % self.unturned else UNTURNED) for at in range(self.layers))
        if self.window is not None:
            head_dim, kv_heads = self.local or (None, None)
            turned = replace(rope, dim=head_dim or rope.dim, scale=1.7)
            within = LayerForm(turned, self.window, head_dim=head_dim, kv_heads=kv_heads)
            beyond = LayerForm(rope, values_are_keys=self.values_are_keys)
            first = self.layers - self.shared
            sources = [None if at < first else first - 1 - (at - first + 1) % 2 for at in range(self.layers)]
            forms = tuple(replace(beyond if at % 2 else within, source=source) for at, source in enumerate(sources))
        if self.taps:
            arch = replace(arch, instead=(QWEN3_5 if self.delta[0] else LFM2).instead)
            if self.delta[0]:
                arch = replace(arch, gated=True, qkv=QWEN3_5.qkv)
            forms = tuple(LayerForm(rope, instead=at % 2 == 0) for at in range(self.layers))
        return Config(
            arch, self.vocab, self.positions, self.layers, self.dim, self.ffn, self.heads, self.kv_heads, self.head_dim,
            self.head_dim, self.eps, rope, forms, score_cap=self.score_cap, logit_cap=self.logit_cap,
            embedding_scale=self.embedding_scale, temperature=self.temperature, taps=self.taps,
            delta_heads=self.delta[0], delta_keys=self.delta[1], state=self.delta[2], layer_input=self.layer_input,
        )  # fmt: skip


@dataclass
class Made:
    """A network with its numbers."""

    shape: Shape
    network: Network
    weights: Weights
    rope_address: int = 0
    caches: list[tuple[int, int]] = field(default_factory=list)


def make(shape: Shape, put: Put = nowhere, seed: int = 1) -> Made:
    """A random network; its arrays are placed by `put`."""
    rng = np.random.default_rng(seed)
    floats: dict[str, NDArray[Any]] = {}

    def matrix(name: str, rows: int, columns: int, kind: BlockType) -> Matrix:
        data, weights = packs.segments(kind.name, rng, segments(rows, columns))
        floats[name] = weights.reshape(-1)[: rows * columns].reshape(rows, columns)
        if kind.elements == 1:
            data = data.reshape(-1)[: kind.row_bytes(rows * columns)]
        return Matrix(name, kind, rows, columns, put(data))

    def vector(size: int, low: float, high: float, balanced: bool = False) -> tuple[int, NDArray[Any]]:
        values = rng.uniform(low, high, size).astype(np.float32)
        values -= values.mean() if balanced else 0
        return put(values), values

    s, whole = shape, shape.config
    net = whole.network
    ropes = list(dict.fromkeys(op.rope for op in net.attends))
    layers, vectors, biases = list[Layer](), [], []
    inputs, inputs_at = None, 0
    if s.layer_input:
        inputs = rng.uniform(-1, 1, (s.layers, s.layer_input)).astype(np.float32)
        inputs_at = put(inputs)
    for at, block in enumerate(net.blocks):
        config = whole.at(at)
        cache = np.zeros((config.kv_heads, s.positions, config.head_dim), np.float16)
        value_kind, down_kind = (s.value_kind, s.down_kind) if at in s.others_in else (None, None)
        value_kind = value_kind or s.kind
        wide, narrow = config.size("query"), config.size("key")
        parts = (("q", wide, s.kind), ("k", narrow, s.kind), ("v", narrow, value_kind))
        (mixer,) = (op for op in block if isinstance(op, Mixer))
        if isinstance(mixer, Convolve):
            parts = (("in", 3 * s.dim, s.kind),)
        elif isinstance(mixer, Delta):
            ends = mixer.heads * (mixer.width + 2)
            parts = (("qkv", mixer.channels, s.kind), ("ends", ends, value_kind))
            parts = parts if value_kind is not s.kind else (("all", mixer.channels + ends, s.kind),)
        elif mixer.made < 2:
            parts = parts[: 1 + mixer.made]
        elif mixer.gated:
            parts = (("q", 2 * wide, s.kind), ("k", narrow, s.kind), ("v", narrow, value_kind))
        elif s.joined and value_kind is s.kind:
            parts = (("qkv", wide + 2 * narrow, s.kind),)
        matrices = {"qkv": tuple(matrix(f"{name}{at}", rows, s.dim, kind) for name, rows, kind in parts)}
        addresses, norms = {}, {}
        for op in block:
            for spec in op.specs:
                if not spec.multiplied and len(spec.shape) > 1:
                    rows = config.size(spec.shape[0])
                    address, values = vector(rows * s.taps, -1, 1)
                    addresses[spec.name], norms[spec.name] = address, values.reshape(rows, s.taps)
                elif not spec.multiplied:
                    before = spec in (config.arch.attn_norm, config.arch.ffn_norm)
                    low, high = (0.05, 0.1) if before else (-0.3, -0.1) if spec.name == "ssm_a" else (0.5, 1.5)
                    addresses[spec.name], norms[spec.name] = vector(config.size(spec.shape[0]), low, high)
            if op.role in ("output", "gate", "down"):
                others = {"ffn_down": down_kind, "ffn_up": s.up_kind if at in s.others_in else None}
                matrices[key_of(op)] = tuple(
                    matrix(f"{spec.name}{at}", *map(config.size, spec.shape), others.get(spec.name) or s.kind)
                    for spec in op.matrices
                )
        sizes = {"qkv": wide + 2 * narrow} if s.bias or s.by_mean else {}
        if s.by_mean:  # of a parallel block's additions the last one has all that is added beside products
            sizes["output"] = s.dim
            sizes |= {} if s.parallel else {"down": s.dim}
            sizes |= {} if s.gated else {"gate": s.ffn}
        own = {role: vector(size, -1, 1, role in ("output", "down")) for role, size in sizes.items()}
        added = {role: at for role, (at, _) in own.items()}
        if not isinstance(mixer, Attend):
            kept_row = put(np.zeros((s.ring, config.convolved(mixer)), np.float32))
            heads, _, size = s.delta
            state = put(np.zeros((2, heads, size, size), np.float32)) if heads else 0
            layers.append(Layer(matrices, addresses, added, kept_row, state, ring=s.ring, state=state))
        else:
            within = mixer.window is not None
            if mixer.source is None:
                keys, values = (put(cache[:, : s.ring] if within else cache) for _ in range(2))
            else:
                keys, values = layers[mixer.source].keys, layers[mixer.source].values
            layers.append(
                Layer(
                    matrices, addresses, added, keys, values, turn=ropes.index(mixer.rope),
                    rows=0 if s.window is None else s.ring if within else s.positions, window=mixer.window or 0,
                    layer_input=inputs_at + 4 * s.layer_input * at if s.layer_input else 0,
                )
            )  # fmt: skip
        vectors.append(norms)
        biases.append({role: values for role, (_, values) in own.items()})
    output_bias = vector(s.vocab, -1, 1) if s.by_mean else (0, None)
    output_norm, ones = vector(s.dim, 0.05, 0.1), 0 if s.normed and not s.layer_input else vector(s.dim, 1, 1)[0]
    embedding = matrix("embedding", s.vocab, s.dim, s.kind)
    network = Network(whole, embedding, tuple(layers), embedding, output_norm[0], ones, output_bias[0])
    rope = angle_tables(net, s.positions)
    weights = Weights(floats, vectors, output_norm[1], biases, rope, output_bias[1], inputs)
    return Made(s, network, weights, put(rope), [(layer.keys, layer.values) for layer in layers])
