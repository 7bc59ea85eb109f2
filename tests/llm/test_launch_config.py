"""forms.py: what its table aims at holds for the shapes of published models."""

import pytest

from tegrad.bench.models import SHAPES
from tegrad.bench.products import products
from tegrad.llm.chips import Role
from tegrad.llm.formats import BF16, Q4_K, Q6_K, Q8_0, BlockType
from tegrad.llm.launch_config import in_flight, launch_config

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
    assert items == 1 or 3 * WARPS / 4 < cut.warps <= WARPS
    assert cut.ahead == min(items, in_flight(product, cut))
