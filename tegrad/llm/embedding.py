"""What kernels that embed tokens are compiled for, beside the tables' formats."""

from __future__ import annotations

import numpy as np

from tegrad.llm.network import Embed


def scaled(embed: Embed) -> dict[str, str]:
    """The macro by which rows are multiplied, a float32; none where they are taken as they are."""
    return {} if embed.scale == 1 else {"SCALE": f"{np.float32(embed.scale):.9e}f"}
