"""A process that does with one GGUF file after the other what `tegrad run --chat` and `tegrad eval` do.

Paths come on stdin, a line each; a line of JSON answers: what became of the file ("ran", "refused" or "found", with the
words), and the process's largest memory in MiB. The driver (`gguf_run`) ends a process that takes too long.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import resource
import sys
import traceback
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")

import numpy as np
from tinygrad.runtime.support.hcq import HCQBuffer

from tegrad.bench import plans
from tegrad.errors import TegradError
from tegrad.hw.chips import CHIPS
from tegrad.llm import packed, programs
from tegrad.llm.cache import KvCache
from tegrad.llm.config import Config
from tegrad.llm.errors import OutOfMemory
from tegrad.llm.gguf import Gguf
from tegrad.llm.plan import DecodePlan
from tegrad.llm.reference import Reference
from tegrad.llm.state import States
from tegrad.llm.template import KEY, Template
from tegrad.llm.tokenizer import Stream, Tokenizer
from tegrad.nv.spec import MemorySpec

MEMORY = 1 << 30
"""Bytes that this process may have of its own."""
ROOM = 1 << 31
"""Bytes of the device that only keeps books."""
LARGEST = 16 << 20
"""Bytes of weights that are computed with."""
SAID = 450
"""Characters of an error besides the path."""
MESSAGES = [
    {"role": "system", "content": "Answer."},
    {"role": "user", "content": "Über the <|bos|> sea\n\n  is <s>?"},
    {"role": "assistant", "content": "It is."},
    {"role": "user", "content": "And then"},
]
TEXTS = ["In the beginning", "", MESSAGES[1]["content"], "the earth  was   without form, 漢字 🙂\t\r\n 12345 " * 40]


class BoundedDevice(plans.DryDevice):
    """A device of a bounded memory whose kernels do nothing."""

    def allocate(self, size: int, spec: MemorySpec) -> HCQBuffer:
        """A buffer, as far as there is room."""
        if size + self.taken > ROOM:
            raise MemoryError("no room on the device.")
        return super().allocate(size, spec)

    @property
    def lends(self) -> bool:
        """As an Orin's."""
        return True

    def lend(self, buffers: Sequence[HCQBuffer]) -> list[memoryview]:
        """The bytes of buffers."""
        return [buffer.cpu_view().mv for buffer in buffers]

    def runtime(self, elf: Any) -> Any:
        """A kernel that does nothing."""
        return lambda *_, **__: None


def opened(path: Path) -> None:
    """Everything of a file, a stage after the other; what one refuses does not keep the next from its turn."""
    with Gguf.open(path) as file:
        refusals: list[TegradError] = []
        for stage in (_config, _tokens, _template, _plan, _numbers):
            try:
                stage(file)
            except TegradError as error:
                refusals.append(error)
        for refusal in refusals:
            _check_words(refusal, path)
        if refusals:
            raise refusals[0]


def _config(file: Gguf) -> None:
    config = Config.read(file)
    config.check_tokens(file)
    config.positions()


def _tokens(file: Gguf) -> None:
    for texts in (TEXTS, TEXTS[3:]):  # the first text of a tokenizer is read otherwise
        tokenizer = Tokenizer(file)
        for text in texts:
            tokens = tokenizer.encode(text)
            tokenizer.encode(text, bos=False, special=False)
            tokenizer.decode(tokens, special=True)
            stream = Stream(tokenizer)
            for token in tokens:
                stream.push(token)
            stream.finish().encode()


_rendered: dict[str, str] = {}
"""Texts of templates that were sound, since most mutants have one of a few."""


def _template(file: Gguf) -> None:
    values = [
        file.metadata.get(KEY),
        *(file.metadata.get(f"tokenizer.ggml.{name}_token_id") for name in ("bos", "eos")),
    ]
    key = repr(values) if isinstance(values[0], str) and len(values[0]) < 2000 else ""
    text = _rendered.get(key)
    if text is None:
        template = Template.of(file)
        if template is None:
            return
        text = template.render(MESSAGES, tools=[{"name": "look", "parameters": {"at": "é"}}])
        template.close()
        if key:
            _rendered[key] = text
    len(text.encode())
    Tokenizer(file).encode(text, bos=False)


def _plan(file: Gguf) -> None:
    """Weights, cache and a step on a device that keeps books."""
    device = BoundedDevice(CHIPS["agx-orin-64gb"])
    with contextlib.ExitStack() as held:
        held.callback(device.close_all)
        packed.opened = lambda name: device  # type: ignore[assignment]
        made = held.enter_context(packed.PackedModel(file, "NV"))
        cache = held.enter_context(KvCache(device, made.config, made.config.positions()))
        states = States(device)
        held.callback(states.close)
        try:
            held.enter_context(DecodePlan(made, states, cache))
        except MemoryError as error:
            if not str(error).startswith("no room"):
                raise
            raise OutOfMemory(f"{error}: ask for a shorter context") from error


def _numbers(file: Gguf) -> None:
    """Logits on the CPU; what is no number in the weights is none in them."""
    config = Config.read(file)
    if sum(info.nbytes for info in file.tensors.values()) > LARGEST or config.longest < 3:
        return
    with np.errstate(all="ignore"):
        logits = Reference(file.path).logits([0, 1, min(2, config.vocab - 1)] if config.vocab > 1 else [0])
    assert logits.shape[1] == config.vocab


def _check_words(error: TegradError, path: Path) -> None:
    words = str(error).replace(str(path), "PATH")
    assert words.isprintable(), f"an error that is no line: {words[:200]!r}"
    assert len(words) <= SAID, f"an error of {len(words)} characters: {words[:200]}"


def tried(act: Callable[[Path], None], path: Path) -> dict[str, Any]:
    """What became of a file."""
    try:
        act(path)
    except TegradError as error:
        try:
            _check_words(error, path)
        except AssertionError as wrong:
            return {"outcome": "found", "said": str(wrong)}
        return {"outcome": "refused", "said": str(error).replace(str(path), "PATH")}
    except BaseException:
        return {"outcome": "found", "said": traceback.format_exc()[-3000:]}
    return {"outcome": "ran", "said": ""}


def main(act: Callable[[Path], None]) -> None:
    """Do this with paths until there are no more."""
    programs.compile_kernel = lambda *_, **__: b""
    BoundedDevice.close_all = lambda self: [memory.close() for memory in self._memory.values()]  # type: ignore[attr-defined]
    warnings.simplefilter("error", RuntimeWarning)
    resource.setrlimit(resource.RLIMIT_DATA, (MEMORY, MEMORY))
    for line in sys.stdin:
        errors = io.StringIO()
        with contextlib.redirect_stderr(errors):
            answer = tried(act, Path(line.rstrip("\n")))
        if answer["outcome"] != "found" and errors.getvalue():
            answer = {"outcome": "found", "said": f"on stderr: {errors.getvalue()[:500]}"}
        answer["mib"] = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss >> 10
        print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    main(opened)
