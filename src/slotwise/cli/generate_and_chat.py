"""slotwise generate and slotwise chat: with a model in this process, or with a server's."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Collection, Mapping, Sequence
from contextlib import closing
from typing import TYPE_CHECKING, Any, NamedTuple

from slotwise.cli.options_of_settings import (
    MODEL_HELP,
    Commands,
    Number,
    Size,
    add_command,
    add_engine_options,
    add_generation_options,
    engine_settings,
    option_of,
)
from slotwise.cli.parser import Parser, mark_common
from slotwise.cli.process import ending_at_once
from slotwise.cli.pull import USUAL as USUAL_MODEL
from slotwise.cli.pull import find_model, names_model, usual_model
from slotwise.cli.remote import KEY_VARIABLE, Server, ServerError, api_key_of, is_url
from slotwise.compute.model.model_registry import FoundModel
from slotwise.compute.model.published_models import PUBLISHED
from slotwise.core.scheduler_limits import TOKENS
from slotwise.core.setting_fields import real, whole
from slotwise.engine.config import ConfigError, EngineConfig
from slotwise.offline.sampling_params import SamplingParams

if TYPE_CHECKING:
    from slotwise.cli.chat_models import ChatModel
    from slotwise.offline.llm import LLM

USUAL: dict[str, Any] = {"max_tokens": 256, "temperature": 0.2}  # of `generate`, for a model that has no defaults
AS_SERVED: dict[str, Any] = {"max_tokens": None}  # of `chat`: those of /v1/chat/completions
SAMPLED = ("temperature", "top_p", "top_k", "max_tokens")
SENT = frozenset({*SAMPLED, "stop", "seed"})  # options that become fields of a request to a server
FOR_SERVERS = frozenset({"model", "api_key", "system", *SENT})  # options that mean something with a URL


def add(commands: Commands) -> None:
    generate = add_command(commands, "generate", "continue prompts and print the text", run_generate)
    generate.collects = "prompts"
    generate.usage = "slotwise generate [MODEL | URL] [PROMPT ...] [options]"
    prompts = generate.add_argument(
        "prompts", nargs="*", metavar="PROMPT", help="texts to continue (default: one from stdin).  The first names "
        "the model instead if it is a URL, a name that `slotwise pull` lists, a GGUF file, a checkpoint's folder, or, "
        "before a prompt, a hub id.  With --model all are prompts")
    chat = add_command(commands, "chat", "talk to a model in the terminal", run_chat)
    chat.usage = "slotwise chat [MODEL | URL] [options]"
    target = chat.add_argument(
        "model_tag", nargs="?", metavar="MODEL|URL", help="the model to load in this process, or the address of a "
        f"running server with OpenAI's API (default: {USUAL_MODEL})")
    mark_common(prompts, target)
    mark_common(chat.add_argument("--system", default="", metavar="TEXT", help="system prompt"))
    for command in (generate, chat):
        _add_options(command, USUAL if command is generate else AS_SERVED)


def _add_options(command: Parser, usual: Mapping[str, Any]) -> None:
    is_chat = command.prog.endswith("chat")
    meaning = "the model, given as an option" if is_chat else MODEL_HELP
    mark_common(
        command.add_argument("--model", metavar="MODEL",
                             help=f"{meaning}; with a URL the model's name there, by default the server's first"),
        command.add_argument("--api-key", default="", metavar="KEY",
                             help=f"with a URL: key to send as a bearer token (default: ${KEY_VARIABLE})"))
    mark_common(*_sampling_options(command, usual))
    add_generation_options(command)
    add_engine_options(command)


def _sampling_options(command: argparse.ArgumentParser, usual: Mapping[str, Any]) -> list[argparse.Action]:
    """Adds the options of sampling, and returns the common ones.

    Args:
        usual: what holds where neither the command line nor the model says anything.
    """
    command.set_defaults(usual=usual)
    group = command.add_argument_group("sampling")
    most = usual["max_tokens"] or "as many as fit the context"
    common = [
        group.add_argument("--max-tokens", type=Size(whole(1, TOKENS)), metavar="TOKENS",
                           help=f"most output tokens (default: the model's own, else {most})"),
        group.add_argument("--temperature", type=Number(real(0, 100)), metavar="T",
                           help="0 is greedy (default: the model's own, "
                           f"else {usual.get('temperature', 1.0)})"),
        group.add_argument("--top-p", type=Number(real(0.000001, 1)), metavar="P",
                           help="nucleus sampling (default: the model's own, else 1.0, off)")]
    group.add_argument("--top-k", type=Number(whole(-1)), metavar="K",
                       help="most probable tokens to draw from (default: the model's own, else all)")
    group.add_argument("--stop", action="append", default=[], metavar="TEXT", help="end before this text; repeatable")
    return common


# -- where the model is ------------------------------------------------------------------------------------------------


class Target(NamedTuple):
    """What a command talks to."""

    url: str  # of a server; "": the model is loaded here
    model: str  # its name on the server, "" for the server's first; or what `find_model` finds, "" for the built-in one


def _target(asked: argparse.Namespace, given: str, is_alone: bool) -> Target:
    """Returns what to talk to.

    Args:
        given: the model or URL, as an argument.
        is_alone: without a model, the usual one is meant.

    Raises:
        ConfigError: the options contradict each other, or have no effect.
    """
    option = asked.model or ""
    if is_url(given or option):
        _check_options(asked, FOR_SERVERS, f"is for a model in this process: leave it out with {given or option}")
        return Target(given or option, option if given else "")
    if given and option and given != option:
        raise ConfigError(f"{given} and --model {option}: give one model")
    if "api_key" in asked.typed:
        raise ConfigError("--api-key is for a server: give its URL, or leave the key out")
    model = given or option
    return Target("", usual_model() if is_alone and not model else model)


def _check_options(asked: argparse.Namespace, allowed: Collection[str], why: str) -> None:
    """Raises ConfigError for an option that would be ignored."""
    for name in asked.typed:
        if name not in allowed:
            raise ConfigError(f"{option_of(name)} {why}")


def _fields(asked: argparse.Namespace) -> dict[str, Any]:
    """Returns the fields of a request that the command line sets."""
    return {name: getattr(asked, name) for name in asked.typed if name in SENT}


def _sampling_params(asked: argparse.Namespace, defaults: Mapping[str, Any]) -> SamplingParams:
    """What the command line says, else the model's `defaults`, else what is usual for the command."""
    given = {name: value for name in SAMPLED if (value := getattr(asked, name)) is not None}
    return SamplingParams(stop=asked.stop, **{**asked.usual, **defaults, **given})


def _load(asked: argparse.Namespace, model: str) -> tuple[LLM, FoundModel]:
    """An engine in this process, with a notice on a terminal while it loads."""
    _sampling_params(asked, {})  # what is invalid fails before the seconds that torch takes to load, as below
    settings = engine_settings(asked)
    EngineConfig.of(model=model, **settings)
    found = find_model(model)
    with ending_at_once():
        if sys.stderr.isatty():
            print("Loading the model ...", end="\r", file=sys.stderr, flush=True)
        from slotwise.offline.llm import LLM

        llm = LLM(found.path, override_generation_config=asked.override_generation_config, **settings)
    if sys.stderr.isatty():
        print(" " * 24, end="\r", file=sys.stderr, flush=True)
    return llm, found


# -- generate ----------------------------------------------------------------------------------------------------------


def run_generate(asked: argparse.Namespace) -> int:
    given, prompts = _divided(asked)
    target = _target(asked, given, is_alone=False)
    if not prompts:
        if sys.stdin.isatty():
            print("The prompt ends with Ctrl-D:", file=sys.stderr)
        prompts = [sys.stdin.read()]
    if not all(prompts):
        raise ConfigError("an empty prompt: give a text to continue, as an argument or on stdin")
    if target.url:
        _generate_there(asked, target, prompts)
    else:
        _generate_here(asked, target.model, prompts)
    return 0


def _divided(asked: argparse.Namespace) -> tuple[str, list[str]]:
    """Returns the model among the arguments, "" for none, and the prompts."""
    if asked.model is None and asked.prompts:
        first, *rest = asked.prompts
        if names_model(first, is_before_others=bool(rest)):
            return first, rest
    elif asked.prompts and is_url(asked.prompts[0]):  # whose model --model names
        return asked.prompts[0], asked.prompts[1:]
    return "", asked.prompts


def _generate_here(asked: argparse.Namespace, model: str, prompts: Sequence[str]) -> None:
    from slotwise.cli.chat import shown

    llm, _ = _load(asked, model)
    params = _sampling_params(asked, llm.sampling_defaults.given)
    if len(prompts) == 1:
        print(prompts[0], end="", flush=True)
        for text in llm.stream(prompts[0], params):
            print(shown(text), end="", flush=True)
        print()
        return
    for output in llm.generate(prompts, params, use_tqdm=sys.stderr.isatty()):
        print(f"{output.prompt}{shown(output.outputs[0].text)}\n")


def _generate_there(asked: argparse.Namespace, target: Target, prompts: Sequence[str]) -> None:
    """Raises ServerError."""
    from slotwise.cli.chat import shown

    server = Server(target.url, api_key_of(asked.api_key))
    model = target.model or str(server.first_model()["id"])
    texts = [""] * len(prompts)
    body = {"model": model, "prompt": prompts[0] if len(prompts) == 1 else list(prompts),
            "max_tokens": asked.usual["max_tokens"], **_fields(asked)}
    if len(prompts) == 1:
        print(prompts[0], end="", flush=True)
    with closing(server.stream("/completions", body)) as events:
        for event in events:
            for choice in event.get("choices") or ():
                text, index = choice.get("text") or "", choice.get("index", 0)
                if not isinstance(text, str) or index not in range(len(prompts)):
                    raise ServerError(f"{server.url}: an event that is not a completion's")
                texts[index] += text
                if len(prompts) == 1:
                    print(shown(text), end="", flush=True)
    if len(prompts) == 1:
        print()
    else:
        for prompt, text in zip(prompts, texts, strict=True):
            print(f"{prompt}{shown(text)}\n")


# -- chat --------------------------------------------------------------------------------------------------------------


HOW = "/help lists what you can type. Ctrl-C stops an answer, Ctrl-D ends the chat."


def run_chat(asked: argparse.Namespace) -> int:
    from slotwise.cli.chat import Chat

    target = _target(asked, asked.model_tag or "", is_alone=True)
    model, remark = _remote_model(asked, target) if target.url else _local_model(asked, target.model)
    model.check()
    chat = Chat(model, asked.system)
    if not sys.stdin.isatty():
        chat.run_lines()
        return 0
    context = f", {model.context:,} tokens of context" * bool(model.context)
    return chat.run("\n".join(filter(None, [f"{model.name} {model.where}{context}.", remark, HOW])))


def _remote_model(asked: argparse.Namespace, target: Target) -> tuple[ChatModel, str]:
    """Returns the model, and what is to be said of it."""
    from slotwise.cli.chat_models import RemoteModel

    return RemoteModel(Server(target.url, api_key_of(asked.api_key)), target.model, _fields(asked)), ""


def _local_model(asked: argparse.Namespace, model: str) -> tuple[ChatModel, str]:
    """As `_remote_model`."""
    from slotwise import builtin
    from slotwise.cli.chat_models import LocalModel

    llm, found = _load(asked, model)
    real = next(iter(PUBLISHED.values()))
    remark = "" if found.path != builtin.path() else (
        f"The built-in model completes Python code, such as `def add(a, b):`, and cannot converse.\n"
        f"`slotwise chat {real.name}` downloads a model that can ({real.num_bytes / 1e6:,.0f} MB).")
    return LocalModel(llm, _sampling_params(asked, llm.sampling_defaults.given), found.name), remark
