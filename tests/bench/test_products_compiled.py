"""What compilers make of products and attention: nothing in local memory, no shuffle that lanes reach by two ways."""

import re
from collections.abc import Iterator
from types import SimpleNamespace

import pytest

from tegrad.bench.models import SHAPES, formats
from tegrad.bench.products import attention, products
from tegrad.llm.cache import BLOCK
from tegrad.llm.errors import UnsupportedModelError
from tegrad.llm.launch_config import launch_config
from tegrad.llm.programs import compile_kernel
from tegrad.nv.cubin import Cubin, read_ptx

pytestmark = [pytest.mark.board, pytest.mark.long]

_JUMP = re.compile(r"(@\S+)?\s*bra(?:\.uni)?\s+(\$\w+);")


def blocks(ptx: str) -> tuple[list[list[str]], dict[str, int]]:
    """A kernel's basic blocks, and where labels are."""
    found: list[list[str]] = [[]]
    labels: dict[str, int] = {}
    for line in (line.strip() for line in ptx.splitlines()):
        if match := re.match(r"(\$\w+):", line):
            if found[-1]:
                found.append([])
            labels[match[1]] = len(found) - 1
        elif line and not line.startswith("//"):
            found[-1].append(line)
            if _JUMP.match(line):
                found.append([])
    return found, labels


def parted_shuffles(ptx: str) -> Iterator[str]:
    """Forward branches with a shuffle at the beginning of both ways: lanes that part there do not meet in either."""
    found, labels = blocks(ptx)

    def landing(at: int) -> int:
        """Where a block leads that only jumps on."""
        while len(found[at]) == 1 and (jump := _JUMP.match(found[at][0])) and not jump[1]:
            at = labels[jump[2]]
        return at

    for index, block in enumerate(found[:-1]):
        jump = _JUMP.match(block[-1]) if block else None
        if jump and jump[1]:
            ways = {landing(labels[jump[2]]), landing(index + 1)}
            if len(ways) == 2 and min(ways) > index and all("shfl.sync" in " ".join(found[way]) for way in ways):
                yield block[-1]


def test_two_ways_to_a_shuffle_are_found() -> None:
    shuffle = "shfl.sync.bfly.b32 %r1|%p1, %r2, 16, 31, -1;"
    parted = f"@%p9 bra $A;\nbra.uni $B;\n$A:\n{shuffle}\nbra.uni $C;\n$B:\n{shuffle}\n$C:\nret;"
    assert list(parted_shuffles(parted)) == ["@%p9 bra $A;"]
    assert list(parted_shuffles(f"@%p9 bra $A;\nmov.u32 %r1, 1;\n$A:\n{shuffle}\nret;")) == []


@pytest.mark.parametrize("model", ["1b-q6k", "3b-q6k", "8b-q4k", "1b-q8_0", "1b-f16", "qwen3-0.6b-q8_0"])
@pytest.mark.parametrize("arch", ["sm_87", "sm_90"])
def test_forms_spill_nothing_and_shuffle_together(model: str, arch: str) -> None:
    shape, _, _ = model.rpartition("-")
    for role, product in products(SHAPES[shape].config, formats(model), arch):
        cut = launch_config(product, role, arch)
        lib = compile_kernel("matvec", arch, dynamic_shared=product.shared_bytes(), OVERLAP=0, **product.defines(cut))
        assert Cubin(lib).stack("matvec") == 0, (role, cut)
        section = read_ptx(lib)
        assert section is not None
        assert list(parted_shuffles(section.ptx)) == [], (role, cut)


@pytest.mark.parametrize("cache", ["f16", "q8_0"])
@pytest.mark.parametrize(("arch", "sms"), [("sm_87", 16), ("sm_90", 132)])
def test_attention_spills_nothing_and_shuffles_together(arch: str, sms: int, cache: str) -> None:
    device = SimpleNamespace(sm_count=sms, arch=arch)
    for name, shape in SHAPES.items():
        if cache == "q8_0" and shape.config.head_dim % BLOCK:
            with pytest.raises(UnsupportedModelError, match="a q8_0 cache has blocks of 32"):
                attention(shape.config, 4096, cache, device)
            continue
        made = attention(shape.config, 4096, cache, device)
        lib = compile_kernel("attention", arch, **made.defines)
        assert Cubin(lib).stack("attention") == 0, name
        section = read_ptx(lib)
        assert section is not None
        assert list(parted_shuffles(section.ptx)) == [], name
