"""Command lines and progress bars of benchmarks; `python -m benchmarks.PACKAGE COMMAND ...` runs a module of it."""

from __future__ import annotations

import argparse
import ast
import importlib
import sys
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import TypeVar

from tqdm import tqdm

Item = TypeVar("Item")


class _Help(argparse.RawDescriptionHelpFormatter, argparse.ArgumentDefaultsHelpFormatter):
    """The description as it is written, and the default of each option behind its help, where it says something."""

    def _get_help_string(self, action: argparse.Action) -> str | None:
        return action.help if action.default in (None, False, "") else super()._get_help_string(action)


def parser_of(description: str | None) -> argparse.ArgumentParser:
    """Returns a parser whose help is a module's docstring, with the default of every option."""
    return argparse.ArgumentParser(description=description, formatter_class=_Help)


def bar(items: Iterable[Item], label: str) -> Iterator[Item]:
    """Yields `items` under a progress bar on stderr, which is gone at the end; without a terminal there is none."""
    yield from tqdm(list(items), desc=label, leave=False, disable=None)


def run(package: str, description: str, commands: Sequence[str]) -> None:
    """Runs the command that the command line names; `--help` shows the first line of each command's docstring."""
    folder = Path(__file__).parent / package
    lines = {name: _first_line(folder / f"{name}.py") for name in commands}
    parser = argparse.ArgumentParser(
        prog=f"python -m benchmarks.{package}", formatter_class=argparse.RawDescriptionHelpFormatter,
        description="\n".join([description.strip(), "", *(f"  {name:<20}{line}" for name, line in lines.items())]),
        epilog="COMMAND --help shows what a command takes.")
    parser.add_argument("command", choices=commands, metavar="COMMAND")
    parser.add_argument("arguments", nargs=argparse.REMAINDER, metavar="...")
    asked = parser.parse_args()
    sys.argv = [f"python -m benchmarks.{package} {asked.command}", *asked.arguments]
    importlib.import_module(f"benchmarks.{package}.{asked.command}").main()


def _first_line(path: Path) -> str:
    return (ast.get_docstring(ast.parse(path.read_text())) or "").partition("\n")[0]
