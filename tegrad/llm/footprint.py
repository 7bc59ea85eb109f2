"""The memory that a model takes with our kernels, from its file's header alone, and what context fits.

Weights, keys and values are counted as they are allocated; of the work space, what grows with the model or the context.
The rest is an allowance, which tests/llm/test_footprint.py holds against an engine on the emulated board.
"""

from __future__ import annotations

import os
from bisect import bisect_right
from contextlib import suppress
from dataclasses import dataclass
from typing import Final, Self

from tegrad.llm import delta, packing
from tegrad.llm.cache import AHEAD, BLOCK, bytes_of, held, state_bytes
from tegrad.llm.config import DEFAULT_CONTEXT, Config, stored_name, tensor_name
from tegrad.llm.errors import UnsupportedModelError
from tegrad.llm.gguf import Gguf
from tegrad.llm.workspace import ALIGN
from tegrad.nv.kernel import CTRL_NODE, DESKTOP_NODE, emulated
from tegrad.nv.memory import RESERVE_BYTES, available_memory

GIB: Final = 1 << 30
ALLOWANCE: Final = 48 << 20
"""Bytes for queues, kernels and their arguments, local memory, and the small buffers of plans: twice what an engine
with the shipped model takes on the emulated board."""
PROCESS: Final = 256 << 20
"""Bytes of the process itself, which where memory is unified come from the same: 106 MiB were measured with a small
vocabulary, a large one takes more."""
SYSTEM: Final = 1 << 30
"""Bytes that a Jetson's system is assumed to take before anything runs, without a desktop."""
CARVEOUTS: Final = 16
"""The part of a module's memory that is assumed to be kept from Linux: one in so many."""
SAMPLING: Final = 40 << 10
"""Bytes that a sequence of a batch takes to sample, without what grows with the vocabulary."""
SAMPLING_OF_TOKEN: Final = 5.5
"""Bytes of a sequence for each token of the vocabulary: its logit, what the likeliest are found in, two masks."""
STEP: Final = 256
"""Positions that a context which does not reach the model's own is rounded down to a multiple of."""


def module_room(gigabytes: int) -> int:
    """Bytes for a model on a Jetson module of so many GB. An assumption: no module was measured."""
    return gigabytes * GIB * (CARVEOUTS - 1) // CARVEOUTS - SYSTEM - RESERVE_BYTES - PROCESS


def machine_room() -> int:
    """Bytes for a model on this machine, now, if its GPU uses the system's memory."""
    return available_memory() - RESERVE_BYTES - PROCESS


def gpu_has_memory() -> bool:
    """Whether the GPU of this machine has memory of its own, which is not asked."""
    return not emulated() and os.path.exists(DESKTOP_NODE) and not os.path.exists(CTRL_NODE)


@dataclass(frozen=True, slots=True)
class Footprint:
    """A model's sizes, and bytes of its weights on the device."""

    config: Config
    weights: int
    q8: bool = False
    """Keys and values in q8_0."""
    gates_apart: bool = False
    """A layer whose gate and up are products of their own (`Rows`)."""

    @classmethod
    def of(cls, file: Gguf, *, q8: bool = False) -> Self:
        """Read from a file's header; GgufError, or UnsupportedModelError for what is not run at all."""
        own = Config.read(file)
        config = own.filled()
        weights = sum(info.nbytes + ALIGN for info in file.tensors.values() if info.rows == 1)
        for spec, layer in config.specs():
            if not spec.multiplied and len(spec.shape) > 1:
                weights += own.check(file, spec, layer).nbytes + ALIGN
            if spec.multiplied and stored_name(spec, layer) in file.tensors:
                kind, (rows, columns) = own.check(file, spec, layer).type, map(config.at(layer).size, spec.shape)
                packing.check(kind, columns)
                weights += packing.packed_bytes(kind, rows, columns)
        gates = config.network.gate.matrices
        kinds = [{own.check(file, spec, layer).type for spec in gates} for layer in range(own.layers)]
        biases = [tensor_name(spec, layer, "bias") for spec in gates for layer in range(own.layers)]
        apart = any(len(some) > 1 for some in kinds) or (len(gates) > 1 and any(map(file.tensors.get, biases)))
        return cls(config, weights, q8 and config.head_dim % BLOCK == 0, apart)

    def at(self, positions: int) -> int:
        """Bytes with a context of so many positions."""
        dims = [rope.dim for rope in {op.rope for op in self.config.network.attends}]
        wider = 4 * sum(max(dims) - dim for dim in dims)  # tables of angles in one launch are as wide as the widest
        ahead = AHEAD if self.config.causal else max(AHEAD, 1 << (positions - 1).bit_length())  # in one chunk
        cached = self._cached(positions, ahead=ahead) + wider * positions
        return self._bytes(positions, cached, ahead, 2 * 4 * self.config.vocab)

    def batch(self, positions: int, slots: int, blocks: int) -> int:
        """Bytes of a `Batch` of so many sequences of up to `positions`, that share so many blocks."""
        return self._bytes(
            positions,
            self._cached(positions, slots, blocks),
            AHEAD + slots,
            slots * (int(SAMPLING_OF_TOKEN * self.config.vocab) + SAMPLING),
        )

    def _cached(self, positions: int, slots: int = 1, blocks: int | None = None, ahead: int = AHEAD) -> int:
        """Bytes of keys and values."""
        config, mixers = self.config, self.config.network.keeping
        rows = {at: held(op, positions, ahead, slots, blocks) for at, op in mixers.items()}
        kept = sum(bytes_of(config.at(at), op, rows[at], self.q8) for at, op in mixers.items())
        return kept + slots * sum(map(state_bytes, mixers.values()))

    def _bytes(self, positions: int, cached: int, rows: int, ends: int) -> int:
        """With so many bytes of keys and values, `rows` of work space, and `ends` bytes for logits and sampling."""
        config = self.config
        normed, mixers = config.network.last_add.norm is not None, config.network.mixers
        sizes = {
            "x, and apart from it what is normed before it is added": 4 * config.dim * (1 + normed),
            "normed": 2 * config.dim,
            "queries, keys, values": 4 * config.projected + 2 * config.queries,
            "mixed": 2 * config.mixed,
            "hidden": 2 * max(config.ffn, config.layer_input),
            "what up makes, where it is a product of its own": 4 * config.ffn * self.gates_apart,
            "per-layer inputs": 4 * (2 * config.layers + 1) * config.layer_input,
            "what a delta net makes of tokens": max((delta.made_bytes(op) for op in mixers), default=0),
        }
        ropes = {op.rope for op in config.network.attends}
        angles = 2 * sum(4 * rope.dim for rope in ropes)  # a decode step has a table, and so have prompts
        return self.weights + cached + rows * sum(sizes.values()) + positions * angles + ends + ALLOWANCE

    def longest(self, room: int) -> int:
        """The longest context that fits into so many bytes; 0 where none does."""
        most = self.config.longest
        fits = bisect_right(range(1, most + 1), room, key=self.at)
        return fits if fits == most else fits - fits % STEP


def positions(file: Gguf, config: Config, asked: int | None, prompt: int = 0, *, q8: bool = False) -> int:
    """`Config.positions` whose default follows the free memory where the GPU uses the system's. ContextError."""
    if asked is not None or gpu_has_memory():
        return config.positions(asked, prompt)
    room = DEFAULT_CONTEXT
    with suppress(UnsupportedModelError):  # whoever runs the file says so, as of one for which there is no room at all
        room = max(STEP, Footprint.of(file, q8=q8).longest(machine_room()))
    return config.positions(None, prompt, room)
