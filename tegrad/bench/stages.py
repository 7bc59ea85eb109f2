"""What each kernel costs where it stands in a step: `tegrad bench kernels` on a GPU.

A step is recorded whole, and once more without the launches of one kernel; the difference is what these take in their
place, with their dependencies and with what the caches hold of their neighbours' work. The order stays, so that all
others take what they took. Weights are whatever lies in new buffers of the model's exact sizes: no file is needed.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from tegrad.bench import models, plans, products
from tegrad.bench.dependencies import gpu_us
from tegrad.bench.kernels import block_type, weight_bytes
from tegrad.bench.plans import PLANS
from tegrad.nv.gpu import Gpu
from tegrad.nv.replay import DEFAULT, Dependency, Launch


@dataclass(frozen=True, slots=True)
class Stage:
    """One kernel's launches in a step."""

    name: str
    grid: tuple[int, int, int]
    block: tuple[int, int, int]
    launches: int
    bytes: int
    """Of weights, by all launches."""
    us: float
    """What the step takes longer for them."""

    @property
    def gb_s(self) -> float:
        """Weights over time."""
        return self.bytes / self.us / 1e3 if self.us > 0 else float("nan")


@dataclass(frozen=True, slots=True)
class Step:
    """A plan on a device: its stages, the time of the whole, and the bandwidth of a kernel that only reads."""

    model: str
    plan: str
    us: float
    bandwidth: float
    """Bytes per second."""
    stages: tuple[Stage, ...]

    @property
    def bytes(self) -> int:
        """Of weights."""
        return sum(stage.bytes for stage in self.stages)


def measure(device: Gpu, name: str, plan: str = "decode", dependency: Dependency = DEFAULT) -> Step:
    """A plan of a model such as "1b-q6k" on an opened device."""
    shape, _ = models.parse(name)
    made = plans.model(shape.config, block_type(name), device, shape.tied)
    launches = PLANS[plan](made)
    with products.ProductBench(device, dependency) as bench:
        bandwidth = bench.bandwidth()
    whole = gpu_us(device, launches, dependency)
    twice = gpu_us(device, [*launches, *launches], dependency)
    weights = {matrix.buffer.va_addr: matrix for matrix in plans.matrices(made)}
    stages = []
    for group in groups(launches):
        chosen = {id(launch) for launch in group}
        others = [launch for launch in launches if id(launch) not in chosen]
        first = group[0]
        size = sum(weight_bytes(launch, weights) for launch in group)
        us = whole - gpu_us(device, others, dependency)
        stages.append(Stage(first.program.name, first.grid, first.block, len(group), size, us))
    return Step(name, plan, twice - whole, bandwidth, tuple(stages))


def groups(launches: Sequence[Launch]) -> list[list[Launch]]:
    """Launches of the same program in the same grid, in the order of their first."""
    found: dict[tuple[Any, ...], list[Launch]] = {}
    for launch in launches:
        found.setdefault((launch.program.name, launch.program.lib, launch.grid, launch.block), []).append(launch)
    return list(found.values())


def text(step: Step) -> str:
    """The step as lines."""
    share = step.bytes / step.us * 1e6 / step.bandwidth
    lines = [
        f"{step.plan} of {step.model}: {step.us:.1f} us for {step.bytes / 1e6:.1f} MB of weights, {share:.0%} of the "
        f"{step.bandwidth / 1e9:.0f} GB/s that a kernel reads at",
        f"{'kernel':>12} {'grid':>12} {'launches':>9} {'MB':>8} {'us':>8} {'each':>7} {'GB/s':>6} {'':>6}",
    ]
    for stage in step.stages:
        speed, of = (f"{stage.gb_s:.0f}", f"{stage.gb_s * 1e9 / step.bandwidth:.0%}") if stage.bytes else ("", "")
        grid = "x".join(map(str, stage.grid))
        lines.append(
            f"{stage.name:>12} {grid:>12} {stage.launches:9} {stage.bytes / 1e6:8.1f} {stage.us:8.1f} "
            f"{stage.us / stage.launches:7.2f} {speed:>6} {of:>6}"
        )
    return "\n".join(lines)
