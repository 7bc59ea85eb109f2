"""What holds something until it is closed: by `close`, at the end of a `with`, or where making it fails."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Self


class Closing(ABC):
    """Base of what has a `close`. Closing twice is harmless."""

    @abstractmethod
    def close(self) -> None:
        """Give back what is held."""

    @contextmanager
    def _closed_on_error(self) -> Iterator[None]:
        """For a constructor: what it holds so far is given back where it fails."""
        try:
            yield
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
