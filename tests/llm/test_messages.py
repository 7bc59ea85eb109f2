"""A conversation that a template refuses is told in the way that it takes, and otherwise as it is."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest

from tegrad.llm.messages import render
from tegrad.llm.template import Template, TemplateRefusalError

IN_TURN = """{% set n = namespace(user=true) %}{% for one in messages %}{% if one.role == 'system' and loop.first %}{%
elif one.role == 'tool' or one.tool_calls %}{% elif (one.role == 'user') != n.user %}{{ raise_exception('in turn') }}{%
else %}{% set n.user = not n.user %}{% endif %}[{{ one.role }}:{{ one.content }}{{ '!' * one.tool_calls | length
}}]{% endfor %}"""
"""As Mistral's."""
NO_SYSTEM = "{% if messages[0].role == 'system' %}{{ raise_exception('no system') }}{% endif %}" + IN_TURN
"""As Gemma 2's."""
ONE_CALL = """{% for one in messages %}{% if one.tool_calls | length > 1 %}{{ raise_exception('one call') }}{% endif
%}[{{ one.role }}:{{ one.content }}{% for call in one.tool_calls %}{{ call.function.arguments | tojson }}{% endfor
%}]{% endfor %}"""
"""As Llama's."""
TEXTS = """{% for one in messages %}{% for call in one.tool_calls %}{{ '(' + call.function.arguments }}{% endfor
%}{% endfor %}"""
"""As DeepSeek's."""
DESCRIBED = "{% for tool in tools %}{{ tool.function.name + ':' + tool.function.description }}{% endfor %}"
"""As Functionary's and Hermes'."""


def said(role: str, content: str = "", *calls: str, to: str = "") -> dict[str, Any]:
    """A message with calls of some ids, or the result of one."""
    made: list[Any] = [
        {"id": one, "type": "function", "function": {"name": "f", "arguments": {"at": one}}} for one in calls
    ]
    return {
        "role": role,
        "content": content,
        **({"tool_calls": made} if made else {}),
        **({"tool_call_id": to} if to else {}),
    }


@pytest.fixture(scope="module")
def rendered() -> Iterator[Callable[..., str]]:
    made: dict[str, Template] = {}

    def text(source: str, *messages: Any, tools: Any = None) -> str:
        if source not in made:
            made[source] = Template(source)
        return render(made[source], messages, tools)

    yield text
    for one in made.values():
        one.close()


S, U, A = said("system", "S"), said("user", "U"), said("assistant", "A")


def test_what_a_template_takes_is_told_as_it_is(rendered: Callable[..., str]) -> None:
    assert rendered(IN_TURN, S, U, A, U) == "[system:S][user:U][assistant:A][user:U]"
    assert rendered(ONE_CALL, U, U, A, A) == "[user:U][user:U][assistant:A][assistant:A]"


def test_roles_take_turns(rendered: Callable[..., str]) -> None:
    assert rendered(IN_TURN, S, U, U, A) == "[system:S][user:U\n\nU][assistant:A]"
    assert rendered(IN_TURN, S, A, A, U) == "[system:S][user:][assistant:A\n\nA][user:U]"
    assert rendered(IN_TURN, U, A, S, U) == "[user:U][assistant:A][user:S\n\nU]"
    called = said("assistant", "B", "1")
    assert rendered(IN_TURN, U, called, said("tool", "T", to="1"), U) == "[user:U][assistant:B!][tool:T\n\nU]"


def test_the_user_says_what_the_system_may_not(rendered: Callable[..., str]) -> None:
    assert rendered(NO_SYSTEM, S, U, A, U) == "[user:S\n\nU][assistant:A][user:U]"


def test_each_call_has_a_message_with_its_result_behind_it(rendered: Callable[..., str]) -> None:
    called, first, second = said("assistant", "A", "1", "2"), said("tool", "T1", to="1"), said("tool", "T2", to="2")
    wanted = '[user:U][assistant:A{"at": "1"}][tool:T1][assistant:{"at": "2"}][tool:T2][user:U]'
    assert rendered(ONE_CALL, U, called, second, first, U) == wanted
    assert rendered(ONE_CALL, U, called, said("tool", "T1"), said("tool", "T2"), U) == wanted
    assert rendered(ONE_CALL, U, called) == '[user:U][assistant:A{"at": "1"}][assistant:{"at": "2"}]'


def test_arguments_are_texts_where_they_must_be(rendered: Callable[..., str]) -> None:
    assert rendered(TEXTS, U, said("assistant", "", "1")) == '({"at": "1"}'


def test_functions_have_a_description_where_they_must(rendered: Callable[..., str]) -> None:
    assert rendered(DESCRIBED, U, tools=[{"type": "function", "function": {"name": "f"}}]) == "f:"
    assert rendered(DESCRIBED, U) == ""


def test_what_is_refused_in_any_way_is_told_as_of_the_first(rendered: Callable[..., str]) -> None:
    with pytest.raises(TemplateRefusalError, match="refuses: 2"):
        rendered("{{ raise_exception(messages | length) }}", U, U)
