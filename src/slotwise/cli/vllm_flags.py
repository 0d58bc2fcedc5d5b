"""Flags of `vllm serve` that change nothing here, so that a command written for vLLM starts.

Each is accepted with the values that describe what Slotwise does anyway, and the log says at the start what it means
here.  Other values are refused, with what to do instead.  `vllm_arguments` has those that are engine arguments.
"""

from __future__ import annotations

import argparse
from typing import NamedTuple

from slotwise import neutral
from slotwise.vllm_arguments import RULES

ANY: tuple[str, ...] = ()
YES, NO = "true", "false"
NONE = ("null",)  # of a flag whose every value describes another server


class Flag(NamedTuple):
    """A flag of vLLM's."""

    names: tuple[str, ...]
    fits: tuple[str, ...]  # values that are accepted; ANY: all
    meaning: str  # what holds here, whatever the value
    instead: str = ""  # what to do for another value; "": the meaning says it
    is_switch: bool = False  # --name and --no-name, without a value

    @property
    def dest(self) -> str:
        return self.names[0].removeprefix("--").replace("-", "_")


def _switch(name: str, meaning: str, fits: tuple[str, ...] = ANY, instead: str = "") -> Flag:
    return Flag((name,), fits, meaning, instead, is_switch=True)


def _option(setting: str) -> str:
    return "--" + setting.replace("_", "-")


def _shared(*arguments: str, short: str = "", is_switch: bool = False) -> Flag:
    """A flag that the offline API has as an argument, or as several of one meaning."""
    rule = RULES[arguments[0]]
    fits = ANY if rule.accepted is neutral.ANY else tuple([
        {True: YES, False: NO}[one] if isinstance(one, bool) else str(one) for one in rule.accepted]) or NONE
    names = (*map(_option, arguments), *short.split())
    return Flag(names, fits, *rule.told(_option), is_switch=is_switch)


FLAGS: tuple[Flag, ...] = (
    _shared("data_parallel_size", short="-dp"),
    Flag(("--api-server-count",), ("1",), "one process serves HTTP",
         "one process serves HTTP: start further servers with slotwise scale"),
    _shared("distributed_executor_backend"),
    _shared("disable_custom_all_reduce", is_switch=True),
    _switch("--disable-frontend-multiprocessing", "the engine always has a process of its own"),
    _shared("trust_remote_code", is_switch=True),
    _shared("enforce_eager", is_switch=True),
    _shared("compilation_config", short="-O"),
    _shared("max_seq_len_to_capture"),
    _shared("async_scheduling", is_switch=True),
    _shared("enable_chunked_prefill", is_switch=True),
    _shared("swap_space"),
    _shared("cpu_offload_gb"),
    _shared("enable_sleep_mode", is_switch=True),
    _shared("load_format"),
    _shared("tokenizer_mode"),
    _shared("runner", "task"),
    _switch("--disable-log-requests", "requests are logged with --enable-log-requests only", (YES,),
            "requests are logged with --enable-log-requests"),
    _switch("--disable-uvicorn-access-log", "HTTP exchanges are logged with --access-log only", (YES,),
            "HTTP exchanges are logged with --access-log"),
    Flag(("--uvicorn-log-level",), ANY, "the web server logs nothing of its own; --log-format is the form of the log"),
    _switch("--enable-server-load-tracking", "GET /load is always answered", (YES,)),
    _switch("--enable-prompt-tokens-details", "usage always has prompt_tokens_details", (YES,)),
    _switch("--enable-request-id-headers", "every response has X-Request-Id", (YES,)),
)


def add_vllm_flags(command: argparse.ArgumentParser) -> None:
    """Add the flags; --help does not list them."""
    for flag in FLAGS:
        if flag.is_switch:
            command.add_argument(*flag.names, action=argparse.BooleanOptionalAction, help=argparse.SUPPRESS)
        else:
            command.add_argument(*flag.names, help=argparse.SUPPRESS)


def notices(asked: argparse.Namespace) -> list[str]:
    """Returns a line for each flag that was given.  Raises ValueError for a value that describes another server."""
    lines = []
    for flag in FLAGS:
        value = getattr(asked, flag.dest)
        if value is None:
            continue
        text = {True: YES, False: NO}.get(value, value)
        if flag.fits and text not in flag.fits:
            shown = {True: flag.names[0], False: f"--no-{flag.dest.replace('_', '-')}"}.get(
                value, f"{flag.names[0]} {text}")
            raise ValueError(f"{shown}: {flag.instead or flag.meaning}")
        lines.append(f"{flag.names[0]} has no effect: {flag.meaning}")
    return lines
