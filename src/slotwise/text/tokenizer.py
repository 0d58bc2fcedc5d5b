"""Text to token ids and back, from a checkpoint's `tokenizer.json`, or what stands for it in a GGUF file.

Tokens have bytes: byte-level vocabularies (GPT-2 and after: Llama 3, Qwen, SmolLM) write a byte as one printable
character; SentencePiece vocabularies (Llama 2, Mistral) write a space as "▁" and a byte without a token of its own as
"<0x0A>".  In both, a text is the concatenation of its tokens' bytes, so that decoding is a table look-up and an
incremental UTF-8 decoder.

A tokenizer whose rules may take any time for a text encodes in a worker process: `CALLS` are what a server calls there.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import json
import logging
import os
import re
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cached_property, lru_cache
from pathlib import Path
from typing import Any, NamedTuple

import tokenizers

from slotwise.errors import CheckpointError, OneLineError
from slotwise.platform.files import has_part, read_part
from slotwise.text.declared_tokens import (
    DECODER,
    NAMED_TOKENS,
    DeclarationError,
    DeclaredToken,
    Marks,
    content_of,
    declared_tokens,
    marks_of,
)
from slotwise.text.gguf_tokenizer import read_tokenizer
from slotwise.text.linear_rules import has_regex, is_linear, num_rules, rules_in

_BYTE = re.compile(r"<0x([0-9A-Fa-f]{2})>")
_STEPS = ("Replace", "ByteFallback", "Fuse")  # SentencePiece's decoder, with or without Strip at its end
MAX_JSON_BYTES = 16 << 20  # of the files next to `tokenizer.json`
MAX_TOKENIZER_BYTES = 256 << 20  # of `tokenizer.json`; the largest in use have 35 MB
SHORT = 4096  # characters, encoded in well under a millisecond
BATCH = 1024  # texts encoded at once
SAMPLES = ("a", " the\n", "Zürich 12", "日本🙂")  # encoded and decoded at load
MAX_SAMPLE = 4096  # tokens, or characters, that a sample may become
MAX_SAMPLE_SECONDS = 1.0  # of computing
MAX_RULES = 64  # published ones have up to a dozen
SPLITS = ("ByteLevel", "Digits", "Metaspace", "Punctuation", "Split")  # that keep a text whole, unless they say Removed
COMPOSED = 4  # characters that NFC makes one of, at most
MAX_GROWTH = 256  # characters that a tokenizer's rules may write for one, or before a text
INTERRUPTS = (KeyboardInterrupt, SystemExit, GeneratorExit, asyncio.CancelledError)  # not failures of the library
SHOWN = 3  # tokens that a warning names

logger = logging.getLogger(__name__)


# -- the bytes of each token -------------------------------------------------------------------------------------------


def _printable_bytes() -> dict[str, int]:
    """GPT-2's code: printable bytes stand for themselves, the others for characters from 256 on."""
    printing = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    others = [byte for byte in range(256) if byte not in printing]
    return {chr(byte): byte for byte in printing} | {chr(256 + i): byte for i, byte in enumerate(others)}


_BYTE_OF = _printable_bytes()


class TokenBytes(dict[int, bytes]):
    """Token id to bytes, filled on demand; unknown ids are empty, as in `tokenizers`' own decoding."""

    drops_leading_space = False  # the first token of a text loses the space that encoding put before it

    def __init__(self, inner: tokenizers.Tokenizer) -> None:
        super().__init__()
        self._inner = inner

    def __missing__(self, token_id: int) -> bytes:
        token = self._inner.id_to_token(token_id)
        if token is None:
            return b""  # not kept: the number of unknown ids is unbounded
        self[token_id] = data = self._bytes_of(token)
        return data

    def first(self, token_id: int) -> bytes:
        """The bytes of a token that begins a text."""
        return self[token_id]

    def _bytes_of(self, token: str) -> bytes:
        raise NotImplementedError


class ByteLevelTokenBytes(TokenBytes):
    def _bytes_of(self, token: str) -> bytes:
        try:
            return bytes(map(_BYTE_OF.__getitem__, token))
        except KeyError:
            return token.encode()  # an added token, written as it is


class SentencePieceTokenBytes(TokenBytes):
    def __init__(self, inner: tokenizers.Tokenizer, space: str, *, has_bytes: bool, drops_leading_space: bool) -> None:
        super().__init__(inner)
        self._space, self._has_bytes = space, has_bytes
        self.drops_leading_space = drops_leading_space

    def first(self, token_id: int) -> bytes:
        data = self[token_id]
        return data[1:] if self.drops_leading_space and data.startswith(b" ") else data

    def _bytes_of(self, token: str) -> bytes:
        byte = _BYTE.fullmatch(token) if self._has_bytes else None
        return bytes([int(byte[1], 16)]) if byte else token.replace(self._space, " ").encode()


def token_bytes_of(inner: tokenizers.Tokenizer) -> TokenBytes | None:
    """The table of `inner`; None when its decoder does more than concatenate (WordPiece, CTC, ...)."""
    state = json.loads(inner.decoder.__getstate__()) if inner.decoder else {}
    steps = state["decoders"] if state.get("type") == "Sequence" else [state]
    kinds = [step.get("type", "") for step in steps]
    if kinds == ["ByteLevel"]:
        return ByteLevelTokenBytes(inner)
    if kinds == ["Metaspace"]:
        space, drops = steps[0]["replacement"], steps[0]["prepend_scheme"] != "never"
        return SentencePieceTokenBytes(inner, space, has_bytes=False, drops_leading_space=drops)
    return _fused_token_bytes(inner, steps, kinds)


def _fused_token_bytes(inner: tokenizers.Tokenizer, steps: list[dict[str, Any]], kinds: list[str]) -> TokenBytes | None:
    strip = steps.pop() if kinds[-1] == "Strip" else None
    if tuple(kinds[:3]) != _STEPS or len(steps) != 3 or steps[0]["content"] != " ":
        return None
    if strip and (strip["content"], strip["start"], strip["stop"]) != (" ", 1, 0):
        return None
    space = steps[0]["pattern"].get("String")
    return SentencePieceTokenBytes(inner, space, has_bytes=True,
                                   drops_leading_space=strip is not None) if space else None


# -- tokenizers --------------------------------------------------------------------------------------------------------


class TokenizerError(OneLineError, ValueError):
    """The tokenizer's files cannot be used, or a text cannot be tokenized."""


class TextMarks(NamedTuple):
    """How many special tokens a tokenizer adds to a text: [CLS] text [SEP] has one before and one after."""

    before: int = 0
    after: int = 0

    def cut(self, ids: list[int], most: int, *, keeps_last: bool) -> list[int]:
        """At most `most` tokens: the special ones, and the first or last tokens of the text, as in transformers.

        A vector may be pooled from a special token.  If there is no place for all of them, none is told apart.
        """
        if len(ids) <= most:
            return ids
        before, after = self if sum(self) < most else (0, 0)
        end = len(ids) - after
        places = most - before - after
        kept = ids[end - places : end] if keeps_last else ids[before : before + places]
        return [*ids[:before], *kept, *ids[end:]]


NO_MARKS = TextMarks()


class PairMarks(NamedTuple):
    """The special tokens of two texts that are one prompt: [CLS] first [SEP] second [SEP]."""

    before: tuple[int, ...]
    between: tuple[int, ...]
    after: tuple[int, ...]

    @property
    def num_tokens(self) -> int:
        return sum(map(len, self))

    def pair(self, first: Sequence[int], second: Sequence[int]) -> list[int]:
        """The prompt of two texts, each encoded without special tokens."""
        return [*self.before, *first, *self.between, *second, *self.after]


class TextTooLong(TokenizerError):
    """A text that must have more tokens than allowed, known without tokenizing it: at least `least`."""

    def __init__(self, message: str, least: int) -> None:
        super().__init__(message)
        self.least = least


def read_json(path: Path) -> dict[str, Any]:
    """The JSON object in `path`; empty when there is no such file.

    Raises:
        TokenizerError: the file is not a JSON object.
    """
    if not has_part(path):
        return {}
    try:
        value = json.loads(read_part(path, MAX_JSON_BYTES).decode("utf-8-sig"))
    except OSError as error:
        raise TokenizerError(f"{path}: cannot be read ({error.strerror})") from error
    except (ValueError, RecursionError) as error:
        raise TokenizerError(f"{path}: not valid JSON ({error})") from error
    if not isinstance(value, dict):
        raise TokenizerError(f"{path}: expected a JSON object")
    return value


class Tokenizer:
    """A `tokenizers.Tokenizer` with the names that a checkpoint gives its special tokens.

    The post-processor in `tokenizer.json` decides whether a text gets a beginning-of-sequence token, as in
    transformers' fast tokenizers.

    Attributes:
        fill_marks: those of a model that fills gaps; None: it does not.
        slow_folder: the checkpoint it was loaded from, if a text may take it any time (see `text.linear_rules`).
        digest: of all that determines the tokens of a text, if it has a `slow_folder`.
    """

    slow_folder: Path | None = None
    digest = ""

    def __init__(self, inner: tokenizers.Tokenizer, special_tokens: dict[str, str] | None = None) -> None:
        self.inner = inner
        inner.no_truncation()
        inner.no_padding()
        self.special_tokens = special_tokens or {}
        added = inner.get_added_tokens_decoder()
        self.special_by_text = {token.content: token_id for token_id, token in added.items() if token.special}
        self.special_ids = frozenset(token_id for token_id, token in added.items() if token.special)
        self.fill_marks = marks_of({token.content for token in added.values()})
        self.bytes_by_id = token_bytes_of(inner)
        self.named_in = lru_cache(maxsize=16)(self._named_in)  # the choices of one request share an answer

    @classmethod
    def load(cls, checkpoint: str | Path) -> Tokenizer:
        """Load `tokenizer.json`, with `tokenizer_config.json` and `special_tokens_map.json` where they exist.

        A GGUF file's are made from its metadata.

        Raises:
            TokenizerError: a file is missing or broken.
        """
        files = _files_of(Path(checkpoint))
        special: dict[str, str] = {}
        for file, found in ((files.mapped_path, files.mapped), (files.config_path, files.config)):
            special |= {name: _content(found[name], f"{file}: {name}") for name in NAMED_TOKENS if found.get(name)}
        with no_panic_messages():
            try:
                text = files.read()
                description = json.loads(text)
                _check_rules(description)  # loading already applies the rules, to the added tokens
                inner = tokenizers.Tokenizer.from_str(text)
                declared = declared_tokens(files.config, files.mapped, inner.get_added_tokens_decoder())
                moved = _add(inner, declared)
                tokenizer = cls(inner, special)
                tokenizer.fill_marks = files.marks or tokenizer.fill_marks
                tokenizer._check_samples()
                tokenizer.slow_folder = None if is_linear(description) else Path(checkpoint).absolute()
                tokenizer.digest = tokenizer._digest(text) if tokenizer.slow_folder is not None else ""
            except INTERRUPTS:
                raise
            except DeclarationError as error:
                raise TokenizerError(f"{files.config_path}: {error}") from error
            except BaseException as error:  # the library raises plain Exception; a panic is a BaseException
                raise TokenizerError(f"{files.path}: not a usable tokenizer ({error})") from error
        if moved:
            logger.warning("%s: %s has other ids than the vocabulary, which hold: %s",
                           files.config_path, DECODER, moved)
        return tokenizer

    @cached_property
    def marks(self) -> TextMarks:
        """The special tokens around a text."""
        own = [place for place, text in enumerate(self.inner.encode("a").sequence_ids) if text is not None]
        return TextMarks(own[0], len(self.encode("a")) - 1 - own[-1]) if own else NO_MARKS

    @cached_property
    def pair_marks(self) -> PairMarks:
        """The special tokens around two texts that are one prompt."""
        pair = self.inner.encode("a", "b")
        first, second = ([place for place, text in enumerate(pair.sequence_ids) if text == which] for which in (0, 1))
        return PairMarks(tuple(pair.ids[: first[0]]), tuple(pair.ids[first[-1] + 1 : second[0]]),
                         tuple(pair.ids[second[-1] + 1 :]))

    def _digest(self, text: str) -> str:
        """Args: text: of `tokenizer.json`; other files may have added tokens to it."""
        added = sorted((token_id, repr(token)) for token_id, token in self.inner.get_added_tokens_decoder().items())
        return hashlib.blake2b(f"{added}\n{text}".encode(), digest_size=16).hexdigest()

    def _check_samples(self) -> None:
        """Raises TokenizerError if short texts cannot be encoded and decoded, or become long."""
        begun = time.thread_time()
        for sample in SAMPLES:
            ids = self.encode(sample)
            if len(ids) > MAX_SAMPLE:
                raise TokenizerError(f"{sample!r} becomes {len(ids)} tokens")
            if (size := len(self.decode(ids)) + sum(map(len, map(self.token_bytes, ids)))) > 4 * MAX_SAMPLE:
                raise TokenizerError(f"the tokens of {sample!r} become {size} characters")
            if (seconds := time.thread_time() - begun) > MAX_SAMPLE_SECONDS:
                raise TokenizerError(f"{sample!r} takes {seconds:.1f} seconds")

    @property
    def vocab_size(self) -> int:
        return self.inner.get_vocab_size(with_added_tokens=True)

    @cached_property
    def special_texts(self) -> tuple[str, ...]:
        """The texts of the special tokens, by id."""
        return tuple(map(self.token_text, sorted(self.special_ids)))

    @cached_property
    def longest_token(self) -> int | None:
        """The most characters of a text that one token stands for; None: any number.

        WordPiece drops white space and makes one token of an unknown word, an added token may take the white space
        around it, and a normalizer may shorten a text as it likes.  A model of bytes drops nothing, and NFC makes one
        character of at most four.
        """
        model = self.inner.model
        normalizers, splits = [
            [rule for rule in rules_in(json.loads(part.__getstate__()) if part else None) if rule["type"] != "Sequence"]
            for part in (self.inner.normalizer, self.inner.pre_tokenizer)]
        has_bytes = isinstance(model, tokenizers.models.BPE) and (
            model.byte_fallback or any(step["type"] == "ByteLevel" for step in splits))
        if not has_bytes or not all(map(_keeps_length, normalizers)) or any(
                step["type"] not in SPLITS or step.get("behavior") == "Removed" for step in splits) or any(
                token.lstrip or token.rstrip for token in self.inner.get_added_tokens_decoder().values()):
            return None
        longest = max(map(len, self.inner.get_vocab(with_added_tokens=True)), default=1)
        return longest * (COMPOSED if any(step["type"] == "NFC" for step in normalizers) else 1)

    def check_length(self, text: str, max_tokens: int | None) -> None:
        """Raises TextTooLong if `text` must have more than `max_tokens` tokens."""
        if max_tokens is None or len(text) <= max(SHORT, max_tokens) or self.longest_token is None:
            return
        least = -(-len(text) // self.longest_token)
        if least > max_tokens:
            raise TextTooLong(f"{len(text)} characters in tokens of at most {self.longest_token}", least)

    def encode(self, text: str, *, add_special_tokens: bool = True, max_tokens: int | None = None) -> list[int]:
        """Token ids of `text`.  Long texts are encoded without holding the interpreter's lock.

        Raises:
            TextTooLong: `text` is so long that it must have more than `max_tokens` tokens.
            TokenizerError: `text` has no UTF-8 form (lone surrogates), or the tokenizer fails.
        """
        self.check_length(text, max_tokens)
        with _failures():
            if len(text) <= SHORT:
                return self.inner.encode(text, add_special_tokens=add_special_tokens).ids
            return self.inner.encode_batch_fast([text], add_special_tokens=add_special_tokens)[0].ids

    def encode_batch(self, texts: Sequence[str], *, add_special_tokens: bool = True) -> list[list[int]]:
        """Token ids of each text, by all cores and without holding the interpreter's lock; equal texts only once.

        Raises:
            TokenizerError: as `encode`.
        """
        distinct, found = list(dict.fromkeys(texts)), dict[str, list[int]]()
        for first in range(0, len(distinct), BATCH):
            some = distinct[first : first + BATCH]
            with _failures():
                encodings = self.inner.encode_batch_fast(some, add_special_tokens=add_special_tokens)
            found |= {text: encoding.ids for text, encoding in zip(some, encodings, strict=True)}
        return [found[text] if len(distinct) == len(texts) else list(found[text]) for text in texts]

    def encode_pair(self, first: str, second: str, *, max_tokens: int | None = None) -> list[int]:
        """Token ids of two texts, as the tokenizer joins them: for BERT `[CLS] first [SEP] second [SEP]`.

        Raises:
            TextTooLong, TokenizerError: as `encode`.
        """
        self.check_length(first + second, max_tokens)
        return self.pair_marks.pair(*[self.encode(text, add_special_tokens=False) for text in (first, second)])

    def offsets(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """For each token of `text`, the characters before the one that it begins with, or within.

        Long texts are encoded without holding the interpreter's lock.
        A token that the tokenizer adds stands where the next one begins.

        Raises:
            TokenizerError: as `encode`.
        """
        try:
            if len(text) <= SHORT:
                spans = self.inner.encode(text, add_special_tokens=add_special_tokens).offsets
            else:
                spans = self.inner.encode_batch([text], add_special_tokens=add_special_tokens)[0].offsets
        except INTERRUPTS:
            raise
        except BaseException as error:
            raise TokenizerError(f"the tokenizer cannot encode the text ({error})") from error
        found, end = list[int](), 0
        for first, last in spans:  # without the spaces that a word of some tokenizers begins with
            found.append(min(first, end) if first < last else end)
            end = max(end, last)
        return found

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """The text of tokens.  Raises TokenizerError if the tokenizer fails."""
        try:
            return self.inner.decode(list(token_ids), skip_special_tokens=skip_special_tokens)
        except INTERRUPTS:
            raise
        except BaseException as error:
            raise TokenizerError(f"the tokenizer cannot decode the tokens ({error})") from error

    def token_text(self, token_id: int) -> str:
        """One token by itself, special or not, as listed with its log-probability."""
        return self.token_bytes(token_id).decode("utf-8", errors="replace")

    def _named_in(self, texts: tuple[str, ...]) -> dict[str, int]:
        """The special tokens that the texts spell, longer ones first."""
        text = "\0".join(texts)
        named = [one for one in self.special_by_text if one and one in text]
        return {one: self.special_by_text[one] for one in sorted(named, key=len, reverse=True)}

    def token_of(self, text: str) -> int | None:
        """The token whose text is `text`, special or not; None where no single token has it."""
        found = self.inner.token_to_id(text)
        return found if found is not None and self.token_text(found) == text else None

    def token_bytes(self, token_id: int) -> bytes:
        if self.bytes_by_id is not None:
            return self.bytes_by_id[token_id]
        return self.decode([token_id], skip_special_tokens=False).encode()


def spellings(words: Sequence[str]) -> list[str]:
    """Each word at the beginning of a text, and after a space: both are tokenized to forbid the word."""
    return list(dict.fromkeys(text for word in words for text in (word, " " + word.lstrip())))


class _Files(NamedTuple):
    """The files that make a tokenizer, with their paths for messages."""

    path: Path
    read: Callable[[], str]  # tokenizer.json
    config_path: Path
    config: dict[str, Any]
    mapped_path: Path
    mapped: dict[str, Any]
    marks: Marks | None = None  # that a file names


def _files_of(checkpoint: Path) -> _Files:
    """Raises TokenizerError if there is no tokenizer, or a file next to it is broken."""
    if checkpoint.is_file():
        try:
            parts = read_tokenizer(checkpoint)
        except CheckpointError as error:
            raise TokenizerError(str(error)) from error
        return _Files(checkpoint, lambda: parts.tokenizer, checkpoint, parts.config, checkpoint, {}, parts.marks)
    path = checkpoint / "tokenizer.json"
    if not path.is_file():
        raise TokenizerError(f"{path}: no such file (only tokenizers in this format can be read)")
    config, mapped = path.with_name("tokenizer_config.json"), path.with_name("special_tokens_map.json")
    return _Files(path, lambda: read_part(path, MAX_TOKENIZER_BYTES).decode(), config, read_json(config), mapped,
                  read_json(mapped))


def _content(token: object, where: str) -> str:
    """The text of a special token.  Raises TokenizerError if it has none."""
    try:
        return content_of(token, where)
    except DeclarationError as error:
        raise TokenizerError(str(error)) from error


def _add(inner: tokenizers.Tokenizer, declared: Sequence[DeclaredToken]) -> str:
    """Add tokens; returns those that got another id than declared, for a warning, "" if there are none."""
    inner.add_tokens([one.token for one in declared])
    moved = [f"{one.content!r:.40} is {found}, not {one.token_id}" for one in declared
             if one.token_id is not None and (found := inner.token_to_id(one.content)) != one.token_id]
    return ", ".join(moved[:SHOWN]) + (f" and {len(moved) - SHOWN} more" if len(moved) > SHOWN else "")


def _check_rules(description: dict[str, Any]) -> None:
    """Raises TokenizerError if rules are too many, make a short text long, or take any time to decode.

    Every stream's text is decoded token by token in this process, so decoders are not run in a worker.
    """
    if (number := num_rules(description)) > MAX_RULES:
        raise TokenizerError(f"it has {number} rules, more than {MAX_RULES}")
    if has_regex(description.get("decoder")):
        raise TokenizerError("its decoder replaces by a regular expression")
    for name in ("normalizer", "decoder"):
        growth = 1.0
        for step in rules_in(description.get(name)):
            if "pattern" in step and "content" in step:
                growth *= max(1.0, len(step["content"]) / max(1, len(step["pattern"].get("String", ""))))
            if max(growth, len(step.get("prepend") or "")) > MAX_GROWTH:
                raise TokenizerError(f"its {name} writes more than {MAX_GROWTH} characters for one")


def _keeps_length(normalizer: Mapping[str, Any]) -> bool:
    """Whether a normalizer leaves a text at least as long as it was, or makes one character of at most COMPOSED."""
    if normalizer["type"] == "Replace":
        return len(normalizer["content"]) >= len(normalizer["pattern"].get("String", " " * (MAX_GROWTH + 1)))
    return normalizer["type"] in ("NFC", "NFD", "Prepend")


@contextlib.contextmanager
def no_panic_messages() -> Iterator[None]:
    """Discard what the library writes to the process's stderr: a panic's message and backtrace."""
    try:
        stderr = os.dup(2)
    except OSError:  # it is closed
        yield
        return
    null = os.open(os.devnull, os.O_WRONLY)
    os.dup2(null, 2)
    try:
        yield
    finally:
        os.dup2(stderr, 2)
        os.close(stderr)
        os.close(null)


@contextlib.contextmanager
def _failures() -> Iterator[None]:
    """Raises TokenizerError where the library cannot encode a text."""
    try:
        yield
    except (TypeError, UnicodeError) as error:
        raise TokenizerError("the text is not valid Unicode") from error
    except INTERRUPTS:
        raise
    except BaseException as error:
        raise TokenizerError(f"the tokenizer cannot encode the text ({error})") from error


# -- calls of a worker process -----------------------------------------------------------------------------------------


class TokenizerChanged(Exception):
    """The folder does not hold the tokenizer that it held when the server started."""


@lru_cache(1)
def _loaded_tokenizer(folder: str, digest: str) -> Tokenizer:
    try:
        tokenizer = Tokenizer.load(folder)
    except TokenizerError as error:
        if isinstance(error.__cause__, MemoryError):
            raise error.__cause__ from None
        raise TokenizerChanged from error  # it was usable then
    if tokenizer.digest != digest:
        raise TokenizerChanged
    return tokenizer


def encode(folder: str, digest: str, text: str, add_special_tokens: bool, wants_offsets: bool) -> list[int] | None:
    """See `Tokenizer.encode`, or `Tokenizer.offsets`.

    Args:
        folder: of the tokenizer, which is loaded by the first call of a process.
        digest: of the tokenizer as the server has loaded it.

    Returns:
        None if the folder holds another one now.
    """
    try:
        tokenizer = _loaded_tokenizer(folder, digest)
    except TokenizerChanged:
        return None
    with no_panic_messages():  # a regular expression that backtracks too often is a panic of the library
        call = tokenizer.offsets if wants_offsets else tokenizer.encode
        return call(text, add_special_tokens=add_special_tokens)


CALLS = {"encode": encode}
