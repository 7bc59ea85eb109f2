"""The stages in the order of risk: each row says what it does, for how long at most, and what its failure means."""

from __future__ import annotations

from collections.abc import Sequence

from tegrad.diag.selftest import client
from tegrad.diag.selftest.beside import beside
from tegrad.diag.selftest.bringup import bringup
from tegrad.diag.selftest.coherence import coherence
from tegrad.diag.selftest.fences import fences
from tegrad.diag.selftest.ioctls import ioctls
from tegrad.diag.selftest.machine import ON_A_BOARD, machine
from tegrad.diag.selftest.model import model
from tegrad.diag.selftest.packets import packets
from tegrad.diag.selftest.place import ANYWHERE
from tegrad.diag.selftest.preemption import preemption
from tegrad.diag.selftest.rules import rules
from tegrad.diag.selftest.stage import Stage
from tegrad.diag.selftest.streaming import streaming
from tegrad.diag.selftest.your_model import your_model

SEND = "send the report, with the last lines of `sudo dmesg`"

STAGES: Sequence[Stage] = (
    Stage(
        "machine",
        "Release, kernel, page size, Python, groups, nodes, power mode, clocks",
        machine,
        limit_s=30,
        means="this machine lacks something without which no GPU work can be tried",
        next_step=f"`tegrad doctor` says what to install; {ON_A_BOARD}",
        places=ANYWHERE,
    ),
    Stage(
        "ioctls",
        "Characteristics, buffers, mappings, address space, a channel set up and closed: no GPU work yet",
        ioctls,
        limit_s=60,
        means="the driver refuses or answers otherwise than L4T r36's; nothing was sent to the GPU",
        next_step=f"compare the release with README's table; {SEND}",
    ),
    Stage(
        "coherence",
        "The coherence matrix: which stores CPU and GPU see of each other, by flags of the mapping and by flush",
        coherence,
        limit_s=180,
        means="work of the GPU does not end, or CPU and GPU do not see the same memory: no result could be trusted",
        next_step=f"run nothing else on this GPU; {SEND}",
    ),
    Stage(
        "bringup",
        "First work: releases, segments in order, the copy engine, a kernel by QMD, results checked",
        bringup,
        limit_s=90,
        means="an engine does not do what its commands say, or the channel died; the step says which engine",
        next_step=f"`tegrad klog` shows what the driver logged of it; {SEND}",
    ),
    Stage(
        "conformance",
        "The driver's facts as rules, but for the hazardous ones",
        rules,
        limit_s=1800,
        means="this driver differs from the one that tegrad was made from; the rules that differ say in what",
        next_step=f"`tegrad conformance --rule ID` judges one again; {SEND}",
        amount=10_000,
        board_amount=1,
        unit="rules of a section at most",
    ),
    Stage(
        "fences",
        "A real increment of the syncpoint by the GPU, fences on it with their latency, a wait without host1x-fence",
        fences,
        limit_s=90,
        means="the driver does not wake who waits for the GPU; results are right, but waits poll the clock",
        next_step=f"models run all the same, with more latency; {SEND}",
        amount=200,
        board_amount=20,
        unit="fences timed",
    ),
    Stage(
        "one-liner",
        "tinygrad on this GPU: a sum of two tensors",
        client.one_liner,
        limit_s=180,
        means="tegrad's client cannot open the GPU or run a kernel, though the stages before could",
        next_step=f"compare with TEGRAD_BOARD=agx-orin-64gb tegrad selftest; {SEND}",
        needs=("compilers", "tinygrad"),
        places=ANYWHERE,
    ),
    Stage(
        "launches",
        "Small launches until every ring of the client has wrapped, results checked",
        client.launches,
        limit_s=600,
        means="a launch was lost, doubled or read old commands or arguments, or the GPU stopped on its way",
        next_step=f"try TEGRAD_MEMORY=volatile, the default; {SEND}",
        needs=("compilers", "tinygrad"),
        amount=20_000,
        board_amount=1_100,
        unit="launches",
        places=ANYWHERE,
    ),
    Stage(
        "kernels",
        "A kernel that spills, one with all shared memory of a block, atomics in volatile and in cached memory",
        client.kernels,
        limit_s=180,
        means="local memory, shared memory or atomics do not work as the chip's row says; the step says which",
        next_step=f"small kernels may run all the same; {SEND}",
        needs=("compilers", "tinygrad"),
        places=ANYWHERE,
    ),
    Stage(
        "streaming",
        "Reading, writing and copying once, and reading 2 MiB again and again, in volatile and in cached memory",
        streaming,
        limit_s=180,
        means="memory of one kind cannot be had, or kernels read there what they have not written; the step says which",
        next_step=f"keep to TEGRAD_MEMORY=volatile, the default; {SEND}",
        needs=("compilers", "tinygrad"),
        amount=1024,
        board_amount=4,
        unit="MiB once",
        places=ANYWHERE,
    ),
    Stage(
        "packets",
        "Packets between two CTAs and between all SMs, in volatile and in cached memory, beside what a launch costs",
        packets,
        limit_s=180,
        means="CTAs of one launch cannot hand packets to each other, so a step in one launch would be wrong or hang",
        next_step=f"models run all the same, by many launches, which an Orin takes unless a record allows one; {SEND}",
        needs=("compilers", "tinygrad"),
        amount=10_000,
        board_amount=8,
        unit="rounds of packets",
        places=ANYWHERE,
    ),
    Stage(
        "preemption",
        "A long kernel under CILP, CTA and no preemption: does another group's work get its turn, and does it hold",
        preemption,
        limit_s=240,
        means="a long kernel keeps everybody else from the GPU, or does not survive that others get their turn",
        next_step=f"run nothing else on the GPU beside a model; {SEND}",
        needs=("compilers",),
        amount=10_000,
        board_amount=500,
        unit="ms of a kernel",
        places=ANYWHERE,
    ),
    Stage(
        "model",
        "The shipped model against the reference in numpy: a step in one launch, and in many",
        model,
        limit_s=300,
        means="tokens come out that the model does not mean, by the way of running a step that the page names",
        next_step=f"`tegrad eval --device NV --documents 1` measures it at length; {SEND}",
        needs=("compilers", "tinygrad"),
        amount=64,
        board_amount=2,
        unit="tokens each way",
        places=ANYWHERE,
    ),
    Stage(
        "beside",
        "A step in one launch, whose CTAs wait for each other, beside a second process that launches and copies",
        beside,
        limit_s=400,
        means="two processes on this GPU disturb each other: results change, or a step whose CTAs wait never ends",
        next_step=f"leave the GPU to one process at a time; {SEND}",
        needs=("compilers", "tinygrad"),
        amount=60,
        board_amount=1,
        unit="seconds beside the second process",
        places=ANYWHERE,
    ),
    Stage(
        "your-model",
        "A model of yours (--model FILE): known tokens, a step in one launch and in many, speed beside llama-bench",
        your_model,
        limit_s=3600,
        means="a model of yours does not come out right by the way of running a step that the page names",
        next_step=f"`tegrad run FILE --temperature 0` shows its text: compare llama.cpp's; {SEND}",
        needs=("compilers", "tinygrad"),
        amount=128,
        board_amount=2,
        unit="tokens timed, and a prompt of 4 times as many",
        places=ANYWHERE,
        asks="model",
    ),
)


def chosen(names: Sequence[str]) -> Sequence[Stage]:
    """The stages of these names, in the order of the table; all where none is named."""
    return [stage for stage in STAGES if not names or stage.name in names]
