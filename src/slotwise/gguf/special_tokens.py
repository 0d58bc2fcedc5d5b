"""Special tokens in the metadata of a GGUF file: their ids, and which of them end a text.

Converters often name one end token, and type others as ordinary words.  So, as in llama.cpp (`llama-vocab.cpp`):

    a key names a token's role, else the first token with a known text of that role has it
    the tokens of some roles, those of known texts, and the one that `eos_token_id` names end a text
    a token with such a role or text is special, whatever its type says
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from slotwise.gguf.metadata import Metadata

TOKENS, TOKEN_TYPES = "tokenizer.ggml.tokens", "tokenizer.ggml.token_type"
NAMED = {  # fields of a tokenizer_config.json, by their keys
    "tokenizer.ggml.bos_token_id": "bos_token", "tokenizer.ggml.eos_token_id": "eos_token",
    "tokenizer.ggml.unknown_token_id": "unk_token", "tokenizer.ggml.padding_token_id": "pad_token",
    "tokenizer.ggml.seperator_token_id": "sep_token", "tokenizer.ggml.mask_token_id": "mask_token",
    "tokenizer.ggml.cls_token_id": "cls_token",
}  # fmt: skip
EOS = "tokenizer.ggml.eos_token_id"
NORMAL, CONTROL = 1, 3  # types of tokens: an ordinary word, and a special one


class _Role(NamedTuple):
    keys: tuple[str, ...]  # of metadata, without "tokenizer.ggml." and "_token_id"; the last one counts
    texts: tuple[str, ...]  # of a token that has the role where no key names one
    ends: bool  # a text


_ROLES = (
    _Role(("eot",), ("<|eot_id|>", "<|im_end|>", "<|end|>", "<end_of_turn>", "<|endoftext|>", "<|end_of_text|>",
                     "<EOT>", "_<EOT>", "[EOT]", "<｜end▁of▁sentence｜>", "<end_of_utterance>"), ends=True),
    _Role(("eom",), ("<|eom_id|>",), ends=True),
    _Role(("fim_pad",), ("<|fim_pad|>", "<fim-pad>", "<fim_pad>", "<PAD>", "[PAD]"), ends=True),
    _Role(("fim_rep",), ("<|fim_repo|>", "<|repo_name|>", "<fim-repo>", "<REPO>", "<reponame>"), ends=True),
    _Role(("fim_sep",), ("<|file_sep|>",), ends=True),
    _Role(("fim_pre", "prefix"), (
        "<|fim_prefix|>", "<fim-prefix>", "<fim_prefix>", "<｜fim▁begin｜>", "<PRE>", "▁<PRE>", "<|code_prefix|>",
        "<|prefix|>"), ends=False),
    _Role(("fim_suf", "suffix"), (
        "<|fim_suffix|>", "<fim-suffix>", "<fim_suffix>", "<｜fim▁hole｜>", "<SUF>", "▁<SUF>", "<|code_suffix|>",
        "<|suffix|>"), ends=False),
    _Role(("fim_mid", "middle"), (
        "<|fim_middle|>", "<fim-middle>", "<fim_middle>", "<｜fim▁end｜>", "<MID>", "▁<MID>", "<|code_middle|>",
        "<|middle|>"), ends=False),
)  # fmt: skip
_MARKS = ("fim_pre", "fim_suf", "fim_mid")  # first keys of roles: what precedes the texts around a gap, and its own
ROLE_KEYS = frozenset(f"tokenizer.ggml.{name}_token_id" for role in _ROLES for name in role.keys)
_END_TEXTS = frozenset({
    "<|eot_id|>", "<|im_end|>", "<|end|>", "<|return|>", "<|call|>", "<|flush|>", "<|calls|>", "<end_of_turn>",
    "<|endoftext|>", "</s>", "<|eom_id|>", "<EOT>", "_<EOT>", "[EOT]", "[EOS]", "<|end_of_text|>",
    "<end_of_utterance>", "<eos>", "<turn|>", "<|tool_response>", "<｜end▁of▁sentence｜>", "[e~[",
})  # fmt: skip

# Tokens that end no text where a model has the others: gpt-oss ends a message by <|end|>, and then begins the next one.
_EXCEPTIONS = (
    ("<|end|>", ({"<|return|>", "<|call|>"}, {"<|return|>", "<|calls|>"}, {"<|flush|>", "<|call|>"},
                 {"<|flush|>", "<|calls|>"})),
    ("</s>", ({"<|tool_response>"}, {"<|plamo:eos|>"})),
)


class SpecialTokens(NamedTuple):
    """What follows from a file's keys and from the texts of its tokens."""

    ends: list[int]  # ids of the tokens that end a text, the one named as such first
    controls: frozenset[int]  # ids of tokens that are special, whatever their types say
    words: frozenset[int]  # ids of ordinary tokens, whatever their types say
    marks: tuple[int, ...]  # ids of the tokens before a prefix, a suffix and the gap to fill; () unless all are there


def find_special_tokens(metadata: Metadata, tokens: Sequence[str]) -> SpecialTokens:
    """The special tokens of a file with these `tokens`; an id outside the vocabulary counts as absent.

    Raises CheckpointError when an id is malformed.
    """
    named = metadata.integer(EOS, len(tokens))
    ends, controls = dict.fromkeys([named] if named < len(tokens) else []), set()
    first = {text: number for number, text in reversed([*enumerate(tokens)])}
    marks: list[int] = []
    for role in _ROLES:
        found = [metadata.integer(key) for name in reversed(role.keys)
                 if metadata.has(key := f"tokenizer.ggml.{name}_token_id")]
        usable = [number for number in found if number < len(tokens)]
        if not usable and (texts := [first[text] for text in role.texts if text in first]):
            usable = [min(texts)]
            controls |= {*usable}
        ends |= dict.fromkeys(usable[:1] if role.ends else [])
        marks += usable[:1] if role.keys[0] in _MARKS else []
    marks = marks if len({*marks}) == len(_MARKS) else []
    by_text = [number for number, token in enumerate(tokens) if token in _END_TEXTS]
    ends |= dict.fromkeys(by_text)
    words: set[int] = set()
    for exception, others in _EXCEPTIONS:
        present = {tokens[number] for number in ends}
        if any(each <= present for each in others):
            removed = {number for number in ends if tokens[number] == exception}
            ends = {number: None for number in ends if number not in removed}
            words |= removed if exception == "</s>" else set()
    return SpecialTokens([*ends], frozenset(controls | {*marks, *by_text} - words), frozenset(words), tuple(marks))


def named_tokens(metadata: Metadata, tokens: Sequence[str]) -> dict[str, str]:
    """The texts of named special tokens, as fields of a tokenizer_config.json.

    Raises CheckpointError when an id is malformed or outside the vocabulary.
    """
    named = {}
    for key, name in NAMED.items():
        if metadata.has(key):
            number = metadata.integer(key)
            if number < len(tokens):
                named[name] = tokens[number]
            elif name in ("bos_token", "eos_token"):
                raise metadata.error(key, f"is {number}, but the vocabulary has {len(tokens)} tokens")
    return named
