r"""Which tokenizers certainly encode in a time that grows linearly with the text: those of known rules only.

A `tokenizer.json` may hold any regular expression, and a backtracking one takes a time that is exponential in its own
length: `(?:a|a){18}[^a]` takes milliseconds for each character.  So a rule is known by its kind, and a regular
expression is one of those of the published families, or it is not known.  An unknown one is not an error: it is
applied under limits (`api/generate/checkpoint_workers.py`).
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

CONTRACTIONS = "'s|'t|'re|'ve|'m|'ll|'d"
LINES = r"\s*[\r\n]+|\s+(?!\S)|\s+"
MARKED = rf"| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*|{LINES}"
SLASHED = rf"| ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*|{LINES}"
WORD = rf"(?i:{CONTRACTIONS})|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|"
LOWER = r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+"
UPPER = r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*"
LINE_SPLITS = frozenset({  # a line's end and the letter behind it are never in one word
    # GPT-2, also within `ByteLevel`
    rf"{CONTRACTIONS}| ?\p{{L}}+| ?\p{{N}}+| ?[^\s\p{{L}}\p{{N}}]+|\s+(?!\S)|\s+",
    # Llama 3, Qwen 2 and 3, Qwen 3.5
    WORD + r"\p{N}{1,3}" + MARKED,
    WORD + r"\p{N}" + MARKED,
    rf"(?i:{CONTRACTIONS})|[^\r\n\p{{L}}\p{{N}}]?[\p{{L}}\p{{M}}]+|\p{{N}}"
    rf"| ?[^\s\p{{L}}\p{{M}}\p{{N}}]+[\r\n]*|{LINES}",
    # Mistral's tekken, GPT-4o
    rf"{LOWER}|{UPPER}|\p{{N}}{SLASHED}",
    rf"{LOWER}(?i:{CONTRACTIONS})?|{UPPER}(?i:{CONTRACTIONS})?|\p{{N}}{{1,3}}{SLASHED}",
    # DeepSeek
    r"""[!"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+"""
    rf"| ?[\p{{P}}\p{{S}}]+[\r\n]*|{LINES}",
    r"[\r\n]",
    # the built-in model
    r"\n *|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s",
})  # fmt: skip
NEUTRAL_SPLITS = frozenset({  # neither is in any of their words
    r"\p{N}{1,3}", "[\u4e00-\u9fa5\u3040-\u309f\u30a0-\u30ff]+", "[\u4e00-\u9fa5\u0800-\u4e00\uac00-\ud7ff]+",
    r"\p{N}", r"\d", " ",
})  # fmt: skip
REGEXES = LINE_SPLITS | NEUTRAL_SPLITS | {r"\s?\p{L}+", r"\s?\p{P}+", "."}
NORMALIZERS = frozenset({
    "Sequence", "Replace", "Prepend", "Strip", "StripAccents", "Lowercase", "NFC", "NFD", "NFKC", "NFKD", "ByteLevel",
    "BertNormalizer"})  # fmt: skip
PRE_TOKENIZERS = frozenset({
    "Sequence", "Split", "ByteLevel", "Metaspace", "Whitespace", "WhitespaceSplit", "Digits", "Punctuation",
    "BertPreTokenizer", "CharDelimiterSplit"})  # fmt: skip
STAGES = ("normalizer", "pre_tokenizer", "post_processor", "decoder")
MAX_STRING = 64  # characters of a pattern without a regular expression
MAX_WORD = 256  # characters of a word, which WordPiece takes a time quadratic in
MAX_TOKEN = 1024  # characters of a token, in a vocabulary that is searched for the longest at each character


def is_linear(description: dict[str, Any]) -> bool:
    """Whether all rules of a `tokenizer.json` with which it encodes are known ones."""
    return (
        all(_is_known(rule, NORMALIZERS) for rule in rules_in(description.get("normalizer")))
        and all(_is_known(rule, PRE_TOKENIZERS) for rule in rules_in(description.get("pre_tokenizer")))
        # these two search the text before each occurrence of the token
        and not any(token.get("lstrip") or token.get("single_word") for token in description.get("added_tokens") or ())
        and _is_linear_model(description["model"])
    )


def has_regex(decoder: dict[str, Any] | None) -> bool:
    """Whether a decoder replaces by an unknown regular expression."""
    return any(not _is_known_pattern(rule.get("pattern")) for rule in rules_in(decoder))


def num_rules(description: dict[str, Any]) -> int:
    """Returns the rules of a `tokenizer.json`, which are applied one after another."""
    return sum(1 for stage in STAGES for _ in rules_in(description.get(stage)))


def rules_in(rule: dict[str, Any] | None) -> Iterator[dict[str, Any]]:
    """The rule and all within it."""
    left = [rule] if rule else []
    while left:
        one = left.pop()
        yield one
        for name in ("normalizers", "pretokenizers", "decoders", "processors"):
            left += one.get(name) or []


def _is_known(rule: dict[str, Any], kinds: frozenset[str]) -> bool:
    return rule.get("type") in kinds and _is_known_pattern(rule.get("pattern"))


def written_alike(regex: str) -> str:
    """A regular expression whose line ends are written as escapes: published ones have either."""
    return regex.replace("\r", r"\r").replace("\n", r"\n")


def _is_known_pattern(pattern: dict[str, str] | None) -> bool:
    if pattern is None:
        return True
    return written_alike(pattern.get("Regex", "")) in REGEXES or 0 < len(pattern.get("String", "")) <= MAX_STRING


def _is_linear_model(model: dict[str, Any]) -> bool:
    kind = model.get("type")
    if kind == "WordPiece":
        return bool(model.get("max_input_chars_per_word", MAX_WORD + 1) <= MAX_WORD)
    if kind == "Unigram":
        return all(len(token) <= MAX_TOKEN for token, _ in model["vocab"])
    return kind in ("BPE", "WordLevel")
