"""The tokenizer of a GGUF file, as the `tokenizer.json` that it would have in a Hugging Face checkpoint.

    tokenizer.ggml.model   gpt2    byte-level BPE: tokens and merges; words are split by `tokenizer.ggml.pre`
                           llama   SentencePiece: tokens with scores, spaces as "▁", bytes as "<0x0A>"
    token_type             3 special, 4 matched before words are split, 6 a byte, 1 2 5 others

SentencePiece merges the neighbors whose joined token has the highest score.  That is BPE, with a merge for each way to
divide a token into two, in the order of scores.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from slotwise.platform.gguf_file import (
    CONTROL,
    NAMED,
    NORMAL,
    ROLE_KEYS,
    TOKEN_TYPES,
    TOKENS,
    Metadata,
    find_special_tokens,
    named_tokens,
    open_model,
)
from slotwise.text.declared_tokens import Marks
from slotwise.text.linear_rules import CONTRACTIONS, LINES, LOWER, MARKED, SLASHED, UPPER, WORD

GPT2 = rf"{CONTRACTIONS}| ?\p{{L}}+| ?\p{{N}}+| ?[^\s\p{{L}}\p{{N}}]+|\s+(?!\S)|\s+"
LLAMA3 = WORD + r"\p{N}{1,3}" + MARKED
QWEN2 = WORD + r"\p{N}" + MARKED
QWEN35 = (rf"(?i:{CONTRACTIONS})|[^\r\n\p{{L}}\p{{N}}]?[\p{{L}}\p{{M}}]+|\p{{N}}"
          rf"| ?[^\s\p{{L}}\p{{M}}\p{{N}}]+[\r\n]*|{LINES}")
TEKKEN = rf"{LOWER}|{UPPER}|\p{{N}}{SLASHED}"
GPT4O = rf"{LOWER}(?i:{CONTRACTIONS})?|{UPPER}(?i:{CONTRACTIONS})?|\p{{N}}{{1,3}}{SLASHED}"
DEEPSEEK3 = (
    r"\p{N}{1,3}", "[\u4e00-\u9fa5\u3040-\u309f\u30a0-\u30ff]+",
    r"""[!"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+"""
    rf"| ?[\p{{P}}\p{{S}}]+[\r\n]*|{LINES}")
DEEPSEEK_CODER = (r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", "[\u4e00-\u9fa5\u0800-\u4e00\uac00-\ud7ff]+", r"\p{N}")
DEEPSEEK_LLM = (r"[\r\n]", r"\s?[\p{Lu}\p{Ll}\p{Lt}]+", r"\s?[!-/:-~！-／：-～‘-‟\x{3000}-。]+", r"\s+$",
                DEEPSEEK_CODER[3], r"\p{N}+")
FALCON = (r"[\p{P}\$\+<=>\^~\|`]+", GPT2, "[0-9][0-9][0-9]")
DIGIT = r"\p{N}"
MODEL, PRE = "tokenizer.ggml.model", "tokenizer.ggml.pre"
MERGES, SCORES = "tokenizer.ggml.merges", "tokenizer.ggml.scores"
ADD_BOS, ADD_EOS, ADD_SPACE = (f"tokenizer.ggml.add_{name}" for name in ("bos_token", "eos_token", "space_prefix"))
BOS, EOS = "tokenizer.ggml.bos_token_id", "tokenizer.ggml.eos_token_id"
TEMPLATE = "tokenizer.chat_template"
OBEYED = {MODEL, PRE, TOKENS, TOKEN_TYPES, MERGES, SCORES, ADD_BOS, ADD_EOS, ADD_SPACE, TEMPLATE, *NAMED, *ROLE_KEYS}
ANY = (  # keys without effect here, whatever they say
    "tokenizer.huggingface.json",  # the same tokenizer again
    "tokenizer.ggml.token_type_count",  # of an embedding, whose tensor would be refused
    "tokenizer.ggml.add_sep_token",  # between the two texts that a reranker compares
    "tokenizer.chat_templates",  # names of those that follow
)
TEMPLATES = f"{TEMPLATE}."  # each is one to choose by its name
OFF = tuple(f"tokenizer.ggml.{name}" for name in (  # keys that ask for nothing where they are false
    "remove_extra_whitespaces", "normalizer.lowercase", "normalizer.strip_accents"))
EMPTY = tuple(f"tokenizer.ggml.{name}" for name in ("precompiled_charsmap", "suppress_tokens"))  # the same of arrays
UNKNOWN, USER_DEFINED, BYTE = 2, 4, 6  # types of tokens; `CONTROL` is another
MAX_TOKEN = 1024  # characters
MAX_DIVIDED = 1 << 28  # characters copied in dividing tokens into two: a second
SPACE = "▁"


# -- how byte-level vocabularies split a text into words, by `tokenizer.ggml.pre` --------------------------------------


class Splits(NamedTuple):
    expressions: tuple[str, ...]  # applied one after another, each to the pieces of the one before
    keeps_words: bool = False  # a word that is a token is not built by merges
    adds_bos: bool = False  # where the file does not say


_OF = {
    ("gpt-2", "phi-2", "mpt", "olmo", "jais", "exaone4", "gigachat", "a.x-4.0", "mellum", "trillion"): Splits((GPT2,)),
    ("llama-bpe", "llama3", "llama-v3", "falcon3", "falcon-h1", "pixtral", "midm-2.0", "lfm2"):
        Splits((LLAMA3,), keeps_words=True, adds_bos=True),
    ("dbrx", "smaug-bpe", "chatglm-bpe"): Splits((LLAMA3,)),
    ("glm4",): Splits((LLAMA3,), keeps_words=True),
    ("qwen2", "stablelm2", "deepseek-r1-qwen", "hunyuan", "megrez", "solar-open", "kormo", "grok-2"): Splits((QWEN2,)),
    ("qwen35",): Splits((QWEN35,)),
    ("tekken",): Splits((TEKKEN,), keeps_words=True, adds_bos=True),
    ("gpt-4o", "llama4", "kanana2", "minimax-m2"): Splits((GPT4O,)),
    ("deepseek-v3", "hunyuan-dense", "joyai-llm"): Splits(DEEPSEEK3),
    ("deepseek-llm",): Splits(DEEPSEEK_LLM),
    ("falcon",): Splits(FALCON),
    ("deepseek-coder",): Splits(DEEPSEEK_CODER),
    ("smollm", "starcoder", "refact", "command-r", "codeshell", "exaone", "minerva-7b", "mellum2"):
        Splits((DIGIT, GPT2)),
}  # fmt: skip
SPLITS = {kind: splits for kinds, splits in _OF.items() for kind in kinds}


# -- the tokenizer -----------------------------------------------------------------------------------------------------


class TokenizerParts(NamedTuple):
    """What a checkpoint's folder has in files."""

    tokenizer: str  # of tokenizer.json
    config: dict[str, Any]  # of tokenizer_config.json
    marks: Marks | None  # of a gap to fill


def read_tokenizer(path: Path) -> TokenizerParts:
    """The tokenizer of a GGUF file.

    Raises:
        CheckpointError: the file has none, or one of a kind that is not supported, or a value is malformed.
    """
    metadata = open_model(path).metadata
    tokens = _tokens(metadata)
    kind = metadata.text(MODEL)
    if kind not in _KINDS:
        raise metadata.error(MODEL, f"{kind!r:.40} is not supported; these are: {', '.join(_KINDS)}")
    _check_unread(metadata)
    named, marks = named_tokens(metadata, tokens), find_special_tokens(metadata, tokens).marks
    description = _KINDS[kind](metadata, tokens) | {"version": "1.0", "truncation": None, "padding": None}
    return TokenizerParts(json.dumps(description), named, Marks(*(tokens[mark] for mark in marks)) if marks else None)


def _check_unread(metadata: Metadata) -> None:
    """Raises CheckpointError for a key that nothing here obeys, and that may change the tokens."""
    for key in metadata.keys("tokenizer."):
        if key in OBEYED or key in ANY or key.startswith(TEMPLATES):
            continue
        if (key in OFF and not metadata.flag(key)) or (key in EMPTY and not metadata.numbers(key)):
            continue
        raise metadata.error(key, "is set, which is not supported")


def read_template(path: Path, name: str = "") -> str | None:
    """The chat template of a GGUF file, or the one called `name`; None where it has none.

    Raises:
        CheckpointError: it is not a text.
    """
    metadata = open_model(path).metadata
    key = f"{TEMPLATE}.{name}" if name else TEMPLATE
    return metadata.text(key) if metadata.has(key) else None


def _tokens(metadata: Metadata) -> list[str]:
    tokens = metadata.texts(TOKENS)
    if not tokens:
        raise metadata.error(TOKENS, "is missing or empty")
    if (longest := max(map(len, tokens))) > MAX_TOKEN:
        raise metadata.error(TOKENS, f"has a token of {longest} characters, more than {MAX_TOKEN}")
    if len(set(tokens)) < len(tokens):
        seen: set[str] = set()
        again = next(token for token in tokens if token in seen or seen.add(token))  # type: ignore[func-returns-value]
        raise metadata.error(TOKENS, f"has the token {again!r:.60} twice")
    return tokens


def _types(metadata: Metadata, tokens: Sequence[str]) -> list[float]:
    """The types of all tokens, those that are special by their texts among them."""
    types = metadata.numbers(TOKEN_TYPES) or [NORMAL] * len(tokens)
    if len(types) != len(tokens):
        raise metadata.error(TOKEN_TYPES, f"has {len(types)} items for {len(tokens)} tokens")
    special = find_special_tokens(metadata, tokens)
    return [CONTROL if number in special.controls else NORMAL if number in special.words else kind
            for number, kind in enumerate(types)]


def _added(metadata: Metadata, tokens: Sequence[str]) -> list[dict[str, Any]]:
    """Tokens that are found in a text before it is split."""
    types = _types(metadata, tokens)
    return [{"id": number, "content": tokens[number], "single_word": False, "lstrip": False, "rstrip": False,
             "normalized": False, "special": kind != USER_DEFINED}
            for number, kind in enumerate(types)
            if kind in (CONTROL, UNKNOWN, USER_DEFINED) and tokens[number]]


def _gpt2(metadata: Metadata, tokens: list[str]) -> dict[str, Any]:
    kind = metadata.text(PRE, "")
    if kind not in SPLITS:
        found = f"{kind!r:.40} is not supported" if kind else "is missing"
        raise metadata.error(PRE, f"{found}; these are: {', '.join(SPLITS)}")
    splits = SPLITS[kind]
    merges = [merge.split(" ") for merge in metadata.texts(MERGES)]
    vocabulary = {token: number for number, token in enumerate(tokens)}
    for number, merge in enumerate(merges):
        if len(merge) != 2 or not {*merge, "".join(merge)} <= vocabulary.keys():
            raise metadata.error(MERGES, f"has at {number} {' '.join(merge)!r:.60}, which does not merge two tokens "
                                 "into one")
    steps: list[dict[str, Any]] = [
        {"type": "Split", "pattern": {"Regex": expression}, "behavior": "Isolated", "invert": False}
        for expression in splits.expressions]
    return {
        "added_tokens": _added(metadata, tokens), "normalizer": None,
        "pre_tokenizer": {"type": "Sequence", "pretokenizers": [
            *steps, {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}]},
        "post_processor": _ends(metadata, tokens, splits),
        "decoder": {"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": True, "use_regex": True},
        "model": {
            "type": "BPE", "dropout": None, "unk_token": None, "continuing_subword_prefix": None,
            "end_of_word_suffix": None, "fuse_unk": False, "byte_fallback": False,
            "ignore_merges": splits.keeps_words, "vocab": vocabulary, "merges": merges},
    }  # fmt: skip


def _llama(metadata: Metadata, tokens: list[str]) -> dict[str, Any]:
    scores = metadata.numbers(SCORES)
    if len(scores) != len(tokens):
        raise metadata.error(SCORES, f"has {len(scores)} items for {len(tokens)} tokens")
    types = _types(metadata, tokens)
    if any(kind == BYTE and not _is_byte(token) for kind, token in zip(types, tokens, strict=False)):
        raise metadata.error(TOKENS, "has a token of type 6, a byte, that is not written as <0x0A>")
    unknown = next((tokens[number] for number, kind in enumerate(types) if kind == UNKNOWN), None)
    prefix = [{"type": "Prepend", "prepend": SPACE}] if metadata.flag(ADD_SPACE, True) else []
    strip = [{"type": "Strip", "content": " ", "start": 1, "stop": 0}] if prefix else []
    return {
        "added_tokens": _added(metadata, tokens),
        "normalizer": {"type": "Sequence", "normalizers": [
            *prefix, {"type": "Replace", "pattern": {"String": " "}, "content": SPACE}]},
        "pre_tokenizer": None,
        "post_processor": _ends(metadata, tokens, Splits((), adds_bos=True)),
        "decoder": {"type": "Sequence", "decoders": [
            {"type": "Replace", "pattern": {"String": SPACE}, "content": " "}, {"type": "ByteFallback"},
            {"type": "Fuse"}, *strip]},
        "model": {
            "type": "BPE", "dropout": None, "unk_token": unknown, "continuing_subword_prefix": None,
            "end_of_word_suffix": None, "fuse_unk": True, "byte_fallback": BYTE in types, "ignore_merges": False,
            "vocab": {token: number for number, token in enumerate(tokens)},
            "merges": list(_merges(metadata, tokens, scores))},
    }  # fmt: skip


def _merges(metadata: Metadata, tokens: list[str], scores: Sequence[float]) -> Iterator[list[str]]:
    """All divisions of tokens into two, those of the highest scores first."""
    if sum(len(token) ** 2 for token in tokens) > MAX_DIVIDED:
        raise metadata.error(TOKENS, "has so many long tokens that their merges take too long")
    known = set(tokens)
    for number in sorted(range(len(tokens)), key=lambda number: -scores[number]):
        token = tokens[number]
        for place in range(1, len(token)):
            first, second = token[:place], token[place:]
            if first in known and second in known:
                yield [first, second]


def _is_byte(token: str) -> bool:
    return len(token) == 6 and token.startswith("<0x") and token.endswith(">")


def _ends(metadata: Metadata, tokens: Sequence[str], splits: Splits) -> dict[str, Any] | None:
    """What a text begins and ends with."""
    numbers = []
    for add, key, default in ((ADD_BOS, BOS, splits.adds_bos), (ADD_EOS, EOS, False)):
        wanted = metadata.flag(add, default) and (metadata.has(key) or metadata.has(add))
        number = metadata.integer(key) if wanted else -1
        if number >= len(tokens):
            raise metadata.error(key, f"is {number}, but the vocabulary has {len(tokens)} tokens")
        numbers.append(number)
    first, last = ([{"SpecialToken": {"id": tokens[number], "type_id": 0}}] if number >= 0 else []
                   for number in numbers)
    if not first and not last:
        return None
    special = {tokens[number]: {"id": tokens[number], "ids": [number], "tokens": [tokens[number]]}
               for number in numbers if number >= 0}
    text = [{"Sequence": {"id": "A", "type_id": 0}}]
    pair = [*first, *text, *last, *first, {"Sequence": {"id": "B", "type_id": 1}}, *last]
    return {"type": "TemplateProcessing", "single": [*first, *text, *last], "pair": pair, "special_tokens": special}


_KINDS = {"gpt2": _gpt2, "llama": _llama}
