"""slotwise bench: measure a server, or an engine in this process."""

from __future__ import annotations

import argparse
import math
import os
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from slotwise.bench.progress import progress
from slotwise.cli.interrupts import INTERRUPTED, ending_at_once
from slotwise.cli.numbers import Number
from slotwise.cli.options import (
    BUILTIN_NAME,
    Commands,
    add_command,
    add_engine_options,
    add_overwrite_option,
    engine_settings,
)
from slotwise.cli.workload_options import Defaults, add_seed_option, add_workload_options, workload_of
from slotwise.core.settings import Range, real, whole
from slotwise.engine.config import QUANTIZATIONS, SLOTS, TOKENS
from slotwise.workload.distributions import MAX_LENGTH, MAX_USERS

if TYPE_CHECKING:
    from rich.console import RenderableType

    from slotwise.bench.offline_run import Stand
    from slotwise.engine.config import EngineConfig
    from slotwise.observe.log_file import LogFile
    from slotwise.workload.workloads import Workload

MAX_WARMUPS = 1000
ITERATIONS = 100_000
MAX_ROWS = 8192
SECONDS = 45.0  # of `bench steps`: with the start of the engine about a minute
OFFLINE = Defaults(num_prompts=128)


def add(commands: Commands) -> None:
    summary = "measure a server, or an engine in this process"
    bench = commands.add_parser("bench", help=summary, description=summary[0].upper() + summary[1:] + ".")
    kinds = bench.add_subparsers(dest="benchmark", metavar="BENCHMARK", title="benchmarks", required=True)
    _add_serve(kinds)
    _add_throughput(kinds)
    _add_latency(kinds)
    _add_steps(kinds)
    _add_kernels(kinds)


def _add_serve(kinds: Commands) -> None:
    serve = add_command(kinds, "serve", "time the responses of an OpenAI-compatible server", run_serve)
    server = serve.add_argument_group("server")
    server.add_argument("--base-url", default="http://127.0.0.1:8000", metavar="URL",
                        help="address of the server (default: http://127.0.0.1:8000)")
    server.add_argument("--endpoint", choices=("/v1/completions", "/v1/chat/completions"), default="/v1/completions",
                        help="route of the requests (default: /v1/completions)")
    server.add_argument("--model", default="", metavar="NAME", help="its served name (default: the server's first)")
    server.add_argument("--api-key", default=os.environ.get("SLOTWISE_API_KEY", "").partition(",")[0], metavar="KEY",
                        help="key to send as a bearer token (default: $SLOTWISE_API_KEY)")
    _add_phrasing(serve.add_argument_group("requests"))
    measured = serve.add_argument_group("measurement")
    measured.add_argument("--max-concurrency", type=Number(whole(1, MAX_USERS)), metavar="N",
                          help="a closed loop of so many users, who wait for their responses: --arrivals closed:N")
    measured.add_argument("--num-warmups", type=Number(whole(0, MAX_WARMUPS)), default=1, metavar="N",
                          help="short requests before those that are measured (default: 1)")
    measured.add_argument("--goodput", nargs="+", default=[], metavar="NAME:MS",
                          help="count requests within all of these limits of ttft, tpot and e2el: ttft:500 tpot:50")
    measured.add_argument("--save-result", action="store_true", help="write a JSON file")
    measured.add_argument("--result-filename", metavar="FILE", help="path of that file")
    add_workload_options(serve)
    add_seed_option(serve)


def _add_phrasing(group: argparse._ArgumentGroup) -> None:
    group.add_argument("--vocab-size", type=Number(whole(2, TOKENS)), metavar="N",
                       help="prompts are random token ids below it "
                       "(default: the server's if it tells, else 4000)")
    group.add_argument("--text-prompts", action="store_true", help="send words instead of token ids, about a token "
                       "each, to servers that take no ids; chat does so always")
    group.add_argument("--ignore-eos", action=argparse.BooleanOptionalAction, default=True,
                       help="outputs reach their length also where the model would end earlier (default: on)")
    group.add_argument("--hidden-lengths", action="store_true", help="all requests have the same max_tokens, "
                       "and Slotwise ends each output at its own length; other servers ignore that field (default: "
                       "max_tokens is each output's length)")
    group.add_argument("--temperature", type=Number(real(0, 100)), default=0.0, metavar="T",
                       help="0 is greedy (default: 0)")


def _add_throughput(kinds: Commands) -> None:
    command = add_command(kinds, "throughput", "run a workload in this process as fast as it goes", run_throughput)
    _add_offline(command)
    command.add_argument("--event-log", default="", metavar="FILE",
                         help="write the event log here, for `slotwise replay`, `explain` and `timeline`")
    add_overwrite_option(command)
    command.add_argument("--roofline", action="store_true", help="run it twice, and print the achieved share of the "
                         "roofline by kind of step, with a breakdown of the rest")
    add_workload_options(command, OFFLINE)
    add_engine_options(command)


def _add_latency(kinds: Commands) -> None:
    summary = "time one batch in this process, repeatedly"
    command = kinds.add_parser(  # `--batch-size` replaces the engine's: static and dynamic batches have that size
        "latency", help=summary, description=summary.capitalize() + ".", conflict_handler="resolve")
    command.set_defaults(run=run_latency)
    _add_offline(command)
    add_engine_options(command)
    counts: tuple[tuple[str, int, Range, str], ...] = (
        ("--batch-size", 8, whole(1, SLOTS), "requests at once"),
        ("--input-len", 32, whole(1, MAX_LENGTH), "tokens of each prompt"),
        ("--output-len", 128, whole(1, MAX_LENGTH), "tokens of each output"),
        ("--num-iters-warmup", 3, whole(0, ITERATIONS), "iterations that do not count"),
        ("--num-iters", 10, whole(1, ITERATIONS), "iterations that count"),
    )
    for name, default, allowed, what in counts:
        command.add_argument(name, type=Number(allowed), default=default, metavar="N",
                             help=f"{what} (default: {default})")


def _add_steps(kinds: Commands) -> None:
    command = add_command(kinds, "steps", "time steps of every size in this process, for `slotwise simulate`, "
                          "`capacity` and `tune`", run_bench_steps)
    command.add_argument("--event-log", required=True, metavar="FILE",
                         help="write the event log here: `slotwise simulate --machine FILE` reads it")
    add_overwrite_option(command)
    command.add_argument("--seconds", type=Number(real(1, 3600)), default=SECONDS, metavar="S",
                         help=f"no load begins after so many seconds (default: {SECONDS:g})")
    _add_offline(command)
    add_engine_options(command)


def _add_kernels(kinds: Commands) -> None:
    command = add_command(
        kinds, "kernels", "time products on this CPU by every path, and tell which is used", run_kernels)
    command.add_argument("--rows", type=Number(whole(1, MAX_ROWS)), nargs="+", default=[1, 8, 32, 128, 512],
                         metavar="N", help="numbers of rows (default: 1 8 32 128 512)")
    command.add_argument("--rounds", type=Number(whole(1, ITERATIONS)), default=5, metavar="N",
                         help="rounds of which the median is taken (default: 5)")
    command.add_argument("--quantization", choices=QUANTIZATIONS, default="none", help="weights of the products: "
                         "bfloat16, or quantized (default: none)")
    command.add_argument("--keep-fastest", action="store_true", help="use the fastest path of bfloat16 from now on: "
                         "keep it, for this processor, in the user's folder of caches")
    command.add_argument("--output-json", metavar="FILE", help="write the result here")


def _add_offline(command: argparse.ArgumentParser) -> None:
    command.add_argument("--model", help="a checkpoint's folder, a GGUF file or a hub id (default: the built-in model)")
    command.add_argument("--output-json", metavar="FILE", help="write the result here")


def run_serve(asked: argparse.Namespace) -> int:
    from slotwise.bench.load_generator import SAFE_VOCAB_SIZE, BenchTarget, Phrasing, measure, resolve, serving_result
    from slotwise.bench.measures import GoodputLimits
    from slotwise.bench.result_tables import serving_table
    from slotwise.bench.results import default_filename

    objectives = GoodputLimits.parse(asked.goodput)
    target = BenchTarget(asked.base_url, asked.endpoint, asked.model, asked.api_key)
    phrasing = Phrasing(
        SAFE_VOCAB_SIZE if asked.vocab_size is None else asked.vocab_size, text_prompts=asked.text_prompts,
        ignore_eos=asked.ignore_eos, hidden_lengths=asked.hidden_lengths, temperature=asked.temperature)
    _check_writable(asked.result_filename)
    _close_loop(asked)
    workload = workload_of(asked)
    target, vocab_size = resolve(target, asked.vocab_size or 0)
    phrasing = replace(phrasing, vocab_size=vocab_size)
    with progress(total=len(workload.requests), unit="request") as bar:
        measured = measure(target, workload, phrasing, num_warmups=asked.num_warmups, watch=bar.count)
    result = serving_result(target, workload, measured, objectives)
    path = asked.result_filename or (default_filename("serve", target.model) if asked.save_result else "")
    status = _show(serving_table(result), result, path)
    return status or (0 if result["completed"] else 1)


def _close_loop(asked: argparse.Namespace) -> None:
    """Turn --max-concurrency into --arrivals closed:N.  Raises ValueError if other arrivals are given."""
    if asked.max_concurrency is None:
        return
    rate = asked.request_rate
    if asked.workload or asked.arrivals is not None or (rate is not None and rate != math.inf):
        raise ValueError("--max-concurrency makes a closed loop, whose users wait for their answers: leave out "
                         "--workload, --arrivals and --request-rate, or leave it out")
    asked.request_rate, asked.arrivals = None, f"closed:{asked.max_concurrency}"


def run_throughput(asked: argparse.Namespace) -> int:
    from slotwise.bench.offline_run import throughput
    from slotwise.bench.result_tables import throughput_table
    from slotwise.observe.log_file import LogFile

    _check_writable(asked.output_json)
    workload = workload_of(asked, OFFLINE)
    if asked.roofline:
        return _run_roofline(asked, workload)
    with (LogFile(asked.event_log, overwrite=asked.overwrite_event_log) if asked.event_log
          else nullcontext()) as file:
        stand, about = _stand(asked, file)
        with progress(total=len(workload.requests), unit="request") as bar:
            result = about | throughput(stand, workload, bar.show)
    return _show(throughput_table(result), result, asked.output_json)


def _run_roofline(asked: argparse.Namespace, workload: Workload) -> int:
    from slotwise.bench.profiler import Profiler
    from slotwise.bench.result_tables import roofline_table
    from slotwise.bench.results import environment, workload_facts

    profiler = Profiler(_config(asked))
    with progress(total=2 * len(workload.requests), unit="request") as bar:
        result = profiler.run(workload, lambda accounts, record: bar.show(len(accounts.outputs)))
    result = {
        "version": 1, "kind": "roofline", "status": "completed", "model": asked.model or BUILTIN_NAME,
        "environment": environment(), "settings": engine_settings(asked), "workload": workload_facts(workload)} | result
    return _show(roofline_table(result), result, asked.output_json)


def run_latency(asked: argparse.Namespace) -> int:
    from slotwise.bench.offline_run import LatencyBatch, latency
    from slotwise.bench.result_tables import latency_table

    _check_writable(asked.output_json)
    batch = LatencyBatch(asked.batch_size, asked.input_len, asked.output_len, asked.num_iters_warmup, asked.num_iters)
    if asked.batching not in ("static", "dynamic"):
        asked.batch_size = None
    stand, about = _stand(asked)
    with progress(total=batch.num_iters, unit="iteration") as bar:
        result = about | latency(stand, batch, asked.seed, bar.show)
    return _show(latency_table(result), result, asked.output_json)


def run_bench_steps(asked: argparse.Namespace) -> int:
    from slotwise.bench.result_tables import steps_table
    from slotwise.bench.steps import fitted, run_steps
    from slotwise.observe.log_file import LogFile

    _check_writable(asked.output_json)
    with LogFile(asked.event_log, overwrite=asked.overwrite_event_log) as file:
        stand, about = _stand(asked, file)
        with progress(total=math.ceil(asked.seconds), unit="s") as bar:
            result = about | run_steps(stand, asked.seconds, lambda passed: bar.show(int(passed)))
    result |= fitted(Path(asked.event_log))
    return _show(steps_table(result), result, asked.output_json)


def run_kernels(asked: argparse.Namespace) -> int:
    from slotwise.bench.product_paths import measure_paths, number_of_paths
    from slotwise.bench.result_tables import kernels_table
    from slotwise.bench.results import environment
    from slotwise.kernels.cpu import paths

    if asked.keep_fastest and asked.quantization != "none":
        raise ValueError("--keep-fastest is for bfloat16: of the paths of quantized weights the first possible one is "
                         "used")
    _check_writable(asked.output_json)
    with progress(total=(asked.rounds + 1) * number_of_paths(asked.quantization), unit="measurement") as bar:
        measured = measure_paths(sorted(set(asked.rows)), asked.rounds, bar.count, asked.quantization)
    result = {"version": 1, "kind": "kernels", "status": "completed", "environment": environment()} | measured
    status = _show(kernels_table(result), result, asked.output_json)
    if asked.keep_fastest:
        print(f"\n{measured['fastest']} is used from now on: {paths.keep(measured['fastest'])}")
    return status


def _stand(asked: argparse.Namespace, file: LogFile | None = None) -> tuple[Stand, dict[str, Any]]:
    """An engine in this process, logged to `file`, and the head of its result."""
    settings = engine_settings(asked)
    with ending_at_once():
        from slotwise.bench.offline_run import Stand
        from slotwise.compose.engine_builder import build_engine
        from slotwise.observe.offline import Logged

        engine, info = build_engine(_config(asked))
    about = {"model": asked.model or BUILTIN_NAME, "device": info.device, "dtype": info.dtype, "settings": settings}
    return Stand(Logged(engine, info, file) if file else engine, info.limits, info.vocab_size), about


def _config(asked: argparse.Namespace) -> EngineConfig:
    from slotwise import builtin
    from slotwise.engine.config import EngineConfig
    from slotwise.model.checkpoint import locate

    return EngineConfig.of(model=str(locate(asked.model or builtin.path())), **engine_settings(asked))


def _check_writable(path: str | None) -> None:
    """Raises ValueError before the measurement rather than after."""
    if path and not Path(path).absolute().parent.is_dir():
        raise ValueError(f"there is no folder for {path}")


def _show(table: RenderableType, result: dict[str, Any], path: str | None) -> int:
    """Print a result, and write it if a path is given.  Returns the exit status."""
    from rich.console import Console

    from slotwise.bench.results import write_json

    Console(highlight=False).print(table)
    if path:
        write_json(path, result)
        print(f"\nwritten to {path}")
    return INTERRUPTED if result["status"] == "interrupted" else 0
