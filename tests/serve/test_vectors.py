"""Vectors of texts over HTTP are those that llama.cpp makes of the same file."""

from __future__ import annotations

import asyncio
import socket
import threading
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import httpx
import numpy as np
import pytest
from processes import patience
from program import serving
from tiny_llama import BOTH_WAYS, SHAPES, TYPE, rewritten, write

from tegrad import models
from tegrad.llm import engine as kernels
from tegrad.llm.embeddings import text_tokens
from tegrad.llm.errors import UnsupportedModelError
from tegrad.llm.gguf import Gguf
from tegrad.llm.tokenizer import Tokenizer
from tegrad.serve import engine
from tegrad.serve.remote import Link
from tegrad.serve.wire import Channel, Embed, Load, Query

llama_cpp = pytest.importorskip("llama_cpp")
pytestmark = pytest.mark.board

TEXTS = ["tea", "The sea is not full.", "All the rivers run into the sea; yet the sea is not full; " * 2]
MEAN, LAST = 1, 3
POOLED = {"last": ("qwen3", LAST), "mean": ("gemma3", MEAN), "both ways": ("gemma-embedding", MEAN)}
"""By a model's name: its family, and how its file says that states are pooled."""
MOST = 1e-3
"""That a number of a vector of length 1 may differ by."""


@pytest.fixture(scope="module")
def paths(tmp_path_factory: pytest.TempPathFactory) -> Mapping[str, Path]:
    folder, made = tmp_path_factory.mktemp("models"), {}
    for name, (family, kind) in POOLED.items():
        plain = write(folder / "plain.gguf", (BOTH_WAYS | SHAPES)[family], TYPE.F16)
        made[name] = rewritten(plain, folder / f"{name}.gguf", **{f"{family}.pooling_type": kind})
    return made


@pytest.fixture(scope="module")
def url(paths: Mapping[str, Path], tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with serving(tmp_path_factory.mktemp("log") / "log", *map(str, paths.values())) as server:
        yield server.url


def llama_cpps(path: Path, kind: int) -> np.ndarray:
    """(texts, dim), pooled of its states."""
    made = []
    with Gguf.open(path) as file, llama_cpp.peer(path) as peer:
        for text in TEXTS:
            states = peer.hidden(text_tokens(file, Tokenizer(file), text))
            state = states.mean(axis=0) if kind == MEAN else states[-1]
            made.append(state / np.linalg.norm(state))
    return np.stack(made)


@pytest.mark.parametrize("name", ["last", pytest.param("mean", marks=pytest.mark.long)])
def test_vectors_are_llama_cpps(paths: Mapping[str, Path], url: str, name: str) -> None:
    expected = llama_cpps(paths[name], POOLED[name][1])
    body = {"model": name, "input": TEXTS}
    openais = httpx.post(f"{url}/v1/embeddings", json=body, timeout=patience()).json()["data"]
    ollamas = httpx.post(f"{url}/api/embed", json=body, timeout=patience()).json()["embeddings"]
    for vectors in (np.float32([one["embedding"] for one in openais]), np.float32(ollamas)):
        assert np.abs(vectors - expected).max() < MOST
        assert abs(vectors[0] @ vectors[1]) < 0.99


def test_a_model_that_is_refused_once_it_is_loaded_is_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    closed: list[bool] = []

    class Speaker(kernels.Engine):
        def __init__(self) -> None:
            pass

        def close(self) -> None:
            closed.append(True)

    def refuses(file: Gguf) -> None:
        raise UnsupportedModelError("prompts of F32 matrices are not run")

    monkeypatch.setattr(engine, "speaker", lambda file, **options: (Speaker(), "kernels"))
    monkeypatch.setattr(engine.rows, "check", refuses)
    with pytest.raises(UnsupportedModelError, match="F32"):
        engine.Embedder(Load(models.SMALL, True, {"context": 64}))
    assert closed == [True]


def test_vectors_that_nobody_waits_for_are_not_made(paths: Mapping[str, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    """Their clients left while others' were made."""
    made, more = list[int](), threading.Semaphore(0)

    class Speaker:
        def hidden(self, tokens: Sequence[int]) -> np.ndarray:
            made.append(len(tokens))
            assert more.acquire(timeout=30)
            return np.ones((len(tokens), 4), np.float32)

    monkeypatch.setattr(engine, "speaker", lambda *_, **__: (Speaker(), "kernels"))
    monkeypatch.setattr(engine, "_opened", lambda: "a device")
    monkeypatch.setattr(engine, "_end_in", lambda seconds: None)

    async def ask() -> None:
        near, far = socket.socketpair()
        process = threading.Thread(target=engine.Process(Channel(far)).run)
        process.start()
        link = Link(lambda came: None, lambda error: None)
        await link.load(Load(paths["last"], True, {"context": 64}), near)

        def embed(*texts: list[int]) -> asyncio.Task[np.ndarray]:
            return asyncio.create_task(link.reply(lambda number: Embed(number, texts), cancels=True))

        async def begun(size: int) -> None:
            while not made or made[-1] != size:
                await asyncio.sleep(0.001)

        first, left, leaves = embed([1], [1, 1]), embed([1] * 3), embed([1] * 4, [1] * 5)
        await begun(1)
        left.cancel()
        await asyncio.wait([left])
        assert await link.reply(Query)  # so that the engine has heard of that
        more.release(2)
        assert (await first).shape == (2, 4)
        await begun(4)
        leaves.cancel()
        await asyncio.wait([leaves])
        assert await link.reply(Query)
        last = embed([1] * 6)
        more.release(2)
        await last
        assert made == [1, 2, 4, 6]
        await link.close(drain=False)
        process.join(30)

    asyncio.run(asyncio.wait_for(ask(), 60))
