"""launch_config.py: what its tables aim at holds for the shapes of published models."""

import pytest

from tegrad.bench.models import SHAPES
from tegrad.bench.products import products
from tegrad.llm.chips import Role
from tegrad.llm.formats import BF16, Q4_K, Q6_K, Q8_0, BlockType
from tegrad.llm.launch_config import _even, in_flight, launch_config

WARPS = 16
"""Of a CTA at most, in a product that has an SM's registers for itself."""


@pytest.mark.parametrize("role", ["qkv", "output"])
@pytest.mark.parametrize("kind", [Q4_K, Q6_K, Q8_0, BF16], ids=lambda kind: kind.name)
@pytest.mark.parametrize("name", ["1b", "3b", "8b", "qwen2.5-0.5b", "qwen3-0.6b", "qwen3-1.7b"])
def test_an_h200s_small_products_ask_for_all_their_weights_at_once(name: str, kind: BlockType, role: Role) -> None:
    """By warps first: one has a second item where all warps that a CTA may have are taken, and as many as keep columns
    with warps; then by items in flight, as far as registers go."""
    (product,) = (product for at, product in products(SHAPES[name].config, kind, "sm_90") if at == role)
    cut = launch_config(product, role, "sm_90")
    items = -(-product.items(cut) // cut.warps)
    assert items == 1 or 3 * WARPS / 4 <= cut.warps <= WARPS
    assert cut.ahead == min(items, in_flight(product, cut))


@pytest.mark.parametrize(
    ("items", "warps", "period", "expected"),
    [
        pytest.param(24, 10, 3, 12, id="more, which keep columns"),
        pytest.param(20, 16, 3, 10, id="fewer, in as many rounds"),
        pytest.param(24, 16, 3, 12, id="fewer, where more would be too many"),
        pytest.param(30, 16, 5, 15, id="fewer by one"),
        pytest.param(24, 7, 3, 6, id="fewer, though eight divide: columns would change"),
        pytest.param(23, 16, 5, 16, id="none divide"),
    ],
)
def test_warps_divide_items_where_that_costs_nothing(items: int, warps: int, period: int, expected: int) -> None:
    assert _even(items, warps, period) == expected


@pytest.mark.parametrize("name", ["3b", "8b"])
def test_two_ctas_share_an_sm_where_a_long_product_has_more_than_sms(name: str) -> None:
    made = dict(products(SHAPES[name].config, Q4_K, "sm_90").keys())
    down, output = (launch_config(made[role], role, "sm_90") for role in ("down", "output"))
    grids = made["down"].grid(down), made["output"].grid(output)
    assert all(132 < grid <= 264 for grid in grids)
    assert (down.ctas, output.ctas) == (2, 1)  # the second has a round or two


def test_an_sm_whose_registers_hold_one_cta_keeps_its_warps() -> None:
    (product,) = (product for at, product in products(SHAPES["8b"].config, BF16, "sm_90") if at == "output")
    made = launch_config(product, "output", "sm_90")
    assert (made.ctas, made.warps) == (1, WARPS)
