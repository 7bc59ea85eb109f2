"""Chat templates run as models' authors wrote them, and can do nothing else."""

from dataclasses import replace
from pathlib import Path

import pytest
from tiny_llama import TYPE, Shape, Vocabulary, letters, write

from tegrad.llm.gguf import Gguf
from tegrad.llm.template import KEY, NAMED, WITH_TOOLS, Template, TemplateRefusalError, source_of

CHATML = """{%- for message in messages %}
{{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>' + '\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
{%- endif %}"""
HELLO = [{"role": "user", "content": '<b>&"hi"'}]


def test_chatml_is_rendered_with_and_without_the_reply_mark() -> None:
    template = Template(CHATML)
    assert template.render(HELLO, reply=False) == '<|im_start|>user\n<b>&"hi"<|im_end|>\n'
    assert template.render(HELLO) == '<|im_start|>user\n<b>&"hi"<|im_end|>\n<|im_start|>assistant\n'


def test_an_answer_begins_with_a_turn_where_gemma_4s_template_leaves_it_out() -> None:
    template = Template(
        "{% for message in messages %}<|turn>{{ message.role }}\n{{ message.content }}<turn|>\n{% endfor %}"
    )
    assert template.render(HELLO, reply=False) == '<|turn>user\n<b>&"hi"<turn|>\n'
    assert template.render(HELLO) == '<|turn>user\n<b>&"hi"<turn|>\n<|turn>model\n'


def test_json_is_not_escaped_for_html() -> None:
    template = Template("{% for tool in tools %}{{ tool | tojson }}{% endfor %}")
    assert template.render([], tools=[{"name": "<f>", "é": 1}]) == '{"name": "<f>", "é": 1}'


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ("", '{"b": ["é", 1], "a": "<"}'),
        ("(indent=2)", '{\n  "b": [\n    "é",\n    1\n  ],\n  "a": "<"\n}'),
        ("(false, 1)", '{\n "b": [\n  "é",\n  1\n ],\n "a": "<"\n}'),
        ("(true)", '{"b": ["\\u00e9", 1], "a": "<"}'),
        ("(ensure_ascii=true)", '{"b": ["\\u00e9", 1], "a": "<"}'),
        ("(separators=(',', ':'))", '{"b":["é",1],"a":"<"}'),
        ("(sort_keys=true)", '{"a": "<", "b": ["é", 1]}'),
        ("(false, none, (';', '='), true)", '{"a"="<";"b"=["é";1]}'),
    ],
)
def test_json_takes_hugging_faces_arguments_in_their_order(given: str, expected: str) -> None:
    assert Template(f"{{{{ value | tojson{given} }}}}").render([], value={"b": ["é", 1], "a": "<"}) == expected


def test_json_takes_no_argument_that_it_does_not_know() -> None:
    with pytest.raises(TemplateRefusalError, match="unexpected keyword argument 'default'"):
        Template("{{ 1 | tojson(default=2) }}").render([])


def test_what_a_model_says_may_be_marked() -> None:
    """A block that only training reads; names that are set in it end with it, and loops may break out of it."""
    template = Template(
        "{% for m in messages %}{% set end = '.' %}\n{% generation %}\n{% set end = '!' %}{{ m.content }}{{ end }}"
        "{%- if loop.index == 2 %}{% break %}{% endif %}{% endgeneration %}{{ end }}\n{%- endfor %}"
    )
    assert template.render([{"content": "a"}, {"content": "b"}, {"content": "c"}]) == "a!.b!"
    with pytest.raises(TemplateRefusalError, match="not sound"):
        Template("{% generation %}")


def test_documents_are_none_as_tools_are_where_nobody_gives_them() -> None:
    template = Template("{{ documents is none }}{{ tools is none }}{{ documents }}")
    assert template.render([]) == "TrueTrueNone"
    assert template.render([], documents=["d"]) == "FalseTrue['d']"


def test_the_date_may_be_asked_for_by_name() -> None:
    assert len(Template("{{ strftime_now(format='%Y') }}").render([])) == 4


def test_blocks_leave_no_blank_lines_and_loops_can_break() -> None:
    template = Template(
        "{% for m in messages %}\n    {% if loop.index > 1 %}{% break %}{% endif %}\nx\n{% endfor %}\nend"
    )
    assert template.render([{}, {}, {}]) == "x\nend"


def test_tokens_and_the_date_are_offered() -> None:
    assert Template("{{ bos_token }}|{{ eos_token }}", "<s>", "</s>").render([]) == "<s>|</s>"
    assert len(Template("{{ strftime_now('%Y') }}").render([])) == 4


def test_smollm3_is_told_of_tools_by_the_name_that_its_template_has() -> None:
    template = Template("{% if xml_tools or python_tools %}{{ xml_tools | string }}{{ python_tools }}{% endif %}")
    tools = [{"type": "function", "function": {"name": "look"}}]
    assert template.render([], tools=tools) == "[{'name': 'look'}]"
    assert template.render([], tools=tools, python_tools=["look"]) == "['look']"
    assert template.render([]) == ""


@pytest.mark.parametrize(
    ("source", "values", "text"),
    [
        ("{{ thinking }}", {"enable_thinking": True}, "True"),
        ("{{ thinking }}", {"enable_thinking": False}, "False"),
        ("{{ thinking }}", {"enable_thinking": True, "thinking": False}, "False"),
        ("{{ thinking }}", {}, ""),
        ("{{ enable_thinking }}{{ thinking }}", {"enable_thinking": True}, "True"),
        ("{{ thinking_budget }}", {"enable_thinking": False}, "0"),
        ("{{ thinking_budget }}", {"enable_thinking": False, "thinking_budget": 512}, "512"),
        ("{{ thinking_budget }}", {"enable_thinking": True}, ""),
    ],
)
def test_the_switch_of_thoughts_has_the_name_that_the_template_has(
    source: str, values: dict[str, bool], text: str
) -> None:
    assert Template(source).render([], **values) == text


def test_a_second_template_is_for_conversations_with_tools() -> None:
    template = Template("{{ bos_token }}plain", "<s>", "", "{{ bos_token }}{{ tools | length }}")
    assert [template.render([]), template.render([], tools=[{}])] == ["<s>plain", "<s>1"]
    template.close()
    assert template.render([], tools=[{}, {}]) == "<s>2"
    template.close()
    files: list[dict[str, object]] = [{}, {KEY: "a"}, {KEY: "a", WITH_TOOLS: "b"}]
    assert [source_of(one, tools=False) for one in files] == ["", "a", "a"]
    assert [source_of(one, tools=True) for one in files] == ["", "a", "b"]


def test_a_templates_own_refusal_reaches_the_user() -> None:
    with pytest.raises(TemplateRefusalError, match="roles must alternate"):
        Template("{{ raise_exception('roles must alternate') }}").render(HELLO)


@pytest.mark.parametrize(
    "source",
    [
        "{{ ''.__class__.__mro__[1].__subclasses__() }}",
        "{{ messages.append(1) }}",
        "{{ messages[0].update(role='x') }}",
        "{{ cycler.__init__.__globals__.os.popen('id').read() }}",
    ],
)
def test_a_template_cannot_leave_its_sandbox(source: str) -> None:
    messages = [dict(HELLO[0])]
    with pytest.raises(TemplateRefusalError, match="failed"):
        Template(source).render(messages)
    assert messages == HELLO


def test_an_unsound_template_is_said_so() -> None:
    with pytest.raises(TemplateRefusalError, match="not sound"):
        Template("{% for %}")


def test_the_file_names_template_and_tokens(tmp_path: Path) -> None:
    plain = letters(300)
    named = Vocabulary(plain.tokens, plain.kinds, plain.merges, plain.bos, plain.eos, template="{{ bos_token }}!")
    shape = Shape(dim=32, ffn=32, heads=1, kv_heads=1, layers=1)
    with Gguf.open(write(tmp_path / "with.gguf", shape, TYPE.F32, vocabulary=named)) as file:
        template = Template.of(file)
        assert template is not None
        assert template.render([]) == "<|bos|>!"
    with Gguf.open(write(tmp_path / "without.gguf", shape, TYPE.F32)) as file:
        assert Template.of(file) is None


@pytest.mark.parametrize("name", NAMED)
def test_a_templates_name_that_converters_write_stands_for_it(tmp_path: Path, name: str) -> None:
    """convert_hf_to_gguf.py --mistral-format, for a model that brings no template."""
    llama_cpp = pytest.importorskip("llama_cpp", reason="cyllama is not installed")
    shape, plain = Shape(dim=32, ffn=32, heads=1, kv_heads=1, layers=1), letters(300)
    path = write(tmp_path / "m.gguf", shape, TYPE.F32, vocabulary=replace(plain, template=name))
    said = [("system", "Be brief."), ("user", "Who?"), ("assistant", " Ada. "), ("user", " And\nthen? ")]
    with Gguf.open(path) as file, llama_cpp.peer(path) as peer:
        template = Template.of(file)
        assert template is not None
        assert source_of(file.metadata, tools=True) == NAMED[name]
        for part in (said, said[:2], said[1:2], said[1:]):
            expected = peer.template(name, part)
            assert template.render([{"role": role, "content": text} for role, text in part]) == expected
        with pytest.raises(TemplateRefusalError, match="no role tool"):
            template.render([{"role": "tool", "content": "1"}])
        template.close()


def test_a_name_that_we_do_not_know_is_no_template(tmp_path: Path) -> None:
    shape, plain = Shape(dim=32, ffn=32, heads=1, kv_heads=1, layers=1), letters(300)
    path = write(tmp_path / "m.gguf", shape, TYPE.F32, vocabulary=replace(plain, template="zephyr"))
    with (
        Gguf.open(path) as file,
        pytest.raises(TemplateRefusalError, match="chat template is 'zephyr', a name that we do not know"),
    ):
        Template.of(file)


def test_what_qwens_templates_use_is_there() -> None:
    """Namespaces that are set in loops, reversed lists, tests of types, methods of texts."""
    template = Template(
        "{%- set ns = namespace(last=-1) %}{%- for m in messages[::-1] %}"
        "{%- if m.role == 'user' and m.content is string and not m.content.startswith('<tool>') and ns.last < 0 %}"
        "{%- set ns.last = messages | length - 1 - loop.index0 %}{%- endif %}{%- endfor %}"
        "{%- for m in messages %}{%- set said = m.content.split('</think>')[-1].lstrip('\\n') %}"
        "{{- m.role }}:{{ said }}{{ '*' if loop.index0 == ns.last }};{%- endfor %}"
        "{%- if enable_thinking is defined and enable_thinking is false %}{{- '<think></think>' }}{%- endif %}"
    )
    messages = [
        {"role": "user", "content": "a"},
        {"role": "assistant", "content": "<think>b</think>\nc"},
        {"role": "user", "content": "d"},
        {"role": "user", "content": "<tool>e"},
    ]
    assert template.render(messages) == "user:a;assistant:c;user:d*;user:<tool>e;"
    assert template.render(messages[:1], enable_thinking=False) == "user:a*;<think></think>"
