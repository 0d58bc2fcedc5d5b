"""JSON pointers, by which a schema refers to another one in its document."""

from __future__ import annotations

from typing import Any


def at_pointer(schema: Any, path: str) -> Any:
    """What stands at a JSON pointer without its first slash; None where there is nothing."""
    for part in path.split("/") if path else ():
        name = part.replace("~1", "/").replace("~0", "~")
        if isinstance(schema, list) and name.isdecimal() and int(name) < len(schema):
            schema = schema[int(name)]
        elif isinstance(schema, dict):
            schema = schema.get(name)
        else:
            return None
    return schema
