"""What several kernels' macros are made of: numbers that stand for kinds, and floats as C has them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final, Literal, TypeAlias

Norm: TypeAlias = Literal["none", "rms", "layer"]
Activation: TypeAlias = Literal["none", "silu", "gelu", "cap", "relu2"]

NORMS: Final[Mapping[Norm, int]] = {"none": 0, "rms": 1, "layer": 2}
ACTIVATIONS: Final[Mapping[Activation, int]] = {"none": 0, "silu": 1, "gelu": 2, "cap": 3, "relu2": 4}
"""As in activation.cuh."""
ROPES: Final[Mapping[str, int]] = {"none": 0, "interleaved": 1, "halves": 2}
QK_NORMS: Final[Mapping[str, int]] = {"none": 0, "head": 1, "whole": 2, "turned": 3}
"""By `network.Attend.norms`."""

MOST_GROUP: Final = 8
"""Query heads of one KV head that a CTA attends for at most: it holds their queries and sums in registers."""
WIDE: Final = 256
"""Elements of a head beyond which a lane holds 16 instead of 8,"""
MOST_WIDE_ELEMENTS: Final = 1024
"""and a CTA so many of all its heads at most."""


def group_counts(heads: int, head_dim: int) -> tuple[int, ...]:
    """Into how many groups, each of another CTA, a KV head's query heads can be cut; the fewest first."""
    most = MOST_GROUP if head_dim <= WIDE else MOST_WIDE_ELEMENTS // head_dim
    return tuple(at for at in range(1, heads + 1) if heads % at == 0 and heads // at <= most)


def number(value: float) -> str:
    """A float32 constant."""
    return f"{value:.9e}f"
