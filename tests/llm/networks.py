"""Small random networks for the tests of the persistent step: a schedule's network, its bytes and its numbers."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import packs
from numpy.typing import NDArray

from tegrad.llm.formats import Q6_K, BlockType
from tegrad.llm.interpreter import Weights
from tegrad.llm.packing import segments
from tegrad.llm.schedule import Layer, Matrix, Network

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
    """The layers with these two."""
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
    whole_norms: bool = False
    window: int | None = None
    """Of every other layer, from the first on, whose cache then is a ring of `ring` rows, and whose angles differ."""
    ring: int = 64
    score_cap: float | None = None
    logit_cap: float | None = None
    embedding_scale: float = 1.0
    positions: int = 64
    eps: float = 0.25
    """So large that nothing is right without it."""


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

    def vector(size: int, low: float, high: float) -> tuple[int, NDArray[Any]]:
        values = rng.uniform(low, high, size).astype(np.float32)
        return put(values), values

    s = shape
    wide, narrow = s.heads * s.head_dim, s.kv_heads * s.head_dim
    layers, attn, ffn, biases, q_norms, k_norms = [], [], [], [], [], []
    cache = np.zeros((s.kv_heads, s.positions, s.head_dim), np.float16)
    post = ([], [])
    for at in range(s.layers):
        value_kind, down_kind = (s.value_kind, s.down_kind) if at in s.others_in else (None, None)
        value_kind = value_kind or s.kind
        if s.joined and value_kind is s.kind:
            qkv = (matrix(f"qkv{at}", wide + 2 * narrow, s.dim, s.kind),)
        else:
            parts = (("q", wide, s.kind), ("k", narrow, s.kind), ("v", narrow, value_kind))
            qkv = tuple(matrix(f"{name}{at}", rows, s.dim, kind) for name, rows, kind in parts)
        low, high = (0.05, 0.1) if s.normed else (1, 1)
        attn_norm, ffn_norm = vector(s.dim, low, high), vector(s.dim, low, high)
        bias = vector(wide + 2 * narrow, -1, 1) if s.bias else (0, None)
        among = (s.heads, s.kv_heads) if s.whole_norms else (1, 1)
        q_norm, k_norm = (
            vector(count * s.head_dim, 0.5, 1.5) if s.qk_norm else (0, np.zeros(0, np.float32)) for count in among
        )
        after = [vector(s.dim, 0.5, 1.5) if s.post_norms else (0, np.zeros(0, np.float32)) for _ in post]
        for kept, pair in zip(post, after, strict=True):
            kept.append(pair[1])
        within = s.window is not None and at % 2 == 0
        turn = int(within) if s.unturned is None else int((at + 1) % s.unturned == 0)
        for kept, pair in ((attn, attn_norm), (ffn, ffn_norm), (biases, bias), (q_norms, q_norm), (k_norms, k_norm)):
            kept.append(pair[1])
        layers.append(
            Layer(
                qkv,
                matrix(f"o{at}", s.dim, wide, s.kind),
                matrix(f"gate{at}", s.ffn, s.dim, s.kind),
                matrix(f"up{at}", s.ffn, s.dim, s.kind),
                matrix(f"down{at}", s.dim, s.ffn, down_kind or s.kind),
                attn_norm[0],
                ffn_norm[0],
                bias[0],
                q_norm[0],
                k_norm[0],
                *(put(cache[:, : s.ring] if within else cache) for _ in range(2)),
                turn=turn,
                attn_post_norm=after[0][0],
                ffn_post_norm=after[1][0],
                rows=0 if s.window is None else s.ring if within else s.positions,
                window=s.window or 0 if within else 0,
            )
        )
    output_norm = vector(s.dim, 0.05, 0.1)
    embedding = matrix("embedding", s.vocab, s.dim, s.kind)
    network = Network(
        s.dim, s.ffn, s.heads, s.kv_heads, s.head_dim, embedding, tuple(layers), embedding, output_norm[0],
        s.post_norms, s.whole_norms,
    )  # fmt: skip
    angles = np.arange(s.positions)[:, None] * 10000.0 ** (-np.arange(s.head_dim // 2) * 2 / s.head_dim)
    others = (0.0,) if s.unturned else (1.7,) if s.window else ()
    rope = np.stack([[np.cos(by * angles), np.sin(by * angles)] for by in (1, *others)]).astype(np.float32)
    norms = (q_norms, k_norms) if s.qk_norm else (None, None)
    weights = Weights(
        floats, attn, ffn, output_norm[1], biases, rope, s.eps, s.halves, *norms, embedding_scale=s.embedding_scale,
        attn_post_norm=post[0], ffn_post_norm=post[1], normed=s.normed, score_cap=s.score_cap, logit_cap=s.logit_cap,
    )  # fmt: skip
    return Made(s, network, weights, put(rope), [(layer.keys, layer.values) for layer in layers])
