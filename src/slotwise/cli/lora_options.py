"""Options of `slotwise serve` about LoRA adapters, with vLLM's names."""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Sequence
from dataclasses import fields
from typing import TYPE_CHECKING, Any

from slotwise.cli.numbers import Number
from slotwise.engine.config import ENGINE, EngineConfig
from slotwise.errors import printable

if TYPE_CHECKING:
    from slotwise.server.settings import LoraModule

KEYS = ("name", "path", "base_model_name")  # of a module given as JSON
FORM = 'must be NAME=PATH, or {"name": NAME, "path": PATH, "base_model_name": NAME} as JSON'
DEFAULTS = {field.name: field.default for field in fields(EngineConfig)}
NUMBERS = {
    "max_loras": "adapters among the rows of one step; a request beyond them waits",
    "max_lora_rank": "the largest rank of an adapter",
    "max_cpu_loras": "adapters in memory",
}


def add_lora_options(command: argparse.ArgumentParser) -> None:
    group = command.add_argument_group("LoRA adapters")
    group.add_argument("--enable-lora", action=argparse.BooleanOptionalAction, default=False,
                       help="requests may name adapters as their model: docs/lora.md (default: no)")
    group.add_argument("--lora-modules", action="extend", nargs="+", default=[], type=_module, metavar="NAME=PATH",
                       help="adapters to load at the start: a name and a folder in the format of PEFT, or vLLM's JSON "
                       "with name, path and base_model_name; POST /v1/load_lora_adapter loads more")
    for name, meaning in NUMBERS.items():
        group.add_argument(_option(name), type=Number(ENGINE[name]), metavar="N",
                           help=f"{meaning} (default: {DEFAULTS[name]})")


def lora_settings(asked: argparse.Namespace) -> dict[str, Any]:
    """The options given, by the names of `EngineConfig`.

    Raises:
        ValueError: an option says nothing without `--enable-lora`.
    """
    given = {name: value for name in NUMBERS if (value := getattr(asked, name)) is not None}
    if not asked.enable_lora:
        for name in [*given, *["lora_modules"][: len(asked.lora_modules)]]:
            raise ValueError(f"{_option(name)} is about adapters: add --enable-lora, or leave it out")
    return {"enable_lora": asked.enable_lora} | given


def lora_modules(asked: argparse.Namespace, base_names: Sequence[str]) -> tuple[LoraModule, ...]:
    """The adapters to load at the start.

    Raises:
        ValueError: a name is there twice, or there is no adapter at a path.
    """
    from slotwise.server.served_models import missing
    from slotwise.server.settings import LoraModule

    modules: dict[str, LoraModule] = {}
    for given in asked.lora_modules:
        module = LoraModule(**given | {"path": os.path.abspath(given["path"])})
        if module.name in (*modules, *base_names):
            raise ValueError(f"--lora-modules: the name {printable(module.name)} is taken")
        if why := missing(module.path):
            raise ValueError(f"--lora-modules {printable(module.name)}: {why}")
        modules[module.name] = module
    return tuple(modules.values())


def _module(text: str) -> dict[str, str]:
    """The type of an adapter: the fields of a `LoraModule`."""
    if text.startswith("{"):
        try:
            given = json.loads(text)
        except (ValueError, RecursionError):
            given = None
        if not isinstance(given, dict) or not {"name", "path"} <= given.keys() <= set(KEYS) or not all(
                isinstance(value, str) and value for value in given.values()):
            raise argparse.ArgumentTypeError(f"{FORM}, not {printable(text[:80])}")
        return given
    name, separator, path = text.partition("=")
    if not (separator and name and path):
        raise argparse.ArgumentTypeError(f"{FORM}, not {printable(text[:80])}; the model stands before the options")
    return {"name": name, "path": path}


def _option(name: str) -> str:
    return "--" + name.replace("_", "-")
