"""The small llama in tinygrad: its sizes, its loss, and one training step.

Half-precision matrix products with float32 weights, sums and normalisation. Every matrix product runs over SPLIT slices
of the batch with a copy of the weight each: the gradient of a weight, whose result is small and whose sum is long,
then has enough independent work to fill a large GPU.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray
from tinygrad import Context, Device, Tensor, TinyJit, dtypes

SPLIT = 8
LOSS_SCALE = 1024.0
"""Keeps half-precision gradients away from fp16's subnormal numbers."""

Weights = dict[str, NDArray[np.float32]]
"""By GGUF name, without the layer norms' and matrices' ".weight"."""


@dataclass(frozen=True)
class Sizes:
    """A llama's shape. Every matrix has rows of `dim` or `ffn` elements."""

    vocab: int = 2048
    context: int = 512
    dim: int = 256
    ffn: int = 512
    layers: int = 6
    heads: int = 4
    kv_heads: int = 2
    rope_base: float = 10000.0
    eps: float = 1e-5

    @property
    def head_dim(self) -> int:
        """Width of one head."""
        return self.dim // self.heads


@dataclass(frozen=True)
class Recipe:
    """How to train it."""

    rows: int = 32
    peak_lr: float = 2e-3
    final_lr: float = 5e-5
    warmup_steps: int = 100
    weight_decay: float = 0.3
    dropout: float = 0.2
    beta1: float = 0.9
    beta2: float = 0.98
    clip: float = 1.0
    half: bool = True
    seed: int = 1


def initial(sizes: Sizes, seed: int) -> Weights:
    """Small random weights; the two matrices that write to the residual stream are smaller the deeper the net."""
    rng = np.random.default_rng(seed)

    def matrix(rows: int, columns: int, gain: float = 1.0) -> NDArray[np.float32]:
        return (rng.standard_normal((rows, columns)) * 0.02 * gain).astype(np.float32)

    residual = (2 * sizes.layers) ** -0.5
    kv = sizes.kv_heads * sizes.head_dim
    weights = {"token_embd": matrix(sizes.vocab, sizes.dim), "output_norm": np.ones(sizes.dim, np.float32)}
    for i in range(sizes.layers):
        weights |= {
            f"blk.{i}.attn_norm": np.ones(sizes.dim, np.float32),
            f"blk.{i}.attn_qkv": matrix(sizes.dim + 2 * kv, sizes.dim),
            f"blk.{i}.attn_output": matrix(sizes.dim, sizes.dim, residual),
            f"blk.{i}.ffn_norm": np.ones(sizes.dim, np.float32),
            f"blk.{i}.ffn_gate_up": matrix(2 * sizes.ffn, sizes.dim),
            f"blk.{i}.ffn_down": matrix(sizes.dim, sizes.ffn, residual),
        }
    return weights


def rope_tables(sizes: Sizes) -> NDArray[np.float32]:
    """Cosines and sines (2, context, head_dim / 2) for rotating neighbouring pairs."""
    frequency = sizes.rope_base ** (-2.0 * np.arange(sizes.head_dim // 2) / sizes.head_dim)
    angle = np.arange(sizes.context)[:, None] * frequency
    return np.stack([np.cos(angle), np.sin(angle)]).astype(np.float32)


class Network:
    """The weights on the device and the loss over a batch of windows."""

    def __init__(self, sizes: Sizes, recipe: Recipe, weights: Weights, device: str | None = None) -> None:
        self.sizes, self.recipe, self.device = sizes, recipe, device or Device.DEFAULT
        self.weights = {name: self.tensor(value) for name, value in weights.items()}
        self.rope = self.tensor(rope_tables(sizes))
        self.ids = self.tensor(np.arange(sizes.vocab, dtype=np.int32))
        self.causal = self.tensor(np.triu(np.full((sizes.context, sizes.context), -1e9, np.float32), 1))
        self.compute = dtypes.half if recipe.half else dtypes.float

    def tensor(self, array: NDArray[Any]) -> Tensor:
        """An array on the device."""
        return Tensor(array, device=self.device).realize()

    def losses(self, inputs: Tensor, targets: Tensor) -> Tensor:
        """Negative log likelihood of each target, in nats; int (rows, context) twice to float (rows, context)."""
        x = self._matmul(self._one_hot(inputs), self.weights["token_embd"].T).float().dropout(self.recipe.dropout)
        for i in range(self.sizes.layers):
            x = x + self._attention(self._norm(x, f"blk.{i}.attn_norm"), i).dropout(self.recipe.dropout)
            x = (
                x + self._feed_forward(self._norm(x, f"blk.{i}.ffn_norm"), i).dropout(self.recipe.dropout)
            ).contiguous()
        logits = self._matmul(self._norm(x, "output_norm"), self.weights["token_embd"]).float().contiguous()
        picked = (logits * self._one_hot(targets)).sum(-1).contiguous()
        return (logits.logsumexp(-1).contiguous() - picked).contiguous()

    def _one_hot(self, ids: Tensor) -> Tensor:
        """A matrix instead of a table look-up: its gradient is a matrix product too."""
        return (ids.unsqueeze(-1) == self.ids).cast(self.compute).contiguous()

    def _matmul(self, x: Tensor, weight: Tensor) -> Tensor:
        """x (rows, context, in) times the transpose of weight (out, in)."""
        split = min(SPLIT, x.shape[0])
        copies = weight.cast(self.compute).unsqueeze(0).expand(split, *weight.shape).contiguous().contiguous_backward()
        y = x.reshape(split, -1, x.shape[-1]) @ copies.transpose(-1, -2)
        return y.contiguous_backward().reshape(*x.shape[:-1], weight.shape[0])

    def _norm(self, x: Tensor, name: str) -> Tensor:
        scale = (x.square().mean(-1, keepdim=True) + self.sizes.eps).rsqrt()
        return (x * scale * self.weights[name]).cast(self.compute).contiguous().contiguous_backward()

    def _rotate(self, x: Tensor) -> Tensor:
        """Rope over x (rows, context, heads, head_dim)."""
        pairs = x.float().reshape(*x.shape[:-1], -1, 2)
        cos, sin = (self.rope[i].reshape(1, x.shape[1], 1, -1) for i in (0, 1))
        a, b = pairs[..., 0], pairs[..., 1]
        return (a * cos - b * sin).stack(a * sin + b * cos, dim=-1).reshape(x.shape).cast(self.compute)

    def _attention(self, x: Tensor, layer: int) -> Tensor:
        sizes, (rows, context, _) = self.sizes, x.shape
        kv, group = sizes.kv_heads, sizes.heads // sizes.kv_heads
        mixed = self._matmul(x, self.weights[f"blk.{layer}.attn_qkv"])
        q, k, v = (
            part.reshape(rows, context, -1, sizes.head_dim)
            for part in mixed.split([sizes.dim, kv * sizes.head_dim, kv * sizes.head_dim], dim=-1)
        )
        q = self._rotate(q).reshape(rows, context, kv, group, sizes.head_dim).permute(0, 2, 3, 1, 4).contiguous()
        k = self._rotate(k).permute(0, 2, 3, 1).unsqueeze(2).contiguous()
        v = v.permute(0, 2, 1, 3).unsqueeze(2).contiguous()
        scores = (q @ k).float() * sizes.head_dim**-0.5 + self.causal
        weights = scores.softmax(-1).cast(self.compute).contiguous().contiguous_backward()
        out = (weights @ v).permute(0, 3, 1, 2, 4).reshape(rows, context, sizes.dim).contiguous()
        return self._matmul(out, self.weights[f"blk.{layer}.attn_output"]).float()

    def _feed_forward(self, x: Tensor, layer: int) -> Tensor:
        gate, up = self._matmul(x, self.weights[f"blk.{layer}.ffn_gate_up"]).chunk(2, dim=-1)
        hidden = (gate.float().silu() * up.float()).cast(self.compute).contiguous().contiguous_backward()
        return self._matmul(hidden, self.weights[f"blk.{layer}.ffn_down"]).float()

    def read(self) -> Weights:
        """The weights as they are now, on the host."""
        return {name: weight.numpy().copy() for name, weight in self.weights.items()}


class Trainer:
    """AdamW over a network, one recorded step for every batch; and its loss on held-out windows."""

    def __init__(self, network: Network) -> None:
        self.network, self.steps = network, 0
        Tensor.manual_seed(network.recipe.seed)
        weights = network.weights.values()
        self.first, self.second = ([network.tensor(np.zeros(w.shape, np.float32)) for w in weights] for _ in range(2))
        self._record = TinyJit(self._update)
        self._measure = TinyJit(lambda inputs, targets: network.losses(inputs, targets).realize())

    def step(self, tokens: NDArray[np.int32], lr: float) -> Tensor:
        """Train on windows (rows, context + 1); returns [loss in nats a token, gradient norm], not yet awaited."""
        self.steps += 1
        recipe = self.network.recipe
        hyper = [lr, 1 / (1 - recipe.beta1**self.steps), 1 / (1 - recipe.beta2**self.steps)]
        with Context(TRAINING=1):
            return self._record(self.network.tensor(tokens), self.network.tensor(np.array(hyper, np.float32)))

    def _update(self, tokens: Tensor, hyper: Tensor) -> Tensor:
        recipe, network = self.network.recipe, self.network
        lr, correct_first, correct_second = (hyper[i : i + 1] for i in range(3))
        # Each sum ends in memory of its own: fused into the next one, it would run on a handful of threads.
        loss = network.losses(tokens[:, :-1], tokens[:, 1:]).mean().contiguous()
        weights = list(network.weights.values())
        scaled = (loss * LOSS_SCALE).gradient(*weights)
        gradients = [(gradient.float() / LOSS_SCALE).contiguous() for gradient in scaled]
        squares = [gradient.square().sum().contiguous() for gradient in gradients]
        norm = Tensor.stack(*squares).contiguous().sum().sqrt().contiguous()
        sound = norm < 1e4  # false for NaN too: such a gradient counts as none
        factor = sound.where(recipe.clip / norm.maximum(recipe.clip), 0.0)
        changed = [loss.float().reshape(1).cat(norm.reshape(1))]
        for weight, gradient, first, second in zip(weights, gradients, self.first, self.second, strict=True):
            clipped = sound.where(gradient * factor, 0.0)
            first.assign(recipe.beta1 * first + (1 - recipe.beta1) * clipped)
            second.assign(recipe.beta2 * second + (1 - recipe.beta2) * clipped.square())
            move = first * correct_first / ((second * correct_second).sqrt() + 1e-8)
            decay = recipe.weight_decay if len(weight.shape) == 2 else 0.0
            weight.assign(weight - lr * (move + decay * weight))
            changed += [first, second, weight]
        Tensor.realize(*changed)
        return changed[0]

    def held_out(self, inputs: NDArray[np.int32], targets: NDArray[np.int32]) -> NDArray[np.float32]:
        """Nats of every target of windows (n, context); short batches are filled up by repetition."""
        rows, out = self.network.recipe.rows, []
        for start in range(0, len(inputs), rows):
            index = np.arange(start, start + rows) % len(inputs)
            losses = self._measure(self.network.tensor(inputs[index]), self.network.tensor(targets[index]))
            out.append(losses.numpy().copy())
        return np.concatenate(out)[: len(inputs)]
