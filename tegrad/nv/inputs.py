"""What TinyJit does with its arguments before each call, remembered for arguments of a kind that it has met before.

tinygrad works out anew, for every tensor of every call, how the tensor views its buffer. For a whole buffer of this
device, as a realized tensor has one, that depends on little: shape, type, device. `prepare` keeps tinygrad's own answer
for each of these; everything else, and whatever is to be refused, is left to tinygrad.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Final

from tinygrad.device import Buffer
from tinygrad.tensor import Tensor
from tinygrad.uop.ops import Ops, UOp, buffers

from tegrad.nv import compat

Prepared = tuple[list[Any], dict[str, int], list[Any], list[Any]]
"""Buffers, values of variables, names, and how each tensor views its buffer."""

MOST_LOOKS: Final = 1024
"""How many are kept."""
CONTAINERS: Final = (tuple, list, dict)
"""Arguments that may hold tensors."""

PREPARE: Final = "tinygrad.engine.jit._prepare_jit_inputs"
_stock: Callable[..., Prepared] = compat.published(PREPARE)
_looks: dict[Any, Any] = {}


def prepare(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Prepared:
    """tinygrad's `_prepare_jit_inputs`, and what it raises."""
    names: list[Any] = []
    inputs: list[Any] = []
    looks: list[Any] = []
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
        if buffer.__class__ is not Buffer or not _is_ours(buffer.device) or not buffer.is_allocated():
            return _stock(args, kwargs)
        arg = base.arg
        key = (arg.dtype, arg.device, arg.addrspace, base.src, uop.op, uop.dtype, uop.src[1:])
        if (look := _looks.get(key)) is None and (look := _learn(key, value)) is None:
            return _stock(args, kwargs)
        names.append(name)
        inputs.append(base)
        looks.append(look)
    if len(inputs) > 1 and len(set(inputs)) != len(inputs):
        return _stock(args, kwargs)
    return inputs, variables, names, looks


def _is_ours(device: str) -> bool:
    return device == "NV" or device.startswith("NV:")


def _learn(key: Any, tensor: Tensor) -> Any:
    """tinygrad's answer for one tensor, kept under `key`; None where it depends on a variable."""
    found = _stock((tensor,), {})
    (look,) = found[3]
    if found[1] or look[1]:
        return None
    if len(_looks) >= MOST_LOOKS:
        _looks.clear()
    _looks[key] = look
    return look
