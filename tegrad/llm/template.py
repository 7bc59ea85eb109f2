"""A model's chat template, run in a process of its own: a downloaded model must neither run code of its own, nor take
more time and memory than a template needs.

`sandbox` is that process. It starts with a template and ends with it; one that was ended is started anew.
"""

from __future__ import annotations

import json
import signal
import subprocess
import threading
import weakref
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import Any, Final, Self

from tegrad.installed import isolated
from tegrad.llm.errors import UnsupportedModelError
from tegrad.llm.gguf import Gguf, shown
from tegrad.llm.pieces import NUMBERS
from tegrad.llm.serial import ClosedError

KEY: Final = "tokenizer.chat_template"
WITH_TOOLS: Final = f"{KEY}.tool_use"
"""A second template, of conversations with tools, that such files as Hermes' have."""
_INST: Final = """
{%- set turn = namespace(begun=false) %}
{%- for message in messages %}
    {%- if not turn.begun %}{{- front + '[INST]' + space }}{% set turn.begun = true %}{% endif %}
    {%- if message.role == 'system' %}{{- message.content + '\\n\\n' }}
    {%- elif message.role == 'user' %}{{- message.content + front + '[/INST]' }}
    {%- elif message.role == 'assistant' %}
        {{- space + (message.content | trim if trims else message.content) + '</s>' }}{% set turn.begun = false %}
    {%- else %}{{- raise_exception('no role ' + message.role) }}{% endif %}
{%- endfor %}"""
_SYSTEM_PROMPT: Final = """
{%- for message in messages %}
    {%- if message.role == 'system' %}{{- '[SYSTEM_PROMPT]' + space + message.content + '[/SYSTEM_PROMPT]' }}
    {%- elif message.role == 'user' %}{{- '[INST]' + space + message.content + '[/INST]' }}
    {%- elif message.role == 'assistant' %}{{- space + message.content + '</s>' }}
    {%- else %}{{- raise_exception('no role ' + message.role) }}{% endif %}
{%- endfor %}"""
NAMED: Final[Mapping[str, str]] = {
    "mistral-v1": "{%- set front, space, trims = ' ', ' ', false %}" + _INST,
    "mistral-v3": "{%- set front, space, trims = '', ' ', true %}" + _INST,
    "mistral-v3-tekken": "{%- set front, space, trims = '', '', false %}" + _INST,
    "mistral-v7": "{%- set space = ' ' %}" + _SYSTEM_PROMPT,
    "mistral-v7-tekken": "{%- set space = '' %}" + _SYSTEM_PROMPT,
}
"""By the names that llama.cpp's converter writes in place of a template where a model of Mistral's brings none."""
REPLIES: Final[Mapping[str, str]] = {"<turn|>\n": "<|turn>model\n"}
"""What follows such an end of a text where an answer begins: Gemma 4's template leaves it out after a message that both
says something and calls."""
CPU_LIMIT_S: Final = 3.0
"""That a template may compute to be compiled, and for a text."""
WALL_LIMIT_S: Final = 9.0
"""Seconds after which it is ended though it did not get to compute that long."""
MOST_MEMORY_BYTES: Final = 512 << 20
"""Bytes that its process may have of its own."""
MOST_CHARACTERS: Final = 1 << 20
"""Characters of a template, and of what it adds to the messages."""
MOST_GROWTH: Final = 8
"""Times that a template may write what it was given, which JSON makes longer."""

REFUSALS: Final[Mapping[str, str]] = {
    "unsound": "is not sound ({said})",
    "failed": "failed ({said})",
    "refused": "refuses: {said}",
    "long": "writes more than {limit:,} characters",
    "memory": f"needs more than {MOST_MEMORY_BYTES >> 20} MiB of memory",
    "deep": "is nested too deeply",
    "bytes": "is not sound (its text is not UTF-8)",
    "slow": f"takes more than {CPU_LIMIT_S:g} seconds",
    "ended": "cannot be run ({said})",
}


def source_of(metadata: Mapping[str, object], *, tools: bool) -> str:
    """The template that a file's metadata has for conversations, with tools or without; "" for none."""
    found = next((metadata[key] for key in (WITH_TOOLS, KEY)[not tools :] if key in metadata), "")
    return NAMED.get(found, found) if isinstance(found, str) else ""


class TemplateRefusalError(UnsupportedModelError):
    """The template refused the messages (its own raise_exception) or cannot be run."""

    of_messages = False
    """Whether it may take others."""


class Template:
    """Messages to the text that the model was trained on. One thread at a time; `close` ends its process."""

    def __init__(self, source: str, bos: str = "", eos: str = "", with_tools: str = "") -> None:
        """`with_tools`, if there is any, is the source for conversations with tools."""
        if len(source) > MOST_CHARACTERS:
            raise TemplateRefusalError(f"the model's chat template has {len(source):,} characters")
        self._source, self._with_tools = source, with_tools
        self._other: Template | None = None
        """The one with tools, once it was asked for."""
        self._tokens = {"bos_token": bos, "eos_token": eos}
        self._lock = threading.Lock()
        self._closes = 0
        self._end: Callable[[], object] = lambda: None
        self._process = self._started()

    @classmethod
    def of(cls, file: Gguf) -> Self | None:
        """The template of a file, or None where it has none."""
        if not isinstance(file.metadata.get(KEY), str):
            return None
        source, second = source_of(file.metadata, tools=False), file.metadata.get(WITH_TOOLS)
        if source.strip() and "{" not in source:
            raise TemplateRefusalError(f"the model's chat template is {shown(source)}, a name that we do not know")
        return cls(source, _token(file, "bos"), _token(file, "eos"), second if isinstance(second, str) else "")

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        reply: bool = True,
        **values: Any,
    ) -> str:
        """The text of messages ({"role", "content", ...}); with `reply`, up to where the model's answer begins.

        All that it is given is what JSON can say. TemplateRefusalError, ClosedError.
        """
        if tools and self._with_tools:
            with self._lock:
                self._other = self._other or Template(self._with_tools, *self._tokens.values())
            return self._other.render(messages, tools=tools, reply=reply, **values)
        given = {"documents": None, **self._tokens, **values}
        given |= {"messages": messages, "tools": tools, "add_generation_prompt": reply}
        if "enable_thinking" in values and "enable_thinking" not in self._source:
            given.setdefault("thinking", values["enable_thinking"])  # Granite 3's and DeepSeek 3.1's name for it
        if values.get("enable_thinking") is False and "thinking_budget" in self._source:
            given.setdefault("thinking_budget", 0)  # Seed-OSS's
        if tools and "xml_tools" in self._source and not {"xml_tools", "python_tools"} & values.keys():
            given["xml_tools"] = [tool.get("function", tool) for tool in tools]  # SmolLM3's name for them
        request = json.dumps({"values": given}, default=dict)
        limit = MOST_CHARACTERS + MOST_GROWTH * len(request)
        with self._lock:
            closes = self._closes
            try:
                if self._process.poll() is not None:
                    self._process = self._started()
                text = self._ask(self._process, f'{request[:-1]}, "limit": {limit}}}', limit)
            except TemplateRefusalError:
                if self._closes != closes:
                    raise ClosedError("the model was closed while its chat template was run: ask again") from None
                raise
        if reply:
            text += next((begin for end, begin in REPLIES.items() if text.endswith(end)), "")
        # What is no character, such as a half of one out of the file's tokens, could not be encoded.
        return text if text.isascii() else text.encode("utf-8", "replace").decode()

    def close(self) -> None:
        """End the process, whatever it does; a rendering ends with a ClosedError, and another one starts a process."""
        self._closes += 1
        self._end()
        if self._other is not None:
            self._other.close()

    def _started(self) -> subprocess.Popen[bytes]:
        """A process that has compiled the template."""
        self._end()
        try:
            process = subprocess.Popen(
                isolated("tegrad.llm.sandbox"), stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL
            )
        except OSError as error:
            raise _refusal("ended", f"no process for it: {error.strerror}") from error
        self._end = weakref.finalize(self, _ended, process)
        _running.add(process)
        bounds = json.dumps({"seconds": CPU_LIMIT_S, "patience": WALL_LIMIT_S, "memory": MOST_MEMORY_BYTES})
        self._ask(process, f"{bounds}\n{json.dumps({'source': self._source})}")
        return process

    def _ask(self, process: subprocess.Popen[bytes], request: str, limit: int = 0) -> str:
        """The answer to a request; whatever ends the waiting for it ends the process."""
        assert process.stdin is not None
        assert process.stdout is not None
        line = b""
        try:
            with suppress(BrokenPipeError, ValueError):  # how it ended says why; its pipes may be closed
                process.stdin.write(request.encode() + b"\n")
                process.stdin.flush()
                line = process.stdout.readline()
        finally:
            if not line.endswith(b"\n"):
                self._end()
        if not line.endswith(b"\n"):
            code = process.wait()
            if code == -signal.SIGINT:
                raise KeyboardInterrupt
            slow = code in (-signal.SIGPROF, -signal.SIGALRM)
            raise _refusal("slow" if slow else "ended", f"its process ended with code {code}")
        answer: dict[str, str] = json.loads(line)
        if "text" in answer:
            return answer["text"]
        raise _refusal(answer["error"], answer["said"], limit)


def interrupt() -> None:
    """Ctrl-C for every rendering of this process, in whatever thread: there it is a KeyboardInterrupt, too."""
    for process in list(_running):
        process.send_signal(signal.SIGINT)


_running: Final = weakref.WeakSet[subprocess.Popen[bytes]]()


def _refusal(error: str, said: str, limit: int = 0) -> TemplateRefusalError:
    why = REFUSALS[error].format(said=said, limit=limit)
    made = TemplateRefusalError(f"the model's chat template {why}")
    made.of_messages = error in ("failed", "refused")
    return made


def _ended(process: subprocess.Popen[bytes]) -> None:
    """End a process, and close what leads to it."""
    process.kill()
    process.wait()
    for pipe in (process.stdin, process.stdout):
        with suppress(BrokenPipeError):
            if pipe is not None:
                pipe.close()


def _token(file: Gguf, name: str) -> str:
    tokens, kind = file.metadata.get("tokenizer.ggml.tokens"), file.metadata.get("tokenizer.ggml.model")
    numbers = file.metadata.get(f"tokenizer.ggml.{name}_token_id"), NUMBERS[name] if kind == "llama" else None
    if isinstance(tokens, list):
        for number in numbers:  # the usual one where the file names none that it has
            if isinstance(number, int) and 0 <= number < len(tokens):
                return str(tokens[number])
    return ""
