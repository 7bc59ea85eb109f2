"""What TinyJit learns of its arguments is what tinygrad finds, for every kind of them."""

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from boards import use_board

from tegrad.nv import inputs

pytestmark = pytest.mark.board


@pytest.fixture(scope="module", autouse=True)
def board() -> Iterator[None]:
    """A board for all of them."""
    with use_board("agx-orin-64gb:23GiB"):
        yield


def whole(*shape: int, dtype: Any = np.float32) -> Any:
    from tinygrad import Tensor

    return Tensor(np.zeros(shape, dtype), device="NV").realize()


def cases() -> list[tuple[tuple[Any, ...], dict[str, Any]]]:
    from tinygrad import Tensor, UOp

    x, y, z = whole(4, 4), whole(4, 4), whole(16)
    n, m = UOp.variable("n", 1, 10).bind(3), UOp.variable("m", 1, 10).bind(9)
    return [
        ((x,), {}),
        ((y,), {}),
        ((x, y, z), {}),
        ((z, x), {}),
        ((whole(4, 4, dtype=np.float16),), {}),
        ((whole(2, 8), whole(8, 2)), {}),
        ((x,), {"b": y, "a": z}),
        ((3, x, None, "text", np.zeros(2)), {"c": 1.5, "b": y}),
        ((x[1:3],), {}),
        ((x.T,), {}),
        ((z.reshape(2, 8),), {}),
        ((x.reshape(16).reshape(2, 2, 4),), {}),
        (([x, y],), {}),
        (({"one": x}, (y,)), {"more": [z]}),
        ((x, n), {}),
        ((n, x), {"m": m, "n": n}),
        ((n,), {}),
        ((whole(10)[:n],), {}),
        ((Tensor(np.zeros(4, np.float32), device="PYTHON").realize(),), {}),
        ((), {}),
    ]


def test_it_is_what_tinygrad_finds() -> None:
    for turn in range(3):  # first, as learned, and with new tensors
        for args, kwargs in cases():
            found, expected = inputs.prepare(args, kwargs), inputs._stock(args, kwargs)
            assert len(found[0]) == len(expected[0]), (turn, args)
            assert all(ours is theirs for ours, theirs in zip(found[0], expected[0], strict=True))
            assert found[1:3] == expected[1:3]
            for ours, theirs in zip(found[3], expected[3], strict=True):
                assert ours[0] is theirs[0]
                assert ours[1:] == theirs[1:]


def test_what_is_new_is_learned_once(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Any] = []
    monkeypatch.setattr(inputs, "_views", {})
    monkeypatch.setattr(inputs, "_stock", lambda *given, stock=inputs._stock: asked.append(given) or stock(*given))
    for _ in range(5):
        inputs.prepare((whole(3, 7), whole(3, 7)), {"z": whole(21)})
    assert len(asked) == 2


def test_few_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(inputs, "_views", {})
    monkeypatch.setattr(inputs, "MOST_VIEWS", 3)
    for size in range(1, 12):
        inputs.prepare((whole(1, size),), {})
        assert len(inputs._views) <= 3


def test_a_tensor_that_is_not_realized_is_realized() -> None:
    lazy = whole(4) + 1
    assert not lazy.uop.is_realized
    found = inputs.prepare((lazy,), {})
    assert lazy.uop.is_realized
    assert found[0] == [lazy.uop.base]


def test_what_tinygrad_refuses_is_refused() -> None:
    from tinygrad import Tensor
    from tinygrad.engine.jit import JitError

    x = whole(4)
    with pytest.raises(JitError, match="duplicate inputs"):
        inputs.prepare((x, x), {})
    with pytest.raises(JitError, match="real buffers"):
        inputs.prepare((Tensor(1.0),), {})


def test_another_shape_or_type_is_a_mismatch() -> None:
    from tinygrad import TinyJit
    from tinygrad.engine.jit import JitError

    double = TinyJit(lambda x: (x * 2).realize())
    for _ in range(4):
        double(whole(4, 4))
    for other in (whole(16), whole(2, 8), whole(4, 4, dtype=np.int32), whole(4, 4).T):
        with pytest.raises(JitError, match="args mismatch"):
            double(other)
    with pytest.raises(JitError, match="args mismatch"):
        double(x=whole(4, 4))


def test_a_variable_that_has_two_values_or_none_is_left_to_tinygrad() -> None:
    from tinygrad import UOp

    n = UOp.variable("n", 1, 10)
    assert inputs.prepare((n.bind(3), n.bind(4)), {})[1] == inputs._stock((n.bind(3), n.bind(4)), {})[1] == {"n": 4}
    with pytest.raises(AssertionError, match="can't unbind"):
        inputs.prepare((n,), {})
