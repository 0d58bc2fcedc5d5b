"""slotwise generate and slotwise chat: a model in this process, without a server."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from slotwise.cli.options import (
    MODEL_HELP,
    Commands,
    Number,
    Size,
    add_command,
    add_engine_options,
    add_generation_options,
    engine_settings,
)
from slotwise.cli.process import ending_at_once
from slotwise.cli.pull import find_model
from slotwise.core.scheduler_limits import TOKENS
from slotwise.core.setting_fields import real, whole
from slotwise.engine.config import ConfigError, EngineConfig
from slotwise.errors import printable
from slotwise.offline.sampling_params import SamplingParams

if TYPE_CHECKING:
    from slotwise.offline.llm import LLM

USUAL: dict[str, Any] = {"max_tokens": 256, "temperature": 0.2}  # of `generate`, for a model that has no defaults
AS_SERVED: dict[str, Any] = {"max_tokens": None}  # of `chat`: those of /v1/chat/completions


def add(commands: Commands) -> None:
    generate = add_command(commands, "generate", "continue prompts and print the text", run_generate)
    generate.add_argument("prompts", nargs="*", metavar="PROMPT", help="texts to continue (default: one from stdin)")
    chat = add_command(commands, "chat", "talk to a model in the terminal", run_chat)
    for command in (generate, chat):
        command.add_argument("--model", help=MODEL_HELP)
        _sampling_options(command, USUAL if command is generate else AS_SERVED)
        add_engine_options(command)


def _sampling_options(command: argparse.ArgumentParser, usual: Mapping[str, Any]) -> None:
    """Args: usual: what holds where neither the command line nor the model says anything."""
    command.set_defaults(usual=usual)
    group = command.add_argument_group("sampling")
    most = usual["max_tokens"] or "as many as fit the context"
    group.add_argument("--max-tokens", type=Size(whole(1, TOKENS)),
                       help=f"most output tokens (default: the model's own, else {most})")
    group.add_argument("--temperature", type=Number(real(0, 100)),
                       help=f"0 is greedy (default: the model's own, else {usual.get('temperature', 1.0)})")
    group.add_argument("--top-p", type=Number(real(0.000001, 1)),
                       help="nucleus sampling (default: the model's own, else 1.0, off)")
    group.add_argument("--top-k", type=Number(whole(-1)),
                       help="most probable tokens to draw from (default: the model's own, else all)")
    group.add_argument("--stop", action="append", default=[], metavar="TEXT", help="end before this text; repeatable")
    add_generation_options(command)


def _sampling_params(asked: argparse.Namespace, defaults: Mapping[str, Any]) -> SamplingParams:
    """What the command line says, else the model's `defaults`, else what is usual for the command."""
    names = ("temperature", "top_p", "top_k", "max_tokens")
    given = {name: value for name in names if (value := getattr(asked, name)) is not None}
    return SamplingParams(stop=asked.stop, **{**asked.usual, **defaults, **given})


def _load(asked: argparse.Namespace) -> LLM:
    """An engine in this process, with a notice on a terminal while it loads."""
    _sampling_params(asked, {})  # what is invalid fails before the seconds that torch takes to load, as below
    settings = engine_settings(asked)
    EngineConfig.of(model=asked.model or "", **settings)
    folder = find_model(asked.model).path
    if sys.stderr.isatty():
        print("Loading the model ...", end="\r", file=sys.stderr, flush=True)
    with ending_at_once():
        from slotwise.offline.llm import LLM

        llm = LLM(folder, override_generation_config=asked.override_generation_config, **settings)
    if sys.stderr.isatty():
        print(" " * 24, end="\r", file=sys.stderr, flush=True)
    return llm


def run_generate(asked: argparse.Namespace) -> int:
    prompts = asked.prompts or [sys.stdin.read()]
    if not all(prompts):
        raise ConfigError("an empty prompt: give a text to continue, as an argument or on stdin")
    llm = _load(asked)
    params = _sampling_params(asked, llm.sampling_defaults.given)
    if len(prompts) == 1:
        print(prompts[0], end="", flush=True)
        for text in llm.stream(prompts[0], params):
            print(_shown(text), end="", flush=True)
        print()
        return 0
    for output in llm.generate(prompts, params, use_tqdm=sys.stderr.isatty()):
        print(f"{output.prompt}{_shown(output.outputs[0].text)}\n")
    return 0


def run_chat(asked: argparse.Namespace) -> int:
    llm = _load(asked)
    params = _sampling_params(asked, llm.sampling_defaults.given)
    if sys.stdin.isatty():
        print("Type a message; an empty line or Ctrl-D ends.  The built-in model completes Python code.")
    conversation: list[dict[str, str]] = []
    while message := _ask():
        conversation.append({"role": "user", "content": message})
        answer = ""
        for text in llm.stream(llm.template(conversation), params):
            print(_shown(text), end="", flush=True)
            answer += text
        print()
        conversation.append({"role": "assistant", "content": answer})
    return 0


def _shown(text: str) -> str:
    """`text` as it is; on a terminal, which would obey them, with control characters but tab and newline escaped."""
    if not sys.stdout.isatty():
        return text
    return "".join([c if c in "\n\t" else printable(c) for c in text])


def _ask() -> str:
    try:
        return input("> " if sys.stdin.isatty() else "").strip()
    except EOFError:
        return ""
