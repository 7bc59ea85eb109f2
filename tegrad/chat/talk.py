"""A conversation: what was said, how answers are drawn, what of it the model's context still holds, and its file."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from tegrad.errors import TegradError
from tegrad.kept import write_whole
from tegrad.llm.api import LLM, WHOLE, Stream, check
from tegrad.llm.sampler import SAMPLED

SETTINGS: Final = tuple(sorted({*SAMPLED, *WHOLE, "thinking"} - {"logprobs"}))
"""Options that `/set` changes."""
SWITCH: Final[Mapping[str, bool | None]] = {"on": True, "off": False, "none": None}
"""What `thinking` may be; none leaves it to the template."""
ANSWER_SHARE: Final = 4
"""Of the context, this part is kept free for an answer."""
DROP_SHARE: Final = 2
"""Where turns have to go, so many go that the rest takes this part of the context: the next answers need no more."""

Message = dict[str, str]


class TalkError(TegradError):
    """Something that this conversation cannot do."""

    exit_code = 2


@dataclass
class Talk:
    """`open` loads a model by its name or path. The conversation goes on when the model is another."""

    open: Callable[[str], LLM]
    model: str
    system: str = ""
    options: dict[str, Any] = field(default_factory=dict)
    messages: list[Message] = field(default_factory=list)
    """All that was said, a question and an answer in turn."""
    first: int = 0
    """The first message that the model is still told."""

    def __post_init__(self) -> None:
        check(self.options)
        self.llm = self.open(self.model)

    # ---- turns

    def told(self) -> list[Message]:
        """What the model is told."""
        system = [{"role": "system", "content": self.system}] if self.system else []
        return [*system, *self.messages[self.first :]]

    def fit(self) -> int:
        """Leave the oldest turns out where the context has no room for them and an answer. Returns how many."""
        context, dropped = self.llm.context, 0
        limit = context - context // ANSWER_SHARE
        while len(self.messages) - self.first > 2 and self.llm.count(self.told()) > limit:
            self.first += 2
            dropped += 1
            limit = context // DROP_SHARE
        return dropped

    def begin(self) -> Stream:
        """The answer to the last question, as it comes. What `LLM.stream` raises."""
        return self.llm.stream(self.told(), **self.options)

    def ask(self, question: str) -> None:
        """Add a question, which `answered` or `take_back` follows."""
        self.messages.append({"role": "user", "content": question})

    def answered(self, answer: str) -> None:
        """Add the answer."""
        self.messages.append({"role": "assistant", "content": answer})

    def take_back(self) -> None:
        """Remove the last question, which has no answer."""
        self.messages.pop()

    def again(self) -> None:
        """Take back the last answer. TalkError where there is none."""
        if not self.messages:
            raise TalkError("nothing was said yet: ask something first")
        self.messages.pop()

    def reset(self) -> None:
        """Forget what was said; the system prompt and the settings stay."""
        self.messages, self.first = [], 0

    # ---- settings, the model

    def set(self, name: str, value: str) -> None:
        """Change a setting. TalkError for one that there is not, ModelError for a value without meaning."""
        if name not in SETTINGS:
            raise TalkError(f"there is no setting {name}: choose among {', '.join(SETTINGS)}")
        changed = {**self.options, name: _switched(value) if name == "thinking" else _number(value)}
        check(changed)
        self.options = changed

    def change(self, model: str) -> None:
        """Go on with another model; with the one of before where that fails, whose error is raised."""
        with suppress(TegradError):  # of a device that was lost
            self.llm.close()
        try:
            self.llm = self.open(model)
        except (TegradError, KeyboardInterrupt):
            self.llm = self.open(self.model)
            raise
        self.model, self.first = model, 0

    # ---- files

    def save(self, path: Path) -> None:
        """Write everything but the model itself as JSON. TalkError."""
        whole = {"model": self.model, "system": self.system, "options": self.options, "messages": self.messages}
        try:
            write_whole(path, json.dumps(whole, indent=2, ensure_ascii=False).encode() + b"\n")
        except OSError as error:
            raise TalkError(f"cannot write {path}: {error.strerror}; give another file") from error

    def load(self, path: Path) -> None:
        """Go on with a conversation that was saved, with the model that is here. TalkError."""
        try:
            found = json.loads(path.read_bytes())
        except (OSError, ValueError, RecursionError) as error:
            why = error.strerror if isinstance(error, OSError) else "it is no JSON"
            raise TalkError(f"cannot read {path}: {why}; give a file that /save wrote") from error
        if not _is_saved(found):
            raise TalkError(f"{path} is no conversation: give a file that /save wrote")
        check(found["options"])
        self.system, self.options, self.messages, self.first = found["system"], found["options"], found["messages"], 0


def _switched(text: str) -> bool | None:
    if text.lower() not in SWITCH:
        raise TalkError(f"thinking is on, off, or none for the template's own way, not {text}")
    return SWITCH[text.lower()]


def _number(text: str) -> int | float | None:
    if text.lower() in ("none", "off", "random"):
        return None
    try:
        return int(text)
    except ValueError:
        pass
    try:
        return float(text)
    except ValueError:
        raise TalkError(f"{text} is no number: give one, or none") from None


def _is_saved(found: object) -> bool:
    """Whether a file's JSON is what `save` writes: texts, settings, and turns of a question and an answer."""
    match found:
        case {"system": str(), "options": dict(options), "messages": list(messages)} if set(options) <= set(SETTINGS):
            turns = zip(messages, ("user", "assistant") * (len(messages) // 2), strict=False)
            return len(messages) % 2 == 0 and all(_is_message(one, role) for one, role in turns)
    return False


def _is_message(one: object, role: str) -> bool:
    return isinstance(one, Mapping) and one.get("role") == role and isinstance(one.get("content"), str)
