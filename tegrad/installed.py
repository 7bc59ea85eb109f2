"""How the running tegrad was installed, and the pip commands that add to it.

tegrad is on no package index, so `pip install tegrad[board]` finds nothing: a remedy names the folder, file or URL that
this tegrad came from. Nothing is looked up before a remedy is asked for.
"""

import json
import os
import sys
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from shlex import quote
from typing import Any

HERE = Path(__file__).resolve().parent
UNKNOWN = "FOLDER-OR-URL-OF-TEGRAD"
"""Stands where nobody knows: a folder that was copied, a wheel that is gone."""
LLVMLITE = (0, 48)
"""The first with LLVM 22: of minimumnum and maximumnum LLVM 20 makes wrong code (tests/ptx/test_float_semantics.py)."""


def requirement(*extras: str) -> str:
    """This tegrad with extras, quoted for a shell, as pip takes it: by a path, or by a URL."""
    wanted = f"[{','.join(extras)}]" if extras else ""
    found = source()
    return quote(f"tegrad{wanted} @ {found}" if "://" in found else f"{found}{wanted}")


def pip_install(*extras: str) -> str:
    """The command that installs this tegrad's extras (`board`, `compilers`, `dev`)."""
    return f"pip install {_editable()}{requirement(*extras)}"


def lacking_llvmlite() -> str:
    """What the emulated board's engine lacks: "" where an llvmlite is there that is new enough, or tells no version."""
    import importlib.metadata
    import importlib.util

    if importlib.util.find_spec("llvmlite") is None:
        return "the package llvmlite, which is not installed"
    with suppress(importlib.metadata.PackageNotFoundError, ValueError):
        found = importlib.metadata.version("llvmlite")
        if tuple(int(part) for part in found.split(".")[:2]) < LLVMLITE:
            least = ".".join(map(str, LLVMLITE))
            return f"llvmlite {least} or later, as an older one's LLVM computes minima wrong, and {found} is installed"
    return ""


def search_path() -> str:
    """PYTHONPATH for a Python that we start elsewhere: ours, without what lies in a working directory that is gone."""
    found = []
    for path in sys.path:
        with suppress(FileNotFoundError):
            found.append(os.path.abspath(path))
    return os.pathsep.join(found)


def isolated(module: str) -> list[str]:
    """The command for `main` of a module of ours in a process that needs no more of Python's start than that."""
    start = f"import sys; sys.path[:] = sys.argv[1:]; from {module} import main; main()"
    # An editable install is found by a hook in `site`, which -S leaves out.
    return [sys.executable, "-I", "-S", "-c", start, *filter(None, sys.path), str(HERE.parent)]


def source() -> str:
    """The folder or file (a path) or the URL that this tegrad was installed from; UNKNOWN where none can be told."""
    if _is_checkout(HERE.parent):
        return str(HERE.parent)
    return _recorded(_direct_url()) or UNKNOWN


def _editable() -> str:
    """An editable install stays one."""
    return "-e " if _is_checkout(HERE.parent) else ""


def _is_checkout(folder: Path) -> bool:
    """Whether a folder holds tegrad's sources; site-packages has no pyproject.toml."""
    try:
        return 'name = "tegrad"' in (folder / "pyproject.toml").read_text()
    except OSError:
        return False


def _recorded(direct: Mapping[str, Any]) -> str:
    """What direct_url.json (PEP 610) says, as far as pip can install from it again; "" if it cannot."""
    url = str(direct.get("url", ""))
    if url.startswith("file://"):
        from urllib.parse import unquote, urlsplit

        path = Path(unquote(urlsplit(url).path))
        return str(path) if path.exists() else ""
    if vcs := direct.get("vcs_info"):
        return f"{vcs['vcs']}+{url}@{vcs['commit_id']}"
    return url


def _direct_url() -> dict[str, Any]:
    """direct_url.json of the installed distribution; {} where it has none."""
    from importlib import metadata

    try:
        text = metadata.distribution("tegrad").read_text("direct_url.json")
        found = json.loads(text) if text else {}
    except (metadata.PackageNotFoundError, OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}
