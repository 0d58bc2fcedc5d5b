"""Text forms of the small settings that a workload is made of: a name and its numbers, `name:number:number`."""

from __future__ import annotations

import random
from collections.abc import Mapping
from dataclasses import fields
from typing import Any

SMALLEST_SHARE = 2.0**-53  # the step between the values of `random()`
_NUMBERS = {"int": int, "float": float}


def parse(text: str, kinds: Mapping[str, type[Any]], what: str) -> Any:
    """The object that `text` describes.

    Args:
        kinds: the dataclasses there are, by name; each has a `form` that shows how it is written.
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
    """A number as people write it: whole ones without a point."""
    return str(int(number)) if number == int(number) else repr(number)


def require_within(name: str, value: float, lowest: float, highest: float) -> None:
    """Raises ValueError for a number that is not one, or out of range."""
    if not lowest <= value <= highest:
        raise ValueError(f"{name} must be between {written(lowest)} and {written(highest)}, not {value}")


def share(rng: random.Random) -> float:
    """A number strictly between 0 and 1."""
    return max(rng.random(), SMALLEST_SHARE)


def below(rng: random.Random, count: int) -> int:
    """One of the `count` integers from 0 on, each as likely."""
    return int(rng.random() * count)


def stream(seed: int, purpose: str) -> random.Random:
    """Random numbers for one purpose, so that changing one part of a workload leaves the others as they were."""
    return random.Random(f"slotwise {seed} {purpose}")
