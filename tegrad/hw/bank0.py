"""Constant bank 0: the words in front of a kernel's parameters that its machine code reads.

No hardware fills them; whoever launches a kernel does. Source: code that NVRTC and ptxas 12.6 make for sm_87 and sm_90
(`c[0x0][0x0]` for %ntid.x, and so on; also where .reqntid would let them be constants), and runs on an H200.
"""

from __future__ import annotations

import struct

BLOCK_DIM = 0x00
"""Offset of blockDim: three words."""

GRID_DIM = 0x0C
"""Offset of gridDim: three words."""

STACK_TOP = 0x28
"""Offset of the word that a kernel starts its stack pointer with."""

DIMS = struct.Struct("<6I")
"""blockDim and gridDim, at BLOCK_DIM."""
