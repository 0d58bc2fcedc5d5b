"""Options that several commands share, and the settings they stand for."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Collection
from typing import Any

from slotwise.batching.settings import KINDS, MAX_WAIT_MS, PREFILLS
from slotwise.cli.numbers import Number
from slotwise.core.limits import PRESSURES, RECOMPUTE
from slotwise.engine.config import DEVICES, DTYPES, KV_CACHE_DTYPES, QUANTIZATIONS, STALL_MS
from slotwise.engine.ranges import ENGINE
from slotwise.policies.settings import GAP, POLICIES, QUANTILE, TTFT_MS

BUILTIN_NAME = "slotwise-builtin"  # the served name of the model in the package

# Numbers have the ranges of `engine.ranges`.
ENGINE_OPTIONS: tuple[tuple[str, dict[str, Any]], ...] = (
    ("--device", {"choices": DEVICES, "default": "auto", "help": "what computes (default: the best there is)"}),
    ("--dtype", {"choices": DTYPES, "default": "auto", "help": "type of the weights (default: auto, the checkpoint's; "
                 "on a CPU float16 becomes bfloat16)"}),
    ("--quantization", {"choices": QUANTIZATIONS, "default": "none", "help": "bits of the weights, quantised as they "
                        "are loaded; activations become int8 as they come (default: none)"}),
    ("--kv-cache-dtype", {"choices": KV_CACHE_DTYPES, "default": "auto", "help": "what keys and values are kept as; "
                          "int8 on the CPU and fp8 on a GPU hold about twice the tokens in the same memory (default: "
                          "auto, as they are computed)"}),
    ("--max-model-len", {"metavar": "TOKENS", "help": "longest sequence, prompt and output together"}),
    ("--max-num-seqs", {"default": 64, "metavar": "N", "help": "slots of the batch (default: 64)"}),
    ("--max-num-batched-tokens", {"metavar": "TOKENS", "help": "tokens of one step (default: about what "
                                  "half a second has room for, a tenth where stalls are not bounded; 128 to 512, on a "
                                  "GPU up to 8192; and one for each slot)"}),
    ("--batching", {"choices": KINDS, "default": "continuous", "help": "how a batch is made (default: continuous)"}),
    ("--prefill", {
        "choices": PREFILLS, "help": "continuous: how a prompt meets rows that decode, in chunks beside them, whole "
        "beside them, or while they pause (default: chunked)"}),
    ("--batch-size", {
        "metavar": "N",
        "help": "static, dynamic: most requests of a batch (default: as many as there are slots)"}),
    ("--max-wait-ms", {
        "metavar": "MS",
        "help": f"dynamic: how long the first of a batch waits for company (default: {MAX_WAIT_MS:g})"}),
    ("--long-prefill-token-threshold", {
        "default": 0, "metavar": "TOKENS",
        "help": "chunked: most tokens one prompt gets in a step (default: what the budget leaves)"}),
    ("--scheduling-policy", {
        "choices": POLICIES, "default": "fcfs",
        "help": "who goes next: docs/policies.md tells what each promises (default: fcfs)"}),
    ("--ageing", {
        "metavar": "SECONDS",
        "help": "priority: waiting that makes up for one step of priority; shortest: for 100 tokens of work; deadline: "
        "after which one that is late goes first (default: 60)"}),
    ("--preemption-gap", {
        "metavar": "STEPS", "help": "priority: how far ahead of one that runs a waiting request must be "
        f"to take its place (default: {GAP})"}),
    ("--length-quantile", {
        "metavar": "SHARE", "help": "shortest: which of the lengths of answers like it a request is "
        f"taken for (default: {QUANTILE:g}, their median)"}),
    ("--length-oracle", {
        "action": "store_true",
        "help": "shortest: know the lengths that a benchmark draws, to see what guessing costs"}),
    ("--default-ttft-ms", {
        "metavar": "MS",
        "help": f"deadline: objective of requests that bring none (default: {TTFT_MS:g})"}),
    ("--shed-late", {
        "action": "store_true", "help": "deadline: end at once who can no longer be served in time"}),
    ("--max-step-ms", {
        "metavar": "MS", "help": "time a step may take, as learned from those before: prompts are cut "
        "to fit, without the exceptions of --max-stall-ms (default: no limit)"}),
    ("--max-stall-ms", {
        "default": STALL_MS, "metavar": "MS", "help": "how long prompts may "
        "hold up streams that run, as learned; longer where more requests begin than run, and up to twice what the "
        f"running ones take alone (default: {STALL_MS:g}; 0: no limit)"}),
    ("--max-step-context", {"default": 0, "help": argparse.SUPPRESS}),  # retired: see engine.config
    ("--block-size", {"metavar": "TOKENS", "help": "tokens of a cache block (default: the best)"}),
    ("--kv-cache-memory", {"metavar": "BYTES", "help": "memory of the cache (default: what the slots "
                           "can use, within 40%% of what is free)"}),
    ("--gpu-memory-utilization", {
        "metavar": "SHARE",
        "help": "share of all memory, on whatever device, for weights, workspace and cache together (default: on a GPU "
        "0.9)"}),
    ("--enable-prefix-caching", {
        "action": argparse.BooleanOptionalAction, "default": True,
        "help": "compute equal beginnings of requests once (default: on)"}),
    ("--kv-offloading-size", {
        "default": 0.0, "metavar": "GIB", "help": "on a GPU: host memory that keeps what the prefix "
        "cache evicts, so that it is copied back instead of computed again (default: 0, none)"}),
    ("--on-pressure", {
        "choices": PRESSURES, "default": RECOMPUTE,
        "help": "who must yield when the cache is full waits and is computed again, or ends in an error"}),
    ("--seed", {"default": 0, "help": "of the requests that bring none (default: 0)"}),
)

Run = Callable[[argparse.Namespace], int]
"""Runs a command and returns its exit status."""


def add_command(commands: Any, name: str, summary: str, run: Run) -> argparse.ArgumentParser:
    command = commands.add_parser(name, help=summary, description=summary[0].upper() + summary[1:] + ".")
    command.set_defaults(run=run)
    return command


def add_engine_options(command: argparse.ArgumentParser, names: Collection[str] = ()) -> None:
    """Add all engine options, or those of these `names`."""
    group = command.add_argument_group("engine")
    for name, options in ENGINE_OPTIONS:
        if not names or name in names:
            allowed = ENGINE.get(_setting(name))
            group.add_argument(name, **options, **({"type": Number(allowed)} if allowed else {}))


def add_overwrite_option(group: Any) -> None:
    """The companion option of `--event-log`."""
    group.add_argument("--overwrite-event-log", action="store_true",
                       help="replace the file of --event-log also where it is no event log, or another user's")


def engine_settings(asked: argparse.Namespace) -> dict[str, Any]:
    """The engine options given, by the names of `EngineConfig`."""
    names = [_setting(name) for name, _ in ENGINE_OPTIONS]
    return {name: getattr(asked, name) for name in names}


def _setting(name: str) -> str:
    return name.removeprefix("--").replace("-", "_")
