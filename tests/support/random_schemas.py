"""Random JSON schemas whose keywords overlap and contradict each other, and random texts of a compiled grammar."""

from __future__ import annotations

import random
from typing import Any

from slotwise.grammar_compiler import message_of

PATTERNS = ("^a", "b$", "[ab]", "^.$", "^a+$", "^[^a]*$", ".*", "^$", "a|b", "^a$", "^(a|b)$", "^(ab)*$")
KEYS = ("a", "b", "c", "ab")
NUMBERS = (-10, -1, 0, 0.5, 1, 3, 1000)
END = 256  # the token behind those of single bytes
USUAL = frozenset(b'abc"}],:{[ 1234567890-')


def random_schema(draw: random.Random, depth: int) -> dict[str, Any]:
    kinds = [_text, _number] if depth == 0 else [_text, _number, _object, _object, _object, _array, _any, _all]
    return draw.choice(kinds)(draw, depth)


def _some(draw: random.Random, fields: dict[str, Any], share: float) -> dict[str, Any]:
    return {name: value for name, value in fields.items() if draw.random() < share}


def _text(draw: random.Random, depth: int) -> dict[str, Any]:
    return {"type": "string"} | _some(draw, {
        "pattern": draw.choice(PATTERNS), "minLength": draw.randint(0, 4), "maxLength": draw.randint(0, 4),
        "format": draw.choice(("date", "uuid", "ipv4", "email")), "enum": draw.sample(KEYS, 2)}, 0.25)


def _number(draw: random.Random, depth: int) -> dict[str, Any]:
    return {"type": draw.choice(("integer", "number"))} | _some(draw, {
        "minimum": draw.choice(NUMBERS), "maximum": draw.choice(NUMBERS), "exclusiveMinimum": draw.choice(NUMBERS),
        "multipleOf": draw.choice((1, 2, 7, 0.1)), "enum": draw.sample(NUMBERS, 2)}, 0.2)


def _object(draw: random.Random, depth: int) -> dict[str, Any]:
    return {"type": "object"} | _some(draw, {
        "properties": {key: random_schema(draw, depth - 1) for key in draw.sample(KEYS, draw.randint(1, 3))},
        "patternProperties": {draw.choice(PATTERNS): random_schema(draw, depth - 1)},
        "additionalProperties": draw.choice((False, False, True, random_schema(draw, 0))),
        "required": draw.sample(KEYS, draw.randint(0, 2))}, 0.6)


def _array(draw: random.Random, depth: int) -> dict[str, Any]:
    return {"type": "array"} | _some(draw, {
        "items": draw.choice((False, random_schema(draw, depth - 1))), "minItems": draw.randint(0, 3),
        "prefixItems": [random_schema(draw, depth - 1) for _ in range(draw.randint(1, 3))],
        "maxItems": draw.randint(0, 3)}, 0.5)


def _any(draw: random.Random, depth: int) -> dict[str, Any]:
    return {draw.choice(("anyOf", "anyOf", "oneOf")): [random_schema(draw, depth - 1) for _ in range(2)]}


def _all(draw: random.Random, depth: int) -> dict[str, Any]:
    return {"allOf": [random_schema(draw, depth - 1) for _ in range(2)]}


def random_text(matcher: Any, draw: random.Random, most: int) -> tuple[bytes, str]:
    """A random text of a grammar over single bytes, and why nothing can follow it; "" if it ends or is long."""
    walk, text = matcher.deep_copy(), bytearray()
    while len(text) < most:
        bits = int.from_bytes(walk.compute_bitmask(), "little")
        if walk.is_error():
            return bytes(text), message_of(walk)
        allowed = [token for token in range(END + 1) if bits >> token & 1]
        if not allowed:
            return bytes(text), "no token is allowed"
        usual = [token for token in allowed if token in USUAL]
        token = draw.choice(usual if usual and draw.random() < 0.9 else allowed)
        if token == END or not walk.consume_token(token):
            break
        text.append(token)
    return bytes(text), ""
