"""Settings and parameters declared once, as dataclass fields with metadata, and the ranges of their numbers.

    max_num_seqs: int = setting(64, "slots of the batch", range=whole(1, SLOTS), phase=LIVE)

The field says all there is to say: the command line, the config file, the offline arguments, the body of
`PUT /admin/scheduling`, the tables of the docs and the error for a wrong value are derived from it.
"""

from __future__ import annotations

import dataclasses
import json
import math
import re
from collections.abc import Callable, Mapping
from dataclasses import MISSING, dataclass
from fractions import Fraction
from functools import cache, reduce
from numbers import Integral, Real
from typing import Any, TypeVar, cast

START, LIVE = "start", "live"  # a setting is fixed when the engine starts, or may change while it runs
SETTING, NESTED = "setting", "nested"  # keys of a field's metadata: its `Setting`, or the class whose settings it has
MAX_JSON = 1 << 16  # characters of a setting that is a JSON object

Owner = TypeVar("Owner")

SMALLEST = 1e-9  # of a real setting that is not 0: smaller ones are mistakes, and overflow where they divide
LARGEST = 1 << 31
INT64 = 2**63 - 1
MOST_DIGITS = 64
UNITS = {  # vLLM's
    "k": 10**3, "m": 10**6, "g": 10**9, "t": 10**12, "K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40}
BYTE_UNITS = UNITS | {
    "kB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30, "TiB": 2**40}

_WITH_UNIT = re.compile(r"(\d+(?:\.\d+)?)([A-Za-z]+)", re.ASCII)


@dataclass(frozen=True, slots=True)
class Range:
    """Numbers from `least` to `most`, both included."""

    least: float
    most: float
    is_whole: bool = True
    may_be_infinite: bool = False
    may_be_none: bool = False
    smallest: float = 0.0  # magnitude of a number that is not 0

    @property
    def kind(self) -> type[int] | type[float]:
        return int if self.is_whole else float

    def objection(self, value: Any) -> str:
        """What is wrong with `value`; "" if nothing is."""
        if value is None and self.may_be_none:
            return ""
        kind: type[Any] = Integral if self.is_whole else Real
        if not isinstance(value, bool) and isinstance(value, kind) and self._holds(value):
            return ""
        return f"must be {self}, not {value!r:.40}"

    def checked(self, value: Any) -> int | float | None:
        """Returns `value` as an `int`, a `float` or None.  Raises ValueError, with the objection."""
        if wrong := self.objection(value):
            raise ValueError(wrong)
        return None if value is None else self.kind(value)

    def _holds(self, value: Any) -> bool:
        if self.may_be_infinite and value == math.inf:
            return True
        within = self.least <= value <= self.most  # false for NaN
        return bool(within and (value == 0 or abs(value) >= self.smallest))

    def __str__(self) -> str:
        kind = "a whole number" if self.is_whole else "a number"
        return f"{kind} from {_written(self.least)} to {_written(self.most)}" + (" or inf" * self.may_be_infinite)


def _written(number: float) -> str:
    if isinstance(number, int):
        return "2^63 - 1" if number == INT64 else str(number)
    return f"{number:.15g}"


def whole(least: int, most: int = LARGEST) -> Range:
    return Range(least, most)


def real(least: float, most: float) -> Range:
    return Range(least, most, is_whole=False, smallest=SMALLEST)


def with_unit(text: str, units: Mapping[str, int]) -> Fraction | None:
    """Returns the number that a text such as 4k says; None for one without a unit of `units`."""
    found = _WITH_UNIT.fullmatch(text) if len(text) <= MOST_DIGITS else None
    return Fraction(found[1]) * units[found[2]] if found is not None and found[2] in units else None


@dataclass(frozen=True, slots=True)
class Setting:
    """The declaration of one field.

    `help` is a phrase that reads well in a list of options: no capital at its start, no period at its end, and not the
    default, which is added to it.
    """

    help: str
    unit: str = ""  # what a number counts, or what a value stands for: "tokens" makes `--max-model-len TOKENS`
    range: Range | None = None
    choices: tuple[str, ...] = ()
    otherwise: str = ""  # what the default means, where its value alone does not say it
    phase: str = START
    group: str = ""  # the heading of its option
    option: str | None = None  # its option's name; None: made from its own; "": the command line has none
    aliases: tuple[str, ...] = ()  # vLLM's names where they differ, and short options, as "-tp"
    read: Callable[[str], Any] | None = None  # makes a value of a text; raises ValueError: the message says what it is
    takes_many: bool = False  # one option may be followed by several values
    is_hidden: bool = False  # no list of options has it
    is_common: bool = False  # `--help` lists it first, and leaves the others to `--help all`
    name: str = ""  # by which callers know it, the field's unless given; filled in, like the rest, by `settings_of`
    type: str = ""  # of the field, as it is written
    default: Any = ...  # ...: a value must be given
    path: tuple[str, ...] = ()  # the fields that lead to it

    def objection(self, value: Any) -> str:
        """Returns what is wrong with `value`, to be read after the setting's name; "" if nothing is."""
        kinds = self.type.split(" | ")
        if value is None and self.may_be_none:
            return ""
        if self.choices:
            is_listed = isinstance(value, str) and value in (*self.choices, self.default)
            return "" if is_listed else f"must be one of {', '.join(self.choices)}, not {value!r:.40}"
        if self.range is not None:
            return self.range.objection(value)
        if "bool" in kinds:
            return "" if isinstance(value, bool) else f"must be true or false, not {value!r:.40}"
        if "str" in kinds:
            return "" if isinstance(value, str) else f"must be a text, not {value!r:.40}"
        return ""

    @property
    def may_be_none(self) -> bool:
        return "None" in self.type.split(" | ")

    @property
    def schema(self) -> dict[str, Any]:
        """The JSON schema of its values, without the default."""
        found: dict[str, Any] = {}
        if self.choices:
            found = {"type": "string", "enum": list(self.choices)}
        elif self.range is not None:
            found = {"type": "integer" if self.range.is_whole else "number", "minimum": self.range.least,
                     "maximum": self.range.most}
        elif "bool" in self.type:
            found = {"type": "boolean"}
        elif "str" in self.type:
            found = {"type": "string"}
        return {"anyOf": [found, {"type": "null"}]} if self.may_be_none else found


def setting(
    default: Any = ..., help: str = "", *, factory: Callable[[], Any] | None = None, is_secret: bool = False,
    **declared: Any,
) -> Any:
    """Returns a dataclass field that declares a setting.

    Args:
        default: its default; without one, and without a `factory`, the field is required.
        factory: makes the default, where that is an object.
        is_secret: no representation shows it.
        declared: the fields of `Setting`.
    """
    more: dict[str, Any] = {"metadata": {SETTING: Setting(help, **declared)}, "repr": not is_secret}
    if factory is not None:
        more["default_factory"] = factory
    elif default is not ...:
        more["default"] = default
    return dataclasses.field(**more)


def redeclared(owner: type[Any], name: str, default: Any, **changes: Any) -> Any:
    """Returns a keyword field with another default that is otherwise the setting `name` of `owner`, a base class."""
    (field,) = [one for one in dataclasses.fields(owner) if one.name == name]
    declared = dataclasses.replace(field.metadata[SETTING], **changes)
    return dataclasses.field(default=default, kw_only=True, metadata={SETTING: declared})


def nested(owner: type[Any]) -> Any:
    """Returns a field with the settings of another dataclass, which count as those of this one."""
    return dataclasses.field(default_factory=owner, metadata={NESTED: owner})


def settings_of(owner: type[Any]) -> Mapping[str, Setting]:
    """Returns the settings that a dataclass declares, by name, in the order of its fields."""
    return _settings_of(cast("Any", owner))  # a type is hashable; mypy does not see it


@cache
def _settings_of(owner: Any) -> Mapping[str, Setting]:
    found: dict[str, Setting] = {}
    for field in dataclasses.fields(owner):
        if (inner := field.metadata.get(NESTED)) is not None:
            found |= {name: dataclasses.replace(one, path=(field.name, *one.path))
                      for name, one in settings_of(inner).items()}
        elif (declared := field.metadata.get(SETTING)) is not None:
            default = field.default if field.default_factory is MISSING else field.default_factory()
            one = dataclasses.replace(
                declared, name=declared.name or field.name, type=str(field.type), path=(field.name,),
                default=... if default is MISSING else default)
            found[one.name] = one
    return found


def aliases_of(owner: type[Any]) -> dict[str, str]:
    """Returns the settings by vLLM's names for them, where those differ."""
    return {alias: name for name, declared in settings_of(owner).items()
            for alias in declared.aliases if not alias.startswith("-")}


def check_settings(values: Any) -> None:
    """Checks every setting of a dataclass' instance but the nested ones, which have checked themselves.

    Raises:
        ValueError: one line that begins with the name.
    """
    for name, declared in settings_of(type(values)).items():
        if len(declared.path) == 1 and (wrong := declared.objection(getattr(values, declared.path[0]))):
            raise ValueError(f"{name} {wrong}")


def values_of(values: Any) -> dict[str, Any]:
    """Returns the value of every setting of a dataclass' instance, by name."""
    return {name: reduce(getattr, declared.path, values) for name, declared in settings_of(type(values)).items()}


def make(owner: type[Owner], values: Mapping[str, Any]) -> Owner:
    """Returns an instance with these `values`, by name; nested settings are found in their place."""
    return owner(**_arguments(owner, values, {}))


def changed(before: Owner, values: Mapping[str, Any]) -> Owner:
    """Returns an instance with these `values`, by name, and else those of `before`."""
    return cast("Owner", dataclasses.replace(cast("Any", before), **_arguments(
        type(before), values, vars_of(before))))


def vars_of(values: Any) -> dict[str, Any]:
    """Returns the fields of a dataclass' instance, without copying their values."""
    return {field.name: getattr(values, field.name) for field in dataclasses.fields(values)}


def _arguments(owner: Any, values: Mapping[str, Any], before: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the arguments of the constructor that `values` stand for."""
    rest, arguments = dict(values), dict[str, Any]()
    for field in dataclasses.fields(owner):
        if (inner := field.metadata.get(NESTED)) is None:
            continue
        if given := {name: rest.pop(name) for name in settings_of(inner) if name in rest}:
            now = before.get(field.name)
            arguments[field.name] = make(inner, given) if now is None else changed(now, given)
    names = {declared.name: declared.path[0] for declared in settings_of(owner).values() if len(declared.path) == 1}
    return arguments | {names.get(name, name): value for name, value in rest.items()}


def json_object(text: str) -> dict[str, Any]:
    """Reads a setting that is a JSON object.  Raises ValueError."""
    try:
        value = json.loads(text) if len(text) <= MAX_JSON else None
    except (ValueError, RecursionError):
        value = None
    if not isinstance(value, dict):
        raise ValueError(f"must be a JSON object of at most {MAX_JSON} characters, not {text[:40]!r}")
    return value
