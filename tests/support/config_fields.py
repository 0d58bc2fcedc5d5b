"""What becomes of each field of a config class of transformers: lists of fields, and checkpoints edited field by field.

A field stands in one list for all classes, or in another one for its class.
"""

from __future__ import annotations

import dataclasses
import inspect
import shutil
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

from slotwise.compute.model.loading import read_config
from slotwise.errors import CheckpointError
from support.checkpoints import edit_config

Fields = dict[str, Any]
Edited = Callable[..., Path]


@dataclasses.dataclass(frozen=True)
class FieldLists:
    """The lists, and where a class differs: the list of a field, and its value."""

    lists: tuple[Fields, ...]
    own: Mapping[str, dict[str, tuple[Fields, Any]]]
    class_of: Callable[[str], Any]
    read_beside: Mapping[str, set[str]] = dataclasses.field(default_factory=dict)
    """Fields that transformers obeys, but the class does not list."""

    def of(self, name: str) -> set[str]:
        """The fields that a config.json of this class may have."""
        kind = self.class_of(name)
        fields = {field.name for field in dataclasses.fields(kind)} | set(kind().to_dict())
        fields |= {known for known, value in inspect.getmembers(kind) if isinstance(value, property) and value.fset}
        return {field for field in fields if not field.startswith("_")} | self.read_beside.get(name, set())

    def listed(self, name: str, *lists: Fields) -> Fields:
        """The fields of a class that stand in these lists, with their values; there are some."""
        own = self.own.get(name, {})
        fields = {field: value for values in lists for field, value in values.items() if field not in own}
        fields |= {field: value for field, (values, value) in own.items() if any(values is each for each in lists)}
        fields = {field: fields[field] for field in sorted(self.of(name) & set(fields))}
        assert fields
        return fields

    def check_that_each_stands_in_one(self, name: str) -> None:
        known = set().union(*self.lists)
        assert not self.of(name) - known, "say what becomes of these fields"
        assert sum(map(len, self.lists)) == len(known), "a field stands in two lists"

    def check_that_each_exists(self, names: Iterable[str]) -> None:
        assert not set().union(*self.lists) - set().union(*map(self.of, names))

    def check_refused(self, name: str, refused: Fields, edited: Edited) -> None:
        for field, value in self.listed(name, refused).items():
            with pytest.raises(CheckpointError, match=field.removesuffix("s")):
                read_config(edited(name, **{field: value}))

    def check_absent(self, name: str, edited: Edited, *lists: Fields) -> int:
        """A field that is absent is as in transformers, or refused by name.  Returns how many are not refused."""
        defaults = {known.name: known.default for known in dataclasses.fields(self.class_of(name))}
        num_compared = 0
        for field in self.listed(name, *lists):
            try:
                config = read_config(edited(name, **{field: ...}))
            except CheckpointError as error:
                assert field in str(error)
            else:
                assert config == read_config(edited(name, **{field: defaults.get(field)})), field
                num_compared += 1
        return num_compared


def editor(base: Callable[[str], Path], folder: Path) -> Edited:
    """Makes a checkpoint of a class, in `folder`, whose config.json has other values.  It lasts until the next one."""
    def edit(name: str, **fields: Any) -> Path:
        if not folder.exists():
            shutil.copytree(base(name), folder)
        shutil.copyfile(base(name) / "config.json", folder / "config.json")
        return edit_config(folder, **fields)

    return edit


def distance(one: torch.Tensor, other: torch.Tensor) -> float:
    """The largest difference of two numbers."""
    return (one - other).abs().max().item()
