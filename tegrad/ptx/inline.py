"""Calls are expanded: a copy of the callee's body takes the place of each `call` of a function of the module."""

from tegrad.ptx.errors import PtxError
from tegrad.ptx.parser import split_op
from tegrad.ptx.syntax import (
    Addr,
    Args,
    Function,
    Ins,
    Label,
    Not,
    Operand,
    Pair,
    Reg,
    Source,
    Sym,
    Variable,
    Vec,
)  # fmt: skip

MAX_DEPTH = 16


class _Copy:
    """The names and registers of one copy of a callee."""

    def __init__(self, callee: Function, caller: Function, serial: int, actual: dict[str, str]) -> None:
        self.base = len(caller.regs)
        caller.regs.extend(callee.regs)
        self.suffix = f"$call{serial}"
        self.labels = {i.name for i in callee.body if isinstance(i, Label)}
        self.names = dict(actual)
        for name, targets in callee.tables.items():
            self.labels.add(name)
            caller.tables[name + self.suffix] = [t + self.suffix for t in targets]
        for v in callee.variables:
            if v.space == "shared":
                # One variable for the CTA, however often the function is copied.
                if all(v.name != known.name for known in caller.variables):
                    caller.variables.append(v)
                continue
            self.names[v.name] = v.name + self.suffix
            caller.variables.append(
                Variable(v.name + self.suffix, v.space, v.size, v.align, v.init, v.pointers, v.extern),
            )

    def operand(self, op: Operand) -> Operand:
        if isinstance(op, Reg):
            return Reg(op.number + self.base)
        if isinstance(op, Not):
            return Not(Reg(op.reg.number + self.base))
        if isinstance(op, Sym):
            return Sym(self.name(op.name), op.offset)
        if isinstance(op, Addr):
            return Addr(self.operand(op.base), op.offset)  # type: ignore[arg-type]
        if isinstance(op, Vec):
            return Vec(tuple(self.operand(o) for o in op.items))
        if isinstance(op, Args):
            return Args(tuple(self.operand(o) for o in op.items))
        if isinstance(op, Pair):
            return Pair(self.operand(op.first), self.operand(op.second))  # type: ignore[arg-type]
        return op

    def name(self, name: str) -> str:
        return name + self.suffix if name in self.labels else self.names.get(name, name)

    def instruction(self, ins: Ins) -> Ins:
        pred = (ins.pred[0] + self.base, ins.pred[1]) if ins.pred else None
        if ins.base == "ret":
            base, mods, types = split_op("bra")
            return Ins("bra", base, mods, types, (Sym("$end" + self.suffix),), pred, ins.line)
        return ins._replace(operands=tuple(self.operand(o) for o in ins.operands), pred=pred)


def _actuals(ins: Ins, callee: Function) -> dict[str, str]:
    """Formal to actual parameter names of a call."""
    groups = [o for o in ins.operands if isinstance(o, Args)]
    first = isinstance(ins.operands[0], Args)
    results = groups[0].items if first else ()
    arguments = groups[1].items if first and len(groups) > 1 else groups[0].items if groups and not first else ()
    pairs = [*zip(callee.results, results, strict=False), *zip(callee.params, arguments, strict=False)]
    names = {}
    for formal, actual in pairs:
        if not isinstance(actual, Sym):
            raise PtxError(f"line {ins.line}: {ins.op} passes a register; only .param variables are supported")
        names[formal.name] = actual.name
    return names


def expand_calls(source: Source, fn: Function) -> Function:
    """The function with all calls expanded; the same object if it has none."""
    if not any(isinstance(i, Ins) and i.base == "call" for i in fn.body):
        return fn
    out = Function(
        fn.name, fn.entry, fn.params, fn.results, fn.param_size, fn.max_threads, fn.exact_threads, [], list(fn.regs),
        list(fn.variables), dict(fn.tables)
    )  # fmt: skip
    serial = 0

    def copy(body: list[Ins | Label], depth: int) -> None:
        nonlocal serial
        for item in body:
            if isinstance(item, Label) or item.base != "call":
                out.body.append(item)
                continue
            name = next((o.name for o in item.operands if isinstance(o, Sym)), "")
            callee = source.functions.get(name)
            if callee is None or item.pred is not None or depth >= MAX_DEPTH:
                why = (
                    "recursion is"
                    if depth >= MAX_DEPTH
                    else "predicated calls are"
                    if callee
                    else f"a call of {name!r} is"
                )
                raise PtxError(f"line {item.line}: {item.op}: {why} not supported by the PTX engine")
            serial += 1
            names = _Copy(callee, out, serial, _actuals(item, callee))
            inner: list[Ins | Label] = [
                Label(names.name(i.name)) if isinstance(i, Label) else names.instruction(i) for i in callee.body
            ]
            copy(inner, depth + 1)
            out.body.append(Label("$end" + names.suffix))

    copy(fn.body, 0)
    return out
