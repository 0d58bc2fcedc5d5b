"""GGUF files (github.com/ggml-org/ggml, docs/gguf.md), read without trusting them; standard library only.

    "GGUF" version u32   tensors u64   values u64
    values               key, type u32, value
    tensors              name, dimensions u32, sizes u64 (the fastest first), type u32, offset u64 in the data
    (padding)            to `general.alignment`
    data                 each tensor at a multiple of the alignment, in rows of whole blocks

From top to bottom: how tensors are stored, a cursor over the bytes, the metadata by key, one file, a model of one file
or several, and special tokens.  The engine reads weights and config from a file (`compute/model/gguf/`), the API
process its tokenizer and template (`text/gguf_tokenizer.py`).  Every value is checked against the file's size and
against bounds.
"""

from __future__ import annotations

import errno
import math
import mmap
import os
import re
import stat
import struct
from array import array
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from math import prod
from pathlib import Path
from typing import Any, NamedTuple

from slotwise.errors import CheckpointError
from slotwise.platform.files import check_part


class StoredType(NamedTuple):
    name: str
    numbers: int  # in a block
    bytes: int  # of a block


TYPES = {  # by the number in a file, from ggml.h
    0: StoredType("F32", 1, 4), 1: StoredType("F16", 1, 2), 30: StoredType("BF16", 1, 2), 28: StoredType("F64", 1, 8),
    24: StoredType("I8", 1, 1), 25: StoredType("I16", 1, 2), 26: StoredType("I32", 1, 4), 27: StoredType("I64", 1, 8),
    2: StoredType("Q4_0", 32, 18), 3: StoredType("Q4_1", 32, 20), 6: StoredType("Q5_0", 32, 22),
    7: StoredType("Q5_1", 32, 24), 8: StoredType("Q8_0", 32, 34), 9: StoredType("Q8_1", 32, 36),
    10: StoredType("Q2_K", 256, 84), 11: StoredType("Q3_K", 256, 110), 12: StoredType("Q4_K", 256, 144),
    13: StoredType("Q5_K", 256, 176), 14: StoredType("Q6_K", 256, 210), 15: StoredType("Q8_K", 256, 292),
    16: StoredType("IQ2_XXS", 256, 66), 17: StoredType("IQ2_XS", 256, 74), 22: StoredType("IQ2_S", 256, 82),
    18: StoredType("IQ3_XXS", 256, 98), 21: StoredType("IQ3_S", 256, 110), 19: StoredType("IQ1_S", 256, 50),
    29: StoredType("IQ1_M", 256, 56), 20: StoredType("IQ4_NL", 32, 18), 23: StoredType("IQ4_XS", 256, 136),
    34: StoredType("TQ1_0", 256, 54), 35: StoredType("TQ2_0", 256, 66), 39: StoredType("MXFP4", 32, 17),
    40: StoredType("NVFP4", 64, 36), 41: StoredType("Q1_0", 128, 18),
}  # fmt: skip


STRING, ARRAY, BOOL = 8, 9, 7
SCALARS = {  # by the number of a value's type: its name, and its code in `struct` and `array`
    0: ("u8", "B"), 1: ("i8", "b"), 2: ("u16", "H"), 3: ("i16", "h"), 4: ("u32", "I"), 5: ("i32", "i"),
    6: ("f32", "f"), BOOL: ("bool", "B"), 10: ("u64", "Q"), 11: ("i64", "q"), 12: ("f64", "d"),
}  # fmt: skip
MAX_TEXT = 1 << 24  # bytes of one text
MAX_ITEMS = 1 << 20  # of an array: the largest vocabularies in use have 262,144 tokens and 514,906 merges
MAX_ALL_ITEMS = 1 << 22  # of a file's arrays
MAX_NAME = 255  # bytes
_LENGTH = struct.Struct("<Q")


class Array(NamedTuple):
    """Where an array lies in a file: `length` values of `type`, its bytes from `start` until `end`."""

    type: int
    length: int
    start: int
    end: int


class Cursor:
    """A place in `data`, the mapped file `where`.  Every reader raises CheckpointError with `what` it was to read."""

    def __init__(self, data: mmap.mmap, where: str) -> None:
        self.data = data
        self.at = 0
        self._where = where
        self._items = 0  # of all arrays so far

    def error(self, problem: str) -> CheckpointError:
        return CheckpointError(f"{self._where}: {problem}")

    def integer(self, code: str, what: str) -> int:
        """An integer of `struct`'s code."""
        return int(self._unpack(code, what))

    def name(self, what: str) -> str:
        """A text that is short and printable."""
        text = self.text(what, MAX_NAME)
        if not text or not text.isprintable():
            raise self.error(f"{what} is not printable text: {text!r:.40}")
        return text

    def text(self, what: str, most: int = MAX_TEXT) -> str:
        length = self.integer("Q", f"the length of {what}")
        if length > most:
            raise self.error(f"{what} has {length} bytes, more than {most}")
        start = self._pass(length, what)
        try:
            return self.data[start : self.at].decode()
        except UnicodeError as error:
            raise self.error(f"{what} is not UTF-8") from error

    def value(self, key: str) -> Any:
        """A typed value: a number, a truth value, a text or an `Array`."""
        kind = self.integer("I", f"the type of {key}")
        if kind == STRING:
            return self.text(key)
        if kind == ARRAY:
            return self._array(key)
        if kind not in SCALARS:
            raise self.error(f"{key} has the unknown type {kind}")
        value = self._unpack(SCALARS[kind][1], key)
        if kind == BOOL and value not in (0, 1):
            raise self.error(f"{key} must be 0 or 1, as a truth value is, not {value}")
        return bool(value) if kind == BOOL else value

    def _array(self, key: str) -> Array:
        kind, count = self.integer("I", f"the type of {key}"), self.integer("Q", f"the length of {key}")
        if kind != STRING and kind not in SCALARS:
            raise self.error(f"{key} is an array of the unknown or nested type {kind}")
        self._items += count
        if count > MAX_ITEMS or self._items > MAX_ALL_ITEMS:
            raise self.error(f"{key} has {count} items: more than {MAX_ITEMS}, or with those before more than "
                             f"{MAX_ALL_ITEMS}")
        start = self.at
        if kind != STRING:
            self._pass(count * struct.calcsize("<" + SCALARS[kind][1]), key)
            return Array(kind, count, start, self.at)
        at, last, data, length_at = start, len(self.data) - _LENGTH.size, self.data, _LENGTH.unpack_from
        for _ in range(count):
            if at > last:
                raise self.error(f"{key} goes beyond the end of the file: it is incomplete")
            at += _LENGTH.size + length_at(data, at)[0]
        self._pass(at - start, key)
        return Array(kind, count, start, at)

    def _unpack(self, code: str, what: str) -> Any:
        size = struct.calcsize("<" + code)
        return struct.unpack_from("<" + code, self.data, self._pass(size, what))[0]

    def _pass(self, size: int, what: str) -> int:
        """Move `size` bytes on; returns where they begin."""
        start = self.at
        if size > len(self.data) - start:
            raise self.error(f"{what} goes beyond the end of the file: it is incomplete")
        self.at += size
        return start


def texts_of(data: mmap.mmap, found: Array) -> list[str]:
    """The texts of an array that was walked.  Raises UnicodeError where one is not UTF-8."""
    texts, at = [], found.start
    for _ in range(found.length):
        begin = at + _LENGTH.size
        at = begin + _LENGTH.unpack_from(data, at)[0]
        texts.append(data[begin:at].decode())
    return texts


def numbers_of(data: mmap.mmap, found: Array) -> array[Any]:
    """The numbers of an array that was walked."""
    numbers = array(SCALARS[found.type][1])
    numbers.frombytes(data[found.start : found.end])
    return numbers


MOST = 1e30  # of a number: products of two fit a float64, and the number a float32


class Metadata:
    """Every reader raises CheckpointError when the value has the wrong type or is out of range, or is absent and has
    no default."""

    def __init__(self, values: Mapping[str, Any], data: mmap.mmap, where: str) -> None:
        self.where = where  # the file, for messages
        self._values = values
        self._data = data

    def has(self, key: str) -> bool:
        return key in self._values

    def keys(self, prefix: str) -> list[str]:
        """The keys that begin with `prefix`, in the file's order."""
        return [key for key in self._values if key.startswith(prefix)]

    def integer(self, key: str, default: int | None = None, *, minimum: int = 0, maximum: int = 2**31 - 1) -> int:
        value = self._value(key, default)
        if not isinstance(value, int) or isinstance(value, bool) or not minimum <= value <= maximum:
            raise self.error(key, f"must be a whole number from {minimum} to {maximum}, not {value!r:.40}")
        return value

    def number(self, key: str, default: float | None = None, *, minimum: float = 0.0, maximum: float = MOST) -> float:
        """A number above `minimum`, and at most `maximum`."""
        value = self._value(key, default)
        if not isinstance(value, (int, float)) or isinstance(value, bool) or not minimum < value <= maximum:
            raise self.error(key, f"must be a number above {minimum:g} and at most {maximum:g}, not {value!r:.40}")
        return float(value)

    def flag(self, key: str, default: bool | None = None) -> bool:
        value = self._value(key, default)
        if not isinstance(value, bool):
            raise self.error(key, f"must be true or false, not {value!r:.40}")
        return value

    def text(self, key: str, default: str | None = None) -> str:
        value = self._value(key, default)
        if not isinstance(value, str):
            raise self.error(key, f"must be a text, not {value!r:.40}")
        return value

    def scalar(self, key: str) -> float | bool | str:
        """A value that another reader checks, unless it is an array."""
        value: float | bool | str = self._values[key]
        if isinstance(value, Array):
            raise self.error(key, "must be one value, not an array")
        return value

    def texts(self, key: str) -> list[str]:
        """An array of texts; absent reads as empty."""
        if not self.has(key):
            return []
        found = self._array(key, "texts")
        if found.type != STRING:
            raise self.error(key, "must be an array of texts")
        try:
            return texts_of(self._data, found)
        except UnicodeError as error:
            raise self.error(key, "holds a text that is not UTF-8") from error

    def numbers(self, key: str, *, may_be_infinite: bool = False) -> list[float]:
        """An array of finite numbers, or one number by itself; absent reads as empty."""
        if not self.has(key):
            return []
        value = self._values[key]
        if isinstance(value, (int, float)) and not isinstance(value, bool):
            value = [value]
        else:
            found = self._array(key, "numbers")
            if found.type == STRING:
                raise self.error(key, "must be an array of numbers")
            value = numbers_of(self._data, found).tolist()
        if any(map(math.isnan, value)) or not (may_be_infinite or all(map(math.isfinite, value))):
            raise self.error(key, "holds NaN or infinite numbers")
        return list(value)

    def error(self, key: str, problem: str) -> CheckpointError:
        return CheckpointError(f"{self.where}: {key} {problem}")

    def _array(self, key: str, what: str) -> Array:
        value = self._values[key]
        if not isinstance(value, Array):
            raise self.error(key, f"must be an array of {what}, not {value!r:.40}")
        return value

    def _value(self, key: str, default: Any) -> Any:
        if key in self._values:
            return self._values[key]
        if default is None:
            raise self.error(key, "is missing")
        return default


MAGIC = b"GGUF"
VERSIONS = (2, 3)
ALIGNMENT = "general.alignment"
MAX_VALUES = 1 << 14
MAX_TENSORS = 1 << 16
MAX_DIMENSIONS = 4
MAX_SIZE = 1 << 31  # of a dimension
MIN_ALIGNMENT, MAX_ALIGNMENT = 8, 1 << 20  # bytes: the widest number has eight


class TensorEntry(NamedTuple):
    """A tensor of a file.  `shape` is in torch's order, the slowest first; `start` and `end` are bytes of the file."""

    shape: tuple[int, ...]
    type: StoredType
    start: int
    end: int


class GGUFFile(NamedTuple):
    path: Path
    metadata: Metadata
    tensors: Mapping[str, TensorEntry]
    data: mmap.mmap  # the whole file, read only


def open_gguf(path: Path) -> GGUFFile:
    """Reads all but the data, and maps it.

    Raises:
        CheckpointError: the file cannot be read, or is not a whole and valid one; the message names the field.
    """
    data = _mapped(path)
    cursor = Cursor(data, str(path))
    version, num_tensors, num_values = _header(cursor)
    if version not in VERSIONS:
        big = int.from_bytes(version.to_bytes(4, "little"), "big") in VERSIONS
        raise cursor.error("it is written for big-endian machines, which is not supported" if big else
                           f"version {version} of the format is not supported: these are {VERSIONS[0]} and 3")
    values: dict[str, Any] = {}
    for number in range(num_values):
        key = cursor.name(f"the key of value {number}")
        if key in values:
            raise cursor.error(f"{key} is there twice")
        values[key] = cursor.value(key)
    metadata = Metadata(values, data, str(path))
    alignment = metadata.integer(ALIGNMENT, 32, minimum=MIN_ALIGNMENT, maximum=MAX_ALIGNMENT)
    if alignment & (alignment - 1):
        raise metadata.error(ALIGNMENT, f"must be a power of two, not {alignment}")
    return GGUFFile(path, metadata, _tensor_entries(cursor, num_tensors, alignment), data)


def _header(cursor: Cursor) -> tuple[int, int, int]:
    if cursor.data[: len(MAGIC)] != MAGIC:
        raise cursor.error(f"it does not begin with {MAGIC.decode()}: it is not a GGUF file, or a damaged one")
    cursor.at = len(MAGIC)
    version = cursor.integer("I", "the version")
    if version not in VERSIONS:
        return version, 0, 0  # what follows may have other sizes
    num_tensors = cursor.integer("Q", "the number of tensors")
    num_values = cursor.integer("Q", "the number of values")
    for what, number, most in (("tensors", num_tensors, MAX_TENSORS), ("values", num_values, MAX_VALUES)):
        if number > most:
            raise cursor.error(f"the number of {what} is {number}, more than {most}")
    return version, num_tensors, num_values


def _tensor_entries(cursor: Cursor, number: int, alignment: int) -> dict[str, TensorEntry]:
    """The tensors by name; each must lie in the file, right after the one before it.

    This detects a wrong type, size or offset, unless the byte counts happen to match.
    """
    found: dict[str, tuple[tuple[int, ...], StoredType, int]] = {}
    for index in range(number):
        name = cursor.name(f"the name of tensor {index}")
        if name in found:
            raise cursor.error(f"tensor {name} is there twice")
        found[name] = _description(cursor, name, alignment)
    base = -(-cursor.at // alignment) * alignment
    tensors = {}
    for name, (shape, kind, offset) in found.items():
        start = base + offset
        end = start + prod(shape) // kind.numbers * kind.bytes
        if end > len(cursor.data):
            raise cursor.error(f"tensor {name} goes beyond the end of the file: it is incomplete, or its offset wrong")
        tensors[name] = TensorEntry(shape, kind, start, end)
    expected = base
    for name, tensor in sorted(tensors.items(), key=lambda item: item[1].start):
        if tensor.start != expected:
            what = "shares bytes with the one before it" if tensor.start < expected else "does not follow it"
            raise cursor.error(f"tensor {name} begins at byte {tensor.start} and {what}: a type, a size or an offset "
                               "is wrong")
        expected = -(-tensor.end // alignment) * alignment
    if len(cursor.data) > expected and tensors:
        raise cursor.error(f"the last tensor ends at byte {expected} of {len(cursor.data)}: a type or a size is wrong")
    return tensors


def _description(cursor: Cursor, name: str, alignment: int) -> tuple[tuple[int, ...], StoredType, int]:
    """Shape, type, and offset in the data."""
    dimensions = cursor.integer("I", f"the dimensions of tensor {name}")
    if not 1 <= dimensions <= MAX_DIMENSIONS:
        raise cursor.error(f"tensor {name} has {dimensions} dimensions, and may have 1 to {MAX_DIMENSIONS}")
    sizes = [cursor.integer("Q", f"the sizes of tensor {name}") for _ in range(dimensions)]
    kind, offset = cursor.integer("I", f"the type of tensor {name}"), cursor.integer("Q", f"the offset of {name}")
    if not all(1 <= size <= MAX_SIZE for size in sizes):
        raise cursor.error(f"tensor {name} has sizes {sizes}, and each may be from 1 to {MAX_SIZE}")
    if kind not in TYPES:
        raise cursor.error(f"tensor {name} has the unknown type {kind}")
    if sizes[0] % TYPES[kind].numbers:
        raise cursor.error(f"tensor {name} has rows of {sizes[0]} numbers, no multiple of the {TYPES[kind].numbers} "
                           f"in a block of {TYPES[kind].name}")
    if offset % alignment:
        raise cursor.error(f"tensor {name} has the offset {offset}, no multiple of the alignment {alignment}")
    return tuple(reversed(sizes)), TYPES[kind], offset


def _mapped(path: Path) -> mmap.mmap:
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        try:
            if not stat.S_ISREG(os.fstat(descriptor).st_mode):
                raise OSError(errno.EINVAL, "not a regular file", str(path))
            return mmap.mmap(descriptor, 0, access=mmap.ACCESS_READ)
        finally:
            os.close(descriptor)
    except OSError as error:
        raise CheckpointError(f"cannot read {path}: {error.strerror}") from error
    except ValueError as error:  # mmap's word for it
        raise CheckpointError(f"{path} is empty: download it again") from error


SUFFIX = ".gguf"
PART = re.compile(r"(?P<name>.+)-(?P<number>\d{5})-of-(?P<count>\d{5})\.gguf")
COUNT, NUMBER, TENSORS = "split.count", "split.no", "split.tensors.count"
MAX_PARTS = 1024
TYPE, LANGUAGE_MODEL = "general.type", "model"
BESIDE = "mmproj"  # how the names of files begin that belong to a model: what reads its pictures


class GGUFModel(NamedTuple):
    """All parts of a model, open."""

    path: Path  # of the first
    metadata: Metadata
    tensors: Mapping[str, tuple[Path, TensorEntry]]  # by name, with the file that holds it


def open_model(path: Path) -> GGUFModel:
    """Opens `path`, and the other parts if it is the first of several.

    Raises:
        CheckpointError: a file is missing or not valid, belongs to another model, or does not hold a language model.
    """
    first = open_gguf(path)
    metadata = first.metadata
    if (kind := metadata.text(TYPE, LANGUAGE_MODEL)) != LANGUAGE_MODEL:
        raise metadata.error(TYPE, f"is {kind!r:.40}: the file is not a language model, but belongs to one")
    count = metadata.integer(COUNT, 1, minimum=1, maximum=MAX_PARTS)
    paths = parts_of(path)
    if len(paths) != count or metadata.integer(NUMBER, 0):
        raise metadata.error(COUNT, f"is {count} and {NUMBER} {metadata.integer(NUMBER, 0)}, but by its name the file "
                             f"is part 1 of {len(paths)}: name it as it was")
    tensors: dict[str, tuple[Path, TensorEntry]] = {}
    for number, part_path in enumerate(paths):
        part = first if not number else _part(part_path, number, count)
        for name, tensor in part.tensors.items():
            if name in tensors:
                raise CheckpointError(f"{part_path}: tensor {name} is in {tensors[name][0].name}, too")
            tensors[name] = part_path, tensor
    if count > 1 and metadata.integer(TENSORS, len(tensors)) != len(tensors):
        raise metadata.error(TENSORS, f"is {metadata.integer(TENSORS)}, but the parts hold {len(tensors)}")
    return GGUFModel(path, metadata, tensors)


def _part(path: Path, number: int, count: int) -> GGUFFile:
    try:
        check_part(path)
    except OSError as error:
        raise CheckpointError(f"cannot read {path}: {error.strerror}") from error
    part = open_gguf(path)
    for key, expected in ((NUMBER, number), (COUNT, count)):
        if part.metadata.integer(key) != expected:
            raise part.metadata.error(key, f"is {part.metadata.integer(key)}, and must be {expected} by the file's "
                                      "name: it is a part of another model")
    return part


def parts_of(path: Path) -> list[Path]:
    """The paths of all parts of a model, by the name of one; the path itself if the model has one part."""
    found = PART.fullmatch(path.name)
    count = int(found["count"]) if found else 1
    if not found or not 1 <= count <= MAX_PARTS:
        return [path]
    return [path.with_name(f"{found['name']}-{number:05}-of-{count:05}{SUFFIX}") for number in range(1, count + 1)]


def models_among(names: Iterable[str]) -> list[str]:
    """The file names of GGUF models: whole files, and the first parts of split ones."""
    return [name for name in names if name.endswith(SUFFIX) and not name.startswith(BESIDE)
            and parts_of(Path(name))[0].name == name]


def is_gguf(path: Path) -> bool:
    """Whether `path` is a file that begins like GGUF, whatever its name: Ollama's store has names without meaning."""
    with suppress(OSError):
        if path.is_file():  # not a pipe, which would block
            with path.open("rb") as file:
                return file.read(len(MAGIC)) == MAGIC
    return False


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
