"""`python -m tegrad` is the `tegrad` command."""

from tegrad.cli import entry

entry()
