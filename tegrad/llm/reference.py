"""The plain form of `model`: the same description of a family, evaluated in float32 numpy, all positions at once.

Slow and simple; for tests. `Reference(path).logits(tokens)` is what the device must compute.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Literal

import numpy as np
from gguf.constants import GGMLQuantizationType
from gguf.quants import dequantize
from numpy.typing import NDArray

from tegrad.llm.config import Config, tensor_name
from tegrad.llm.gguf import Gguf, TensorInfo
from tegrad.llm.network import (
    Add,
    Attend,
    Convolve,
    Convolving,
    Delta,
    Gate,
    Inner,
    InputGate,
    LayerInputs,
    Norm,
    Project,
    Spec,
)
from tegrad.llm.numerics import ACTIVATIONS, ROTATIONS, ROUNDINGS, Floats, attended, capped, sigmoid, softplus, unit


class Past:
    """The rotated keys and the values (positions, kv_heads, 1, width) of the tokens that came before, by layer.

    They are rounded as a cache of the kind `stored` rounds them. `first` is the position of the first token. What
    convolutions keep (positions, elements) is not rounded, nor are the matrices (heads, width, width) that run along.
    """

    def __init__(self, stored: Literal["F32", "F16", "Q8_0"] = "F32", first: int = 0) -> None:
        self.keys: dict[int, Floats] = {}
        self.values: dict[int, Floats] = {}
        self.convolved: dict[int, Floats] = {}
        self.states: dict[int, Floats] = {}
        self.count, self.first = 0, first
        self._round = ROUNDINGS[stored]

    def extend(self, layer: int, key: Floats, value: Floats) -> tuple[Floats, Floats]:
        """Add a layer's new keys and values; returns all of them."""
        for kept, new in ((self.keys, key), (self.values, value)):
            rounded = self._round(new)
            kept[layer] = np.concatenate([kept[layer], rounded]) if layer in kept else rounded
        return self.keys[layer], self.values[layer]


class Reference:
    """A model, its weights expanded to float32 in memory, in a session of `context` positions, our default unless said.

    Few models compute anything else in a longer one.
    """

    def __init__(self, path: str | os.PathLike[str], context: int | None = None) -> None:
        with Gguf.open(path) as file:
            self.config = Config.read(file)
            self.network = self.config.network
            self.divisors = self.config.rope_divisors(file).of(self.config.positions(context))
            self.weights = {info.name: expanded(file, info).reshape(info.shape) for info in self.config.tensors(file)}

    def logits(self, tokens: Sequence[int], past: Past | None = None) -> Floats:
        """Logits (len(tokens), vocab) after each token; with `past`, of tokens that follow those already fed to it."""
        net, past = self.network, past or Past()
        start = past.first + past.count
        embedding = self.weights[tensor_name(net.embed.table)]
        x = embedding[np.asarray(tokens)] * np.float32(net.embed.scale)
        if net.embed.positions is not None:
            x = x + self.weights[tensor_name(net.embed.positions)][start : start + len(tokens)]
        qkv: Floats = x
        made: dict[Inner, Floats] = {}
        inputs = self._inputs(net.embed.inputs, tokens, x) if net.embed.inputs is not None else {}
        for layer, op in net.operations():
            match op:
                case Project():
                    normed = self._norm(x, op.norm, layer)
                    qkv = np.concatenate([self._linear(normed, spec, layer) for spec in op.matrices], axis=1)
                case Attend():
                    made["mixed"] = self._attention(op, layer, qkv, past)
                case Convolve():
                    made["mixed"] = self._convolution(op, layer, qkv, past)
                case Delta():
                    made["mixed"] = self._delta(op, layer, qkv, past)
                case Gate():
                    made["hidden"] = self._gated(op, layer, self._norm(x, op.norm, layer))
                case InputGate():
                    made["gated"] = ACTIVATIONS[op.activation](self._linear(x, op.gate, layer)) * inputs[layer]
                case Add():
                    x = x + self._norm(self._linear(made[op.reads], op.matrix, layer), op.norm, layer)
                    if op.scale is not None:
                        x = x * self.weights[tensor_name(op.scale, layer)]
        past.count += len(tokens)
        output = self.weights.get(tensor_name(net.logits.matrix), embedding)
        logits = self._biased(self._norm(x, net.logits.norm) @ output.T, net.logits.matrix, None)
        return capped(logits, net.logits.cap)

    def _inputs(self, inputs: LayerInputs, tokens: Sequence[int], x: Floats) -> dict[int, Floats]:
        """Each layer's own input (tokens, elements)."""
        table, matrix, norm = (self.weights[tensor_name(spec)] for spec in inputs.specs)
        own = (x @ matrix.T * np.float32(inputs.product_scale)).reshape(len(tokens), -1, len(norm))
        rows = table[np.asarray(tokens)].reshape(own.shape) * np.float32(inputs.table_scale)
        both = (unit(own, self.config.eps) * norm + rows) * np.float32(inputs.scale)
        return dict(enumerate(both.transpose(1, 0, 2)))

    def _heads(self, x: Floats, norm: Spec | None, layer: int) -> Floats:
        """Queries or keys (tokens, ..., elements), normalized."""
        if norm is None:
            return x
        weight = self.weights[tensor_name(norm, layer)]
        return (unit(x.reshape(*x.shape[:-1], -1, len(weight)), self.config.eps) * weight).reshape(x.shape)

    def _norm(self, x: Floats, norm: Norm | None, layer: int | None = None) -> Floats:
        if norm is None:
            return x
        if norm.kind == "layer":
            x = x - np.mean(x, axis=-1, keepdims=True, dtype=np.float32)
        normed = unit(x, self.config.eps) * self.weights[tensor_name(norm.spec, layer)]
        return self._biased(normed, norm.spec, layer) * np.float32(norm.scale)

    def _linear(self, x: Floats, spec: Spec, layer: int) -> Floats:
        return self._biased(x @ self.weights[tensor_name(spec, layer)].T, spec, layer)

    def _biased(self, y: Floats, spec: Spec, layer: int | None) -> Floats:
        bias = self.weights.get(tensor_name(spec, layer, "bias"))
        return y if bias is None else y + bias

    def _attention(self, op: Attend, layer: int, qkv: Floats, past: Past) -> Floats:
        """Mixed values (tokens, heads * value_dim) of queries, keys and values below one another."""
        c, count, gates = self.config.at(layer), len(qkv), None
        query, key, value = np.split(qkv, np.cumsum([c.sizes["query"] * (1 + op.gated), c.sizes["key"]]), axis=1)
        value = key if op.values_are_keys else value
        if op.gated:
            query, gates = query.reshape(count, c.heads, 2, c.head_dim).transpose(2, 0, 1, 3)
        start = past.first + past.count
        tables = op.rope.tables(start + count, self.divisors)[:, start:]

        def rotate(x: Floats) -> Floats:
            return ROTATIONS[op.rotation](x.reshape(count, c.kv_heads, -1, c.head_dim), tables)

        query = op.prepared(query, lambda x: self._heads(x, op.query_norm, layer), rotate)
        if op.temperature is not None:
            query = query * op.temperature.factors(start, count)[:, None, None, None].astype(np.float32)
        if op.source is None:
            key = op.prepared(key, lambda x: self._heads(x, op.key_norm, layer), rotate)
            value = value.reshape(count, c.kv_heads, 1, c.value_dim)
            key, value = past.extend(layer, key, unit(value, c.eps) if op.unit_values else value)
        else:
            key, value = past.keys[op.source], past.values[op.source]
        # By kv head, group, position: products that BLAS computes, unlike einsum.
        scores = query.transpose(1, 2, 0, 3) @ key.transpose(1, 2, 3, 0) * np.float32(op.scale)
        scores = np.where(
            attended(past.count, count, op.window, causal=op.causal), capped(scores, op.cap), np.float32(-np.inf)
        )
        weights = np.exp(scores - scores.max(axis=-1, keepdims=True))
        weights /= weights.sum(axis=-1, keepdims=True)
        mixed = weights @ value.transpose(1, 2, 0, 3)
        made: Floats = mixed.transpose(2, 0, 1, 3).reshape(count, c.heads * c.value_dim)
        return made if gates is None else made * sigmoid(gates.reshape(made.shape))

    def _convolution(self, op: Convolve, layer: int, products: Floats, past: Past) -> Floats:
        """Mixed values (tokens, dim) of three vectors one after the other."""
        first, second, third = np.split(products, 3, axis=1)
        return second * self._convolved(op, layer, first * third, past)

    def _convolved(self, op: Convolving, layer: int, x: Floats, past: Past) -> Floats:
        """Sums (tokens, elements) of tokens' and earlier ones' x, each times its column of the kernel."""
        before = past.convolved.get(layer, np.zeros((op.taps - 1, x.shape[1]), np.float32))
        kept = past.convolved[layer] = np.concatenate([before, x])
        columns = self.weights[tensor_name(op.kernel, layer)].T
        taps = (kept[len(before) - op.taps + 1 + tap :][: len(x)] * columns[tap] for tap in range(op.taps))
        made: Floats = sum(taps, np.zeros_like(x))
        return made

    def _delta(self, op: Delta, layer: int, products: Floats, past: Past) -> Floats:
        """Mixed values (tokens, heads * width) of what a delta net reads."""
        count, inner, keys = len(products), op.heads * op.width, op.key_heads * op.width
        ends = np.cumsum([op.channels, inner, op.heads])
        x, gates, beta, own = np.split(products, ends, axis=1)
        x = ACTIVATIONS["silu"](self._convolved(op, layer, x, past))
        query, key = (part.reshape(count, op.key_heads, op.width) for part in np.split(x[:, : 2 * keys], 2, axis=1))
        value = x[:, 2 * keys :].reshape(count, op.heads, op.width)
        small = self.config.eps / op.width
        query, key = (
            np.tile(unit(part, small) / np.sqrt(np.float32(op.width)), (1, op.heads // op.key_heads, 1))
            for part in (query, key)
        )
        decay = np.exp(
            self.weights[tensor_name(op.decay, layer)] * softplus(own + self.weights[tensor_name(op.bias, layer)])
        )
        beta, mixed = sigmoid(beta), np.empty_like(value)
        state = past.states.get(layer, np.zeros((op.heads, op.width, op.width), np.float32))
        for at in range(count):
            state = state * decay[at][:, None, None]
            delta = (value[at] - np.einsum("hkv,hk->hv", state, key[at])) * beta[at][:, None]
            state = state + key[at][:, :, None] * delta[:, None, :]
            mixed[at] = np.einsum("hkv,hk->hv", state, query[at]) / np.sqrt(np.float32(op.width))
        past.states[layer] = state
        normed = unit(mixed, self.config.eps) * self.weights[tensor_name(op.norm, layer)]
        made: Floats = normed.reshape(count, inner) * ACTIVATIONS["silu"](gates)
        return made

    def _gated(self, op: Gate, layer: int, x: Floats) -> Floats:
        up, activate = self._linear(x, op.up, layer), ACTIVATIONS[op.activation]
        return activate(up) if op.gate is None else activate(self._linear(x, op.gate, layer)) * up


def expanded(file: Gguf, info: TensorInfo, first: int = 0, count: int | None = None) -> NDArray[np.float32]:
    """Rows (count, columns) of a tensor in float32, all of them unless said; a vector has one row."""
    count, size = info.rows if count is None else count, info.nbytes // info.rows
    data = np.frombuffer(file.read(info.offset + first * size, count * size), np.uint8).reshape(count, size)
    values: NDArray[np.float32] = dequantize(data, GGMLQuantizationType[info.type.name]).astype(np.float32)
    return values
