"""A model that runs ahead of the host: a plan of launches, the loop over them, and sampling on the device.

The interface is that of `session.Session`, which runs tinygrad's operations. Here the weights are packed for our own
kernels, a step is one doorbell, and prompts of some length go through tensor cores in chunks.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import replace
from typing import Any, Final, TypeAlias

import numpy as np
from numpy.typing import NDArray

from tegrad.hw.chips import by_arch
from tegrad.llm.cache import KvCache
from tegrad.llm.chips import capability, kernels_of
from tegrad.llm.closing import Closing
from tegrad.llm.errors import ModelError, OutOfMemory, UnsupportedModelError
from tegrad.llm.gguf import Gguf, Progress
from tegrad.llm.loop import Loop, LoopError
from tegrad.llm.numerics import unit
from tegrad.llm.packed import PackedModel
from tegrad.llm.persistent import NEAR_POSITIONS, PersistentPlan
from tegrad.llm.plan import DecodePlan
from tegrad.llm.prefill import Prefill, chunk_sizes
from tegrad.llm.sampler import NO_TOKEN, Logprobs, Mask, Sampler
from tegrad.llm.sampling import Sampling, Settings, ending
from tegrad.llm.state import State, States
from tegrad.nv import roles
from tegrad.nv.compat import is_nv
from tegrad.nv.gpu import opened
from tegrad.nv.replay import AHEAD, DEFAULT, Dependency, Launch, up_to

OLDEST_SM: Final = 80
"""The kernels' oldest architecture, sm_80: 16-byte asynchronous copies and mma of halves."""
SHORT_PROMPT_TOKENS: Final = 16
"""Prompts up to so many tokens are fed a step each."""
LONGER_PROMPT_TOKENS: Final = 64
"""Up to so many where their steps take less than a first prompt would wait for the kernels for chunks.

Later prompts are fed as a first one is: both ways round differently, and no answer may depend on what came before.
"""
KERNEL_LOAD_S: Final = 50e-3
"""Seconds that those take to load, if they are compiled; a step takes what its bytes do at half of the bandwidth."""


Plan: TypeAlias = DecodePlan | PersistentPlan
"""A step without its end: `launches` that leave `logits` float32 (vocab,), and perhaps of every 32 the largest and its
row (`best`, `best_row`)."""
Planner = Callable[[PackedModel, States, KvCache], Plan]


def suits_named(name: str | None = None) -> bool:
    """Whether our kernels run on a device, the one that DEV names unless said; opens it."""
    device = opened(name)
    arch = str(getattr(device, "arch", ""))
    return is_nv(device.device) and arch.startswith("sm_") and capability(arch) >= OLDEST_SM


class Engine(Closing):
    """One conversation with a model of its own: tokens so far, and their keys and values. Close it, or use a `with`.

    UnsupportedModelError for what the kernels do not run, OutOfMemory, GgufError. One thread at a time.
    """

    def __init__(
        self,
        file: Gguf,
        context: int | None = None,
        *,
        device: str | None = None,
        q8: bool = False,
        plan: Planner | None = None,
        dependency: Dependency = DEFAULT,
        overlapped: Dependency | None = None,
        steps_per_submission: int = 1,
        short: int | None = None,
        chunks: Sequence[int] | None = None,
        reach: int | None = None,
        progress: Progress | None = None,
    ) -> None:
        """`q8` keeps keys and values in int8; prompts above `short` tokens go in `chunks`, the chip's unless said, and
        unless said above SHORT_PROMPT_TOKENS, or more where their steps take little.

        `plan` makes the step; the quickest one on the device unless said. `overlapped` is the dependency between its
        launches where they wait by themselves, `dependency` that of everything else. `steps_per_submission` steps are
        submitted at once. `reach` is how many positions will be used, where that is known: few have a step of their
        own, which gives way to that of the whole context where they were more.
        """
        self.tokens: list[int] = []
        self.logprobs: list[Logprobs] = []
        """Of each token that `generate` yielded last, where its settings ask for them."""
        self._closed, self._turn, self._stepped = False, 0, False
        self._short, self._dependency, self._overlapped = short, dependency, overlapped
        self._bytes = sum(info.nbytes for info in file.tensors.values())
        self._steps_per_submission = steps_per_submission
        self._loops: dict[tuple[object, ...], Loop] = {}
        self._prefill: Prefill | None = None
        self._undo = ExitStack()
        try:
            self.model = PackedModel(file, device, progress)
            self._undo.callback(self.model.close)
            self.config, self.device = self.model.config, self.model.device
            self.context = self.config.positions(context)
            causal = self.config.causal
            self._chunks = chunks or chunk_sizes(self.device.arch, self.context, whole=not causal)
            self._cache = KvCache(self.device, self.config, self.context, q8=q8, ahead=max(self._chunks))
            self._undo.callback(self._cache.close)
            self._states = States(self.device)
            self._undo.callback(self._states.close)
            self._sampling = Sampling(self.device, self.config.vocab)
            self._undo.callback(self._sampling.close)
            self._near = plan is None and reach is not None and reach <= NEAR_POSITIONS < self.context
            if causal:  # others have no steps
                self.plan = (plan or self._quickest)(self.model, self._states, self._cache)
                self._undo.callback(lambda: self.plan.close())
        except BaseException as error:
            self.close()
            if isinstance(error, MemoryError):
                raise OutOfMemory(
                    f"the model's work space does not fit ({error}): ask for a shorter context"
                ) from error
            raise

    def _quickest(self, model: PackedModel, states: States, cache: KvCache) -> Plan:
        """The step in one launch on Hopper; launches, which there begin early, for models that the one refuses, and for
        those that are `quicker_in_launches`.

        On an Orin one launch only where a record of it shows that packets between CTAs are right, and quicker.
        """
        overlaps = kernels_of(self.device.arch).overlaps
        if self._overlapped is not None or not (overlaps or roles.one_launch()):
            return DecodePlan(model, states, cache, overlap=self._overlapped is not None)
        if not (overlaps and model.quicker_in_launches):
            with suppress(UnsupportedModelError):
                return PersistentPlan(model, states, cache, reach=NEAR_POSITIONS if self._near else None)
        self._overlapped = AHEAD if overlaps else None
        return DecodePlan(model, states, cache, overlap=overlaps)

    def _go_far(self) -> None:
        """Change to the step that suits the whole context, where there is room: this one is right too, but slower."""
        self._near = False
        if not isinstance(self.plan, PersistentPlan):
            return
        with suppress(MemoryError, UnsupportedModelError):
            far = PersistentPlan(self.model, self._states, self._cache)
            for loop in self._loops.values():
                loop.close()
            self._loops.clear()
            self.plan.close()
            self.plan = far

    @property
    def plan_name(self) -> str:
        """How a step runs: "one launch", "many launches", or "overlapped launches", which wait by themselves."""
        if isinstance(self.plan, PersistentPlan):
            return "one launch"
        return "many launches" if self._overlapped is None else "overlapped launches"

    def close(self) -> None:
        """Wait for what runs and free everything; what is asked of it later is a ModelError. Twice is harmless."""
        self._closed = True
        self._turn += 1
        with ExitStack() as steps:  # runs from the last to the first
            steps.callback(self._undo.close)
            if self._prefill is not None:
                steps.callback(self._prefill.close)
            for loop in self._loops.values():
                steps.callback(loop.close)
            self._loops, self._prefill = {}, None

    def reset(self, keep: int = 0) -> None:
        """Forget all tokens but the first `keep`."""
        self._turn += 1
        del self.tokens[keep:]

    def warm(self) -> None:
        """Nothing: the step that suits a sampler is recorded before its first token."""

    def feed(self, tokens: Sequence[int]) -> NDArray[np.float32]:
        """Add tokens and return the logits (vocab,) after the last one; raises ContextError, ModelError."""
        # A step after the last would change the logits.
        for _ in self._stream(tokens, Settings(), 0, 1, steps_per_submission=1):
            pass
        self.tokens += tokens
        out = self.device.download(self.plan.logits, 4 * self.config.vocab)
        return np.frombuffer(out, np.float32)

    def feed_all(self, tokens: Sequence[int]) -> NDArray[np.float32]:
        """Add tokens and return the logits (len(tokens), vocab) after each of them, by the kernels for prompts.

        If those refuse the model, or do not hold its values, it takes a step for each. ContextError, ModelError,
        MemoryError.
        """
        self._check_answers(tokens)
        self._turn += 1
        fed, _ = self._resumed(tokens)
        again = self.tokens if len(fed) > len(tokens) else []
        # What is refused here alone, as the logits of every token may be, does not change how prompts are fed.
        with suppress(UnsupportedModelError):
            prompts = self._prompts()
            if again:
                prompts.run(again, 0, logits=False)
            logits = None if again and prompts.lost else prompts.score(tokens, len(self.tokens))
            if logits is not None and not prompts.lost:
                self._sampling.remember(0, tokens, len(self.tokens))
                self.tokens += tokens
                return logits
        return np.stack([self.feed([token]) for token in tokens])

    def hidden(self, tokens: Sequence[int]) -> NDArray[np.float32]:
        """The states (len(tokens), dim) after the last norm, of a text of its own: what was said before is forgotten.

        By the kernels for prompts. ContextError; ModelError, also for values that those do not hold;
        UnsupportedModelError where they refuse the model; MemoryError.
        """
        self.reset()
        self._check(tokens)
        for loop in self._loops.values():
            loop.settle()
        prompts, norm = self._prompts(), self.config.network.logits.norm
        stream = prompts.hidden(tokens)
        if prompts.lost or not np.isfinite(stream).all():
            raise ModelError("values of the text pass 65504, which the kernels for prompts do not hold")
        vectors = {
            name: np.frombuffer(self.device.download(self.model.vectors[name], 4 * self.config.dim), np.float32)
            for name in (norm.spec.name, f"{norm.spec.name}.bias")
            if name in self.model.vectors
        }
        if norm.kind == "layer":
            stream = stream - stream.mean(axis=-1, keepdims=True)
        made = unit(stream, self.config.eps) * vectors[norm.spec.name]
        states: NDArray[np.float32] = made + vectors.get(f"{norm.spec.name}.bias", np.float32(0))
        return (states / np.float32(norm.scale))[:, : self.config.own.dim if self.config.own else None]

    def generate(
        self,
        prompt: Sequence[int],
        sampler: Sampler | Settings,
        limit: int | None = None,
        stops: frozenset[int] = frozenset(),
        *,
        seed: int | None = None,
        mask: Mask | None = None,
    ) -> Iterator[int]:
        """Add a prompt and yield up to `limit` new tokens; one of `stops`, yielded too, or a full context ends them.

        `seed` decides the draws, else the sampler's own. With a `mask`, or log-probabilities, steps do not run ahead of
        the host. `tokens` has the prompt once the first new token is there:
        before that, an interruption leaves it as it was. With the engine's next use the stream is over: LoopError where
        it is read on. ContextError, ModelError, DeviceFault.
        """
        if limit is not None and limit < 1:
            self.feed(prompt)
            return
        settings, own = _settings(sampler)
        settings = settings.without(self.config.suppressed)
        self.logprobs = []
        chosen = own if seed is None else seed
        chosen = secrets.randbits(64) if chosen is None else chosen
        if mask is not None or settings.logprobs is not None:
            yield from self._stepwise(prompt, replace(settings, masked=mask is not None), chosen, limit, stops, mask)
            return
        tokens = self._stream(prompt, settings, chosen, limit)
        turn = self._turn
        before: int | None = None
        try:
            for token in tokens:
                self.config.check_sampled(token)
                self.tokens += prompt if before is None else [before]
                before = token
                yield token
                self._check_turn(turn)
                if token in stops:
                    return
        finally:
            tokens.close()

    def _stepwise(
        self, prompt: Sequence[int], settings: Settings, seed: int, limit: int | None, stops: frozenset[int],
        mask: Mask | None,
    ) -> Iterator[int]:  # fmt: skip
        """`generate` where the host has a part in each step: it makes the mask, or reads the log-probabilities."""
        before, written = len(self.tokens), list[int]()
        try:
            self.feed(prompt)
            self.tokens.pop()  # its step is taken again, with these settings
            token = prompt[-1]
            while limit is None or len(written) < limit:
                drawn = self._drawn(token, settings, seed, mask and mask(written))
                self.tokens.append(token)
                written.append(token := drawn)
                turn = self._turn
                yield token
                self._check_turn(turn)
                if token in stops or len(self.tokens) >= self.context:
                    return
        finally:
            if not written:
                del self.tokens[before:]

    def _drawn(self, token: int, settings: Settings, seed: int, allowed: bytes | memoryview | None) -> int:
        """The token after the next one of a conversation, by a step of its own."""
        stream = self._stream([token], settings, seed, 1, steps_per_submission=1)
        if settings.masked:
            self._sampling.mask(0, 1, allowed)
        (drawn,) = stream
        if settings.masked and drawn >= self.config.vocab:
            raise ModelError(NO_TOKEN)
        self.config.check_sampled(drawn)
        if settings.logprobs is not None:
            self._loop(settings, 1).settle()
            self.logprobs.append(self._sampling.logprobs(0, 1))
        return int(drawn)

    def _stream(
        self,
        prompt: Sequence[int],
        settings: Settings,
        seed: int,
        limit: int | None,
        steps_per_submission: int | None = None,
    ) -> Any:
        """New tokens after a prompt, as a generator; what can be wrong with it is said at once."""
        self._check_answers(prompt)
        settings.check(self.config.vocab)
        self._turn += 1
        if self._near and (limit is None or len(self.tokens) + len(prompt) + limit > NEAR_POSITIONS):
            self._go_far()
        loop = self._loop(settings, steps_per_submission)
        prompt, position = self._resumed(prompt)
        self._sampling.set(0, settings)
        if settings.penalizes:  # what a reset took back, or a step that nobody read, may have pushed out older tokens
            self._sampling.remember(0, self.tokens, 0)
        fed = 0
        if len(prompt) > self._steps_at_most:
            with self._or_steps():
                self._prompts().run(prompt[:-1], position, logits=False)
                fed = len(prompt) - 1
                self._sampling.remember(0, prompt[:fed], position)
        stream = loop.stream(prompt[fed:], position + fed, self.context, limit, seed)
        if not fed:
            return stream

        def steps() -> Iterator[int]:
            if settings.penalizes:
                self._sampling.remember(0, self.tokens, 0)
            again, first = self._resumed(prompt) if position else (prompt, 0)
            return loop.stream(again, first, self.context, limit, seed)

        return self._held(stream, steps)

    def _resumed(self, prompt: Sequence[int]) -> tuple[Sequence[int], int]:
        """What is to be fed from which position, once all steps have ended: a prompt, or everything anew where the
        cache no longer holds what the prompt's first token attends to."""
        for loop in self._loops.values():
            loop.settle()
        position = len(self.tokens)
        if self._cache.rings:
            state = self._states.read(0)
            self._cache.rings.wrote(state.position + bool(state.stop and state.written))  # who stops stays where it is
            self._states.write(0, State(stop=1))  # is of a stream that is over
        if not self._cache.rings.holds(position):
            prompt, position = [*self.tokens, *prompt], 0
        if not position:
            self._cache.rings.begin()
        return prompt, position

    def _held(self, stream: Iterator[int], steps: Callable[[], Iterator[int]]) -> Iterator[int]:
        """The tokens after a prompt in chunks; of `steps` where a value of the prompt did not fit a half.

        The first token is there after the prompt, so that nobody waits to know. By the prompt alone: one that fits is
        not fed otherwise because of another before it.
        """
        first = next(stream, None)
        if self._prompts().lost:
            stream = steps()
            first = next(stream, None)
        if first is not None:
            yield first
            yield from stream

    @property
    def _steps_at_most(self) -> int:
        """Tokens of a prompt that is fed a step each: by the model and the device alone."""
        if self._stepped:
            return self.context
        if self._short is not None:
            return self._short
        chip = by_arch(self.device.arch)
        if chip is None:
            return SHORT_PROMPT_TOKENS
        return max(
            SHORT_PROMPT_TOKENS, min(LONGER_PROMPT_TOKENS, int(KERNEL_LOAD_S * chip.mem_bandwidth / 2 / self._bytes))
        )

    def _prompts(self) -> Prefill:
        """What runs tokens in chunks; made when it is first needed."""
        if self._prefill is None:
            self._prefill = Prefill(self.model, self._cache, sizes=self._chunks, dependency=self._dependency)
        return self._prefill

    @contextmanager
    def _or_steps(self) -> Iterator[None]:
        """If the kernels for prompts refuse the model, go on after this; from then on prompts are fed a step each."""
        try:
            yield
        except UnsupportedModelError:
            self._stepped = True
            if self._prefill is not None:
                self._prefill.close()
            self._prefill = None

    def _loop(self, settings: Settings, steps_per_submission: int | None = None) -> Loop:
        """The loop over a step that samples in a way that these settings need, `steps_per_submission` at once."""
        steps_per_submission = steps_per_submission or self._steps_per_submission
        kind = (ending([settings], self.config.vocab), steps_per_submission)
        if kind not in self._loops:
            dependency = (
                self._dependency if self._overlapped is None else up_to(self._overlapped, len(self.plan.launches))
            )
            self._loops[kind] = Loop(
                self.device,
                self._step(settings),
                self._states,
                dependency=dependency,
                steps_per_submission=steps_per_submission,
            )
        return self._loops[kind]

    def _step(self, settings: Settings) -> tuple[Launch, ...]:
        plan, sampling = self.plan, self._sampling
        if isinstance(plan, PersistentPlan) and settings.greedy and settings.logprobs is None:
            return plan.likeliest(sampling)
        end = sampling.launches(self._states, [settings], logits=plan.logits, best=plan.best, best_row=plan.best_row)
        return (*plan.launches, *end)

    def _check_open(self) -> None:
        if self._closed:
            raise ModelError("this engine was closed: make a new one")

    def _check_turn(self, turn: int) -> None:
        """LoopError in a stream whose turn is over."""
        self._check_open()
        if turn != self._turn:
            raise LoopError("this conversation was used otherwise meanwhile: this stream is over")

    def _check_answers(self, tokens: Sequence[int]) -> None:
        self.config.check_answers()
        self._check(tokens)

    def _check(self, tokens: Sequence[int]) -> None:
        self._check_open()
        self.config.check_prompt(tokens, len(self.tokens), self.context)


def _settings(sampler: Sampler | Settings) -> tuple[Settings, int | None]:
    """How the device samples as a sampler of the host does, and its seed."""
    if isinstance(sampler, Settings):
        return sampler, None
    return sampler.settings, sampler.seed
