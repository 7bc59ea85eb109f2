"""sandbox.py in this process: how it lays text out, and what it answers for each way in which a template can end."""

from typing import Any

import pytest

from tegrad.llm.sandbox import ERROR_CHARACTERS, Runner, TooLong, compiled, rendered

LIMIT = 100


def text(source: str, **values: Any) -> str:
    return rendered(compiled(source), values, LIMIT)


def answer(source: str, **values: Any) -> dict[str, str]:
    runner = Runner()
    assert runner.answer({"source": source}) == {"text": ""}
    return runner.answer({"values": values, "limit": LIMIT})


def test_a_block_that_has_a_line_to_itself_leaves_neither_its_indent_nor_its_newline() -> None:
    assert text("a\n  {% if true %}\n  b\n\t{% endif %}\nc") == "a\n  b\nc"
    assert text("  {# a word #}\na") == "a"
    assert text("a {% if true %}\nb {% endif %}\n") == "a b ", "what stands before a block in its line stays"
    assert text("  {{ 1 }}\n  {{ 2 }}") == "  1\n  2", "a value is no block"


def test_a_text_of_the_limit_is_given_and_a_longer_one_is_not() -> None:
    template = compiled("{{ 'a' * n }}")
    assert rendered(template, {"n": LIMIT}, LIMIT) == "a" * LIMIT
    with pytest.raises(TooLong):
        rendered(template, {"n": LIMIT + 1}, LIMIT)


@pytest.mark.parametrize(
    ("source", "error", "said"),
    [
        ("{{ 'a' * 101 }}", "long", ""),
        ("{{ raise_exception('not so') }}", "refused", "not so"),
        ("{{ raise_exception('a' * 999) }}", "refused", "a" * ERROR_CHARACTERS),
        ("{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}", "deep", ""),
        ("{{ 1 / 0 }}", "failed", "division by zero"),
    ],
)
def test_how_a_template_ended_is_answered(source: str, error: str, said: str) -> None:
    assert answer(source) == {"error": error, "said": said}


def test_what_is_no_template_is_answered() -> None:
    assert Runner().answer({"source": "{% for %}"})["error"] == "unsound"
