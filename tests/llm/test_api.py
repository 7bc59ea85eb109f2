"""`tegrad.LLM` says what the engine says, to one request after the other, and what is wrong in one error each."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest
from tiny_llama import LARGE_EPS, TYPE, Shape, letters, rewritten, write

import tegrad
from tegrad import LLM, TegradError, models
from tegrad.llm import api, embeddings
from tegrad.llm.api import DEFAULTS, ArgumentError
from tegrad.llm.engine import Engine
from tegrad.llm.errors import ContextError, GgufError, ModelError, UnsupportedModelError
from tegrad.llm.gguf import Gguf
from tegrad.llm.grammar import GrammarError
from tegrad.llm.sampler import Sampler
from tegrad.llm.serial import Cancelled, ClosedError
from tegrad.llm.tokenizer import Tokenizer
from tegrad.llm.tools import Call, Said

board = pytest.mark.board
BEGIN = "In the beginning"
HELLO = [{"role": "user", "content": "Who made the heaven?"}]
PATIENCE_S = 60


@pytest.fixture(scope="module")
def llm(device: str) -> Iterator[LLM]:
    with LLM(models.SMALL, 128, gpu=device) as made:
        yield made


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An embedding model without a chat template."""
    folder = tmp_path_factory.mktemp("tiny")
    shape = Shape(arch="qwen3", dim=64, ffn=64, heads=2, kv_heads=1, layers=1, eps=LARGE_EPS)
    plain = write(folder / "plain.gguf", shape, TYPE.F16, vocabulary=letters(300))
    return rewritten(plain, folder / "tiny.gguf", **{"qwen3.pooling_type": 3})


def test_to_import_tegrad_stays_light() -> None:
    code = "import sys, tegrad; print({'numpy', 'tinygrad', 'tegrad.llm'} & set(sys.modules)); tegrad.LLM, tegrad.Reply"
    told = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert told.stdout == "set()\n"
    with pytest.raises(AttributeError, match="no attribute 'LMM'"):
        _ = tegrad.LMM


@board
def test_an_answer_is_the_engines(llm: LLM, device: str) -> None:
    with Gguf.open(models.SMALL) as file, Engine(file, 128, device=device) as engine:
        prompt = Tokenizer(file).encode(BEGIN)
        expected = list(engine.generate(prompt, Sampler(0.8, top_k=40, repeat=1.2), 8, seed=3))
        text = Tokenizer(file).decode(expected)
    reply = llm.generate(BEGIN, max_tokens=8, temperature=0.8, top_p=1, top_k=40, repeat_penalty=1.2, seed=3)
    assert (reply.tokens, reply.text) == (tuple(expected), text)
    assert (reply.finish_reason, reply.prompt_tokens, reply.cached_tokens) == ("length", len(prompt), 0)
    assert reply.seed == 3
    assert reply.tokens_per_second
    assert reply.tokens_per_second > 0


@board
def test_a_stream_has_the_same_answer_in_pieces_and_a_random_seed_is_told(llm: LLM) -> None:
    with llm.stream(BEGIN, max_tokens=6) as stream:
        first = next(stream)
        begun = stream.reply
        pieces = [first, *stream]
    assert (begun.text, begun.finish_reason) == (first, None)
    again = llm.generate(BEGIN, max_tokens=6, seed=stream.reply.seed)
    assert "".join(pieces) == again.text == stream.reply.text
    assert again.cached_tokens == 0  # what was said before may change no answer
    assert (stream.reply.tokens, stream.reply.finish_reason) == (again.tokens, "length")


@board
def test_a_text_of_stop_ends_an_answer_in_front_of_it(llm: LLM) -> None:
    whole = llm.generate(BEGIN, max_tokens=8, temperature=0)
    middle = whole.text[len(whole.text) // 2 :][:3]
    for stop in (middle, ["never said", middle]):
        reply = llm.generate(BEGIN, max_tokens=8, temperature=0, stop=stop)
        assert (reply.text, reply.finish_reason) == (whole.text[: whole.text.index(middle)], "stop")
        assert reply.tokens == whole.tokens[: len(reply.tokens)]


@board
def test_biases_and_log_probabilities_are_the_engines(llm: LLM) -> None:
    plain = llm.generate(BEGIN, max_tokens=4, temperature=0)
    told = llm.generate(BEGIN, max_tokens=4, temperature=0, logprobs=3)
    assert (plain.logprobs, told.tokens, len(told.logprobs)) == ((), plain.tokens, 4)
    for token, one in zip(told.tokens, told.logprobs, strict=True):
        assert one.likeliest[0] == (token, one.taken)
        assert len(one.likeliest) == 3
    other = llm.generate(BEGIN, max_tokens=4, temperature=0, logit_bias={plain.tokens[0]: -100})
    assert other.tokens[0] != plain.tokens[0]
    assert other.logprobs == ()


def test_a_name_is_a_model_of_the_hubs_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path))
    with pytest.raises(TegradError, match="no model of that name is here: `tegrad pull owner/small:Q8_0` fetches it"):
        LLM("owner/small:Q8_0")
    snapshot = tmp_path / "models--owner--small" / "snapshots" / "0"
    snapshot.mkdir(parents=True)
    (snapshot / "small-Q8_0.gguf").write_bytes(b"something else")
    with pytest.raises(GgufError, match=r"small-Q8_0\.gguf"):
        LLM("small")


@board
def test_an_answer_ends_where_the_context_does(llm: LLM) -> None:
    prompt = " the" * 120
    reply = llm.generate(prompt, max_tokens=None, temperature=0, top_k=1)
    assert reply.finish_reason == "length"
    assert reply.prompt_tokens + len(reply.tokens) in (llm.context, llm.context + 1)


@board
def test_a_conversation_that_goes_on_keeps_what_it_has_in_common_with_the_cache(llm: LLM) -> None:
    llm.generate("x", max_tokens=1)
    first = llm.chat(HELLO, max_tokens=4, temperature=0)
    assert first.cached_tokens <= 1  # what begins every text
    longer = [*HELLO, {"role": "assistant", "content": first.text}, {"role": "user", "content": "And the earth?"}]
    second = llm.chat(longer, max_tokens=4, temperature=0)
    assert second.cached_tokens >= first.prompt_tokens
    assert llm._session.tokens[second.prompt_tokens :] == list(second.tokens[:-1])
    llm.generate("x", max_tokens=1)
    anew = llm.chat(longer, max_tokens=4, temperature=0)
    assert (anew.cached_tokens <= 1, anew.prompt_tokens) == (True, second.prompt_tokens)
    assert anew.tokens == second.tokens
    assert llm.chat(longer, max_tokens=1).cached_tokens == second.prompt_tokens - 1  # all but the one to continue


@board
def test_a_chat_is_the_templates_text_with_its_tools(llm: LLM) -> None:
    tools = [{"type": "function", "function": {"name": "pray", "parameters": {}}}]
    with llm.stream(HELLO, tools=tools, max_tokens=1) as stream:
        list(stream)
    fed = llm._tokenizer.decode(llm._session.tokens, special=True)
    assert "<tools>" in fed
    assert '"pray"' in fed
    assert fed.endswith(f"<|im_start|>user\n{HELLO[0]['content']}<|im_end|>\n<|im_start|>assistant\n")


@board
def test_the_template_is_told_whether_to_have_the_model_think(llm: LLM) -> None:
    """Where a schema holds the answer it is told not to, unless the caller says so."""
    schema = {"type": "object"}
    for options, opened in (
        ({"thinking": True}, True), ({"thinking": False}, False), ({}, False), ({"schema": schema}, False),
        ({"schema": schema, "thinking": True}, True),
    ):  # fmt: skip
        with llm.stream(HELLO, **{"max_tokens": 1, **options}) as stream:
            next(stream, None)
        assert llm._tokenizer.decode(llm._session.tokens, special=True).endswith("<think>\n") is opened


TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "pray",
            "parameters": {
                "type": "object",
                "properties": {"times": {"enum": [3, 7]}},
                "required": ["times"],
            },
        },
    }
]


def test_what_goes_on_with_a_conversation_has_the_thought_which_the_template_keeps_or_not() -> None:
    reply = api.Reply("I look.", (), "stop", 1, 0, None, 0, thinking="Hm.")
    assert reply.message == {"role": "assistant", "content": "I look.", "reasoning_content": "Hm."}
    assert replace(reply, thinking="").message == {"role": "assistant", "content": "I look."}


@board
def test_a_chat_that_has_to_call_tells_its_call(llm: LLM) -> None:
    for choice in ("required", "pray"):
        reply = llm.chat(HELLO, tools=TOOLS, tool_choice=choice, temperature=0, max_tokens=300)
        assert reply.finish_reason == "stop"
        assert reply.text == reply.thinking == ""
        assert {call.name for call in reply.calls} == {"pray"}
        assert all(call.arguments in ({"times": 3}, {"times": 7}) for call in reply.calls)
    assert len(reply.calls) == 1
    assert reply.message["tool_calls"][0]["function"] == {"name": "pray", "arguments": reply.calls[0].json}
    again = [*HELLO, reply.message, {"role": "tool", "content": "Done."}]
    said = llm._rendered(again, TOOLS)
    assert '"arguments": {"times": ' in said
    assert "<tool_response>" in said
    with llm.stream(HELLO, tools=TOOLS, tool_choice="pray", temperature=0) as stream:
        told = list(stream.events())
    assert told[0] == Call(0, "pray")
    assert stream.reply.calls == Said.of(told).calls


@board
def test_an_answer_keeps_to_its_schema_or_grammar(llm: LLM) -> None:
    schema = {"type": "object", "properties": {"day": {"enum": ["first", "last"]}}, "required": ["day"]}
    reply = llm.generate(BEGIN, schema=schema, temperature=0, max_tokens=100)
    assert json.loads(reply.text)["day"] in ("first", "last")
    assert reply.finish_reason == "stop"
    assert llm.chat(HELLO, grammar='start: "Amen" "."{2}', max_tokens=20).text == "Amen.."


WRONG: dict[str, tuple[Callable[[LLM], Any], type[Exception], str]] = {
    "a name": (lambda llm: llm.generate("x", temprature=1), ArgumentError, "no option temprature: choose among max_to"),
    "both": (lambda llm: llm.generate("x", schema={}, grammar="start: /x/"), ArgumentError, "ask for one of them"),
    "a schema": (lambda llm: llm.generate("x", schema={"type": 3}), GrammarError, "not sound"),
    "a schema's type": (lambda llm: llm.generate("x", schema="{}"), ArgumentError, "as a dict"),
    "a tool": (lambda llm: llm.chat(HELLO, tools=TOOLS, tool_choice="rm"), GrammarError, "no tool 'rm'"),
    "calls": (lambda llm: llm.chat([*HELLO, {"role": "assistant", "tool_calls": [1]}]), ArgumentError, "as OpenAI has"),
    "no number": (lambda llm: llm.generate("x", temperature="hot"), ArgumentError, "temperature='hot' is no number"),
    "no whole one": (lambda llm: llm.generate("x", top_k=1.5), ArgumentError, "top_k=1.5 is no whole number"),
    "no tokens": (lambda llm: llm.generate("x", max_tokens=0), ArgumentError, "max_tokens=0: ask for at least 1"),
    "a seed": (lambda llm: llm.generate("x", seed=-1), ArgumentError, "seed=-1"),
    "a bias": (lambda llm: llm.generate("x", logit_bias={"a": 1}), ArgumentError, "give such as {13: -2.5}"),
    "biases": (lambda llm: llm.generate("x", logit_bias={9999: 1}), ModelError, "token 9999, outside of the vocabular"),
    "logprobs": (lambda llm: llm.generate("x", logprobs=21), ModelError, "of 0 to 20 likeliest tokens"),
    "a stop": (lambda llm: llm.generate("x", stop=3), ArgumentError, "stop=3 is neither"),
    "stops": (lambda llm: llm.generate("x", stop=["a", 3]), ArgumentError, "neither a text nor a list of texts"),
    "a setting": (lambda llm: llm.generate("x", top_p=0), ModelError, "give a top-p above 0 and up to 1"),
    "tools": (lambda llm: llm.stream("x", tools=[]), ArgumentError, "give messages"),
    "a thought": (lambda llm: llm.generate("x", thinking=False), ArgumentError, "for a chat's template: give messages"),
    "thinking": (lambda llm: llm.chat(HELLO, thinking="off"), ArgumentError, "neither True nor False nor None"),
    "messages": (lambda llm: llm.chat([{"content": "x"}]), ArgumentError, "messages are a list such as"),
    "no messages": (lambda llm: llm.chat([]), ArgumentError, "messages are a list such as"),
    "no prompt": (lambda llm: llm.stream(None), ArgumentError, "messages are a list such as"),
    "no JSON": (lambda llm: llm.chat([{"role": "user", "content": {1j}}]), ArgumentError, "what JSON cannot say"),
    "a long prompt": (lambda llm: llm.generate("x " * 200), ContextError, "exceed the context of 128.* up to 512"),
    "a long chat": (lambda llm: llm.chat([{**HELLO[0], "content": "x " * 200}]), ContextError, "context of 128"),
    "vectors": (lambda llm: llm.embed("x"), UnsupportedModelError, "not made for vectors of texts"),
}


@board
@pytest.mark.parametrize(("ask", "error", "said"), WRONG.values(), ids=WRONG)
def test_what_is_wrong_is_told_before_the_model_is_asked(
    llm: LLM, ask: Callable[[LLM], Any], error: type[Exception], said: str
) -> None:
    with pytest.raises(error, match=said) as raised:
        ask(llm)
    assert isinstance(raised.value, tegrad.TegradError)


@pytest.mark.parametrize(
    ("given", "error", "said"),
    [
        ({"model": "/nowhere/model.gguf"}, GgufError, "cannot open the model"),
        ({"context": 100_000}, ContextError, "ask for less"),
        ({"cache": "q4"}, ArgumentError, "choose among f16, q8_0"),
    ],
)
def test_what_is_wrong_with_a_model_is_told_before_a_device_is_opened(
    monkeypatch: pytest.MonkeyPatch, given: dict[str, Any], error: type[Exception], said: str
) -> None:
    monkeypatch.setattr(api, "choose_device", lambda *_, **__: pytest.fail("a device was chosen"))
    with pytest.raises(error, match=said):
        LLM(**{"model": models.SMALL, **given})


def test_device_and_cache_are_those_that_were_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Any] = []

    def speaker(
        file: Gguf, context: int, device: str, *, q8: bool, tell: Callable[[str], None], progress: object
    ) -> tuple[object, str]:
        tell("a note")
        asked.append((context, device, q8))
        return object(), "operations"

    monkeypatch.setattr(api, "choose_device", lambda device, tell: asked.append(device))
    monkeypatch.setattr("tegrad.llm.device.open_device", asked.append)
    monkeypatch.setattr(api, "speaker", speaker)
    with pytest.warns(UserWarning, match="a note"), LLM(str(models.SMALL), 64, cache="q8_0", gpu=1):
        pass
    assert asked == ["NV:1", "NV:1", (64, "NV:1", True)]


@board
def test_threads_get_their_own_answers_one_after_the_other(llm: LLM) -> None:
    prompts = [BEGIN, "And he said", "The LORD"]
    alone = [llm.generate(prompt, max_tokens=4, seed=5).tokens for prompt in prompts]
    with ThreadPoolExecutor(3) as pool:
        asked = [pool.submit(llm.generate, prompt, max_tokens=4, seed=5) for prompt in prompts]
        assert [each.result(PATIENCE_S).tokens for each in asked] == alone


@board
def test_a_stream_that_is_left_or_dropped_holds_nobody_and_one_that_is_overtaken_says_so(llm: LLM) -> None:
    with ThreadPoolExecutor(1) as pool:
        next(llm.stream(BEGIN, max_tokens=50))  # dropped
        assert pool.submit(llm.generate, BEGIN, max_tokens=1).result(PATIENCE_S).text
        for _ in (stream := llm.stream(BEGIN, max_tokens=50)):
            stream.close()
        assert pool.submit(llm.generate, BEGIN, max_tokens=1).result(PATIENCE_S).text
    older = llm.stream(BEGIN, max_tokens=50)
    next(older)
    assert llm.generate(BEGIN, max_tokens=1).text
    with pytest.raises(Cancelled, match="another request of the same thread"):
        next(older)
    assert list(older) == []


@board
def test_async_streams_have_their_answers_and_tell_what_is_wrong(llm: LLM) -> None:
    prompts = [BEGIN, "And he said"]
    alone = [llm.generate(prompt, max_tokens=4, seed=5) for prompt in prompts]

    async def ask(prompt: str) -> tuple[str, tuple[int, ...]]:
        stream = llm.astream(prompt, max_tokens=4, seed=5)
        assert stream.reply is None
        text = "".join([piece async for piece in stream])
        assert stream.reply is not None
        assert stream.reply.finish_reason == "length"
        return text, stream.reply.tokens

    async def both() -> list[tuple[str, tuple[int, ...]]]:
        with pytest.raises(ContextError):
            await anext(llm.astream("x " * 200))
        return await asyncio.gather(*map(ask, prompts))

    assert asyncio.run(both()) == [(reply.text, reply.tokens) for reply in alone]


@board
def test_a_stream_that_is_closed_while_its_request_is_made_says_nothing(
    llm: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    making, enough, asked, begun = threading.Event(), threading.Event(), llm._asked, list[api.Stream]()

    def slow(*given: Any, **named: Any) -> Any:
        making.set()
        assert enough.wait(PATIENCE_S)
        return asked(*given, **named)

    monkeypatch.setattr(llm, "_asked", slow)
    monkeypatch.setattr(api, "_read", lambda stream, *_: begun.append(stream))

    async def main() -> None:
        stream = llm.astream(BEGIN, max_tokens=3)
        first = asyncio.create_task(anext(stream, None))
        await asyncio.to_thread(making.wait, PATIENCE_S)
        await stream.aclose()
        enough.set()
        assert await first is None
        assert stream.reply is None

    asyncio.run(asyncio.wait_for(main(), PATIENCE_S))
    assert begun == []


@board
def test_a_cancelled_task_ends_its_answer_and_the_next_one_is_served(llm: LLM) -> None:
    async def tell(stream: api.AsyncStream, begun: asyncio.Event) -> None:
        async for _ in stream:
            begun.set()

    async def main() -> api.Reply:
        begun, stream = asyncio.Event(), llm.astream(BEGIN, max_tokens=None, top_k=1)
        task = asyncio.create_task(tell(stream, begun))
        await begun.wait()
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert [piece async for piece in stream] == []
        after = llm.astream(BEGIN, max_tokens=1)
        async for _ in after:
            pass
        assert after.reply is not None
        assert stream.reply is not None
        assert stream.reply.finish_reason is None
        return after.reply

    assert len(asyncio.run(asyncio.wait_for(main(), PATIENCE_S)).tokens) == 1
    for thread in [thread for thread in threading.enumerate() if thread.name == "tegrad-stream"]:
        thread.join(PATIENCE_S)
        assert not thread.is_alive()


@board
def test_vectors_are_those_of_the_engine(tiny: Path, device: str) -> None:
    texts = ["tea", "the sea"]
    with Gguf.open(tiny) as file, Engine(file, 64, device=device) as engine:
        tokenizer, vectors = Tokenizer(file), embeddings.Vectors(embeddings.Pooling.LAST)
        expected = [vectors.made(engine, embeddings.text_tokens(file, tokenizer, text)) for text in texts]
    with LLM(tiny, 64, gpu=device) as llm:
        assert llm.embed(texts).tolist() == np.array(expected).tolist()
        assert llm.embed("tea").tolist() == [expected[0].tolist()]
        assert llm.embed([]).shape == (0, 64)
        with pytest.raises(ContextError, match="context of 64"):
            llm.embed(["tea", "x" * 200])
        with pytest.raises(ArgumentError, match="texts=3 is neither"):
            llm.embed(3)  # type: ignore[arg-type]
        with pytest.raises(UnsupportedModelError, match="has no chat template: use generate"):
            llm.chat(HELLO)


@board
def test_to_close_a_model_ends_what_runs_and_what_waits(tiny: Path, device: str) -> None:
    llm, begun = LLM(tiny, 128, gpu=device), threading.Event()
    suspended = llm.stream("tea", max_tokens=2)

    def read() -> None:
        for _ in llm.stream("tea", max_tokens=None, temperature=5, min_p=0.0):
            begun.set()
            threading.Event().wait(0.01)

    with ThreadPoolExecutor(2) as pool:
        running = pool.submit(read)
        assert begun.wait(PATIENCE_S)
        waiting = pool.submit(llm.generate, "sea")
        llm.close()
        for each in (running, waiting):
            with pytest.raises(ClosedError, match="this model was closed"):
                each.result(PATIENCE_S)
    for ask in (lambda: next(suspended), lambda: llm.generate("x"), lambda: llm.embed("x"), lambda: llm.chat(HELLO)):
        with pytest.raises(ClosedError, match="open it anew"):
            ask()
    llm.close()
    with pytest.raises(ModelError, match="this engine was closed"):
        llm._session.feed([1])


def test_a_turn_may_be_lost_between_two_tokens_though_they_have_no_text() -> None:
    class Saying:
        tokens: ClassVar[list[int]] = []
        logprobs: ClassVar[list[object]] = []

        def reset(self, keep: int) -> None: ...

        def generate(self, *_: object, mask: object) -> Iterator[int]:
            yield from range(9)

    turn = api._Turn(Saying(), keep=False)  # type: ignore[arg-type]
    tokens = turn.generate([1], Sampler())
    assert next(tokens) == 0
    turn.ended = ClosedError("this model was closed")
    with pytest.raises(ClosedError):
        next(tokens)


@board
def test_tinygrads_operations_answer_by_the_same_methods(
    tmp_path: Path, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tegrad.llm.engine.suits_named", lambda _: False)
    shape = Shape(dim=64, ffn=64, heads=2, kv_heads=1, layers=1)
    template = "{% for one in messages %}{{ one.content }}{% endfor %}"
    path = write(tmp_path / "m.gguf", shape, TYPE.F32, vocabulary=replace(letters(300), template=template))
    with LLM(path, 64, gpu=device) as llm:
        assert llm.steps == "operations"
        assert llm.count(HELLO) == llm.count(HELLO[0]["content"])  # the begin token, which the template leaves out
        first, second = (llm.chat(HELLO, max_tokens=3, temperature=0) for _ in range(2))
        assert len(first.tokens) == 3
        assert (first.tokens, first.prompt_tokens - 1) == (second.tokens, second.cached_tokens)
        with pytest.raises(ModelError, match="only our own kernels have a q8_0 cache"):
            LLM(path, 64, cache="q8_0", gpu=device)


@board
def test_what_a_request_does_not_say_is_the_models_own(tmp_path: Path, device: str) -> None:
    """A top-k of 1 takes the likeliest token at any temperature."""
    extra = {"general.sampling.temp": 1.5, "general.sampling.top_k": 1, "general.sampling.penalty_last_n": 8}
    path = write(tmp_path / "m.gguf", Shape(layers=1, extra=extra), TYPE.Q8_0, vocabulary=letters(300))
    with LLM(path, 64, gpu=device) as llm:
        assert llm.options() == {**DEFAULTS, "temperature": 1.5, "top_k": 1, "repeat_last_n": 8}
        assert llm.options(top_k=3, stop="a") == {**llm.options(), "top_k": 3, "stop": "a"}
        likeliest = llm.generate("zyx", max_tokens=6, temperature=0)
        for seed in range(3):
            assert llm.generate("zyx", max_tokens=6, seed=seed).tokens == likeliest.tokens
        assert any(
            llm.generate("zyx", max_tokens=6, seed=seed, top_k=0).tokens != likeliest.tokens for seed in range(3)
        )
        with pytest.raises(ArgumentError, match="temperature='hot'"):
            llm.generate("zyx", temperature="hot")  # type: ignore[arg-type]


def test_defaults_are_those_of_tegrad_run() -> None:
    import inspect

    from tegrad.cli.run import run

    told = {name: value.default for name, value in inspect.signature(run).parameters.items()}
    same = DEFAULTS.keys() - {"max_tokens", "stop", "logit_bias", "logprobs", "thinking"}
    assert {name: told[name] for name in same} == {name: dict(DEFAULTS)[name] for name in same}
