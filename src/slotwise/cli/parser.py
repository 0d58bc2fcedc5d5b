"""The parser of every command, its help, and where the settings of `slotwise serve` come from.

An error is one line that names a setting as its caller has typed it, and an unknown option is told the nearest one.

`--help` of a command with many options shows the common ones; `--help all` shows all, and `--help GROUP` one group.

    command line  >  environment (SLOTWISE_MAX_NUM_SEQS)  >  file of --config  >  default

A setting that a layer has is not looked for in the layers to its right, so lists are replaced and never joined.  The
same option reads the text of every layer, with the same range and the same errors.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import re
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NoReturn

from slotwise.errors import nearest, one_line
from slotwise.platform.child import SECRETS
from slotwise.platform.files import read_regular

if TYPE_CHECKING:
    import yaml

IS_COMMON = "is_common"  # an attribute of an argument
ALL = "all"
COMMON_OPTIONS = "common options"  # a heading


def mark_common(*arguments: argparse.Action) -> None:
    """`--help` shows these arguments, and leaves those without a mark to `--help all`."""
    for argument in arguments:
        setattr(argument, IS_COMMON, True)


class _Help(argparse._HelpAction):
    """Prints the help, or the part of it that a topic names."""

    def __init__(self) -> None:
        super().__init__(["-h", "--help"], help="show this help; all: every option; GROUP: the options of a group")
        self.nargs, self.metavar = "?", "all|GROUP"

    def __call__(
        self, parser: argparse.ArgumentParser, namespace: argparse.Namespace, values: Any,
        option_string: str | None = None,
    ) -> None:
        assert isinstance(parser, Parser)
        sys.stdout.write(parser.help_on(values or ""))
        parser.exit()


class Parser(argparse.ArgumentParser):
    """Reports an error in a command in one line.  No option may be shortened: a new one would change its meaning."""

    def __init__(self, *, add_help: bool = True, **options: Any) -> None:
        super().__init__(**{"allow_abbrev": False, "add_help": False} | options)
        if add_help:
            self._optionals._add_action(_Help())
        self.typed: dict[str, str] = {}
        """How each setting that was given is named where it stands: an option, a variable, or a key of the file."""
        self._source = self._named = ""  # the file that is being read, and the setting in it

    fill: Callable[[Parser, argparse.Namespace], None] | None = None
    """Sets what `given` has left None, where another source has it."""

    collects = ""
    """The list that gets further arguments behind options, "" for none: argparse leaves them over."""

    keeps_rest = False
    """Whether arguments that are not known are kept, in order, as `rest`: another parser reads them."""

    def help_on(self, topic: str) -> str:
        """Returns the help on a topic: "" for the common arguments, `ALL`, or a group, with hyphens for its spaces.

        A command without common arguments has all of them in its help.  Exits where there is no such topic.
        """
        shown = [one for one in self._actions if one.help != argparse.SUPPRESS]
        common = [one for one in shown if getattr(one, IS_COMMON, False)]
        if topic == ALL or (not topic and not common):
            return self.format_help()
        groups = {topic_of(one.title): one for one in self._action_groups if one.title and [
            action for action in one._group_actions if action in shown and action.option_strings]}
        if topic and topic not in groups:
            self.error(f"--help: there is no group {topic!r}; there are {', '.join((ALL, *groups))}")
        formatter = self._get_formatter()
        if topic:
            self._add_section(formatter, groups[topic].title, groups[topic]._group_actions)
            return formatter.format_help()
        positional = [one for one in common if not one.option_strings]
        formatter.add_usage(self.usage or " ".join([
            "%(prog)s", *(f"[{one.metavar}{' ...' * (one.nargs == '*')}]" for one in positional), "[options]"]), [], [])
        formatter.add_text(self.description)
        self._add_section(formatter, "arguments", positional)
        self._add_section(formatter, COMMON_OPTIONS, [one for one in common if one.option_strings])
        formatter.add_text(self.epilog)
        names = [name for name, group in groups.items() if any(
            one in shown and one not in common and not isinstance(one, _Help) for one in group._group_actions)]
        formatter.add_text(f"{len(shown) - len(common) - 1} more options: --help {ALL}, or --help with one of the "
                           f"groups {', '.join(names)}")
        return formatter.format_help()

    @staticmethod
    def _add_section(
        formatter: argparse.HelpFormatter, title: str | None, arguments: Iterable[argparse.Action],
    ) -> None:
        formatter.start_section(title)
        formatter.add_arguments(arguments)
        formatter.end_section()

    def error(self, message: str) -> NoReturn:
        """Ends the process.  A message about one option names it as its caller has typed it."""
        if (found := _ARGUMENT.match(message)) is not None:
            action = self._option_string_actions.get(found[1].partition("/")[0])
            typed = self.typed.get(action.dest if action is not None else "", found[1])
            message = f"{self._named or f'argument {typed}'}: {message[found.end():]}"
        line = one_line(self._source + message)
        print(f"{self.prog}: {line} (see {self.prog} --help)", file=sys.stderr)
        sys.exit(2)

    def parse_known_args(self, args: Iterable[str] | None = None, namespace: Any = None) -> tuple[Any, list[str]]:
        """As argparse does, but nothing unknown is passed on, except as `rest`."""
        args = sys.argv[1:] if args is None else list(args)
        self.typed = self._typed(args)
        if self.fill is None:
            found, unknown = super().parse_known_args(args, namespace)
        else:
            found, unknown = self.given(args)
            self.fill(self, found)
            for action in self.settings():
                if getattr(found, action.dest) is None:
                    setattr(found, action.dest, action.default)
        found.typed = {**getattr(found, "typed", {}), **self.typed}
        if self.collects:
            getattr(found, self.collects).extend(one for one in unknown if not one.startswith("-"))
            unknown = [one for one in unknown if one.startswith("-")]
        if self.keeps_rest:
            found.rest, unknown = unknown, []
        if unknown:
            named = next((one for one in unknown if one.startswith("-")), "").partition("=")[0]
            near = nearest(named, self._option_string_actions)
            self.error(f"unrecognized arguments: {' '.join(unknown)}" + f"; did you mean {near}?" * bool(near))
        return found, unknown

    def _typed(self, args: Iterable[str]) -> dict[str, str]:
        """Returns how the options among `args` are written, by setting."""
        names = [one.partition("=")[0] for one in args]
        return {action.dest: name for name in names if (action := self._option_string_actions.get(name)) is not None}

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
    def reading(self, source: str, named: str = "") -> Iterator[None]:
        """Errors within this context begin with the file `source`, and call a setting as it is `named` there."""
        before = self._source, self._named
        self._source, self._named = f"{source}: " if source else "", named
        try:
            yield
        finally:
            self._source, self._named = before


def topic_of(title: str) -> str:
    """Returns how `--help` calls the group of this title."""
    return title.lower().replace(" ", "-")


_ARGUMENT = re.compile(r"argument (\S+): ")  # how argparse begins an error about an option
PREFIX = "SLOTWISE_"
CONFIG = "config"
MOST = 1 << 20  # bytes of a file
BOOLEANS = {"true": True, "yes": True, "on": True, "1": True, "false": False, "no": False, "off": False, "0": False}


def fill(parser: Parser, found: argparse.Namespace) -> None:
    """Adds to `found` what the environment and the file have of the settings that the command line leaves open."""
    if found.model is None:
        found.model = found.model_tag
    environment = of_environment(parser, os.environ)
    path = found.config or environment.get(CONFIG)
    file = of_file(parser, path) if path else {}
    for name in SECRETS:
        if name in os.environ:  # `cli.serve_command` reads them, so the file's would be in the way
            file.pop(name.removeprefix(PREFIX).lower(), None)
    for dest, value in (file | environment).items():
        if getattr(found, dest) is None:
            setattr(found, dest, value)


def of_environment(parser: Parser, environment: Mapping[str, str]) -> dict[str, Any]:
    """Returns the settings in variables of the environment, but for the secrets.  Exits where one is not valid."""
    found = {}
    for action in parser.settings():
        name = PREFIX + action.dest.upper()
        text = environment.get(name)
        if text is None or name in SECRETS or not action.option_strings or _is_of_kubernetes(name, text):
            continue
        parser.typed.setdefault(action.dest, name)
        with parser.reading("", name):
            found[action.dest] = _value(parser, action, _listed(text) if _is_list(action) else [text])
    return found


def of_file(parser: Parser, path: str) -> dict[str, Any]:
    """Returns the settings in a YAML file, whose keys are options without their dashes.  Exits where it is not valid.

    Values stay the texts that the file has, as the command line would have them: 08, no and 1e3 are no surprise.
    """
    import yaml

    found: dict[str, Any] = {}
    with parser.reading(path):
        try:
            root = yaml.compose(read_regular(path, MOST).decode(), Loader=yaml.SafeLoader)
        except OSError as error:  # its own text repeats the path
            parser.error(error.strerror or str(error))
        except (UnicodeDecodeError, yaml.YAMLError, RecursionError) as error:
            parser.error(str(error) or type(error).__name__)
        if root is None:  # an empty file
            return found
        if not isinstance(root, yaml.MappingNode):
            parser.error("must hold options and their values, as in `max-num-seqs: 16`")
        for key, value in root.value:
            named = key.value if isinstance(key, yaml.ScalarNode) else "?"
            name = "--" + named.replace("_", "-")
            action = parser.option(name)
            if action is None or action not in parser.settings() or action.dest == CONFIG:
                near = parser.near(name)
                parser.error(f"there is no option {name[2:]!r}" + f"; did you mean {near[2:]!r}?" * bool(near))
            if action.dest in found:
                parser.error(f"{named} is there twice")
            parser.typed.setdefault(action.dest, named)
            with parser.reading(path, named):
                found[action.dest] = _value(parser, action, _texts(parser, named, value), name)
    return found


def _texts(parser: Parser, named: str, value: yaml.Node) -> list[str]:
    """Returns the texts of a scalar or a list of scalars."""
    import yaml

    nodes = value.value if isinstance(value, yaml.SequenceNode) else [value]
    for node in nodes:
        if not isinstance(node, yaml.ScalarNode):
            parser.error(f"{named}: must be a value or a list of values; an object is written as JSON, in quotes")
        if node.tag == "tag:yaml.org,2002:null":
            parser.error(f"{named}: it has no value: give it one, or leave it out")
    return [node.value for node in nodes]


def _value(parser: Parser, action: argparse.Action, texts: Sequence[str], name: str = "") -> Any:
    """Returns what an option makes of `texts`.  Exits, as the parser does, where it refuses them.

    Args:
        name: by which the option was called; "": its first.
    """
    name = name or action.option_strings[0]
    if not texts or not all(map(str.strip, texts)):
        parser.error(f"argument {name}: it is set, but empty: give it a value, or leave it out")
    if len(texts) > 1 and not _is_list(action):
        parser.error(f"argument {name}: takes one value, not {len(texts)}")
    if action.nargs == 0:
        value = BOOLEANS.get(texts[0].lower())
        if value is None:
            parser.error(f"argument {name}: must be true or false, not {texts[0]!r:.40}")
        return value != (name.startswith("--no-") and isinstance(action, argparse.BooleanOptionalAction))
    found, _ = parser.given([f"{name}={text}" for text in texts])
    return getattr(found, action.dest)


def _is_list(action: argparse.Action) -> bool:
    """True if the option may be repeated."""
    return isinstance(action, argparse._AppendAction)


def _listed(text: str) -> list[str]:
    """Returns the values of a JSON list of texts; of any other text, itself alone."""
    try:
        values = json.loads(text)
    except (ValueError, RecursionError):
        return [text]
    return values if isinstance(values, list) and all(isinstance(value, str) for value in values) else [text]


def _is_of_kubernetes(name: str, text: str) -> bool:
    """True for SLOTWISE_PORT=tcp://10.0.0.1:80, which Kubernetes sets for a service with the name `slotwise`."""
    return name == "SLOTWISE_PORT" and "://" in text
