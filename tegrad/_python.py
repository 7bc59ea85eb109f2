"""Which Python tegrad needs, and how to come by it. Runs on any Python 3, since it is what an older one is told.

`python3 tegrad/_python.py` (the Makefile), setup.py and `import tegrad` say the same.
"""

import platform
import sys

OLDEST_PYTHON = (3, 11)

UV = "python3 -m pip install --user uv && python3 -m uv python install 3.12"
"""Needs no root; uv is on PyPI, and runs on the Python 3.10 of JetPack 6."""
DEADSNAKES = "sudo add-apt-repository ppa:deadsnakes/ppa && sudo apt install python3.12-venv"


def complaint() -> str:
    """What is wrong with this Python and what to do; "" where it is new enough."""
    if sys.version_info >= OLDEST_PYTHON:
        return ""
    return (
        "tegrad needs Python {}.{} or newer, and {} is {} (JetPack 6 ships 3.10): install one beside it, with\n"
        "  {}\n"
        "or, on Ubuntu,\n"
        "  {}\n"
        "then run `make` again, which finds it, or make an environment of it (python3.12 -m venv) and install there."
    ).format(OLDEST_PYTHON[0], OLDEST_PYTHON[1], sys.executable or "python3", platform.python_version(), UV, DEADSNAKES)


if __name__ == "__main__":
    sys.exit(complaint() or None)
