"""After a fault of the GPU a model says that it is lost, and a new one opens the device again."""

from __future__ import annotations

import pytest

from tegrad import LLM, models
from tegrad.llm.device import usable
from tegrad.nv.compilers import compile_cuda
from tegrad.nv.faults import DeviceFault

pytestmark = pytest.mark.board
WILD = 'extern "C" __global__ void wild(int *at, int value) { at[(long long)value << 28] = 1; }'


@pytest.mark.klog_errors("(?i)mmu fault|page fault|error notifier")
def test_a_new_model_opens_the_device_that_a_fault_took(device: str) -> None:
    with LLM(models.SMALL, 64, gpu=device) as llm:
        expected = llm.generate("In the beginning", max_tokens=4, temperature=0).tokens
        assert not llm.lost
        gpu, logits = llm._session.device, llm._session.plan.logits  # type: ignore[union-attr]
        gpu.load_program(compile_cuda(WILD, gpu.arch), "wild", 1, 1)(
            logits, global_size=(1, 1, 1), local_size=(1, 1, 1), vals=(-300,)
        )
        with pytest.raises(DeviceFault):
            llm.generate("In the beginning", max_tokens=4)
        assert llm.lost
        assert not usable(device)
    with LLM(models.SMALL, 64, gpu=device) as again:
        assert again.generate("In the beginning", max_tokens=4, temperature=0).tokens == expected
        assert usable(device)
