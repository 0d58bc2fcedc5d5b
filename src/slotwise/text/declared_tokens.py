"""Tokens that a checkpoint declares outside `tokenizer.json`, in the order in which transformers adds them.

    added_tokens_decoder         by id, each with its own rules of matching
    bos_token, ..., image_token  then named ones that are not known by then: special
    extra_special_tokens         then listed ones: special (`additional_special_tokens` in older files)

A token of the vocabulary keeps its id, any other gets the next free one: as in transformers, the ids of
`added_tokens_decoder` are an order and nothing else.

Some models fill a gap between two texts, and know it by tokens of their own.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from typing import Any, NamedTuple

from tokenizers import AddedToken

NAMED_TOKENS = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
EXTRA, OLDER_EXTRA = "extra_special_tokens", "additional_special_tokens"
DECODER = "added_tokens_decoder"
RULES = ("single_word", "lstrip", "rstrip", "normalized", "special")
MAX_TOKENS = 1 << 14  # of a field; the most in use are 6415
MAX_LENGTH = 1024  # characters of one
MAX_CHARACTERS = 1 << 20  # of all
MAX_DIGITS = 10  # of an id
MAX_NAME = 40  # characters of a field that an error repeats


class DeclarationError(ValueError):
    """A declaration is malformed; the message names the field."""


class DeclaredToken(NamedTuple):
    content: str
    rules: Mapping[str, bool]  # of matching, by name; transformers' defaults where absent
    token_id: int | None = None  # in `added_tokens_decoder`

    @property
    def token(self) -> AddedToken:
        return AddedToken(self.content, **self.rules)

    def as_special(self) -> DeclaredToken:
        return self._replace(rules={**self.rules, "special": True})


def declared_tokens(
    config: Mapping[str, Any], mapped: Mapping[str, Any], known: Mapping[int, AddedToken],
) -> list[DeclaredToken]:
    """The tokens to add: those that are new, or known with other rules.

    Args:
        config: fields of `tokenizer_config.json`.
        mapped: fields of `special_tokens_map.json`, which count only where `config` has no `added_tokens_decoder`.
        known: the added tokens of `tokenizer.json`, by id.

    Raises:
        DeclarationError: one line that names the field at fault.
    """
    decoder = config.get(DECODER)
    present = [DeclaredToken(token.content, dict(zip(RULES, _rules(token)[1:], strict=True)))
               for token in known.values()]
    tokens, sources = (present, (config, mapped)) if decoder is None else (_numbered(decoder), (config,))
    extra: Any = next(filter(None, (fields.get(name) for fields in sources for name in (EXTRA, OLDER_EXTRA))), [])
    named = list(_named({name: value for fields in sources for name, value in fields.items()}, extra))
    special = {one.content for one in named}
    tokens = [one.as_special() if one.content in special else one for one in tokens]
    contents = {one.content for one in (*present, *tokens)}
    for one in (*named, *_listed(extra)):
        if one.content not in contents:
            contents.add(one.content)
            tokens.append(one)
    unchanged = set(map(_rules, known.values()))
    return _bounded([one for one in tokens if one.content and _rules(one.token) not in unchanged])


def _numbered(decoder: object) -> list[DeclaredToken]:
    """The tokens of `added_tokens_decoder`, in the order of their ids."""
    if not isinstance(decoder, dict) or len(decoder) > MAX_TOKENS:
        raise DeclarationError(f"{DECODER} must be an object of at most {MAX_TOKENS} tokens by id")
    if wrong := [name for name in decoder if not (name.isascii() and name.isdigit() and len(name) <= MAX_DIGITS)]:
        raise DeclarationError(f"{DECODER} must have ids for names, not {wrong[0]!r:.40}")
    declared = [
        _described(f"{DECODER}: {name}", value)._replace(token_id=int(name)) for name, value in decoder.items()]
    return sorted(declared, key=lambda one: one.token_id or 0)


def _named(fields: Mapping[str, Any], extra: object) -> Iterator[DeclaredToken]:
    """The tokens of fields such as `eos_token` and `image_token`, and of the names that `extra` may have."""
    for name in NAMED_TOKENS:
        if value := fields.get(name):
            yield _described(name, value).as_special()
    for name, value in fields.items():
        if name.endswith("_token") and name not in NAMED_TOKENS and isinstance(value, str) and value:
            yield _described(name[:MAX_NAME], value)
    if isinstance(extra, dict):
        if len(extra) > MAX_TOKENS:
            raise DeclarationError(f"{EXTRA} must be at most {MAX_TOKENS} tokens")
        for name, value in extra.items():
            yield _described(f"{EXTRA}: {name[:MAX_NAME]}", value).as_special()


def _listed(extra: object) -> Iterator[DeclaredToken]:
    """The tokens of a list."""
    if isinstance(extra, dict):
        return
    if not isinstance(extra, list) or len(extra) > MAX_TOKENS:
        raise DeclarationError(f"{EXTRA} must be a list or an object of at most {MAX_TOKENS} tokens, not {extra!r:.40}")
    for value in extra:
        yield _described(EXTRA, value)


def _described(where: str, value: object) -> DeclaredToken:
    """A token: a text, which is special, or an object with `content` and rules of matching."""
    content = content_of(value, where)
    if len(content) > MAX_LENGTH:
        raise DeclarationError(f"{where} must have at most {MAX_LENGTH} characters, not {len(content)}")
    if not isinstance(value, dict):
        return DeclaredToken(content, {"special": True})
    rules = {name: value[name] for name in RULES if value.get(name) is not None}
    if wrong := [name for name, rule in rules.items() if not isinstance(rule, bool)]:
        raise DeclarationError(f"{where}: {wrong[0]} must be true or false, not {rules[wrong[0]]!r:.40}")
    return DeclaredToken(content, rules)


def content_of(token: object, where: str) -> str:
    """The text of a token, which is a string or an object with its text in `content`.

    Raises:
        DeclarationError: it is neither, or not a text.
    """
    text = token.get("content") if isinstance(token, dict) else token
    if not isinstance(text, str) or any("\ud800" <= letter <= "\udfff" for letter in text):
        raise DeclarationError(f"{where} must be a text, or an object with one in content, not {token!r:.40}")
    return text


def _rules(token: AddedToken) -> tuple[Any, ...]:
    """All that a token is, to be compared."""
    return (token.content, *[getattr(token, name) for name in RULES])


def _bounded(declared: list[DeclaredToken]) -> list[DeclaredToken]:
    if len(declared) > MAX_TOKENS or sum(len(one.content) for one in declared) > MAX_CHARACTERS:
        raise DeclarationError(f"more than {MAX_TOKENS} tokens, or {MAX_CHARACTERS} characters of tokens, are declared")
    return declared


# -- filling a gap -----------------------------------------------------------------------------------------------------


class Marks(NamedTuple):
    """The tokens before each part."""

    prefix: str
    suffix: str
    middle: str

    def prompt(self, before: str, behind: str) -> str:
        """The prompt whose continuation stands between `before` and `behind`."""
        return f"{self.prefix}{before}{self.suffix}{behind}{self.middle}"


KNOWN_MARKS = (
    Marks("<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>"),  # Qwen2.5-Coder
    Marks("<fim_prefix>", "<fim_suffix>", "<fim_middle>"),  # StarCoder's tokenizer
)


def marks_of(added_tokens: Collection[str]) -> Marks | None:
    """The marks of a tokenizer with these added tokens; None where it has none that are known."""
    return next((marks for marks in KNOWN_MARKS if all(mark in added_tokens for mark in marks)), None)
