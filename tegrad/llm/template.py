"""A model's chat template, run in jinja2's immutable sandbox: a downloaded model must not run code of its own."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any, Final, Self

from jinja2 import TemplateError
from jinja2.sandbox import ImmutableSandboxedEnvironment

from tegrad.llm.errors import UnsupportedModelError
from tegrad.llm.gguf import Gguf

KEY: Final = "tokenizer.chat_template"


class TemplateRefusalError(UnsupportedModelError):
    """The template refused the messages (its own raise_exception) or cannot be run."""


class Template:
    """Messages to the text that the model was trained on."""

    def __init__(self, source: str, bos: str = "", eos: str = "") -> None:
        self._tokens = {"bos_token": bos, "eos_token": eos}
        # What Hugging Face's transformers offer to a template, which is what templates are written for.
        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"]
        )
        environment.filters["tojson"] = _to_json
        environment.globals["raise_exception"] = _refuse
        environment.globals["strftime_now"] = lambda form: datetime.now().strftime(form)
        try:
            self._template = environment.from_string(source)
        except TemplateError as error:
            raise TemplateRefusalError(f"the model's chat template is not sound ({error}); use --raw") from error

    @classmethod
    def of(cls, file: Gguf) -> Self | None:
        """The template of a file, or None where it has none."""
        source = file.metadata.get(KEY)
        if not isinstance(source, str):
            return None
        return cls(source, _token(file, "bos"), _token(file, "eos"))

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        reply: bool = True,
        **values: Any,
    ) -> str:
        """The text of messages ({"role", "content", ...}); with `reply`, up to where the model's answer begins."""
        try:
            return self._template.render(
                messages=messages, tools=tools, add_generation_prompt=reply, **self._tokens, **values
            )
        except TemplateRefusalError:
            raise
        except Exception as error:  # a template can raise anything that its expressions can
            raise TemplateRefusalError(f"the model's chat template failed ({error}); use --raw") from error


def _token(file: Gguf, name: str) -> str:
    tokens, number = file.metadata.get("tokenizer.ggml.tokens"), file.metadata.get(f"tokenizer.ggml.{name}_token_id")
    if isinstance(tokens, list) and isinstance(number, int) and 0 <= number < len(tokens):
        return str(tokens[number])
    return ""


def _to_json(value: Any, indent: int | None = None, ensure_ascii: bool = False, **_: Any) -> str:
    """Plain JSON: jinja2's own filter escapes it for HTML."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent)


def _refuse(message: str) -> None:
    raise TemplateRefusalError(f"the model's chat template refuses: {message}")
