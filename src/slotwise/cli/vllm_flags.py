"""Flags of `vllm serve` that change nothing here, so that a command written for vLLM starts.

Each is accepted with the values that describe what Slotwise does anyway, and the log says at the start what it means
here.  Other values are refused, with what to do instead.
"""

from __future__ import annotations

import argparse
from typing import NamedTuple

ANY: tuple[str, ...] = ()
YES, NO = "true", "false"
ONE_DEVICE = ("a model runs on one device: make it fit with --quantization, --dtype or --kv-cache-dtype, and start a "
              "server for each further device behind a load balancer")


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


FLAGS: tuple[Flag, ...] = (
    Flag(("--tensor-parallel-size", "-tp"), ("1",), "a model runs on one device", ONE_DEVICE),
    Flag(("--pipeline-parallel-size", "-pp"), ("1",), "a model runs on one device", ONE_DEVICE),
    Flag(("--data-parallel-size", "-dp"), ("1",), "a server has one engine",
         "a server has one engine: start a server for each further device behind a load balancer"),
    Flag(("--api-server-count",), ("1",), "one process serves HTTP",
         "one process serves HTTP: start further servers behind a load balancer"),
    Flag(("--distributed-executor-backend",), ("mp", "uni"), "the engine has a process of its own",
         "the engine has a process of its own on this machine: leave the flag out"),
    _switch("--disable-custom-all-reduce", "one device needs no all-reduce"),
    _switch("--disable-frontend-multiprocessing", "the engine always has a process of its own"),
    _switch("--trust-remote-code", "no code of a checkpoint is ever run; supported families are built in"),
    _switch("--enforce-eager", "a step has one way to run; on a GPU, decode steps are captured"),
    Flag(("--compilation-config", "-O"), ANY, "kernels are compiled when they are first needed"),
    Flag(("--max-seq-len-to-capture",), ANY, "on a GPU, decode steps are captured at any length"),
    _switch("--async-scheduling", "on a GPU a step is planned while another runs, on a CPU none is"),
    _switch("--enable-chunked-prefill", "prompts are chunked unless --prefill says otherwise", (YES,),
            "use --prefill inline (prompts run whole beside rows that decode) or --prefill alone"),
    Flag(("--swap-space",), ANY, "a preempted request is computed again, never swapped; on a GPU "
         "--kv-offloading-size keeps evicted blocks in host memory"),
    Flag(("--cpu-offload-gb",), ("0", "0.0"), "weights stay on the device",
         "weights stay on the device: --quantization makes them smaller"),
    Flag(("--load-format",), ("auto", "safetensors"), "weights are read from safetensors",
         "weights are read from safetensors: convert the checkpoint"),
    Flag(("--tokenizer-mode",), ("auto", "hf"), "the checkpoint's tokenizer.json is used",
         "the checkpoint's tokenizer.json is used: leave the flag out"),
    Flag(("--runner", "--task"), ("auto", "generate"), "the model generates text",
         "only generation is served: leave the flag out"),
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
            raise ValueError(f"{flag.names[0]} {text}: {flag.instead or flag.meaning}")
        lines.append(f"{flag.names[0]} has no effect: {flag.meaning}")
    return lines
