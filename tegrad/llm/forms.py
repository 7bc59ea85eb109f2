"""How families of models write thoughts and calls, by their published templates and model cards."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Final

THOUGHTS: Final = (
    *(("<think>", "</think>"), ("[THINK]", "[/THINK]")),
    *(("<seed:think>", "</seed:think>"), ("<thought>", "</thought>")),  # Seed-OSS, EXAONE Deep
    *(("<|START_THINKING|>", "<|END_THINKING|>"), ("<|channel>thought", "<channel|>")),  # Command R7B and A, Gemma 4
)
"""What stands around thoughts."""


@dataclass(frozen=True, slots=True)
class Form:
    """How calls are written.

    An answer with calls is `before`, calls with `join` in between (one call only where that is empty), and `after`. In
    `call` stand NAME and ARGS. A reader finds a call behind some of `opens` and skips `closes` after it; `between` are
    marks from a name to its arguments, where a call is no JSON object with both.
    """

    name: str
    marks: tuple[str, ...]
    """A template's source that has all of them is of this form."""
    opens: tuple[str, ...]
    closes: tuple[str, ...] = ()
    call: str = '{"name": "NAME", "arguments": ARGS}'
    join: str = ""
    before: str = ""
    after: str = ""
    between: tuple[str, ...] = ()
    python: bool = False
    """Calls may be written as Python does."""
    earlier: str | None = None
    """A call of an earlier answer, in a template that knows none, with WORDS for arguments as Python's keywords; None:
    as `call`."""
    bare: str | None = None
    """What an answer begins with that is a text, where one without it may begin with a call's name; None: none does."""
    parameter: tuple[str, str, str] | None = None
    """What stands in front of, between and behind a name and a value where arguments may be written one by one. A model
    may leave lines of their own out."""
    quote: str = ""
    """The mark around strings in arguments whose keys are bare ({key:MARKtextMARK}); JSON is read, too."""
    ends_thought: bool = False
    """A call ends a thought that is still open."""
    channel: str = ""
    """A token with which a thought's mark begins wherever it comes, even behind text; without the rest of that mark it
    says nothing, nor does a thought's end without its beginning."""
    observed: bool = False
    """Conversations have a call as a message with the name as its metadata, and what it returned as an observation."""


_NAMED: Final = '{"name": "NAME", "parameters": ARGS}'
_DEEPSEEK: Final = "<\uff5ctool\u2581call"
FORMS: Final = (
    Form(
        "cohere", ("<|START_ACTION|>",), ("<|START_ACTION|>",), ("<|END_ACTION|>",),
        call='{"tool_call_id": "0", "tool_name": "NAME", "parameters": ARGS}', join=", ",
        before="<|START_ACTION|>[", after="]<|END_ACTION|>",
    ),
    Form(
        "mistral", ("[TOOL_CALLS]", "[ARGS]"), ("[TOOL_CALLS]",),
        call="[TOOL_CALLS]NAME[ARGS]ARGS", join=" ", between=("[CALL_ID]", "[ARGS]"),
    ),
    Form("mistral-list", ("[TOOL_CALLS]",), ("[TOOL_CALLS]",), join=", ", before="[TOOL_CALLS][", after="]"),
    Form(
        "deepseek", (f"{_DEEPSEEK}\u2581begin\uff5c>",),
        (f"{_DEEPSEEK}s\u2581begin\uff5c>", f"{_DEEPSEEK}\u2581begin\uff5c>", "function<\uff5ctool\u2581sep\uff5c>"),
        ("```", f"{_DEEPSEEK}\u2581end\uff5c>", f"{_DEEPSEEK}s\u2581end\uff5c>"),
        call=f"{_DEEPSEEK}\u2581begin\uff5c>function<\uff5ctool\u2581sep\uff5c>NAME\n```json\nARGS\n```"
        f"{_DEEPSEEK}\u2581end\uff5c>",
        join="\n", before=f"{_DEEPSEEK}s\u2581begin\uff5c>", after=f"{_DEEPSEEK}s\u2581end\uff5c>",
        between=("```json",),
    ),
    Form(
        "qwen-xml", ("<tool_call>", "<function=", "<parameter="), ("<tool_call>", "<function="),
        ("</function>", "</tool_call>"), call="<tool_call>\n<function=NAME>\nARGS\n</function>\n</tool_call>",
        join="\n", between=(">",), parameter=("<parameter=", ">\n", "\n</parameter>"), ends_thought=True,
    ),
    Form(
        "hermes", ("<tool_call>",), ("<tool_call>", "<tools>", "```json"), ("</tool_call>", "</tools>", "```"),
        call='<tool_call>\n{"name": "NAME", "arguments": ARGS}\n</tool_call>', join="\n",
    ),
    Form(
        "phi", ("<|tool|>", "<|/tool|>"), ("<|tool_call|>", "functools"), ("<|/tool_call|>",),
        join=", ", before="<|tool_call|>[", after="]<|/tool_call|>",
    ),
    Form(
        "granite", ("<|tool_call|>",), ("<|tool_call|>", "<tool_call>"),
        join=", ", before="<|tool_call|>[", after="]",
    ),
    Form(
        "seed", ("<seed:tool_call>", "<function="), ("<seed:tool_call>", "<function="),
        ("</function>", "</seed:tool_call>"),
        call="<seed:tool_call>\n<function=NAME>\nARGS\n</function>\n</seed:tool_call>", join="\n", between=(">",),
        parameter=("<parameter=", ">", "</parameter>"),
    ),
    Form(
        "gemma4", ("<|tool_call>call:",), ("<|tool_call>call:",), ("<tool_call|>",),
        call="<|tool_call>call:NAMEARGS<tool_call|>", quote='<|"|>', channel="<|channel>",
    ),
    Form(
        "functions", ("<function=",), ("<function=",), ("</function>",),
        call="<function=NAME>ARGS</function>", join="\n", between=(">",),
    ),
    Form("olmo", ("<function_calls>",), ("<function_calls>",), ("</function_calls>",), call=_NAMED, python=True),
    Form(
        "glm", ("[gMASK]<sop>", "metadata"), (), call="NAME\nARGS", between=("\n",), bare="", observed=True,
    ),
    Form("functionary", (">>>all",), (">>>",), call="NAME\nARGS", join=">>>", between=("\n",), bare="all\n"),
    *(
        Form(
            "lfm2", (mark,), ("<|tool_call_start|>",), ("<|tool_call_end|>",), join=", ",
            before="<|tool_call_start|>[", after="]<|tool_call_end|>", python=True, earlier="NAME(WORDS)",
        )
        for mark in ("<|tool_list_start|>", "List of tools: [")  # LFM2 and LFM2.5
    ),
    *(
        Form("llama", (mark,), ("<|python_tag|>", "<|python_start|>"), ("<|python_end|>",), call=_NAMED, python=True)
        for mark in ('"parameters": ', "<|python_tag|>", "[func_name1(")
    ),
    Form(
        "plain", (), ("```tool_code", "```tool_call", "```json", "<tool_call>"), ("```", "</tool_call>"),
        call=_NAMED, join="\n", python=True,
    ),
)  # fmt: skip
"""The first one whose marks a template has; the last for templates that know no tools, such as Gemma's."""
MARKS: Final = frozenset(
    mark
    for form in FORMS
    for text in (*form.opens, *form.closes, *form.between, form.before, form.after, form.quote)
    for mark in re.findall(r"<\|?[^<>\[\]=]+>|\[/?[A-Z_]+\]", text)
)
"""Marks of calls that vocabularies have as tokens."""
