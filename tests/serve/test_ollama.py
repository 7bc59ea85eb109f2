"""Ollama's API by its official client: models, chats, texts, vectors, and what is wrong with a request."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from contextlib import closing
from dataclasses import replace
from typing import Any

import httpx
import ollama
import pytest
from processes import patience
from rig import Direct, Fixed, Scripted, about, served
from told import CALLS, PLACE, SAID, TOOLS

from tegrad import models
from tegrad.errors import TegradError
from tegrad.llm.service import QueueFull
from tegrad.llm.template import KEY, Template
from tegrad.serve import ollama as api
from tegrad.serve import ollama_fields
from tegrad.serve.model import Models

HELLO = [{"role": "user", "content": "What is up?"}]
GREEDY: dict[str, Any] = {"model": "small", "messages": HELLO, "options": {"temperature": 0, "num_predict": 12}}


@pytest.fixture(scope="module")
def scripted() -> Iterator[Scripted]:
    made = Scripted(about("small", models.SMALL), SAID)
    yield made
    assert made.template is not None
    made.template.close()


@pytest.fixture(scope="module")
def fixed(scripted: Scripted) -> Iterator[Fixed]:
    one = Scripted(replace(scripted.about, name="dull", metadata=scripted.about.metadata | {KEY: ""}))
    made = Fixed([scripted, one])
    yield made
    assert made.used == 0
    assert one.template is not None
    one.template.close()


@pytest.fixture(scope="module")
def url(fixed: Models) -> Iterator[str]:
    with served(api.API.routes(fixed)) as found:
        yield found


@pytest.fixture(scope="module")
def client(url: str) -> ollama.Client:
    return ollama.Client(url, timeout=patience(30))


@pytest.fixture
def model(scripted: Scripted) -> Iterator[Scripted]:
    yield scripted
    scripted.text, scripted.refusal, scripted.error, scripted.reason = SAID, None, None, "stop"


def prompt(model: Scripted) -> str:
    """What the model was asked last."""
    return model.tokenizer.decode(model.asked[-1].tokens, special=True)


def refusal(client: ollama.Client, call: str, **request: Any) -> ollama.ResponseError:
    with pytest.raises(ollama.ResponseError) as raised:
        getattr(client, call)(**request)
    return raised.value


# ---- models


def test_models_are_listed_shown_and_known_by_their_tag(client: ollama.Client, scripted: Scripted) -> None:
    one = client.list().models[0]
    assert (one.model, one.size) == ("small:latest", scripted.about.size)
    assert one.modified_at is not None
    assert one.modified_at.timestamp() == pytest.approx(scripted.about.modified, abs=1e-3)
    for name in ("small", "small:latest"):
        shown = client.show(name)
        assert shown.capabilities == ["completion", "tools", "thinking"]
        assert shown.template == scripted.about.metadata[KEY]
        assert shown.modelinfo is not None
        assert shown.modelinfo["llama.context_length"] == scripted.about.context
        assert shown.modelinfo["general.parameter_count"] == scripted.about.parameters
        assert shown.details is not None
        assert (shown.details.family, shown.details.parameter_size) == ("llama", "1.00K")
    assert client.show("dull").capabilities == ["completion"]


def test_models_in_memory(client: ollama.Client, scripted: Scripted) -> None:
    one = client.ps().models[0]
    assert (one.model, one.context_length, one.size) == ("small:latest", scripted.context, scripted.about.size)
    assert one.expires_at is not None
    assert one.expires_at.year == 9999


def test_a_name_with_a_tag_is_listed_as_it_is() -> None:
    assert [ollama_fields.tagged(name) for name in ("a", "org/model:Q4_K_M")] == ["a:latest", "org/model:Q4_K_M"]


def test_the_version_is_one_that_clients_compare(url: str) -> None:
    version = httpx.get(f"{url}/api/version").json()["version"]
    assert tuple(map(int, version.split("."))) >= (0, 12)


def test_a_pull_of_what_is_there_succeeds(client: ollama.Client) -> None:
    assert client.pull("small:latest").status == "success"
    assert [each.status for each in client.pull("small", stream=True)] == ["success"]
    assert "tegrad pull" in str(refusal(client, "pull", model="other"))


@pytest.mark.parametrize(
    ("call", "request_"),
    [
        ("create", {"model": "new", "from_": "small"}),
        ("copy", {"source": "small", "destination": "new"}),
        ("delete", {"model": "small"}),
        ("push", {"model": "small"}),
    ],
)
def test_models_are_managed_elsewhere(client: ollama.Client, call: str, request_: dict[str, Any]) -> None:
    error = refusal(client, call, **request_)
    assert error.status_code == 400
    assert "tegrad" in error.error or ": " in error.error


# ---- chats


def test_thoughts_text_and_calls_come_apart(client: ollama.Client) -> None:
    answer = client.chat(model="small:latest", messages=HELLO, tools=TOOLS)
    message = answer.message
    assert (message.role, message.content, message.thinking) == ("assistant", "I look.", "Hm, the moon.")
    calls = [(call.function.name, call.function.arguments) for call in message.tool_calls or []]
    assert calls == [("look", {"at": "the moon"}), ("count", {"to": 3})]
    assert (answer.model, answer.done, answer.done_reason) == ("small", True, "stop")


def test_a_stream_says_the_same_and_each_call_at_once(client: ollama.Client, model: Scripted) -> None:
    model.wait = model.apart
    try:
        lines = list(client.chat(model="small", messages=HELLO, tools=TOOLS, stream=True))
    finally:
        model.wait = lambda: None
    assert len(lines) > 6
    assert "".join(line.message.content or "" for line in lines) == "I look."
    assert "".join(line.message.thinking or "" for line in lines) == "Hm, the moon."
    calls = [[call.function.name for call in line.message.tool_calls or []] for line in lines]
    assert [names for names in calls if names] == [["look"], ["count"]]
    assert [line.done for line in lines] == [*[False] * (len(lines) - 1), True]
    assert lines[-1].eval_count == len(model.tokenizer.encode(SAID, bos=False))


def test_tokens_and_times_are_told(client: ollama.Client, model: Scripted) -> None:
    answer = client.chat(model="small", messages=HELLO)
    assert answer.prompt_eval_count == len(model.asked[-1].tokens)
    assert answer.eval_count == len(model.tokenizer.encode(SAID, bos=False))
    times = [answer.load_duration, answer.prompt_eval_duration, answer.eval_duration, answer.total_duration]
    assert all(one is not None and one >= 0 for one in times)
    assert sum(times[:3]) <= times[3] < 30e9  # type: ignore[arg-type,operator]


def test_a_chat_has_the_begin_token_that_its_template_leaves_out(
    client: ollama.Client, scripted: Scripted, monkeypatch: pytest.MonkeyPatch
) -> None:
    with closing(Template("{{ messages[0].content }}")) as template:
        monkeypatch.setattr(scripted, "template", template)
        client.chat("small", HELLO)
    assert scripted.asked[-1].tokens == scripted.tokenizer.encode(HELLO[0]["content"], bos=True)


def test_thoughts_are_asked_for_and_left_out(client: ollama.Client, model: Scripted) -> None:
    assert client.chat(model="small", messages=HELLO, think=False).message.thinking is None
    assert prompt(model).endswith("assistant\n")
    for think in (True, "high", "max"):
        assert "Hm, the moon." in str(client.chat(model="small", messages=HELLO, think=think).message.thinking)
        assert prompt(model).rstrip().endswith("<think>")
    assert "thinking" in str(refusal(client, "chat", model="dull", messages=HELLO, think=True))
    streamed = client.chat(model="small", messages=HELLO, think=False, stream=True)
    assert all(line.message.thinking is None for line in streamed)


def test_the_model_is_told_of_tools_calls_and_results(client: ollama.Client, model: Scripted) -> None:
    said = [
        *HELLO,
        {"role": "assistant", "thinking": "Hm.", "tool_calls": [
            {"function": {"name": "look", "arguments": {"at": "the sky"}}},
        ]},
        {"role": "tool", "content": "It is blue.", "tool_name": "look"},
    ]  # fmt: skip
    client.chat(model="small", messages=said, tools=TOOLS)
    asked = prompt(model)
    assert "Look somewhere" in asked
    assert '"at": "the sky"' in asked
    assert "It is blue." in asked


def test_calls_and_results_find_each_other() -> None:
    """Ids are made up, and given to results by the function's name, or in order."""
    calls = [{"id": "", "function": {"name": name, "arguments": {}}} for name in ("look", "count", "look")]
    bare: dict[str, Any] = {"content": "", "thinking": None, "tool_calls": (), "tool_name": None, "tool_call_id": None}
    named = [bare | {"role": "tool", "tool_name": name} for name in ("count", "look", None, "other")]
    made = ollama_fields._messages([bare | {"role": "assistant", "tool_calls": calls}, *named])
    assert [call["id"] for call in made[0]["tool_calls"]] == ["call_0", "call_1", "call_2"]
    assert [(one["name"], one["tool_call_id"]) for one in made[1:]] == [
        ("count", "call_1"), ("look", "call_0"), ("look", "call_2"), ("other", ""),
    ]  # fmt: skip


def test_an_answer_goes_on_from_what_the_assistant_said(client: ollama.Client, model: Scripted) -> None:
    client.chat(model="small", messages=[*HELLO, {"role": "assistant", "content": "The sky"}])
    assert prompt(model).endswith("\nThe sky")


def test_options_are_how_tokens_are_taken(client: ollama.Client, model: Scripted) -> None:
    options = {
        "temperature": 0.5, "top_k": 7, "top_p": 0.6, "min_p": 0.1, "repeat_penalty": 1.5, "repeat_last_n": -1,
        "presence_penalty": 0.25, "frequency_penalty": -0.5, "seed": 9, "num_predict": 30, "stop": ["zzz"],
        "num_ctx": 1 << 20, "num_gpu": 99, "mirostat": 1,
    }  # fmt: skip
    client.chat(model="small", messages=HELLO, options=options)
    asked = model.asked[-1]
    limit, taken = asked.rest
    assert limit == 30
    assert (taken.temperature, taken.top_k, taken.top_p, taken.min_p) == (0.5, 7, 0.6, 0.1)
    assert (taken.repeat, taken.last_n, taken.presence, taken.frequency) == (1.5, 1024, 0.25, -0.5)
    assert (asked.more["stops"], asked.more["seed"]) == (["zzz"], 9)


def test_numbers_beyond_their_bounds_are_taken_as_ollama_does(url: str, model: Scripted) -> None:
    options: Any = {
        "temperature": -1, "top_k": -3, "top_p": 1.5, "presence_penalty": 2.5, "frequency_penalty": -3.5,
        "repeat_last_n": 1e30, "seed": 1e300, "num_predict": 30.7,
    }  # fmt: skip
    httpx.post(f"{url}/api/chat", json={"model": "small", "messages": HELLO, "options": options})
    asked = model.asked[-1]
    limit, taken = asked.rest
    assert (limit, taken.temperature, taken.top_k, taken.top_p) == (30, 0, 0, 1)
    assert (taken.presence, taken.frequency, taken.last_n) == (2.5, -3.5, 1024)
    assert asked.more["seed"] == (1 << 63) - 1
    httpx.post(f"{url}/api/generate", json={"model": "small", "prompt": "a", "options": {"seed": 7.9}})
    assert model.asked[-1].more["seed"] == 7


def test_a_developer_is_the_system(client: ollama.Client, model: Scripted) -> None:
    prompts = []
    for role in ("system", "developer"):
        client.chat(model="small", messages=[{"role": role, "content": "Be old."}, *HELLO])
        prompts.append(prompt(model))
    assert prompts[0] == prompts[1]


def test_options_left_out_are_ollamas(client: ollama.Client, model: Scripted) -> None:
    for options in (None, {"num_predict": -1, "seed": -1}):
        client.chat(model="small", messages=HELLO, options=options)
        limit, taken = model.asked[-1].rest
        assert limit is None
        assert (taken.temperature, taken.top_k, taken.top_p, taken.repeat, taken.last_n) == (0.8, 40, 0.9, 1.1, 64)
    assert len({asked.more["seed"] for asked in model.asked[-2:]}) == 2


def test_a_format_holds_the_answer(client: ollama.Client, model: Scripted) -> None:
    kinds: list[tuple[Any, str | None]] = [("", None), ("json", "json"), (PLACE, "schema")]
    for form, kind in kinds:
        client.chat(model="small", messages=HELLO, format=form)
        grammar = model.asked[-1].more["grammar"]
        assert (grammar and grammar.kind) == kind
    assert json.loads(grammar.text) == PLACE


@pytest.mark.parametrize(
    ("given", "seconds"),
    [
        (None, None), (90, 90), (0, 0), (-1, math.inf), ("5m", 300), ("1h30m", 5400), ("250ms", 0.25), ("-1", math.inf),
        ("-1s", math.inf), ("10", 10), (0.5, 0.5), (1e9, math.inf), (1e300, math.inf), ("9" * 400 + "h", math.inf),
    ],
)  # fmt: skip
def test_a_model_is_kept_for_as_long_as_is_said(
    client: ollama.Client, fixed: Fixed, given: Any, seconds: float | None
) -> None:
    client.chat(model="small", messages=HELLO, keep_alive=given)
    assert fixed.kept[-1] == (None if seconds is None else pytest.approx(seconds))


def test_without_messages_a_model_is_loaded_or_unloaded(client: ollama.Client, fixed: Fixed, model: Scripted) -> None:
    before = len(model.asked)
    assert client.chat(model="small").done_reason == "load"
    assert client.generate(model="small", keep_alive="10m").done_reason == "load"
    assert fixed.kept[-2:] == [None, 600]
    answer = client.generate(model="small", keep_alive=0)
    assert (answer.response, answer.done_reason, fixed.kept[-1]) == ("", "unload", 0)
    assert len(model.asked) == before


def test_log_probabilities(client: ollama.Client, model: Scripted) -> None:
    model.text = "Good morning"
    answer = client.chat(model="small", messages=HELLO, logprobs=True, top_logprobs=1)
    assert "".join(one.token for one in answer.logprobs or []) == "Good morning"
    assert (answer.logprobs or [])[0].top_logprobs[0].logprob == -0.5  # type: ignore[index]
    streamed = client.chat(model="small", messages=HELLO, logprobs=True, stream=True)
    assert sum(len(line.logprobs or []) for line in streamed) == len(answer.logprobs or [])
    assert model.asked[-1].rest[1].logprobs == 0


# ---- texts


def test_a_prompt_is_a_conversation_of_one(client: ollama.Client, model: Scripted) -> None:
    answer = client.generate(model="small", prompt="What is up?", system="You are old.")
    assert (answer.response, answer.thinking) == (f"I look.{CALLS}", "Hm, the moon.")
    client_said = prompt(model)
    client.chat(model="small", messages=[{"role": "system", "content": "You are old."}, *HELLO])
    assert prompt(model) == client_said
    lines = list(client.generate(model="small", prompt="What is up?", stream=True))
    assert "".join(line.response or "" for line in lines) == f"I look.{CALLS}"
    assert lines[-1].done_reason == "stop"


def test_a_raw_prompt_is_continued_as_it_is(client: ollama.Client, model: Scripted) -> None:
    answer = client.generate(model="small", prompt="In the beginning", raw=True)
    assert model.asked[-1].tokens == model.tokenizer.encode("In the beginning")
    assert answer.response == SAID


@pytest.mark.parametrize("field", [{"suffix": "end"}, {"template": "{{ .Prompt }}"}, {"context": [1, 2]}])
def test_what_a_prompt_cannot_have(client: ollama.Client, field: dict[str, Any]) -> None:
    error = refusal(client, "generate", model="small", prompt="Hello", **field)
    assert error.error.startswith(f"{next(iter(field))} is given")


# ---- vectors


def test_vectors(client: ollama.Client, model: Scripted) -> None:
    answer = client.embed(model="small", input=["one", "two words"])
    assert answer.embeddings == [[0.5] * 4] * 2
    assert answer.prompt_eval_count == sum(len(model.tokenizer.encode(text)) for text in ("one", "two words"))
    assert client.embed(model="small", input="one", dimensions=1).embeddings == [[1.0]]
    assert client.embed(model="small", input="").embeddings == []
    assert client.embeddings(model="small", prompt="one").embedding == [0.5] * 4
    assert "dimensions" in str(refusal(client, "embed", model="small", input="one", dimensions=5))


def test_long_texts_are_cut_unless_they_must_not_be(client: ollama.Client, model: Scripted) -> None:
    long = "word " * 600
    assert client.embed(model="small", input=long).prompt_eval_count == model.context
    whole = client.embed(model="small", input=long, truncate=False).prompt_eval_count
    assert whole == len(model.tokenizer.encode(long))


# ---- what is wrong


WRONG: list[tuple[str, Any, int, str]] = [
    ("chat", {"messages": HELLO}, 400, "model is missing"),
    ("chat", {"model": "none", "messages": HELLO}, 404, "none"),
    ("chat", {"model": "small", "messages": [{"role": "bard", "content": ""}]}, 400, "messages[0].role"),
    ("chat", {"model": "small", "messages": [HELLO[0] | {"images": ["AA=="]}]}, 400, "messages[0].images"),
    ("chat", {"model": "small", "messages": HELLO, "format": "xml"}, 400, "format"),
    ("chat", {"model": "small", "messages": HELLO, "keep_alive": "soon"}, 400, "keep_alive"),
    ("chat", {"model": "small", "messages": HELLO, "options": {"temperature": "hot"}}, 400, "options.temperature"),
    ("chat", {"model": "small", "messages": HELLO, "options": {"seed": True}}, 400, "options.seed"),
    ("chat", {"model": "small", "messages": HELLO, "tools": [{"type": "search"}]}, 400, "tools[0].type"),
    ("chat", {"model": "small", "messages": HELLO, "think": "hard"}, 400, "think"),
    ("generate", {"model": "small", "prompt": "a", "images": ["AA=="]}, 400, "images"),
    ("generate", {"model": "none"}, 404, "none"),
    ("embed", {"model": "small"}, 400, "input"),
    ("show", {"model": "none"}, 404, "none"),
]


@pytest.mark.parametrize(("path", "body", "status", "says"), WRONG)
def test_what_is_wrong_is_told_in_a_line(url: str, path: str, body: Any, status: int, says: str) -> None:
    answer = httpx.post(f"{url}/api/{path}", json=body)
    assert (answer.status_code, list(answer.json())) == (status, ["error"])
    assert says in answer.json()["error"]
    assert "\n" not in answer.json()["error"]


def test_a_full_queue_says_when_to_come_again(url: str, client: ollama.Client, model: Scripted) -> None:
    model.refusal = QueueFull(3, 4.0)
    answer = httpx.post(f"{url}/api/chat", json={"model": "small", "messages": HELLO})
    assert (answer.status_code, answer.headers["retry-after"]) == (429, "4")
    assert refusal(client, "chat", model="small", messages=HELLO).status_code == 429


def test_a_failure_within_a_stream_is_a_line(client: ollama.Client, model: Scripted) -> None:
    model.text, model.error = "Good morning", TegradError("the GPU failed: try again")
    said = ""

    def listen() -> None:
        nonlocal said
        for line in client.chat(model="small", messages=HELLO, stream=True):
            said += line.message.content or ""

    with pytest.raises(ollama.ResponseError, match="the GPU failed"):
        listen()
    assert said == "Good morning"


# ---- a model


@pytest.fixture(scope="module")
def real(small: Direct) -> Iterator[ollama.Client]:
    """In front of the model that the package carries."""
    with served(api.API.routes(Fixed([small]))) as url:
        yield ollama.Client(url, timeout=patience(120))


@pytest.mark.board
def test_a_model_answers(real: ollama.Client, small: Direct) -> None:
    assert small.template is not None
    tokens = small.tokenizer.encode(small.template.render(HELLO), bos=False)
    expected = small.tokenizer.decode([token for piece in small.service.submit(tokens, 12) for token in piece.tokens])
    greedy = GREEDY | {"options": GREEDY["options"] | {"repeat_penalty": 1.0}}
    answer = real.chat(**greedy)
    assert (answer.message.content, answer.done_reason, answer.eval_count) == (expected, "length", 12)
    assert "".join(line.message.content or "" for line in real.chat(**greedy, stream=True)) == expected
    drawn = [real.chat(model="small", messages=HELLO, options={"seed": 3, "num_predict": 8}) for _ in range(2)]
    assert drawn[0].message.content == drawn[1].message.content


@pytest.mark.board
def test_a_model_is_held_to_a_schema(real: ollama.Client) -> None:
    request = GREEDY | {"options": {"seed": 1, "num_predict": 60}, "format": PLACE | {"additionalProperties": False}}
    assert len(json.loads(real.chat(**request).message.content or "")["at"]) <= 8
    lines = real.chat(**request, stream=True)
    assert len(json.loads("".join(line.message.content or "" for line in lines))["at"]) <= 8
