"""Random cases, by kind: what is asked of nvgpu's own code and of the board. A case is a list of steps.

A step is words: an operation, then numbers; `$3` stands for the address that step 3 answered, `$3+4096` for one after
it. `oracle.h` and the C files say what each operation does.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping

Case = list[str]

PAGE = 4096
PDE = 1 << 21
KERNEL = 1 << 32
COMMON = (0x200000, 0xFF00000000)
RANGES = (COMMON, COMMON, (PDE, 3 * PDE), (3 * PDE, 11 * PDE), (1 << 32, (1 << 32) + 7 * PDE), (PDE, 1 << 40))
CLASSES = (0xC7C0, 0xC797, 0xC7B5, 0xC6B5, 0xC56F, 0xA140, 0x902D, 0xC0C0, 0xC397, 0xC5C0, 0xC597, 0xC3C0, 0xB197)
"""Compute, 3D, copy, ... of this chip, and of those before it that its class check lets pass."""

FIXED, CACHEABLE, UNMAPPED, L3, COHERENT = 1, 4, 0x20, 0x80, 0x200
ACCESSES = (0, 0x400, 0x800)


def size(rng: random.Random) -> int:
    """Bytes that somebody may ask for: mostly some pages, now and then a lot, an odd number or none."""
    kind = rng.randrange(12)
    if kind < 6:
        return PAGE * rng.randint(1, 64)
    if kind < 9:
        return int(PAGE << rng.randrange(12))
    if kind < 11:
        return rng.randint(1, 1 << 22)
    return rng.choice((0, 1, 1 << 32, 1 << 41))


def va(rng: random.Random) -> Case:
    """Sequences of allocations in a client's and the driver's own range, each given back at most once."""
    start, end = rng.choice(RANGES)
    steps = [f"space {start} {end}"]
    held: list[tuple[str, int]] = []
    for _ in range(rng.randint(8, 24)):
        at, kind = len(steps), rng.randrange(12)
        if kind < 5 or at == 1:
            held.append(("free", at))
            steps.append(f"alloc {size(rng)}")
        elif kind < 7:
            held.append(("free", at))
            base = PAGE * rng.randint(start // PAGE - 1, min(end // PAGE, start // PAGE + 2048))
            length = size(rng) & -PAGE
            base = rng.choice((base, base, base, start, start - PAGE, end - length, end - length + PAGE))
            steps.append(f"fixed {max(base, 0) + rng.choice((0, 0, 0, 0, 512))} {length}")
        elif kind < 8:
            held.append(("free", at))
            steps.append(f"fixed ${rng.randrange(1, at)}+{PAGE * rng.randrange(64)} {PAGE * rng.randint(1, 48)}")
        elif kind < 9:
            held.append(("kfree", at))
            steps.append(f"kernel {size(rng)}")
        elif held:
            release, which = held.pop(rng.randrange(len(held)))
            steps.append(f"{release} ${which}")
    return steps


def bounds(rng: random.Random) -> Case:
    """What ALLOC_AS takes: big page size, start, end and split."""

    def bound() -> int:
        top = rng.choice((4, 12, 1 << 18, (1 << 28) - 2048, 1 << 28))
        return max(0, rng.randrange(top + 1) * PDE + rng.choice((0, 0, 0, 0, 0, PAGE, PDE // 2)))

    steps = []
    for _ in range(3):
        page = rng.choice((0, 0, 0, 0, 0, PAGE, 1 << 16, 1 << 17, 3))
        start, end = sorted((bound(), bound())) if rng.random() < 0.8 else (bound(), bound())
        if rng.random() < 0.2:
            end = (1 << 49) - KERNEL + PDE * rng.randint(-1, 1)
        split = rng.choice((0, 0, 0, 0, bound()))
        steps.append(f"bounds {page} {start} {end} {split}")
    return steps


def _address(rng: random.Random, at: int, start: int) -> str:
    """Somewhere near what the steps before have answered, or anywhere."""
    if at > 1 and rng.random() < 0.75:
        return f"${rng.randrange(1, at)}+{PAGE * rng.randrange(16) + rng.choice((0, 0, 0, 0, 0, 0, 64))}"
    return str(start + PAGE * rng.randrange(512))


def _area(rng: random.Random, at: int, start: int) -> str:
    page = rng.choice((PAGE,) * 12 + (1 << 16, 1 << 17, 8192, 0))
    flags = rng.choice((0, 0, 1, 1, 2, 3))
    return f"area {rng.choice((0, 1, 2, 3, 5, 8, 16, 17, 64, 300))} {page} {flags} {_address(rng, at, start)}"


def area(rng: random.Random) -> Case:
    """Reserving and giving back ranges, sparse ones too, and what their page table entries say."""
    start, end = rng.choice(RANGES)
    steps, made = [f"space {start} {end}"], []
    for _ in range(rng.randint(6, 16)):
        at, kind = len(steps), rng.randrange(11)
        if kind < 5 or at == 1:
            steps.append(_area(rng, at, start))
            made.append((at, int(steps[-1].split()[1])))
        elif kind < 8:
            steps.append(f"release {_address(rng, at, start)}")
        elif kind < 9:
            steps.append(f"pte {_address(rng, at, start)}")
        else:
            area_step, pages = rng.choice(made)
            edge = PAGE * max(0, pages - rng.randrange(2))  # its last page, or the one after it
            steps.append(rng.choice((f"pte ${area_step}+{edge}", f"release ${area_step}+{edge}")))
    return steps


def _kinds(rng: random.Random) -> tuple[int, int]:
    """A compressible and an incompressible kind, either or both missing (-1)."""
    return rng.choice(((-1, 0), (-1, 0), (-1, 6), (-1, 6), (8, 0), (8, -1), (-1, -1), (-1, rng.randrange(256))))


def mapped(rng: random.Random) -> Case:
    """Maps and unmaps of a few buffers, fixed and not, in areas and outside."""
    start, end = rng.choice(RANGES)
    steps, sizes, areas, fixed, maps = [f"space {start} {end}"], [], [], set(), []
    again = False
    for i in range(3):
        sizes.append(PAGE * rng.choice((1, 2, 3, 4, 8, 16, 33)))
        steps.append(f"buffer {i} {sizes[i]} {int(rng.random() < 0.3)} {(i + 1) << 32}")
    for _ in range(rng.randint(8, 20)):
        at, kind = len(steps), rng.randrange(12)
        which = rng.randrange(3)
        flags = rng.choice((0, 0, CACHEABLE)) | rng.choice(ACCESSES)
        compressible, incompressible = _kinds(rng) if rng.random() < 0.4 else (-1, 0)
        if kind < 2 or not areas:
            areas.append(at)
            steps.append(f"area {rng.choice((4, 8, 16, 40))} {PAGE} {rng.choice((0, 0, 2))} 0")
        elif kind < 6:
            offset, part = 0, 0
            if rng.random() < 0.5:
                part = PAGE * rng.randint(1, sizes[which] // PAGE)
                offset = PAGE * rng.randint(0, (sizes[which] - part) // PAGE)
                offset = min(offset + rng.choice((0, 0, 0, 0, 64)), sizes[which] - part)
                part -= rng.choice((0, 0, 0, 100))
            elif rng.random() < 0.1:
                part, offset = rng.choice(((0, PAGE * (sizes[which] // PAGE - 1)), (100, sizes[which] - 100)))
            where = f"${rng.choice(areas)}+{PAGE * rng.randrange(24) + rng.choice((0, 0, 0, 0, 0, 0, 0, 512))}"
            if rng.random() < 0.25 and fixed:
                where = rng.choice(sorted(fixed))
            if rng.random() < 0.1:
                where = str(start + PAGE * rng.randrange(64))
            again = again or where in fixed
            fixed.add(where)
            maps.append(at)
            earlier = [step for step in steps if step.startswith("map ") and f" {where} " in step]
            wanted = f"map {which} {flags | FIXED} {where} {offset} {part} {compressible} {incompressible}"
            steps.append(earlier[0] if earlier and rng.random() < 0.8 else wanted)
        elif kind < 9:
            maps.append(at)
            steps.append(f"map {which} {flags & CACHEABLE} 0 0 0 {compressible} {incompressible}")
        elif maps and rng.random() < 0.8:
            steps.append(f"unmap ${rng.choice(maps)}")
        else:
            steps.append(f"unmap {_address(rng, at, start)}")
        if rng.random() < 0.2:
            steps.append("mappings")
    if again:  # what is mapped twice outlives its area, where the driver reads what it has freed
        return [*steps, "mappings"]
    # At last an area goes with what is in it, and another buffer may land there.
    gone = rng.choice(areas)
    steps += ["mappings", f"release ${gone}+{PAGE * rng.randrange(4)}", "mappings"]
    steps += [f"pte ${at}" for at in rng.sample(maps, min(2, len(maps)))]
    for which in range(2):
        steps.append(f"map {which} {CACHEABLE * which} 0 0 0 -1 {7 + which}")
        at = len(steps) - 1
        steps += [f"pte ${at}", *(f"pte ${gone}+{PAGE * page}" for page in rng.sample(range(16), 3))]
        steps += [f"unmap ${at}", f"pte ${at}"]
    return [*steps, "mappings"]


def pte(rng: random.Random) -> Case:
    """One map with some flags, and the page table entries in it and after it, before and after."""
    pages, sparse = rng.choice((1, 2, 5, 16)), rng.random() < 0.4
    flags = sum(flag for flag in (CACHEABLE, UNMAPPED, L3, COHERENT) if rng.random() < 0.4) | rng.choice(ACCESSES)
    read_only = int(rng.random() < 0.3)
    compressible = rng.choice((-1, -1, -1, rng.randrange(256)))
    incompressible = rng.choice((0, 6, rng.randrange(256))) if compressible < 0 else 0
    physical = PAGE * rng.randrange(1, 1 << 24)
    steps = [
        f"space {COMMON[0]} {COMMON[1]}",
        f"buffer 0 {PAGE * pages} {read_only} {physical}",
        f"area {pages + 2} {PAGE} {2 * sparse} 0",
    ]
    if rng.random() < 0.6:
        steps.append(f"map 0 {flags | FIXED} $2+{PAGE} 0 0 {compressible} {incompressible}")
    else:
        steps.append(f"map 0 {flags} 0 0 0 {compressible} {incompressible}")
    places = ["$3", f"$3+{PAGE * (pages - 1)}", f"$3+{PAGE * pages}", "$2", f"$2+{PAGE * (pages + 1)}"]
    steps += [f"pte {place}" for place in places]
    steps.append("unmap $3")
    return [*steps, *(f"pte {place}" for place in places[:3])]


def _many(rng: random.Random) -> Case:
    """One more channel, or subcontext, than a group takes."""
    if rng.random() < 0.5:
        kinds = [rng.choice((1, 1, 1, 0)) for _ in range(68)]
        return ["tsg", *(f"sub 0 {kind} 0" for kind in kinds), f"del 0 {rng.randrange(64)}", "sub 0 1 0", "sub 0 1 0"]
    steps = ["tsg"]
    for c in range(129):
        steps += ["channel 0", f"as {c} 0", f"bind 0 {c} -1"]
    return [*steps, f"unbind 0 {rng.randrange(128)}", "bind 0 128 -1"]


def group(rng: random.Random) -> Case:
    """Groups, subcontexts and channels: bound, unbound, bound again, closed."""
    if rng.random() < 0.006:
        return _many(rng)
    steps = ["tsg", "tsg"] + [f"channel {int(rng.random() < 0.1)}" for _ in range(4)]
    bound_vm, alive, groups = {}, {0, 1, 2, 3}, {0, 1}
    for _ in range(rng.randint(10, 24)):
        kind, t, c = rng.randrange(14), rng.choice(sorted(groups)), rng.choice(sorted(alive))
        if kind < 2:
            if c not in bound_vm:
                bound_vm[c] = rng.randrange(2)
                steps.append(f"as {c} {bound_vm[c]}")
        elif kind < 4:
            steps.append(f"sub {t} {rng.randrange(2)} {rng.randrange(2)}")
        elif kind < 5:
            steps.append(f"del {t} {rng.choice((0, 1, 2, 3, 63, 64))}")
        elif kind < 9:
            steps.append(f"bind {t} {c} {rng.choice((-1, -1, 0, 0, 1, 2, 63, 64))}")
        elif kind < 11:
            steps.append(f"unbind {t} {c}")
        elif kind < 12:
            steps.append(f"members {t}")
        elif kind < 13:
            steps.append(f"serves {c}")
        elif len(alive) > 1 and rng.random() < 0.6:
            alive.discard(c)
            steps.append(f"close {c}")
        elif len(groups) > 1 and rng.random() < 0.3:
            groups.discard(t)
            steps.append(f"drop {t}")
    steps += [f"serves {c}" for c in sorted(alive)]
    return steps + [f"members {t}" for t in sorted(groups)]


def numbers(rng: random.Random) -> Case:
    """Which numbers groups and channels get, as they come and go."""
    steps, channels, groups = [], [], []
    made = [0, 0]
    for _ in range(rng.randint(10, 30)):
        if rng.random() < 0.6 or not (channels or groups):
            if rng.random() < 0.5 and made[0] < 12:
                steps.append("tsg")
                groups.append(made[0])
                made[0] += 1
            else:
                steps.append("channel 0")
                channels.append(made[1])
                made[1] += 1
        elif channels and (rng.random() < 0.5 or not groups):
            steps.append(f"close {channels.pop(rng.randrange(len(channels)))}")
        else:
            steps.append(f"drop {groups.pop(rng.randrange(len(groups)))}")
    return steps


def runlist(rng: random.Random) -> Case:
    """The order of a runlist's entries by level, and what timeslices and levels are taken."""
    count, steps, n = rng.randint(1, 7), [], 0
    for t in range(count):
        steps.append("tsg")
        for _ in range(rng.choice((0, 1, 1, 1, 2))):
            steps += ["channel 0", f"as {n} 0", f"bind {t} {n} -1"]
            n += 1
    for t in range(count):
        level = rng.choice((0, 0, 1, 2, 1, 2, 3, 1 << 31))
        steps.append(f"level {t} {level}")
        if rng.random() < 0.6:
            slices = (0, 999, 1000, 1001, 1024, 49999, 50000, 50001, rng.randrange(60000), (1 << 32) - 1)
            steps += [f"timeslice {t} {rng.choice(slices)}", f"gettimeslice {t}"]
        if rng.random() < 0.3:
            steps.append("runlist")
    return [*steps, "runlist"]


def setup(rng: random.Random) -> Case:
    """Setting channels up: what is missing or wrong, in the order in which it is told, and trying again."""
    steps = ["tsg", "channel 0", "channel 0"]
    had: set[str] = set()
    for c in range(2):
        if rng.random() < 0.7:
            had.add(f"as {c}")
            steps.append(f"as {c} 0")
        if rng.random() < 0.7:
            steps.append(f"bind 0 {c} -1")
        if rng.random() < 0.7:
            steps.append(f"wdt {c} 0")
    for _ in range(rng.randint(6, 14)):
        c, kind = rng.randrange(2), rng.randrange(10)
        if kind < 2:
            if (step := f"as {c}") not in had:
                had.add(step)
                steps.append(f"{step} 0")
        elif kind < 4:
            steps.append(f"bind 0 {c} {rng.choice((-1, -1, 1))}")
        elif kind < 5:
            if f"up {c}" not in had:
                steps.append(f"wdt {c} {int(rng.random() < 0.3)}")
        elif kind < 6 and rng.random() < 0.3:
            steps.append(f"unbind 0 {c}")
        else:
            flags = rng.choice((0, 2, 2, 8, 10, 10, 10, 10, 11, 14, 15))
            entries = rng.choice((4, 64, 1024, 1 << 20, 0, 1, 2 if flags & 8 else 4))
            error = rng.choice((0, 0, 0, -22, -12))
            # Without the usermode flag the driver would fill the ring itself: there is no memory for it.
            steps.append(f"setup {c} {entries} {flags} {error} {int(not flags & 8)}")
            had.add(f"up {c}")
    return steps


def fault(rng: random.Random) -> Case:
    """What ends a group, by which error code, and which of its channels learn it."""
    count = rng.randint(1, 3)
    steps = ["tsg"]
    for c in range(count):
        steps += ["channel 0", f"as {c} 0"]
        if rng.random() < 0.9:
            steps.append(f"bind 0 {c} -1")
    for _ in range(rng.randint(2, 10)):
        kind, c = rng.randrange(10), rng.randrange(count)
        if kind < 2:
            steps.append(f"limit {c} {rng.choice((0, 1, 99, 100, 150, 200, 400, 3000, (1 << 32) - 1))}")
        elif kind < 6:
            steps.append("period")
        elif kind < 7:
            steps.append(f"reset {c}")
        else:
            low = 1 << rng.randrange(32) if rng.random() < 0.7 else rng.getrandbits(32) & rng.getrandbits(32)
            high = rng.choice((1 << 31, 1 << rng.randrange(8), 3))
            steps.append(rng.choice((f"host {low} 0",) * 4 + (f"host 0 {high}",)))
    return steps


def number(rng: random.Random) -> Case:
    """Whether a counter has reached a threshold, over the wrap; what a doorbell is rung with."""
    if rng.random() < 0.25:
        return [f"token {rng.randrange(4096)} {rng.randrange(128)}" for _ in range(3)]
    threshold = rng.choice((0, 1, 0x7FFFFFFF, 0x80000000, 0xFFFFFFFF, rng.getrandbits(32)))
    near = rng.choice((0, 0x7FFFFFFF, 0x80000000)) + rng.randint(-2, 2)
    return [f"released {threshold} {value % (1 << 32)}" for value in (threshold + near, rng.getrandbits(32), threshold)]


def engine_class(rng: random.Random) -> Case:
    """Which class numbers an engine object may have, and which of them compute or draw."""
    known = rng.choice(CLASSES)
    low = (known & 0xFF00) | rng.choice((0x2D, 0x40, 0x6F, 0x97, 0xB5, 0xB7, 0xC0))
    return [
        f"is {n}"
        for n in (known, low, known + rng.choice((-1, 1, 256)), rng.getrandbits(16), 0xB000 + rng.getrandbits(12))
    ]


def engine_object(rng: random.Random) -> Case:
    """Engine objects, the preemption modes that they ask for, and those that are set later."""
    steps = ["tsg", "channel 0", "channel 0", "channel 0", "as 0 0", "as 1 1", "as 2 0", "sub 0 0 0", "sub 0 1 1"]
    for c, veid in enumerate((0, 1, 0)):
        if rng.random() < 0.85:
            steps.append(f"bind 0 {c} {veid}")
    if rng.random() < 0.3:  # compute in two subcontexts beside graphics, in any order
        kinds = [(0, CLASSES[0]), (1, CLASSES[0]), (2, CLASSES[1])]
        steps += [f"object {c} {kind} 0" for c, kind in rng.sample(kinds, rng.randint(2, 3))]
        steps.append(f"modes {rng.randrange(3)} 0 4")
    for _ in range(rng.randint(4, 14)):
        c, kind = rng.randrange(3), rng.randrange(11)
        if kind == 10:
            steps.append(rng.choice((f"unbind 0 {c}", f"bind 0 {c} {rng.randrange(2)}")))
            if steps[-1].startswith("unbind") and rng.random() < 0.7:
                steps += [
                    f"bind 0 {c} {rng.choice((c % 2, c % 2, 1))}",
                    f"modes {c} {rng.randrange(3)} {rng.choice((2, 4))}",
                ]
        elif kind < 4:
            wanted = rng.choice((*CLASSES[:3], *CLASSES[:3], *CLASSES, 0, 0x1234))
            steps.append(f"object {c} {wanted} {rng.choice((0, 0, 0, 2, 4, 6, 1))}")
        elif kind < 8:
            graphics, compute = rng.choice((0, 0, 0, 1, 2, 4)), rng.choice((0, 1, 2, 2, 4, 4, 8))
            steps.append(f"modes {c} {graphics} {compute}")
        else:
            steps.append("image")
    return [*steps, "image"]


KINDS: Mapping[str, tuple[Callable[[random.Random], Case], int]] = {
    "va": (va, 600),
    "range": (bounds, 500),
    "area": (area, 600),
    "map": (mapped, 700),
    "pte": (pte, 700),
    "group": (group, 700),
    "numbers": (numbers, 400),
    "runlist": (runlist, 600),
    "setup": (setup, 600),
    "fault": (fault, 700),
    "number": (number, 500),
    "class": (engine_class, 400),
    "object": (engine_object, 700),
}
"""How a kind's cases are made, and how many there are."""


def generate(kind: str, seed: int) -> list[Case]:
    """A kind's cases, the same ones for the same seed, no two alike."""
    make, count = KINDS[kind]
    rng = random.Random(f"{seed} {kind}")
    found: dict[str, Case] = {}
    while len(found) < count:
        case = make(rng)
        found["\n".join(case)] = case
    return list(found.values())
