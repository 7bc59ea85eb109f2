"""What a model may say: any JSON, JSON of a schema, or a grammar."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, slots=True)
class Grammar:
    """`text` is a JSON schema, a grammar in llguidance's Lark dialect, or a regular expression; none for any JSON."""

    kind: Literal["json", "schema", "lark", "regex"]
    text: str = ""
