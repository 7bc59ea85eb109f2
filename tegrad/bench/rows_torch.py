"""The rows of rows.py in PyTorch: the worker of `tegrad bench tinygrad --vs torch` and `--vs torch-graphs`.

TEGRAD_TORCH says whether PyTorch works eagerly or replays CUDA graphs ("graphs"). Inputs are those of rows.py, so that
results can be compared; products of floats do not use TF32, which would round their inputs.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import torch

from tegrad.bench import rows
from tegrad.bench.rows import MB, POSITIONS, TimedRow

GRAPHS = os.environ.get("TEGRAD_TORCH") == "graphs"
F = torch.nn.functional


def made(name: str) -> TimedRow:
    """A row by its name; KeyError for one that is not there."""
    kind, *sizes = name.split("-")
    makers: dict[str, Callable[..., TimedRow]] = {
        "launch": lambda kind: _timed(lambda x: x + 1, _random(12)),
        "stream": _stream,
        "mlp": _mlp,
        "matmul": _matmul,
        "add": lambda kind, size: _timed(torch.add, *_pair(size)),
        "mul": lambda kind, size: _timed(torch.mul, *_pair(size)),
        "exp": lambda kind, size: _timed(torch.exp, _pair(size)[0]),
        "relu": lambda kind, size: _timed(torch.relu, _pair(size)[0]),
        "copyin": _copyin,
        "copyout": _copyout,
        "copy": lambda kind, size: _timed(torch.clone, _random(rows.megabytes(size) * MB // 4)),
        "alloc": _alloc,
        "gpt2": _gpt2,
    }
    return makers[kind](kind, *sizes)


def _random(*shape: int, half: bool = False, seed: int = 0) -> Any:
    return torch.from_numpy(rows.values(*shape, half=half, seed=seed)).cuda()


def _pair(size: str) -> list[Any]:
    return [_random(rows.millions(size), seed=seed) for seed in (0, 1)]


def _replayed(function: Callable[..., Any], *inputs: Any) -> Callable[[], Any]:
    """A function that calls `function` on `inputs` (eagerly), or replays the CUDA graph of that call."""
    for _ in range(4):
        out = function(*inputs)
    torch.cuda.synchronize()
    if not GRAPHS:
        return lambda: function(*inputs)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = function(*inputs)

    def replay() -> Any:
        graph.replay()
        return out

    replay.reads = function, inputs  # type: ignore[attr-defined] # a graph keeps none of the memory that it reads
    return replay


def _timed(function: Callable[..., Any], *inputs: Any) -> TimedRow:
    replay = _replayed(function, *inputs)

    def call() -> Any:
        out = replay()
        torch.cuda.synchronize()
        return out

    return TimedRow(call, lambda: call().float().cpu().numpy())


def _stream(kind: str) -> TimedRow:
    replay = _replayed(lambda x: x + 1, _random(12))

    def call() -> Any:
        for _ in range(rows.STREAM_LAUNCHES):
            out = replay()
        torch.cuda.synchronize()
        return out

    return TimedRow(call, lambda: replay().cpu().numpy(), each=rows.STREAM_LAUNCHES)


def _mlp(kind: str) -> TimedRow:
    weights = [torch.from_numpy(weight).cuda() for weight in rows.mlp_weights()]

    def network(x: Any) -> Any:
        for weight in weights[:-1]:
            x = torch.relu(x @ weight)
        return x @ weights[-1]

    return _timed(network, _random(1, rows.MLP_WIDTHS[0], half=True, seed=1))


def _matmul(kind: str, dtype: str, size: str) -> TimedRow:
    return _timed(torch.matmul, *(_random(int(size), int(size), half=dtype == "f16", seed=seed) for seed in (0, 1)))


def _copyin(kind: str, size: str) -> TimedRow:
    host = torch.from_numpy(rows.host(size))
    device = torch.empty_like(host, device="cuda")

    def call() -> None:
        device.copy_(host)
        torch.cuda.synchronize()

    return TimedRow(call, lambda: device.cpu().numpy())


def _copyout(kind: str, size: str) -> TimedRow:
    device = torch.from_numpy(rows.host(size)).cuda()
    host = torch.zeros_like(device, device="cpu")

    def call() -> None:
        host.copy_(device)

    return TimedRow(call, host.numpy)


def _alloc(kind: str, size: str) -> TimedRow:
    def call() -> None:
        torch.empty(rows.megabytes(size) * MB, dtype=torch.uint8, device="cuda")

    return TimedRow(call)


def _gpt2(kind: str, dtype: str, size: str) -> TimedRow:
    """A token of GPT-2. Attention reads the whole cache and masks later positions: a CUDA graph's sizes are fixed."""
    layers, heads, width, _ = rows.GPT2[size]
    weights = (torch.from_numpy(weight).cuda() for weight in rows.gpt2_weights(size, dtype == "f16"))
    tokens, places = next(weights), next(weights)
    blocks = [tuple(next(weights) for _ in range(4)) for _ in range(layers)]
    caches = [torch.zeros(2, heads, POSITIONS, width // heads, dtype=tokens.dtype, device="cuda") for _ in blocks]
    token, position = torch.tensor([7], device="cuda"), torch.tensor([1], device="cuda")
    every = torch.arange(POSITIONS, device="cuda")

    def network() -> Any:
        x = tokens[token] + places[position]
        for (qkv, out, up, down), cache in zip(blocks, caches, strict=True):
            q, k, v = (F.layer_norm(x, (width,)) @ qkv).view(3, heads, 1, width // heads)
            cache[0].index_copy_(1, position, k)
            cache[1].index_copy_(1, position, v)
            mask = (every <= position).view(1, 1, POSITIONS)
            mixed = F.scaled_dot_product_attention(q, cache[0], cache[1], attn_mask=mask)
            x = x + mixed.reshape(1, width) @ out
            x = x + F.gelu(F.layer_norm(x, (width,)) @ up, approximate="tanh") @ down
        return F.layer_norm(x, (width,)) @ tokens.T

    at = 0

    with torch.no_grad():
        replay = _replayed(network)

    def call(where: int | None = None) -> Any:
        nonlocal at
        at = at % (POSITIONS - 1) + 1
        position.fill_(at if where is None else where)
        with torch.no_grad():
            out = replay()
        torch.cuda.synchronize()
        return out

    for _ in range(POSITIONS - 1):
        call()
    return TimedRow(call, lambda: call(POSITIONS - 1).float().cpu().numpy())


if __name__ == "__main__":
    torch.backends.cuda.matmul.allow_tf32 = False
    rows.serve(made)
