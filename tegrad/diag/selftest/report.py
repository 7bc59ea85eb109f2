"""What a self-test is told as: one JSON document to send, and one page to read."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from tegrad.diag.selftest.runner import Outcome

MARKS = {
    "right": "right   ",
    "failed": "FAILED  ",
    "hung": "HUNG    ",
    "crashed": "CRASHED ",
    "interrupted": "ended   ",
    "not here": "not here",
    "not applicable": "n/a     ",
    "not run": "not run ",
}


def document(outcomes: Sequence[Outcome], about: Mapping[str, Any], board: str) -> dict[str, Any]:
    """Everything that somebody elsewhere needs; `about` says what ran, and on what. `board` is "" on a device."""
    return {
        **about,
        "board": board,
        "chip": chip(outcomes),
        "counts": dict(Counter(outcome.state for outcome in outcomes)),
        "stages": [_row(outcome, bool(board)) for outcome in outcomes],
    }


def chip(outcomes: Sequence[Outcome]) -> str:
    """The chip, by the first stage that tells; "" where none came so far."""
    return next((str(outcome.facts["chip"]) for outcome in outcomes if "chip" in outcome.facts), "")


def _row(outcome: Outcome, board: bool) -> dict[str, Any]:
    stage = outcome.stage
    row: dict[str, Any] = {"name": stage.name, "what": stage.sentence, "state": outcome.state}
    row["seconds"] = round(outcome.seconds, 3)
    if stage.unit:
        row["amount"] = {"unit": stage.unit, "here": stage.share(board), "on a device": stage.amount}
    if outcome.bad:
        row |= {"step": outcome.step, "means": stage.means, "next": outcome.next_step or stage.next_step}
    elif outcome.ended:
        row["step"] = outcome.step
    told = {key: text for key in ("expected", "seen", "detail") if (text := getattr(outcome, key))}
    return row | told | {"facts": outcome.facts, "lines": outcome.lines}


def lines(outcome: Outcome) -> list[str]:
    """An outcome for the terminal: one line, and more where it teaches something."""
    at = f", at: {outcome.step}" if (outcome.bad or outcome.ended) and outcome.step else ""
    told = [f"{MARKS[outcome.state]}  {outcome.stage.name:12} {outcome.stage.sentence} [{outcome.seconds:.1f} s]{at}"]
    told += [f"            {line}" for line in outcome.lines]
    if outcome.bad:
        told += [
            f"            expected {outcome.expected}; seen: {outcome.seen}",
            f"            what it means: {outcome.stage.means}",
            f"         -> {outcome.next_step or outcome.stage.next_step}",
        ]
    elif outcome.detail:
        told.append(f"            {outcome.detail}")
    return told


def summary(outcomes: Sequence[Outcome]) -> str:
    """How many stages came to what."""
    counts = Counter(outcome.state for outcome in outcomes)
    stages = "1 stage" if len(outcomes) == 1 else f"{len(outcomes)} stages"
    return f"{stages}: " + ", ".join(f"{count} {state}" for state, count in counts.items())


def advice(outcomes: Sequence[Outcome], board: str) -> Iterator[str]:
    """What the owner of the machine does now, a sentence each."""
    yield from (
        f"{outcome.stage.name} {outcome.state}: {outcome.next_step or outcome.stage.next_step}"
        for outcome in outcomes
        if outcome.bad
    )
    if any(outcome.ended for outcome in outcomes):
        yield "the run was ended by a signal: start it again for what is left"
    elif not any(outcome.bad for outcome in outcomes):
        ran = "nothing that was tried went wrong"
        yield f"{ran} on the board: run `tegrad selftest` on a Jetson" if board else f"{ran}: `tegrad run` is next"
    if not board:
        yield "send the JSON report to the project that tegrad came from, even if all is right"


def page(outcomes: Sequence[Outcome], about: Mapping[str, Any], board: str) -> str:
    """The same as a page of Markdown."""
    ran, on = about["versions"], about["machine"]
    where = f"the emulated board {board}: this says nothing of a Jetson" if board else "this machine's own driver"
    named = f", {found}" if (found := chip(outcomes)) else ""
    head = [
        "# tegrad selftest",
        "",
        f"On {where}{named}. {about['date']}, tegrad {ran['tegrad']}, sources {ran['tegrad_sources']}, "
        f"Linux {on['kernel']}, Python {on['python']}.",
        "",
        f"{summary(outcomes)}.",
        "",
        "## What to do next",
        "",
        *(f"- {text}" for text in advice(outcomes, board)),
    ]
    return "\n".join(head + [text for outcome in outcomes for text in _section(outcome, bool(board))]) + "\n"


def _section(outcome: Outcome, board: bool) -> list[str]:
    stage = outcome.stage
    told = ["", f"## {stage.name}: {outcome.state}", "", f"{stage.sentence}. {outcome.seconds:.1f} s."]
    if stage.unit:
        told.append(f"{stage.share(board)} {stage.unit} here, {stage.amount} on a device.")
    if outcome.bad:
        told += [
            "",
            f"- at: {outcome.step or 'its start'}",
            f"- expected: {outcome.expected}",
            f"- seen: {outcome.seen}",
            f"- what it means: {stage.means}",
            f"- **next: {outcome.next_step or stage.next_step}**",
        ]
    elif outcome.ended:
        told += ["", f"- at: {outcome.step or 'its start'}"]
    if outcome.lines:
        told += ["", *(f"- {line}" for line in outcome.lines)]
    if outcome.detail:
        told += ["", "```", outcome.detail.strip(), "```"]
    facts = [f"| {name} | {_shown(value)} |" for name, value in outcome.facts.items()]
    return told + (["", "| fact | |", "|---|---|", *facts] if facts else [])


def _shown(value: object) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, dict):
        if value and all(isinstance(one, bool) for one in value.values()):
            names = {
                word: [key for key in value if value[key] is is_so] for word, is_so in (("yes", True), ("no", False))
            }
            return "; ".join(f"{word}: {', '.join(keys)}" for word, keys in names.items() if keys)
        return ". ".join(f"{key}: {_shown(one)}" for key, one in value.items())
    if isinstance(value, list):
        return " ".join(map(_shown, value))
    return str(value).replace("|", "\\|").replace("\n", " ")
