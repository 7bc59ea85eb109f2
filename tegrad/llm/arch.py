"""What a model family may have, tensors, norms, rope and kinds of layers, and the operations that come of it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from math import sqrt
from typing import Final, Self

from tegrad.llm.network import (
    ActivationKind,
    Add,
    Attend,
    Block,
    Convolve,
    Delta,
    Embed,
    Gate,
    InputGate,
    LayerInputs,
    Logits,
    Mixer,
    Network,
    Norm,
    NormKind,
    Project,
    Rotation,
    Spec,
)
from tegrad.llm.rope import Rope, Temperature

LOCAL_SIZES: Final = ("attention.key_length_swa", "attention.value_length_swa", "rope.dimension_count_swa")
"""A file's values: elements of heads of layers within a window, and of what is rotated of them."""


@dataclass(frozen=True, slots=True)
class LayerForm:
    """What may differ from layer to layer of a model."""

    rope: Rope
    """UNTURNED where the layer rotates nothing."""
    window: int | None = None
    """Positions that a token attends to at most, its own included."""
    instead: bool = False
    """It has `Arch.instead` in the place of attention."""
    head_dim: int | None = None
    """Elements of a head, where they differ from the model's,"""
    kv_heads: int | None = None
    """heads of keys and values,"""
    ffn: int | None = None
    """and the feed-forward's elements."""
    source: int | None = None
    """An earlier layer, whose keys and values it attends to."""
    values_are_keys: bool = False
    """It has no matrix of values: they are what its keys are made of."""


@dataclass(frozen=True)
class Sizes:
    """A model's sizes: what its family's row leaves open. `config.Config` reads them."""

    arch: Arch
    vocab: int
    context: int
    """The context that the model was trained for."""
    layers: int
    dim: int
    ffn: int
    """The most of any layer."""
    heads: int
    kv_heads: int
    """The most of any layer."""
    head_dim: int
    """Elements of a query or key head, in a layer without a window; `at` has the others'."""
    value_dim: int
    """Elements of a value head."""
    eps: float
    """Of norms, over the square of residual_scale where there is one: the stream is kept divided by that, which its
    norms cannot tell."""
    rope: Rope
    """Of every layer that `forms` has no other for."""
    forms: tuple[LayerForm, ...] = ()
    """Of each layer, where they differ."""
    window: int | None = None
    """The window of a model whose layers have none of their own (`LayerForm.window`): we run contexts within it, where
    it changes nothing."""
    score_cap: float | None = None
    logit_cap: float | None = None
    attention_scale: float | None = None
    """Scores are scaled by it; None: as the family does."""
    embedding_scale: float = 1.0
    """Over residual_scale."""
    logit_scale: float = 1.0
    """Logits are multiplied by it."""
    temperature: Temperature | None = None
    """Of every layer."""
    taps: int = 0
    """Positions that a layer which convolves reads."""
    delta_heads: int = 0
    """Of a gated delta net: heads of values,"""
    delta_keys: int = 0
    """of queries and keys,"""
    state: int = 0
    """and elements of each."""
    layer_input: int = 0
    """Elements of a layer's own input beside the stream, as Gemma 4 has it."""
    ahead: int = 0
    """Blocks of the file behind its layers, whose tensors are left alone."""
    suppressed: tuple[int, ...] = ()
    """Tokens that are never drawn, such as those that stand for pictures."""
    causal: bool = True
    """`network.Attend.causal`, of every layer."""

    def at(self, layer: int | None) -> Self:
        """The sizes of a layer, or, with None, the model's."""
        return self if layer is None else self._at.get(layer, self)

    @property
    def layers_differ(self) -> bool:
        """Whether a layer has sizes of its own."""
        return bool(self._at)

    @cached_property
    def _at(self) -> Mapping[int, Self]:
        """Of layers whose sizes differ from the model's."""
        names = ("head_dim", "kv_heads", "ffn")
        own = {at: {name: getattr(form, name) for name in names} for at, form in enumerate(self.forms)}
        found = {at: {name: size for name, size in sizes.items() if size is not None} for at, sizes in own.items()}
        return {
            at: replace(self, **sizes, value_dim=sizes.get("head_dim", self.value_dim)) for at, sizes in found.items()
            if sizes
        }  # fmt: skip

    @property
    def layer_forms(self) -> tuple[LayerForm, ...]:
        """Each layer's form."""
        return self.forms or (LayerForm(self.rope),) * self.layers


@dataclass(frozen=True, slots=True)
class Convolution:
    """The tensors of layers that convolve, in the place of attention's."""

    project: tuple[Spec, ...]
    kernel: Spec
    output: Spec

    def mixer(self, config: Sizes) -> Mixer:
        """What such a layer does."""
        return Convolve(self.kernel, config.taps)


@dataclass(frozen=True, slots=True)
class DeltaNet(Convolution):
    """Those of a gated delta net, which convolves too."""

    bias: Spec
    decay: Spec
    norm: Spec

    def mixer(self, config: Sizes) -> Mixer:
        """What such a layer does."""
        return Delta(
            self.kernel, config.taps, self.bias, self.decay, self.norm, config.delta_heads, config.delta_keys,
            config.state,
        )  # fmt: skip


@dataclass(frozen=True, slots=True)
class Windows:
    """Which layers of a family attend within a sliding window, and how they rotate. A file may say otherwise."""

    period: int
    """Of so many layers the last one attends to all positions, the others to those in the window."""
    window: int | None = None
    """Its positions; None: without a file's, no layer has one."""
    base: float | None = None
    """Of the layers' rope, whose positions nothing scales; None: they rotate as the others do."""
    plain: bool = False
    """Their rope has the others' base, but nothing scales it, nor its cosines and sines."""
    only: bool = False
    """The others rotate nothing."""
    layers: int | None = None
    """A model of so many layers has windows, and no other; None: all have."""


@dataclass(frozen=True, slots=True)
class PerLayer:
    """The tensors of per-layer inputs (`network.LayerInputs`), and of what layers make of them. A model may have
    none."""

    table: Spec
    matrix: Spec
    norm: Spec
    gate: Spec
    output: Spec
    post_norm: Spec


@dataclass(frozen=True, slots=True)
class Arch:
    """A model family: the tensors and kinds that differ from family to family; `network` makes its operations."""

    name: str
    embedding: Spec
    attn_norm: Spec | None
    qkv: tuple[Spec, ...]
    """Three matrices or one; their rows are always the queries', the keys' and the values', in this order."""
    attn_output: Spec
    ffn_norm: Spec | None
    gate: Spec | None
    up: Spec
    down: Spec
    output_norm: Spec
    output: Spec
    rope: Rotation
    activation: ActivationKind
    norm: NormKind
    with_images: Rotation | None = None
    """The rotation in files that say how many pairs rotate by an image's rows and columns; None: `rope`, too."""
    positions: Spec | None = None
    """Learned vectors, one for each position, that are added to the embedding."""
    query_norm: Spec | None = None
    """Each head's query is normalized by its root mean square before it is rotated; or all of them by theirs."""
    key_norm: Spec | None = None
    norms_turned: bool = False
    """Heads are normalized after they are rotated."""
    rope_divisors: tuple[str, ...] = ()
    """Tensors that the file may have, which pairs' frequencies are divided by: in contexts up to the trained one, and,
    where there is another, in longer ones."""
    ignores_window: bool = False
    """Files name a sliding window that llama.cpp has every layer look beyond."""
    attn_post_norm: Spec | None = None
    """Of what attention adds to the stream."""
    ffn_post_norm: Spec | None = None
    """Of what the feed-forward adds."""
    parallel: bool = False
    """The feed-forward reads the stream that attention reads, not what attention has added to it. Of families with
    layer norms, without norms after blocks."""
    parallel_by: str | None = None
    """A value that says, where it is false, that it does read that."""
    instead: Convolution | None = None
    """Of layers that do not attend."""
    gated: bool = False
    """What heads mix is gated (`network.Attend.gated`)."""
    unit_values: bool = False
    """Values are normalized (`network.Attend.unit_values`)."""
    per_layer: PerLayer | None = None
    layer_scale: Spec | None = None
    """What the stream is multiplied by after a layer, which files may lack."""
    score_scale: float | None = None
    """What scores are multiplied by; None: one over the root of a head's size."""
    values: tuple[str, ...] = ()
    """Values that change what is computed and that the family's files may have; those of others are refused by name."""
    needs: tuple[str, ...] = ()
    """Of `families.SCALES`, those without which a file is incomplete."""
    scaled_embedding: bool = False
    """Rows of the embedding are multiplied by the root of their size."""
    windows: Windows | None = None
    """Which layers attend within a window."""
    unturned: int | None = None
    """Of so many layers the last one rotates nothing."""
    turned_by: str | None = None
    """A value that says, where it is false, that no layer rotates, which we do not run."""
    dim_scaled: int | None = None
    """A model of so many layers divides scores by the root of dim / heads, not by that of a head's size."""
    score_cap: float | None = None
    """The cap of scores where the file gives no value; None: the family never caps scores. A file's 0 means no cap, by
    which llama.cpp divides in Gemma 2."""
    logit_cap: float | None = None
    """The same for logits; 0: they are capped only where the file says so."""
    logits_multiplied: bool = False
    """A file's scale of logits multiplies them instead of dividing them."""
    causal: bool = True
    """Tokens attend to none after them, unless a file says so. In other families a file's window is centred on a
    token."""
    dense: tuple[str, ...] = ()
    """Matrices that a file may have, by which the vector of a text is multiplied, in order."""

    @property
    def sized(self) -> bool:
        """Whether layers of a model may have sizes of their own."""
        return LOCAL_SIZES[0] in self.values

    @property
    def caps(self) -> Mapping[str, float]:
        """Those that the family has, by the name of their value in a file."""
        caps = {"attn_logit_softcapping": self.score_cap, "final_logit_softcapping": self.logit_cap}
        return {name: cap for name, cap in caps.items() if cap is not None}

    def network(self, config: Sizes) -> Network:
        """What a model of the family computes."""
        scale = sqrt(config.dim) if self.scaled_embedding else config.embedding_scale
        return Network(
            Embed(self.embedding, self.positions, scale, self._inputs(config)),
            tuple(self._block(config.at(at), form) for at, form in enumerate(config.layer_forms)),
            Logits(Norm(self.output_norm, self.norm, config.logit_scale), self.output, config.logit_cap),
        )

    def _inputs(self, config: Sizes) -> LayerInputs | None:
        """Per-layer inputs."""
        if self.per_layer is None or not config.layer_input:
            return None
        own = self.per_layer
        return LayerInputs(own.table, own.matrix, own.norm, sqrt(config.layer_input), 1 / sqrt(config.dim))

    def _block(self, config: Sizes, form: LayerForm) -> Block:
        """A layer's operations, by its sizes and its form."""
        wide = config.layers == self.dim_scaled
        made = 1 if form.source is not None else 2 if form.values_are_keys else len(self.qkv)
        qkv, attn_output = self.qkv[:made], self.attn_output
        mixer: Mixer = Attend(
            self.rope if form.rope.dim else "none",
            form.rope,
            config.attention_scale
            or self.score_scale
            or 1 / sqrt(config.dim // config.heads if wide else config.head_dim),
            self.query_norm,
            self.key_norm if form.source is None else None,
            self.norms_turned,
            form.window if config.causal or form.window is None else form.window // 2 + 1,
            config.score_cap,
            config.temperature,
            self.gated,
            form.source,
            form.values_are_keys,
            self.unit_values and form.source is None,
            config.causal,
        )
        if form.instead and (own := self.instead) is not None:
            qkv, mixer, attn_output = own.project, own.mixer(config), own.output

        def norm(spec: Spec | None) -> Norm | None:
            return None if spec is None else Norm(spec, self.norm)

        project = Project(norm(self.attn_norm), qkv)
        mixed = Add(attn_output, "mixed", norm(self.attn_post_norm))
        gate = Gate(norm(self.ffn_norm), self.gate, self.up, self.activation)
        hidden = Add(self.down, "hidden", norm(self.ffn_post_norm))
        if self.parallel:
            return project, gate, mixer, hidden, mixed
        if (by := self.per_layer) is None or not config.layer_input:
            return project, mixer, mixed, gate, replace(hidden, scale=self.layer_scale)
        gated = Add(by.output, "gated", norm(by.post_norm), self.layer_scale)
        return project, mixer, mixed, gate, hidden, InputGate(by.gate, self.activation), gated
