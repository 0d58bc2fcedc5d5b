"""Grammars as llguidance compiles them: shared by the process that checks them first and the engine that uses them.

The library's limits count work, not seconds, so they refuse a grammar on every machine or on none.  They do not bound
everything: a large `multipleOf` alone takes minutes.  So a server compiles a grammar in a worker process first, under
limits that the system enforces (`api/generate/output_constraints.py`).

In regular expressions, wherever they stand, `\\d` and `\\w` mean ASCII: the library itself means it in schemas alone.

The library is imported on first use: an engine runs without it, and then no grammar compiles.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Sequence
from typing import Any

from slotwise.core.params import JSON_SCHEMA, REGEX, in_ascii, is_gbnf
from slotwise.json_pointer import at_pointer

MAX_MESSAGE = 400  # characters
MAX_GBNF, MAX_GBNF_RULES = 16 << 10, 256  # characters and rules: they are read by Python, beside the engine's steps
LIMITS: dict[str, Any] = {
    "initial_lexer_fuel": 1_000_000,  # of a compilation
    "max_grammar_size": 200_000,  # symbols
    "step_lexer_fuel": 100_000,  # of a mask: some milliseconds
    "step_max_items": 5_000,  # of a mask: in an ambiguous grammar the time grows faster than their number
    "max_items_in_row": 2_000,
    "max_lexer_states": 50_000,  # a kilobyte or two each
}


# A comment, a string, a special token, or a regular expression, as llguidance's lexer has them.
_IN_LARK = re.compile(r'''(?:\#|//)[^\n]*|"(?:\\.|[^"\\])*"|<[^<>\s]+>|(/(?:\\.|[^/\\])+/)''', re.DOTALL)


MAX_SHOWN = 60  # bytes of an output, in a message
MAX_PLACES = 64  # alternatives of a schema that are looked at for a message
COMPILER = "x-guidance"  # the compiler's options within a schema
OF_NAMES = ("properties", "patternProperties", "$defs", "definitions")  # keywords of schemas by name
SYMBOL = re.compile(r'"(?:[^"\\]|\\.)*"|[{}\[\]:,]', re.DOTALL)  # what divides a JSON text
WRAPPING = {"$ref", "allOf", "anyOf", "oneOf", "$defs", "definitions", COMPILER}  # keywords that say nothing themselves


class _Source:
    """A vocabulary as llguidance's constructor reads it."""

    is_tokenizer_wrapper = True
    bos_token_id = None

    def __init__(self, tokens: Sequence[bytes], special: Sequence[int], eos: int,
                 encode: Callable[[str], list[int]]) -> None:
        self.tokens, self.special_token_ids, self.eos_token_id = list(tokens), list(special), eos
        self._encode = encode

    def __call__(self, text: str | bytes) -> list[int]:
        return self._encode(text if isinstance(text, str) else text.decode())


def tokenizer_of(tokens: Sequence[bytes], special: Sequence[int], eos_ids: Sequence[int], vocab_size: int,
                 encode: Callable[[str], list[int]]) -> Any:
    """The vocabulary for matchers.

    Args:
        tokens: the bytes of each token, by id.
        special: ids of tokens that do not stand for text.
        eos_ids: the model's end tokens, at least one.
        vocab_size: the model's logits.
        encode: token ids of a text, without special tokens.
    """
    import llguidance

    padded = [*tokens[:vocab_size], *[b""] * (vocab_size - len(tokens))]  # masks are as long as the tokens
    source: Any = _Source(padded, [*special, *eos_ids], eos_ids[0], encode)
    return llguidance.LLTokenizer(source, n_vocab=vocab_size, eos_token=list(eos_ids))


def compiled(tokenizer: Any, kind: str, text: str) -> tuple[Any, str]:
    """A matcher at the beginning of the grammar, and ""; or None and why it cannot be used.

    The first mask is computed, too, so that a grammar that exceeds the limits at its first token is refused.
    """
    import llguidance

    try:
        matcher = llguidance.LLMatcher(
            tokenizer, _written(kind, text), log_level=0,
            limits=llguidance.LLParserLimits(**LIMITS, verbose_errors=False))
        if matcher.is_error():
            return None, message_of(matcher)
        first = matcher.deep_copy()
        mask = first.compute_bitmask()
        if first.is_error():
            return None, message_of(first)
        if not any(mask):
            return None, "no text matches it"
    except BaseException as error:  # the library's panics do not subclass Exception
        return None, _one_line(str(error))
    return matcher, ""


def message_of(matcher: Any) -> str:
    """The error of a matcher on one line, without the excerpt of the grammar that the library shows."""
    first, *others = str(matcher.get_error()).replace("<state>", "\n").strip().split("\n")
    return _one_line(" ".join([first, *[line for line in others if line.startswith("error: ")]]))


def died(kind: str, text: str, output: bytes, why: str) -> str:
    """What to say of an output after which the grammar allows no token, or cannot tell which.

    Args:
        kind, text: of the grammar.
        output: the beginning of a text that it matches.
        why: the compiler's words, or "".
    """
    said = output[-MAX_SHOWN:].decode(errors="replace")
    after = f"after {'...' if len(output) > MAX_SHOWN else ''}{said!r}" if output else "at its beginning"
    place = "the grammar"
    if kind == JSON_SCHEMA:
        place = f"the schema at {_place_of(text, output.decode(errors='replace'))}"
    return f"{after} no token follows in {place}{f' ({why})' if why else ''}"[:MAX_MESSAGE]


def _place_of(text: str, output: str) -> str:
    """Where in a schema an output ends, as a JSON pointer and the keywords that stand there."""
    schema = json.loads(text)
    places = [("#", schema)]
    for key in _keys_of(output):
        found = []
        for place, one in _alternatives(schema, places):
            name = key.replace("~", "~0").replace("/", "~1") if isinstance(key, str) else key
            for inner in ((f"properties/{name}", "patternProperties", "additionalProperties") if isinstance(key, str)
                          else (f"prefixItems/{name}", "items")):
                if (value := at_pointer(one, inner)) is not None:
                    found.append((f"{place}/{inner}", value))
                    break
        if not found:
            break
        places = found[:MAX_PLACES]
    alternatives = _alternatives(schema, places)
    place, one = alternatives[0] if len(alternatives) == 1 else places[0]
    keywords = [name for name in one if name != COMPILER] if isinstance(one, dict) else []
    return place + (f", which has {', '.join(keywords)}" if keywords else "")


def _alternatives(schema: Any, places: list[tuple[str, Any]]) -> list[tuple[str, Any]]:
    """The schemas at `places`, and those that they refer to or are made of."""
    found, seen = list[tuple[str, Any]](), set[str]()
    waiting = list(places)
    while waiting and len(found) < MAX_PLACES:
        place, one = waiting.pop(0)
        if place in seen or not isinstance(one, dict):
            continue
        seen.add(place)
        parts = [(f"{place}/{name}/{index}", part) for name in ("allOf", "anyOf", "oneOf")
                 if isinstance(one.get(name), list) for index, part in enumerate(one[name])]
        if isinstance(target := one.get("$ref"), str) and target.startswith("#"):
            parts.append((target, at_pointer(schema, target.removeprefix("#").removeprefix("/"))))
        waiting += parts
        if not parts or one.keys() - WRAPPING:
            found.append((place, one))
    return found or places


def _keys_of(output: str) -> list[str | int]:
    """The keys and indices of the value in which the beginning of a JSON text ends."""
    open_values: list[str | int | None] = []  # of each value that is open: its key or index; None: before a key
    last, at = "", 0
    while match := SYMBOL.search(output, at):
        symbol, at = match[0], match.end()
        if symbol[0] == '"':
            last = symbol[1:-1]
        elif symbol in "{[":
            open_values.append(None if symbol == "{" else 0)
        elif symbol in "}]":
            del open_values[-1:]
        elif symbol == ":" and open_values:
            open_values[-1] = last
        elif open_values:
            index = open_values[-1]
            open_values[-1] = index + 1 if isinstance(index, int) else None
    return [key for key in open_values if key is not None]


def _written(kind: str, text: str) -> str:
    from llguidance import LLMatcher

    if kind == JSON_SCHEMA:
        return str(LLMatcher.grammar_from_json_schema(text))
    if kind == REGEX:
        return str(LLMatcher.grammar_from_regex(in_ascii(text)))
    lark = _lark_of(text) if is_gbnf(text) else text
    return _IN_LARK.sub(lambda found: in_ascii(found[1]) if found[1] else found[0], lark)


def _lark_of(text: str) -> str:
    """A grammar in GBNF, the syntax of llama.cpp, in Lark's.  Raises ValueError for one that is too large."""
    from llguidance.gbnf_to_lark import gbnf_to_lark

    if len(text) > MAX_GBNF or text.count("::=") > MAX_GBNF_RULES:
        raise ValueError(f"a grammar in GBNF may have {MAX_GBNF} characters and {MAX_GBNF_RULES} rules; write a larger "
                         "one in Lark's syntax")
    return str(gbnf_to_lark(text))


def _one_line(text: str) -> str:
    return " ".join(text.split())[:MAX_MESSAGE]
