"""A checkpoint's JSON, validated: every value has a type and a range, and an error names the field."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, TypeVar

from slotwise.errors import CheckpointError
from slotwise.platform.files import read_part

MAX_JSON_BYTES = 64 * 1024 * 1024
MOST = 1e30  # of a number: products of two fit a float64, and the number a float32
MAX_TOKEN_IDS = 1024  # in a list
MAX_NUMBERS = 4096  # in a list
MAX_TOKEN_ID = 2**31


T = TypeVar("T")


class Fields:
    """Typed access to one JSON object.  A field that is null counts as absent.

    Every reader raises CheckpointError when the value has the wrong type, is out of range, or is absent and has no
    default.
    """

    def __init__(self, values: Mapping[str, Any], where: str, shown: Mapping[str, str] = {}) -> None:
        self.values = values
        self.where = where  # the file, for messages
        self._shown = shown  # the names of fields in the file, for messages, where they differ

    def renamed(self, names: Mapping[str, str]) -> Fields:
        """The same fields under other names: `names` has the new name of each.

        Raises CheckpointError for a field that is there under both names, with two values.
        """
        values, shown = dict(self.values), dict(self._shown)
        for old, new in names.items():
            if values.get(new, values.get(old)) != values.get(old, values.get(new)):
                raise self.error(old, f"and {new} differ")
            if old in values:
                values[new] = values.pop(old)
            if old in self.values or new not in self.values:
                shown[new] = old
        return Fields(values, self.where, shown)

    def with_defaults(self, **values: Any) -> Fields:
        """The same fields, with `values` for absent ones."""
        absent = {name: value for name, value in values.items() if not self.has(name)}
        return Fields({**self.values, **absent}, self.where, self._shown)

    def replaced(self, **values: Any) -> Fields:
        """The same fields, with other values for some; without those that are None."""
        kept = {name: value for name, value in self.values.items() if name not in values}
        return Fields({**kept, **{name: value for name, value in values.items() if value is not None}}, self.where,
                      self._shown)

    def has(self, name: str) -> bool:
        return self.values.get(name) is not None

    def is_null(self, name: str) -> bool:
        """Whether the field is null in the file, which for some fields differs from being absent."""
        return name in self.values and self.values[name] is None

    def integer(self, name: str, *, default: int | None = None, minimum: int = 1, maximum: int = 2**24) -> int:
        value = self._value(name, default)
        if not isinstance(value, int) or isinstance(value, bool) or not minimum <= value <= maximum:
            raise self.error(name, f"must be a whole number from {minimum} to {maximum}, not {value!r:.40}")
        return value

    def number(self, name: str, *, default: float | None = None, minimum: float = 0.0) -> float:
        """A number above `minimum`, and at most `MOST`."""
        value = self._value(name, default)
        if not isinstance(value, (int, float)) or isinstance(value, bool) or not minimum < value <= MOST:
            raise self.error(name, f"must be a number above {minimum:g} and at most {MOST:g}, not {value!r:.40}")
        return float(value)

    def flag(self, name: str, *, default: bool = False) -> bool:
        value = self._value(name, default)
        if not isinstance(value, bool):
            raise self.error(name, f"must be true or false, not {value!r:.40}")
        return value

    def text(self, name: str, *, default: str | None = None) -> str:
        value = self._value(name, default)
        if not isinstance(value, str):
            raise self.error(name, f"must be a string, not {value!r:.40}")
        return value

    def texts(self, name: str) -> tuple[str, ...]:
        """A list of strings; absent reads as empty."""
        value = self._value(name, [])
        if not isinstance(value, list) or not all(isinstance(item, str) for item in value):
            raise self.error(name, f"must be a list of strings, not {value!r:.40}")
        return tuple(value)

    def numbers(self, name: str, *, minimum: float = 0.0) -> tuple[float, ...]:
        """A list of numbers above `minimum`."""
        return tuple(self._list(name, lambda fields, each: fields.number(each, minimum=minimum)))

    def integers(self, name: str, *, maximum: int = 2**24) -> tuple[int, ...]:
        """A list of whole numbers from 0 to `maximum`."""
        return tuple(self._list(name, lambda fields, each: fields.integer(each, minimum=0, maximum=maximum)))

    def _list(self, name: str, read: Callable[[Fields, str], T]) -> list[T]:
        """Each value of a list, read as a field of its own."""
        values = self._value(name, None)
        if not isinstance(values, list) or len(values) > MAX_NUMBERS:
            raise self.error(name, f"must be a list of at most {MAX_NUMBERS} numbers, not {values!r:.40}")
        return [read(Fields({name: value}, self.where), name) for value in values]

    def token_ids(self, name: str) -> tuple[int, ...]:
        """One token id or a list of them; absent reads as empty, and so does the -1 that some files write for none."""
        value = self._value(name, [])
        ids = value if isinstance(value, list) else [value]
        if not all(isinstance(item, int) and not isinstance(item, bool) for item in ids):
            raise self.error(name, f"must be a token id or a list of them, not {value!r:.40}")
        if len(ids) > MAX_TOKEN_IDS or any(item >= MAX_TOKEN_ID for item in ids):
            raise self.error(name, f"must be at most {MAX_TOKEN_IDS} token ids below {MAX_TOKEN_ID}")
        return tuple(item for item in ids if item >= 0)

    def section(self, name: str) -> Fields:
        """A nested object; absent reads as empty."""
        value = self._value(name, {})
        if not isinstance(value, dict):
            raise self.error(name, f"must be an object, not {value!r:.40}")
        return Fields(value, f"{self.where}, {name}")

    def refuse(self, names: Iterable[str], why: str) -> None:
        """Raises CheckpointError when a field is present whose meaning is not implemented."""
        for name in names:
            if self.has(name):
                raise self.error(name, why)

    def error(self, name: str, problem: str) -> CheckpointError:
        return CheckpointError(f"{self.where}: {self._shown.get(name, name)} {problem}")

    def _value(self, name: str, default: Any) -> Any:
        value = self.values.get(name)
        if value is not None:
            return value
        if default is None:
            raise self.error(name, "is missing")
        return default


def read_json(path: Path, most: int = MAX_JSON_BYTES) -> Fields:
    """One JSON object from a file of at most so many bytes.

    Raises CheckpointError when it cannot be read or is not an object.
    """
    try:
        values = json.loads(read_part(path, most).decode("utf-8-sig"))
    except OSError as error:
        raise CheckpointError(f"cannot read {path}: {error.strerror}") from error
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{path} is not valid JSON ({error}): download the checkpoint again") from error
    if not isinstance(values, dict):
        raise CheckpointError(f"{path} must hold a JSON object, not a {type(values).__name__}")
    return Fields(values, str(path))
