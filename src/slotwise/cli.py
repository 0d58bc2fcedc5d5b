"""The command line: serve, generate, chat."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable, Sequence
from typing import Any

import slotwise
from slotwise import builtin
from slotwise.core.params import SamplingParams
from slotwise.engine.config import DEVICES, DTYPES, ConfigError, EngineConfig
from slotwise.model.errors import CheckpointError

BUILTIN_NAME = "slotwise-builtin"  # what clients call the model that ships with the package

ENGINE_OPTIONS: tuple[tuple[str, dict[str, Any]], ...] = (
    ("--device", {"choices": DEVICES, "default": "auto", "help": "what computes (default: the best there is)"}),
    ("--dtype", {"choices": DTYPES, "default": "auto", "help": "type of the weights (default: the checkpoint's)"}),
    ("--max-model-len", {"type": int, "metavar": "TOKENS", "help": "longest sequence, prompt and output together"}),
    ("--max-num-seqs", {"type": int, "default": 64, "metavar": "N", "help": "slots of the batch (default: 64)"}),
    ("--max-num-batched-tokens", {"type": int, "metavar": "TOKENS", "help": "tokens of one step (default: 512)"}),
    ("--long-prefill-token-threshold", {
        "type": int, "default": 0, "metavar": "TOKENS",
        "help": "most tokens one prompt gets in a step (default: what the budget leaves)"}),
    ("--block-size", {"type": int, "metavar": "TOKENS", "help": "tokens of a cache block (default: the best)"}),
    ("--kv-cache-memory", {"type": int, "metavar": "BYTES", "help": "memory of the cache (default: what the slots "
                           "can use, within 40%% of what is free)"}),
    ("--enable-prefix-caching", {"action": argparse.BooleanOptionalAction, "default": False,
                                 "help": "share the cache of equal prompt beginnings (not in this version)"}),
    ("--seed", {"type": int, "default": 0, "help": "of the requests that bring none (default: 0)"}),
)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command; a failure is one line on stderr and a status of 1."""
    parser = build_parser()
    asked = parser.parse_args(arguments)
    if asked.command is None:
        parser.print_help()
        return 2
    try:
        return asked.run(asked)
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:  # whoever read our output has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except (ValueError, OSError, MemoryError, RuntimeError, CheckpointError) as error:
        print(f"slotwise {asked.command}: {error}", file=sys.stderr)
        return 1


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="slotwise", description="Serve language models with continuous batching.",
        epilog="`slotwise COMMAND --help` explains each command.")
    parser.add_argument("--version", action="version", version=f"slotwise {slotwise.__version__}")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", title="commands")
    serve = _command(commands, "serve", "answer OpenAI-compatible requests over HTTP", run_serve)
    serve.add_argument("model", nargs="?", help="a checkpoint's folder or a hub id (default: the built-in model)")
    _server_options(serve)
    generate = _command(commands, "generate", "continue prompts and print what comes", run_generate)
    generate.add_argument("prompts", nargs="*", metavar="PROMPT", help="texts to continue (default: one from stdin)")
    chat = _command(commands, "chat", "talk to a model in the terminal", run_chat)
    for offline in (generate, chat):
        offline.add_argument("--model", help="a checkpoint's folder or a hub id (default: the built-in model)")
        _sampling_options(offline)
    for command in (serve, generate, chat):
        group = command.add_argument_group("engine")
        for name, options in ENGINE_OPTIONS:
            group.add_argument(name, **options)
    return parser


Run = Callable[[argparse.Namespace], int]


def _command(commands: Any, name: str, summary: str, run: Run) -> argparse.ArgumentParser:
    command = commands.add_parser(name, help=summary, description=summary[0].upper() + summary[1:] + ".")
    command.set_defaults(run=run)
    return command


def _server_options(serve: argparse.ArgumentParser) -> None:
    group = serve.add_argument_group("server")
    group.add_argument("--host", default="127.0.0.1", help="address to listen on (default: this machine only)")
    group.add_argument("--port", type=int, default=8000, help="0 takes any free port (default: 8000)")
    group.add_argument("--api-key", default=os.environ.get("SLOTWISE_API_KEY", ""), metavar="KEY",
                       help="clients must send it as a bearer token (default: $SLOTWISE_API_KEY)")
    group.add_argument("--served-model-name", metavar="NAME", help="what clients call the model")
    group.add_argument("--chat-template", metavar="FILE", help="a Jinja file instead of the model's own template")
    group.add_argument("--shutdown-timeout", type=float, default=30.0, metavar="SECONDS",
                       help="how long running requests may take to end after SIGTERM (default: 30)")
    group.add_argument("--stream-interval", type=int, default=1, metavar="TOKENS",
                       help="tokens gathered before a stream sends them (default: 1)")


def _sampling_options(command: argparse.ArgumentParser) -> None:
    group = command.add_argument_group("sampling")
    group.add_argument("--max-tokens", type=int, default=256, help="longest answer (default: 256)")
    group.add_argument("--temperature", type=float, default=0.2, help="0 is greedy (default: 0.2)")
    group.add_argument("--top-p", type=float, default=1.0, help="nucleus sampling (default: 1.0, off)")
    group.add_argument("--top-k", type=int, default=0, help="most probable tokens to draw from (default: all)")
    group.add_argument("--stop", action="append", default=[], metavar="TEXT", help="end before this text; repeatable")


def _engine_settings(asked: argparse.Namespace) -> dict[str, Any]:
    names = [name.removeprefix("--").replace("-", "_") for name, _ in ENGINE_OPTIONS]
    return {name: getattr(asked, name) for name in names}


def _sampling_params(asked: argparse.Namespace) -> SamplingParams:
    return SamplingParams(
        temperature=asked.temperature, top_p=asked.top_p, top_k=asked.top_k, max_tokens=asked.max_tokens,
        stop=tuple(asked.stop))


def run_serve(asked: argparse.Namespace) -> int:
    from slotwise.compose.server import run_server
    from slotwise.server.settings import ServerSettings

    config = EngineConfig.of(model=asked.model or str(builtin.path()), **_engine_settings(asked))
    settings = ServerSettings(
        served_model_name=asked.served_model_name or asked.model or BUILTIN_NAME, api_key=asked.api_key,
        shutdown_timeout=asked.shutdown_timeout, stream_interval=asked.stream_interval, seed=asked.seed)
    return run_server(config, settings, (asked.host, asked.port), asked.chat_template)


def _load(asked: argparse.Namespace) -> Any:
    """An engine in this process, with a word to whoever waits for it."""
    if sys.stderr.isatty():
        print("Loading the model ...", end="\r", file=sys.stderr, flush=True)
    from slotwise.llm import LLM

    llm = LLM(asked.model, **_engine_settings(asked))
    if sys.stderr.isatty():
        print(" " * 24, end="\r", file=sys.stderr, flush=True)
    return llm


def run_generate(asked: argparse.Namespace) -> int:
    prompts = asked.prompts or [sys.stdin.read()]
    if not all(prompts):
        raise ConfigError("an empty prompt: give a text to continue, as an argument or on stdin")
    params = _sampling_params(asked)
    llm = _load(asked)
    if len(prompts) == 1:
        print(prompts[0], end="", flush=True)
        for text in llm.stream(prompts[0], params):
            print(text, end="", flush=True)
        print()
        return 0
    for output in llm.generate(prompts, params, use_tqdm=sys.stderr.isatty()):
        print(f"{output.prompt}{output.outputs[0].text}\n")
    return 0


def run_chat(asked: argparse.Namespace) -> int:
    params = _sampling_params(asked)
    llm = _load(asked)
    if sys.stdin.isatty():
        print("Type a message; an empty line or Ctrl-D ends.  The built-in model completes Python code.")
    conversation: list[dict[str, str]] = []
    while message := _ask():
        conversation.append({"role": "user", "content": message})
        answer = ""
        for text in llm.stream(llm.template(conversation), params):
            print(text, end="", flush=True)
            answer += text
        print()
        conversation.append({"role": "assistant", "content": answer})
    return 0


def _ask() -> str:
    try:
        return input("> " if sys.stdin.isatty() else "").strip()
    except EOFError:
        return ""


if __name__ == "__main__":
    sys.exit(main())
