"""PyTorch's side of the rows, as far as it can be told without PyTorch."""

from __future__ import annotations

import gc
import importlib
import sys
import weakref
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest


class Weights:
    """What a graph reads."""


@pytest.fixture
def rows_torch(monkeypatch: pytest.MonkeyPatch) -> Any:
    """The module over a PyTorch whose CUDA graphs keep nothing, as real ones do."""
    graph = SimpleNamespace(replay=lambda: None)
    cuda = SimpleNamespace(CUDAGraph=lambda: graph, graph=lambda _: nullcontext(), synchronize=lambda: None)
    monkeypatch.setitem(sys.modules, "torch", SimpleNamespace(cuda=cuda, nn=SimpleNamespace(functional=None)))
    monkeypatch.setenv("TEGRAD_TORCH", "graphs")
    monkeypatch.delitem(sys.modules, "tegrad.bench.rows_torch", raising=False)
    yield importlib.import_module("tegrad.bench.rows_torch")
    del sys.modules["tegrad.bench.rows_torch"]


def test_what_a_cuda_graph_reads_stays_as_long_as_it_is_replayed(rows_torch: Any) -> None:
    """Its memory went to others: products and a network beside CUDA graphs had wrong results."""
    inside, given = Weights(), Weights()
    alive = weakref.ref(inside), weakref.ref(given)
    replay = rows_torch._replayed(lambda x, inside=inside: 1.0, given)
    del inside, given
    gc.collect()
    assert all(one() is not None for one in alive)
    assert replay() == 1.0
    del replay
    gc.collect()
    assert all(one() is None for one in alive)
