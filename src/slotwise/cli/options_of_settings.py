"""Options made of declared settings, the numbers that they read, and what several commands share."""

from __future__ import annotations

import argparse
import math
import re
from collections.abc import Callable, Collection, Mapping
from typing import Any, TypeAlias

from slotwise.cli.parser import Parser, mark_common
from slotwise.compat.vllm import FLAGS
from slotwise.core.scheduler_limits import ADAPTERS
from slotwise.core.setting_fields import (
    BYTE_UNITS,
    LIVE,
    MOST_DIGITS,
    UNITS,
    Range,
    Setting,
    settings_of,
    whole,
    with_unit,
)
from slotwise.engine.config import RETIRED, SAMPLING, TRANSFERS, EngineConfig, ModelOptions
from slotwise.platform.files import existing_file

MODEL_HELP = f"{settings_of(EngineConfig)['model'].help} (default: the built-in model)"
SERVED = (ADAPTERS, TRANSFERS, SAMPLING)  # headings of an engine's options that only some commands have
GIB = 2**30  # bytes

Commands: TypeAlias = "argparse._SubParsersAction[Parser]"
Run = Callable[[argparse.Namespace], int]
"""Runs a command and returns its exit status."""

_NAMED = re.compile(r"\{(\w+)\}")


class Number:
    """An argparse type: a number in ASCII digits, within a range."""

    hint = ""  # further ways to write it, behind the range

    def __init__(self, range_: Range, words: dict[str, float] | None = None) -> None:
        """Args: words: texts that stand for numbers, in the range or not."""
        self.range = range_
        self.words = words or {}

    def __call__(self, text: str) -> float:
        if text in self.words:
            return self.words[text]
        number = self._number(text)
        if self.range.objection(number):
            either = "".join(f"{word} or " for word in self.words)
            raise argparse.ArgumentTypeError(f"must be {either}{self.range}{self.hint}, not {text!r:.40}")
        return number

    def _number(self, text: str) -> float:
        """Returns the number that `text` says; NaN, which is in no range, for any other text."""
        try:
            if not text.isascii() or "_" in text or text != text.strip() or len(text) > MOST_DIGITS:
                raise ValueError
            return int(text) if self.range.is_whole else float(text)
        except ValueError:
            return math.nan


class Size(Number):
    """A number of tokens, also with one of vLLM's units: 4k is 4,000, 4K is 4,096."""

    hint = ", also as 4k or 4K"
    units = UNITS
    one = 1  # what a number without a unit counts

    def _number(self, text: str) -> float:
        counted = with_unit(text, self.units)
        if counted is None:
            return super()._number(text)
        number = counted / self.one
        if not self.range.is_whole:
            return float(number)
        return int(number) if number.denominator == 1 else math.nan


class Bytes(Size):
    """A number of bytes, also as 8GiB (binary) or 8GB (decimal)."""

    hint = ", also as 512MiB or 8GB"
    units = BYTE_UNITS


class Gibibytes(Bytes):
    """A number of GiB; with a unit, of bytes."""

    one = GIB


NUMBERS: dict[str, type[Number]] = {"tokens": Size, "bytes": Bytes, "GiB": Gibibytes}  # by unit


def option_of(name: str) -> str:
    """Returns the option of a setting."""
    return "--" + name.replace("_", "-")


def reader(read: Callable[[str], Any]) -> Callable[[str], Any]:
    """Returns the argparse type of texts that `read` reads; its ValueErrors become the parser's."""
    def typed(text: str) -> Any:
        try:
            return read(text)
        except ValueError as error:
            raise argparse.ArgumentTypeError(str(error)) from None

    return typed


input_file = reader(existing_file)


def add_command(commands: Commands, name: str, summary: str, run: Run) -> Parser:
    command = commands.add_parser(name, help=summary, description=summary[0].upper() + summary[1:] + ".")
    command.set_defaults(run=run)
    return command


def add_settings(
    command: argparse.ArgumentParser, owner: type[Any], heading: str, names: Collection[str] | None = None,
    notes: Mapping[str, str] = {},
) -> None:
    """Adds an option for each setting that `owner` declares.

    Args:
        heading: of settings without a group of their own.
        names: of the settings to add; None: all.
        notes: text behind the help of some settings, by name.
    """
    for name, declared in settings_of(owner).items():
        if declared.option != "" and (names is None or name in names):
            group = group_of(command, declared.group or ("scheduling" if declared.phase == LIVE else heading))
            others = [alias if alias.startswith("-") else option_of(alias) for alias in declared.aliases]
            action = group.add_argument(declared.option or option_of(name), *others, **_options(declared))
            action.help = argparse.SUPPRESS if declared.is_hidden else help_of(declared, notes.get(name, ""))
            if declared.is_common:
                mark_common(action)


def group_of(command: argparse.ArgumentParser, title: str) -> argparse._ArgumentGroup:
    """Returns the options below a heading, a new one if the command has none."""
    found = next((one for one in command._action_groups if one.title == title), None)
    return command.add_argument_group(title) if found is None else found


def _options(declared: Setting) -> dict[str, Any]:
    """Returns the arguments with which argparse makes the option of a setting."""
    kinds, default = declared.type.split(" | "), declared.default
    default = list(default) if isinstance(default, tuple) else default
    options: dict[str, Any] = {"dest": declared.name, "default": default}
    if "bool" in kinds:
        return options | {"action": argparse.BooleanOptionalAction}
    if declared.choices:
        options["choices"] = declared.choices
    if declared.unit or not declared.choices:
        options["metavar"] = declared.unit.upper() or ("N" if declared.range else declared.name.upper())
    if declared.read is not None:
        options["type"] = reader(declared.read)
        options["default"] = None if default == "" else default  # argparse reads a text as if it were typed
    elif declared.range is not None:
        options["type"] = NUMBERS.get(declared.unit, Number)(declared.range)
    if declared.type.startswith("tuple"):
        options |= {"action": "extend"} | ({"nargs": "+"} if declared.takes_many else {})
    return options


def help_of(declared: Setting, note: str = "") -> str:
    """Returns the help of an option, as argparse takes it: with its default."""
    default = declared.otherwise or _shown(declared.default)
    text = declared.help + note + f" (default: {default})" * bool(default)
    return _NAMED.sub(lambda found: option_of(found[1]), text).replace("%", "%%")


def _shown(default: Any) -> str:
    """Returns a default as text; "" where its help says all."""
    if isinstance(default, bool):
        return "on" if default else "off"
    return f"{default:g}" if isinstance(default, float) else str(default) if isinstance(default, int | str) else ""


def add_engine_options(command: argparse.ArgumentParser, names: Collection[str] | None = None) -> None:
    """Adds the options of an engine that every command with an engine has, or those of these `names`."""
    shared = [name for name, one in settings_of(EngineConfig).items() if one.group not in SERVED]
    add_settings(command, EngineConfig, "engine", shared if names is None else names)
    for name in RETIRED if names is None else ():
        command.add_argument(option_of(name), type=Number(whole(0)), default=0, help=argparse.SUPPRESS)


def add_generation_options(command: argparse.ArgumentParser, bound: str = "") -> None:
    """Adds what says where parameters of sampling come from that a request leaves out.

    Args:
        bound: what `max_new_tokens` does besides being a default, where it comes from one of these options.
    """
    names = ("generation_config", "override_generation_config")
    for owner in (EngineConfig, ModelOptions):
        add_settings(command, owner, SAMPLING, names, dict.fromkeys(names, bound))


def add_overwrite_option(command: argparse.ArgumentParser) -> None:
    """Adds the companion of `--event-log` to a command that writes one."""
    from slotwise.api.limits.server_settings import ServerSettings

    add_settings(command, ServerSettings, "event log", ("overwrite_event_log",))


def given_settings(asked: argparse.Namespace, owner: type[Any]) -> dict[str, Any]:
    """Returns the values of the options that the command has of these settings, by name."""
    declared = {name: one for name, one in settings_of(owner).items() if one.option != "" and hasattr(asked, name)}
    values = {name: one.default if (value := getattr(asked, name)) is None else value for name, one in declared.items()}
    return {name: tuple(value) if isinstance(value, list) else value for name, value in values.items()}


def engine_settings(asked: argparse.Namespace) -> dict[str, Any]:
    """Returns the engine's options, by the names of `EngineConfig`."""
    return given_settings(asked, EngineConfig) | {name: getattr(asked, name) for name in RETIRED}


def add_vllm_flags(command: argparse.ArgumentParser) -> None:
    """Add the flags; --help does not list them."""
    for flag in FLAGS:
        if flag.is_switch:
            command.add_argument(*flag.names, action=argparse.BooleanOptionalAction, help=argparse.SUPPRESS)
        else:
            command.add_argument(*flag.names, help=argparse.SUPPRESS)
