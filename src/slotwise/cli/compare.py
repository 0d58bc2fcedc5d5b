"""slotwise compare: one workload under every batching discipline, in a table and a report."""

from __future__ import annotations

import argparse
import contextlib
import statistics
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from slotwise.bench.comparison import DISCIPLINES, Comparison, Contender, contenders, rounds, same_cache, with_drafts
from slotwise.cli.interrupts import INTERRUPTED
from slotwise.cli.numbers import Bytes, Number
from slotwise.cli.options import BUILTIN_NAME, Commands, add_command, add_engine_options, speculation
from slotwise.cli.workload_options import Defaults, add_seed_option, add_workload_options, workload_of
from slotwise.core.settings import real, whole
from slotwise.engine.config import BYTES, EngineConfig
from slotwise.engine.config import ENGINE as ENGINE_NUMBERS
from slotwise.workload.workloads import Workload

if TYPE_CHECKING:
    from slotwise.bench.comparison import Make
    from slotwise.bench.offline_run import OnStep
    from slotwise.bench.progress import ProgressBar
    from slotwise.compose.engine_builder import Loaded

FILE_WIDTH = 160  # columns of the tables without a terminal
SLOTS = 16
MAX_SAME_CACHE_SLOTS = 256
REPEATS, MAX_REPEATS = 3, 100
SWEEPS = ("output-cv", "slots", "rows", "prefill")
WORKLOAD = Defaults(input_lengths="lognormal:64:0.8:256", output_lengths="lognormal:64:1.0:512")
ENGINE = ("--device", "--dtype", "--max-model-len", "--max-num-batched-tokens", "--block-size", "--kv-cache-memory")
UNCACHED = {"enable_prefix_caching": False}  # only the discipline may differ


def add(commands: Commands) -> None:
    compare = add_command(commands, "compare", "run one workload under every discipline, side by side", run)
    compare.add_argument("--model", help="a checkpoint's folder, a GGUF file or a hub id (default: the built-in model)")
    group = compare.add_argument_group("comparison")
    group.add_argument("--disciplines", default=",".join(DISCIPLINES), metavar="A,B,...",
                       help=f"disciplines, in this order (default: {','.join(DISCIPLINES)})")
    group.add_argument("--slots", "--max-num-seqs", type=Number(ENGINE_NUMBERS["max_num_seqs"]), default=SLOTS,
                       metavar="N",
                       help=f"rows of a step, at most (default: {SLOTS})")
    group.add_argument("--batch-size", type=Number(ENGINE_NUMBERS["batch_size"]), metavar="N",
                       help="static, dynamic: most requests of a batch (default: as many as there are slots)")
    group.add_argument("--max-wait-ms", type=Number(ENGINE_NUMBERS["max_wait_ms"]), metavar="MS",
                       help="dynamic: how long the first request of a batch waits for others (default: 50)")
    group.add_argument("--repeats", type=Number(whole(1, MAX_REPEATS)), default=REPEATS, metavar="N",
                       help="rounds, each of which runs every discipline once; figures are medians, with their range "
                       f"(default: {REPEATS})")
    group.add_argument("--online", action="store_true",
                       help="measure as clients of a real server, which is switched from discipline to discipline")
    group.add_argument("--equal-memory", type=Bytes(whole(1, BYTES), {"auto": 0}), metavar="BYTES|auto",
                       help="also run Orca's reservation against pages in a cache of so many bytes, with slots to "
                       "spare; auto: what Orca needs to fill the slots")
    group.add_argument("--speculative-config", type=speculation, metavar="JSON",
                       help="also run continuous batching with drafts from texts, as {\"method\": \"suffix\"}; "
                       "docs/speculation.md has all keys")
    group.add_argument("--vary", action="append", default=[], choices=SWEEPS,
                       help="also sweep: static over continuous by how outputs vary or by slots, tokens per second by "
                       "rows, step times by how prompts join; repeatable")
    group.add_argument("--price-per-hour", type=Number(real(0, 1e9)), metavar="PRICE",
                       help="price of this machine, for the cost of tokens")
    group.add_argument("--output", default="report.html", metavar="FILE", help="the report (default: report.html)")
    group.add_argument("--json", metavar="FILE", help="write the result here")
    add_engine_options(compare, ENGINE)
    add_workload_options(compare, WORKLOAD)
    add_seed_option(compare)


@dataclass(frozen=True)
class Plan:
    """The options, checked before anything is loaded."""

    model: str  # as it is named in the report
    settings: dict[str, Any]  # of EngineConfig, the same for every discipline
    contenders: list[Contender]
    workload: Workload
    slots: int
    repeats: int
    equal_memory: int | None  # bytes; 0: what Orca needs
    sweeps: tuple[str, ...]

    @classmethod
    def of(cls, asked: argparse.Namespace) -> Plan:
        """Raises ValueError with one line for options that contradict each other or are out of range."""
        if asked.online and (asked.vary or asked.equal_memory is not None):
            raise ValueError("--vary and --equal-memory look into the engine: leave out --online")
        if asked.online and asked.speculative_config is not None:
            raise ValueError("a running server cannot begin to draft: leave out --online or --speculative-config")
        if asked.equal_memory is not None and asked.kv_cache_memory is not None:
            raise ValueError("--equal-memory sets the cache of its runs: leave out --kv-cache-memory")
        for path in (asked.output, asked.json):
            if path and (not Path(path).absolute().parent.is_dir() or Path(path).is_dir()):
                raise ValueError(f"{path} cannot be written: there is no such folder, or it is one")
        chosen = contenders(
            [name.strip() for name in asked.disciplines.split(",")], asked.slots, asked.batch_size, asked.max_wait_ms)
        if asked.speculative_config is not None:
            chosen.append(with_drafts(asked.speculative_config, asked.slots))
        names = [option.removeprefix("--").replace("-", "_") for option in ENGINE]
        settings: dict[str, Any] = {name: getattr(asked, name) for name in names} | UNCACHED
        model = _located(asked.model)
        EngineConfig.of(model=model, max_num_seqs=asked.slots, **settings)
        return cls(
            asked.model or BUILTIN_NAME, {"model": model, **settings}, chosen, workload_of(asked, WORKLOAD),
            asked.slots, asked.repeats, asked.equal_memory, tuple(dict.fromkeys(asked.vary)))


def _located(model: str | None) -> str:
    from slotwise import builtin
    from slotwise.model.checkpoint import locate

    return str(locate(model or builtin.path()).absolute())


def run(asked: argparse.Namespace) -> int:
    from slotwise.bench.results import environment

    plan = Plan.of(asked)
    comparison = Comparison(plan.workload, {
        "environment": environment(), "model": plan.model, "dtype": plan.settings["dtype"],
        "mode": "server" if asked.online else "offline", "seed": asked.seed, "slots": plan.slots}, asked.price_per_hour)
    failure = None
    try:
        (_online if asked.online else _offline)(plan, comparison)
    except KeyboardInterrupt:
        comparison.interrupted = True
    except (ValueError, RuntimeError, MemoryError) as error:
        failure = error
    if comparison.num_runs or comparison.sweeps:
        _show(comparison, asked.output, asked.json)
    if failure is not None:
        raise failure
    if comparison.interrupted:
        print(f"interrupted: {comparison.num_runs} runs and {len(comparison.sweeps)} sweeps were complete",
              file=sys.stderr)
        return INTERRUPTED
    if comparison.identical_tokens is False and comparison.head["dtype"] == "float32":
        raise RuntimeError("disciplines gave different tokens in float32: this is a bug")
    return 0


def _offline(plan: Plan, comparison: Comparison) -> None:
    from slotwise.bench.progress import progress
    from slotwise.compose.engine_builder import load

    with progress("loading"):
        loaded = load(EngineConfig.of(**plan.settings, max_num_seqs=plan.slots))
    make = _maker(loaded, plan, comparison)
    chosen = list(plan.contenders)
    if plan.equal_memory is not None:
        chosen += same_cache(
            plan.equal_memory or _orca_bytes(plan), min(len(plan.workload.requests), MAX_SAME_CACHE_SLOTS))
    with progress("compare", plan.repeats * len(chosen) * plan.workload.output_tokens, "token") as bar:
        for words, contender in rounds(plan.repeats, chosen):
            bar.say(words)
            comparison.run(contender, make, _by_tokens(bar))
    for name in plan.sweeps:
        with progress(f"vary {name}") as bar:
            comparison.sweeps.append(_sweep(name, plan, make, bar.say))


def _by_tokens(bar: ProgressBar) -> OnStep:
    return lambda accounts, record: bar.show(accounts.sampled_tokens)


def _maker(loaded: Loaded, plan: Plan, comparison: Comparison) -> Make:
    """Returns a function that makes engines on the loaded weights."""
    from slotwise.bench.offline_run import Stand

    def make(settings: Mapping[str, Any]) -> Stand:
        config = EngineConfig.of(**{**plan.settings, **settings})
        engine, info = loaded.engine(config)
        comparison.head["dtype"] = info.dtype
        return Stand(engine, info.limits, info.vocab_size)

    return make


def _orca_bytes(plan: Plan) -> int:
    """Bytes of cache in which Orca's reservations for this workload fill the slots: keys and values of every layer."""
    from slotwise.compose.sizes import BLOCK_SIZE
    from slotwise.model.loading import DTYPES, read_config

    config = read_config(Path(plan.settings["model"]))
    kind = DTYPES.get(plan.settings["dtype"]) or config.dtype
    block = plan.settings["block_size"] or BLOCK_SIZE
    workload = plan.workload
    reserved = workload.prompt_tokens / len(workload.requests) + workload.max_tokens
    blocks = plan.slots * -(-int(reserved) // block)
    return blocks * block * 2 * config.num_layers * config.num_kv_heads * config.head_dim * min(kind.itemsize, 4)


def _sweep(name: str, plan: Plan, make: Make, say: Callable[[str], None]) -> dict[str, Any]:
    from slotwise.bench import sweeps

    outputs = [request.num_output for request in plan.workload.requests]
    if name == "slots":
        return sweeps.number_of_slots(make, outputs, say)
    if name == "rows":
        return sweeps.rows(make, say)
    if name == "prefill":
        return sweeps.prefill(make, say)
    mean = sweeps.fitting_mean(statistics.fmean(outputs), make({"max_num_seqs": plan.slots}).limits.max_model_len)
    return sweeps.output_cv(make, plan.slots, len(outputs), mean, say)


def _online(plan: Plan, comparison: Comparison) -> None:
    from slotwise.bench.progress import progress
    from slotwise.bench.server_run import run_online, serving

    arguments = [plan.settings["model"], "--max-num-seqs", str(plan.slots), "--served-model-name", plan.model]
    for option in ENGINE:
        value = plan.settings[option.removeprefix("--").replace("-", "_")]
        if value is not None:
            arguments += [option, str(value)]
    arguments.append("--no-enable-prefix-caching")
    with contextlib.ExitStack() as stack:
        with progress("starting a server"):
            served = stack.enter_context(serving(arguments))
        comparison.head["dtype"] = served.dtype
        number = plan.repeats * len(plan.contenders) * len(plan.workload.requests)
        with progress("compare", number, "request") as bar:
            for words, contender in rounds(plan.repeats, plan.contenders):
                bar.say(words)
                comparison.add(contender, run_online(served.target, plan.workload, contender.settings, bar.count))


def _show(comparison: Comparison, report: str, figures: str | None) -> None:
    from rich.console import Console

    from slotwise.bench.report.comparison_page import write_report
    from slotwise.bench.report.tables import comparison_tables
    from slotwise.bench.results import write_json

    result = comparison.result()
    console = Console(highlight=False)
    if not console.is_terminal:
        console.width = FILE_WIDTH
    console.print(comparison_tables(result))
    if figures:
        write_json(figures, result)
    write_report(result, report)
    print(f"\nwritten to {report}" + (f" and {figures}" if figures else ""))
