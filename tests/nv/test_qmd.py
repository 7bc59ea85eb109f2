"""tinygrad's QMD calls on our layouts: version 3 bit for bit as tinygrad writes it, version 4 by name."""

import ast
import inspect
import random
from types import SimpleNamespace
from typing import Any

import pytest
from tinygrad.runtime import ops_nv

import tegrad.nv
from tegrad.hw import qmd as hw
from tegrad.nv.qmd import QMD, layout_of, v4_name

STOCK: Any = next(c for c in QMD.__mro__ if c.__module__ == ops_nv.__name__)
SIZES = [f"constant_buffer_size_shifted4_{i}" for i in range(8)]


def device(compute_class: int) -> Any:
    return SimpleNamespace(iface=SimpleNamespace(compute_class=compute_class))


AMPERE, HOPPER, BLACKWELL = device(0xC7C0), device(0xCBC0), device(0xCEC0)


def fields_of_upstream() -> set[str]:
    """Names of QMD fields that tinygrad's NV runtime writes or asks for, below Blackwell."""
    tree = ast.parse(inspect.getsource(ops_nv))
    names = {
        key.value
        for node in ast.walk(tree)
        if isinstance(node, ast.Dict)
        for key in node.keys
        if isinstance(key, ast.Constant)
    }
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and ast.unparse(node.func).endswith(("QMD", ".write")):
            names |= {keyword.arg for keyword in node.keywords if keyword.arg}
    return {str(name).lower() for name in names} & set(hw.V3.bits)


def test_the_class_decides_the_layout() -> None:
    assert [layout_of(c) for c in (0xC6C0, 0xC7C0, 0xC9C0, 0xCBC0)] == [hw.V3, hw.V3, hw.V3, hw.V4]
    assert layout_of(0xCDC0) is layout_of(0xC5C0) is None


def test_version_3_is_what_tinygrad_writes() -> None:
    stock = STOCK(AMPERE)
    ours = QMD(AMPERE)
    choice = random.Random(7)
    table = {name.lower(): bits for name, bits in STOCK.fields[stock.pref].items()}
    shared = set(table) & set(hw.V3.bits) - set(SIZES)
    # One field that only the hardware writes is wider in the newer class.
    assert {name for name in shared if table[name] != hw.V3.bits[name]} == {"hw_only_dependence_counter"}
    names = sorted(shared - {"hw_only_dependence_counter"})
    assert len(names) > 150
    for name in names:
        hi, lo = hw.V3.bits[name]
        value = choice.getrandbits(hi - lo + 1)
        stock.write(**{name: value})
        ours.write(**{name: value})
        assert ours.field_offset(name) == stock.field_offset(name)
        assert ours.read(name) == value
    for i in range(8):
        stock.set_constant_buf_addr(i, 0x12_3456_0000 + i)
        ours.set_constant_buf_addr(i, 0x12_3456_0000 + i)
    assert bytes(ours.mv) == bytes(stock.mv)
    assert (ours.ver, ours.sz) == (stock.ver, stock.sz)


def test_constant_buffer_sizes_are_given_in_bytes() -> None:
    for dev in (AMPERE, HOPPER):
        qmd = QMD(dev, constant_buffer_size_shifted4_0=0x178, constant_buffer_size_shifted4_3=65536)
        assert (qmd.read("constant_buffer_size_shifted4_0"), qmd.read("constant_buffer_size_shifted4_3")) == (24, 4096)


def test_every_field_that_tinygrad_uses_has_its_place_in_version_4() -> None:
    used = fields_of_upstream() | {f"release{i}_enable" for i in (0, 1)} | {"cta_raster_width"}
    assert {"register_count_v", "dependent_qmd0_pointer", "program_prefetch_size", "sass_version"} <= used
    for name in used:
        mapped = v4_name(name)
        assert mapped in hw.V4.bits or (mapped == "" and name == "sm_global_caching_enable"), name


def test_version_4_fields_land_where_the_header_says() -> None:
    qmd = QMD(
        HOPPER,
        qmd_major_version=3,
        sm_global_caching_enable=1,
        register_count_v=40,
        program_address_upper=0x12,
        program_address_lower=0x34567800,
        shared_memory_size=0x400,
    )
    qmd.write(
        dependent_qmd0_pointer=0xABCDE, dependent_qmd0_action=1, dependent_qmd0_prefetch=1, dependent_qmd0_enable=1
    )
    qmd.set_constant_buf_addr(0, 0x12_3456_7000)
    fields = dict(hw.Qmd(hw.V4, qmd.mv).items())
    assert fields == {
        "qmd_type": 2,
        "qmd_major_version": 4,
        "register_count": 40,
        "program_address_upper": 0x12,
        "program_address_lower": 0x34567800,
        "shared_memory_size": 0x400,
        "dependent_qmd0_pointer": 0xABCDE,
        "dependent_qmd_action_0": 1,
        "dependent_qmd_prefetch_0": 1,
        "dependent_qmd_enable_0": 1,
        "constant_buffer_addr_lower_shifted6_0": 0x12_3456_7000 >> 6 & 0xFFFFFFFF,
    }
    assert (qmd.ver, qmd.sz, qmd.mv.nbytes) == (4, 96, 384)


def test_offsets_that_are_patched_at_submit_time() -> None:
    qmd = QMD(HOPPER)
    assert [qmd.field_offset(n) for n in ("grid_width", "cta_thread_dimension0", "cta_thread_dimension2")] == [
        128,
        144,
        148,
    ]
    assert qmd.field_offset("release_semaphore0_addr_lower") == 80
    assert qmd.field_offset("release_semaphore1_payload_lower") == 104


def test_a_release_of_version_4_stores_its_whole_payload() -> None:
    qmd = QMD(HOPPER)
    assert qmd.read("release0_enable") == 0
    qmd.write(release1_enable=1)
    assert (qmd.read("release_enable_1"), qmd.read("release_payload64b_1")) == (1, 1)
    assert (qmd.read("release_enable_0"), qmd.read("release_structure_size_1")) == (0, 0)


def test_a_view_is_written_in_place_and_keeps_what_it_held() -> None:
    memory = bytearray(1024)
    memory[:384] = bytes(QMD(HOPPER, register_count_v=17).mv)
    view = QMD(HOPPER, view=memoryview(memory)[0:])
    view.write(release0_enable=1)
    again = hw.Qmd(hw.V4, memory)
    assert (again.read("register_count"), again.read("release_enable_0"), again.read("qmd_type")) == (17, 1, 2)
    assert memory[384:] == bytes(640)


@pytest.mark.parametrize("dev", [AMPERE, HOPPER])
def test_what_does_not_fit_or_does_not_exist_is_refused(dev: Any) -> None:
    with pytest.raises(OverflowError, match="register_count"):
        QMD(dev, register_count_v=512)
    with pytest.raises(KeyError, match="wings"):
        QMD(dev, wings=2)


def test_other_classes_keep_tinygrads_layout() -> None:
    tegrad.nv.install()
    stock, ours = (
        STOCK(BLACKWELL, qmd_major_version=5, register_count=33),
        QMD(BLACKWELL, qmd_major_version=5, register_count=33),
    )
    ours.set_constant_buf_addr(1, 0x1000)
    stock.set_constant_buf_addr(1, 0x1000)
    assert bytes(ours.mv) == bytes(stock.mv)
    assert (ours.ver, ours.read("register_count"), ours.field_offset("grid_width")) == (
        5,
        33,
        stock.field_offset("grid_width"),
    )
