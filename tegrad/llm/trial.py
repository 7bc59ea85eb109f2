"""A grammar compiled on trial, in a process of its own: some that a request may bring take llguidance minutes,
gigabytes, or more stack than there is. `main` is that process's program, which imports little.
"""

from __future__ import annotations

import json
import math
import subprocess
import sys
import threading
import time
from typing import Any, Final

from tegrad.installed import isolated

CPU_LIMIT_S: Final = 2
"""Of the compiling alone: how long Python and llguidance take to start differs by machine."""
WALL_LIMIT_S: Final = 15.0
MOST_MEMORY_BYTES: Final = 1 << 30
STACK_BYTES: Final = 4 << 20
"""Half of what threads have."""
MOST_BYTES: Final = 1000
"""Of a token, as llguidance ends in a panic from 1,025 on: an answer in a grammar does without longer ones."""
STEPS: Final = 8
LIMITS: Final[dict[str, Any]] = {"step_lexer_fuel": 20_000, "max_lexer_states": 50_000, "verbose_errors": False}
"""llguidance's own for one grammar, and for one mask of it."""


def fault(source: str, size: int, special: dict[int, str]) -> str:
    """What is wrong with a grammar as llguidance takes it, for a vocabulary of `size` tokens; "" for nothing."""
    asked = json.dumps([source, size, special])
    try:
        ended = subprocess.run(
            isolated("tegrad.llm.trial"), input=asked, capture_output=True, text=True, timeout=WALL_LIMIT_S
        )
    except subprocess.TimeoutExpired:
        return f"it takes more than {WALL_LIMIT_S:g} seconds to compile"
    except OSError as error:
        return f"it cannot be compiled: no process for it ({error.strerror})"
    if ended.returncode == 0:
        return str(json.loads(ended.stdout))
    return f"it takes more than {CPU_LIMIT_S} s, {MOST_MEMORY_BYTES >> 30} GiB or {STACK_BYTES >> 20} MiB of stack"


def main() -> None:
    """Read a grammar and its vocabulary, and write what is wrong, within bounds."""
    import resource

    import llguidance  # noqa: F401  (before the time counts)

    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    source, size, special = json.load(sys.stdin)
    limit = math.ceil(time.process_time()) + CPU_LIMIT_S
    resource.setrlimit(resource.RLIMIT_CPU, (limit, limit))
    resource.setrlimit(resource.RLIMIT_AS, (MOST_MEMORY_BYTES, MOST_MEMORY_BYTES))
    threading.stack_size(STACK_BYTES)
    thread = threading.Thread(target=lambda: print(json.dumps(_tried(source, size, special))))
    thread.start()
    thread.join()


def _tried(source: str, size: int, special: dict[str, str]) -> str:
    """What is wrong, with the grammar or with masks of the first letters that it allows."""
    import llguidance

    words = _Bytes(size, special)
    vocabulary = llguidance.LLTokenizer(llguidance.TokenizerWrapper(words))
    matcher = llguidance.LLMatcher(vocabulary, source, log_level=0, limits=llguidance.LLParserLimits(**LIMITS))
    for _ in range(STEPS):
        bits = b"" if matcher.is_error() else matcher.compute_bitmask()
        allowed = (token for token in words.plain if bits and bits[token // 8] >> token % 8 & 1)
        if (token := next(allowed, None)) is None or not matcher.consume_token(token):
            break
    return str(matcher.get_error())


class _Bytes:
    """A vocabulary of special tokens and single bytes, as llguidance asks for one."""

    bos_token_id = None

    def __init__(self, size: int, special: dict[str, str]) -> None:
        texts = {int(token): text.encode("utf-8", "surrogateescape") for token, text in special.items()}
        named = {token: text[:MOST_BYTES] for token, text in texts.items()}
        plain = (token for token in range(size + 256) if token not in named)
        self.plain = [next(plain) for _ in range(256)]
        every = named | {token: bytes((byte,)) for byte, token in enumerate(self.plain)}
        self.tokens = [every.get(token, b"") for token in range(max(size, *every) + 1)]
        self.eos_token_id, self.special_token_ids = min(named), sorted(named)

    def __call__(self, text: str) -> list[int]:
        return [self.plain[byte] for byte in text.encode()]
