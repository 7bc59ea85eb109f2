"""Lanes that meet at two places, or with masks of their own (PTX ISA 9.7.9.6, 9.7.13); and what they get, in numpy.

The lower half of a warp gives its first source, the upper half its second, each on its own side of a branch.
"""

import numpy as np

from tests.ptx.oracle.form import Form, rows
from tests.ptx.oracle.inputs import arrays

SIDES = (
    ".reg .pred %h, %y; .reg .b32 %u; mov.u32 %u, %laneid; and.b32 %u, %u, 16; setp.eq.u32 %h, %u, 0;"
    " @%h bra @@low; {high} bra @@on; @@low: {low} @@on: bar.warp.sync 0xffffffff;"
)
QUARTERS = (
    ".reg .pred %y; .reg .b32 %u, %k; mov.u32 %u, %laneid; and.b32 %u, %u, 24; mov.u32 %k, 0xff; shl.b32 %k, %k, %u;"
)


def sides(op: str, sources: str, results: str, body: str) -> list[Form]:
    """`body` on both sides, with the source of each side for %v."""
    text = SIDES.replace("{low}", body.replace("%v", "%s0")).replace("{high}", body.replace("%v", "%s1"))
    return rows("9.7.13", op, sources, results, text=text, scope="warp", tag="on two sides", rule="bits", group="meet")


def quarters(op: str, source: str, body: str) -> list[Form]:
    """One instruction for the warp; each lane names the eight of its quarter in %k."""
    return rows(
        "9.7.13", op, source, "b32", text=QUARTERS + body, scope="warp", tag="of quarters", rule="bits", group="meet"
    )


PREDICATE = "setp.gt.u32 %y, %v, 1; "
FORMS = [
    *sides(
        "shfl.sync.{up,down,bfly,idx}.b32",
        "u32 u32 u32:lane64 u32:clamp",
        "u32 pred",
        "{op} %d0|%d1, %v, %s2, %s3, 0xffffffff;",
    ),
    *sides("vote.sync.{all,any,uni}.pred", "u32:wsame u32:wsame", "pred", PREDICATE + "{op} %d0, %y, 0xffffffff;"),
    *sides("vote.sync.ballot.b32", "u32:few u32:few", "b32", PREDICATE + "{op} %d0, %y, 0xffffffff;"),
    *sides("match.any.sync.{b32,b64}", "$:few $:few", "b32", "{op} %d0, %v, 0xffffffff;"),
    *sides("match.all.sync.{b32,b64}", "$:wsame $:wsame", "b32 pred", "{op} %d0|%d1, %v, 0xffffffff;"),
    *sides("redux.sync.{add.u32,min.s32,max.u32,xor.b32}", "u32 u32", "u32", "{op} %d0, %v, 0xffffffff;"),
    *sides(
        "bar.warp.sync",
        "u32 u32",
        "u32",
        "st.shared.b32 [%m], %v; {op} 0xffffffff; mov.u32 %u, %laneid; xor.b32 %u, %u, 16;"
        " mad.lo.u32 %u, %u, 16, %sm; ld.shared.b32 %d0, [%u];",
    ),
    *quarters("vote.sync.ballot.b32", "u32:few", PREDICATE.replace("%v", "%s0") + "{op} %d0, %y, %k;"),
    *quarters("match.any.sync.b32", "b32:few", "{op} %d0, %s0, %k;"),
    *quarters("redux.sync.add.u32", "u32", "{op} %d0, %s0, %k;"),
]
LANE = np.arange(32)
BITS = np.uint32(1) << LANE.astype(np.uint32)


def expected(form: Form) -> list[np.ndarray]:
    """The results of every lane, by the text of the document."""
    width = {8: np.uint64, 4: np.uint32}
    given = [a.view(width[a.size // form.threads]).reshape(-1, 32) for a in arrays(form)]
    quarter = "quarters" in form.name
    value = given[0] if quarter else np.where(LANE < 16, given[0], given[1])
    group = LANE[:, None] // 8 == LANE // 8 if quarter else np.full((32, 32), True)
    name = form.name.split()[0]
    if name.startswith("shfl"):
        return _shuffled(name.split(".")[2], value, given[2].astype(np.int64), given[3].astype(np.int64))
    if name.startswith("bar"):
        return [value[:, LANE ^ 16]]
    if name.startswith("redux"):
        return [_reduced(name, value, group)]
    if name.startswith("match"):
        same = (value[:, :, None] == value[:, None, :]) & group
        if "any" in name:
            return [(same * BITS).sum(2, dtype=np.uint32)]
        every = same.all(2)
        return [np.where(every, np.uint32(0xFFFFFFFF), np.uint32(0)), every.astype(np.uint32)]
    yes = value > 1
    if "ballot" in name:
        return [((yes[:, None, :] & group) * BITS).sum(2, dtype=np.uint32)]
    every, none = yes.all(1), ~yes.any(1)
    said = {"all": every, "any": ~none, "uni": every | none}[name.split(".")[2]]
    return [np.repeat(said[:, None], 32, 1).astype(np.uint32)]


def _shuffled(mode: str, value: np.ndarray, b: np.ndarray, c: np.ndarray) -> list[np.ndarray]:
    b, clamp, segment = b & 31, c & 31, c >> 8 & 31
    least = LANE & segment
    most = least | (clamp & ~segment)
    j = {"up": LANE - b, "down": LANE + b, "bfly": LANE ^ b, "idx": least | (b & ~segment)}[mode]
    ok = j >= most if mode == "up" else j <= most
    return [np.take_along_axis(value, np.where(ok, j, LANE), 1), ok.astype(np.uint32)]


def _reduced(name: str, value: np.ndarray, group: np.ndarray) -> np.ndarray:
    typed = value.view(np.int32) if "s32" in name else value
    op = {"add": np.add, "min": np.minimum, "max": np.maximum, "xor": np.bitwise_xor}[name.split(".")[2]]
    rows_of = [op.reduce(typed[:, members], axis=1, dtype=typed.dtype) for members in group]
    return np.stack(rows_of, 1).view(np.uint32)
