"""What a user may name: options, commands, routes and fields, for pages that speak of them."""

from __future__ import annotations

import argparse
from functools import cache

import msgspec
from docs.generate import http

from slotwise.api.protocol.protocol import ChatRequest, CompletionRequest
from slotwise.cli import MODULES, build_parser


@cache
def all_options() -> dict[str, argparse.Action]:
    """The options of `slotwise serve`, by every name of each."""
    (commands,) = [action for action in build_parser("serve")._actions
                   if isinstance(action, argparse._SubParsersAction)]
    return {name: action for action in commands.choices["serve"]._actions for name in action.option_strings}


def serve_options() -> list[str]:
    """Names of the options of `slotwise serve` that its help shows."""
    return [name for name, action in all_options().items() if action.help != argparse.SUPPRESS]


def is_accepted(name: str) -> bool:
    """Whether `slotwise serve` accepts an option that its help does not show, and that changes nothing."""
    return name in all_options() and name not in serve_options()


def routes() -> list[str]:
    """Paths of all routes, each once, as pages show them."""
    return list(dict.fromkeys(path.replace(":path}", "}") for _, path, _ in http.ROUTES))


def fields(kind: type) -> tuple[list[str], list[str]]:
    """The fields of a body that are taken, and those that are refused."""
    refused = http.unsupported_fields(kind)
    names = [field.encode_name for field in msgspec.structs.fields(kind)]
    return [name for name in names if name not in refused], [name for name in names if name in refused]


def has(name: str) -> bool:
    """Whether Slotwise has an option, a route, a command or a field of this name.

    Names are written as users write them: `--port`, `/health`, `slotwise chat`, and `max_tokens`.
    """
    if name.startswith("--"):
        return name in serve_options()
    if name.startswith("/"):
        return name in routes()
    if name.startswith("slotwise "):
        return name.split()[1] in MODULES
    return any(name in fields(kind)[0] for kind in (CompletionRequest, ChatRequest))
