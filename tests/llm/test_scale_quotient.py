"""The quotient of two scales in the step in one launch (staging.cuh, `quotient`): rounded as division rounds."""

from __future__ import annotations

import numpy as np
import pytest


@pytest.mark.parametrize("off", [-2, -1, 0, 1, 2])
def test_a_step_of_newton_rounds_the_quotient_of_any_two_scales_as_division_does(off: int) -> None:
    """For every pair of numbers of 10 significant bits, however the approximate reciprocal is off in its last place.

    float64 holds the products and differences of the fused operations exactly, or to far more than they are near to a
    tie: a quotient of such numbers is at least 2**-35 of itself away from the middle between two floats.
    """
    significands = (np.arange(512, 1024) / 512).astype(np.float32)
    a, b = (grid.ravel() for grid in np.meshgrid(significands, significands))
    inverse = ((np.float32(1) / b).view(np.int32) + np.int32(off)).view(np.float32)
    near = a * inverse
    rest = (a.astype(np.float64) - near.astype(np.float64) * b).astype(np.float32)
    made = (rest.astype(np.float64) * inverse + near).astype(np.float32)
    assert np.array_equal(made, a / b)
    assert off == 0 or not np.array_equal(near, a / b)  # what it was before
