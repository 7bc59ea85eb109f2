"""The shipped model and what it is measured with: data, and where it lies."""

from pathlib import Path
from typing import Final

_HERE: Final = Path(__file__).parent

SMALL: Final = _HERE / "small.gguf"
"""A llama of four million parameters, trained by examples/train_small.py on the King James Bible."""
HELD_OUT: Final = _HERE / "small.held-out.txt"
"""The chapters that it was not trained on, separated by form feeds."""
WORDS: Final = _HERE / "small.words.txt"
"""Every word of the whole text, one a line."""
