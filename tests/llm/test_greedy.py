"""The kernel `greedy`: each sequence of a batch ends its step with its own token, in its own ring and history."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from operands import Operands
from sampling_rig import Rig, random_logits

from tegrad.llm.sampling import HISTORY, Settings

pytestmark = pytest.mark.board

SLOTS = 3
VOCAB = 33
"""The last entry is of a single token."""


def test_each_sequence_hands_its_own_tokens_over_and_remembers_them(operands: Operands) -> None:
    logits = random_logits(SLOTS, VOCAB)
    logits[1, VOCAB - 1] = 60
    likeliest = logits.argmax(-1).tolist()
    assert 0 not in likeliest
    assert len(set(likeliest)) == SLOTS
    with operands.placing():
        rig = Rig(operands, [Settings()] * SLOTS, logits)
    for slot in range(SLOTS):
        rig.begin(slot, position=10 * slot, token=100 + slot)
    for step in (1, 2):
        rig.step(greedy=True)
        assert rig.tokens() == likeliest
        assert [rig.states.token(slot, step) for slot in range(SLOTS)] == likeliest
    kept: Any = rig.sampling.finish[0]
    histories = np.frombuffer(bytes(kept.cpu_view()[: SLOTS * HISTORY * 4]), np.int32).reshape(SLOTS, HISTORY)
    for slot in range(SLOTS):
        fed = {10 * slot: 100 + slot, 10 * slot + 1: likeliest[slot]}
        assert {int(at): int(histories[slot, at]) for at in np.flatnonzero(histories[slot])} == fed
    with operands.placing():
        rig.close()
