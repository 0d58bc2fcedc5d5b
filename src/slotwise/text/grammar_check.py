"""Compiles grammars to check them, in a worker process: see `api/generate/output_constraints.py`.

The vocabulary is one of single bytes and the model's special tokens, which a grammar may name: what a grammar costs
does not depend on the rest.

Some grammars compile and yet lead to texts that no token may follow, where an output would end in an error.  Two kinds
are found here.  A schema whose `$ref` leads back to itself has values without end: the references that end are found
as a least fixpoint.  Others are found by writing: random texts, always the same ones, are followed until one of them
dies, of the grammar and of each object in a schema that has `patternProperties`, for which the compiler may leave the
names of a pattern to be chosen from when none is left.  What that does not find ends the output, with the place in the
schema (`grammar_compiler.died`).
"""

from __future__ import annotations

import contextlib
import json
import random
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set
from functools import lru_cache
from typing import Any

from slotwise.core.params import JSON_SCHEMA, LARK
from slotwise.grammar_compiler import COMPILER, OF_NAMES, compiled, died, message_of, tokenizer_of
from slotwise.json_pointer import at_pointer

NUM_BYTES = 256
WALKS, STEPS = 24, 100  # random texts of a grammar, or of a part of it, and tokens of each
SECONDS = 0.5  # of a processor, for all of them
IN_LARK = "%json"  # what stands before a schema there
MAX_PARTS = 32  # objects with patterns that are checked by themselves
TOO_COMPLEX = ("ParserTooComplex", "LexerTooComplex")
QUOTE = ord('"')
USUAL = frozenset(b'abc"}],:{[ 1234567890-')
OF_LISTS = ("allOf", "anyOf", "oneOf", "prefixItems")
OF_ONE = ("items", "additionalProperties")


def check(kind: str, text: str, special: Sequence[str]) -> str:
    """Why a grammar cannot be used; "" if it can."""
    tokenizer = _bytes_and(tuple(special))
    schemas = list(_schemas_in(kind, text))
    if endless := next(filter(None, map(_endless, schemas)), ""):
        return f"$ref {endless!r:.100}: what it refers to contains itself, so that no value of it ever ends"
    matcher, objection = compiled(tokenizer, kind, text)
    if objection:
        return objection
    ends = time.thread_time() + SECONDS
    if why := _dead_end(matcher, tokenizer, kind, text, ends):
        return why
    for place, part in (found for schema in schemas for found in _objects_with_patterns(schema)):
        if time.thread_time() > ends:
            break
        matcher, _ = compiled(tokenizer, JSON_SCHEMA, part)
        if matcher is not None and (why := _dead_end(matcher, tokenizer, JSON_SCHEMA, part, ends)):
            return f"{place}: {why}"
    return ""


def _schemas_in(kind: str, text: str) -> Iterator[Any]:
    """The JSON schemas of a grammar: itself, or those that stand in one in Lark's syntax."""
    if kind == JSON_SCHEMA:
        yield json.loads(text)
    elif kind == LARK:
        for part in text.split(IN_LARK)[1 : MAX_PARTS + 1]:
            with contextlib.suppress(ValueError):
                yield json.JSONDecoder().raw_decode(part.lstrip())[0]


# -- texts that nothing may follow -------------------------------------------------------------------------------------


def _dead_end(matcher: Any, tokenizer: Any, kind: str, text: str, ends: float) -> str:
    """What to say of a grammar if one of some random texts that it allows dies; "" if none does.

    Args:
        ends: when to stop, in seconds of this thread's processor time.
    """
    draw, end = random.Random(0), tokenizer.vocab_size - 1
    for _ in range(WALKS):
        walk, written = matcher.deep_copy(), bytearray()
        for _ in range(STEPS):
            if time.thread_time() > ends:
                return ""
            mask = walk.compute_bitmask()
            if walk.is_error() and walk.stop_reason() in TOO_COMPLEX:
                break  # a limit of one token, which few texts reach
            allowed, usual = _allowed(mask, end)
            if walk.is_error() or not allowed:
                return died(kind, text, bytes(written), message_of(walk) if walk.is_error() else "")
            token = _chosen(allowed, usual, draw)
            if token == end or not walk.consume_token(token):
                break
            written += bytes([token]) if token < NUM_BYTES else b""
    return ""


@lru_cache(maxsize=1024)  # a few masks recur, within a grammar and across grammars
def _allowed(mask: bytes, end: int) -> tuple[list[int], list[int]]:
    """The tokens up to `end` whose bits are set in a mask, and those of them that are in USUAL, both in order."""
    bits = int.from_bytes(mask, "little")
    allowed = [token for token in range(end + 1) if bits >> token & 1]
    return allowed, [token for token in allowed if token in USUAL]


def _chosen(allowed: Sequence[int], usual: Sequence[int], draw: random.Random) -> int:
    """The next token of a random text: mostly what divides and ends values, for that is where texts die."""
    if QUOTE in usual and draw.random() < 0.3:
        return QUOTE
    return draw.choice(usual if usual and draw.random() < 0.9 else allowed)


def _objects_with_patterns(schema: Any) -> Iterator[tuple[str, str]]:
    """The objects within a schema that have `patternProperties`, each with its place, as schemas of their own."""
    if not isinstance(schema, dict):
        return
    shared = {name: schema[name] for name in ("$defs", "definitions") if name in schema}
    own = {COMPILER: {"whitespace_flexible": False}}  # texts without white space reach more in as many tokens
    waiting, found = [("#", schema)], 0
    while waiting and found < MAX_PARTS:
        place, one = waiting.pop(0)
        waiting += _inner(place, one)
        if one.get("patternProperties"):
            found += 1
            yield place, json.dumps(shared | one | own, ensure_ascii=False)


def _inner(place: str, schema: Any) -> Iterator[tuple[str, Any]]:
    """The schemas directly within a schema, each with its place; that of a `$ref` is not within it."""
    for name in OF_NAMES:
        for key, one in (schema.get(name) if isinstance(schema.get(name), dict) else {}).items():
            yield from _schema(f"{place}/{name}/{key}", one)
    for name in OF_LISTS:
        for index, one in enumerate(schema.get(name) if isinstance(schema.get(name), list) else ()):
            yield from _schema(f"{place}/{name}/{index}", one)
    for name in OF_ONE:
        yield from _schema(f"{place}/{name}", schema.get(name))


def _schema(place: str, value: Any) -> Iterator[tuple[str, Any]]:
    if isinstance(value, dict):
        yield place, value


# -- references without end --------------------------------------------------------------------------------------------


def _endless(schema: Any) -> str:
    """A reference of a schema's values whose own values would have to contain others without end; "" if none is."""
    targets, waiting = dict[str, Any](), [schema]
    while waiting:
        one = waiting.pop()
        if not isinstance(one, dict):
            continue
        waiting += [inner for place, inner in _inner("", one) if not place.startswith(("/$defs/", "/definitions/"))]
        ref = one.get("$ref")
        if isinstance(ref, str) and ref.startswith("#") and ref not in targets:
            targets[ref] = at_pointer(schema, ref.removeprefix("#").removeprefix("/"))
            waiting.append(targets[ref])
    ending, left = set[str](), len(targets) + 1
    while left > (left := len(targets) - len(ending)):
        ending.update([ref for ref, one in targets.items() if ref not in ending and _ends(one, targets, ending)])
    return next((ref for ref in targets if ref not in ending), "")


def _ends(schema: Any, targets: Mapping[str, Any], ending: Set[str]) -> bool:
    """Whether a schema has a value of finite depth, where those of the references in `ending` have one."""
    if not isinstance(schema, dict):
        return True

    def all_end(parts: Iterable[Any]) -> bool:
        return all(_ends(part, targets, ending) for part in parts)

    if (ref := schema.get("$ref")) in targets and ref not in ending:
        return False
    parts = _list(schema, "allOf")
    if schema.get("type") == "object" and isinstance(own := schema.get("properties"), dict):
        parts += [own[name] for name in _list(schema, "required") if isinstance(name, str) and name in own]
    if schema.get("type") == "array" and isinstance(least := schema.get("minItems"), int):
        first = _list(schema, "prefixItems")
        parts += first[:least] + ([schema.get("items")] if least > len(first) else [])
    return all_end(parts) and all(
        any(_ends(part, targets, ending) for part in found) for name in ("anyOf", "oneOf")
        if (found := _list(schema, name)))


def _list(schema: Mapping[str, Any], name: str) -> list[Any]:
    value = schema.get(name)
    return list(value) if isinstance(value, list) else []


@lru_cache(1)
def _bytes_and(special: tuple[str, ...]) -> Any:
    tokens = [*(bytes([byte]) for byte in range(NUM_BYTES)), *map(str.encode, special), b"<end>"]
    eos = len(tokens) - 1
    return tokenizer_of(tokens, range(NUM_BYTES, eos), [eos], len(tokens), lambda text: list(text.encode()))


CALLS: dict[str, Callable[..., Any]] = {"check": check}
