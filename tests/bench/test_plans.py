"""plans.py: what the plans of a model hold."""

from collections import Counter
from dataclasses import replace

import pytest

from tegrad.bench import plans
from tegrad.bench.models import SHAPES
from tegrad.bench.plans import DryDevice, matrices
from tegrad.hw.chips import CHIPS
from tegrad.llm.formats import BF16, F16, Q6_K, BlockType

SMALL = replace(SHAPES["1b"].config, layers=1, vocab=4096)


@pytest.mark.parametrize(
    ("kind", "kernels"),
    [(Q6_K, ("repack", "large")), (BF16, ("large",)), (F16, ())],
    ids=["Q6_K", "BF16", "F16"],
)
def test_loading_repacks_every_matrix_of_blocks_and_looks_at_all_whose_weights_may_be_too_large(
    kind: BlockType, kernels: tuple[str, ...]
) -> None:
    made, launches = plans.launches("load", SMALL, kind, DryDevice(CHIPS["agx-orin-64gb"]))
    every = [matrix for matrix in matrices(made) if matrix.kind is kind]
    assert len(every) == 6  # five of a layer, of which q, k and v are one, and the embedding
    found = Counter((launch.program.name, launch.buffers[0].va_addr) for launch in launches)
    assert found == Counter((name, matrix.buffer.va_addr) for name in kernels for matrix in every)
