"""PTX text to `syntax.Source`.

PTX is parsed a statement at a time: a regular expression finds `;`, `{` and `}`, and each statement is matched whole.
Operand texts repeat a lot, so that their parsed forms are kept per scope.
"""

import re
import struct
from collections.abc import Iterator
from functools import lru_cache

from tegrad.ptx.errors import PtxError
from tegrad.ptx.syntax import (
    Addr,
    Args,
    Function,
    Imm,
    Ins,
    Label,
    Not,
    Operand,
    Pair,
    Param,
    Reg,
    Source,
    Special,
    Sym,
    Variable,
    Vec,
)  # fmt: skip
from tegrad.ptx.types import TYPES, Ty

_COMMENT = re.compile(r"//[^\n]*|/\*.*?\*/", re.S)
_LINE_DIRECTIVE = re.compile(r"^[ \t]*\.(version|target|address_size|file|loc)\b[^\n]*", re.M)
_TARGET = re.compile(r"^[ \t]*\.target[ \t]+(\w+)", re.M)
_DELIM = re.compile(r"[;{}]")
_LABEL = re.compile(r"\s*([A-Za-z_$%][\w$]*)\s*:(?!:)\s*")
_INS = re.compile(r"(?:@(!?)\s*(%?[\w$.]+)\s+)?([a-z][\w.:]*)\s*(.*)", re.S)
_REG_DECL = re.compile(r"\.reg\s*(?:\.v\d\s+)?\.(\w+)\s+(.*)", re.S)
_VAR = re.compile(
    r"(?:\.(?:visible|weak|extern|common)\s+)*\.(global|const|shared|local|param)\s+((?:\.attribute\([^)]*\)\s*)?)"
    r"(?:\.align\s+(\d+)\s+)?((?:\.v\d\s+)?)\.(\w+)\s+([\w$%]+)\s*((?:\[[^\]]*\])*)\s*(?:=\s*(.*))?$",
    re.S,
)
_FUNC = re.compile(r"\.(entry|func)\b\s*(?:\(([^)]*)\))?\s*([\w$]+)\s*(?:\(([^)]*)\))?(.*)", re.S)
_PARAM = re.compile(
    r"\.(param|reg)\s+(?:\.align\s+(\d+)\s+)?\.(\w+)\s+(?:\.ptr\b[^%\w]*(?:\.\w+\s*)*(?:\d+\s+)?)?([\w$%]+)\s*(?:\[(\d*)\])?"
)
_NUMBER = re.compile(r"^[+-]?(0[xX][0-9a-fA-F]+|0[bB][01]+|0[fF][0-9a-fA-F]{8}|0[dD][0-9a-fA-F]{16}|\d+)U?$")
_FLOAT = re.compile(r"^[+-]?(\d+\.\d*([eE][+-]?\d+)?|\d+[eE][+-]?\d+)$")


@lru_cache(maxsize=4096)
def split_op(op: str) -> tuple[str, tuple[str, ...], tuple[Ty, ...]]:
    """An opcode into its base, modifiers and types."""
    base, *mods = op.replace("::", "__").split(".")
    return base, tuple(mods), tuple(TYPES[m] for m in mods if m in TYPES)


def number(text: str) -> Imm | None:
    """A literal, or None if the text is none."""
    if _NUMBER.match(text):
        body, negative = text.lstrip("+-").rstrip("U"), text[0] == "-"
        kind = body[:2].lower()
        if kind == "0f":
            return Imm(struct.unpack(">f", bytes.fromhex(body[2:]))[0] * (-1 if negative else 1), 32)
        if kind == "0d":
            return Imm(struct.unpack(">d", bytes.fromhex(body[2:]))[0] * (-1 if negative else 1), 64)
        octal = len(body) > 1 and body[0] == "0" and kind not in ("0x", "0b")
        value = int(body, 8 if octal else 0)
        return Imm(-value if negative else value)
    if _FLOAT.match(text):
        return Imm(float(text), 64)
    return None


def _split(text: str) -> list[str]:
    """Split at commas outside of brackets."""
    if "{" not in text and "(" not in text:
        return [p.strip() for p in text.split(",")] if text.strip() else []
    parts, depth, start = [], 0, 0
    for i, c in enumerate(text):
        if c in "{([":
            depth += 1
        elif c in "})]":
            depth -= 1
        elif c == "," and depth == 0:
            parts.append(text[start:i].strip())
            start = i + 1
    last = text[start:].strip()
    return [*parts, last] if last else parts


class _Scope:
    """Names of one `{ }` block, seen from inside."""

    def __init__(self, outer: "_Scope | None") -> None:
        self.outer = outer
        self.regs: dict[str, int] = {}
        self.ranges: dict[str, tuple[int, int]] = {}
        self.renamed: dict[str, str] = {}
        self.operands: dict[str, Operand] = {}

    def reg(self, name: str) -> int | None:
        scope: _Scope | None = self
        while scope is not None:
            index = scope.regs.get(name)
            if index is not None:
                return index
            stem = name.rstrip("0123456789")
            if stem in scope.ranges and stem != name:
                first, count = scope.ranges[stem]
                k = int(name[len(stem) :])
                if k < count:
                    scope.regs[name] = first + k
                    return first + k
            scope = scope.outer
        return None

    def symbol(self, name: str) -> str:
        scope: _Scope | None = self
        while scope is not None:
            if name in scope.renamed:
                return scope.renamed[name]
            scope = scope.outer
        return name


class _Parser:
    def __init__(self, text: str) -> None:
        self.source = Source(text)
        target = _TARGET.search(text)
        self.source.target = target[1] if target else ""
        clean = _COMMENT.sub(lambda m: re.sub(r"[^\n]", " ", m[0]), text)
        self.text = _LINE_DIRECTIVE.sub(lambda m: " " * len(m[0]), clean)
        self.fn: Function | None = None
        self.scope: _Scope | None = None
        self.depth = 0
        self.scopes = 0

    def statements(self) -> Iterator[tuple[str, str, int]]:
        """(delimiter, text before it, line): `{` opens a scope, `}` closes one, `;` ends a statement."""
        text, pos, line, counted = self.text, 0, 1, 0
        while True:
            m = _DELIM.search(text, pos)
            if m is None:
                if text[pos:].strip():
                    raise PtxError(f"PTX ends inside a statement: {text[pos:].strip()[:60]!r}; the text is cut off")
                return
            end = m.end()
            head = text[pos : m.start()]
            if m[0] == "{" and not self.opens_scope(head):
                end = self.balanced(m.start())
                stop = text.find(";", end)
                if stop < 0:
                    raise PtxError(f"PTX statement without an end: {head.strip()[:60]!r}; the text is cut off")
                head, end = text[pos:stop], stop + 1
                delim = ";"
            else:
                delim = m[0]
            lead = len(head) - len(head.lstrip())
            line += text.count("\n", counted, pos + lead)
            counted = pos + lead
            yield delim, head.strip(), line
            pos = end

    def opens_scope(self, head: str) -> bool:
        head = head.strip()
        while m := _LABEL.match(head):
            head = head[m.end() :]
        return not head or ".entry" in head or ".func" in head or head.startswith(".section")

    def balanced(self, start: int) -> int:
        depth = 0
        for m in re.finditer(r"[{}]", self.text[start:]):
            depth += 1 if m[0] == "{" else -1
            if depth == 0:
                return start + m.end()
        raise PtxError("PTX has an unclosed brace; the text is cut off")

    def run(self) -> Source:
        skip = 0
        for delim, head, line in self.statements():
            if skip:
                skip += 1 if delim == "{" else -1 if delim == "}" else 0
                continue
            if self.fn is None:
                if delim == "{" and head.startswith(".section"):
                    skip = 1
                else:
                    self.outside(delim, head, line)
            else:
                self.inside(delim, head, line)
        if self.fn is not None:
            raise PtxError(f"PTX ends inside function {self.fn.name}; the text is cut off")
        return self.source

    # -- module scope --------------------------------------------------------------------------------------------
    def outside(self, delim: str, head: str, line: int) -> None:
        if ".entry" in head or ".func" in head:
            fn = self.header(head, line)
            if delim == "{":
                self.source.functions[fn.name] = fn
                self.fn, self.depth = fn, 1
                self.scope = _Scope(None)
                for p in [*fn.params, *fn.results]:
                    self.scope.renamed[p.name] = p.name
        elif delim == ";" and head and not head.startswith((".pragma", ".alias")):
            var = self.variable(head, line)
            self.source.variables[var.name] = var
        elif delim != ";" or not head.startswith((".pragma", ".alias", "")):
            raise PtxError(f"line {line}: cannot read {head[:60]!r}; is this PTX?")

    def header(self, head: str, line: int) -> Function:
        m = _FUNC.search(head)
        if m is None:
            raise PtxError(f"line {line}: cannot read function header {head[:60]!r}")
        fn = Function(m[3], m[1] == "entry")
        fn.params, fn.param_size = self.params(m[4] or "")
        fn.results, _ = self.params(m[2] or "")
        for key, args in re.findall(r"\.(maxntid|reqntid)\s+([\d, ]+)", m[5]):
            dims = [int(x) for x in args.replace(" ", "").strip(",").split(",")]
            fn.max_threads = tuple((*dims, 1, 1)[:3])  # type: ignore[assignment]
            fn.exact_threads = key == "reqntid"
        return fn

    def params(self, text: str) -> tuple[list[Param], int]:
        out, offset = [], 0
        for m in _PARAM.finditer(text):
            ty = TYPES[m[3]]
            size = ty.size * int(m[5] or 1)
            align = max(int(m[2] or 1), ty.size)
            offset = -(-offset // align) * align
            out.append(Param(m[4], offset, size, ty))
            offset += size
        return out, offset

    def variable(self, head: str, line: int) -> Variable:
        m = _VAR.match(head)
        if m is None:
            raise PtxError(f"line {line}: cannot read {head[:60]!r}; is this PTX?")
        ty = TYPES[m[5]]
        width = int(m[4].strip()[2:]) if m[4].strip() else 1
        count = 1
        dims = re.findall(r"\[([^\]]*)\]", m[7])
        init, pointers = self.initial(m[8], ty, line) if m[8] is not None else (None, [])
        for d in dims:
            count *= int(d, 0) if d.strip() else (len(init) // ty.size if init else 0)
        size = ty.size * width * count
        if init is not None:
            init = init.ljust(size, b"\0")
        return Variable(m[6], m[1], size, max(int(m[3] or 1), ty.size * width), init, pointers, ".extern" in head)

    def initial(self, text: str, ty: Ty, line: int) -> tuple[bytes, list[tuple[int, str, int]]]:
        """Bytes of an initialiser, and the symbols whose addresses belong in them."""
        out, pointers = bytearray(), []
        for item in re.sub(r"[{}]", " ", text).split(","):
            item = item.strip()
            if not item:
                continue
            m = re.match(r"^(?:generic\(\s*)?([A-Za-z_$][\w$]*)\s*\)?\s*(?:\+\s*(\d+))?$", item)
            if m:
                pointers.append((len(out), m[1], int(m[2] or 0)))
                out += bytes(ty.size)
                continue
            imm = number(item)
            if imm is None:
                raise PtxError(f"line {line}: cannot read initial value {item!r}")
            out += pack_value(imm, ty)
        return bytes(out), pointers

    # -- function scope ------------------------------------------------------------------------------------------
    def inside(self, delim: str, head: str, line: int) -> None:
        assert self.fn is not None
        while m := _LABEL.match(head):
            self.fn.body.append(Label(m[1]))
            head = head[m.end() :]
        if delim == ";":
            if head:
                self.statement(head, line)
        elif head:
            raise PtxError(f"line {line}: cannot read {head[:60]!r}")
        elif delim == "{":
            self.depth += 1
            self.scope = _Scope(self.scope)
        else:
            self.depth -= 1
            self.scope = self.scope.outer if self.scope else None
            if self.depth == 0:
                self.fn = self.scope = None

    def statement(self, head: str, line: int) -> None:
        assert self.fn is not None
        assert self.scope is not None
        if head[0] == ".":
            self.declaration(head, line)
            return
        m = _INS.match(head)
        if m is None:
            raise PtxError(f"line {line}: cannot read {head[:60]!r}")
        pred = None
        if m[2]:
            index = self.scope.reg(m[2])
            if index is None:
                raise PtxError(f"line {line}: unknown predicate {m[2]}")
            pred = (index, m[1] == "!")
        base, mods, types = split_op(m[3])
        try:
            operands = tuple(self.operand(t, line) for t in _split(m[4]))
        except PtxError as error:
            raise PtxError(f"{error} in {m[3]}") from error
        self.fn.body.append(Ins(m[3], base, mods, types, operands, pred, line))

    def declaration(self, head: str, line: int) -> None:
        assert self.fn is not None
        assert self.scope is not None
        if m := _REG_DECL.match(head):
            ty = TYPES.get(m[1])
            if ty is None:
                raise PtxError(f"line {line}: unknown register type .{m[1]}")
            for name in m[2].split(","):
                name = name.strip()
                first = len(self.fn.regs)
                if r := re.match(r"^(.*)<(\d+)>$", name):
                    self.scope.ranges[r[1]] = (first, int(r[2]))
                    self.fn.regs.extend([ty] * int(r[2]))
                else:
                    self.scope.regs[name] = first
                    self.fn.regs.append(ty)
        elif head.startswith(".branchtargets"):
            label = self.fn.body.pop()
            assert isinstance(label, Label)
            self.fn.tables[label.name] = _split(head.removeprefix(".branchtargets"))
        elif head.startswith((".pragma", ".callprototype")):
            return
        else:
            var = self.variable(head, line)
            if self.depth > 1:
                self.scopes += 1
                self.scope.renamed[var.name] = f"{var.name}${self.scopes}"
                self.scope.operands.clear()
                var.name = self.scope.renamed[var.name]
            self.fn.variables.append(var)

    def operand(self, text: str, line: int) -> Operand:
        assert self.scope is not None
        known = self.scope.operands.get(text, self)
        if known is not self:
            return known  # type: ignore[return-value]
        value = self.parse_operand(text, line)
        self.scope.operands[text] = value
        return value

    def parse_operand(self, text: str, line: int) -> Operand:
        assert self.scope is not None
        if text == "_":
            return None
        index = self.scope.reg(text)
        if index is not None:
            return Reg(index)
        first = text[0]
        if first == "[":
            return self.address(text[1:-1].strip(), line)
        if first == "{":
            return Vec(tuple(self.operand(t, line) for t in _split(text[1:-1])))
        if first == "(":
            return Args(tuple(self.operand(t, line) for t in _split(text[1:-1])))
        if first == "!":
            inner = self.operand(text[1:].strip(), line)
            if isinstance(inner, Reg):
                return Not(inner)
        if "|" in text:
            a, b = (self.operand(t.strip(), line) for t in text.split("|"))
            return Pair(a if isinstance(a, Reg) else None, b if isinstance(b, Reg) else None)
        imm = number(text)
        if imm is not None:
            return imm
        if first == "%" or text in ("WARP_SZ",):
            return Special(text)
        m = re.match(r"^([\w$]+)\s*(?:\[(\d+)\]|\+\s*(-?\d+))?$", text)
        if m:
            return Sym(self.scope.symbol(m[1]), int(m[2] or m[3] or 0))
        raise PtxError(f"line {line}: cannot read operand {text!r}")

    def address(self, text: str, line: int) -> Operand:
        parts = _split(text)
        m = re.match(r"^(%?[\w$.]+)\s*(?:([+-])\s*(-?\s*(?:0[xX][0-9a-fA-F]+|\d+)))?$", parts[0])
        if m is None or len(parts) > 1:
            raise PtxError(f"line {line}: cannot read address [{text}]")
        offset = int(m[3].replace(" ", ""), 0) * (-1 if m[2] == "-" else 1) if m[3] else 0
        base = self.operand(m[1], line)
        if isinstance(base, Sym):
            return Addr(Sym(base.name, base.offset), offset)
        if isinstance(base, Reg | Imm):
            return Addr(base, offset)
        raise PtxError(f"line {line}: cannot read address [{text}]")


def pack_value(imm: Imm, ty: Ty) -> bytes:
    """A literal as the bytes of a type."""
    if imm.bits:
        code = {"f16": "<e", "f64": "<d"}.get(ty.name, "<f")
        if ty.bits == 64:
            code = "<d"
        return struct.pack(code, imm.value)
    if ty.kind == "f":
        return struct.pack({16: "<e", 32: "<f", 64: "<d"}[ty.bits], float(imm.value))
    return (int(imm.value) & ((1 << ty.bits) - 1)).to_bytes(ty.size, "little")


def parse(text: str) -> Source:
    """Parse PTX text. Raises PtxError with the line and the cause."""
    return _Parser(text).run()
