"""Which modules a checkpoint's config names: whole names, parts of names, and regular expressions.

A checkpoint may be hostile, and Python's `re` tries every way to match: `(a+)+b` takes years for a name of sixty
letters.  So the work of an expression is bounded before it is used: only single characters may repeat, and the ways to
divide a name among all repeats, times those through all alternatives, are counted.
"""

from __future__ import annotations

import functools
import math
import re
from collections.abc import Callable, Iterable
from typing import Any

from slotwise.compute.model.fields import Fields
from slotwise.compute.model.names import Spellings, canonical

MAX_NAMES = 4096  # that one list may hold
LONGEST = 64  # characters of a module's name, about
MAX_EXPRESSION = 1024  # characters
MAX_WORK = 1 << 20  # ways to match one name, by all expressions of a list together
REGEX = "re:"  # what a compressed-tensors config writes before an expression

Matches = Callable[[str], bool]
"""Whether a module's name, such as `model.layers.0.mlp.up_proj`, is one of those that a list names."""

_SINGLE = {"LITERAL", "NOT_LITERAL", "ANY", "IN"}
_FREE = {"AT", *_SINGLE}


class _Unbounded(Exception):
    """A pattern that may take too long, or that uses what is not supported."""


def work(pattern: str) -> int:
    """The most ways in which `pattern` may match a name of `LONGEST` characters.

    Raises:
        ValueError: it is not a valid expression, is too long, or repeats more than single characters.
    """
    if len(pattern) > MAX_EXPRESSION:
        raise ValueError(f"is longer than {MAX_EXPRESSION} characters")
    try:
        tree = re._parser.parse(pattern)  # type: ignore[attr-defined]
        repeats, ways = _count(tree)
    except (re.error, RecursionError, OverflowError) as error:
        raise ValueError(f"is not a regular expression ({error!s:.60})") from error
    except _Unbounded as error:
        raise ValueError(str(error)) from error
    return math.comb(LONGEST + repeats, repeats) * ways


def _count(items: Iterable[Any]) -> tuple[int, int]:
    """Repeats of a parsed pattern, and the ways through its alternatives."""
    repeats, ways = 0, 1
    for operation, value in items:
        more, choices = _count_one(str(operation), value)
        repeats, ways = repeats + more, ways * choices
        if repeats > LONGEST or ways > MAX_WORK:
            raise _Unbounded("has too many ways to match")
    return repeats, ways


def _count_one(operation: str, value: Any) -> tuple[int, int]:
    if operation in _FREE:
        return 0, 1
    if operation == "SUBPATTERN":
        return _count(value[-1])
    if operation in ("ASSERT", "ASSERT_NOT"):
        return _count(value[1])
    if operation == "BRANCH":
        counts = [_count(branch) for branch in value[1]]
        return max(repeats for repeats, _ in counts), sum(ways for _, ways in counts)
    if operation in ("MAX_REPEAT", "MIN_REPEAT"):
        least, most, inner = value
        if most <= 1:
            repeats, ways = _count(inner)
            return repeats, ways + (least == 0)
        if len(inner) == 1 and str(inner[0][0]) in _SINGLE:
            return int(least != most), 1
        raise _Unbounded("repeats more than a single character, which is not supported")
    raise _Unbounded(f"uses {operation.lower()}, which is not supported")


def read_expressions(fields: Fields, name: str, patterns: Iterable[str]) -> dict[str, re.Pattern[str]]:
    """The compiled expressions of field `name`.  Raises CheckpointError for what `work` refuses, or for too much."""
    compiled, total = {}, 0
    for pattern in patterns:
        try:
            total += work(pattern)
        except ValueError as error:
            raise fields.error(name, f"holds {pattern!r:.60}, which {error}") from error
        if total > MAX_WORK:
            raise fields.error(name, f"holds expressions with too many ways to match, such as {pattern!r:.60}")
        compiled[pattern] = re.compile(pattern)
    return compiled


def read_names(fields: Fields, name: str) -> tuple[str, ...]:
    """A list of names or patterns; absent reads as empty."""
    names = fields.texts(name)
    if len(names) > MAX_NAMES:
        raise fields.error(name, f"must be at most {MAX_NAMES} names, not {len(names)}")
    return names


def read_targets(fields: Fields, name: str, spell: Spellings) -> Matches:
    """As compressed-tensors matches: `re:` and an expression that fits from the start, or a whole name."""
    names = read_names(fields, name)
    expressions = read_expressions(fields, name, [each[len(REGEX):] for each in names if each.startswith(REGEX)])
    whole = frozenset(canonical(each) for each in names if not each.startswith(REGEX))
    return functools.cache(
        lambda module: module in whole or any(matches(each, module, spell) for each in expressions.values()))


def matches(expression: re.Pattern[str], module: str, spell: Spellings) -> bool:
    """Whether an expression fits a module's name, as the config spells it, from the start."""
    return any(expression.match(name) for name in spell(module))


def read_skipped(fields: Fields, spell: Spellings, *fields_of_names: str) -> Matches:
    """As the lists of modules that were not converted: the end of a name, or whole components anywhere in it."""
    names = frozenset(each for name in fields_of_names for each in read_names(fields, name) if each)
    return functools.cache(lambda module: any(
        spelled.endswith(each) or f".{each}." in f".{spelled}." for spelled in spell(module) for each in names))
