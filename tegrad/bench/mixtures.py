"""Which format each tensor of a published file has: what llama-quantize chooses when it is asked for a mixture.

"Q4_K_M" is no format: such a file has Q4_K, Q6_K for what is worth more bits, and other formats where a row is no
multiple of 256 weights. The rules were read in llama.cpp's src/llama-quant.cpp (llama_tensor_get_type_impl and
tensor_type_fallback, ggml 0.25.3), for models without experts and without an importance matrix.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Final, TypeAlias


@dataclass(frozen=True, slots=True)
class Place:
    """A matrix in a model."""

    name: str
    """Without layer and ".weight"."""
    columns: int
    layer: int = 0
    layers: int = 1
    group: int = 1
    """Query heads for each key head."""
    output: bool = False
    """It makes the logits: the output matrix, or the embedding of a file without one."""


Rule: TypeAlias = Callable[[Place], str | None]
"""A format by its short name, or None for that of the mixture."""


def _worth_more(place: Place) -> bool:
    """The first and the last eighth of the layers, and every third between."""
    eighth = place.layers // 8
    return place.layer < eighth or place.layer >= 7 * place.layers // 8 or (place.layer - eighth) % 3 == 2


def _more(kind: str) -> Rule:
    return lambda place: kind if _worth_more(place) else None


def _always(kind: str) -> Rule:
    return lambda place: kind


@dataclass(frozen=True, slots=True)
class Mixture:
    """A base format, that of the output, and what has others."""

    base: str
    rules: Mapping[str, Rule] = field(default_factory=dict)
    output: str = "q6k"


MIXTURES: Final[Mapping[str, Mixture]] = {
    "q4_1": Mixture("q4_1"),
    "q5_0": Mixture("q5_0"),
    "q3km": Mixture("q3k", {
        "attn_v": lambda place: "q5k" if place.layer < 2 else "q4k",
        "attn_qkv": _always("q4k"),
        "attn_output": _always("q4k"),
        "ffn_down": lambda place: "q5k" if place.layer < place.layers // 16 else "q4k",
    }),
    "q4km": Mixture("q4k", {"attn_v": _more("q6k"), "attn_qkv": _always("q5k"), "ffn_down": _more("q6k")}),
    "q5km": Mixture("q5k", {"attn_v": _more("q6k"), "attn_qkv": _always("q6k"), "ffn_down": _more("q6k")}),
    "iq4xs": Mixture("iq4_xs", {
        "attn_v": lambda place: "q5k" if place.group >= 4 else None,
        "ffn_down": lambda place: "q5k" if place.layer < place.layers // 8 else None,
    }),
}  # fmt: skip
"""By the end of a model's name: Q4_1, Q5_0, Q3_K_M, Q4_K_M, Q5_K_M, IQ4_XS."""

INSTEAD: Final[Mapping[str, str]] = {"q3k": "q4_0", "q4k": "q5_0", "q5k": "q5_1", "q6k": "q8_0", "iq4_xs": "iq4_nl"}
"""What a format of blocks of 256 becomes where a row is no multiple of them."""
BLOCK: Final = 256


def format_of(mixture: Mixture, place: Place) -> str:
    """The format of a matrix, by its short name."""
    whole = place.columns % BLOCK == 0
    if place.output:
        return mixture.output if whole else INSTEAD[mixture.output]
    rule = mixture.rules.get(place.name)
    chosen = (rule(place) if rule else None) or mixture.base
    return chosen if whole else INSTEAD.get(chosen, chosen)
