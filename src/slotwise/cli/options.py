"""Options that several commands share, and the settings they stand for."""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Callable, Collection
from dataclasses import asdict
from typing import Any, TypeAlias

from slotwise.batching.settings import KINDS, MAX_WAIT_MS, PREFILLS
from slotwise.cli.numbers import Bytes, Gibibytes, Number, Size
from slotwise.cli.parser import Parser
from slotwise.core.limits import PRESSURES, RECOMPUTE
from slotwise.engine.config import DEVICES, DTYPE_NAMES, DTYPES, ENGINE, KV_CACHE_DTYPES, QUANTIZATIONS, STALL_MS
from slotwise.errors import printable
from slotwise.policies.settings import GAP, POLICIES, QUANTILE, TTFT_MS
from slotwise.speculation.settings import Speculation

BUILTIN_NAME = "slotwise-builtin"  # the served name of the model in the package
MAX_JSON = 1 << 16  # characters of an option that is a JSON object

SHORT = {"--tensor-parallel-size": ("-tp",), "--pipeline-parallel-size": ("-pp",)}
NUMBERS: dict[str, type[Number]] = {"TOKENS": Size, "BYTES": Bytes, "GIB": Gibibytes}  # by metavar

# Numbers have the ranges of `engine.config.ENGINE`.
ENGINE_OPTIONS: tuple[tuple[str, dict[str, Any]], ...] = (
    ("--device", {"choices": DEVICES, "default": "auto", "help": "what computes (default: auto, a GPU if torch finds "
                  "one, else the CPU)"}),
    ("--dtype", {"type": lambda text: DTYPE_NAMES.get(text, text), "choices": DTYPES, "default": "auto",
                 "help": "type of the weights, half and float being float16 and float32 (default: auto, that of the "
                 "checkpoint; on a CPU float16 becomes bfloat16)"}),
    ("--quantization", {"choices": QUANTIZATIONS, "default": "none", "help": "type to which weights are quantized "
                        "when they are loaded; activations are quantized to int8 in each step. int4 may ruin a "
                        "model: docs/performance.md has the perplexities (default: none)"}),
    ("--packed-weights-cache", {
        "default": 0.0, "metavar": "GIB", "help": "on a CPU: disk space for the weights of quantized checkpoints as "
        "they are repacked, so that the next start maps them: docs/gguf.md (default: 0, none)"}),
    ("--kv-cache-dtype", {"choices": KV_CACHE_DTYPES, "default": "auto", "help": "type of cached keys and values; "
                          "int8 on the CPU and fp8 on a GPU hold about twice the tokens in the same memory (default: "
                          "auto, the type in which they are computed)"}),
    ("--batch-invariant", {"action": "store_true", "help": "start only where a request's tokens depend neither on the "
                           "requests beside it, nor on how its prompt is chunked, nor on drafts, in bfloat16 as in "
                           "float32; on a CPU that holds unless SLOTWISE_CPU_LINEAR is onednn, on a GPU it does not"}),
    ("--max-model-len", {"metavar": "TOKENS", "help": "longest sequence, prompt and output together (default: "
                         "the model's)"}),
    ("--max-num-seqs", {"default": 64, "metavar": "N", "help": "slots of the batch (default: 64)"}),
    ("--max-num-batched-tokens", {"metavar": "TOKENS", "help": "token budget of a step (default: what half "
                                  "a second computes, a tenth where stalls are not bounded; 128 to 512, on a GPU up to "
                                  "8192; and one for each slot)"}),
    ("--batching", {"choices": KINDS, "default": "continuous", "help": "discipline of the batch: docs/batching.md "
                    "compares them (default: continuous)"}),
    ("--prefill", {
        "choices": PREFILLS, "help": "continuous: prompts run in chunks beside rows that decode, whole beside them, "
        "or alone while those pause (default: chunked)"}),
    ("--batch-size", {
        "metavar": "N",
        "help": "static, dynamic: most requests of a batch (default: as many as there are slots)"}),
    ("--max-wait-ms", {
        "metavar": "MS",
        "help": f"dynamic: how long the first request of a batch waits for others (default: {MAX_WAIT_MS:g})"}),
    ("--long-prefill-token-threshold", {
        "default": 0, "metavar": "TOKENS",
        "help": "chunked: most tokens of one prompt in a step (default: what the budget leaves)"}),
    ("--scheduling-policy", {
        "choices": POLICIES, "default": "fcfs",
        "help": "order of requests: docs/policies.md says what each policy promises (default: fcfs)"}),
    ("--ageing", {
        "metavar": "SECONDS",
        "help": "priority: waiting time that makes up for one priority; shortest: for 100 tokens of work; deadline: "
        "after which a late request goes first (default: 60)"}),
    ("--preemption-gap", {
        "metavar": "PRIORITIES", "help": "priority: a waiting request preempts a running one that is behind it by "
        f"so much (default: {GAP})"}),
    ("--length-quantile", {
        "metavar": "SHARE", "help": "shortest: quantile of similar requests' output lengths that "
        f"predicts a request's (default: {QUANTILE:g}, the median)"}),
    ("--length-oracle", {
        "action": "store_true",
        "help": "shortest: use the output lengths that a benchmark fixed, to measure the cost of predicting them"}),
    ("--default-ttft-ms", {
        "metavar": "MS",
        "help": f"deadline: objective of requests without one (default: {TTFT_MS:g})"}),
    ("--shed-late", {
        "action": "store_true", "help": "deadline: end requests at once that can no longer be in time"}),
    ("--max-step-ms", {
        "metavar": "MS", "help": "predicted time that a step may take: prompts are chunked to fit, "
        "without the exceptions of --max-stall-ms (default: no limit)"}),
    ("--max-stall-ms", {
        "default": STALL_MS, "metavar": "MS", "help": "predicted time by "
        "which prompts may delay running rows; longer where more requests start than run, and up to twice the time of "
        f"the running rows alone (default: {STALL_MS:g}; 0: no limit)"}),
    ("--max-step-context", {"default": 0, "help": argparse.SUPPRESS}),  # retired: see engine.config
    ("--block-size", {"metavar": "TOKENS", "help": "tokens of a cache block (default: 64)"}),
    ("--kv-cache-memory", {"metavar": "BYTES", "help": "memory of the cache (default: what the slots "
                           "can use, at most 40%% of the free memory)"}),
    ("--gpu-memory-utilization", {
        "metavar": "SHARE",
        "help": "share of the memory of the GPU, or of the machine, for weights, workspace and cache together "
        "(default: on a GPU 0.9)"}),
    ("--enable-prefix-caching", {
        "action": argparse.BooleanOptionalAction, "default": True,
        "help": "compute common prefixes of requests once (default: on)"}),
    ("--kv-offloading-size", {
        "default": 0.0, "metavar": "GIB", "help": "on a GPU: host memory for blocks that the prefix "
        "cache evicts; they are copied back instead of computed again (default: 0, none)"}),
    ("--on-pressure", {
        "choices": PRESSURES, "default": RECOMPUTE,
        "help": f"a request that is preempted because the cache is full is recomputed, or ends with an error (default: "
        f"{RECOMPUTE})"}),
    ("--speculative-config", {
        "type": lambda text: speculation(text), "metavar": "JSON",
        "help": "drafts of decoding rows, which a step verifies beside the others where that is faster, as "
        "{\"method\": \"ngram\", \"num_speculative_tokens\": 8}; docs/speculation.md has all keys (default: of serve, "
        "{\"method\": \"prediction\"}; else no drafts)"}),
    ("--tensor-parallel-size", {"default": 1, "metavar": "N", "help": "processes of this machine that compute "
                                       "every layer together, each with a share of the weights, the heads and the "
                                       "threads: docs/parallel.md (default: 1)"}),
    ("--pipeline-parallel-size", {"default": 1, "metavar": "N", "help": "stages that the model's layers are divided "
                                         "into, which compute different steps at once, each with the processes of "
                                         "--tensor-parallel-size: docs/parallel.md (default: 1)"}),
    ("--enable-expert-parallel", {
        "action": argparse.BooleanOptionalAction, "default": False,
        "help": "each process of --tensor-parallel-size holds some of the experts whole, in place of a share of each: "
        "docs/parallel.md (default: off)"}),
    ("--seed", {"default": 0, "help": "seed of requests without one (default: 0)"}),
)

Commands: TypeAlias = "argparse._SubParsersAction[Parser]"
Run = Callable[[argparse.Namespace], int]
"""Runs a command and returns its exit status."""


def add_command(commands: Commands, name: str, summary: str, run: Run) -> Parser:
    command = commands.add_parser(name, help=summary, description=summary[0].upper() + summary[1:] + ".")
    command.set_defaults(run=run)
    return command


def add_engine_options(command: argparse.ArgumentParser, names: Collection[str] = ()) -> None:
    """Add all engine options, or those of these `names`."""
    group = command.add_argument_group("engine")
    for name, options in ENGINE_OPTIONS:
        if not names or name in names:
            if allowed := ENGINE.get(_setting(name)):
                options = options | {"type": NUMBERS.get(options.get("metavar", ""), Number)(allowed)}
            group.add_argument(name, *SHORT.get(name, ()), **options)


def input_file(text: str) -> str:
    """The type of an option that names a file to read: a pipe might never end, and nothing may write to it."""
    if os.path.exists(text) and not os.path.isfile(text):
        raise argparse.ArgumentTypeError(f"must be a regular file, and {printable(text)} is none")
    return text


def add_generation_options(group: argparse._ActionsContainer, bound: str = "") -> None:
    """Where parameters of sampling that a request leaves out come from.

    Args:
        bound: what `max_new_tokens` does beside being a default, where it comes from one of these options.
    """
    group.add_argument("--generation-config", default="auto", metavar="SOURCE",
                       help="defaults of sampling: auto, the model's generation_config.json; vllm, none of them; else "
                       f"such a file, or its folder{bound} (default: auto)")
    group.add_argument("--override-generation-config", type=json_object, default={}, metavar="JSON",
                       help="fields that replace those defaults, as {\"temperature\": 0.6}; null stands for the "
                       f"neutral value{bound}")


def json_object(text: str) -> dict[str, Any]:
    """The type of an option that is a JSON object."""
    try:
        value = json.loads(text) if len(text) <= MAX_JSON else None
    except (ValueError, RecursionError):
        value = None
    if not isinstance(value, dict):
        raise argparse.ArgumentTypeError(
            f"must be a JSON object of at most {MAX_JSON} characters, not {printable(text[:40])}")
    return value


def speculation(text: str) -> Speculation:
    """The type of an option with the settings of speculative decoding."""
    try:
        return Speculation.of(json_object(text))
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def add_overwrite_option(group: argparse._ActionsContainer) -> None:
    """The companion option of `--event-log`."""
    group.add_argument("--overwrite-event-log", action="store_true",
                       help="replace the file of --event-log also where it is no event log, or another user's")


def engine_settings(asked: argparse.Namespace) -> dict[str, Any]:
    """The engine options given, by the names of `EngineConfig`."""
    names = [_setting(name) for name, _ in ENGINE_OPTIONS]
    return {name: asdict(value) if isinstance(value := getattr(asked, name), Speculation) else value for name in names}


def _setting(name: str) -> str:
    return name.removeprefix("--").replace("-", "_")
