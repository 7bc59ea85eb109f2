"""What a mutant may change: fixed operators on Python's syntax tree and on the text of CUDA C."""

from __future__ import annotations

import ast
import copy
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Change:
    """One mutant of a file: the characters from `start` to `end` become `after`. `line` counts from 1."""

    start: int
    end: int
    line: int
    operator: str
    before: str
    after: str


COMPARISONS: dict[type[ast.cmpop], type[ast.cmpop]] = {
    ast.Lt: ast.LtE, ast.LtE: ast.Lt, ast.Gt: ast.GtE, ast.GtE: ast.Gt, ast.Eq: ast.NotEq, ast.NotEq: ast.Eq,
    ast.In: ast.NotIn, ast.NotIn: ast.In, ast.Is: ast.IsNot, ast.IsNot: ast.Is,
}  # fmt: skip
ARITHMETIC: dict[type[ast.operator], type[ast.operator]] = {
    ast.Add: ast.Sub, ast.Sub: ast.Add, ast.Mult: ast.FloorDiv, ast.FloorDiv: ast.Mult, ast.Mod: ast.FloorDiv,
    ast.LShift: ast.RShift, ast.RShift: ast.LShift, ast.BitAnd: ast.BitOr, ast.BitOr: ast.BitAnd, ast.Div: ast.Mult,
}  # fmt: skip


def python(text: str) -> list[Change]:
    """All mutants of a Python file. Nothing within docstrings, annotations, decorators and f-strings."""
    finder = _Python(text)
    finder.visit(ast.parse(text))
    return finder.found


class _Python(ast.NodeVisitor):
    """Walks a file. A mutated node is written anew, in parentheses."""

    def __init__(self, text: str) -> None:
        self.text = text
        self.starts = [0]
        for line in text.encode().splitlines(keepends=True):
            self.starts.append(self.starts[-1] + len(line))
        self.raw = text.encode()
        self.found: list[Change] = []

    def _change(self, node: ast.expr | ast.stmt, operator: str, after: str) -> None:
        assert node.end_lineno is not None
        assert node.end_col_offset is not None
        start, end = (
            len(self.raw[: self.starts[line - 1] + column].decode())
            for line, column in ((node.lineno, node.col_offset), (node.end_lineno, node.end_col_offset))
        )
        self.found.append(Change(start, end, node.lineno, operator, self.text[start:end], after))

    def _rewritten(self, node: ast.expr, operator: str, **fields: object) -> None:
        other = copy.copy(node)
        for name, value in fields.items():
            setattr(other, name, value)
        self._change(node, operator, f"({ast.unparse(other)})")

    def visit_JoinedStr(self, node: ast.JoinedStr) -> None:
        """Positions within f-strings are wrong before Python 3.12."""

    def visit_AnnAssign(self, node: ast.AnnAssign) -> None:
        if node.value:
            self.visit(node.value)

    def visit_FunctionDef(self, node: ast.FunctionDef) -> None:
        for default in [*node.args.defaults, *filter(None, node.args.kw_defaults)]:
            self.visit(default)
        for statement in node.body:
            self.visit(statement)

    def visit_If(self, node: ast.If) -> None:
        if "TYPE_CHECKING" not in ast.unparse(node.test):
            self._negated(node.test)
            self.generic_visit(node)

    def visit_While(self, node: ast.While) -> None:
        self.generic_visit(node)  # a negated loop says little: it runs never or for ever

    def visit_IfExp(self, node: ast.IfExp) -> None:
        self._negated(node.test)
        self.generic_visit(node)

    def _negated(self, test: ast.expr) -> None:
        self._change(test, "negate a condition", f"(not ({ast.unparse(test)}))")

    def visit_Compare(self, node: ast.Compare) -> None:
        for at, op in enumerate(node.ops):
            ops = [*node.ops[:at], COMPARISONS[type(op)](), *node.ops[at + 1 :]]
            self._rewritten(node, "comparison", ops=ops)
        self.generic_visit(node)

    def visit_BinOp(self, node: ast.BinOp) -> None:
        texts = (isinstance(side, ast.Constant) and isinstance(side.value, str) for side in (node.left, node.right))
        if (other := ARITHMETIC.get(type(node.op))) and not any(texts):
            self._rewritten(node, "arithmetic", op=other())
        self.generic_visit(node)

    def visit_AugAssign(self, node: ast.AugAssign) -> None:
        if other := ARITHMETIC.get(type(node.op)):
            changed = copy.copy(node)
            changed.op = other()
            self._change(node, "arithmetic", ast.unparse(changed))
        self.generic_visit(node)

    def visit_BoolOp(self, node: ast.BoolOp) -> None:
        self._rewritten(node, "and, or", op=ast.Or() if isinstance(node.op, ast.And) else ast.And())
        self.generic_visit(node)

    def visit_UnaryOp(self, node: ast.UnaryOp) -> None:
        if isinstance(node.op, ast.Not | ast.USub | ast.Invert):
            self._change(node, "drop a sign", f"({ast.unparse(node.operand)})")
        self.generic_visit(node)

    def visit_Constant(self, node: ast.Constant) -> None:
        if isinstance(node.value, bool):
            self._change(node, "constant", str(not node.value))
        elif isinstance(node.value, int | float):
            self._change(node, "constant", repr(node.value + 1))

    def visit_Expr(self, node: ast.Expr) -> None:
        if isinstance(node.value, ast.Call):
            self._change(node, "drop a call", "pass")
        if not isinstance(node.value, ast.Constant):
            self.generic_visit(node)

    def visit_Return(self, node: ast.Return) -> None:
        if node.value and not (isinstance(node.value, ast.Constant) and node.value.value is None):
            self._change(node, "return nothing", "return None")
        self.generic_visit(node)


CUDA: list[tuple[str, str, str]] = [
    *(("comparison", rf" {a} ", f" {b} ") for a, b in
      (("<", "<="), ("<=", "<"), (">", ">="), (">=", ">"), ("==", "!="), ("!=", "=="))),
    *(("arithmetic", rf" {re.escape(a)} ", f" {b} ") for a, b in
      (("+", "-"), ("-", "+"), ("*", "/"), ("/", "*"), ("%", "/"), ("<<", ">>"), (">>", "<<"), ("&", "|"), ("|", "&"),
       ("+=", "-="), ("-=", "+="))),
    ("and, or", r" && ", " || "),
    ("and, or", r" \|\| ", " && "),
    ("drop a sign", r"(?<![\w)!])!(?=[\w(])", ""),
    ("constant", r"(?<![\w.])\d+(?![\w.xX])", "+1"),
    ("constant", r"(?<![\w.])0[xX][0-9a-fA-F]+(?=[uUlL]*\b)", "+1"),
    ("constant", r"(?<![\w.])\d+\.\d*f\b", "+1"),
    ("drop a call", r"(?m)^[ \t]*[\w:]+(?:<[^;]*>)?\([^;{}]*\);$", ";"),
]  # fmt: skip
"""Operator, pattern, and what comes in its place; "+1" stands for the number and one."""
_HIDDEN = re.compile(r'//[^\n]*|/\*.*?\*/|"(?:\\.|[^"\\\n])*"|^[ \t]*#(?:\\\n|[^\n])*', re.DOTALL | re.MULTILINE)


def cuda(text: str) -> list[Change]:
    """All mutants of a CUDA C file. Nothing within comments, strings and lines of the preprocessor."""
    code = _HIDDEN.sub(lambda match: re.sub(r"[^\n]", "\0", match[0]), text)
    found = []
    for operator, pattern, after in CUDA:
        for match in re.finditer(pattern, code):
            before = match[0]
            indent = len(before) - len(before.lstrip()) if operator == "drop a call" else 0
            start = match.start() + indent
            line = text.count("\n", 0, start) + 1
            new = _one_more(before) if after == "+1" else after
            found.append(Change(start, match.end(), line, operator, text[start : match.end()], new))
    return sorted(found, key=lambda change: (change.start, change.end, change.operator, change.after))


def _one_more(number: str) -> str:
    if number[:2].lower() == "0x":
        return hex(int(number, 16) + 1)
    return f"{float(number[:-1]) + 1}f" if number.endswith("f") else str(int(number) + 1)


def changes(path: Path) -> Iterator[Change]:
    """All mutants of a file that differ from it."""
    text = path.read_text()
    made = python(text) if path.suffix == ".py" else cuda(text)
    return (change for change in made if change.after != change.before)


def apply(text: str, change: Change) -> str:
    """The mutated file. ValueError where the text is another one than the change was found in."""
    if text[change.start : change.end] != change.before:
        raise ValueError(f"line {change.line} is not what it was when the mutant was drawn")
    return text[: change.start] + change.after + text[change.end :]
