"""slotwise pull: models by name, downloaded into the cache folder; and how every command finds its model."""

from __future__ import annotations

import argparse
import os
import sys

from slotwise.cli.options_of_settings import Commands, add_command
from slotwise.cli.process import ending_at_once
from slotwise.cli.remote import is_url
from slotwise.compute.model.checkpoint import is_hub_id
from slotwise.compute.model.model_registry import BUILTIN, NAMES, FoundModel, find
from slotwise.compute.model.published_models import PUBLISHED, present
from slotwise.core.setting_fields import settings_of
from slotwise.engine.config import EngineConfig
from slotwise.errors import CheckpointError, nearest
from slotwise.observe import lines
from slotwise.platform.gguf_file import SUFFIX
from slotwise.platform.progress_bar import MEGABYTE, ProgressBar, discard, to_stderr

USUAL = f"{next(iter(PUBLISHED))} where it has been downloaded, otherwise the built-in model"
USUAL_MODEL_HELP = f"{settings_of(EngineConfig)['model'].help} (default: {USUAL})"  # of commands with `usual_model`


def add(commands: Commands) -> None:
    command = add_command(commands, "pull", "download a model by its name", run)
    command.add_argument("name", nargs="?", metavar="NAME",
                         help=f"{', '.join(PUBLISHED)}, or a hub id (default: list the names, and which are there)")


def find_model(model: str | None, log_format: str = lines.TEXT) -> FoundModel:
    """Returns the model that a command's user asks for, downloaded where it is missing, with a progress bar.

    Raises:
        CheckpointError: there is no such model, or it could not be downloaded.
    """
    is_text = log_format == lines.TEXT
    with ending_at_once(), ProgressBar(to_stderr if is_text else discard, is_wanted=is_text) as bar:
        return find(model or "", bar)


def usual_model() -> str:
    """Returns the model of commands that are given none: the first published one that is here, else the built-in one.
    """
    return next((name for name, model in PUBLISHED.items() if model.sampling and present(model) is not None), "")


def names_model(text: str, *, is_before_others: bool) -> bool:
    """Whether an argument that may be a prompt is a model, or the URL of a server.

    Args:
        is_before_others: prompts follow; without them a hub id is taken for a prompt.
    """
    if text in NAMES or is_url(text) or text.endswith(SUFFIX):
        return True
    path = os.path.expanduser(text)
    if os.path.isdir(path):
        return any(name == "config.json" or name.endswith(SUFFIX) for name in os.listdir(path))
    return is_before_others and not any(map(str.isspace, text)) and (
        is_hub_id(text) or text.startswith(("/", "./", "../", "~/")))


def run(asked: argparse.Namespace) -> int:
    if asked.name is None:
        return _list()
    if asked.name not in NAMES and not is_hub_id(asked.name):
        near = nearest(asked.name, NAMES)
        raise CheckpointError(f"there is no model named {asked.name!r:.60}" + (
            f"; did you mean {near}?" if near else f": give {', '.join(PUBLISHED)}, or a hub id such as owner/name"))
    print(find_model(asked.name).path)
    return 0


def _list() -> int:
    from rich.console import Console
    from rich.table import Table

    table = Table(box=None, pad_edge=False, header_style="bold")
    for title in ("name", "model", "size", "license", "here", "what it is"):
        table.add_column(title, no_wrap=title != "what it is", justify="right" if title == "size" else "left")
    own = find()
    size = sum(file.stat().st_size for file in own.path.glob("*.safetensors"))
    table.add_row(BUILTIN, own.name, f"{size / MEGABYTE:,.0f} MB", "Apache-2.0, PSF-2.0", "yes",
                  "completes Python code")
    for model in PUBLISHED.values():
        table.add_row(model.name, model.served_name, f"{model.all_bytes / MEGABYTE:,.0f} MB", model.license,
                      "yes" if present(model) else "no", model.about)
    Console(highlight=False, width=None if sys.stdout.isatty() else 160).print(table)
    print("\n`slotwise serve NAME` serves one of them, and downloads it where it is missing.")
    return 0
