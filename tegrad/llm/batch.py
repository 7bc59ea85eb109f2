"""Sequences that decode together, with one read of the weights a step; they join and leave between steps.

Every sequence has a slot: its blocks of the cache, its state and its ring of tokens. A step computes as many slots,
rounded up to 8, as the last one in use needs; slots in between that nobody owns are computed and ignored. A sequence
that is alone in the first slot has the step of a conversation (`plan`), which computes one and not 8. A sequence's
prompt goes through `Prefill`, all but its last token, with which its first step begins. It goes in chunks, of which
each step takes some: the others do not wait for it, and prompts take turns. One that is alone goes in the largest.

A sequence has all blocks that its limit asks for from the start, so that none ever stops for want of one. Blocks that a
prompt has filled are found again by those that begin alike; those of sampled tokens are not, as other products computed
them than would compute a prompt. What changes for a slot (its state, and that it is used no more) goes to the device in
the order of steps and chunks, so that nobody waits for those in flight.

How a sequence samples is its own affair: a record in memory. A step has the launches that its sequences need, and is
recorded the first time that it is needed with these, for so many slots.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Final

from tegrad.llm import convolution, embedding
from tegrad.llm.attention import Attention
from tegrad.llm.cache import BLOCK_POSITIONS, KvCache
from tegrad.llm.chips import kernels_of
from tegrad.llm.closing import Closing
from tegrad.llm.errors import ContextError, ModelError, NoRoom
from tegrad.llm.gemm import SMALL_M, TilePicker, pick_alike, pick_quickest
from tegrad.llm.network import Attend, Mixer
from tegrad.llm.packed import PackedModel
from tegrad.llm.plan import DecodePlan
from tegrad.llm.pool import Lease, Pool
from tegrad.llm.prefill import MOST_PADDED, Prefill, chunk_bytes, chunk_sizes, split
from tegrad.llm.programs import compiled_together
from tegrad.llm.rows import Rows
from tegrad.llm.sampling import Ending, Logprobs, Sampling, Settings, ending
from tegrad.llm.state import LOGITS_SPEC, State, States
from tegrad.llm.workspace import Workspace
from tegrad.nv.gpu import Buffer
from tegrad.nv.replay import AHEAD, DEFAULT, Dependency, Launch, Number, Recording, up_to

STEPS_IN_FLIGHT: Final = 2
"""Steps in flight."""
MOST_SLOTS: Final = 64
SLOT_MULTIPLE: Final = 8
"""Slots that a step is rounded up to: the columns of one product of the tensor cores."""
MASK_PATIENCE_S: Final = 10.0
"""Seconds that a step waits where all sequences wait for masks."""
GREEDY: Final = Settings()
DRAWN: Final = Settings(temperature=1.0)
"""Settings such as most requests have that are not greedy."""
NO_TOKEN: Final = (
    "no token can be taken: the model's logits are not numbers, since its weights are broken or its values pass 65504, "
    "which batches do not hold (run the sequence alone); or the sequence's mask and biases leave none"
)


@dataclass(eq=False, slots=True)
class Member:
    """A sequence of a batch; `tokens` are those sampled so far."""

    slot: int
    limit: int
    prompt: Sequence[int]
    lease: Lease
    settings: Settings = GREEDY
    tokens: list[int] = field(default_factory=list)
    logprobs: list[Logprobs] = field(default_factory=list)
    """Of each token, where the settings ask for them."""
    masks: int = 0
    """How many tokens have got their masks."""
    finished: bool = False
    """It sampled an end, used its positions, left, or failed."""
    error: ModelError | None = None
    """Why it failed."""

    @property
    def waits(self) -> bool:
        """Whether the mask of its next token is missing."""
        return self.settings.masked and self.masks <= len(self.tokens)

    @property
    def reused(self) -> int:
        """Positions of its prompt that others had filled."""
        return self.lease.found


class Batch(Closing):
    """Up to `slots` sequences of one model, at most 64. Close it, or use it in a `with`; the model stays the caller's.

    The cache has `blocks` of 64 positions for all of them together, as many as all can use unless given, and what they
    take is taken now. With `share`, prompts that begin alike have blocks in common, unless a layer attends within a
    window: such layers keep what each slot needs. A step takes one of the largest `sizes` of prompts' tokens, the
    chip's unless given, up to 512 where there are several sequences, or a window.

    With `same`, a sequence has the same logits, bit by bit, alone and among others, in any slot, with any part of its
    prompt found: whatever decides the order of sums is then that of the widest step and the largest chunk, and `pick`
    is not asked. A sequence alone has no step of its own then.

    On a chip that can, steps of up to 32 sequences overlap unless a dependency is given; wider ones were slower so.

    `ends` are the tokens that end a sequence. UnsupportedModelError, OutOfMemory, MemoryError.
    """

    def __init__(
        self,
        model: PackedModel,
        *,
        slots: int = SMALL_M,
        positions: int | None = None,
        blocks: int | None = None,
        share: bool = True,
        same: bool = False,
        q8: bool = False,
        ends: Sequence[int] = (),
        sizes: Sequence[int] | None = None,
        pick: TilePicker = pick_quickest,
        dependency: Dependency | None = None,
        overlap: bool = False,
    ) -> None:
        if not 1 <= slots <= MOST_SLOTS:
            raise ModelError(f"a batch of {slots} sequences was asked for: 1 to {MOST_SLOTS} decode together")
        self.model, self.config, self.device, self.slots = model, model.config, model.device, slots
        itself = dependency is None and kernels_of(self.device.arch).overlaps
        self._dependency, self._early = dependency or DEFAULT, AHEAD if itself else dependency or DEFAULT
        self._same, self._alone, self._ends = same, None, frozenset(ends)
        self._closed = False
        self._members: dict[int, Member] = {}
        self._waiting: deque[Member] = deque()
        """Those whose prompt is on its way."""
        self._decoding: dict[int, Member] = {}
        """The others, by slot."""
        self._left: dict[int, int] = {}
        """Slots that were used, and the run of `_admit` that ended that."""
        self._flights: deque[tuple[Recording, int, list[Member]]] = deque()
        self._fresh: list[tuple[Member, int]] = []
        self._recordings: dict[tuple[int, Ending], Recording] = {}
        self._counts: dict[int, Buffer] = {}
        """How many slots a step computes, by its width, on the device."""
        self._admit: Recording | None = None
        self._workspace = workspace = Workspace(self.device)
        with self._closed_on_error():
            held = self.config.positions(positions)
            blocks = slots * -(-held // BLOCK_POSITIONS) if blocks is None else blocks
            held = min(held, blocks * BLOCK_POSITIONS)
            if sizes is None:  # a ring has room for a chunk, in each slot
                rings = any(op.window is not None for op in self.config.network.mixers)
                sizes = chunk_sizes(self.device.arch, MOST_PADDED if rings else held)
            self._sizes = tuple(sorted(sizes))
            self._shared_sizes = tuple(size for size in self._sizes if size <= MOST_PADDED) or self._sizes
            self.pool = Pool(blocks)
            self.cache = KvCache(self.device, self.config, held, slots, q8=q8, ahead=max(sizes), blocks=blocks)
            self._share = share and self.cache.shareable
            workspace.callback(self.cache.close)
            prompts = pick_alike(max(sizes)) if same else pick
            self.prefill = Prefill(
                model, self.cache, sizes=sizes, pick=prompts, dependency=self._dependency, overlap=overlap
            )
            workspace.callback(self.prefill.close)
            self.states = States(self.device, slots)
            workspace.callback(self.states.close)
            self._sampling = Sampling(self.device, self.config.vocab, ends, slots)
            workspace.callback(self._sampling.close)
            steps = pick_alike(slots) if same else pick
            early = slots if overlap else SMALL_M if itself else 0
            rows = self._rows = Rows(model, slots, self.cache.positions, steps, overlap=early)
            workspace.callback(self._rows.close)
            self.logits = workspace.take(4 * slots * self.config.vocab, LOGITS_SPEC)
            attention = [
                self._attention(width, at, op)
                for width in self.widths
                for at, op in enumerate(rows.network.mixers)
                if isinstance(op, Attend)
            ]
            self._space = (
                workspace.take(max(each.workspace_bytes for each in attention)),
                workspace.put(bytes(max(each.counter_bytes for each in attention))),
            )
            if not same:
                logits = self.logits.offset(0, 4 * self.config.vocab)
                self._alone = DecodePlan(
                    model, self.states, self.cache, overlap=bool(rows.overlaps(1)), logits=logits, turns=rows.turns
                )
                workspace.callback(self._alone.close)

    @property
    def widths(self) -> tuple[int, ...]:
        """The numbers of slots that a step may compute."""
        rounded = range(SLOT_MULTIPLE, self.slots + SLOT_MULTIPLE, SLOT_MULTIPLE)
        return (*(() if self._same or self.slots == 1 else (1,)), *(min(width, self.slots) for width in rounded))

    @property
    def members(self) -> tuple[Member, ...]:
        """The sequences that joined and are not over."""
        return tuple(self._members.values())

    def join(
        self, tokens: Sequence[int], limit: int | None = None, settings: Settings = GREEDY, seed: int = 0
    ) -> Member:
        """Add a sequence that continues `tokens` until it stands at `limit`; steps feed its prompt, then sample for it.

        Of the device nothing is waited for but steps in flight of sequences that are over, where no other is left.
        ContextError for a prompt that does not fit, NoRoom while others have all slots or blocks, ModelError for a
        prompt that the model cannot continue, for biases of unknown tokens, and for a closed batch;
        UnsupportedModelError.
        """
        self._check_open()
        self.config.check_prompt(tokens)
        limit = self.cache.positions if limit is None else min(limit, self.cache.positions)
        settings = settings.without(self.config.suppressed)
        settings.check(self.config.vocab)
        if len(self._members) == self.slots:
            raise NoRoom(f"all {self.slots} slots of the batch are in use: wait until a sequence leaves")
        if len(tokens) > limit:
            raise ContextError(f"a prompt of {len(tokens)} tokens does not fit a context of {limit}")
        prompt = tokens[:-1]
        for size in {*split(len(prompt), self._sizes), *split(len(prompt), self._shared_sizes)}:
            self.prefill.prepare(size)
        slot = self._quiet_slot()
        lease = self.pool.take(limit, prompt if self._share else ())
        self.cache.put(slot, lease.blocks)
        self._sampling.set(slot, settings)
        self._sampling.remember(slot, prompt, 0)
        self.states.begin(slot, tokens[-1:], len(prompt), limit, seed, staged=True)
        member = self._members[slot] = Member(slot, limit, prompt, lease, settings)
        self._waiting.append(member)
        return member

    def mask(self, member: Member, allowed: bytes | memoryview | None) -> None:
        """Say what the next token of a masked sequence may be; None allows all. From any thread, once for each token.

        Bit t % 32 of little-endian word t / 32 allows token t. Best given as soon as the token before it came: the GPU
        then computes the logits. A sequence whose mask comes too late for a step has no token of it, and the same step
        again. ModelError for a mask of another size, and for a sequence whose settings do not say `masked`.
        """
        self._check_open()
        if not member.settings.masked:
            raise ModelError("a mask was given for a sequence without: join it with Settings(masked=True)")
        if not member.finished:
            self._sampling.mask(member.slot, len(member.tokens) + 1, allowed)
            member.masks = len(member.tokens) + 1

    def leave(self, member: Member) -> None:
        """Take a sequence out, whose prompt may still be on its way; what steps in flight sample for it is dropped.

        Leaving twice is harmless, and so is leaving a closed batch.
        """
        if not self._closed:
            self._end([member])

    def step(self, *, wait: bool = True) -> list[tuple[Member, int]]:
        """Wait for the oldest step in flight, with the next ones submitted: the tokens that came, of each sequence.

        Nothing comes only when no sequence is left or, without `wait`, while there are prompts alone: then one part of
        them is on its way, and sequences may join and leave meanwhile. One that fails finishes with an `error`.
        ModelError where the batch is closed, or all that sequences wait for are masks.
        """
        self._check_open()
        begun = time.monotonic()
        while not self._fresh and (self._members or self._flights):
            while self._members and len(self._flights) < STEPS_IN_FLIGHT:
                before = self.prefill.last
                self._feed()
                if members := list(self._decoding.values()):
                    recording = self._recording(members)
                    self._flights.append((recording, recording.run(), members))
                elif not wait:
                    if before is not None:
                        before[0].wait(before[1])
                    break
            if self._waiting or not self._decoding or not all(member.waits for member in self._decoding.values()):
                begun = time.monotonic()
            if time.monotonic() - begun > MASK_PATIENCE_S:
                raise ModelError(f"no mask came in {MASK_PATIENCE_S:g} s, and every sequence needs one: see Batch.mask")
            if self._flights:
                self._end(self._collect())
            if not (wait or self._decoding):
                break
        came, self._fresh = self._fresh, []
        return came

    def warm(self) -> None:
        """Compile and record chunks of prompts and steps of every width, greedy ones and those that draw."""
        steps = [(width, [settings]) for width in self.widths for settings in (GREEDY, DRAWN)]
        with compiled_together():
            for size in self._sizes:
                self.prefill.launches(size)
            for width, settings in steps:
                self.launches(width, settings)
        self._admission()
        for size in self._sizes:
            self.prefill.prepare(size)
        for width, settings in steps:
            self._recorded(width, settings)

    def launches(self, width: int, settings: Iterable[Settings] = (GREEDY,)) -> list[Launch]:
        """One step of the first `width` slots, for sequences with these settings."""
        if width == 1 and (plan := self._alone) is not None:
            end = self._sampling.launches(
                self.states, settings, logits=self.logits, best=plan.best, best_row=plan.best_row, slots=1
            )
            return [*plan.launches, *end]
        if width not in self._counts:
            self._counts[width] = self._workspace.put(chunk_bytes(count=width))
        rows, chunk, states = self._rows, self._counts[width], self.states.states
        launches = [
            embedding.launch(self.model, rows.programs, states, rows.x, width, OVERLAP=rows.overlaps(width)),
            *rows.inputs(width, chunk, (states,)),
        ]
        for at in range(self.config.layers):
            launches += rows.layer(at, width, chunk, partial(self._mix, width))
        launches += rows.logits(self.logits, width, chunk)
        return [*launches, *self._sampling.launches(self.states, settings, logits=self.logits, slots=width)]

    def close(self) -> None:
        """Wait for what is in flight and free everything. Closing twice is harmless."""
        self._closed = True
        self._flights.clear()
        self._workspace.close()

    # ---- the loop

    def _check_open(self) -> None:
        if self._closed:
            raise ModelError("this batch was closed: make a new one")

    def _collect(self) -> list[Member]:
        """Take the tokens of the oldest step in flight; the sequences that turn out to be over."""
        recording, number, members = self._flights.popleft()
        recording.wait(number)
        over = []
        for member in members:
            if member.finished:
                continue
            number, masked = len(member.tokens) + 1, member.settings.masked
            # Before the look at its token: a later step, in flight, may make that and end the sequence meanwhile.
            stopped = masked and self.states.read(member.slot).stop
            token, told = self.states.token(member.slot, number), member.settings.logprobs is not None
            if token is None:
                over += [member] if stopped or not masked else []
                continue
            if masked and told and not self._sampling.has_logprobs(member.slot, number):
                continue  # a step in flight has made it since, and is not done
            if token >= self.config.vocab:
                member.error = ModelError(NO_TOKEN)
                over.append(member)
                continue
            if told:
                member.logprobs.append(self._sampling.logprobs(member.slot, number))
            member.tokens.append(token)
            self._fresh.append((member, token))
            # A step in flight may have made it since the look at the state: nothing follows an end or a last position.
            last = token in self._ends or len(member.prompt) + len(member.tokens) >= member.limit
            over += [member] if stopped or (masked and last) else []
        return over

    def _feed(self) -> None:
        """Submit as many tokens of prompts as a step takes; who has all of its prompt samples from the next step on."""
        sizes = self._sizes if len(self._members) == 1 else self._shared_sizes
        room = sizes[-1]
        while self._waiting:
            member, lease = self._waiting[0], self._waiting[0].lease
            if self.pool.find(lease):
                self.cache.put(member.slot, lease.blocks)
            for size in split(len(member.prompt) - lease.filled, sizes):
                if size > room:
                    return
                room -= size
                part = member.prompt[lease.filled : lease.filled + size]
                self.prefill.run(part, lease.filled, member.slot, logits=False)
                self.pool.fill(lease, lease.filled + len(part))
                break
            self._waiting.popleft()
            if lease.filled < len(member.prompt):
                self._waiting.append(member)
            else:
                self._put_in_force(member.slot)
                self._decoding[member.slot] = member

    def _end(self, members: Sequence[Member]) -> None:
        """Give slots and blocks back; steps from now on do nothing for them."""
        for member in members:
            if not member.finished:
                member.finished = True
                self.states.write(member.slot, State(stop=1), staged=True)
                self._left[member.slot] = self._put_in_force(member.slot)
                if self._decoding.pop(member.slot, None) is None:
                    self._waiting.remove(member)
                self.pool.give(member.lease)
                del self._members[member.slot]

    def _put_in_force(self, slot: int) -> int:
        """Have the device take the state staged for a slot, after what was submitted; the run to wait for."""
        return self._admission().run(numbers=(slot,))

    def _admission(self) -> Recording:
        """What takes the state staged for a slot."""
        if self._admit is None:
            program = self._rows.programs("admit", buffers=2, values=1)
            launch = Launch(program, (self.states.states, self.states.staged), (1, 1, 1), (16, 1, 1), (0,))
            self._admit = self.device.record([launch], depth=self.slots, numbers=[[Number(0, value=0)]])
            self._workspace.callback(self._admit.close)
        return self._admit

    def _quiet_slot(self) -> int:
        """The first slot that nobody has and no step in flight computes; waits where there is none, and for the first
        of all where nobody else is there, since that one has a step of its own."""
        free = [slot for slot in range(self.slots) if slot not in self._members][: None if self._members else 1]
        done = self._admit.done if self._admit else 0
        slot = next((slot for slot in free if self._left.get(slot, 0) <= done), None)
        if slot is None:
            slot = min(free, key=self._left.__getitem__)
            assert self._admit is not None
            self._admit.wait(self._left[slot])
        return slot

    def _recording(self, members: Sequence[Member]) -> Recording:
        """A step that suits these sequences."""
        width = next(width for width in self.widths if width > max(member.slot for member in members))
        return self._recorded(width, [member.settings for member in members])

    def _recorded(self, width: int, settings: Sequence[Settings]) -> Recording:
        """A step of the first `width` slots."""
        end = ending(settings, self.config.vocab)
        if (width, end) not in self._recordings:
            launches = self.launches(width, settings)
            # Those that sample do not wait by themselves.
            early = up_to(self._early, len(launches) - len(end))
            form = early if self._rows.overlaps(width) else self._dependency
            made = self._recordings[width, end] = self.device.record(launches, form, depth=STEPS_IN_FLIGHT)
            self._workspace.callback(made.close)
        return self._recordings[width, end]

    # ---- launches

    def _attention(self, width: int, at: int, op: Attend) -> Attention:
        made = Attention.of(
            self.config.at(at), op, self.cache.positions, "q8_0" if self.cache.q8 else "f16", self.device, width,
            rows=self.cache.layers[at].rows, blocks=self.cache.layers[at].table_blocks, quantized=False, halves=True,
            tuning={"OVERLAP": 1} if self._rows.overlaps(width) else None,
        )  # fmt: skip
        if not self._same:
            return made
        few, most = (replace(made, sequences=self.widths[at]) for at in (0, -1))
        order = {"SPLITS": few.splits, "ATTENTION_WARPS": most.warps, "ATTENTION_LOADS": most.loads}
        return replace(made, tuning={**(made.tuning or {}), **order})

    def _mix(self, width: int, at: int, op: Mixer) -> list[Launch]:
        rows, out = self._rows, self._rows.mixed
        if not isinstance(op, Attend):
            step = convolution.step(
                rows.programs, self.config, op, self.model.layers[at], self.states.states, rows.qkv,
                self.cache.layers[at], (out, out, out), rows=width, OUTPUT_H=1, OVERLAP=rows.overlaps(width),
            )  # fmt: skip
            return [step]
        launch = self._attention(width, at, op).launch(
            rows.programs, self.states.states, rows.qkv, self.model.layers[at].head_norms(op, rows.x),
            rows.turns(op.rope), self.cache.layers[at], self._space, (out, out, out),
        )  # fmt: skip
        return [launch]
