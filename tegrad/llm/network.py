"""What a model computes, as a list of operations: one description for every engine, reference and schedule.

A token's vector is the **residual stream**. `Embed` makes it; each layer runs its own of `Network.blocks` on it, in
order; `Logits` reads it. Whoever executes a model goes through these operations and does each in its own way: the
tinygrad graph (`model`), launches of a decode step (`plan`), of a prompt or a batch (`rows`), the instructions of a
step in one launch (`schedule`), and the reference in numpy (`reference`). The kernel of one launch runs one form of
block; `persistent` refuses any other. A family is a row of `families.ARCHES`; with the numbers of a file it is this
list, `config.Config.network`. What only some families or layers do is a field of the operation that does it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from math import sqrt
from typing import Literal, TypeAlias, TypeVar

from tegrad.llm.rope import Rope, Temperature

T = TypeVar("T")
NormKind: TypeAlias = Literal["rms", "layer"]
"""By the root mean square, or by mean and variance; then a weight, and a bias where the spec has one."""
Rotation: TypeAlias = Literal["interleaved", "halves", "none"]
"""Rotated pairs are neighbours (2i, 2i + 1), or (i, i + rope.dim / 2)."""
ActivationKind: TypeAlias = Literal["silu", "gelu", "relu2"]
"""gelu is its approximation by tanh; relu2 the square of what is above zero."""
Inner: TypeAlias = Literal["mixed", "hidden", "gated"]
"""What an `Add` multiplies: what a mixer, what `Gate` or what `InputGate` made."""


@dataclass(frozen=True, slots=True)
class Stack:
    """A tensor of a file in which several of a family's lie below one another: its name, and which of them this is."""

    name: str
    sizes: tuple[str, ...]
    """Rows of each, as names of sizes."""
    at: int


@dataclass(frozen=True, slots=True)
class Spec:
    """A tensor of a family: GGUF name without what it ends with, and shape as names of sizes, outermost first."""

    name: str
    shape: tuple[str, ...]
    """A name such as "query+key+value" means those rows below one another."""
    bias: Literal["none", "may", "must"] = "none"
    """Whether a "<name>.bias" vector of the outermost size is added."""
    stack: Stack | None = None
    """Where it lies in a file that has no tensor of its name; it has no bias then."""
    suffix: str = "weight"
    """What its name in the file ends with, after a dot; "" for nothing."""

    @property
    def parts(self) -> tuple[str, ...]:
        """Names of the sizes whose rows lie below one another."""
        return tuple(self.shape[0].split("+"))

    @property
    def multiplied(self) -> bool:
        """Whether it is a matrix of products or of rows to choose from, not float32s that go with single elements."""
        return len(self.shape) > 1 and self.shape[-1] != "taps"


def present(*specs: Spec | None) -> tuple[Spec, ...]:
    """Those that there are."""
    return tuple(spec for spec in specs if spec is not None)


@dataclass(frozen=True, slots=True)
class Norm:
    """A normalization of the stream, which stays as it is for whoever adds to it."""

    spec: Spec
    kind: NormKind
    scale: float = 1.0
    """What is normalized is multiplied by it: loading multiplies the tensor."""


def norms(*kinds: Norm | None) -> tuple[Spec, ...]:
    """The tensors of those that there are."""
    return tuple(norm.spec for norm in kinds if norm is not None)


@dataclass(frozen=True, slots=True)
class LayerInputs:
    """Per-layer inputs: what each layer reads of a token beside the stream. A product of the first stream with a matrix
    (all layers', dim), times `product_scale`, each layer's normalized by its root mean square; plus the token's row of
    a table, times `table_scale`; and all of that times `scale`."""

    table: Spec
    matrix: Spec
    norm: Spec
    table_scale: float
    product_scale: float
    scale: float = sqrt(0.5)

    @property
    def specs(self) -> tuple[Spec, ...]:
        """Its tensors."""
        return self.table, self.matrix, self.norm


@dataclass(frozen=True, slots=True)
class Embed:
    """The stream begins as the token's row of a table, times `scale`, plus its position's row where there is such a
    table."""

    table: Spec
    positions: Spec | None = None
    scale: float = 1.0
    inputs: LayerInputs | None = None

    @property
    def specs(self) -> tuple[Spec, ...]:
        """Its tensors."""
        return (*present(self.table, self.positions), *(self.inputs.specs if self.inputs else ()))


@dataclass(frozen=True, slots=True)
class Project:
    """Queries, keys and values, or what another mixer reads: products of the stream, normalized where there is such a
    norm, with matrices whose rows are these, in this order."""

    norm: Norm | None
    matrices: tuple[Spec, ...]

    @property
    def role(self) -> Literal["qkv"]:
        """The product's, as `chips` has tunings for."""
        return "qkv"

    @property
    def specs(self) -> tuple[Spec, ...]:
        """Its tensors."""
        return (*norms(self.norm), *self.matrices)


@dataclass(frozen=True, slots=True)
class Attend:
    """Queries and keys are normalized, by head or whole, where there is such a norm, and rotated; keys and values go
    into the cache, unless an earlier layer's are attended to; what is mixed of the values of all positions so far, or
    of those in the window, is "mixed"."""

    rotation: Rotation
    rope: Rope
    scale: float
    """Products of queries and keys are multiplied by it: scores."""
    query_norm: Spec | None = None
    """By the root mean square: of as many elements at a time as the tensor has."""
    key_norm: Spec | None = None
    norms_turned: bool = False
    """The norms, of heads, are after the rotation instead of before it."""
    window: int | None = None
    """Positions that are attended to at most, the token's own included; None: all of them. Of those after it, where
    they are attended to, as many."""
    cap: float | None = None
    """Scores become cap * tanh(score / cap)."""
    temperature: Temperature | None = None
    """By which queries are scaled."""
    gated: bool = False
    """Behind the query of each head `Project` makes as many gates, whose sigmoids what the head mixes is multiplied
    by."""
    source: int | None = None
    """An earlier layer, whose keys and values are attended to; `Project` makes queries alone."""
    values_are_keys: bool = False
    """What `Project` makes of keys, before it is normalized, is values, too."""
    unit_values: bool = False
    """Each head's value is divided by its root mean square."""
    causal: bool = True
    """Positions after the token's own are not attended to; else all of a text must be there at once."""

    @property
    def made(self) -> int:
        """How many of keys and values `Project` makes: one where keys are values, none where they are a source's."""
        return 0 if self.source is not None else 1 if self.values_are_keys else 2

    def window_within(self, positions: int) -> int | None:
        """The window, where a cache of so many positions has any that lie outside it."""
        return self.window if self.window is not None and self.window < positions else None

    @property
    def norms(self) -> Literal["none", "head", "whole", "turned"]:
        """What queries, and keys, are normalized by: each head's root mean square, or that of all of them; or each
        rotated head's."""
        if self.query_norm is None or self.norms_turned:
            return "turned" if self.norms_turned else "none"
        return "head" if self.query_norm.shape == ("head",) else "whole"

    def prepared(self, heads: T, norm: Callable[[T], T], rotate: Callable[[T], T]) -> T:
        """Queries or keys as scores take them."""
        return norm(rotate(heads)) if self.norms_turned else rotate(norm(heads))

    @property
    def role(self) -> Literal["attention"]:
        """Its name beside those of products."""
        return "attention"

    @property
    def specs(self) -> tuple[Spec, ...]:
        """Its tensors."""
        return present(self.query_norm, self.key_norm)


@dataclass(frozen=True, slots=True)
class Convolving:
    """What stands in the place of attention and convolves `taps` positions by a kernel (elements, taps)."""

    kernel: Spec
    taps: int

    @property
    def window(self) -> int:
        """Positions that are read for themselves, the token's own included."""
        return self.taps

    def window_within(self, positions: int) -> int:
        """The window; a cache of any number of positions is a ring."""
        return self.taps


@dataclass(frozen=True, slots=True)
class Convolve(Convolving):
    """A short convolution in the place of attention. `Project` makes three vectors, one after the other. The product of
    the first and the third goes into the cache; this token's and those of the ones before, `taps` in all, are summed,
    each times its column of the kernel (dim, taps), the token's own being the last. Times the second it is "mixed"."""

    @property
    def role(self) -> Literal["convolution"]:
        """Its name beside those of products."""
        return "convolution"

    @property
    def specs(self) -> tuple[Spec, ...]:
        """Its tensor."""
        return (self.kernel,)


@dataclass(frozen=True, slots=True)
class Delta(Convolving):
    """A gated delta net in the place of attention (arXiv:2412.06464).

    `Project` makes queries and keys of `key_heads` heads and values of `heads`, then as many gates as values, then of
    each head what its beta and its decay are made of. Queries, keys and values are convolved as `Convolve` does, each
    element with its own column of the kernel, and go through SiLU; queries and keys then have a length of 1. Of each
    head a matrix S (keys, values) runs along, 0 in front of the first token: S becomes S * exp(decay * softplus(its own
    + bias)), then key x beta * (value - key S) is added, beta being a sigmoid; query S over the root of `width` is what
    comes of the head. That is normalized by its root mean square and multiplied by SiLU of its gates: "mixed".
    """

    bias: Spec
    decay: Spec
    norm: Spec
    heads: int
    key_heads: int
    """A head of values takes the queries and keys of the one with its number modulo this."""
    width: int
    """Elements of a head."""

    @property
    def channels(self) -> int:
        """Elements that are convolved."""
        return (2 * self.key_heads + self.heads) * self.width

    @property
    def role(self) -> Literal["delta"]:
        """Its name beside those of products."""
        return "delta"

    @property
    def specs(self) -> tuple[Spec, ...]:
        """Its tensors."""
        return self.kernel, self.bias, self.decay, self.norm


@dataclass(frozen=True, slots=True)
class Gate:
    """activation(gate) * up of the stream, normalized where there is such a norm, or activation(up) without a gate:
    "hidden"."""

    norm: Norm | None
    gate: Spec | None
    up: Spec
    activation: ActivationKind

    @property
    def role(self) -> Literal["gate"]:
        """The product's."""
        return "gate"

    @property
    def matrices(self) -> tuple[Spec, ...]:
        """The gate, if any, and up."""
        return present(self.gate, self.up)

    @property
    def specs(self) -> tuple[Spec, ...]:
        """Its tensors."""
        return (*norms(self.norm), *self.matrices)


@dataclass(frozen=True, slots=True)
class InputGate:
    """activation(gate) of the stream, times the layer's own input (`LayerInputs`): "gated"."""

    gate: Spec
    activation: ActivationKind
    norm: None = None

    @property
    def role(self) -> Literal["gate"]:
        """The product's."""
        return "gate"

    @property
    def matrices(self) -> tuple[Spec]:
        """The one."""
        return (self.gate,)

    @property
    def specs(self) -> tuple[Spec]:
        """Its tensor."""
        return (self.gate,)


@dataclass(frozen=True, slots=True)
class Add:
    """A product of what the operation before made, normalized where there is such a norm, added to the stream; which is
    then multiplied by the one number of `scale`, where there is one."""

    matrix: Spec
    reads: Inner
    norm: Norm | None = None
    scale: Spec | None = None

    @property
    def role(self) -> Literal["output", "down"]:
        """The product's."""
        return "output" if self.reads == "mixed" else "down"

    @property
    def matrices(self) -> tuple[Spec]:
        """The one."""
        return (self.matrix,)

    @property
    def specs(self) -> tuple[Spec, ...]:
        """Its tensors."""
        return (self.matrix, *norms(self.norm), *present(self.scale))


@dataclass(frozen=True, slots=True)
class Logits:
    """Products of the normalized stream with the output matrix, or with the embedding where a file has none (tied)."""

    norm: Norm
    matrix: Spec
    cap: float | None = None
    """Logits become cap * tanh(logit / cap)."""

    @property
    def role(self) -> Literal["logits"]:
        """The product's."""
        return "logits"


Mixer: TypeAlias = Attend | Convolve | Delta
"""What reads other tokens."""
Op: TypeAlias = Project | Mixer | Gate | InputGate | Add
Block: TypeAlias = tuple[Op, ...]
"""In a parallel one `Gate` stands before the first `Add`, so that it reads the stream that `Project` reads; attention
and additions stand where what they read has had time to come."""
Reader: TypeAlias = Project | Gate | InputGate | Logits
"""What reads the stream, each through a norm of its own, if any."""


@dataclass(frozen=True)
class Network:
    """A model's operations."""

    embed: Embed
    blocks: tuple[Block, ...]
    """Of each layer. They are the same operations in the same order, of the same tensors, but where some attend and
    others do not, or make no keys and values: these have what mixes, and the products before and after, of their own.
    What `Attend` does with positions may differ from layer to layer, and sizes may (`config.Config.at`)."""
    logits: Logits

    @property
    def layers(self) -> int:
        """How many there are."""
        return len(self.blocks)

    @property
    def once(self) -> tuple[Spec, ...]:
        """The tensors of a model beside its layers, apart from the output, which may be missing."""
        return (*self.embed.specs, self.logits.norm.spec)

    def of_layer(self, layer: int) -> tuple[Spec, ...]:
        """The tensors of a layer, each once."""
        return tuple(dict.fromkeys(spec for op in self.blocks[layer] for spec in op.specs))

    def project(self, layer: int) -> Project:
        """A block's one projection."""
        return next(op for op in self.blocks[layer] if isinstance(op, Project))

    @cached_property
    def mixers(self) -> tuple[Mixer, ...]:
        """Each layer's one attention, or what stands in its place."""
        return tuple(op for block in self.blocks for op in block if isinstance(op, Mixer))

    def kept_by(self, layer: int) -> int:
        """The layer whose cache a layer reads: its own, in most."""
        op = self.mixers[layer]
        return op.source if isinstance(op, Attend) and op.source is not None else layer

    @cached_property
    def keeping(self) -> Mapping[int, Mixer]:
        """The mixers of layers that have a cache of their own."""
        return {at: op for at, op in enumerate(self.mixers) if self.kept_by(at) == at}

    @cached_property
    def attends(self) -> tuple[Attend, ...]:
        """Those that are attention, which is each layer's in most models."""
        return tuple(op for op in self.mixers if isinstance(op, Attend))

    @property
    def convolves(self) -> bool:
        """Whether any layer does."""
        return any(isinstance(op, Convolve) for op in self.mixers)

    @property
    def runs_along(self) -> bool:
        """Whether a layer has a state in which all earlier positions are one: a sequence can only go on at its end."""
        return any(isinstance(op, Delta) for op in self.mixers)

    @property
    def gate(self) -> Gate:
        """Every block's one gate."""
        return next(op for op in self.blocks[0] if isinstance(op, Gate))

    @property
    def last_add(self) -> Add:
        """What makes the stream that the next layer reads."""
        return next(op for op in reversed(self.blocks[0]) if isinstance(op, Add))

    @property
    def by_mean(self) -> bool:
        """Whether all that reads the stream subtracts its mean, so that what all elements share counts nothing."""
        return self.logits.norm.kind == "layer"

    @property
    def parallel(self) -> bool:
        """Whether attention and feed-forward read the same stream."""
        return isinstance(self.blocks[0][1], Gate)

    @property
    def sets_apart(self) -> bool:
        """Whether a number of all that a block adds must be known before it is added in one launch: what norms it, or,
        for those that read the stream, its mean."""
        return self.by_mean or self.last_add.norm is not None

    def operations(self) -> Iterator[tuple[int, Op]]:
        """Every layer's operations with the layer, in order."""
        yield from ((layer, op) for layer, block in enumerate(self.blocks) for op in block)

    def beside(self, layer: int, op: Reader) -> tuple[Reader, ...]:
        """What reads the stream that an operation reads, itself included, in order."""
        if isinstance(op, Logits):
            return (op,)
        block = self.blocks[layer]
        at = block.index(op)
        first = max((here for here in range(at) if isinstance(block[here], Add)), default=0)
        last = next((here for here in range(at, len(block)) if isinstance(block[here], Add)), len(block))
        return tuple(one for one in block[first:last] if isinstance(one, Project | Gate | InputGate))

    def alike(self, layer: int, op: Reader) -> tuple[Reader, ...]:
        """Those of them that read it through the same norm."""
        return tuple(one for one in self.beside(layer, op) if one.norm == op.norm)

    def added_with(self, layer: int, op: Add) -> tuple[Add, ...]:
        """Additions of a layer between which nothing reads the stream, this one among them, in order."""
        found: tuple[Add, ...] = ()
        for one in self.blocks[layer]:
            if not isinstance(one, Add) and op in found:
                break
            found = (*found, one) if isinstance(one, Add) else ()
        return found

    def writer(self, layer: int, op: Op | None) -> tuple[int, Add] | None:
        """What wrote the stream last before an operation of a layer, or before `Logits` (all layers, None), and its
        layer; None: `Embed` did."""
        here = self.blocks[layer][: self.blocks[layer].index(op)] if op is not None else ()
        for at, block in ((layer, here), *((layer - 1, self.blocks[layer - 1]),) * (layer > 0)):
            for one in reversed(block):
                if isinstance(one, Add):
                    return at, one
        return None

    def reader(self, layer: int, op: Op | None) -> tuple[int, Reader]:
        """What reads the stream next after an operation of a layer, or after `Embed` (layer 0, None), and its layer."""
        after = 0 if op is None else self.blocks[layer].index(op) + 1
        rest = (self.blocks[layer][after:], *self.blocks[layer + 1 : layer + 2])
        for at, block in enumerate(rest, layer):
            for one in block:
                if isinstance(one, Project | Gate | InputGate):
                    return at, one
        return self.layers, self.logits

    def readers(self, layer: int, op: Op | None) -> tuple[tuple[int, Add | Reader], ...]:
        """What multiplies what an operation of a layer makes, or `Embed` (layer 0, None), each with its layer."""
        match op:
            case Project():
                return ()
            case Attend() | Convolving() | Gate() | InputGate():
                inner = "hidden" if isinstance(op, Gate) else "gated" if isinstance(op, InputGate) else "mixed"
                adds = (one for one in self.blocks[layer] if isinstance(one, Add) and one.reads == inner)
                return tuple((layer, add) for add in adds)
        at, reader = self.reader(layer, op)
        return tuple((at, one) for one in self.beside(at, reader))
