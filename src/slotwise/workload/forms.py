"""Text forms of a workload's settings: a name and its numbers, `name:number:number`."""

from __future__ import annotations

import random
from collections.abc import Mapping
from dataclasses import fields
from typing import Any

SMALLEST_SHARE = 2.0**-53  # the step between the values of `random()`
_NUMBERS = {"int": int, "float": float}


def parse(text: str, kinds: Mapping[str, type[Any]], what: str) -> Any:
    """Returns the object that `text` describes.

    Args:
        kinds: the dataclasses by name; the `form` of each shows its syntax.
        what: the setting's name, for the error.

    Raises:
        ValueError: one line that lists the forms, or says which number is out of range.
    """
    name, *numbers = text.strip().split(":")
    kind = kinds.get(name)
    known = ", ".join(kind.form for kind in kinds.values())
    if kind is None:
        raise ValueError(f"{what}: there is no {text!r}; there are {known}")
    types = [_NUMBERS[str(field.type)] for field in fields(kind)]
    try:
        values = [convert(number) for convert, number in zip(types, numbers, strict=True)]
    except ValueError:
        raise ValueError(f"{what}: {text!r} does not read as {kind.form}; there are {known}") from None
    return kind(*values)


def written(number: float) -> str:
    """Returns a number as text; whole numbers have no decimal point."""
    return str(int(number)) if number == int(number) else repr(number)


def require_within(name: str, value: float, lowest: float, highest: float) -> None:
    """Raises ValueError for NaN or a number out of range."""
    if not lowest <= value <= highest:
        raise ValueError(f"{name} must be between {written(lowest)} and {written(highest)}, not {value}")


def share(rng: random.Random) -> float:
    """Returns a number strictly between 0 and 1."""
    return max(rng.random(), SMALLEST_SHARE)


def below(rng: random.Random, count: int) -> int:
    """Returns an integer from 0 to `count` - 1, uniformly distributed."""
    return int(rng.random() * count)


def stream(seed: int, purpose: str) -> random.Random:
    """Returns the random stream of one purpose, so that changing one part of a workload leaves the others unchanged."""
    return random.Random(f"slotwise {seed} {purpose}")
