"""Outcomes of cases on a GPU, kept as JSON with machine and versions."""

import json
from pathlib import Path
from typing import Any


def write_record(path: Path, cases: list[dict[str, Any]], command: str = "python tests/hardware/test_h200.py") -> None:
    """What was run, where and with which versions, as JSON."""
    from tegrad.bench.record import machine, now, versions
    from tegrad.nv.toolchain import nvjitlink, nvrtc

    tools = {name: ".".join(map(str, tool.version)) for name, tool in (("NVRTC", nvrtc()), ("nvJitLink", nvjitlink()))}
    about = {"date": now(), "machine": machine(), "versions": {**versions(), **tools}}
    path.write_text(json.dumps({**about, "command": command, "cases": cases}, indent=1) + "\n")
