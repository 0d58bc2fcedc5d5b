"""slotwise completion: what a shell needs to complete commands and options."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping

from slotwise.cli.options_of_settings import Commands, add_command, input_file

SHELLS = ("bash", "zsh", "fish")


def add(commands: Commands) -> None:
    completion = add_command(commands, "completion", "print a script with which a shell completes commands", run)
    completion.add_argument("shell", choices=SHELLS, help="to be read at the shell's start, as by `eval \"$(slotwise "
                            "completion bash)\"`")


def run(asked: argparse.Namespace) -> int:
    import shtab

    from slotwise.cli import build_parser

    parser = build_parser("")
    _complete_files(parser, shtab.FILE)
    sys.stdout.write(shtab.complete(parser, asked.shell))
    return 0


def _complete_files(parser: argparse.ArgumentParser, files: Mapping[str, object]) -> None:
    """Marks the arguments that name a file."""
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for command in action.choices.values():
                _complete_files(command, files)
        elif action.type is input_file or action.metavar == "FILE":
            action.complete = files  # type: ignore[attr-defined]
