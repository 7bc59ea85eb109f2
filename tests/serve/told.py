"""Functions that models are told of, and an answer that thinks, says something and calls two of them."""

from __future__ import annotations

from typing import Any

PLACE = {"type": "object", "properties": {"at": {"type": "string", "maxLength": 8}}, "required": ["at"]}
COUNT = {"type": "object", "properties": {"to": {"enum": [1, 2, 3]}}, "required": ["to"]}
TOOLS: Any = [
    {"type": "function", "function": {"name": "look", "description": "Look somewhere", "parameters": PLACE}},
    {"type": "function", "function": {"name": "count", "parameters": COUNT}},
]
CALLS = (
    '<tool_call>\n{"name": "look", "arguments": {"at": "the moon"}}\n</tool_call>\n'
    '<tool_call>\n{"name": "count", "arguments": {"to": 3}}\n</tool_call>'
)
SAID = f"<think>\nHm, the moon.\n</think>\nI look.{CALLS}"
