"""The parser of every command: an error is one line, and an unknown option is told the nearest one there is.

A command may have further sources of settings (`cli.layers`): what the command line leaves open comes from there, and
only what they leave open has its default.
"""

from __future__ import annotations

import argparse
import contextlib
import sys
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NoReturn

from slotwise.errors import one_line
from slotwise.neutral import nearest


class Parser(argparse.ArgumentParser):
    """Reports an error in a command in one line.  No option may be shortened: a new one would change its meaning."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**{"allow_abbrev": False} | options)

    fill: Callable[[Parser, argparse.Namespace], None] | None = None
    """Sets what `given` has left None, where another source has it."""

    keeps_rest = False
    """Whether arguments that are not known are kept, in order, as `rest`: another parser reads them."""

    _source = ""  # of what is being parsed, as errors begin

    def error(self, message: str) -> NoReturn:
        line = one_line(self._source + message)
        print(f"{self.prog}: {line} ({self.prog} --help tells what there is)", file=sys.stderr)
        sys.exit(2)

    def parse_known_args(self, args: Iterable[str] | None = None, namespace: Any = None) -> tuple[Any, list[str]]:
        """As argparse does, but nothing unknown is passed on, except as `rest`."""
        if self.fill is None:
            found, unknown = super().parse_known_args(args, namespace)
        else:
            found, unknown = self.given(args)
            self.fill(self, found)
            for action in self.settings():
                if getattr(found, action.dest) is None:
                    setattr(found, action.dest, action.default)
        if self.keeps_rest:
            found.rest, unknown = unknown, []
        if unknown:
            named = next((one for one in unknown if one.startswith("-")), "").partition("=")[0]
            near = nearest(named, self._option_string_actions)
            self.error(f"unrecognized arguments: {' '.join(unknown)}" + f"; did you mean {near}?" * bool(near))
        return found, unknown

    def given(self, args: Iterable[str] | None) -> tuple[argparse.Namespace, list[str]]:
        """Returns what these arguments say, None for every setting they leave open, and the unknown ones."""
        empty = argparse.Namespace(**{action.dest: None for action in self.settings()})
        return super().parse_known_args(args, empty)

    def settings(self) -> list[argparse.Action]:
        """Returns the arguments that have a value, which --help has not."""
        return [action for action in self._actions if action.default != argparse.SUPPRESS]

    def option(self, name: str) -> argparse.Action | None:
        """Returns the option of this exact name, dashes included."""
        return self._option_string_actions.get(name)

    def near(self, name: str) -> str:
        """Returns the option whose name is nearest to `name`, "" where none is near."""
        return nearest(name, self._option_string_actions)

    @contextlib.contextmanager
    def reading(self, source: str) -> Iterator[None]:
        """Errors within this context begin with `source`."""
        self._source = f"{source}: "
        try:
            yield
        finally:
            self._source = ""
