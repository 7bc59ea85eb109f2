"""Small networks, forward and backward: NV agrees with tinygrad's CPU device."""

import math
from typing import Any

import numpy as np
import pytest
from harness import compare_backends

pytestmark = [pytest.mark.board, pytest.mark.clang(as_reference=True)]


def array(*shape: int, seed: int = 0, scale: float | None = None) -> np.ndarray:
    """Normal numbers, scaled for their fan-in unless a scale is given."""
    factor = scale if scale is not None else 1 / math.sqrt(math.prod(shape[1:]) or 1)
    return (np.random.default_rng((seed, *shape)).standard_normal(shape) * factor).astype(np.float32)


def with_gradients(network: Any) -> Any:
    """A function of (input, *weights) that gives the output and the gradient of its mean square by each of them."""

    def run(*tensors: Any) -> list[Any]:
        for tensor in tensors:
            tensor.requires_grad = True
        out = network(*tensors)
        (out * out).mean().backward()
        return [out, *(tensor.grad for tensor in tensors)]

    return run


def linear_chain(x: Any, *weights: Any) -> Any:
    """Products with rectifiers between them."""
    for weight in weights[:-1]:
        x = (x @ weight.transpose()).relu()
    return x @ weights[-1].transpose()


def convolutions(x: Any, first: Any, second: Any, head: Any) -> Any:
    """Two convolutions with pooling, and a linear layer on the mean of each channel."""
    x = x.conv2d(first, padding=1).relu().max_pool2d(2)
    x = x.conv2d(second, padding=1, stride=2).relu()
    return x.mean(axis=(2, 3)) @ head.transpose()


def transformer_block(x: Any, query: Any, key: Any, value: Any, out: Any, up: Any, down: Any) -> Any:
    """Causal attention with four heads, then a feed-forward layer, both on normalised input with residuals."""
    batch, length, width = x.shape

    def heads(weight: Any) -> Any:
        return (x.layernorm() @ weight.transpose()).reshape(batch, length, 4, width // 4).transpose(1, 2)

    attended = heads(query).scaled_dot_product_attention(heads(key), heads(value), is_causal=True)
    x = x + attended.transpose(1, 2).reshape(batch, length, width) @ out.transpose()
    return x + (x.layernorm() @ up.transpose()).gelu() @ down.transpose()


def test_an_mlp() -> None:
    weights = [array(64, 32), array(64, 64, seed=1), array(10, 64, seed=2)]
    compare_backends(with_gradients(linear_chain), array(16, 32, scale=1), *weights)


def test_a_cnn() -> None:
    weights = [array(8, 3, 3, 3), array(12, 8, 3, 3), array(10, 12)]
    compare_backends(with_gradients(convolutions), array(4, 3, 16, 16, scale=1), *weights)


def test_a_transformer_block() -> None:
    square = [array(32, 32, seed=n) for n in range(4)]
    weights = [*square, array(64, 32), array(32, 64)]
    compare_backends(with_gradients(transformer_block), array(2, 12, 32, scale=1), *weights, rtol=1e-3, atol=1e-4)


def test_an_mlp_of_ten_layers() -> None:
    weights = [array(48, 48, seed=n, scale=math.sqrt(2 / 48)) for n in range(10)]
    compare_backends(with_gradients(linear_chain), array(8, 48, scale=1), *weights, rtol=1e-3, atol=1e-5)
