"""The metadata of a GGUF file by key, each value with a type and a range: an error names file and key."""

from __future__ import annotations

import math
import mmap
from collections.abc import Mapping
from typing import Any

from slotwise.errors import CheckpointError
from slotwise.gguf.cursor import STRING, Array, numbers_of, texts_of

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
        """A value that another reader checks, where it is no array."""
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

    def numbers(self, key: str) -> list[float]:
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
        if not all(map(math.isfinite, value)):
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
