"""The conformance suite: what nvgpu and nvmap do at the user-space boundary, as rules that run on any Kernel.

    rule      what a rule is, and the registry
    rig       a driver client for rules: opens, calls, expects refusals, and releases everything
    engine    the GPU for rules: memory, channels, pushbuffers, small kernels, their faults
    process   a second process, for rules about several
    run       runs rules one by one and says what came of each
    report    what the user sees, and the file to send
    s*        the rules, by section of the driver's facts

A rule touches the driver through `tegrad.uapi.kernel.Kernel` only, so the same rules judge a Jetson and the emulated
board. docs/conformance.md says how to run them and how to write one.
"""

from __future__ import annotations

import importlib

from tegrad.conformance.rule import Rule, registered

MODULES = (
    "s0_conventions",
    "s1_nodes",
    "s2_nvmap",
    "s3_ctrl",
    "s4_address_space",
    "s4_memory",
    "s4_coherence",
    "s5_channels",
    "s6_host",
    "s6_compute",
    "s7_faults",
    "s8_fences",
)
"""The modules that hold rules."""


def all_rules() -> list[Rule]:
    """Every rule there is, by section."""
    for name in MODULES:
        importlib.import_module(f"tegrad.conformance.{name}")
    return registered()
