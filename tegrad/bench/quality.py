"""How near our engines' logits are to exact ones, beside how near llama.cpp's are, on the same packed files.

Teacher-forced: every engine is fed the same tokens. Exact is the float32 reference on the file's weights; llama.cpp
has a cache of the same kind, and runs on the CPU beside an emulated board, else on the GPU, if it is there built with
CUDA. A row is a model and an engine; `tegrad bench quality` writes results/quality.json.
"""

from __future__ import annotations

import dataclasses
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import dataclass, replace
from functools import partial
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, Final, TypeAlias

import numpy as np
from numpy.typing import NDArray

from tegrad import models as shipped
from tegrad.bench import models
from tegrad.bench.peers import F16, Q8_0, CpuLlama, GpuLlama
from tegrad.bench.record import RecordError, now, replace_rows, source_digest
from tegrad.llm.arch import LOCAL_SIZES
from tegrad.llm.cache import KvCache
from tegrad.llm.config import FFN, INPUT_LENGTH, KV_HEADS, PATTERN, SHARED_LAYERS
from tegrad.llm.engine import Engine as Decoder
from tegrad.llm.errors import UnsupportedModelError
from tegrad.llm.families import ARCHES
from tegrad.llm.gguf import Gguf
from tegrad.llm.model import Model
from tegrad.llm.packed import PackedModel
from tegrad.llm.persistent import PersistentPlan
from tegrad.llm.plan import DecodePlan
from tegrad.llm.prefill import Prefill
from tegrad.llm.quality import Agreement, agreement
from tegrad.llm.reference import Reference
from tegrad.llm.session import Session
from tegrad.llm.tokenizer import Tokenizer
from tegrad.nv.kernel import emulated

Logits: TypeAlias = NDArray[np.floating[Any]]
Scored: TypeAlias = tuple[Sequence[int], Logits]
"""Indices of tokens, and the logits (len(indices), vocab) after them."""
Engine: TypeAlias = Callable[[Path, str, int], AbstractContextManager[Callable[[Sequence[int]], Scored]]]
"""Opens a file on a device for so many positions; what it yields scores a text that begins here."""

FILE: Final = "quality.json"
TOKENS: Final = 1920
SHIPPED: Final = "shipped"
_SHAPES: Final[Mapping[str, tuple[str, ...]]] = {
    "q2k": ("1b", "olmo2-1b"),
    "q3k": ("1b", "granite3.1-2b"),
    "q4_0": ("1b", "granite3.1-2b", "minicpm-2b", "ernie4.5-0.3b"),
    "q4_1": ("1b", "gemma2-2b"),
    "q4k": (
        *("1b", "mistral-7b", "qwen2.5-0.5b", "qwen3-1.7b", "gemma-2b", "qwen2.5-vl-3b"),
        *("exaone4-1.2b", "glm4-9b-2024", "nemotron-mini-4b", "afm-4.5b", "hunyuan-1.8b"),
    ),
    "q4km": (
        *("gemma3-1b", "phi4-mini", "exaone3.5-7.8b", "internlm2.5-1.8b", "seed-oss-36b", "glm4-9b"),
        *("tiny-aya", "phi2", "jais2-8b", "aya-expanse-8b", "lfm2-1.2b", "qwen3.5-0.8b", "gemma4-e2b"),
    ),
    "q5_0": ("1b", "gemma3-1b", "seed-oss-36b", "glm4-9b-2024"),
    "q5_1": ("1b", "phi4-mini"),
    "q5k": ("1b", "smollm3-3b", "internlm2.5-1.8b", "stablelm-3b", "jais2-8b"),
    "q6k": (
        *("1b", "gemma2-2b", "ministral3-3b", "minicpm-2b", "qwen3-vl-2b", "glm4-9b", "command-r7b", "pythia-1b"),
        *("lfm2-1.2b", "qwen3.5-0.8b", "gemma4-31b"),
    ),
    "q8_0": (
        *("1b", "qwen3-0.6b", "olmo2-1b", "gemma-2b", "ernie4.5-0.3b", "qwen3-vl-2b", "exaone4-1.2b"),
        *("exaone3.5-7.8b", "starcoder2-3b", "nemotron-mini-4b", "afm-4.5b", "hunyuan-1.8b"),
        *("phi2", "stablelm-3b", "pythia-1b", "aya-expanse-8b"),
    ),
    "iq4_nl": ("1b", "smollm3-3b"),
    "iq4_xs": ("1b", "olmo2-1b"),
    "iq2_xxs": ("1b", "olmo2-1b"),
    "iq2_xs": ("1b", "qwen3-1.7b"),
    "iq2_s": ("1b", "gemma2-2b"),
    "iq3_xxs": ("1b", "phi4-mini"),
    "iq3_s": ("1b", "granite3.1-2b"),
    "mxfp4": ("1b", "ministral3-3b"),
    "f16": ("1b", "gpt2", "qwen2.5-vl-3b", "starcoder2-3b"),
    "bf16": ("1b", "qwen3-0.6b"),
    "f32": ("qwen2.5-0.5b", "gpt2"),
}
CASES: Final = (*(f"small-{shape}-{kind}" for kind, shapes in _SHAPES.items() for shape in shapes), SHIPPED)
"""Every format in two families, and every family in two formats. `small-` is the family and vocabulary of a shape with
few and narrow layers."""


@dataclass(frozen=True, slots=True)
class QualityRow:
    """An engine on a model: how near its logits are to exact ones, and how near llama.cpp's after the same tokens."""

    model: str
    engine: str
    device: str
    ours: Agreement
    llama_cpp: Agreement
    peer: str
    """Which llama.cpp, and how it runs."""
    date: str
    sources: str
    """Hash of our own sources."""

    @property
    def within(self) -> bool:
        """Whether we are no further from exact than llama.cpp."""
        return self.ours.no_worse(self.llama_cpp)


@contextmanager
def graph(path: Path, device: str, positions: int) -> Iterator[Callable[[Sequence[int]], Scored]]:
    """tinygrad's own path: the model as its tensor operations."""
    session = Session(Model.load(path, device), positions)
    yield lambda tokens: (range(len(tokens)), session.feed_all(tokens))


@contextmanager
def prefill(path: Path, device: str, positions: int) -> Iterator[Callable[[Sequence[int]], Scored]]:
    """Our kernels for many tokens, in stretches of different lengths."""

    def score(tokens: Sequence[int]) -> Scored:
        rows: list[Logits] = []
        at = 0
        while at < len(tokens):
            stretch = tokens[at : at + STRETCH_TOKENS[len(rows) % len(STRETCH_TOKENS)]]
            rows.append(engine.score(stretch, at))
            at += len(stretch)
        return range(len(tokens)), np.concatenate(rows)

    with (
        PackedModel.load(path, device) as model,
        KvCache(model.device, model.config, positions) as cache,
        Prefill(model, cache, sizes=(max(STRETCH_TOKENS),)) as engine,
    ):
        yield score


STRETCH_TOKENS: Final = (1, 3, 16, 2, 1, 5)


@contextmanager
def decode(
    path: Path, device: str, positions: int, *, persistent: bool = False, q8: bool = False
) -> Iterator[Callable[[Sequence[int]], Scored]]:
    """Our kernels for one token, by the decode loop's engine: a step of many launches, or of one."""
    plan: Any = PersistentPlan if persistent else DecodePlan
    with Gguf.open(path) as file, Decoder(file, positions, device=device, q8=q8, plan=plan) as engine:
        yield lambda tokens: (range(len(tokens)), np.stack([engine.feed([token]) for token in tokens]))


ENGINES: Final[Mapping[str, Engine]] = {
    "graph": graph,
    "prefill": prefill,
    "decode": decode,
    "decode-q8": partial(decode, q8=True),
    "persistent": partial(decode, persistent=True),
    "persistent-q8": partial(decode, persistent=True, q8=True),
}
Q8_CACHE: Final = frozenset({"decode-q8", "persistent-q8"})
"""Engines with a packed cache, which llama.cpp then has too."""
PROMPTS: Final = frozenset({"prefill"})
"""Engines for many tokens: beside them llama.cpp on a GPU takes PROMPT_TOKENS at once, beside the others one."""
PROMPT_TOKENS: Final = 512
"""llama.cpp's own choice (`-ub`)."""


def small(shape: models.ModelShape) -> models.ModelShape:
    """The family of a shape, small enough for the board."""
    if ARCHES[shape.arch].sized:
        return _small_sized(shape)
    head_dim = shape.head_dim if 512 % shape.head_dim == 0 else 64
    heads, layers = 512 // head_dim, {"gemma3": 6, "smollm3": 4, "cohere2": 4, "qwen35": 4}.get(shape.arch, 3)
    own = {"ssm.time_step_rank": 4, "ssm.group_count": 2, "ssm.inner_size": 512} if shape.arch == "qwen35" else {}
    return replace(
        shape, dim=512, head_dim=head_dim, ffn=1024, layers=layers, heads=heads,
        kv_heads=heads if shape.kv_heads == shape.heads else 2, vocab=1024, specials=min(shape.specials, 1000),
        context=2048, own={**shape.own, **own},
    )  # fmt: skip


def _small_sized(shape: models.ModelShape) -> models.ModelShape:
    """The same of a family whose layers have sizes of their own: twice those of a period, half of which take keys and
    values of the others where layers do."""
    pattern = shape.own[PATTERN]
    assert isinstance(pattern, list)
    half = pattern.index(False) + 1
    within = pattern[: 2 * half]
    own = {**shape.own, **dict.fromkeys(LOCAL_SIZES, 128), PATTERN: within}
    if SHARED_LAYERS in own:
        own |= {SHARED_LAYERS: half, FFN: [1024] * half + [2048] * half, INPUT_LENGTH: 64}
    if KV_HEADS in own:
        own[KV_HEADS] = [2 if local else 1 for local in within]
    return replace(
        shape, dim=512, head_dim=256, ffn=1024, layers=2 * half, heads=4, kv_heads=1, vocab=1024, context=2048, own=own
    )


def compare(case: str, engines: Iterable[str], device: str, where: str, count: int = TOKENS) -> Iterator[QualityRow]:
    """A row for each engine on one of CASES or on a model of `bench.models`; `where` describes the device.

    An engine that refuses the model has none. Raises RecordError without llama.cpp, ModelNameError.
    """
    peer = _peer(gpu=not emulated())
    with tempfile.TemporaryDirectory() as folder:
        path = _file(case, Path(folder))
        tokens = _tokens(case, path, count)
        reference = Reference(path)
        length = min(count, reference.config.longest)
        texts = [tokens[at : at + length] for at in range(0, count, length)]
        exact = np.concatenate([reference.logits(text) for text in texts])
        theirs: dict[tuple[bool, bool], Logits] = {}
        for name in engines:
            alike = name in Q8_CACHE, name in PROMPTS
            if alike not in theirs:
                with peer.opened(name, path, length) as opened:
                    theirs[alike] = np.concatenate([opened.logits(text) for text in texts])
            try:
                chosen, logits = _scored(ENGINES[name], path, device, texts)
            except UnsupportedModelError:
                continue
            yield QualityRow(
                model=case,
                engine=name,
                device=where,
                ours=agreement(logits, exact[chosen]),
                llama_cpp=agreement(theirs[alike][chosen], exact[chosen]),
                peer=peer.described(name),
                date=now(),
                sources=source_digest(),
            )


@dataclass(frozen=True, slots=True)
class Llama:
    """llama.cpp out of a package, and what opens a file in it."""

    package: str
    peer: Callable[..., AbstractContextManager[Any]]
    words: str
    by_steps: bool
    """Whether it takes a token at a time beside engines that do, since its prompts run other kernels."""

    def described(self, engine: str) -> str:
        """What stands in a record beside an engine of ours."""
        how = "prompts" if engine in PROMPTS else "steps of one token"
        return self.words.format(version(self.package)) + (f", {how}" if self.by_steps else "")

    def opened(self, engine: str, path: Path, length: int) -> AbstractContextManager[Any]:
        """A file in it, for texts of so many tokens, as it runs beside an engine of ours."""
        more = {"at_once": PROMPT_TOKENS if engine in PROMPTS else 1} if self.by_steps else {}
        kind = Q8_0 if engine in Q8_CACHE else F16
        return self.peer(path, length, keys=kind, values=kind, **more)


PEERS: Final = (
    Llama("llama-cpp-python", GpuLlama, "CUDA llama.cpp (llama-cpp-python {}), flash attention", by_steps=True),
    Llama("cyllama", CpuLlama, "CPU llama.cpp (cyllama {})", by_steps=False),
)
"""The first that is installed is the peer; the first of all only beside a GPU."""


def _peer(gpu: bool) -> Llama:
    """llama.cpp beside a GPU or an emulated board; RecordError if none is here."""
    for peer in PEERS[not gpu :]:
        with suppress(PackageNotFoundError):
            version(peer.package)
            return peer
    raise RecordError("llama.cpp is missing: pip install cyllama")


def _scored(engine: Engine, path: Path, device: str, texts: Sequence[Sequence[int]]) -> tuple[list[int], Logits]:
    """What an engine makes of texts that begin anew each: indices in all of them, and the logits there."""
    chosen: list[int] = []
    rows, before = [], 0
    for text in texts:
        with engine(path, device, len(text)) as score:
            at, logits = score(text)
        chosen += [before + index for index in at]
        rows.append(logits)
        before += len(text)
    return chosen, np.concatenate(rows)


def _file(case: str, folder: Path) -> Path:
    if case == SHIPPED:
        return shipped.SMALL
    if not case.startswith("small-"):
        return models.provide(case)
    shape, kind = models.parse(case.removeprefix("small-"))
    models.write(path := folder / f"{case}.gguf", small(shape), kind)
    return path


def _tokens(case: str, path: Path, count: int) -> list[int]:
    """Held-out text for a model that knows language, else random tokens."""
    tokenizer = Tokenizer.load(path)
    if case == SHIPPED:
        return tokenizer.encode(shipped.HELD_OUT.read_text(encoding="utf-8"))[:count]
    return [int(token) for token in np.random.default_rng(0).integers(0, len(tokenizer), count)]


def merge(path: Path, rows: Iterable[QualityRow]) -> list[dict[str, Any]]:
    """Put rows into the file, where they replace those of the same model, engine and device; returns all."""
    made = [dataclasses.asdict(row) | {"within": row.within} for row in rows]
    return replace_rows(path, __doc__.split("\n", 1)[0], ("model", "engine", "device"), made)
