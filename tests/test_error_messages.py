"""Every message of an error reads alike: "what is wrong: what to do", as `TegradError` says it."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import tegrad

VERBS = (
    "allow ask cache check choose close convert copy download end fetch free get give install kill leave load look",
    "make map measure pass put quantize record rename report run see send set start submit try unset use write",
)


def messages() -> Iterator[tuple[str, str]]:
    """Where a message is raised, and its text, with {} for what is put in."""
    root = Path(tegrad.__file__).parent
    for path in sorted(root.rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Raise) and isinstance(node.exc, ast.Call):
                texts = (text(argument) for argument in node.exc.args)
                for found in [one for one in texts if " " in one][:1]:
                    yield f"{path.relative_to(root)}:{node.lineno}", found


def text(node: ast.AST) -> str:
    match node:
        case ast.Constant(str(value)):
            return value
        case ast.JoinedStr(values):
            return "".join(text(value) for value in values)
        case ast.BinOp(left, ast.Add(), right):
            return text(left) + text(right)
    return "{}"


def faults(message: str) -> list[str]:
    first = message.split()[0]
    found = []
    if message.endswith("."):
        found.append("ends with a period")
    if re.search(r"\. [A-Z]", message):
        found.append("is two sentences")
    if re.fullmatch(r"[A-Z][a-z]*[,:]?", first):
        found.append("begins with a capital, and not with a name")
    if (to_do := re.search(rf"[^}}]; (please )?({'|'.join(' '.join(VERBS).split())})\b", message)) and (
        ":" not in message[: to_do.start()]
    ):
        found.append("has a semicolon before what to do, and no colon before that")
    return found


def test_messages_of_errors_read_alike() -> None:
    found = dict(messages())
    assert len(found) > 600
    assert {where: (told, message) for where, message in found.items() if (told := faults(message))} == {}


def test_what_does_not_read_alike_is_noticed() -> None:
    assert faults("cannot read {}: {}; give a file") == faults("PTX ends early") == faults("{}; use --raw") == []
    assert len(faults("The file {} is gone. Give another.")) == 3
    assert faults("the file is gone; give another") == ["has a semicolon before what to do, and no colon before that"]
