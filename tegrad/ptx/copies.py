"""cp.async, ldmatrix and movmatrix (PTX ISA 9.7.9.25, 9.7.14.5.15).

A copy reads its source when it is issued and reaches shared memory at its wait, as late as the rules allow, so that
code which forgets to wait shows it. Copies of a warp queue in its frame; a full queue lets the oldest land early. In a
launch with a seed half of the groups reach it at once, which shows memory that is copied to while it is read.
"""

from tegrad.ptx import bulk
from tegrad.ptx.access import helper_name
from tegrad.ptx.check import launch_of
from tegrad.ptx.helpers import family, helper
from tegrad.ptx.ir import Fn, Module, V
from tegrad.ptx.layout import HASH_FACTOR, LANES, Frame, Launch
from tegrad.ptx.lowering import Asynchronous
from tegrad.ptx.mbarrier import arrive_after_copies
from tegrad.ptx.memory import address
from tegrad.ptx.rules import U32, Handler, mod
from tegrad.ptx.syntax import Imm, Ins, items

MOST_QUEUED = 32
DATA, MASK, WORDS, GROUP, PC = 128, 640, 644, 648, 652
ENTRY_BYTES = 704
QUEUE_BYTES = MOST_QUEUED * ENTRY_BYTES
CUT, LDMATRIX = "tgx_copy_cut_w", "tgx_ldmatrix_"


def _entry(f: Fn, queue: V, index: V) -> V:
    """The entry at an index that may have run past the end of the ring."""
    wrapped = f.bin("urem", index, MOST_QUEUED)
    return f.element(queue, wrapped, ENTRY_BYTES)


@helper("void", "ptr frame, ptr queue")
def tgx_copy_land(f: Fn, frame: V, queue: V) -> None:
    """The oldest copy reaches shared memory."""
    head = f.load("i32", frame, Frame.COPY_HEAD)
    entry = _entry(f, queue, head)
    words = f.load("i32", entry, WORDS)
    args = [frame, f.load("i32", entry, 0, LANES), f.load("i32", entry, MASK), f.load("i32", entry, PC)]
    for n in (1, 2, 4):
        with f.if_(f.icmp("eq", words, n)):
            value = f.load("i32", entry, DATA, LANES) if n == 1 else f.gep(entry, DATA)
            f.call_void(helper_name("st", "shared", 32, n), *args, value)
    with f.if_(f.is_zero(words), False):
        arrives = f.load("i32", frame, Frame.COPY_ARRIVES)
        f.store(f.sub(arrives, 1), frame, Frame.COPY_ARRIVES)
        f.call_void("tgx_copy_arrive", frame, *args[1:])
    f.store(f.bin("urem", f.add(head, 1), MOST_QUEUED), frame, Frame.COPY_HEAD)
    f.store(f.sub(f.load("i32", frame, Frame.COPY_COUNT), 1), frame, Frame.COPY_COUNT)


@helper("void", "ptr frame, ptr queue, <32 x i32> target, ptr data, i32 mask, i32 words, i32 pc")
def tgx_copy_push(f: Fn, frame: V, queue: V, target: V, data: V, mask: V, words: V, pc: V) -> None:
    """Queue a copy of `words` vectors at `data`.

    Without any it is an arrival at the mbarriers at `target`.
    """
    with f.if_(f.icmp("eq", f.load("i32", frame, Frame.COPY_COUNT), MOST_QUEUED)):
        f.call_void("tgx_copy_land", frame, queue)
    count = f.load("i32", frame, Frame.COPY_COUNT)
    entry = _entry(f, queue, f.add(f.load("i32", frame, Frame.COPY_HEAD), count))
    f.store(target, entry)
    for i in range(4):
        with f.if_(f.icmp("ugt", words, i)):
            f.store(f.load("i32", data, 128 * i, LANES), entry, DATA + 128 * i)
    for value, at in ((mask, MASK), (words, WORDS), (f.load("i32", frame, Frame.COPY_GROUP), GROUP), (pc, PC)):
        f.store(value, entry, at)
    f.store(f.add(count, 1), frame, Frame.COPY_COUNT)
    arrival = f.resize(f.is_zero(words), "i32", False)
    f.store(f.add(f.load("i32", frame, Frame.COPY_ARRIVES), arrival), frame, Frame.COPY_ARRIVES)


@helper("void", "ptr frame, ptr queue")
def tgx_copy_soon(f: Fn, frame: V, queue: V) -> None:
    """After a commit of a launch with a seed, land all in half of the cases."""
    x = f.load("i32", launch_of(f, frame), Launch.SEED)
    for at in (Frame.CTA, Frame.WARP, Frame.COPY_GROUP):
        x = f.mul(f.xor(x, f.load("i32", frame, at)), HASH_FACTOR)
        x = f.xor(x, f.bin("lshr", x, 15))
    with f.if_(f.icmp("slt", x, f.const("i32", 0))):
        f.call_void("tgx_copy_wait", frame, queue, f.const("i32", -1))


@helper("void", "ptr frame, ptr queue, i32 keep")
def tgx_copy_wait(f: Fn, frame: V, queue: V, keep: V) -> None:
    """Land all but the copies of the newest `keep` groups; -1 also open ones."""
    limit = f.sub(f.load("i32", frame, Frame.COPY_GROUP), keep)
    with f.loop() as (_, end):
        f.leave(f.is_zero(f.load("i32", frame, Frame.COPY_COUNT)), end)
        entry = _entry(f, queue, f.load("i32", frame, Frame.COPY_HEAD))
        f.leave(f.icmp("sge", f.load("i32", entry, GROUP), limit), end)
        f.call_void("tgx_copy_land", frame, queue)


def copy_async(e: Asynchronous, ins: Ins) -> None:
    """cp.async, its groups and waits; a source shorter than the copy is filled up with zeros."""
    f = e.f
    if mod(ins, "reduce"):
        raise NotImplementedError
    if mod(ins, "bulk"):
        bulk.copy(e, ins)
        return
    if mod(ins, "mbarrier"):
        arrive_after_copies(e, ins)
        return
    queue = f.gep(e.frame, e.copy_queue)
    if mod(ins, "commit_group"):
        f.store(f.add(f.load("i32", e.frame, Frame.COPY_GROUP), 1), e.frame, Frame.COPY_GROUP)
        with f.if_(f.not_zero(f.load("i32", e.launch, Launch.SEED)), False):
            f.call_void("tgx_copy_soon", e.frame, queue)
    elif mod(ins, "wait_group", "wait_all"):
        keep = -1
        if mod(ins, "wait_group"):
            if not isinstance(ins.operands[0], Imm):
                raise NotImplementedError
            keep = int(ins.operands[0].value)
        f.call_void("tgx_copy_wait", e.frame, queue, f.const("i32", keep))
    else:
        _issue(e, ins, queue)


def _issue(e: Asynchronous, ins: Ins, queue: V) -> None:
    f = e.f
    size = ins.operands[2]
    if not mod(ins, "shared", "shared__cta") or not isinstance(size, Imm) or size.value not in (4, 8, 16):
        raise NotImplementedError
    words = int(size.value) // 4
    source = f.splat(address(e, ins.operands[1], "global"), LANES)
    target = f.splat(address(e, ins.operands[0], "shared"), LANES)
    lanes, pc = e.lanes(ins), f.const("i32", e.pc)
    e.account(ins, int(size.value), False)
    out = f.alloca(f"[{words} x <{LANES} x i32>]", 64)
    limit = e.read(ins.operands[3], U32) if len(ins.operands) > 3 and not mod(ins, "L2__cache_hint") else None
    read = lanes if limit is None else f.and_(lanes, e.bits_of(f.not_zero(limit)))
    if words == 1:
        f.store(f.call(helper_name("ld", "global", 32, 1), "i32", LANES, e.frame, source, read, pc), out, 0, 4)
    else:
        f.call_void(helper_name("ld", "global", 32, words), e.frame, source, read, pc, out)
    if limit is not None:
        f.call_void(f"{CUT}{words}", out, f.splat(limit, LANES))
    f.call_void("tgx_copy_push", e.frame, queue, target, out, lanes, f.const("i32", words), pc)


@family(CUT)
def emit_cut(module: Module, name: str) -> None:
    """tgx_copy_cut_w*(words, limits): zero the bytes of each lane's words from its limit on."""
    f = Fn(module, name, "void", f"ptr words, <{LANES} x i32> limits", "nounwind")
    words, limit = f.args
    for i in range(int(name.removeprefix(CUT))):
        v = f.load("i32", words, 4 * LANES * i, LANES, 4)
        f.store(f.and_(v, _kept(f, limit, 4 * i)), words, 4 * LANES * i, 4)
    f.ret()
    f.finish()


def _kept(f: Fn, limit: V, at: int) -> V:
    """A mask of the bytes of the word at an offset that lie below the limit."""
    size = f.sub(f.intr("umax", f.intr("umin", limit, at + 4), at), at)
    low = f.sub(f.bin("shl", f.like(size, 1), f.and_(f.mul(size, 8), 31)), 1)
    return f.select(f.icmp("eq", size, 4), f.like(size, -1), low)


def movmatrix(e: Asynchronous, ins: Ins) -> None:
    """movmatrix.sync.aligned.m8n8.trans.b16: lane 4r + c of an 8 x 8 matrix holds row r, columns 2c and 2c + 1."""
    f = e.f
    if not mod(ins, "trans") or "m8n8" not in ins.mods:
        raise NotImplementedError
    v = f.splat(e.read(ins.operands[1], U32), LANES)
    odd = f.elements("i32", [16 * (lane // 4 % 2) for lane in range(LANES)])
    halves = []
    for k in range(2):
        row = f.shuffle(v, None, [4 * (2 * (lane % 4) + k) + lane // 8 for lane in range(LANES)])
        halves.append(f.and_(f.bin("lshr", row, odd), 0xFFFF))
    e.write(ins.operands[0], f.or_(halves[0], f.bin("shl", halves[1], 16)), U32, ins)


def ldmatrix(e: Asynchronous, ins: Ins) -> None:
    """ldmatrix.sync.aligned.m8n8.x{1,2,4}{.trans}.shared.b16: lane 8i + r gives the address of row r of matrix i."""
    f = e.f
    count = next((int(m[1]) for m in ins.mods if m in ("x1", "x2", "x4")), 0)
    if not count or "m8n8" not in ins.mods or not ins.types or ins.types[-1].name != "b16":
        raise NotImplementedError
    rows = f.splat(address(e, ins.operands[1], "shared"), LANES)
    e.account(ins, 4 * count, False)
    out = f.alloca(f"[{count} x <{LANES} x i32>]", 64)
    name = f"{LDMATRIX}{'t' if mod(ins, 'trans') else 'n'}{count}"
    f.call_void(name, e.frame, rows, e.lanes(ins), f.const("i32", e.pc), out)
    for i, item in enumerate(items(ins.operands[0])):
        e.write(item, f.load_placed("i32", f.gep(out, 4 * LANES * i)), U32, ins)


@family(LDMATRIX)
def emit_ldmatrix(module: Module, name: str) -> None:
    """tgx_ldmatrix_*(frame, rows, mask, pc, out): matrices of 8 rows each by the rows' addresses in shared memory."""
    how = name.removeprefix(LDMATRIX)
    f = Fn(module, name, "void", f"ptr frame, <{LANES} x i32> rows, i32 mask, i32 pc, ptr out", "nounwind")
    frame, rows, mask, pc, out = f.args
    for i in range(int(how[1:])):
        if how[0] == "t":
            halves = []
            for k in range(2):
                at = f.shuffle(rows, None, [8 * i + 2 * (lane % 4) + k for lane in range(LANES)])
                at = f.add(at, f.elements("i32", [2 * (lane // 4) for lane in range(LANES)]))
                half = f.call(helper_name("ld", "shared", 16, 1), "i16", LANES, frame, at, mask, pc)
                halves.append(f.resize(half, "i32", False))
            v = f.or_(halves[0], f.bin("shl", halves[1], 16))
        else:
            at = f.shuffle(rows, None, [8 * i + lane // 4 for lane in range(LANES)])
            at = f.add(at, f.elements("i32", [4 * (lane % 4) for lane in range(LANES)]))
            v = f.call(helper_name("ld", "shared", 32, 1), "i32", LANES, frame, at, mask, pc)
        f.store(v, out, 4 * LANES * i, 64)
    f.ret()
    f.finish()


HANDLERS: dict[str, Handler[Asynchronous]] = {"cp": copy_async, "ldmatrix": ldmatrix, "movmatrix": movmatrix}
