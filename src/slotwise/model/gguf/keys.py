"""The keys of a GGUF file that have its architecture's name before them, each with a type and a range."""

from __future__ import annotations

from typing import Any

from slotwise.errors import CheckpointError
from slotwise.gguf.model import GGUFModel

ARCHITECTURE = "general.architecture"
MAX_WIDTH = 1 << 24


class Keys:
    """The metadata of one file, and which of its keys were read.

    Every reader raises CheckpointError, as those of `Metadata`.
    """

    def __init__(self, model: GGUFModel) -> None:
        self.metadata, self.tensors = model.metadata, model.tensors
        self.prefix = model.metadata.text(ARCHITECTURE)
        self._read: set[str] = set()

    def has(self, key: str) -> bool:
        return self.metadata.has(f"{self.prefix}.{key}")

    def integer(self, key: str, *, default: int | None = None, minimum: int = 1, maximum: int = MAX_WIDTH) -> int:
        return self.metadata.integer(self._name(key), default, minimum=minimum, maximum=maximum)

    def number(self, key: str, default: float | None = None, *, minimum: float = 0.0, maximum: float = 1e30) -> float:
        return self.metadata.number(self._name(key), default, minimum=minimum, maximum=maximum)

    def flag(self, key: str, *, default: bool) -> bool:
        return self.metadata.flag(self._name(key), default)

    def text(self, key: str, default: str) -> str:
        return self.metadata.text(self._name(key), default)

    def alike(self, key: str, layers: int, default: int | None = None) -> int:
        """A number that a file may give for each layer, and that must be the same in all."""
        name = self._name(key)
        numbers = self.metadata.numbers(name)
        if not numbers and default is None:
            raise self.metadata.error(name, "is missing")
        values = set(numbers) if default is None or numbers else {default}
        if len(values) > 1 or len(numbers) not in (0, 1, layers):
            raise self.metadata.error(name, f"gives {len(numbers)} layers {len(values)} sizes: all must be alike")
        value = values.pop()
        if not isinstance(value, int) or not 1 <= value <= MAX_WIDTH:
            raise self.metadata.error(name, f"must be a whole number from 1 to {MAX_WIDTH}, not {value!r:.40}")
        return value

    def unread(self) -> list[str]:
        """The keys that nothing has read."""
        prefix = f"{self.prefix}."
        return [key.removeprefix(prefix) for key in self.metadata.keys(prefix) if key not in self._read]

    def values(self, key: str) -> list[Any]:
        """The value of a key that is there, or those of its array."""
        name = f"{self.prefix}.{key}"
        try:
            return [self.metadata.scalar(name)]
        except CheckpointError:
            return [*self.metadata.numbers(name)]

    def _name(self, key: str) -> str:
        """The key in the file, which counts as read."""
        name = f"{self.prefix}.{key}"
        self._read.add(name)
        return name

    def rows(self, tensor: str) -> int:
        """Of a tensor of the first layer; 0 where there is none."""
        found = self.tensors.get(f"blk.0.{tensor}.weight")
        return found[1].shape[0] if found else 0

    def error(self, key: str, problem: str) -> CheckpointError:
        return self.metadata.error(f"{self.prefix}.{key}", problem)


Fields = dict[str, Any]
"""Some fields of a config.json."""
