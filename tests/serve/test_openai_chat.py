"""Chats by the official client: each parameter does what it says, and a stream says what a whole answer says."""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Iterable
from typing import Any

import openai
import pytest
from openai.types.chat import ChatCompletion, ChatCompletionChunk
from processes import patience
from rig import Direct

pytestmark = pytest.mark.board

VERSE = [{"role": "user", "content": "Tell me a verse."}]
GREEDY: dict[str, Any] = {"model": "small", "messages": VERSE, "temperature": 0, "max_tokens": 12}
DRAWN = GREEDY | {"temperature": 1.2, "seed": 7}


EXTENSIONS = ("top_k", "min_p", "repeat_penalty", "repeat_last_n", "timeout")


def ask(client: openai.OpenAI, request: dict[str, Any] = GREEDY, **more: Any) -> ChatCompletion:
    """An answer; what the client has no name for goes into the body."""
    own = {name: more.pop(name) for name in EXTENSIONS if name in more}
    made: ChatCompletion = client.chat.completions.create(**request | more, extra_body=own)
    return made


def text(client: openai.OpenAI, request: dict[str, Any] = GREEDY, **more: Any) -> str:
    return str(ask(client, request, **more).choices[0].message.content)


def words_of(small: Direct, said: str) -> list[int]:
    return small.tokenizer.encode(said, bos=False)


def test_an_answer_is_what_the_model_says_to_the_templates_text(client: openai.OpenAI, small: Direct) -> None:
    assert small.template is not None
    tokens = small.tokenizer.encode(small.template.render(VERSE), bos=False)
    said = [token for piece in small.service.submit(tokens, 12) for token in piece.tokens]
    answer = ask(client)
    choice = answer.choices[0]
    assert (choice.message.role, choice.message.content) == ("assistant", small.tokenizer.decode(said))
    assert (choice.finish_reason, choice.index, answer.object) == ("length", 0, "chat.completion")
    assert answer.usage is not None
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens) == (len(tokens), 12)
    assert answer.usage.total_tokens == len(tokens) + 12


def test_it_stops_where_the_model_ends_its_turn(client: openai.OpenAI) -> None:
    answer = ask(client, max_tokens=150)
    assert answer.choices[0].finish_reason == "stop"
    assert answer.usage is not None
    assert answer.usage.completion_tokens < 150
    assert "<|im_end|>" not in str(answer.choices[0].message.content)


KINDS: dict[str, dict[str, Any]] = {
    "greedy": {},
    "drawn": {"temperature": 1.3, "seed": 3},
    "several": {"temperature": 1.3, "seed": 3, "n": 3},
    "logprobs": {"logprobs": True, "top_logprobs": 2, "max_tokens": 5},
    "stopped": {"stop": [" a", "never"], "logprobs": True},
    "usage": {"stream_options": {"include_usage": True}},
}


@pytest.mark.parametrize("kind", KINDS)
def test_a_stream_says_what_a_whole_answer_says(client: openai.OpenAI, kind: str) -> None:
    more = KINDS[kind]
    whole = ask(client, **{name: value for name, value in more.items() if name != "stream_options"})
    chunks: Iterable[ChatCompletionChunk] = client.chat.completions.create(**GREEDY | more, stream=True)
    texts, logs, ends = Counter[int](), Counter[int](), {}
    said: dict[int, str] = {}
    usage = None
    for chunk in chunks:
        assert (chunk.object, chunk.model) == ("chat.completion.chunk", "small")
        usage = chunk.usage or usage
        for choice in chunk.choices:
            said[choice.index] = said.get(choice.index, "") + (choice.delta.content or "")
            assert (choice.delta.role == "assistant") == (texts[choice.index] == 0)
            texts[choice.index] += 1
            logs[choice.index] += len(choice.logprobs.content or []) if choice.logprobs else 0
            ends[choice.index] = choice.finish_reason
    for at, one in enumerate(whole.choices):
        assert said[at] == one.message.content
        assert ends[at] == one.finish_reason
        assert logs[at] == len((one.logprobs and one.logprobs.content) or [])
    assert len(said) == len(whole.choices)
    assert (usage is not None) == ("stream_options" in more)
    if usage is not None and whole.usage is not None:
        assert usage.completion_tokens == whole.usage.completion_tokens


def test_temperature_and_seed(client: openai.OpenAI) -> None:
    assert text(client) == text(client, seed=5)
    assert text(client, DRAWN) == text(client, DRAWN)
    assert len({text(client, DRAWN, seed=seed) for seed in range(3)} | {text(client)}) == 4
    assert len({text(client, DRAWN, seed=None) for _ in range(3)}) > 1  # by chance


@pytest.mark.parametrize("narrowed", [{"top_k": 1}, {"top_p": 0}, {"min_p": 1.0}])
def test_what_keeps_the_likeliest_alone_takes_it(client: openai.OpenAI, narrowed: dict[str, Any]) -> None:
    assert text(client, DRAWN) != text(client)
    assert text(client, DRAWN, **narrowed) == text(client)


def test_penalties_have_tokens_come_less_often(client: openai.OpenAI, small: Direct) -> None:
    penalties: list[dict[str, Any]] = [{"frequency_penalty": 2.0}, {"presence_penalty": 2.0}, {"repeat_penalty": 3.0}]
    plain, *others = (text(client, max_tokens=30, **more) for more in ({}, *penalties))
    for other in others:
        assert len(set(words_of(small, other))) > len(set(words_of(small, plain)))
    assert text(client, max_tokens=30, **penalties[0], repeat_last_n=0) == plain  # they look back on nothing


def test_an_answer_ends_when_its_time_is_over(
    client: openai.OpenAI, small: Direct, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whenever that is: here once three tokens came."""
    unending = {"logit_bias": {str(token): -100 for token in small.tokenizer.stops}, "max_tokens": 400}
    step = small.service._step

    def late(batch: Any) -> None:
        step(batch)
        for member, order in small.service._running.items():
            assert order.deadline <= time.monotonic() + 3600
            if len(member.tokens) >= 3:
                order.deadline = time.monotonic()

    monkeypatch.setattr(small.service, "_step", late)
    answer = ask(client, timeout=3600, **unending)
    assert answer.choices[0].finish_reason == "length"
    assert answer.usage is not None
    assert 3 <= answer.usage.completion_tokens < 400
    monkeypatch.undo()
    assert ask(client, timeout=patience(60)).choices[0].message.content == text(client)


def test_logit_bias_forces_and_bans(client: openai.OpenAI, small: Direct) -> None:
    first = words_of(small, text(client))[0]
    banned = text(client, logit_bias={str(first): -100})
    assert words_of(small, banned)[0] != first
    token = words_of(small, " moon")[0]
    assert text(client, logit_bias={str(token): 100}, max_tokens=3) == small.tokenizer.decode([token] * 3)


def test_stop_ends_the_text_in_front_of_it(client: openai.OpenAI) -> None:
    plain = text(client)
    stop = plain.split()[3]
    for stops in (stop, [stop], ["never", stop]):
        answer = ask(client, stop=stops)
        assert answer.choices[0].message.content == plain[: plain.index(stop)]
        assert answer.choices[0].finish_reason == "stop"


def test_max_tokens_by_either_name(client: openai.OpenAI) -> None:
    for name in ("max_tokens", "max_completion_tokens"):
        answer = ask(client, GREEDY | {"max_tokens": 30, name: 4})
        assert answer.usage is not None
        assert answer.usage.completion_tokens == 4


def test_n_answers_differ_and_count_the_prompt_once(client: openai.OpenAI) -> None:
    answer = ask(client, DRAWN, n=3, max_tokens=8)
    texts = [choice.message.content for choice in answer.choices]
    assert [choice.index for choice in answer.choices] == [0, 1, 2]
    assert len(set(texts)) == 3
    assert texts[0] == text(client, DRAWN, max_tokens=8)
    assert answer.usage is not None
    assert answer.usage.completion_tokens == 24
    assert answer.usage.prompt_tokens == ask(client, max_tokens=1).usage.prompt_tokens  # type: ignore[union-attr]


def test_n_answers_share_the_prompts_prefix(client: openai.OpenAI, small: Direct) -> None:
    before = small.service.counts.cached_tokens
    answer = ask(client, messages=[{"role": "user", "content": "In the beginning of it all " * 20}], n=3, max_tokens=2)
    assert answer.usage is not None
    assert answer.usage.prompt_tokens > 64
    blocks = (answer.usage.prompt_tokens - 1) // 64 * 64
    assert small.service.counts.cached_tokens - before == 2 * blocks


def test_a_prefix_found_in_the_cache_is_told(client: openai.OpenAI) -> None:
    long = [{"role": "user", "content": "And the children of Israel went up. " * 10}]
    first, second = (ask(client, messages=long, max_tokens=1).usage for _ in range(2))
    assert first is not None
    assert second is not None
    assert first.prompt_tokens_details is not None
    assert second.prompt_tokens_details is not None
    assert first.prompt_tokens_details.cached_tokens == 0
    assert second.prompt_tokens_details.cached_tokens == 64


def test_logprobs_are_of_the_texts_tokens(client: openai.OpenAI) -> None:
    choice = ask(client, logprobs=True, top_logprobs=3).choices[0]
    assert choice.logprobs is not None
    content = choice.logprobs.content or []
    assert "".join(one.token for one in content) == choice.message.content
    for one in content:
        likely = [each.logprob for each in one.top_logprobs]
        assert likely == sorted(likely, reverse=True)
        assert (one.top_logprobs[0].token, one.top_logprobs[0].logprob) == (one.token, one.logprob)
        assert bytes(one.bytes or []).decode() == one.token
    assert ask(client).choices[0].logprobs is None


def test_logprobs_of_a_stopped_answer_end_with_its_text(client: openai.OpenAI) -> None:
    for more in ({"max_tokens": 150}, {"stop": text(client)[20:26]}):
        choice = ask(client, logprobs=True, **more).choices[0]
        assert choice.finish_reason == "stop"
        assert choice.logprobs is not None
        joined = "".join(one.token for one in choice.logprobs.content or [])
        assert joined.startswith(str(choice.message.content))
        assert len(joined) - len(str(choice.message.content)) < 8


def test_ways_to_say_the_same(client: openai.OpenAI) -> None:
    said = [{"role": "system", "content": "You are old."}, *VERSE]
    plain = ask(client, messages=said)
    as_parts = [{"role": "user", "content": [{"type": "text", "text": part} for part in ("Tell me ", "a verse.")]}]
    for other in ([{"role": "developer", "content": "You are old."}, *VERSE], [said[0], *as_parts]):
        again = ask(client, messages=other)
        assert again.choices[0].message.content == plain.choices[0].message.content
        assert again.usage is not None
        assert plain.usage is not None
        assert again.usage.prompt_tokens == plain.usage.prompt_tokens


def test_the_default_model_answers_where_none_is_named(client: openai.OpenAI, url: str) -> None:
    import httpx

    body = {name: value for name, value in GREEDY.items() if name != "model"}
    answer = httpx.post(f"{url}/v1/chat/completions", json=body | {"max_tokens": 2}, timeout=patience(60)).json()
    assert answer["model"] == "small"


def test_clients_never_get_anothers_text(client: openai.OpenAI, small: Direct) -> None:
    """Sixteen at once, twice as many as there are slots, half of them streams."""
    starts = [
        f"{word} said unto {other}" for word in ("God", "Moses", "David", "Saul") for other in ("him", "me", "us", "it")
    ]
    requests = [DRAWN | {"messages": [{"role": "user", "content": start}], "max_tokens": 8} for start in starts]
    alone = [text(client, request) for request in requests]
    found: dict[int, str] = {}

    def run(at: int) -> None:
        if at % 2:
            found[at] = text(client, requests[at])
        else:
            chunks = client.chat.completions.create(**requests[at], stream=True)
            found[at] = "".join(chunk.choices[0].delta.content or "" for chunk in chunks)

    threads = [threading.Thread(target=run, args=(at,)) for at in range(len(requests))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(120)
    assert [found[at] for at in range(len(requests))] == alone
    assert max(small.service.counts.widths) > 4
