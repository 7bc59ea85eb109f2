"""Thoughts and tool calls are read out of each family's answers, however these are cut; what only looks like one is
text; and a grammar makes any model write valid ones."""

import json
import random
import re
from collections import Counter
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from time import process_time
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tool_outputs import (
    DEEPSEEK,
    GEMMA,
    GEMMA4,
    GLM,
    GLM_2024,
    GRANITE,
    HERMES,
    LFM2,
    LLAMA,
    MISTRAL_LIST,
    PHI,
    PLAIN,
    QWEN3,
    RECORDED,
    SEED,
    Recorded,
)
from vocabularies import byte_level, write_vocabulary

from tegrad.llm.errors import ModelError
from tegrad.llm.forms import FORMS, MARKS, THOUGHTS, Form
from tegrad.llm.grammar import Grammar, GrammarError, Masks
from tegrad.llm.tokenizer import SHOWN, Kind, Stream, Tokenizer
from tegrad.llm.tools import Arguments, Call, Event, Format, Said, Text, Thinking
from tegrad.models import SMALL

TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "get_weather",
            "description": "The weather of a city.",
            "parameters": {
                "type": "object",
                "properties": {"city": {"type": "string", "maxLength": 12}},
                "required": ["city"],
            },
        },
    },
    {
        "type": "function",
        "function": {
            "name": "add",
            "parameters": {
                "type": "object",
                "properties": {"a": {"type": "integer", "minimum": 0, "maximum": 99}, "b": {"enum": ["x", "y"]}},
                "required": ["a", "b"],
            },
        },
    },
]
SHIPPED = Tokenizer.load(SMALL)


def events(template: str, pieces: Sequence[str], *, opened: bool = False, known: bool = True) -> list[Event]:
    """What a reader tells of an answer, joined."""
    reader = Format.of(template, SHIPPED).reader(TOOLS if known else [], thinking=opened)
    told = [event for piece in pieces for event in reader.push(piece)] + reader.finish()
    joined: list[Event] = []
    for event in told:
        last = joined[-1] if joined else None
        if isinstance(event, Arguments) and isinstance(last, Arguments):
            joined[-1] = Arguments(event.index, last.text + event.text)
        elif isinstance(event, Text | Thinking) and type(event) is type(last):
            joined[-1] = type(event)(last.text + event.text)
        else:
            joined.append(event)
    return joined


def check(one: Recorded, told: list[Event]) -> None:
    assert "".join(event.text for event in told if isinstance(event, Thinking)) == one.thought
    assert "".join(event.text for event in told if isinstance(event, Text)) == one.text
    names = [event for event in told if isinstance(event, Call)]
    arguments = [event for event in told if isinstance(event, Arguments)]
    assert [event.index for event in names] == [event.index for event in arguments] == list(range(len(one.calls)))
    found = [(call.name, json.loads(given.text)) for call, given in zip(names, arguments, strict=True)]
    assert found == list(one.calls)


@pytest.mark.parametrize("one", RECORDED.values(), ids=RECORDED)
def test_recorded_answers_say_what_they_say(one: Recorded) -> None:
    check(one, events(one.template, [one.answer], opened=one.opened))
    check(one, events(one.template, list(one.answer), opened=one.opened))


@pytest.mark.parametrize(("template", "answer"), PLAIN.values(), ids=PLAIN)
def test_what_only_looks_like_a_call_or_a_thought_is_text_in_full(template: str, answer: str) -> None:
    assert events(template, [answer]) == [Text(answer)]
    assert events(template, list(answer)) == [Text(answer)]


@pytest.mark.parametrize("known", [True, False])
def test_gemma_4_may_think_behind_what_it_says(known: bool) -> None:
    answer = "Yes.<|channel>thought\nHm.\n<channel|> And no.<|channel>thought\n<channel|>"
    for pieces in ([answer], list(answer), re.split(r"(<[^>]*>)", answer)):
        told = events(GEMMA4, pieces, known=known)
        assert told == [Text("Yes."), Thinking("Hm."), Text(" And no.")]


def test_without_tools_calls_are_text() -> None:
    for one in RECORDED.values():
        told = events(one.template, [one.answer], opened=one.opened, known=False)
        assert not any(isinstance(event, Call | Arguments) for event in told)
        said = "".join(event.text for event in told if isinstance(event, Text))
        assert one.answer.endswith(said)


ANSWERS = sorted({one.answer for one in RECORDED.values()} | {answer for _, answer in PLAIN.values()})
TEMPLATES = sorted({one.template for one in RECORDED.values()})


@settings(max_examples=100, deadline=None)
@given(
    st.sampled_from(TEMPLATES),
    st.lists(st.sampled_from(ANSWERS) | st.text('{}[]<|>"\\:, `\n(=)abTOL_CSnmef', max_size=12), max_size=3),
    st.lists(st.integers(0, 400), max_size=12),
    st.booleans(),
)
def test_an_answer_says_the_same_however_it_is_cut(
    template: str, parts: list[str], cuts: list[int], opened: bool
) -> None:
    answer = "".join(parts)
    opened = opened and Format.of(template, SHIPPED).thought is not None
    at = sorted({0, *(cut for cut in cuts if cut < len(answer)), len(answer)})
    pieces = [answer[begin:end] for begin, end in pairwise(at)]
    whole = events(template, [answer], opened=opened)
    assert events(template, pieces, opened=opened) == whole
    assert events(template, list(answer), opened=opened) == whole


def test_text_is_told_as_soon_as_it_can_be_no_mark() -> None:
    reader = Format.of(QWEN3, SHIPPED).reader(TOOLS)
    assert reader.push("Hello") == [Text("Hello")]
    assert reader.push(" 1 <") == [Text(" 1 ")]
    assert reader.push("2 <tool") == [Text("<2 ")]
    assert reader.push("x>") == [Text("<toolx>")]


def test_arguments_are_told_as_they_come() -> None:
    reader = Format.of(HERMES, SHIPPED).reader(TOOLS)
    assert reader.push('<tool_call>\n{"name": "get_weather", "arguments": ') == []
    assert reader.push('{"ci') == [Call(0, "get_weather"), Arguments(0, '{"ci')]
    assert reader.push('ty": "Par') == [Arguments(0, 'ty": "Par')]
    assert reader.push('is"}}\n</tool') == [Arguments(0, 'is"}')]
    assert reader.push("_call>") == reader.finish() == []


@pytest.mark.parametrize("given_", ['{"city": "Par', '{"city": "Par\nis"', '{"city" = 3}', '{"a": tru{e'])
def test_arguments_that_are_wrong_or_cut_short_are_told_as_they_are(given_: str) -> None:
    answer = f'<tool_call>\n{{"name": "get_weather", "arguments": {given_}'
    assert events(HERMES, [answer]) == [Call(0, "get_weather"), Arguments(0, given_)]
    more = events(HERMES, [f"{answer}</tool_call>ok"])
    assert more[0] == Call(0, "get_weather")
    if not given_.count('"') % 2:  # else the mark lies within a string
        assert more[1:] == [Arguments(0, given_), Text("ok")]


def test_parameters_in_elements_are_what_their_schemas_say() -> None:
    """A text that looks like a number is a text where one is due; what is none is one, too."""
    names = {"city": "7", "a": "{'b': [True, null]}", "b": '"x"', "no": "it's", "empty": ""}
    parts = "".join(f"<parameter={name}>{text}</parameter>\n" for name, text in names.items())
    properties = {"city": {"type": "string"}, "b": {"type": ["string", "null"]}, "no": {"type": "integer"}}
    tool = {"function": {"name": "f", "parameters": {"properties": properties}}}
    for end, whole in (("</function>", True), ("", False)):
        reader = Format.of(SEED, SHIPPED).reader([tool])
        told = [event for letter in f"<function=f>\n{parts}{end}" for event in reader.push(letter)] + reader.finish()
        (call,) = Said.of(told).calls
        if whole:
            assert call.arguments == {**names, "b": '"x"'}
        else:
            with pytest.raises(ModelError, match="the arguments of the call to f are no JSON object"):
                assert call.arguments
    assert events(SEED, ["<seed:tool_call><function=add></function>"]) == [Call(0, "add"), Arguments(0, "{}")]
    assert events(SEED, ["<function=add><parameter=a>1"]) == [Call(0, "add")]


@pytest.mark.parametrize(
    ("schema", "text", "read"),
    [
        ({"anyOf": [{"type": "string"}, {"type": "null"}]}, "12345", "12345"),
        ({"anyOf": [{"type": "string"}, {"type": "null"}]}, "null", None),
        ({"oneOf": [{"type": "integer"}, {"type": "null"}]}, "7", 7),
        ({"enum": ["1", "2"]}, "1", "1"),
        ({"enum": [1, 2]}, "1", 1),
        ({"const": "1"}, "1", "1"),
        ({"type": "number"}, "NaN", "NaN"),
    ],
)
def test_a_parameter_in_an_element_is_of_a_type_that_its_schema_allows(
    schema: dict[str, Any], text: str, read: object
) -> None:
    """Pydantic has an optional text as a choice."""
    tool = {"function": {"name": "f", "parameters": {"properties": {"a": schema}}}}
    reader = Format.of(SEED, SHIPPED).reader([tool])
    told = reader.push(f"<function=f><parameter=a>{text}</parameter></function>") + reader.finish()
    (call,) = Said.of(told).calls
    assert call.arguments == {"a": read}


def test_a_text_is_told_as_soon_as_it_can_begin_with_no_functions_name() -> None:
    """Letters that are no function's: Chinese has no spaces between words."""
    reader = Format.of(GLM, SHIPPED).reader(TOOLS)
    assert reader.push("天") == [Text("天")]
    reader = Format.of(GLM, SHIPPED).reader(TOOLS)
    assert reader.push("get_") == []
    assert reader.push("up") == [Text("get_up")]


@pytest.mark.parametrize("template", [HERMES, GEMMA, MISTRAL_LIST, SEED])
def test_a_long_answer_of_marks_takes_a_time_that_grows_with_its_length(template: str) -> None:
    """What may yet become a call is not looked at again and again."""
    begun = process_time()
    for part in (
        "<tool_call>",
        '<tool_call>{"name": "',
        '{"name": "{',
        '{"a":',
        "[" * 8,
        "\n" * 50,
        "```json",
        "<function=add><parameter=a>",
    ):
        reader = Format.of(template, SHIPPED).reader(TOOLS)
        for _ in range(4000):
            reader.push(part)
        reader.finish()
    assert process_time() - begun < 8  # 0.5 s here; 20 s and more if it grew with the square


def test_the_page_tells_of_every_form() -> None:
    page = (Path(__file__).parents[2] / "docs/llm.md").read_text()
    assert [form.name for form in FORMS if f"\n| {form.name} | " not in page] == []


# ---- what a stream gives


def test_marks_that_are_control_tokens_are_given_by_a_stream(tmp_path: Path) -> None:
    sound = byte_level("llama-bpe")
    marks = ["<|python_tag|>", "[TOOL_CALLS]", "<|other|>"]
    words = [*sound.tokens, *marks], [*sound.kinds, *[int(Kind.CONTROL)] * 3]
    sound.tokens[:], sound.kinds[:] = words
    tokenizer = Tokenizer.load(write_vocabulary(tmp_path / "v.gguf", sound))
    stream = Stream(tokenizer)
    assert [stream.push(tokenizer.tokens.index(mark)) for mark in marks] == [*marks[:2], ""]


def test_every_mark_of_a_form_is_given_by_a_stream() -> None:
    """Of a thought's beginning, what is a token."""
    assert {re.sub(r"\w+$", "", mark) for pair in THOUGHTS for mark in pair} | MARKS == SHOWN


# ---- grammars


def answered(masks: Masks, wanted: Grammar, seed: int, most: int = 1000) -> str:
    """What a model says that knows nothing."""
    draw, mask, said, stream = random.Random(seed), masks.mask(wanted), list[int](), Stream(SHIPPED)
    for _ in range(most):
        bits = np.frombuffer(mask(said) or b"", np.uint8)
        said.append(draw.choice(np.flatnonzero(np.unpackbits(bits, bitorder="little")).tolist()))
        if said[-1] in SHIPPED.stops:
            break
    return "".join(stream.push(token) for token in said)


def valid(call: Call, arguments: str) -> bool:
    given_ = json.loads(arguments)
    if call.name == "get_weather":
        return set(given_) == {"city"} and isinstance(given_["city"], str) and len(given_["city"]) <= 12
    return call.name == "add" and 0 <= given_.pop("a") <= 99 and given_ in ({"b": "x"}, {"b": "y"})


@pytest.mark.parametrize("form", {form.name: form for form in FORMS}.values(), ids=lambda form: form.name)
@pytest.mark.parametrize("choice", ["required", "add"])
def test_a_model_that_has_to_call_calls_with_valid_arguments(form: Form, choice: str) -> None:
    format_, masks = Format.of(" ".join(form.marks), SHIPPED), Masks(SHIPPED)
    assert format_.form.name == form.name
    for parallel in (True, False):
        wanted = format_.grammar(TOOLS, choice, parallel)
        assert wanted is not None
        counts = []
        for seed in range(25):
            reader = format_.reader(TOOLS)
            told = reader.push(answered(masks, wanted, seed)) + reader.finish()
            assert not any(isinstance(event, Text | Thinking) for event in told)
            calls = [event for event in told if isinstance(event, Call)]
            for call in calls:
                assert choice in ("required", call.name)
                parts = [e.text for e in told if isinstance(e, Arguments) and e.index == call.index]
                assert valid(call, "".join(parts))
            counts.append(len(calls))
        assert min(counts) == 1
        assert (max(counts) > 1) == (parallel and choice == "required" and bool(form.join))


@pytest.mark.parametrize("form", {form.name: form for form in FORMS}.values(), ids=lambda form: form.name)
def test_a_model_that_may_call_calls_or_keeps_to_the_answers_schema(form: Form) -> None:
    format_, masks = Format.of(" ".join(form.marks), SHIPPED), Masks(SHIPPED)
    wanted = format_.grammar(TOOLS, "auto", False, answer=Grammar("schema", '{"enum": [1, 2]}'))
    assert wanted is not None
    texts = Counter[str]()
    for seed in range(25):
        reader = format_.reader(TOOLS)
        told = reader.push(answered(masks, wanted, seed)) + reader.finish()
        said = "".join(event.text for event in told if isinstance(event, Text))
        texts[said] += 1
        assert [type(event) for event in told[:1]] == [Text if said else Call]
    assert texts.keys() == {"", "1", "2"}


def test_marks_that_are_tokens_are_written_as_tokens() -> None:
    wanted = Format.of(QWEN3, SHIPPED).grammar(TOOLS, "add", False)
    assert wanted is not None
    said = SHIPPED.encode('<tool_call>\n{"name": "add', bos=False)
    mask = Masks(SHIPPED).mask(wanted)
    first = np.flatnonzero(np.unpackbits(np.frombuffer(mask([]) or b"", np.uint8), bitorder="little"))
    assert first.tolist() == [SHIPPED.tokens.index("<tool_call>")] == said[:1]
    assert mask(said)


def test_a_thought_comes_before_what_a_grammar_asks_for() -> None:
    format_, masks = Format.of(QWEN3, SHIPPED), Masks(SHIPPED)
    end = [*SHIPPED.encode("Hm", bos=False), SHIPPED.tokens.index("</think>")]
    for wanted in (
        format_.grammar(TOOLS, "required", thinking=True),
        format_.after_thought(Grammar("json")),
        format_.after_thought(Grammar("schema", '{"enum": [1, 2]}')),
        format_.after_thought(Grammar("regex", "a/b\\/c")),
        format_.after_thought(Grammar("lark", 'start: "x" y\ny: "z"')),
    ):
        assert wanted is not None
        mask = masks.mask(wanted)
        assert not set(SHIPPED.stops) & set(allowed(mask(end[:1])))
        assert 0 < len(allowed(mask(end))) < len(SHIPPED) // 2
    plain = Grammar("json")
    assert Format.of(HERMES, SHIPPED).after_thought(plain) is plain


def allowed(mask: bytes | memoryview | None) -> list[int]:
    found: list[int] = np.flatnonzero(np.unpackbits(np.frombuffer(mask or b"", np.uint8), bitorder="little")).tolist()
    return found


def test_a_choice_of_no_function_is_refused_and_auto_asks_for_nothing() -> None:
    format_ = Format.of(HERMES, SHIPPED)
    assert format_.grammar(TOOLS, "auto") is None
    with pytest.raises(GrammarError, match=r"no tool 'rm'.*get_weather, add"):
        format_.grammar(TOOLS, "rm")


def test_schemas_that_are_none_are_refused_in_words() -> None:
    format_ = Format.of(QWEN3, SHIPPED)
    for text in ("{", "[" * 20000):
        with pytest.raises(GrammarError, match="JSON schema"):
            format_.after_thought(Grammar("schema", text))
    for parameters in ([1], "x", {"x-guidance": 3}):
        with pytest.raises(GrammarError, match="JSON schema"):
            format_.grammar([{"function": {"name": "f", "parameters": parameters}}], "required")


# ---- messages


CALLED = {"id": "call_1", "type": "function", "function": {"name": "add", "arguments": '{"a": 1, "b": "x"}'}}
TALK = [
    {"role": "user", "content": "Add 1."},
    {"role": "assistant", "content": None, "tool_calls": [CALLED]},
    {"role": "tool", "tool_call_id": "call_1", "content": "7"},
    {"role": "tool", "tool_call_id": "call_1", "content": "8"},
]


def test_arguments_are_objects_in_a_template_and_ids_as_it_wants_them() -> None:
    made = Format.of(QWEN3, SHIPPED).messages(TALK, TOOLS)
    assert made[1]["tool_calls"][0]["function"]["arguments"] == {"a": 1, "b": "x"}
    assert made[1]["tool_calls"][0]["id"] == "call_1"
    assert (made[0], made[2]) == (TALK[0], TALK[2])
    made = Format.of(MISTRAL_LIST, SHIPPED).messages(TALK, TOOLS)
    short = made[1]["tool_calls"][0]["id"]
    assert len(short) == 9
    assert short.isalnum()
    assert made[2]["tool_call_id"] == short


def test_calls_and_results_without_ids_have_them_where_a_template_insists() -> None:
    call = {"type": "function", "function": {"name": "add", "arguments": {}}}
    called = {"role": "assistant", "content": "", "tool_calls": [call, call]}
    made = Format.of(MISTRAL_LIST, SHIPPED).messages([called, *[{"role": "tool", "content": "7"}] * 2], TOOLS)
    first, second = (one["id"] for one in made[0]["tool_calls"])
    assert [one["tool_call_id"] for one in made[1:]] == [first, second]
    assert len({first, second}) == 2
    assert {len(first), len(second)} == {9}


def test_glm_is_told_of_calls_by_metadata_and_of_results_as_observations() -> None:
    """Its templates leave out a message of another role than these, and know of no calls."""
    called = {"role": "assistant", "metadata": "add", "content": '{"a": 1, "b": "x"}'}
    returned = [{**message, "role": "observation"} for message in TALK[2:]]
    format_ = Format.of(GLM, SHIPPED)
    assert format_.messages(TALK, TOOLS) == format_.messages(TALK, None) == [TALK[0], called, *returned]
    said = {**TALK[1], "content": "I add."}
    assert format_.messages([said], TOOLS) == [{"role": "assistant", "content": "I add."}, called]
    told = Format.of(GLM_2024, SHIPPED).messages(TALK, TOOLS)
    assert told == [{"role": "system", "content": "", "tools": TOOLS}, TALK[0], called, *returned]
    assert Format.of(GLM_2024, SHIPPED).messages(TALK, None) == told[1:]


def test_a_template_that_knows_no_tools_is_told_of_them_in_texts() -> None:
    made = Format.of(GEMMA, SHIPPED).messages(TALK, TOOLS)
    assert [message["role"] for message in made] == ["user", "assistant", "user"]
    assert "get_weather" in made[0]["content"]
    assert made[0]["content"].endswith("Add 1.")
    assert made[1]["content"] == '{"name": "add", "parameters": {"a": 1, "b": "x"}}'
    assert made[2]["content"].split() == ["<tool_response>", "7", "</tool_response>", "<tool_response>", "8",
                                          "</tool_response>"]  # fmt: skip
    system = Format.of("{{ 'system' }}", SHIPPED).messages([{"role": "system", "content": "Be brief."}, *TALK], TOOLS)
    assert system[0]["role"] == "system"
    assert system[0]["content"].startswith("Be brief.\n\nYou may call functions.")
    assert Format.of(GEMMA, SHIPPED).messages(TALK[:1], None) == TALK[:1]


def test_calls_are_texts_in_a_template_that_knows_tools_and_no_calls() -> None:
    made = Format.of(GRANITE, SHIPPED).messages(TALK, TOOLS)
    assert made[1] == {
        "role": "assistant",
        "content": '<|tool_call|>[{"name": "add", "arguments": {"a": 1, "b": "x"}}]',
    }
    assert made[2:] == TALK[2:]
    assert made[0] == TALK[0]


@pytest.mark.parametrize(
    ("name", "arguments", "written"),
    [
        ("mail-search", {"q": "x"}, '[mail-search(q="x")]'),
        ("search", {"from": "bob", "max-results": 3}, '[search(from="bob", max-results=3)]'),
        ("COUNT_WORDS", {"a": 1}, "[COUNT_WORDS(a=1)]"),
        ("NAME", {"class": {"x": [None, True]}}, '[NAME(class={"x": [null, true]})]'),
        ("print", {}, "[print()]"),
    ],
)
def test_a_call_of_any_name_is_read_as_it_is_written(name: str, arguments: Any, written: str) -> None:
    form, tools = Format.of(LFM2, SHIPPED), [{"type": "function", "function": {"name": name, "parameters": {}}}]
    call = {"type": "function", "function": {"name": name, "arguments": arguments}}
    (said,) = form.messages([{"role": "assistant", "content": "", "tool_calls": [call]}], tools)
    assert said["content"] == f"<|tool_call_start|>{written}<|tool_call_end|>"
    reader = form.reader(tools)
    (found,) = Said.of(reader.push(said["content"]) + reader.finish()).calls
    assert (found.name, json.loads(found.json)) == (name, arguments)


@pytest.mark.parametrize(
    "call", ["add(1)", "add(a=1, x" + ".a" * 900 + "(b=1))", "add(a=f(2))", "add(a=)", "add(a=1", "rm(a=1)", "add[a=1]",
             "add(a=1) + add(a=2)", "add(a==1)"],
)  # fmt: skip
def test_what_is_no_call_in_python_is_text(call: str) -> None:
    reader, answer = Format.of(LFM2, SHIPPED).reader(TOOLS), f"<|tool_call_start|>[{call}]<|tool_call_end|>"
    said = Said.of(reader.push(answer) + reader.finish())
    assert (said.calls, said.text) == ((), answer)


def test_marks_again_and_again_are_not_looked_at_for_ever() -> None:
    begun, reader = process_time(), Format.of(LFM2, SHIPPED).reader(TOOLS)
    answer = "<|tool_call_start|>[add(" * 3000
    assert Said.of(reader.push(answer) + reader.finish()).text == answer
    assert process_time() - begun < 8  # 1 s here; 32 s before


def test_earlier_calls_of_lfm2_are_written_as_python() -> None:
    made = Format.of(LFM2, SHIPPED).messages(TALK, TOOLS)
    assert made[1] == {"role": "assistant", "content": '<|tool_call_start|>[add(a=1, b="x")]<|tool_call_end|>'}
    assert made[2:] == TALK[2:]  # whose role the template knows


def test_phi_has_its_tools_in_the_system_message() -> None:
    made = Format.of(PHI, SHIPPED).messages(TALK, TOOLS)
    assert json.loads(made[0]["tools"])[1]["name"] == "add"
    assert made[2]["content"] == '<|tool_call|>[{"name": "add", "arguments": {"a": 1, "b": "x"}}]<|/tool_call|>'


def test_a_prompt_may_end_within_an_open_thought() -> None:
    assert Format.of(DEEPSEEK, SHIPPED).thinks("<\uff5cAssistant\uff5c><think>\n")
    assert not Format.of(DEEPSEEK, SHIPPED).thinks("<think>\n\n</think>\n\n")
    assert not Format.of(LLAMA, SHIPPED).thinks("<think>")
