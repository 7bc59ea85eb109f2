"""One model's sizes, read from its file's values and checked against its tensors.

What a file has beyond its family's row is refused by name.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, Final, Protocol, Self, TypeVar

import numpy as np
from numpy.typing import NDArray

from tegrad.llm.arch import LOCAL_SIZES, Arch, DeltaNet, LayerForm, Sizes, Windows
from tegrad.llm.errors import ContextError, GgufError, ModelError, UnsupportedModelError
from tegrad.llm.families import ARCHES, FUSED, LLAMA, LOG_MULTIPLIER, LONG_ROPE, SCALES, SECTIONS, TEMPERATURE
from tegrad.llm.formats import F32, LANE_WEIGHTS
from tegrad.llm.gguf import Gguf, TensorInfo, shown
from tegrad.llm.network import Add, Convolving, Delta, Network, Spec
from tegrad.llm.rope import UNTURNED, Divisors, Rope, Temperature, Yarn

DEFAULT_CONTEXT: Final = 4096
"""Positions of a session unless asked otherwise: bounds the cache of models trained for 128k and more."""

MOST_LAYERS: Final = 1 << 12
"""That a file may have, before its tensors are counted: some thirty times the deepest published models'."""
MOST_TAPS: Final = 16
"""Positions of a kernel, which a thread holds; published models have 3."""
MOST_AT_ONCE: Final = 2048
"""Tokens of a text that attend in both directions, which have to be there at once: EmbeddingGemma's context."""
LARGEST_SIZE: Final = (1 << 31) - 1
"""Of any size in a file: kernels count in 32 bits."""
MOST_RESIDUAL_SCALE: Final = 1e4
"""Of what a block adds, and one over it the least."""
SMALLEST, LARGEST = 1e-30, 1e30
"""Bounds of any other number in a file that is not 0, so that no product of some leaves what floats hold."""

KV_HEADS: Final = "attention.head_count_kv"
FFN: Final = "feed_forward_length"
PATTERN: Final = "attention.sliding_window_pattern"
"""Which layers attend within a window: one in so many does not; or each layer's yes or no."""
SHARED_LAYERS: Final = "attention.shared_kv_layers"
"""Last layers that take keys and values of earlier ones."""
INPUT_LENGTH: Final = "embedding_length_per_layer_input"
"""Elements of a layer's own input."""
NEXT: Final = "nextn_predict_layers"
"""How many of a file's blocks, its last ones, guess tokens ahead (EXAONE 4.5): as in llama.cpp, nothing runs them."""
SUPPRESSED: Final = "tokenizer.ggml.suppress_tokens"
"""Tokens that the model's authors never draw."""
BASE: Final = ("rope.freq_base", "rope.global.freq_base")
LOCAL_BASE: Final = ("rope.freq_base_swa", "rope.local.freq_base")
"""Of layers within a window. The second names are those of files that were converted for Ollama."""

T = TypeVar("T", int, float, str)

_EPS: Final = {"rms": "attention.layer_norm_rms_epsilon", "layer": "attention.layer_norm_epsilon"}

_REFUSED: Final[Mapping[str, str]] = {
    "expert_count": "is a mixture of experts",
    "attention.clamp_kqv": "clamps queries, keys and values",
    "attention.max_alibi_bias": "has ALiBi positions",
    "attention.key_length_swa": "has keys of another size in layers within a window",
    "attention.value_length_swa": "has values of another size in layers within a window",
    "rope.dimension_count_swa": "rotates another part of heads in layers within a window",
    SECTIONS: "rotates parts of heads by other positions",
    "attention.scale": "scales attention by a number of its own",
    TEMPERATURE: "scales attention by position",
    "attn_logit_softcapping": "caps attention scores",
    "final_logit_softcapping": "caps logits",
    "logit_scale": "scales logits",
    "embedding_scale": "scales embeddings",
    "residual_scale": "scales residuals",
    LOG_MULTIPLIER: "scales YaRN by a logarithm of its own",
}
"""Values that change what is computed, refused where they are there and not 0."""


class Metadata(Protocol):
    """What sizes are read from: a `Gguf`, or the metadata that one would have."""

    @property
    def path(self) -> object:
        """What errors name."""

    @property
    def metadata(self) -> Mapping[str, Any]:
        """Values by name."""

    def corrupt(self, what: str) -> GgufError:
        """The error for values that contradict each other."""


@dataclass(frozen=True)
class Config(Sizes):
    """A model's sizes as its file has them, and what follows from them."""

    own: Config | None = None
    """The file's sizes, where these are `filled` up."""

    @property
    def head_eps(self) -> float:
        """Of the norms of queries and keys."""
        own, norm = self.own or self, self.arch.query_norm
        filled = own.eps if norm is None else own.eps * self.share(norm.shape[0])
        return own.eps if own is self else max(filled, SMALLEST)  # or heads of zeros were no numbers

    def share(self, size: str) -> float:
        """What part of a vector is the file's."""
        return 1.0 if self.own is None else self.own.size(size) / self.size(size)

    def filled(self) -> Config:
        """The sizes with which our kernels run the model: every row of weights is whole runs of 64.

        Elements and heads of zeros are added to what a file has, which changes no product and no attention. The mean of
        squares that a norm takes is less by `share`: its epsilon is, too, and loading multiplies its weights by the
        root. Layer norms need the mean itself, so that the stream of such a model stays as it is.
        """
        whole = LANE_WEIGHTS // math.gcd(LANE_WEIGHTS, self.group * self.value_dim)  # KV heads
        kv_heads = -(-self.kv_heads // whole) * whole
        dim, ffn = (-(-size // LANE_WEIGHTS) * LANE_WEIGHTS for size in (self.dim, self.ffn))
        dim = self.dim if self.arch.norm == "layer" else dim
        if (dim, ffn, kv_heads) == (self.dim, self.ffn, self.kv_heads):
            return self
        if self.layers_differ:
            raise UnsupportedModelError(
                f"layers of different sizes are run where rows of weights are whole runs of {LANE_WEIGHTS}: choose "
                "another model"
            )
        net = self.network
        return replace(
            self,
            arch=replace(self.arch, scaled_embedding=False),
            dim=dim,
            ffn=ffn,
            heads=kv_heads * self.group,
            kv_heads=kv_heads,
            eps=self.eps * self.dim / dim,
            attention_scale=net.attends[0].scale,
            embedding_scale=net.embed.scale,
            own=self,
        )

    @cached_property
    def network(self) -> Network:
        """What the model computes."""
        return self.arch.network(self)

    @property
    def longest(self) -> int:
        """The longest context that we run."""
        return min(self.context, self.window or self.context, self.context if self.causal else MOST_AT_ONCE)

    def check_answers(self) -> None:
        """UnsupportedModelError for a model that has nothing to say."""
        if not self.causal:
            raise UnsupportedModelError(
                "the model attends in both directions: it makes vectors of texts (tegrad embed), and answers nothing"
            )

    def positions(self, asked: int | None = None, prompt: int = 0, room: int = DEFAULT_CONTEXT) -> int:
        """Positions of a session's cache: `asked`, or a bounded default for which there is `room`; raises ContextError
        where they cannot be."""
        longest = self.longest
        if asked is not None and asked < 1:
            raise ContextError(f"a context of {asked} tokens was asked for: give 1 to {longest}")
        if asked is not None and asked > longest:
            what = "the model has" if longest == self.context else "we run the model within its sliding window of"
            raise ContextError(f"a context of {asked} tokens was asked for, {what} {longest}: ask for less")
        positions = asked or min(longest, DEFAULT_CONTEXT, room)
        if prompt > longest:
            raise ContextError(f"{prompt} tokens exceed the context of {longest}: shorten the prompt")
        if prompt > positions:
            default = "" if asked else ", our default" if room >= DEFAULT_CONTEXT else ", for which memory is free"
            raise ContextError(
                f"{prompt} tokens exceed the context of {positions}{default}: ask for a longer one (--context, up to "
                f"{longest}), or shorten the prompt"
            )
        return positions

    def check_prompt(self, tokens: Sequence[int], said: int = 0, context: int | None = None) -> None:
        """ModelError for tokens that the model cannot continue: none, or one outside of its vocabulary; ContextError
        where a `context` does not hold them after so many that were said."""
        if not tokens:
            raise ModelError("there is nothing to continue: give at least one token")
        if not all(0 <= token < self.vocab for token in tokens):
            raise ModelError(
                f"a token lies outside of the vocabulary of {self.vocab}: the tokenizer is not this model's"
            )
        if context is not None and said + len(tokens) > context:
            raise ContextError(f"{said + len(tokens)} tokens exceed the context of {context}: shorten the prompt")

    def check_sampled(self, token: int) -> None:
        """ModelError for what the device publishes where no logit is the largest."""
        if token >= self.vocab:
            raise ModelError(
                "the model's logits are not numbers: its weights or values are broken; download or convert it again"
            )

    @property
    def group(self) -> int:
        """Query heads that share a key head."""
        return self.heads // self.kv_heads

    @property
    def sizes(self) -> Mapping[str, int]:
        """The sizes that `Spec.shape` names."""
        return {
            "vocab": self.vocab,
            "context": self.context,
            "dim": self.dim,
            "ffn": self.ffn,
            "head": self.head_dim,
            "query": self.heads * self.head_dim,
            "key": self.kv_heads * self.head_dim,
            "value": self.kv_heads * self.value_dim,
            "mixed": self.heads * self.value_dim,
            "taps": self.taps,
            "state": self.state,
            "delta_heads": self.delta_heads,
            "inner": self.delta_heads * self.state,
            "input": self.layer_input,
            "inputs": self.layers * self.layer_input,
            "one": 1,
            "channels": (2 * self.delta_keys + self.delta_heads) * self.state,
        }

    def size(self, name: str) -> int:
        """A size as a `Spec.shape` names it, "a+b" included."""
        return sum(self.sizes[part] for part in name.split("+"))

    def convolved(self, op: Convolving) -> int:
        """Elements that a convolution keeps of a position."""
        return op.channels if isinstance(op, Delta) else self.dim

    @property
    def projected(self) -> int:
        """Elements that a layer's `Project` makes, at most."""
        net, layers = self.network, range(self.layers)
        return max(sum(self.at(at).size(spec.shape[0]) for spec in net.project(at).matrices) for at in layers)

    @property
    def queries(self) -> int:
        """Elements of a layer's queries, at most."""
        return max(self.at(at).size("query") for at in range(self.layers))

    @property
    def mixed(self) -> int:
        """Elements that are mixed in a layer, at most."""
        adds = [(at, op) for at, op in self.network.operations() if isinstance(op, Add) and op.reads == "mixed"]
        return max(self.at(at).size(add.matrix.shape[1]) for at, add in adds)

    @classmethod
    def read(cls, file: Gguf) -> Self:
        """The sizes of a file's model; raises UnsupportedModelError or GgufError."""
        config = cls.of(file, lambda spec: file.tensor(tensor_name(spec)).shaped(2).shape)
        config = replace(config, arch=_as_stored(config, file))
        config = replace(config, forms=_with_values(config, file))
        config._check_all(file)
        return config

    @classmethod
    def of(cls, file: Metadata, shape: Callable[[Spec], Sequence[int]]) -> Self:
        """The sizes that metadata tells, with the embedding's `shape`; raises UnsupportedModelError or GgufError."""
        get = _Reader(file)
        if (kind := get.optional("general.type", str, "model")) != "model":  # which may have no architecture
            raise UnsupportedModelError(f"{file.path} is no model but of the type {shown(kind)}: choose a model")
        arch = ARCHES.get(name := get.of("general.architecture", str))
        if arch is None:
            raise UnsupportedModelError(
                f"{file.path} is of the architecture {shown(name)}; we run {', '.join(ARCHES)}: choose another model"
            )
        _refuse(get, arch)
        if arch.with_images is not None and file.metadata.get(f"{name}.{SECTIONS}"):
            arch = replace(arch, rope=arch.with_images)
        if arch.parallel_by is not None and not get.flag(f"{name}.{arch.parallel_by}", default=True):
            arch = replace(arch, parallel=False)
        dim, heads = get.size(f"{name}.embedding_length"), get.size(f"{name}.attention.head_count")
        head_dim = get.size(f"{name}.attention.key_length", dim // heads)
        context, blocks = get.size(f"{name}.context_length"), get.size(f"{name}.block_count")
        if blocks > MOST_LAYERS:
            raise file.corrupt(f"{name}.block_count = {blocks}, at most {MOST_LAYERS} expected")
        ahead = get.optional(f"{name}.{NEXT}", int, 0)
        if not 0 <= ahead < blocks:
            raise file.corrupt(f"{name}.{NEXT} = {ahead} of {blocks} blocks")
        layers = blocks - ahead
        causal = get.flag(f"{name}.attention.causal", default=True) and arch.causal
        if not causal and arch.causal and (arch.windows is not None or arch.instead is not None):
            raise UnsupportedModelError(
                f"{file.path} attends in both directions, which we run with layers of one kind: choose another model"
            )
        rope = UNTURNED if arch.rope == "none" else _rope(get, arch, head_dim, context)
        caps = {key: get.number(f"{name}.{key}", cap) for key, cap in arch.caps.items()}
        usual = {key: None if key in arch.needs else 0.0 for key in SCALES if key in arch.values}
        scales = {key: get.number(f"{name}.{key}", default) or None for key, default in usual.items()}
        residual = scales.get("residual_scale") or 1.0
        if not 1 / MOST_RESIDUAL_SCALE <= residual <= MOST_RESIDUAL_SCALE:
            raise file.corrupt(f"{name}.residual_scale = {residual:g}")
        forms = _forms(get, arch, rope, layers)
        windowed = arch.windows is not None or any(form.window for form in forms)
        config = cls(
            arch=arch,
            vocab=shape(arch.embedding)[0],
            context=context,
            layers=layers,
            dim=dim,
            ffn=max(get.each(f"{name}.{FFN}", layers)) if arch.sized else get.size(f"{name}.{FFN}"),
            heads=heads,
            kv_heads=max(get.each(f"{name}.{KV_HEADS}", layers, heads))
            if arch.sized
            else get.size(f"{name}.{KV_HEADS}", heads, but_zeros=arch.instead is not None),
            head_dim=head_dim,
            value_dim=get.size(f"{name}.attention.value_length", dim // heads),
            eps=get.number(f"{name}.{_EPS[arch.norm]}") / residual**2,
            rope=rope,
            forms=forms,
            window=None if windowed or arch.ignores_window else _window(get, name),
            score_cap=caps.get("attn_logit_softcapping") or None,
            logit_cap=caps.get("final_logit_softcapping") or None,
            attention_scale=scales.get("attention.scale"),
            embedding_scale=(scales.get("embedding_scale") or 1.0) / residual,
            logit_scale=(scales.get("logit_scale") or 1.0) ** (1 if arch.logits_multiplied else -1),
            temperature=_temperature(get, arch, context),
            **_instead(get, arch),
            layer_input=_layer_input(get, arch),
            ahead=ahead,
            suppressed=_suppressed(get, shape(arch.embedding)[0]),
            causal=causal,
        )
        config = replace(config, forms=_sized(get, config)) if arch.sized else config
        for at, form in enumerate(config.layer_forms):
            own, turned = config.at(at), form.rope.dim
            if own.heads % own.kv_heads or turned % 2 or turned > own.head_dim or not own.head_dim or not own.value_dim:
                raise file.corrupt(f"{heads} heads, {own.kv_heads} key heads of {own.head_dim}, rope over {turned}")
        return config

    def check_tokens(self, file: Gguf) -> None:
        """GgufError if the file's tokenizer lacks tokens that the model may choose, as llama.cpp has it."""
        tokens = file.metadata.get("tokenizer.ggml.tokens")
        if isinstance(tokens, list) and len(tokens) < self.vocab:
            raise file.corrupt(f"{len(tokens)} tokens for {self.vocab} rows of {self.arch.embedding.name}")

    def _check_all(self, file: Gguf) -> None:
        """Every tensor of the family and no other but those of blocks `ahead` and of keys and values that a layer takes
        from another, so that nothing is missing after half of the model is loaded."""
        known = {*self.arch.rope_divisors, *self.arch.dense}
        known |= {stored_name(spec, layer) for spec, layer in self.specs()}
        known |= {tensor_name(spec, layer, "bias") for spec, layer in self.specs() if spec.bias != "none"}
        left = tuple(f"blk.{at}." for at in range(self.layers, self.layers + self.ahead))
        left += tuple(
            f"blk.{at}.attn_{side}" for at, form in enumerate(self.forms) if form.source is not None for side in "kv"
        )
        if unknown := [name for name in file.tensors if name not in known and not name.startswith(left)]:
            raise UnsupportedModelError(
                f"{file.path} has the tensor {shown(unknown[0])}, which the family {self.arch.name} as we run it does "
                f"not use: choose another model"
            )
        for _ in self.tensors(file):  # which checks each
            pass

    def specs(self) -> Iterator[tuple[Spec, int | None]]:
        """Every tensor of the model, with its layer, in the order of use; the output at the end."""
        net = self.network
        yield from ((spec, None) for spec in net.once)
        yield from ((spec, layer) for layer in range(self.layers) for spec in net.of_layer(layer))
        yield self.arch.output, None

    def tensors(self, file: Gguf) -> Iterator[TensorInfo]:
        """Where each tensor and bias of the model lies that the file has, by the names of their specs; all checked."""
        for spec, layer in self.specs():
            if spec is self.arch.output and tensor_name(spec) not in file.tensors:
                continue
            yield self.check(file, spec, layer)
            if spec.bias != "none":
                name = tensor_name(spec, layer, "bias")
                if spec.bias == "must":
                    file.tensor(name)
                bias = self.vector(file, name, self.at(layer).size(spec.shape[0]))
                if bias is not None:
                    yield bias

    def check(self, file: Gguf, spec: Spec, layer: int | None = None) -> TensorInfo:
        """The tensor of a spec, its shape checked: its own rows where it lies in a stack."""
        info, stack = file.tensor(stored_name(spec, layer)).shaped(len(spec.shape)), spec.stack
        sizes = self.at(layer)
        own = tuple(sizes.size(name) for name in spec.shape)
        expected = own if stack is None else (sum(map(sizes.size, stack.sizes)), *own[1:])
        if info.shape != expected:
            raise file.corrupt(f"tensor {info.name!r} has the shape {info.shape}, {expected} expected")
        if not spec.multiplied:
            self.vector(file, info.name, *expected)
        if stack is None:
            return info
        return replace(info.cut(map(sizes.size, stack.sizes))[stack.at], name=tensor_name(spec, layer))

    def vector(self, file: Gguf, name: str, *shape: int) -> TensorInfo | None:
        """An optional F32 vector such as a bias, or one for each element, its shape checked."""
        if (info := file.tensors.get(name)) is None:
            return None
        info = info.shaped(len(shape))
        if info.shape != shape or info.type is not F32:
            raise file.corrupt(f"tensor {name!r} is {info.type.name} {info.shape}, F32 {shape} expected")
        return info

    def rope_divisors(self, file: Gguf) -> Divisors:
        """What the file has pairs' frequencies divided by."""
        found = [self._divisors(file, name) for name in self.arch.rope_divisors] or [None]
        trained = self.context
        if len(found) > 1:
            trained = _Reader(file).size(f"{self.arch.name}.rope.scaling.original_context_length", trained)
        return Divisors(found[0], found[-1], trained)

    def _divisors(self, file: Gguf, name: str) -> NDArray[np.float32] | None:
        info = self.vector(file, name, self.rope.dim // 2)
        if info is None:
            return None
        divisors = np.frombuffer(file.read(info.offset, info.nbytes), np.float32)
        if not np.all((divisors >= SMALLEST) & (divisors <= LARGEST)):  # nor is what is not a number
            raise file.corrupt(f"tensor {info.name!r} has values that nothing is divided by")
        return divisors


def tensor_name(spec: Spec, layer: int | None = None, suffix: str | None = None) -> str:
    """A tensor's name in the file, with another suffix than its own where that is given."""
    name = ".".join(filter(None, (spec.name, spec.suffix if suffix is None else suffix)))
    return name if layer is None else f"blk.{layer}.{name}"


def stored_name(spec: Spec, layer: int | None) -> str:
    """The name of the tensor that holds a spec's in the file."""
    return tensor_name(spec if spec.stack is None else Spec(spec.stack.name, spec.shape), layer)


def _refuse(get: _Reader, arch: Arch) -> None:
    """Refuse by name what a file asks for and we do not run."""
    name = arch.name
    for key, what in _REFUSED.items():
        if get.file.metadata.get(f"{name}.{key}", 0) and key not in arch.caps and key not in arch.values:
            raise UnsupportedModelError(f"{get.file.path} {what} ({name}.{key}), which we do not run: choose another")
    if arch.turned_by is not None and get.file.metadata.get(f"{name}.{arch.turned_by}", True) is False:
        raise UnsupportedModelError(f"{get.file.path} rotates no heads, which we do not run: choose another")


def _as_stored(config: Config, file: Gguf) -> Arch:
    """The family, its queries, keys and values in one tensor or three as the file has them, and with biases or none;
    without the layers' scales where the file has none."""
    arch, first = config.arch, next(at for at, form in enumerate(config.layer_forms) if not form.instead)
    if arch.layer_scale is not None and tensor_name(arch.layer_scale, first) not in file.tensors:
        arch = replace(arch, layer_scale=None)

    def has(name: str) -> bool:
        return f"blk.{first}.{name}" in file.tensors

    one, must = len(arch.qkv) == 1, arch.qkv[0].bias == "must"
    if has("attn_qkv.weight"):
        return arch if one and (has("attn_qkv.bias") or not must) else replace(arch, qkv=FUSED)
    unbiased = must and not has("attn_q.bias")
    return replace(arch, qkv=LLAMA.qkv) if has("attn_q.weight") and (one or unbiased) else arch


def _with_values(config: Config, file: Gguf) -> tuple[LayerForm, ...]:
    """Each layer's form: one with matrices of queries and keys alone takes what its keys are made of as values."""
    if not config.arch.sized or config.arch.qkv != LLAMA.qkv:
        return config.forms
    return tuple(
        replace(form, values_are_keys=form.source is None and f"blk.{at}.attn_v.weight" not in file.tensors)
        for at, form in enumerate(config.layer_forms)
    )


def _suppressed(get: _Reader, vocab: int) -> tuple[int, ...]:
    """Tokens that a file says are never drawn; those that it does not have do not count, as in llama.cpp."""
    listed = get.file.metadata.get(SUPPRESSED, [])
    if not isinstance(listed, list) or any(type(token) is not int for token in listed):
        raise get.file.corrupt(f"{SUPPRESSED} = {shown(listed)}, which are no tokens")
    return tuple(sorted({token for token in listed if 0 <= token < vocab}))


def _layer_input(get: _Reader, arch: Arch) -> int:
    """Elements of a layer's own input."""
    key = f"{arch.name}.{INPUT_LENGTH}"
    return get.size(key) if arch.per_layer is not None and get.optional(key, int, 0) else 0


def _sized(get: _Reader, config: Config) -> tuple[LayerForm, ...]:
    """Each layer's form with its sizes, and with whose keys and values the last ones attend to."""
    name, layers = config.arch.name, config.layers
    kv_heads, ffn = get.each(f"{name}.{KV_HEADS}", layers, config.heads), get.each(f"{name}.{FFN}", layers)
    keys, values, turned = (f"{name}.{key}" for key in LOCAL_SIZES)
    head_dim = get.size(keys, config.head_dim)
    if get.size(values, head_dim) != head_dim or config.value_dim != config.head_dim:
        raise UnsupportedModelError(f"{get.file.path} has values of another size than keys: choose another model")
    forms = [
        replace(
            form if form.window is None
            else replace(form, rope=replace(form.rope, dim=get.size(turned, config.rope.dim), divided=False)),
            head_dim=head_dim if form.window is not None and head_dim != config.head_dim else None,
            kv_heads=kv_heads[at] if kv_heads[at] != config.kv_heads else None,
            ffn=ffn[at] if ffn[at] != config.ffn else None,
        )
        for at, form in enumerate(config.layer_forms)
    ]  # fmt: skip
    key = f"{name}.{SHARED_LAYERS}"
    if not 0 <= (shared := get.optional(key, int, 0)) <= layers:
        raise get.file.corrupt(f"{key} = {shared} of {layers} layers")
    first = layers - shared
    for at in range(first, layers):
        own = forms[at]
        source = first - (1 if own.window is None else 2)
        like = forms[source] if first >= 2 else None
        if like is None or (like.window, like.head_dim, like.kv_heads) != (own.window, own.head_dim, own.kv_heads):
            raise get.file.corrupt(f"{key} = {shared} of {layers} layers")
        forms[at] = replace(own, source=source)
    return tuple(forms)


def _window(get: _Reader, name: str) -> int | None:
    key = f"{name}.attention.sliding_window"
    if (window := get.optional(key, int, 0)) < 0:
        raise get.file.corrupt(f"{key} = {window}")
    return window or None


def _forms(get: _Reader, arch: Arch, rope: Rope, layers: int) -> tuple[LayerForm, ...]:
    """Each layer's form, or none where all are alike."""
    if isinstance(arch.instead, DeltaNet):
        return _recurrent(get, arch.name, rope, layers)
    if arch.instead is not None:
        return _convolved(get, arch.name, rope, layers)
    if arch.unturned is not None:
        return tuple(LayerForm(rope if (at + 1) % arch.unturned else UNTURNED) for at in range(layers))
    return () if arch.windows is None else _windowed(get, arch.name, arch.windows, rope, layers)


def _instead(get: _Reader, arch: Arch) -> dict[str, Any]:
    """Sizes of layers that do not attend."""
    name = arch.name
    if arch.instead is None:
        return {}
    if not isinstance(arch.instead, DeltaNet):
        return {"taps": _taps(get, f"{name}.shortconv.l_cache")}
    state, heads, keys = (get.size(f"{name}.ssm.{key}") for key in ("state_size", "time_step_rank", "group_count"))
    if heads % keys or get.size(f"{name}.ssm.inner_size") != heads * state:
        raise get.file.corrupt(f"{name}.ssm: {heads} heads of {state}, {keys} of keys")
    taps = _taps(get, f"{name}.ssm.conv_kernel")
    return {"taps": taps, "delta_heads": heads, "delta_keys": keys, "state": state}


def _taps(get: _Reader, key: str) -> int:
    if (taps := get.size(key)) > MOST_TAPS:
        raise UnsupportedModelError(f"{get.file.path} convolves {taps} positions ({key}), {MOST_TAPS} at most are run")
    return taps


def _convolved(get: _Reader, name: str, rope: Rope, layers: int) -> tuple[LayerForm, ...]:
    """Each layer's form in a family some of whose layers convolve: those without key heads. The others may all be
    within a window."""
    if not isinstance(heads := get.file.metadata.get(key := f"{name}.{KV_HEADS}"), list):
        return ()
    if len(heads) < layers or not any(heads[:layers]):
        raise get.file.corrupt(f"{key} = {shown(heads)} for {layers} layers, of which some attend")
    window = _window(get, name)
    return tuple(LayerForm(rope, window if count else None, instead=count == 0) for count in heads[:layers])


def _recurrent(get: _Reader, name: str, rope: Rope, layers: int) -> tuple[LayerForm, ...]:
    """Each layer's form in a family some of whose layers are gated delta nets: those that a list names, or all but each
    one of so many."""
    key, every = f"{name}.attention.recurrent_layers", f"{name}.full_attention_interval"
    said = get.file.metadata.get(key)
    if not isinstance(said, list):
        period = get.size(every, 4)
        said = [(at + 1) % period != 0 for at in range(layers)]
    if len(said) < layers or all(said[:layers]):
        raise get.file.corrupt(f"{key} = {shown(said)} for {layers} layers, of which some attend")
    return tuple(LayerForm(rope, instead=bool(one)) for one in said[:layers])


def _windowed(get: _Reader, name: str, windows: Windows, rope: Rope, layers: int) -> tuple[LayerForm, ...]:
    """Each layer's form in a family some of whose layers attend within a window."""
    window = _window(get, name) or windows.window
    if window is None or layers != (windows.layers or layers):
        return ()
    key = f"{name}.{PATTERN}"
    pattern = get.file.metadata.get(key, windows.period)
    if isinstance(pattern, list):
        within = pattern[:layers]
        if len(within) < layers:
            raise get.file.corrupt(f"{key} has {len(within)} entries for {layers} layers")
        if odd := [entry for entry in within if entry not in (0, 1)]:
            raise get.file.corrupt(f"{key} has the entry {shown(odd[0])}, which is no yes or no")
    else:
        period = get.optional(key, int, windows.period)
        if period < 0:
            raise get.file.corrupt(f"{key} = {period}")
        within = [period == 0 or at % period < period - 1 for at in range(layers)]
    own = get.number(get.key(name, *LOCAL_BASE), windows.base or rope.base, above=0.0)
    inside = replace(rope, base=own) if windows.base is None else Rope(rope.dim, own, attention=rope.attention)
    if windows.plain:
        inside = Rope(rope.dim, own)
    outside = LayerForm(UNTURNED if windows.only else rope)
    return tuple(LayerForm(inside, window) if local else outside for local in within)


def _rope(get: _Reader, arch: Arch, head_dim: int, context: int) -> Rope:
    name = arch.name
    kind = get.optional(f"{name}.rope.scaling.type", str, "linear")
    factor = get.number(f"{name}.rope.scaling.factor", get.number(f"{name}.rope.scale_linear", 0.0))
    dim = get.size(f"{name}.rope.dimension_count", head_dim)
    # YaRN divides by the base's logarithm.
    base = get.number(get.key(name, *BASE), 10000.0, above=1.0 if kind == "yarn" else 0.0)
    kinds = ("none", "linear", "yarn", *(["longrope"] if arch.rope_divisors == LONG_ROPE else []))
    if kind not in kinds:
        raise UnsupportedModelError(
            f"{get.file.path} scales its rope by {shown(kind)}; we run {', '.join(kinds)}: choose another model"
        )
    yarn, prefix = None, f"{name}.rope.scaling"
    if kind == "yarn":
        yarn = Yarn(
            trained_context=get.size(f"{prefix}.original_context_length", context),
            beta_fast=get.number(f"{prefix}.yarn_beta_fast", 32.0, above=0.0),
            beta_slow=get.number(f"{prefix}.yarn_beta_slow", 1.0, above=0.0),
        )
    scale = 1.0 / factor if factor and kind != "none" else 1.0
    attention = get.number(f"{prefix}.attn_factor", 1.0, above=0.0)
    if yarn is not None and factor > 1 and LOG_MULTIPLIER in arch.values:
        attention /= 1 + 0.1 * get.number(f"{name}.{LOG_MULTIPLIER}", 0.0) * math.log(factor)
    return Rope(dim, base, scale, yarn, attention)


def _temperature(get: _Reader, arch: Arch, context: int) -> Temperature | None:
    scale = get.number(f"{arch.name}.{TEMPERATURE}", 0.0) if TEMPERATURE in arch.values else 0.0
    period = f"{arch.name}.rope.scaling.original_context_length"
    return Temperature(scale, get.size(period, context)) if scale else None


class _Reader:
    """Typed access to a file's metadata."""

    def __init__(self, file: Metadata) -> None:
        self.file = file

    def key(self, arch: str, *names: str) -> str:
        """The key of a value that has several names: of the first that the file has, or of the first."""
        keys = [f"{arch}.{name}" for name in names]
        return next((key for key in keys if key in self.file.metadata), keys[0])

    def optional(self, key: str, kind: type[T], default: T) -> T:
        return self.of(key, kind) if key in self.file.metadata else default

    def of(self, key: str, kind: type[T]) -> T:
        value = self.file.metadata.get(key)
        if value is None:
            raise GgufError(f"{self.file.path} lacks the value {key!r}; it is incomplete, convert it again")
        if kind is float and isinstance(value, int):
            value = float(value)
        if not isinstance(value, kind) or isinstance(value, bool):
            raise self.file.corrupt(f"{key} = {shown(value)}")
        return value

    def flag(self, key: str, *, default: bool) -> bool:
        """A yes or no."""
        value = self.file.metadata.get(key, default)
        if not isinstance(value, bool):
            raise self.file.corrupt(f"{key} = {shown(value)}, which is no yes or no")
        return value

    def number(self, key: str, default: float | None = None, *, above: float | None = None) -> float:
        """A finite number above a bound, or where there is none one that is not below 0."""
        value = self.of(key, float) if default is None else self.optional(key, float, default)
        unsound = not math.isfinite(value) or (value < 0 if above is None else value <= above)
        if unsound or value > LARGEST or 0 < value < SMALLEST:
            raise self.file.corrupt(f"{key} = {value:g}")
        return value

    def each(self, key: str, count: int, default: int | None = None) -> list[int]:
        """A positive int for each of so many layers, or one for all."""
        value = self.file.metadata.get(key)
        if not isinstance(value, list):
            return [self.size(key, default)] * count
        sizes = [entry for entry in value[:count] if type(entry) is int and 0 < entry <= LARGEST_SIZE]
        if len(sizes) < count:
            raise self.file.corrupt(f"{key} = {shown(value)} for {count} layers")
        return sizes

    def size(self, key: str, default: int | None = None, *, but_zeros: bool = False) -> int:
        """A positive int. A list of one size per layer is accepted where all are equal, or all but zeros."""
        if default is not None and key not in self.file.metadata:
            return default
        value = self.file.metadata.get(key)
        if isinstance(value, list) and but_zeros and any(value):
            value = [entry for entry in value if entry != 0]
        if isinstance(value, list) and value and all(entry == value[0] for entry in value):
            value = value[0]
        elif isinstance(value, list):
            raise UnsupportedModelError(
                f"{self.file.path} has layers of different {key}, which we do not run: choose another model"
            )
        else:
            value = self.of(key, int)
        if not isinstance(value, int) or value <= 0:
            raise self.file.corrupt(f"{key} = {shown(value)}")
        if value > LARGEST_SIZE:
            raise self.file.corrupt(f"{key} = {value}, at most {LARGEST_SIZE} expected")
        return value
