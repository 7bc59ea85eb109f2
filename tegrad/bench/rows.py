"""What tinygrad is asked to do, row by row, on whatever device DEV names: the worker of `tegrad bench tinygrad`.

It runs as a script in a process of its own, so that the peer is tinygrad as published: only where DEV is NV does
`import tegrad` change tinygrad. The rows of copies and allocations import `tegrad.nv.compat` on both sides, which only
names tinygrad's private methods.

A line of JSON on stdin asks: {"row": name, "samples": number of timed calls}. A line of JSON answers: {"us":
microseconds of each call, "loop_us": how quick the core was, "values": some of the result}; rows that compute nothing
have no values. An error ends the process with a traceback on stderr.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tegrad.nv.gpu import Gpu, GpuMethods

MB = 1 << 20
ANSWER_VALUES = 1024
"""About how many values of a result go into the answer, evenly spread: fewer than twice as many, or all."""
STREAM_LAUNCHES = 10_000
"""Launches of the row that waits only for the last one."""
MLP_WIDTHS = (12, 128, 128, 4)
"""Widths of the control network."""
GPT2 = {"124m": (12, 12, 768, 50257), "tiny": (2, 2, 32, 256)}
"""Layers, heads, width and vocabulary."""
POSITIONS = 128
"""How many tokens GPT-2's KV cache holds."""
ENDED_BY_CTRL_C = 130
"""Exit code, as the command's own."""
LOOP = range(5_000)
"""Iterations of the loop that tells how quick a core is."""


@dataclass(frozen=True)
class TimedRow:
    """What a row times, and how its result is read."""

    call: Callable[[], object]
    """What is timed: it returns when the GPU is done."""
    result: Callable[[], Any] | None = None
    """Returns what was computed, as an array; None for a row that computes nothing."""
    each: int = 1
    """How many launches one call makes: its time is divided by this."""


def made(name: str) -> TimedRow:
    """A row by its name; KeyError for one that is not there."""
    kind, *sizes = name.split("-")
    makers: dict[str, Callable[..., TimedRow]] = {
        "launch": _launch,
        "stream": _stream,
        "mlp": _mlp,
        "matmul": _matmul,
        "add": _elementwise,
        "mul": _elementwise,
        "exp": _elementwise,
        "relu": _elementwise,
        "copyin": _copyin,
        "copyout": _copyout,
        "copy": _copy,
        "alloc": _alloc,
        "gpt2": _gpt2,
    }
    return makers[kind](kind, *sizes)


def values(*shape: int, half: bool = False, seed: int = 0) -> Any:
    """An array of normally distributed random numbers, float32 or float16, the same for the same seed."""
    import numpy as np

    found = np.random.default_rng(seed).standard_normal(shape, dtype=np.float32)
    return found.astype(np.float16) if half else found


def mlp_weights() -> list[Any]:
    """The control network's weight matrices, in halves."""
    import numpy as np

    return [(values(a, b, seed=a) * a**-0.5).astype(np.float16) for a, b in pairwise(MLP_WIDTHS)]


def mlp(weights: Sequence[Any]) -> Callable[[Any], Any]:
    """The control network as a function of a tensor (1, 12)."""

    def network(x: Any) -> Any:
        for weight in weights[:-1]:
            x = (x @ weight).relu()
        return x @ weights[-1]

    return network


def gpt2_weights(size: str, half: bool) -> Iterator[Any]:
    """GPT-2's weight matrices: embeddings of tokens and of positions, then four of each layer: queries, keys and values
    in one; attention's output; the MLP's up; its down."""
    import numpy as np

    layers, _, width, vocabulary = GPT2[size]
    block = [(width, 3 * width), (width, width), (width, 4 * width), (4 * width, width)]
    for seed, shape in enumerate([(vocabulary, width), (POSITIONS, width), *layers * block]):
        yield (values(*shape, seed=seed) * shape[0] ** -0.5).astype(np.float16 if half else np.float32)


def host(size: str) -> Any:
    """Random bytes in the host's memory: "16mb" is 16 MiB."""
    import numpy as np

    return np.random.default_rng(2).integers(0, 255, megabytes(size) * MB, dtype=np.uint8)


def megabytes(size: str) -> int:
    """16 for "16mb"; a megabyte of a row's name is 1 << 20 bytes."""
    return int(size.removesuffix("mb"))


def millions(size: str) -> int:
    """10,000,000 for "10m"."""
    return int(size.removesuffix("m")) * 1_000_000


def _random(*shape: int, half: bool = False, seed: int = 0) -> Any:
    from tinygrad import Tensor

    return Tensor(values(*shape, half=half, seed=seed)).realize()


def _timed(function: Callable[..., Any], *inputs: Any) -> TimedRow:
    """A row that times a TinyJit call of `function` and the `synchronize` after it."""
    from tinygrad import Device, TinyJit

    jit: Any = TinyJit(function)
    device: Gpu = Device[Device.DEFAULT]

    def call() -> object:
        out = jit(*inputs)
        device.synchronize()
        return out

    for _ in range(4):
        out: Any = call()
    return TimedRow(call, lambda: out.float().numpy())


def _launch(kind: str) -> TimedRow:
    return _timed(lambda x: (x + 1).realize(), _random(12))


def _stream(kind: str) -> TimedRow:
    """Many TinyJit calls of one kernel, with a single wait after the last."""
    from tinygrad import Device, TinyJit

    x = _random(12)
    jit: Any = TinyJit(lambda x: (x + 1).realize())
    device: Gpu = Device[Device.DEFAULT]
    for _ in range(4):
        out = jit(x)

    def call() -> None:
        for _ in range(STREAM_LAUNCHES):
            jit(x)
        device.synchronize()

    return TimedRow(call, lambda: out.numpy(), each=STREAM_LAUNCHES)


def _mlp(kind: str) -> TimedRow:
    from tinygrad import Tensor

    network = mlp([Tensor(weight).realize() for weight in mlp_weights()])
    return _timed(lambda x: network(x).realize(), _random(1, MLP_WIDTHS[0], half=True, seed=1))


def _matmul(kind: str, dtype: str, size: str) -> TimedRow:
    n, half = int(size), dtype == "f16"
    a, b = (_random(n, n, half=half, seed=seed) for seed in (0, 1))
    return _timed(lambda a, b: (a @ b).realize(), a, b)


def _elementwise(kind: str, size: str) -> TimedRow:
    a, b = (_random(millions(size), seed=seed) for seed in (0, 1))
    if kind in ("add", "mul"):
        return _timed((lambda a, b: (a + b).realize()) if kind == "add" else (lambda a, b: (a * b).realize()), a, b)
    return _timed((lambda a: a.exp().realize()) if kind == "exp" else (lambda a: a.relu().realize()), a)


def _gpt2(kind: str, dtype: str, size: str) -> TimedRow:
    """A token of GPT-2 with random weights and a KV cache, from position 1 to the last and then from 1 again."""
    from tinygrad import Device, Tensor, TinyJit
    from tinygrad import UOp as Symbol

    layers, heads, width, _ = GPT2[size]
    weights = (Tensor(weight).realize() for weight in gpt2_weights(size, dtype == "f16"))
    tokens, places = next(weights), next(weights)
    blocks = [tuple(next(weights) for _ in range(4)) for _ in range(layers)]
    caches = [
        Tensor.zeros(2, POSITIONS, heads, width // heads, dtype=tokens.dtype).contiguous().realize() for _ in blocks
    ]

    def network(token: Any, position: Any) -> Any:
        x = tokens[token] + places.shrink(((position, position + 1), None))
        for (qkv, out, up, down), cache in zip(blocks, caches, strict=True):
            three = (x.layernorm() @ qkv).reshape(3, 1, heads, width // heads)
            q, k, v = three[0], three[1], three[2]
            cache.shrink((None, (position, position + 1), None, None)).assign(Tensor.stack(k, v)).realize()
            keys, values = (
                side.shrink(((0, position + 1), None, None)).transpose(0, 1) for side in (cache[0], cache[1])
            )
            scores = (q.transpose(0, 1) @ keys.transpose(1, 2)) * (width // heads) ** -0.5
            mixed = (scores.softmax(-1) @ values).transpose(0, 1).reshape(1, width)
            x = x + mixed @ out
            x = (x + (x.layernorm() @ up).gelu() @ down).realize()  # or every block computes those before it anew
        return (x.layernorm() @ tokens.T).realize()

    jit: Any = TinyJit(network)
    device: Gpu = Device[Device.DEFAULT]
    symbol, token = Symbol.variable("position", 1, POSITIONS - 1), Tensor([7]).realize()
    at = 0

    def call(position: int | None = None) -> Any:
        nonlocal at
        at = at % (POSITIONS - 1) + 1
        out = jit(token, symbol.bind(at if position is None else position))
        device.synchronize()
        return out

    for _ in range(POSITIONS - 1):  # every position once, so that the result has all of them
        call()
    return TimedRow(call, lambda: call(POSITIONS - 1).float().numpy())


def _buffer(size: int) -> Any:
    from tinygrad import Device, dtypes
    from tinygrad.device import Buffer

    return Buffer(Device.DEFAULT, size, dtypes.uint8).ensure_allocated()


def _copyin(kind: str, size: str) -> TimedRow:
    import numpy as np
    from tinygrad import Device

    from tegrad.nv import compat

    source, device = host(size), Device[Device.DEFAULT]
    buffer, back = _buffer(source.size), np.zeros_like(source)

    def call() -> None:
        compat.copy_in(buffer.allocator, compat.memory_of(buffer), memoryview(source))
        device.synchronize()

    def result() -> Any:
        compat.copy_out(buffer.allocator, memoryview(back), compat.memory_of(buffer))
        return back

    call()
    return TimedRow(call, result)


def _copyout(kind: str, size: str) -> TimedRow:
    import numpy as np

    from tegrad.nv import compat

    source = host(size)
    buffer, back = _buffer(source.size), np.zeros_like(source)
    compat.copy_in(buffer.allocator, compat.memory_of(buffer), memoryview(source))

    def call() -> None:
        compat.copy_out(buffer.allocator, memoryview(back), compat.memory_of(buffer))

    call()
    return TimedRow(call, lambda: back)


def _copy(kind: str, size: str) -> TimedRow:
    return _timed(lambda x: (x + 0.0).contiguous().realize(), _random(megabytes(size) * MB // 4))


def _alloc(kind: str, size: str) -> TimedRow:
    """Allocate and free a buffer that no cache holds."""
    from tinygrad import Device
    from tinygrad.device import BufferSpec

    from tegrad.nv import compat

    device: GpuMethods = Device[Device.DEFAULT]
    length = megabytes(size) * MB
    options = BufferSpec()

    def call() -> None:
        compat.allocate_and_free(device.allocator, length, options)

    call()
    return TimedRow(call)


def loop_us() -> float:
    """Microseconds that a fixed Python loop takes on this core now."""
    begun = time.perf_counter()
    for _ in LOOP:
        pass
    return (time.perf_counter() - begun) * 1e6


def take_quickest_core() -> None:
    """Move this thread to the core where the loop is quickest now, then lift the restriction to that core again.

    A core whose other hyperthread is busy, also with another virtual machine's work, runs Python and system calls at
    half to two thirds of its speed (docs/notebook.md): without this, which side is ahead depends on the core that the
    scheduler gave it.
    """
    allowed = os.sched_getaffinity(0)
    took: dict[int, float] = {}
    try:
        for core in allowed:
            os.sched_setaffinity(0, {core})
            took[core] = loop_us()
        os.sched_setaffinity(0, {min(took, key=lambda core: took[core])})
    finally:
        os.sched_setaffinity(0, allowed)


def _answer(row: TimedRow, samples: int) -> dict[str, Any]:
    import numpy as np

    take_quickest_core()
    loop, taken = loop_us(), []
    for _ in range(samples):
        begun = time.perf_counter()
        row.call()
        taken.append((time.perf_counter() - begun) / row.each * 1e6)
    if row.result is None:
        return {"us": taken, "loop_us": loop}
    flat = np.asarray(row.result(), dtype=np.float32).reshape(-1)
    return {"us": taken, "loop_us": loop, "values": [float(v) for v in flat[:: max(1, flat.size // ANSWER_VALUES)]]}


def serve(make: Callable[[str], TimedRow]) -> None:
    """Answer until stdin ends; what tinygrad prints goes to stderr. Ctrl-C ends the process without a traceback."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    rows: dict[str, TimedRow] = {}
    try:
        for line in sys.stdin:
            asked = json.loads(line)
            if (name := asked["row"]) not in rows:
                rows.clear()
                rows[name] = make(name)
            answers.write(json.dumps(_answer(rows[name], asked["samples"])) + "\n")
            answers.flush()
    except KeyboardInterrupt:
        sys.exit(ENDED_BY_CTRL_C)


if __name__ == "__main__":
    sys.path[0] = os.environ.get("TEGRAD_ROOT", "")  # this folder has modules whose names others have too
    if os.environ.get("DEV", "").rpartition("+")[2].startswith("NV"):
        import tegrad  # noqa: F401 (activates)
    serve(made)
