"""All forms of the oracle, in the order of the record."""

from tests.ptx.oracle import (
    table_async,
    table_compare,
    table_convert,
    table_float,
    table_integer,
    table_matrix,
    table_meeting,
    table_memory,
    table_used,
    table_warp,
    table_warpgroup,
)
from tests.ptx.oracle.form import Form

FAMILIES: dict[str, list[Form]] = {
    "integer": table_integer.FORMS,
    "float": table_float.FORMS,
    "convert": table_convert.FORMS,
    "compare": table_compare.FORMS,
    "memory": table_memory.FORMS,
    "warp": table_warp.FORMS,
    "matrix": table_matrix.FORMS,
    "meeting": table_meeting.FORMS,
    "async": table_async.FORMS,
    "warpgroup": table_warpgroup.FORMS,
    "used": table_used.FORMS,
}
FORMS: dict[str, Form] = {f.name: f for family in FAMILIES.values() for f in family}
assert len(FORMS) == sum(map(len, FAMILIES.values())), "two forms share a name"
