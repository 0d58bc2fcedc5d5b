"""The command line: one module for each family of commands."""

from __future__ import annotations

from slotwise.platform import child

IS_COMMAND = child.leave_current_folder()  # `python -m` has put it before the standard library

# ruff: noqa: E402
from slotwise.cli import process
from slotwise.version import __version__

if IS_COMMAND:
    process.open_missing()
    process.end_at_once()  # while the rest is imported

import argparse
import importlib
import os
import re
import resource
import sys
from collections.abc import Mapping, Sequence
from functools import partial

from slotwise.cli.parser import Parser
from slotwise.compute.kernels.lazy_imports import spare_torch
from slotwise.errors import OneLineError, described, one_line
from slotwise.observe import lines

MODULES = {
    "serve": "serve_command", "generate": "generate_and_chat", "chat": "generate_and_chat", "bench": "bench",
    "compare": "bench", "top": "top", "timeline": "event_logs", "explain": "event_logs", "replay": "event_logs",
    "completion": "completion", "simulate": "simulations", "what-if": "simulations", "capacity": "simulations",
    "tune": "simulations", "scale": "scale", "pull": "pull",
    "doctor": "doctor",
}
SETTING = re.compile(r"(?<![\w./'\"`-])[a-z]+(?:_[a-z]+)+(?![\w./'\"`=])|^(?!model\b)[a-z]+(?= )")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command; a failure is one line on stderr and an exit status of 1."""
    arguments = sys.argv[1:] if arguments is None else arguments
    parser = build_parser(arguments[0] if arguments else "")
    if arguments[:1] == ["bench"]:
        arguments = importlib.import_module(f"{__name__}.bench").with_benchmark(arguments)
    asked = parser.parse_args(arguments)
    if asked.command is None:
        parser.print_help()
        return 2
    process.ignore_numba_file()
    if IS_COMMAND:
        spare_torch()
    process.raise_again()
    try:
        status: int = asked.run(asked)
        if IS_COMMAND:
            process.end(status)
    except KeyboardInterrupt:
        form = partial(lines.final, getattr(asked, "log_format", lines.TEXT))
        print(process.interruption(f" {asked.command}", sys.stderr.isatty(), form), file=sys.stderr)
        status = process.INTERRUPTED
    except BrokenPipeError:  # the reader of our output has closed it
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        status = 0
    except (ValueError, OSError, MemoryError, RuntimeError, OneLineError) as error:
        names = {name: asked.typed.get(name, "--" + name.replace("_", "-")) for name in vars(asked)}
        said = f"slotwise {asked.command}: {one_line(as_typed(described(error), names))}{memory_limit()}"
        print(lines.final(getattr(asked, "log_format", lines.TEXT), said), file=sys.stderr)
        status = 1
    if IS_COMMAND:
        process.leave(status)
    return status


def memory_limit() -> str:
    """A hint where `ulimit -v` is set: beyond it libraries fail in ways that do not name memory."""
    limit, _ = resource.getrlimit(resource.RLIMIT_AS)
    return "" if limit == resource.RLIM_INFINITY else (
        f" (`ulimit -v` leaves this process {limit >> 20:,} MiB of address space: raise it if that may be why)")


def as_typed(message: str, names: Mapping[str, str]) -> str:
    """Returns a message with settings as their caller has typed them, such as `--kv-cache-memory` or a file's key.

    The same messages answer the offline API and the admin's, whose arguments have the settings' own names.  A name of
    one word is a setting only where the message begins with it.

    Args:
        names: how the settings are typed, by name.
    """
    return SETTING.sub(lambda found: names.get(found[0], found[0]), message)


def build_parser(command: str) -> argparse.ArgumentParser:
    """The parser; only with `command`'s options if that is a command: a server needs no benchmarks."""
    parser = Parser(
        prog="slotwise", description="Serve language models with continuous batching.",
        epilog="`slotwise COMMAND --help` explains each command.")
    parser.add_argument("--version", action="version", version=f"slotwise {__version__}")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", title="commands")
    for module in [MODULES[command]] if command in MODULES else dict.fromkeys(MODULES.values()):
        importlib.import_module(f"{__name__}.{module}").add(commands)
    return parser
