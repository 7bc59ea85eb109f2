"""One value or tensor of a sound file changed, added or left out: what llama.cpp and we both run has the same logits.

Either may refuse a change; what we refuse is refused with an error of ours. llama.cpp ends the process at some of them,
so each side has a process of its own.
"""

from __future__ import annotations

import faulthandler
import os
import signal
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from tempfile import TemporaryFile
from typing import Any, Final

import numpy as np
import pytest
from gguf import GGUFReader
from tiny_llama import SHAPES, TYPE, rewritten, write

from tegrad.errors import TegradError
from tegrad.llm import numerics
from tegrad.llm.reference import Reference

pytestmark = pytest.mark.long

ADDED: Final[Mapping[str, tuple[Any, ...]]] = {
    "attention.scale": (0.05, 0.0), "attention.output_scale": (0.5,), "attention.sliding_window": (9, 0),
    "attention.sliding_window_pattern": (2, [True, False] * 32), "attention.temperature_scale": (0.3,),
    "attention.temperature_length": (8,), "attention.clamp_kqv": (4.0, 0.0), "attention.max_alibi_bias": (8.0,),
    "attention.key_length": (32,), "attention.value_length": (32,), "attention.key_length_swa": (32,),
    "attention.shared_kv_layers": (1,), "attention.layer_norm_epsilon": (0.5,), "attention.head_count_kv": ([1, 2],),
    "embedding_scale": (3.0, 0.0), "residual_scale": (0.3, 0.0), "logit_scale": (0.25, 0.0),
    "attn_logit_softcapping": (1.0, 0.0), "final_logit_softcapping": (5.0, 0.0), "feed_forward_length": ([64, 128],),
    "expert_count": (0, 4), "expert_used_count": (0,), "vocab_size": (200,), "leading_dense_block_count": (1,),
    "full_attention_interval": (2,), "embedding_length_per_layer_input": (16,), "swiglu_clamp_exp": (0.1,),
    "rope.dimension_count": (32, 16), "rope.dimension_count_swa": (32,), "rope.freq_base": (100.0,),
    "rope.scaling.type": ("none", "linear", "yarn", "longrope", "dynamic"), "rope.scaling.factor": (4.0, 0.0),
    "rope.scaling.attn_factor": (1.5,), "rope.scaling.original_context_length": (16,),
    "rope.scaling.yarn_log_multiplier": (0.5,), "rope.scaling.yarn_ext_factor": (0.5,), "rope.scale_linear": (4.0,),
}  # fmt: skip
"""Values that a family may not know, by the end of their names."""
OURS_ALONE: Final = {
    "rope.dimension_sections": "others than those of a published model rotate parts by no position",
    "phi3.rope.scaling.original_context_length": "llama.cpp rounds a context up to 256",
    "minicpm.rope.scaling.original_context_length": "as above",
    "qwen2vl.attention.layer_norm_rms_epsilon": "llama.cpp has its own",
    "olmo2.attention.sliding_window_pattern": "the package is older than its reading a list",
    "exaone4.attention.sliding_window_pattern": "as above",
    "cohere2.attention.sliding_window_pattern": "as above",
    "qwen3vl.rope.freq_base": "llama.cpp turns two of its pairs by no position, which a small base shows",
    "gemma2.final_logit_softcapping": "llama.cpp divides by a cap of 0",
}
"""Ends of names of values that only one side reads, and why."""
TOKENS: Final = 40
LIMIT: Final = 2e-2
"""Of the largest logit: a cap of 1 is most of it, which enlarges what halves round."""
WAIT_S: Final = 60


def others(value: object) -> Iterator[object]:
    """What a value may be instead."""
    if isinstance(value, bool):
        yield not value
    elif isinstance(value, int):
        yield from (0, 1, 2 * value, max(value // 2, 1), value + 1)
    elif isinstance(value, float):
        yield from (0.0, 1.0, 2 * value, value / 2, -value)
    elif isinstance(value, str):
        yield from ("none", "other")
    elif isinstance(value, list) and value and not isinstance(value[0], str):
        yield from (value[:-1], [*value, value[-1]], [value[0]] * len(value), value[::-1], value[0])


def changes(path: Path, arch: str) -> Iterator[dict[str, Any]]:
    """Arguments of `rewritten`, one change each."""
    reader = GGUFReader(path)
    for key, field in reader.fields.items():
        if key.startswith(("GGUF.", "tokenizer.")) or key == "general.architecture":
            continue
        now = field.contents()
        yield from ({key: value} for value in (None, *others(now)) if value is None or value != now)
    yield from ({f"{arch}.{key}": value} for key, values in ADDED.items() for value in values)
    yield from ({"tensor": tensor.name} for tensor in reader.tensors)


def alone(made: Callable[[], np.ndarray]) -> np.ndarray | str | None:
    """Logits, or what an error of ours says, or None where the process ends otherwise: made in a process of its own."""
    with TemporaryFile() as found:
        if not (pid := os.fork()):
            faulthandler.disable()
            os.environ["GGML_NO_BACKTRACE"] = "1"
            for stream in (1, 2):
                os.dup2(os.open(os.devnull, os.O_WRONLY), stream)
            signal.alarm(WAIT_S)
            try:
                found.write(b"L" + np.ascontiguousarray(made(), np.float32).tobytes())
            except TegradError as error:
                found.write(b"E" + str(error).encode())
            except BaseException:  # the process says so by leaving nothing
                os._exit(1)
            found.flush()
            os._exit(0)
        os.waitpid(pid, 0)
        found.seek(0)
        kind, left = found.read(1), found.read()
    return np.frombuffer(left, np.float32) if kind == b"L" else left.decode() if kind == b"E" else None


@pytest.mark.parametrize("name", SHAPES)
def test_what_both_run_has_the_same_logits(tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    llama_cpp = pytest.importorskip("llama_cpp", reason="cyllama is not installed")
    monkeypatch.setitem(numerics.ACTIVATIONS, "gelu", llama_cpp.table_gelu)
    shape = SHAPES[name]
    path, changed = write(tmp_path / "model.gguf", shape, TYPE.F32), tmp_path / "changed.gguf"
    tokens = np.random.default_rng(1).integers(0, shape.vocab, TOKENS).tolist()

    def theirs() -> np.ndarray:
        with llama_cpp.peer(changed) as peer:
            return peer.logits(tokens)

    wrong, compared = [], 0
    for change in changes(path, shape.arch):
        try:
            rewritten(path, changed, **change)
        except (ValueError, TypeError, OverflowError, AttributeError):
            continue  # nothing that a file can hold
        own, other = alone(lambda: Reference(changed).logits(tokens)), alone(theirs)
        if own is None:
            wrong.append((change, "no error of ours"))
        elif isinstance(own, np.ndarray) and isinstance(other, np.ndarray) and np.isfinite(other).all():
            compared += 1
            far = own.shape != other.shape or np.abs(own - other).max() > LIMIT * np.abs(other).max()
            if far and not next(iter(change)).endswith(tuple(OURS_ALONE)):
                wrong.append((change, "other logits"))
    assert not wrong
    assert compared > 20
