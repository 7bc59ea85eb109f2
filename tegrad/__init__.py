"""tegrad: tinygrad's NV backend on Jetson Orin and Hopper, GGUF language models, and an emulated Orin."""

from tegrad import _activate as _activate
from tegrad.errors import TegradError

__version__ = "0.1.0"

__all__ = ["TegradError", "__version__"]
