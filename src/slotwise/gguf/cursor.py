"""Reads values one after another from the bytes of a file, each within the file and within bounds.

    text    length u64, then UTF-8            array   type u32, count u64, then the values
    other   little-endian, see `SCALARS`

An array is walked and not built: `Array` says where it lies, because most readers of a file need few of its arrays.
"""

from __future__ import annotations

import mmap
import struct
from array import array
from typing import Any, NamedTuple

from slotwise.errors import CheckpointError

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
            raise self.error(f"{what} is no printable text: {text!r:.40}")
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
