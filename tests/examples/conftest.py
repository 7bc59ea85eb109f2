"""The examples are scripts: their folder is where their own modules are found, as when they run."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2] / "examples"))
