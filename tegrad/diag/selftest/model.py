"""Stage 10: the shipped model on this GPU, each way of running a step, against the reference."""

from __future__ import annotations

import os
import time
from typing import Any

from tegrad import models
from tegrad.diag.selftest.stage import Notes

PROMPT = "In the beginning"
CONTEXT = 256
MOST_LOGIT_ERROR = 0.03
"""The largest root mean square error of logits, in their standard deviations, as the tests of the engine have it."""
MOST_REGRET = 0.1
"""How much less likely than the reference's choice a token may be, in logits' standard deviations."""
ONE, MANY = "one launch", "many launches"


def model(notes: Notes) -> None:
    """Tokens and logits of a step in one launch and in many."""
    os.environ.setdefault("DEV", "NV")  # tinygrad reads it when it is imported
    import tegrad.nv

    tegrad.nv.install()
    from tegrad.llm.device import open_device
    from tegrad.llm.engine import Engine
    from tegrad.llm.gguf import Gguf
    from tegrad.llm.persistent import PersistentPlan
    from tegrad.llm.plan import DecodePlan
    from tegrad.llm.reference import Reference
    from tegrad.llm.sampling import Settings
    from tegrad.llm.tokenizer import Tokenizer

    with notes.step("open"):
        notes.fact("device", open_device("NV"))
    reference = Reference(models.SMALL)
    written: dict[str, list[int]] = {}
    with Gguf.open(models.SMALL) as file:
        prompt = Tokenizer(file).encode(PROMPT)
        for name, plan in ((ONE, PersistentPlan), (MANY, DecodePlan)):
            with notes.step(f"a step in {name}: set-up"):
                engine = Engine(file, CONTEXT, device="NV", plan=plan)
            with engine, notes.step(f"a step in {name}"):
                start = time.perf_counter()
                tokens = written[name] = list(engine.generate(prompt, Settings(), notes.amount))
                notes.fact(f"{name}: tokens", tokens)
                notes.fact(f"{name}: seconds, recording included", round(time.perf_counter() - start, 2))
                engine.reset()
                logits = engine.feed(prompt)
            exact = reference.logits([*prompt, *tokens])[len(prompt) - 1 :]
            off = distance(logits, exact[0])
            notes.fact(f"{name}: error of logits", round(off, 5))
            expected = f"logits within {MOST_LOGIT_ERROR} standard deviations in {name}"
            notes.expect(off < MOST_LOGIT_ERROR, expected, f"{off:.4f}")
            for at, (token, row) in enumerate(zip(tokens, exact, strict=False)):
                expected = f"the reference's token {int(row.argmax())}, or one as likely, at {at} in {name}"
                notes.expect(regret(row, token) < MOST_REGRET, expected, token)
    notes.fact("the same tokens both ways", written[ONE] == written[MANY])


def distance(logits: Any, others: Any) -> float:
    """How far logits are from others: the root mean square, in the others' standard deviations."""
    return float(((logits - others) ** 2).mean() ** 0.5 / others.std())


def regret(logits: Any, token: int) -> float:
    """How much less likely a token is than the likeliest, in the logits' standard deviations."""
    return float((logits.max() - logits[token]) / logits.std())
