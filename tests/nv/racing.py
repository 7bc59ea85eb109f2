"""A GPU for boards of these tests, started by the board's own process: it reads late, early and out of step."""

from collections.abc import Callable

from tegrad.hw.chips import Chip
from tegrad.orin.events import GpuEvent
from tegrad.orin.gpu import Gpu


def racing_gpu(chip: Chip, on_event: Callable[[GpuEvent], None], doorbell_fd: int) -> Gpu:
    """The GPU with races provoked."""
    return Gpu(chip, on_event, doorbell_fd, race_seed=20)
