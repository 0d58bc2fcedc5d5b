"""The sub-commands and their options, from the argument parser."""

from __future__ import annotations

import argparse
import re
from collections.abc import Collection, Iterable, Iterator
from typing import NamedTuple

from docs.generate.markdown import code, listed, number, sentence, table

from slotwise.cli import build_parser
from slotwise.cli.options_of_settings import Number
from slotwise.compat.vllm import FLAGS

Row = tuple[str, str]
UNBOUNDED = 1 << 31  # greater limits only keep numbers representable
ARGUMENTS, ARGUMENT = "positional arguments", "argument"
TITLES = {ARGUMENTS: "arguments", "options": "options"}


class Described(NamedTuple):
    """A group of options whose table an earlier command has."""

    anchor: str
    rows: dict[str, str]  # by option


def commands() -> str:
    """Returns a section for each command; of a group that an earlier command has, only what differs."""
    described: dict[str, Described] = {}  # by title
    return "\n\n".join(_section(name, parser, described) for name, parser in _parsers(build_parser("")))


def vllm_flags() -> str:
    """Returns the table of vLLM's flags that change nothing here."""
    rows = []
    for flag in FLAGS:
        names = ", ".join(map(code, flag.names))
        rows.append((names, f"{listed(flag.fits)}." if flag.fits else "Any.", sentence(flag.meaning)))
    return table(("flag", "accepted values", "meaning here"), rows)


def _parsers(parser: argparse.ArgumentParser, prefix: str = "") -> Iterator[tuple[str, argparse.ArgumentParser]]:
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for name, command in action.choices.items():
                yield from list(_parsers(command, f"{prefix}{name} ")) or [(prefix + name, command)]


def _section(name: str, parser: argparse.ArgumentParser, described: dict[str, Described]) -> str:
    parts = [f"## {name}", parser.description or ""]
    for group in parser._action_groups:
        rows = dict(_row(action) for action in group._group_actions
                    if action.help != argparse.SUPPRESS and not isinstance(action, argparse._HelpAction))
        title = group.title or ""
        if title in described:
            text, rows = _difference(title, described[title], rows)
            parts.append(text)
        if rows:
            heading = f"{name}: {TITLES.get(title, title)}"
            parts += [f"### {heading}", table((ARGUMENT if title == ARGUMENTS else "option", "meaning"), rows.items())]
            if title not in TITLES and title not in described:
                described[title] = Described(heading.replace(": ", "-").replace(" ", "-"), rows)
    return "\n\n".join(filter(None, parts))


def _difference(title: str, described: Described, rows: dict[str, str]) -> tuple[str, dict[str, str]]:
    """Returns a sentence about the options of a group that is described already, and the rows that differ."""
    new = {option: meaning for option, meaning in rows.items() if described.rows.get(option) != meaning}
    link = f"[{title} options](#{described.anchor})"
    same, absent = rows.keys() - new.keys(), described.rows.keys() - rows.keys()
    if not same:
        return "", new
    if len(absent) > len(same):
        return f"Of the {link} these apply: {_names(rows, same)}.", new
    without = f", except {_names(described.rows, absent)}" * bool(absent)
    return f"The {link} apply{without}" + (", with these differences:" if new else "."), new


def _names(options: Iterable[str], chosen: Collection[str]) -> str:
    """Returns the names of the `chosen` options, in the order of `options`."""
    return ", ".join(code(re.split("[ ,`]", option)[1]) for option in options if option in chosen)


def _row(action: argparse.Action) -> Row:
    value = action.metavar if isinstance(action.metavar, str) else action.dest.upper()
    if not action.option_strings:
        return code(value), _meaning(action)
    takes_value = action.nargs != 0 and not action.choices
    return code(", ".join(action.option_strings) + (f" {value}" if takes_value else "")), _meaning(action)


def _meaning(action: argparse.Action) -> str:
    text = sentence((action.help or "") % vars(action))
    if action.choices and action.option_strings:
        text += f" One of {listed(action.choices)}."
    if isinstance(action.type, Number):
        text += f" {sentence(_range(action.type))}"
    return text


def _range(option: Number) -> str:
    """Returns the numbers that an option takes."""
    allowed = option.range
    kind = "a whole number" if allowed.is_whole else "a number"
    least, most = number(allowed.least), number(allowed.most)
    if allowed.most >= UNBOUNDED:
        return (kind if allowed.least <= -UNBOUNDED else f"{kind} of at least {least}") + option.hint
    return f"{kind} from {least} to {most}" + " or inf" * allowed.may_be_infinite + option.hint
