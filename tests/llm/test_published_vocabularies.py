"""Vocabularies and chat templates of published models, which llama.cpp's source has.

They come with the source package of llama-cpp-python on PyPI, kept in the cache; without a registry they are skipped.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from datetime import datetime
from itertools import takewhile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import real_models
from gguf import GGUFReader, GGUFWriter
from jinja2 import nodes
from jinja2.ext import Extension
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment
from scripts import texts
from tiny_llama import TYPE, finish

from tegrad.llm.errors import UnsupportedModelError
from tegrad.llm.template import Template, TemplateRefusalError
from tegrad.llm.tokenizer import Kind, Tokenizer
from tegrad.llm.tools import Format, Said
from tegrad.models import SMALL

BETWEEN = "\n__ggml_vocab_test__\n"
"""Between the texts of a vocabulary's file of them."""
WRITTEN_DOWN = (
    *("command-r", "deepseek-coder", "deepseek-llm", "falcon", "gpt-2", "llama-bpe", "mpt", "qwen2", "qwen35"),
    *("refact", "starcoder", "llama-spm", "phi-3", "gemma-4"),
)
"""Vocabularies with texts and their tokens."""
OTHERS = ("aquila", "baichuan", "gpt-neox")
REFUSED = {
    "bert-bge": "has a 'bert' tokenizer; we run gpt2, llama and gemma4",
    "nomic-bert-moe": "has a 't5' tokenizer; we run gpt2, llama and gemma4",
}
HELLO = {"role": "user", "content": 'What is 2 + 2? <b>&"é"'}
RULE = {"role": "system", "content": "Be brief."}
TOOL = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "Weather of <b> & more",
        "parameters": {"type": "object", "properties": {"city": {"type": "string", "description": "A city"}},
                       "required": ["city"]},
    },
}  # fmt: skip
CALL = {"id": "abcdefghi", "type": "function", "function": {"name": "weather", "arguments": {"city": "Rome"}}}
TALKS: Mapping[str, dict[str, Any]] = {
    "a question": {"messages": [HELLO], "tools": None},
    "a rule": {"messages": [RULE, HELLO], "tools": None},
    "turns": {"messages": [HELLO, {"role": "assistant", "content": "4"}, HELLO], "tools": None},
    "a tool": {"messages": [RULE, HELLO], "tools": [TOOL]},
    "a call": {
        "messages": [
            HELLO,
            {"role": "assistant", "content": "", "tool_calls": [CALL]},
            {"role": "tool", "tool_call_id": "abcdefghi", "name": "weather", "content": "sunny"},
        ],
        "tools": [TOOL],
    },
}

pytestmark = pytest.mark.long  # 76 MB to fetch


@pytest.fixture(scope="module")
def folder() -> Path:
    """The vocabularies and templates, fetched once."""
    return real_models.llama_cpp()


def expected(vocabulary: Path) -> Iterator[tuple[str, list[int]]]:
    """Texts and their tokens, without a begin token and with control tokens taken for text."""
    texts = vocabulary.with_name(f"{vocabulary.name}.inp").read_bytes().decode().split(BETWEEN)
    tokens = vocabulary.with_name(f"{vocabulary.name}.out").read_text().splitlines()
    yield from ((text, [int(token) for token in line.split()]) for text, line in zip(texts, tokens, strict=False))


def with_a_model(vocabulary: Path, target: Path) -> Path:
    """A vocabulary in a model of hardly any weights, which llama.cpp opens whatever family it is of."""
    reader, writer = GGUFReader(vocabulary), GGUFWriter(target, "llama")
    writer.add_context_length(128)
    writer.add_embedding_length(32)
    writer.add_block_count(1)
    writer.add_feed_forward_length(32)
    writer.add_head_count(1)
    writer.add_head_count_kv(1)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_dimension_count(32)
    for key, field in reader.fields.items():
        if key.startswith("tokenizer.") or key == "general.name":
            writer.add_key_value(key, field.contents(), *field.types[:2])
    rows = len(reader.fields["tokenizer.ggml.tokens"].data)
    writer.add_tensor("token_embd.weight", np.zeros((rows, 34), np.uint8), raw_dtype=TYPE.Q8_0)
    for name in ("output_norm", "blk.0.attn_norm", "blk.0.ffn_norm"):
        writer.add_tensor(f"{name}.weight", np.ones(32, np.float32))
    for name in ("attn_q", "attn_k", "attn_v", "attn_output", "ffn_gate", "ffn_up", "ffn_down"):
        writer.add_tensor(f"blk.0.{name}.weight", np.zeros((32, 32), np.float32))
    finish(writer)
    return target


@pytest.mark.parametrize("name", WRITTEN_DOWN)
def test_texts_have_the_tokens_that_llama_cpp_has_written_down(folder: Path, name: str) -> None:
    vocabulary = folder / f"ggml-vocab-{name}.gguf"
    tokenizer = Tokenizer.load(vocabulary)
    cases = list(expected(vocabulary))
    assert len(cases) > 40
    wrong = [text for text, tokens in cases if tokenizer.encode(text, bos=False, special=False) != tokens]
    assert not wrong


@pytest.mark.parametrize("name", [*WRITTEN_DOWN, *OTHERS])
def test_seeded_texts_have_llama_cpps_tokens(folder: Path, tmp_path: Path, name: str) -> None:
    """With control tokens taken out of them and not; its ends of a text are ours."""
    llama_cpp = pytest.importorskip("llama_cpp", reason="cyllama is not installed")
    path = with_a_model(folder / f"ggml-vocab-{name}.gguf", tmp_path / "vocabulary.gguf")
    tokenizer = Tokenizer.load(path)
    apart = (Kind.CONTROL, Kind.USER_DEFINED, Kind.UNKNOWN)
    marks = [text for text, kind in zip(tokenizer.tokens, tokenizer.kinds, strict=True) if kind in apart and text]
    with llama_cpp.peer(path) as peer:
        assert tokenizer.stops == {token for token in range(len(tokenizer)) if peer.vocab.is_eog(token)}
        for text in texts(1, 2000, marks):
            for special in (True, False):
                ours = tokenizer.encode(text, bos=False, special=special)
                assert ours == peer.vocab.tokenize(text, False, special), text


@pytest.mark.parametrize("name", REFUSED)
def test_a_vocabulary_that_we_do_not_run_is_named(folder: Path, name: str) -> None:
    with pytest.raises(UnsupportedModelError, match=REFUSED[name]):
        Tokenizer.load(folder / f"ggml-vocab-{name}.gguf")


def test_every_vocabulary_is_one_of_these(folder: Path) -> None:
    found = {path.stem.removeprefix("ggml-vocab-") for path in folder.glob("ggml-vocab-*.gguf")}
    assert found == {*WRITTEN_DOWN, *OTHERS, *REFUSED}


class Generation(Extension):
    """`{% generation %}`, of which only training makes anything."""

    tags = {"generation"}  # noqa: RUF012

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.CallBlock(self.call_method("_same"), [], [], body).set_lineno(line)

    def _same(self, caller: Any) -> str:
        return str(caller())


def hugging_faces() -> ImmutableSandboxedEnvironment:
    """jinja2 as transformers sets it up (utils/chat_template_utils.py), in this process."""

    def refuse(message: str) -> None:
        raise ValueError(message)

    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[Generation, "jinja2.ext.loopcontrols"]
    )
    environment.filters["tojson"] = lambda value, ensure_ascii=False, indent=None, separators=None, sort_keys=False: (
        json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)
    )
    environment.globals["raise_exception"] = refuse
    environment.globals["strftime_now"] = lambda format: datetime.now().strftime(format)
    return environment


def test_templates_are_rendered_as_hugging_face_does_or_refused_where_it_fails(folder: Path) -> None:
    """All 70; those that fail want what nobody gave them, or append to a list, which neither lets them."""
    sources = sorted((folder / "templates").glob("*.jinja"))
    assert len(sources) > 60
    written = refused = 0
    for path in sources:
        source = path.read_text(encoding="utf-8")
        theirs, ours = hugging_faces().from_string(source), Template(source, "<s>", "</s>")
        try:
            for what, talk in TALKS.items():
                for reply in (True, False):
                    given = {**talk, "add_generation_prompt": reply, "documents": None}
                    try:
                        expected = theirs.render(**given, bos_token="<s>", eos_token="</s>")
                    except Exception:
                        with pytest.raises(TemplateRefusalError, match=r"chat template (failed|refuses)"):
                            ours.render(talk["messages"], tools=talk["tools"], reply=reply)
                        refused += 1
                        continue
                    text = ours.render(talk["messages"], tools=talk["tools"], reply=reply)
                    assert text == expected, f"{path.name}, {what}"
                    written += 1
        finally:
            ours.close()
    assert written > 500
    assert refused < 100


READ = (
    "ByteDance-Seed-OSS",
    *("Bielik-11B-v3.0-Instruct", "HuggingFaceTB-SmolLM3-3B", "MiMo-VL", "Mistral-Small-3.2-24B-Instruct-2506"),
    *("NousResearch-Hermes-2-Pro-Llama-3-8B-tool_use", "NousResearch-Hermes-3-Llama-3.1-8B-tool_use"),
    *("Qwen-QwQ-32B", "Qwen-Qwen2.5-7B-Instruct", "Qwen-Qwen3-0.6B", "deepseek-ai-DeepSeek-R1-Distill-Llama-8B"),
    *("deepseek-ai-DeepSeek-R1-Distill-Qwen-32B", "google-gemma-2-2b-it", "ibm-granite-granite-3.3-2B-Instruct"),
    *("google-gemma-4-31B-it", "google-gemma-4-31B-it-interleaved"),
    *("ibm-granite-granite-4.0", "ibm-granite-granite-4.1", "meetkai-functionary-medium-v3.1"),
    *("meta-llama-Llama-3.1-8B-Instruct", "meta-llama-Llama-3.2-3B-Instruct", "meta-llama-Llama-3.3-70B-Instruct"),
    *("microsoft-Phi-3.5-mini-instruct", "mistralai-Ministral-3-14B-Reasoning-2512"),
    *("mistralai-Mistral-Nemo-Instruct-2407", "unsloth-mistral-Devstral-Small-2507"),
)
"""Templates whose models write calls as the template writes those that were made."""
ENDS = r"<\|im_end\|>|</s>|<\|e[o]?[tm]_id\|>|<end_of_turn>|<\|end_of_text\|>|<\|end\|>|<.end.of.sentence.>|<seed:eos>"
ENDS += r"|<turn\|>|<\|tool_response>"


@pytest.mark.parametrize("name", READ)
def test_calls_that_a_template_writes_are_read(folder: Path, name: str) -> None:
    source = (folder / "templates" / f"{name}.jinja").read_text(encoding="utf-8")
    form, template = Format.of(source, Tokenizer.load(SMALL)), Template(source, "<s>", "</s>")
    given = {"city": "Rome", "days": [1, 2.5, None]}
    call = {"id": "call_1", "type": "function", "function": {"name": "weather", "arguments": json.dumps(given)}}
    talk = [HELLO, {"role": "assistant", "content": None, "tool_calls": [call]}]
    try:
        begun = template.render(form.messages(talk[:1], [TOOL]), tools=[TOOL])
        whole = template.render(form.messages(talk, [TOOL]), tools=[TOOL], reply=False)
    finally:
        template.close()
    alike = takewhile(lambda pair: pair[0] == pair[1], zip(begun, whole, strict=False))
    same = re.sub(r"<[^>\s]*$", "", "".join(letter for letter, _ in alike))  # without half of a mark
    reader = form.reader([TOOL], thinking=form.thinks(same))
    said = Said.of(reader.push(re.split(ENDS, whole[len(same) :])[0]) + reader.finish())
    assert [(one.name, one.arguments) for one in said.calls] == [("weather", given)]
    assert not said.text.strip()
