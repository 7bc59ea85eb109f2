"""Results of approximate instructions: each within the documented error of the true value."""

from collections.abc import Callable

import numpy as np

from tests.ptx.oracle.form import Form
from tests.ptx.oracle.judge import number
from tests.ptx.oracle.models import sources

SMALLEST = {"f16": 2.0**-14, "bf16": 2.0**-126, "f32": 2.0**-126, "f64": 2.0**-1022}
MANTISSA = {"f16": 10, "bf16": 7, "f32": 23, "f64": 52}
LARGEST = {"f16": 65504.0, "bf16": 3.3895313892515355e38, "f32": 3.4028234663852886e38, "f64": 1.7976931348623157e308}

Function = Callable[..., np.ndarray]
FUNCTIONS: dict[str, Function] = {
    "div": np.divide,
    "divapprox": np.divide,
    "rcp": lambda x: 1 / x,
    "sqrt": np.sqrt,
    "rsqrt": lambda x: 1 / np.sqrt(x),
    "sin": np.sin,
    "cos": np.cos,
    "lg2": np.log2,
    "ex2": np.exp2,
    "tanh": np.tanh,
}


def flushed(x: np.ndarray, t: str) -> np.ndarray:
    return np.where(np.abs(x) < SMALLEST[t], np.copysign(0.0, x), x)


def parts(form: Form) -> tuple[str, str, list[np.ndarray]]:
    """Function, type of one number, and the sources as float64 (of .ftz, flushed)."""
    name = form.rule.split(":")[1]
    name = form.name.split(".")[0] if name == "$base" else name
    t = form.results[0].removesuffix("x2")
    inputs = [number(s, form.results[0]) for s in sources(form)]
    return name, t, [flushed(x, t) for x in inputs] if ".ftz" in form.name else inputs


def bound(form: Form, true: np.ndarray, inputs: list[np.ndarray], t: str) -> np.ndarray:
    """The error that the instruction's section allows."""
    _, _, relative, absolute = form.rule.split(":")
    allowed = np.abs(true) * 2.0 ** float(relative) if relative else np.zeros_like(true)
    if absolute == "angle":
        near = np.abs(inputs[0]) <= 2 * np.pi
        return np.where(near, 2.0**-20.5, 2.0**-14.7)
    if absolute:
        allowed = np.maximum(allowed, 2.0 ** float(absolute))
    # A subnormal result has no more than its last place.
    last = SMALLEST[t] if ".ftz" in form.name else SMALLEST[t] * 2.0 ** -MANTISSA[t]
    return np.maximum(allowed, last)


def outside(form: Form, got: np.ndarray) -> np.ndarray:
    """Whether a result (float64) is further from the true value than documented."""
    name, t, inputs = parts(form)
    with np.errstate(all="ignore"):
        true = FUNCTIONS[name](*inputs)
        error = np.abs(got - true)
        allowed = bound(form, true, inputs, t)
        over = np.abs(true) + allowed > LARGEST[t]
        wrong = ~(error <= allowed)
        wrong = np.where(
            over, ~(np.isinf(got) | (np.abs(got - true) <= allowed)) | (np.sign(got) != np.sign(true)), wrong
        )
    wrong = np.where(np.isinf(true), got != true, wrong)
    wrong = np.where(np.isnan(true), ~np.isnan(got), wrong)
    if name == "divapprox":
        # Beyond 2^126 the quotient is 0, or NaN of an infinity: documented for this instruction alone.
        large = (np.abs(inputs[1]) > 2.0**126) & np.isfinite(inputs[1])
        wrong = np.where(large & np.isfinite(inputs[0]), (got != 0) & wrong, np.where(large, False, wrong))
    return wrong


def disagree(form: Form, ours: np.ndarray, theirs: np.ndarray) -> np.ndarray:
    """Lanes in which a side is out of bounds, or the two differ where the value is 0, infinite or NaN."""
    a, b = (number(x, form.results[0]) for x in (ours, theirs))
    name, _, inputs = parts(form)
    with np.errstate(all="ignore"):
        true = FUNCTIONS[name](*inputs)
    exact = (true == 0) | np.isinf(true)
    same = (a == b) & (np.signbit(a) == np.signbit(b)) | np.isnan(a) & np.isnan(b)
    wrong = outside(form, a) | outside(form, b) | exact & ~same
    return wrong.any(-1) if wrong.ndim > 1 else wrong
