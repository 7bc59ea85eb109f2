"""Products of packed matrices with one vector: what `kernels/matvec.cu` is compiled for, launched with, and given.

A `Product` says what is computed, a `LaunchConfig` how its work is cut: `tegrad.llm.launch_config` has those of a chip.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import gcd
from typing import Any, Final

from tegrad.llm.errors import UnsupportedModelError
from tegrad.llm.formats import LANE_WEIGHTS, PLAIN, SEGMENT, SET, BlockType
from tegrad.llm.macros import ACTIVATIONS, NORMS, Activation, Norm, number
from tegrad.llm.packing import check
from tegrad.llm.programs import load_kernel
from tegrad.nv.gpu import Gpu

MOST_PIECE_WEIGHTS: Final = 1024
"""Weights of a row of floats that are an item, at most."""
BEST_ROWS: Final = 32
"""Rows of which one is the best."""
JOINED: Final = ("x", "y", "ss", "post", "norm", "joined")
"""Names of the buffers of a stream to which a product is still to be added."""


@dataclass(frozen=True, slots=True)
class LaunchConfig:
    """How the work is cut.

    Rows and warps of a CTA, items in flight of a warp, CTAs per SM to leave registers for; whether a lane that always
    meets the same columns keeps their activations in registers.
    """

    cta_rows: int
    warps: int
    ahead: int = 4
    ctas: int = 1
    keep: bool = True


@dataclass(frozen=True, slots=True)
class Part:
    """A matrix: its format and rows."""

    kind: BlockType
    rows: int


@dataclass(frozen=True, slots=True)
class Product:
    """One launch of matvec: matrices that multiply the same input, one below the other, and what follows."""

    parts: tuple[Part, ...]
    """One to four. Where `gated`, two alike: gate and up."""
    columns: int
    norm: Norm = "none"
    """Of the input. The q of packed matrices holds the norm's weight already and lacks only the factor."""
    eps: float = 0.0
    ss_parts: int = 0
    """Partial sums of squares that come with q (norm "rms", packed)."""
    gated: bool = False
    bias: bool = False
    activation: Activation = "none"
    residual: bool = False
    """Added to what is in `out`."""
    times: bool = False
    """Multiplied by what is in `out`."""
    out_x: bool = False
    out_q: bool = False
    out_norm: bool = False
    """q is of the output times the next norm's weight, with partial sums of squares."""
    best: bool = False
    """The largest of every 32 rows, and where: greedy sampling needs no more of the logits."""
    joins: bool = False
    """The input is x plus y after a norm of its own (`post`): each CTA adds for itself, and one of them stores the sum
    in `joined`."""
    scaled: bool = False
    """Behind the weight of that norm stands what the sum is multiplied by."""
    out_ss: bool = False
    """Partial sums of squares of the output, without q."""
    cap: float = 0.0
    """Of the activation "cap"."""

    def __post_init__(self) -> None:
        for part in self.parts:
            check(part.kind, self.columns)
        if self.joins and self.norm == "layer":
            raise UnsupportedModelError("a norm after a block is run with root mean squares alone")
        if self.packed and self.norm == "layer":
            raise UnsupportedModelError("a layer norm before packed matrices is a launch of its own")
        assert not self.gated or self.parts[0] == self.parts[1]

    @property
    def rows(self) -> int:
        """Elements of the output."""
        return self.parts[0].rows if self.gated else sum(part.rows for part in self.parts)

    @property
    def packed(self) -> bool:
        """Whether a part reads int8 activations."""
        return any(part.kind not in PLAIN for part in self.parts)

    @property
    def plain(self) -> bool:
        """Whether a part reads float32 activations."""
        return any(part.kind in PLAIN for part in self.parts)

    @property
    def arguments(self) -> tuple[str, ...]:
        """Names of the kernel's buffers, in their order."""
        names: list[str] = []
        for index in range(len(self.parts)):
            names += [f"w{index}", f"b{index}"] if self.bias else [f"w{index}"]
        wanted = {
            **(dict.fromkeys(JOINED, True) if self.joins else self._separate),
            "out": self.out_x or self.residual or self.times,
            "next_norm": self.out_norm,
            "out_q": self.out_q,
            "out_s": self.out_q,
            "out_ss": self.out_norm or self.out_ss,
            "best": self.best,
            "best_row": self.best,
        }
        return (*names, *(name for name, is_wanted in wanted.items() if is_wanted))

    @property
    def _separate(self) -> dict[str, bool]:
        """Which buffers the input is in, if it is a stream as it is."""
        return {
            "q": self.packed,
            "s": self.packed,
            "ss": self.packed and self.norm != "none",
            "x": self.plain,
            "norm": self.plain and self.norm != "none",
            "norm_bias": self.plain and self.norm == "layer",
        }

    @property
    def weight_bytes(self) -> int:
        """Bytes of the matrices, which are read once."""
        return sum(part.kind.row_bytes(part.rows * self.columns) for part in self.parts)

    def out_ss_parts(self, config: LaunchConfig) -> int:
        """Partial sums of squares that `out_ss` holds."""
        return -(-self.rows // min(config.cta_rows, BEST_ROWS))

    def grid(self, config: LaunchConfig) -> int:
        """CTAs of the launch."""
        return sum(-(-part.rows // config.cta_rows) for part in self.parts[: 1 if self.gated else None])

    def fits(self, config: LaunchConfig) -> bool:
        """Whether CTAs of this configuration hold whole items of every part, and a thread for each row."""
        whole = all(part.kind in PLAIN or config.cta_rows * self.columns % SEGMENT == 0 for part in self.parts)
        pieces = config.cta_rows % BEST_ROWS == 0 or (config.cta_rows == SET and not self.best)
        return (
            whole
            and config.cta_rows % SET == 0
            and config.cta_rows <= 32 * config.warps
            and (pieces or not (self.out_norm or self.out_ss))
        )

    def items(self, config: LaunchConfig) -> int:
        """Items of a CTA, of the part that has most: segments, or pieces of a row of floats."""
        most = max(self._pieces(part.kind) if part.kind in PLAIN else self.columns / SEGMENT for part in self.parts)
        return int(config.cta_rows * most) * (2 if self.gated else 1)

    def shared_bytes(self) -> int:
        """Dynamic shared memory: the staged input, in the form of the part that needs most."""
        return max(self._staged(part.kind) for part in self.parts)

    def _pieces(self, kind: BlockType) -> int:
        """Equal pieces that a row of floats is cut into (Items<F, false>::pieces)."""
        lane, count = 16 // kind.size, -(-self.columns // MOST_PIECE_WEIGHTS)
        while self.columns % (count * lane):
            count += 1
        return count

    def _staged(self, kind: BlockType) -> int:
        if kind not in PLAIN:
            return -(-self.columns // SEGMENT) * (SEGMENT // LANE_WEIGHTS) * 96
        part, count = 32 * 16 // kind.size, self._pieces(kind)
        return count * (-(-self.columns // count // part) * part) * 4

    def defines(self, config: LaunchConfig) -> dict[str, Any]:
        """The kernel's macros."""
        made: dict[str, Any] = {
            "K": self.columns,
            "CTA_ROWS": config.cta_rows,
            "WARPS": config.warps,
            "AHEAD": config.ahead,
            "CTAS": config.ctas,
            "KEEP": config.keep,
            "PARTS": 1 if self.gated else len(self.parts),
            "GATED": self.gated,
            "NORM": NORMS[self.norm],
            "EPS": f"{self.eps!r}f",
            "SS_PARTS": self.ss_parts,
            "BIAS": self.bias,
            "ACTIVATION": ACTIVATIONS[self.activation],
            "RESIDUAL": self.residual,
            "OUT_X": self.out_x or self.residual,
            "OUT_Q": self.out_q,
            "OUT_NORM": self.out_norm,
            "BEST": self.best,
            "INPUT_Q": self.packed,
            "INPUT_X": self.plain,
        }
        made |= {"JOIN": 1 + self.scaled} if self.joins else {}
        made |= {"OUT_SS": 1} if self.out_ss else {}
        made |= {"TIMES": 1} if self.times else {}
        made |= {"CAP": number(self.cap)} if self.activation == "cap" else {}
        for index, part in enumerate(self.parts):
            made |= {f"FORMAT{index}": part.kind.name, f"ROWS{index}": part.rows}
        return made

    def load(self, device: Gpu, config: LaunchConfig, overlap: int = 0) -> Any:
        """The program, compiled for the device's chip; `overlap` as in kernels/overlap.cuh."""
        return load_kernel(
            device,
            "matvec",
            buffers=len(self.arguments),
            dynamic_shared=self.shared_bytes(),
            OVERLAP=overlap,
            **self.defines(config),
        )


def least_rows(columns: int) -> int:
    """The smallest rows of a CTA whose weights are whole segments, a multiple of 16."""
    unit = SEGMENT // gcd(SEGMENT, columns)
    return unit * SET // gcd(unit, SET)
