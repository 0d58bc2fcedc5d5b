"""Where the settings of `slotwise serve` come from.

    command line  >  environment (SLOTWISE_MAX_NUM_SEQS)  >  file of --config  >  default

A setting that a layer has is not looked for in the layers to its right, so lists are replaced and never joined.  The
same option reads the text of every layer, with the same range and the same errors.
"""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from slotwise.child import SECRETS
from slotwise.cli.parser import Parser
from slotwise.files import read_regular

if TYPE_CHECKING:
    import yaml

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
        if name in os.environ:  # `cli.serve` reads them, so the file's would be in the way
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
        with parser.reading(name):
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
            name = "--" + (key.value if isinstance(key, yaml.ScalarNode) else "?").replace("_", "-")
            action = parser.option(name)
            if action is None or action not in parser.settings() or action.dest == CONFIG:
                near = parser.near(name)
                parser.error(f"there is no option {name[2:]!r}" + f"; did you mean {near[2:]!r}?" * bool(near))
            if action.dest in found:
                parser.error(f"{name[2:]} is there twice")
            found[action.dest] = _value(parser, action, _texts(parser, name, value), name)
    return found


def _texts(parser: Parser, name: str, value: yaml.Node) -> list[str]:
    """Returns the texts of a scalar or a list of scalars."""
    import yaml

    nodes = value.value if isinstance(value, yaml.SequenceNode) else [value]
    for node in nodes:
        if not isinstance(node, yaml.ScalarNode):
            parser.error(f"{name[2:]}: must be a value or a list of values; an object is written as JSON, in quotes")
        if node.tag == "tag:yaml.org,2002:null":
            parser.error(f"{name[2:]}: it has no value: give it one, or leave it out")
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
