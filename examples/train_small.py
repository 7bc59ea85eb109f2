"""Train the small model that tegrad ships: prepare, train, export.

    python examples/train_small.py prepare --data build/corpus                      # Debian's package -> tokens
    DEV=NV python examples/train_small.py train --data build/corpus --out build/model --minutes 3
    python examples/train_small.py export --data build/corpus --out build/model     # weights -> tegrad/models/
    tegrad eval                                                                     # held-out loss and known words

`prepare` needs apt and no GPU.

Run from the checkout, with tegrad installed or on PYTHONPATH. `train` needs no other package than tinygrad and numpy,
and no network: carry the data file to the machine that has the GPU.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, replace
from importlib import metadata
from math import cos, log, pi
from pathlib import Path
from typing import Any

import numpy as np
from small_model.data import Data
from small_model.network import Network, Recipe, Sizes, Trainer, Weights, initial

import tegrad  # puts our NV device into tinygrad

DATA, TOKENIZER = "data.npz", "tokenizer.json"
HELD_OUT, WORDS = "held-out.txt", "words.txt"
WEIGHTS, CURVE = "weights.npz", "curve.json"
RECORD = Path(__file__).parents[1] / "results" / "train-small.json"

SYNC_EVERY = 20
"""Steps between two looks at the loss: the host must not run ahead of the device without bound."""


def prepare(options: argparse.Namespace) -> None:
    """Fetch the text, learn the vocabulary, and write what training and measuring need."""
    from small_model import build, corpus

    from tegrad.llm.quality import words

    options.data.mkdir(parents=True, exist_ok=True)
    chapters = corpus.load()
    _, held = corpus.split(chapters)
    tokenizer, data = build.build(chapters)
    tokenizer.save(str(options.data / TOKENIZER))
    data.save(options.data / DATA)
    (options.data / HELD_OUT).write_text("\f".join(chapter.text for chapter in held))
    known = sorted({word for chapter in chapters for word in words(chapter.text)})
    (options.data / WORDS).write_text("\n".join(known) + "\n")
    print(
        f"{len(chapters)} chapters, {len(held)} held out ({data.held.text_bytes} bytes), {len(known)} different words"
    )
    print(f"{len(data.stream)} training tokens of {data.vocab}, in {options.data / DATA}")


@dataclass
class Progress:
    """The part of the training that is done, by time or by steps, whichever is further."""

    seconds: float
    steps: int
    started: float = 0.0

    def start(self) -> None:
        """The clock begins with the first recorded step: compilation takes nothing from the training."""
        self.started = time.perf_counter()

    def share(self, step: int) -> float:
        """How much of the training is done, by time or by steps, from 0 to 1."""
        elapsed = time.perf_counter() - self.started if self.started else 0.0
        return min(1.0, max(elapsed / self.seconds, step / self.steps))


def learning_rate(recipe: Recipe, step: int, share: float) -> float:
    """Linear warm-up by steps, then half a cosine over the share of training done."""
    decayed = recipe.final_lr + (recipe.peak_lr - recipe.final_lr) * (1 + cos(pi * share)) / 2
    return decayed * min(1.0, (step + 1) / recipe.warmup_steps)


def train(options: argparse.Namespace) -> None:
    """Train until time or steps are used up; the best weights by held-out loss are on disk at any moment."""
    data = Data.load(options.data / DATA)
    sizes = replace(Sizes(), vocab=data.vocab, context=data.context, **options.sizes)
    recipe = replace(Recipe(), **options.recipe)
    options.out.mkdir(parents=True, exist_ok=True)
    trainer = Trainer(Network(sizes, recipe, initial(sizes, recipe.seed)))
    curve = Curve(options.out, sizes, recipe)
    progress = Progress(options.minutes * 60, options.steps)
    rng = np.random.default_rng(recipe.seed)
    print(f"{curve.parameters:,} parameters, {len(data.stream):,} tokens, {asdict(recipe)}", flush=True)

    def measure(step: int) -> None:
        costs = trainer.held_out(data.held.inputs, data.held.targets)
        bits = float(costs[data.held.counted].sum(dtype=np.float64)) / log(2) / data.held.text_bytes
        if curve.held(step, bits):
            save(options.out / WEIGHTS, sizes, trainer.network.read())

    began, step, share, tokens_since, since = time.perf_counter(), 0, 0.0, 0, time.perf_counter()
    while share < 1.0:
        lr = learning_rate(recipe, step, share)
        result = trainer.step(data.batch(rng, recipe.rows), lr)
        step += 1
        tokens_since += recipe.rows * sizes.context
        if step == 1 or step % SYNC_EVERY == 0:
            loss, norm = (float(value) for value in result.numpy())
            now = time.perf_counter()
            curve.trained(step, loss, norm, lr, tokens_since / (now - since), now - began)
            tokens_since, since = 0, now
            if step == SYNC_EVERY:
                progress.start()
        if step % options.eval_every == 0:
            measure(step)
            since = time.perf_counter()
        share = progress.share(step)
    if step % options.eval_every:
        measure(step)
    curve.finish(step, recipe.rows * sizes.context, len(data.stream), time.perf_counter() - began)


class Curve:
    """The record of a training, printed as it grows and written to CURVE."""

    def __init__(self, folder: Path, sizes: Sizes, recipe: Recipe) -> None:
        self._path = folder / CURVE
        self.parameters = sum(weight.size for weight in initial(sizes, 0).values())
        self._record: dict[str, Any] = {
            "tegrad": tegrad.__version__,
            "tinygrad": metadata.version("tinygrad"),
            "device": os.environ.get("DEV", ""),
            "sizes": asdict(sizes),
            "recipe": asdict(recipe),
            "parameters": self.parameters,
            "train": [],
            "held_out": [],
        }

    def trained(self, step: int, loss: float, norm: float, lr: float, speed: float, seconds: float) -> None:
        """Note and print a step."""
        self._record["train"].append([step, round(loss, 4), round(norm, 3), round(lr, 6), round(speed)])
        print(f"{seconds:6.1f} s  step {step:5}  loss {loss:.4f}  |g| {norm:.2f}  {speed:9,.0f} tokens/s", flush=True)

    def held(self, step: int, bits: float) -> bool:
        """Note a held-out measurement; true where it is the best so far."""
        best = min((old for _, old in self._record["held_out"]), default=float("inf"))
        self._record["held_out"].append([step, round(bits, 5)])
        self._path.write_text(json.dumps(self._record))
        print(f"          step {step:5}  held out {bits:.4f} bits a byte{' *' if bits < best else ''}", flush=True)
        return bits < best

    def finish(self, steps: int, tokens_per_step: int, corpus_tokens: int, seconds: float) -> None:
        """Add the totals and write the record."""
        record = self._record
        best = min(bits for _, bits in record["held_out"])
        record |= {
            "steps": steps,
            "seconds": round(seconds, 1),
            "epochs": round(steps * tokens_per_step / corpus_tokens, 1),
        }
        self._path.write_text(json.dumps(record))
        print(f"{steps} steps, {record['epochs']} epochs, {seconds:.0f} s, best {best:.4f} bits a byte")


def save(path: Path, sizes: Sizes, weights: Weights) -> None:
    """Write weights whole or not at all: matrices in half precision, which is finer than what they become."""
    partial = path.with_name("partial.npz")
    arrays: dict[str, Any] = {name: w.astype(np.float16) if w.ndim == 2 else w for name, w in weights.items()}
    np.savez(partial, __sizes__=np.array(json.dumps(asdict(sizes))), **arrays)
    os.replace(partial, path)


def load(path: Path) -> tuple[Sizes, Weights]:
    """Read what `save` wrote."""
    with np.load(path) as file:
        sizes = Sizes(**json.loads(str(file["__sizes__"])))
        return sizes, {name: file[name].astype(np.float32) for name in file.files if name != "__sizes__"}


def export(options: argparse.Namespace) -> None:
    """Quantize the best weights; put the model beside what it is measured with, and the record of its training away."""
    from small_model.export import write
    from tokenizers import Tokenizer

    from tegrad import models

    target = options.to or models.SMALL.parent
    record = RECORD if options.to is None else target / RECORD.name
    target.mkdir(parents=True, exist_ok=True)
    sizes, weights = load(options.out / WEIGHTS)
    size = write(target / models.SMALL.name, sizes, weights, Tokenizer.from_file(str(options.data / TOKENIZER)))
    (target / models.HELD_OUT.name).write_bytes((options.data / HELD_OUT).read_bytes())
    (target / models.WORDS.name).write_bytes((options.data / WORDS).read_bytes())
    record.write_bytes((options.out / CURVE).read_bytes())
    print(f"{target / models.SMALL.name}: {size} bytes, {sum(w.size for w in weights.values())} parameters")


def _settings(kind: type[Any]) -> Callable[[str], dict[str, Any]]:
    """A parser of 'name=value,name=value' for the fields of a dataclass."""

    def parse(text: str) -> dict[str, Any]:
        return dict(_pairs(text))

    def _pairs(text: str) -> Iterator[tuple[str, Any]]:
        for entry in filter(None, text.split(",")):
            name, _, value = entry.partition("=")
            if name not in kind.__dataclass_fields__:
                raise argparse.ArgumentTypeError(f"{name!r} is none of {', '.join(kind.__dataclass_fields__)}")
            yield name, json.loads(value)

    return parse


def main() -> None:
    """Read the command line and run one step."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(required=True)
    for step in (prepare, train, export):
        command = commands.add_parser(step.__name__, help=(step.__doc__ or "").splitlines()[0])
        command.set_defaults(run=step)
        command.add_argument("--data", type=Path, default=Path("build/corpus"), help="folder of the prepared files")
        if step is not prepare:
            command.add_argument("--out", type=Path, default=Path("build/model"), help="folder of weights and curve")
        if step is export:
            command.add_argument("--to", type=Path, help="folder of the model (default: tegrad/models)")
        if step is train:
            command.add_argument("--minutes", type=float, default=3.0, help="time after compilation")
            command.add_argument("--steps", type=int, default=2500, help="steps at most")
            command.add_argument("--eval-every", type=int, default=200, help="steps between held-out measurements")
            command.add_argument("--sizes", type=_settings(Sizes), default={}, help="e.g. layers=4,ffn=768")
            command.add_argument("--recipe", type=_settings(Recipe), default={}, help="e.g. dropout=0.1,half=false")
    options = parser.parse_args()
    options.run(options)


if __name__ == "__main__":
    main()
