"""Answers of running models that were told of tools: `python tests/llm/record_answers.py`, minutes on a CPU.

SmolLM2 135M Instruct with the template of its file, and Gemma 3 270M, which is not tuned to follow instructions and
whose file has none, with that of Gemma 2 2B (llama.cpp's sources), are asked after an earlier call. Neither calls by
itself, so that they are also asked with a call's beginning as theirs. CPU llama.cpp takes the likeliest tokens; prompts
are rendered as `tegrad serve` renders them. What came of it is in tests/data/tool-answers.json.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import real_models
from llama_cpp import peer

from tegrad.llm.gguf import Gguf
from tegrad.llm.template import KEY, Template
from tegrad.llm.tokenizer import Stream, Tokenizer
from tegrad.llm.tools import Format

PATH = Path(__file__).parents[1] / "data/tool-answers.json"
TOKENS, CONTEXT = 40, 1024
BEGUN = '{"name": "'
CITY = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
SUM = {"type": "object", "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}}, "required": ["a", "b"]}
TOOLS: Any = [
    {
        "type": "function",
        "function": {"name": "get_weather", "description": "The weather of a city", "parameters": CITY},
    },
    {"type": "function", "function": {"name": "add", "description": "The sum of two numbers", "parameters": SUM}},
]
QUESTIONS = (
    "What is the weather in Paris?",
    "What is 17 plus 25?",
    "Compare the weather in Oslo and in Rome.",
    "Who wrote Hamlet?",
)
CALLED: Any = [
    {"role": "user", "content": "What is the weather in Lima?"},
    {
        "role": "assistant",
        "content": "",
        "tool_calls": [
            {
                "id": "call00001",
                "type": "function",
                "function": {"name": "get_weather", "arguments": '{"city": "Lima"}'},
            }
        ],
    },
    {"role": "tool", "tool_call_id": "call00001", "content": "19 degrees, fog"},
    {"role": "assistant", "content": "It is foggy in Lima, at 19 degrees."},
]
"""A conversation before the question."""


class Asked:
    """A model that is told of the tools, with a template's source."""

    def __init__(self, path: Path, source: str) -> None:
        self.tokenizer = Tokenizer.load(path)
        self.format = Format.of(source, self.tokenizer)
        with Gguf.open(path) as file:
            file.metadata[KEY] = source
            template = Template.of(file)
        assert template is not None
        self.template = template

    def prompt(self, question: str, before: Sequence[Any] = ()) -> list[int]:
        """Its tokens."""
        messages = self.format.messages([*before, {"role": "user", "content": question}], TOOLS)
        return self.tokenizer.encode(self.template.render(messages, tools=TOOLS), bos=False)

    def text(self, tokens: Sequence[int]) -> str:
        """What it said, up to a token that ends it."""
        stream, kept = Stream(self.tokenizer), itertools.takewhile(lambda one: one not in self.tokenizer.stops, tokens)
        return "".join(map(stream.push, kept)) + stream.finish()


def answers(path: Path, source: str) -> list[dict[str, str]]:
    """What a model says to each question, of itself and once it has begun to call."""
    asked, made = Asked(path, source), []
    with peer(path, CONTEXT) as model:
        for question in QUESTIONS:
            for begun in ("", BEGUN):
                prompt = asked.prompt(question, CALLED) + asked.tokenizer.encode(begun, bos=False)
                said = asked.text(model.greedy(prompt, TOKENS)[len(prompt) :])
                made.append({"question": question, "begun": begun, "answer": begun + said})
                print(repr(made[-1]["answer"]), flush=True)
    asked.template.close()
    return made


def source_of(path: Path) -> str:
    """The template of a model's file."""
    with Gguf.open(path) as file:
        source = file.metadata.get(KEY)
    return str(source or (real_models.llama_cpp() / "templates/google-gemma-2-2b-it.jinja").read_text())


def main() -> None:
    """Write the record."""
    record = {}
    for name in real_models.NAMES:
        source = source_of(path := real_models.fetched(name))
        record[name] = {"template": source, "answers": answers(path, source)}
    PATH.write_text(json.dumps(record, indent=1, ensure_ascii=False) + "\n")


if __name__ == "__main__":
    main()
