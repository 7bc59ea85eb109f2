"""The forms on the PTX engine."""

import numpy as np

from tegrad import ptx
from tests.ptx.oracle.form import Form
from tests.ptx.oracle.kernels import Batch, batches

SM = 90


def aligned(size: int) -> np.ndarray:
    """Zeros at an address that vector accesses may use."""
    raw = np.zeros(size + 64, np.uint8)
    start = -raw.ctypes.data % 64
    return raw[start : start + size]


def launch(batch: Batch) -> np.ndarray:
    """The output bytes of a batch."""
    source, out, scratch = (
        aligned(max(batch.input_size, 256)),
        aligned(max(batch.output_size, 256)),
        aligned(batch.scratch_size),
    )
    source[:] = batch.input()
    module = ptx.load(batch.text(SM), None)
    module.launch((batch.grid, 1, 1), (batch.block, 1, 1), [source, out, scratch])
    return out


def run(forms: list[Form]) -> tuple[dict[str, bytes], dict[str, str]]:
    """Results by form, and why there are none: a kernel that the engine refuses is tried form by form."""
    results, refused = {}, {}
    for batch in batches(forms):
        try:
            results.update((f.name, data) for f, data in batch.results(launch(batch)))
        except (ptx.PtxError, ptx.PtxFault) as error:
            if len(batch.forms) == 1:
                refused[batch.forms[0].name] = str(error)
                continue
            for form in batch.forms:
                more, why = run([form])
                results.update(more)
                refused.update(why)
    return results, refused
