"""Functions and models that run: what they said is read as it is, and what they have to call is valid."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import jsonschema_rs
import numpy as np
import pytest
import real_models

pytest.importorskip("llama_cpp")
import record_answers
from llama_cpp import peer
from record_answers import QUESTIONS, Asked

from tegrad.llm.grammar import Grammar, Masks
from tegrad.llm.tokenizer import Tokenizer
from tegrad.llm.tools import Arguments, Call, Format, Text
from tegrad.models import SMALL

TIMES = 25
"""That each question is answered."""
TOOLS = copy.deepcopy(record_answers.TOOLS)
TOOLS[0]["function"]["parameters"]["properties"]["city"]["maxLength"] = 20
for number in TOOLS[1]["function"]["parameters"]["properties"].values():
    number |= {"minimum": 0, "maximum": 99}
"""So small a model does not end a text or a number that has no bounds."""
SCHEMAS = {tool["function"]["name"]: tool["function"]["parameters"] for tool in TOOLS}


def drawn(masks: Masks, grammar: Grammar, stops: set[int], seed: int) -> Callable[[np.ndarray, list[int]], int | None]:
    """Draws tokens as a grammar allows them, at temperature 1, until the model ends."""
    mask, rng = masks.mask(grammar), np.random.default_rng(seed)

    def choose(logits: np.ndarray, said: list[int]) -> int | None:
        bits = np.unpackbits(np.frombuffer(mask(said) or b"", np.uint8), bitorder="little")[: len(logits)]
        token = int(np.where(bits > 0, logits + rng.gumbel(size=len(logits)), -np.inf).argmax())
        return None if token in stops else token

    return choose


@pytest.mark.long
def test_a_hundred_of_a_hundred_calls_of_a_published_model_are_valid(
    record_property: Callable[[str, object], None],
) -> None:
    """SmolLM2 in CPU llama.cpp, required to call or to call one by name, by our grammar; it seldom calls by itself."""
    path = real_models.fetched("smollm2")
    asked = Asked(path, record_answers.source_of(path))
    masks, called = Masks(asked.tokenizer), list[Any]()
    with peer(path, 1024) as model:
        for question in QUESTIONS:
            choices = [("required", "get_weather", "add")[seed % 3] for seed in range(TIMES)]
            grammars = [asked.format.grammar(TOOLS, choice, False) for choice in choices]
            choosers = [drawn(masks, one, asked.tokenizer.stops, at) for at, one in enumerate(grammars) if one]
            answers = model.answers(asked.prompt(question), 100, choosers)
            for choice, tokens in zip(choices, answers, strict=True):
                reader = asked.format.reader(TOOLS)
                told = reader.push(asked.text(tokens)) + reader.finish()
                (name,) = (event.name for event in told if isinstance(event, Call))
                arguments = "".join(event.text for event in told if isinstance(event, Arguments))
                assert name == choice or choice == "required"
                called.append((name, jsonschema_rs.is_valid(SCHEMAS[name], json.loads(arguments)), arguments))
    asked.template.close()
    record_property("valid", sum(valid for _, valid, _ in called))
    record_property("different", len({(name, arguments) for name, _, arguments in called}))
    assert [valid for _, valid, _ in called] == [True] * TIMES * len(QUESTIONS)


# ---- what models said that were told of tools (record_answers)


ANSWERS = {name: (one["template"], one["answers"]) for name, one in json.loads(record_answers.PATH.read_text()).items()}
SHIPPED = Tokenizer.load(SMALL)


def call_of(answer: str) -> tuple[str, Any, str] | None:
    """Name and arguments of the call in JSON that an answer begins with, and the text behind it; None without one."""
    with suppress(ValueError, LookupError, TypeError):
        made, end = json.JSONDecoder().raw_decode(answer)
        if made["name"] in SCHEMAS:
            return made["name"], made["parameters"], answer[end:]
    return None


@pytest.mark.parametrize("name", ANSWERS)
@pytest.mark.parametrize("whole", [True, False])
def test_what_models_said_is_read_as_it_is(name: str, whole: bool) -> None:
    source, answers = ANSWERS[name]
    for one in answers:
        answer = one["answer"]
        reader = Format.of(source, SHIPPED).reader(record_answers.TOOLS)
        told = [event for piece in ([answer] if whole else answer) for event in reader.push(piece)] + reader.finish()
        text = "".join(event.text for event in told if isinstance(event, Text))
        names = [event.name for event in told if isinstance(event, Call)]
        if (expected := call_of(answer)) is None:
            assert (names, text) == ([], answer)
        else:
            arguments = "".join(event.text for event in told if isinstance(event, Arguments))
            assert (names, json.loads(arguments), text.strip()) == ([expected[0]], expected[1], expected[2].strip())


def test_a_model_that_runs_called_a_function() -> None:
    assert any(call_of(one["answer"]) for _, answers in ANSWERS.values() for one in answers)
