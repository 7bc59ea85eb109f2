"""What TinyJit works out about its arguments before each call, remembered by their shape, type and device.

For every tensor of every call tinygrad works out anew how the tensor views its buffer, and compares that with what it
captured. Where a tensor is a whole buffer of an NV device, as a realized tensor usually is, the answer depends on
shape, type and device alone. `prepare` keeps tinygrad's own answers for these; it leaves to tinygrad all other
arguments, and those that tinygrad refuses.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Final

from tinygrad.device import Buffer
from tinygrad.tensor import Tensor
from tinygrad.uop.ops import Ops, UOp, buffers

from tegrad.nv import compat

Prepared = tuple[list[Any], dict[str, int], list[Any], list[Any]]
"""The tensors' buffers, the variables' values by name, the tensors' names (keyword, or position), and tinygrad's
description of how each tensor views its buffer."""

MOST_VIEWS: Final = 1024
"""How many descriptions are kept; one more, and all are dropped."""
CONTAINERS: Final = (tuple, list, dict)
"""Types of arguments in which tinygrad looks for tensors."""

PREPARE: Final = "tinygrad.engine.jit._prepare_jit_inputs"
_stock: Callable[..., Prepared] = compat.published(PREPARE)
_views: dict[Any, Any] = {}


def prepare(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Prepared:
    """What replaces tinygrad's `_prepare_jit_inputs`: the same answer for a call's arguments, and the same errors."""
    names: list[Any] = []
    inputs: list[Any] = []
    views: list[Any] = []
    variables: dict[str, int] = {}
    given = (*enumerate(args), *sorted(kwargs.items())) if kwargs else enumerate(args)
    for name, value in given:
        if value.__class__ is UOp:
            if not value.is_bound_var:
                return _stock(args, kwargs)
            variable, bound = value.unbind()
            if variables.setdefault(variable.expr, bound) != bound:
                return _stock(args, kwargs)
            continue
        if value.__class__ is not Tensor:
            if isinstance(value, CONTAINERS):
                return _stock(args, kwargs)
            continue
        uop = value.uop
        base = uop.src[0] if uop.op is Ops.RESHAPE else uop
        if base.op is not Ops.BUFFER:
            return _stock(args, kwargs)
        buffer = buffers.get(base)
        if buffer.__class__ is not Buffer or not compat.is_nv(buffer.device) or not buffer.is_allocated():
            return _stock(args, kwargs)
        arg = base.arg
        key = (arg.dtype, arg.device, arg.addrspace, base.src, uop.op, uop.dtype, uop.src[1:])
        if (view := _views.get(key)) is None and (view := _learn(key, value)) is None:
            return _stock(args, kwargs)
        names.append(name)
        inputs.append(base)
        views.append(view)
    if len(inputs) > 1 and len(set(inputs)) != len(inputs):
        return _stock(args, kwargs)
    return inputs, variables, names, views


def _learn(key: Any, tensor: Tensor) -> Any:
    """tinygrad's description of one tensor's view, kept under `key`; None if it depends on a variable."""
    found = _stock((tensor,), {})
    (view,) = found[3]
    if found[1] or view[1]:
        return None
    if len(_views) >= MOST_VIEWS:
        _views.clear()
    _views[key] = view
    return view
