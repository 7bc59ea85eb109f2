"""Programs that know nothing of tegrad."""

from __future__ import annotations

import ctypes
import subprocess
from pathlib import Path

from tegrad.uapi.ioctls import ROWS

SOURCE = Path(__file__).with_name("exec_client.c")


def built_client(folder: Path) -> str:
    """The C program, built in this folder: its path."""
    (folder / "rows.h").write_text(rows())
    made = folder / "client"
    subprocess.run(["cc", "-O1", "-pthread", f"-I{folder}", "-o", made, SOURCE, "-ldl"], check=True)
    return str(made)


def rows() -> str:
    """REQ_X and AT_X_field of every ioctl that the C program makes."""
    lines = []
    for row in ROWS:
        lines.append(f"#define REQ_{row.name} {row.request:#x}ul")
        for name, at in fields(row.struct):
            lines.append(f"#define AT_{row.name}_{name} {at}")
    return "\n".join(lines)


def fields(struct: object) -> list[tuple[str, int]]:
    if not (isinstance(struct, type) and issubclass(struct, ctypes.Structure | ctypes.Union)):
        return []
    anonymous = getattr(struct, "_anonymous_", ())
    found = []
    for name, kind, *_ in struct._fields_:
        at = getattr(struct, name).offset
        prefix = "" if name in anonymous else f"{name}_"
        found += [(prefix + n, at + o) for n, o in fields(kind)] or [(name, at)]
    return found
