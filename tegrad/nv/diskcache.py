"""tinygrad's cache on disk, without which everything runs: what is wrong with it is a warning, and no error."""

from __future__ import annotations

import sqlite3
import warnings
from typing import Any

from tinygrad import helpers

from tegrad.nv import compat

GET, PUT = "tinygrad.helpers.diskcache_get", "tinygrad.helpers.diskcache_put"
_get, _put = compat.published(GET), compat.published(PUT)


def _switch_off(error: Exception) -> None:
    """No use of the cache from here on in this process; said once."""
    if not helpers.CACHELEVEL:
        return
    helpers.CACHELEVEL.value = 0
    warnings.warn(
        f"tinygrad's cache {helpers.CACHEDB} cannot be used ({error}), so kernels are compiled anew in this process: "
        "make room on the disk, or delete that file",
        RuntimeWarning,
        stacklevel=3,
    )


def get(table: str, key: Any) -> Any:
    """tinygrad's diskcache_get; None where the cache cannot be read, or holds what nobody wrote."""
    try:
        return _get(table, key)
    except Exception as error:  # unpickling damaged bytes raises anything
        _switch_off(error)
        return None


def put(table: str, key: Any, val: Any, prepickled: bool = False) -> Any:
    """tinygrad's diskcache_put; the value is the answer, whether it could be kept or not."""
    try:
        return _put(table, key, val, prepickled)
    except (sqlite3.Error, OSError) as error:
        _switch_off(error)
        return val


def install() -> None:
    """Take the place of tinygrad's functions in every module that has them."""
    compat.replace_everywhere(GET, get)
    compat.replace_everywhere(PUT, put)
