"""What tinygrad is asked to do, row by row, on whatever device DEV names: the worker of `tegrad bench tinygrad`.

Runs as a script in a process of its own, so that the peer's is tinygrad as published: nothing of ours is imported but
where DEV is NV, and there `import tegrad` is all. A line of JSON on stdin asks for a row and a number of samples; the
answer has microseconds, and values of the result, which both sides must have alike.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

MB = 1 << 20
VALUES = 1024
"""Of a result, evenly spread, that go into the answer."""


@dataclass(frozen=True)
class Row:
    """`call` is what is timed, with its wait; `result` has what it computed, as float32; `each` calls are a sample."""

    call: Callable[[], object]
    result: Callable[[], Any] | None = None
    each: int = 1


def made(name: str) -> Row:
    """A row by its name; KeyError for one that is not there."""
    kind, *sizes = name.split("-")
    makers: dict[str, Callable[..., Row]] = {
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
    }
    return makers[kind](kind, *sizes)


def _random(*shape: int, half: bool = False, seed: int = 0) -> Any:
    import numpy as np
    from tinygrad import Tensor

    values = np.random.default_rng(seed).standard_normal(shape, dtype=np.float32)
    return Tensor(values.astype(np.float16) if half else values).realize()


def _timed(function: Callable[..., Any], *inputs: Any) -> Row:
    """A call of a TinyJit and a synchronize."""
    from tinygrad import Device, TinyJit

    jit: Any = TinyJit(function)
    device: Any = Device[Device.DEFAULT]

    def call() -> object:
        out = jit(*inputs)
        device.synchronize()
        return out

    for _ in range(4):
        out: Any = call()
    return Row(call, lambda: out.float().numpy())


def _launch(kind: str) -> Row:
    return _timed(lambda x: (x + 1).realize(), _random(12))


def _stream(kind: str) -> Row:
    """Launches without a wait between them; one at the end."""
    from tinygrad import Device, TinyJit

    x = _random(12)
    jit: Any = TinyJit(lambda x: (x + 1).realize())
    device: Any = Device[Device.DEFAULT]
    for _ in range(4):
        out = jit(x)

    def call() -> None:
        for _ in range(10_000):
            jit(x)
        device.synchronize()

    return Row(call, lambda: out.numpy(), each=10_000)


def _mlp(kind: str) -> Row:
    sizes = (12, 128, 128, 4)
    weights = [_random(a, b, half=True, seed=a) * a**-0.5 for a, b in pairwise(sizes)]
    weights = [weight.realize() for weight in weights]

    def network(x: Any) -> Any:
        for weight in weights[:-1]:
            x = (x @ weight).relu()
        return (x @ weights[-1]).realize()

    return _timed(network, _random(1, 12, half=True, seed=1))


def _matmul(kind: str, dtype: str, size: str) -> Row:
    n, half = int(size), dtype == "f16"
    a, b = (_random(n, n, half=half, seed=seed) for seed in (0, 1))
    return _timed(lambda a, b: (a @ b).realize(), a, b)


def _elementwise(kind: str, size: str) -> Row:
    a, b = (_random(int(size.removesuffix("m")) * 1_000_000, seed=seed) for seed in (0, 1))
    if kind in ("add", "mul"):
        return _timed((lambda a, b: (a + b).realize()) if kind == "add" else (lambda a, b: (a * b).realize()), a, b)
    return _timed((lambda a: a.exp().realize()) if kind == "exp" else (lambda a: a.relu().realize()), a)


def _host(size: str) -> Any:
    import numpy as np

    return np.random.default_rng(2).integers(0, 255, int(size.removesuffix("mb")) * MB, dtype=np.uint8)


def _buffer(size: int) -> Any:
    from tinygrad import Device, dtypes
    from tinygrad.device import Buffer

    return Buffer(Device.DEFAULT, size, dtypes.uint8).ensure_allocated()


def _copyin(kind: str, size: str) -> Row:
    import numpy as np
    from tinygrad import Device

    host, device = _host(size), Device[Device.DEFAULT]
    buffer, back = _buffer(host.size), np.zeros_like(host)

    def call() -> None:
        buffer.allocator._copyin(buffer._buf, memoryview(host))
        device.synchronize()

    def result() -> Any:
        buffer.allocator._copyout(memoryview(back), buffer._buf)
        return back

    call()
    return Row(call, result)


def _copyout(kind: str, size: str) -> Row:
    import numpy as np

    host = _host(size)
    buffer, back = _buffer(host.size), np.zeros_like(host)
    buffer.allocator._copyin(buffer._buf, memoryview(host))

    def call() -> None:
        buffer.allocator._copyout(memoryview(back), buffer._buf)

    call()
    return Row(call, lambda: back)


def _copy(kind: str, size: str) -> Row:
    return _timed(lambda x: (x + 0.0).contiguous().realize(), _random(int(size.removesuffix("mb")) * MB // 4))


def _alloc(kind: str, size: str) -> Row:
    """One buffer that no cache has, and its end."""
    from tinygrad import Device
    from tinygrad.device import BufferSpec

    device: Any = Device[Device.DEFAULT]
    length = int(size.removesuffix("mb")) * MB
    options = BufferSpec()

    def call() -> None:
        device.allocator._free(device.allocator._alloc(length, options), options)

    call()
    return Row(call)


def _answer(row: Row, samples: int) -> dict[str, Any]:
    import numpy as np

    taken = []
    for _ in range(samples):
        begun = time.perf_counter()
        row.call()
        taken.append((time.perf_counter() - begun) / row.each * 1e6)
    if row.result is None:
        return {"us": taken}
    flat = np.asarray(row.result(), dtype=np.float32).reshape(-1)
    return {"us": taken, "values": [float(v) for v in flat[:: max(1, flat.size // VALUES)]]}


def main() -> None:
    """Answer until stdin ends."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # tinygrad prints on stdout
    if os.environ.get("DEV", "").startswith("NV"):
        import tegrad  # noqa: F401 (activates)
    rows: dict[str, Row] = {}
    for line in sys.stdin:
        asked = json.loads(line)
        if (name := asked["row"]) not in rows:
            rows.clear()
            rows[name] = made(name)
        answers.write(json.dumps(_answer(rows[name], asked["samples"])) + "\n")
        answers.flush()


if __name__ == "__main__":
    sys.path[0] = os.environ.get("TEGRAD_ROOT", "")  # this folder has modules whose names others have too
    main()
