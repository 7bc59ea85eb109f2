"""A conversation forgets its oldest turns and nothing else, and comes back from a file as it was."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from talking import Model

from tegrad.chat.talk import SETTINGS, Talk, TalkError
from tegrad.errors import TegradError
from tegrad.llm.errors import GgufError, ModelError


def talk(context: int = 40, system: str = "", turns: int = 0) -> Talk:
    made = Talk(lambda name: Model(context, name=name), "a", system)  # type: ignore[arg-type, return-value]
    for at in range(turns):
        made.ask(f"question {at}")
        made.answered(f"answer {at}")
    return made


def test_the_oldest_turns_go_and_the_system_prompt_stays() -> None:
    """4 tokens a message: 5 turns and a question are 44, and with the system prompt 48 of 60; 45 may be used."""
    made = talk(60, "be brief", 5)
    made.ask("question 5")
    assert made.fit() == 3
    told = made.told()
    assert [one["content"] for one in told] == [
        "be brief",
        *(f"{kind} {at}" for at in (3, 4) for kind in ("question", "answer")),
        "question 5",
    ]
    assert made.llm.count(told) <= 60 // 2
    assert len(made.messages) == 11
    assert made.fit() == 0


def test_a_question_alone_stays_however_long_it_is() -> None:
    made = talk(20, turns=1)
    made.ask("word " * 30)
    assert made.fit() == 1
    assert [one["content"] for one in made.told()] == ["word " * 30]
    made.take_back()
    assert len(made.messages) == 2


def test_settings_are_checked_before_they_are_taken() -> None:
    made = talk()
    made.set("temperature", "0.25")
    made.set("top_k", "40")
    made.set("seed", "random")
    assert made.options == {"temperature": 0.25, "top_k": 40, "seed": None}
    for name, value, said in (
        ("temprature", "1", "there is no setting temprature: choose among"),
        ("temperature", "hot", "hot is no number: give one, or none"),
        ("temperature", "-1", "cannot sample"),
        ("top_k", "1.5", "top_k=1.5 is no whole number"),
        ("thinking", "1", "thinking is on, off, or none for the template's own way, not 1"),
    ):
        with pytest.raises(TegradError, match=said):
            made.set(name, value)
    assert made.options == {"temperature": 0.25, "top_k": 40, "seed": None}
    for word, value in (("on", True), ("off", False), ("none", None)):
        made.set("thinking", word)
        assert made.options["thinking"] is value
    with pytest.raises(ModelError):
        Talk(lambda _: Model(), "a", options={"top_p": 0.0})  # type: ignore[arg-type, return-value]


def test_a_file_brings_everything_back(tmp_path: Path) -> None:
    made = talk(system="be brief", turns=3)
    made.set("temperature", "0.25")
    made.save(tmp_path / "talk.json")
    made.first = 2
    other = talk(turns=1)
    other.load(tmp_path / "talk.json")
    assert (other.system, other.options, other.messages, other.first) == (made.system, made.options, made.messages, 0)


WRONG: dict[str, Any] = {
    "no JSON": "{",
    "another's": {"messages": []},
    "a number": 3,
    "an answer first": {"system": "", "options": {}, "messages": [{"role": "assistant", "content": "x"}] * 2},
    "half a turn": {"system": "", "options": {}, "messages": [{"role": "user", "content": "x"}]},
    "no text": {"system": "", "options": {}, "messages": [{"role": "user", "content": 3}, {"role": "assistant"}]},
    "a strange option": {"system": "", "options": {"stop": "x"}, "messages": []},
    "a wrong option": {"system": "", "options": {"temperature": "hot"}, "messages": []},
}


@pytest.mark.parametrize("content", WRONG.values(), ids=WRONG)
def test_a_file_that_is_no_conversation_changes_nothing(tmp_path: Path, content: object) -> None:
    (tmp_path / "x.json").write_text(content if isinstance(content, str) else json.dumps(content))
    made = talk(turns=1)
    with pytest.raises(TegradError, match=r"give a file that /save wrote|is no number"):
        made.load(tmp_path / "x.json")
    assert (len(made.messages), made.options) == (2, {})


def test_files_that_cannot_be_are_said(tmp_path: Path) -> None:
    made = talk(turns=1)
    with pytest.raises(TalkError, match=r"cannot read .*: No such file"):
        made.load(tmp_path / "none.json")
    with pytest.raises(TalkError, match=r"cannot write .*; give another file"):
        made.save(Path("/dev/null/x.json"))


def test_a_model_that_does_not_open_leaves_the_one_of_before() -> None:
    opened: list[Model] = []

    def opening(name: str) -> Model:
        if name == "broken":
            raise GgufError("broken is not a GGUF file")
        opened.append(Model(name=name))
        return opened[-1]

    made = Talk(opening, "a")  # type: ignore[arg-type]
    made.ask("x")
    made.answered("y")
    with pytest.raises(GgufError):
        made.change("broken")
    assert ([one.name for one in opened], made.model, opened[0].closed) == (["a", "a"], "a", True)
    made.change("b")
    assert (made.model, opened[-1].name, opened[1].closed, len(made.messages)) == ("b", "b", True, 2)


def test_an_answer_may_be_asked_for_again_where_there_is_one() -> None:
    made = talk(turns=2)
    made.again()
    assert made.messages[-1] == {"role": "user", "content": "question 1"}
    made.reset()
    with pytest.raises(TalkError, match="nothing was said yet"):
        made.again()


def test_every_option_of_an_answer_is_a_setting_or_has_no_line() -> None:
    assert {"temperature", "max_tokens", "seed", "repeat_penalty"} <= set(SETTINGS)
