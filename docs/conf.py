"""Sphinx's settings for this folder: `make docs` builds the site into build/docs."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

import tegrad

project = "tegrad"
release = tegrad.__version__
extensions = ["myst_parser", "sphinx.ext.autodoc"]
myst_heading_anchors = 4
autodoc_typehints = "description"
exclude_patterns = ["plan.md"]
html_theme = "furo"
html_title = f"tegrad {release}"
