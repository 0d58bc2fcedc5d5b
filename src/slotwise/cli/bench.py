"""slotwise bench and slotwise compare: measure a server, or an engine in this process."""

from __future__ import annotations

import argparse
import contextlib
import math
import statistics
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from slotwise.cli.options_of_settings import (
    MODEL_HELP,
    Bytes,
    Commands,
    Number,
    add_command,
    add_engine_options,
    add_overwrite_option,
    engine_settings,
    option_of,
    reader,
)
from slotwise.cli.parser import Parser, mark_common
from slotwise.cli.process import INTERRUPTED, ending_at_once
from slotwise.cli.pull import USUAL_MODEL_HELP, find_model, names_model
from slotwise.cli.remote import KEY_VARIABLE, Server, api_key_of, is_url
from slotwise.cli.workload_options import DRAWN, Defaults, add_seed_option, add_workload_options, in_tokens, workload_of
from slotwise.compute.model.published_models import PUBLISHED, present
from slotwise.core.scheduler_limits import SLOTS, TOKENS
from slotwise.core.setting_fields import Range, real, whole
from slotwise.core.speculation.speculation_settings import Speculation
from slotwise.engine.config import BYTES, QUANTIZATIONS, EngineConfig
from slotwise.errors import printable
from slotwise.measure.bench.comparison import (
    DISCIPLINES,
    Comparison,
    Contender,
    contenders,
    rounds,
    same_cache,
    with_drafts,
)
from slotwise.measure.bench.results import progress
from slotwise.measure.workload import chats
from slotwise.measure.workload.distributions import MAX_LENGTH, MAX_USERS
from slotwise.measure.workload.workloads import Workload

if TYPE_CHECKING:
    from rich.console import RenderableType

    from slotwise.compose.engine_builder import Loaded
    from slotwise.compute.model.model_registry import FoundModel
    from slotwise.measure.bench.comparison import Make
    from slotwise.measure.bench.offline_run import OnStep, Stand
    from slotwise.measure.bench.results import ProgressBar
    from slotwise.observe.log_file import LogFile

USUAL_URL = "http://127.0.0.1:8000"
COMMON_OF_WORKLOAD = ("dataset_name", "num_prompts", "input_lengths", "output_lengths", "request_rate")
MAX_WARMUPS = 1000
ITERATIONS = 100_000
MAX_ROWS = 8192
SECONDS = 45.0  # of `bench steps`: with the start of the engine about a minute
SERVED = Defaults(num_chats=64)
OFFLINE = Defaults(num_prompts=128, num_chats=64)


def add(commands: Commands) -> None:
    _add_bench(commands)
    _add_compare(commands)


def _add_bench(commands: Commands) -> None:
    summary = "measure a server, or an engine in this process"
    bench = commands.add_parser("bench", help=summary, description=summary[0].upper() + summary[1:] + ".")
    bench.epilog = ("`slotwise bench URL` stands for `bench serve URL`, and `slotwise bench MODEL` for `bench "
                    "throughput MODEL`.")
    kinds = bench.add_subparsers(dest="benchmark", metavar="BENCHMARK", title="benchmarks", required=True)
    _add_serve(kinds)
    _add_throughput(kinds)
    _add_latency(kinds)
    _add_steps(kinds)
    _add_kernels(kinds)


def with_benchmark(arguments: Sequence[str]) -> Sequence[str]:
    """Returns the arguments of `slotwise bench` with the benchmark that a model or a URL in its place stands for."""
    if len(arguments) < 2 or not names_model(arguments[1], is_before_others=True):
        return arguments
    return [arguments[0], "serve" if is_url(arguments[1]) else "throughput", *arguments[1:]]


def _add_serve(kinds: Commands) -> None:
    serve = add_command(kinds, "serve", "time the responses of an OpenAI-compatible server", run_serve)
    serve.usage = "slotwise bench serve [URL] [options]"
    mark_common(serve.add_argument(
        "url", nargs="?", metavar="URL", help=f"address of the server (default: {USUAL_URL})"))
    server = serve.add_argument_group("server")
    server.add_argument("--base-url", metavar="URL", help="the address, given as an option")
    server.add_argument("--endpoint", choices=("/v1/completions", "/v1/chat/completions"),
                        help="route of the requests (default: /v1/completions; of chats /v1/chat/completions)")
    mark_common(
        server.add_argument("--model", default="", metavar="NAME",
                            help="its served name (default: the server's first)"),
        server.add_argument("--api-key", default="", metavar="KEY",
                            help=f"key to send as a bearer token (default: ${KEY_VARIABLE})"))
    _add_phrasing(serve.add_argument_group("requests"))
    measured = serve.add_argument_group("measurement")
    mark_common(measured.add_argument(
        "--max-concurrency", type=Number(whole(1, MAX_USERS)), metavar="N",
        help="a closed loop of so many users, who wait for their responses: --arrivals closed:N"))
    measured.add_argument("--num-warmups", type=Number(whole(0, MAX_WARMUPS)), default=1, metavar="N",
                          help="short requests before those that are measured (default: 1)")
    mark_common(
        measured.add_argument("--goodput", nargs="+", default=[], metavar="NAME:MS", help="count requests within all "
                              "of these limits of ttft, tpot and e2el: ttft:500 tpot:50"),
        measured.add_argument("--save-result", action="store_true", help="write a JSON file"))
    measured.add_argument("--result-filename", metavar="FILE", help="path of that file")
    add_workload_options(serve, SERVED)
    add_seed_option(serve)
    _mark_workload(serve)


def _mark_workload(command: Parser) -> None:
    """Marks the common options of a workload."""
    mark_common(*(action for action in command._actions if action.dest in COMMON_OF_WORKLOAD))


def _add_phrasing(group: argparse._ArgumentGroup) -> None:
    group.add_argument("--vocab-size", type=Number(whole(2, TOKENS)), metavar="N",
                       help="prompts are random token ids below it "
                       "(default: the server's if it tells, else 4000)")
    group.add_argument("--text-prompts", action="store_true", help="send words instead of token ids, about a token "
                       "each, to servers that take no ids; chat does so always")
    group.add_argument("--ignore-eos", action=argparse.BooleanOptionalAction,
                       help="outputs reach their length also where the model would end earlier (default: on, and off "
                       "for chats)")
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
    mark_common(command.add_argument(
        "--roofline", action="store_true", help="run it twice, and print the achieved share of the roofline by kind of "
        "step, with a breakdown of the rest"))
    add_workload_options(command, OFFLINE)
    add_engine_options(command)
    _mark_workload(command)


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
        mark_common(command.add_argument(
            name, type=Number(allowed), default=default, metavar="N", help=f"{what} (default: {default})"))


def _add_steps(kinds: Commands) -> None:
    command = add_command(kinds, "steps", "time steps of every size in this process, for `slotwise simulate`, "
                          "`capacity` and `tune`", run_bench_steps)
    mark_common(
        command.add_argument("--event-log", required=True, metavar="FILE",
                             help="write the event log here: `slotwise simulate --machine FILE` reads it"),
        command.add_argument("--seconds", type=Number(real(1, 3600)), default=SECONDS, metavar="S",
                             help=f"no load begins after so many seconds (default: {SECONDS:g})"))
    add_overwrite_option(command)
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


def _add_offline(command: Parser) -> None:
    command.usage = f"{command.prog} [MODEL] [options]"
    mark_common(
        command.add_argument("model_tag", nargs="?", metavar="MODEL", help=MODEL_HELP),
        command.add_argument("--output-json", metavar="FILE", help="write the result here"))
    command.add_argument("--model", metavar="MODEL", help="the model, given as an option")


def _choose_model(asked: argparse.Namespace) -> None:
    """Sets `model` to the one that was given, as an argument or an option.

    Raises:
        ValueError: there are two, or it is the URL of a server.
    """
    if asked.model_tag and asked.model and asked.model_tag != asked.model:
        raise ValueError(f"{asked.model_tag} and --model {asked.model}: give one model")
    asked.model = asked.model_tag or asked.model
    if is_url(asked.model or ""):
        raise ValueError(f"{asked.model} is a server's address, and this measures an engine in this process: "
                         f"`slotwise bench serve {asked.model}` measures a server")


def _base_url(asked: argparse.Namespace) -> str:
    """Returns the server's address.  Raises ValueError where there are two, or a model is in its place."""
    if asked.url is None:
        return asked.base_url or USUAL_URL
    if asked.base_url not in (None, asked.url):
        raise ValueError(f"{asked.url} and --base-url {asked.base_url}: give one address")
    if not is_url(asked.url):
        raise ValueError(f"{printable(asked.url)} is not the URL of a server; `slotwise bench throughput "
                         f"{printable(asked.url)}` measures a model in this process")
    return Server(asked.url).url


def run_serve(asked: argparse.Namespace) -> int:
    from slotwise.measure.bench.load_generator import (
        CHAT,
        COMPLETIONS,
        SAFE_VOCAB_SIZE,
        BenchTarget,
        Phrasing,
        measure,
        resolve,
        serving_result,
    )
    from slotwise.measure.bench.measures import GoodputLimits
    from slotwise.measure.bench.result_tables import serving_table
    from slotwise.measure.bench.results import default_filename

    objectives = GoodputLimits.parse(asked.goodput)
    _check_chats(asked)
    has_chats = asked.dataset_name == chats.NAME
    target = BenchTarget(_base_url(asked), asked.endpoint or (CHAT if has_chats else COMPLETIONS), asked.model,
                         api_key_of(asked.api_key))
    phrasing = Phrasing(
        SAFE_VOCAB_SIZE if asked.vocab_size is None else asked.vocab_size, text_prompts=asked.text_prompts,
        ignore_eos=not has_chats if asked.ignore_eos is None else asked.ignore_eos,
        hidden_lengths=asked.hidden_lengths, temperature=asked.temperature)
    _check_writable(asked.result_filename)
    _close_loop(asked)
    workload = workload_of(asked, SERVED)
    target, vocab_size = resolve(target, asked.vocab_size or 0)
    phrasing = replace(phrasing, vocab_size=vocab_size)
    with progress(total=len(workload.requests), unit="request") as bar:
        measured = measure(target, workload, phrasing, num_warmups=asked.num_warmups, watch=bar.count)
    result = serving_result(target, workload, measured, objectives)
    path = asked.result_filename or (default_filename("serve", target.model) if asked.save_result else "")
    status = _show(serving_table(result), result, path)
    return status or (0 if result["completed"] else 1)


def _check_chats(asked: argparse.Namespace) -> None:
    """Raises ValueError for an option that would have no effect on conversations."""
    if asked.dataset_name != chats.NAME:
        return
    for name in ("vocab_size", "text_prompts", "hidden_lengths"):
        if getattr(asked, name):
            raise ValueError(f"--dataset-name chats sends conversations, which end by themselves: leave out "
                             f"{option_of(name)}")
    if asked.endpoint == "/v1/completions":
        raise ValueError("--dataset-name chats sends conversations: leave out --endpoint /v1/completions")


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
    from slotwise.measure.bench.offline_run import throughput
    from slotwise.measure.bench.result_tables import throughput_table
    from slotwise.observe.log_file import LogFile

    _choose_model(asked)
    _check_writable(asked.output_json)
    workload = workload_of(asked, OFFLINE)
    if workload.conversations:
        workload = in_tokens(workload, find_model(asked.model).path)
    if asked.roofline:
        if asked.event_log:
            raise ValueError("--roofline writes no event log: leave out --event-log")
        return _run_roofline(asked, workload)
    with (LogFile(asked.event_log, overwrite=asked.overwrite_event_log) if asked.event_log
          else nullcontext()) as file:
        stand, about = _stand(asked, file)
        with progress(total=len(workload.requests), unit="request") as bar:
            result = about | throughput(stand, workload, bar.show)
    return _show(throughput_table(result), result, asked.output_json)


def _run_roofline(asked: argparse.Namespace, workload: Workload) -> int:
    from slotwise.measure.bench.profiler import Profiler
    from slotwise.measure.bench.result_tables import roofline_table
    from slotwise.measure.bench.results import environment, workload_facts

    found = find_model(asked.model)
    profiler = Profiler(_config(asked, found))
    with progress(total=2 * len(workload.requests), unit="request") as bar:
        result = profiler.run(workload, lambda accounts, record: bar.show(len(accounts.outputs)))
    result = {
        "version": 1, "kind": "roofline", "status": "completed", "model": found.name,
        "environment": environment(), "settings": engine_settings(asked), "workload": workload_facts(workload)} | result
    return _show(roofline_table(result), result, asked.output_json)


def run_latency(asked: argparse.Namespace) -> int:
    from slotwise.measure.bench.offline_run import LatencyBatch, latency
    from slotwise.measure.bench.result_tables import latency_table

    _choose_model(asked)
    _check_writable(asked.output_json)
    batch = LatencyBatch(asked.batch_size, asked.input_len, asked.output_len, asked.num_iters_warmup, asked.num_iters)
    if asked.batching not in ("static", "dynamic"):
        asked.batch_size = None
    stand, about = _stand(asked)
    with progress(total=batch.num_iters, unit="iteration") as bar:
        result = about | latency(stand, batch, asked.seed, bar.show)
    return _show(latency_table(result), result, asked.output_json)


def run_bench_steps(asked: argparse.Namespace) -> int:
    from slotwise.measure.bench.result_tables import steps_table
    from slotwise.measure.bench.steps import fitted, run_steps
    from slotwise.observe.log_file import LogFile

    _choose_model(asked)
    _check_writable(asked.output_json)
    with LogFile(asked.event_log, overwrite=asked.overwrite_event_log) as file:
        stand, about = _stand(asked, file)
        with progress(total=math.ceil(asked.seconds), unit="s") as bar:
            result = about | run_steps(stand, asked.seconds, lambda passed: bar.show(int(passed)))
    result |= fitted(Path(asked.event_log))
    return _show(steps_table(result), result, asked.output_json)


def run_kernels(asked: argparse.Namespace) -> int:
    from slotwise.compute.kernels.cpu.products import paths
    from slotwise.measure.bench.product_paths import measure_paths, number_of_paths
    from slotwise.measure.bench.result_tables import kernels_table
    from slotwise.measure.bench.results import environment

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
    settings, found = engine_settings(asked), find_model(asked.model)
    with ending_at_once():
        from slotwise.compose.engine_builder import build_engine
        from slotwise.measure.bench.offline_run import Stand
        from slotwise.observe.offline import Logged

        engine, info = build_engine(_config(asked, found))
    about = {"model": found.name, "device": info.device, "dtype": info.dtype, "settings": settings}
    return Stand(Logged(engine, info, file) if file else engine, info.limits, info.vocab_size), about


def _config(asked: argparse.Namespace, found: FoundModel) -> EngineConfig:
    return EngineConfig.of(model=str(found.path), **engine_settings(asked))


def _check_writable(path: str | None) -> None:
    """Raises ValueError before the measurement rather than after."""
    if path and not Path(path).absolute().parent.is_dir():
        raise ValueError(f"there is no folder for {path}")


def _show(table: RenderableType, result: dict[str, Any], path: str | None) -> int:
    """Print a result, and write it if a path is given.  Returns the exit status."""
    from rich.console import Console

    from slotwise.measure.bench.results import write_json

    Console(highlight=False).print(table)
    if path:
        write_json(path, result)
        print(f"\nwritten to {path}")
    return INTERRUPTED if result["status"] == "interrupted" else 0


FILE_WIDTH = 160  # columns of the tables without a terminal
COMPARED_SLOTS = 16
MAX_SAME_CACHE_SLOTS = 256
REPEATS, MAX_REPEATS = 3, 100
SWEEPS = ("output-cv", "slots", "rows", "prefill")
WORKLOAD = Defaults(
    input_lengths="lognormal:64:0.8:256", output_lengths="lognormal:64:1.0:512", num_chats=32,
    dataset="chats for the real model where no lengths are given, otherwise random")
ENGINE = ("device", "dtype", "max_model_len", "max_num_batched_tokens", "block_size", "kv_cache_memory")
REAL_MODEL = "smollm2"
COMMON_OF_COMPARE = ("disciplines", "slots", "repeats", "online", "output", "json")
UNCACHED = {"enable_prefix_caching": False}  # only the discipline may differ


def _add_compare(commands: Commands) -> None:
    compare = add_command(commands, "compare", "run one workload under every discipline, side by side", run_compare)
    compare.usage = "slotwise compare [MODEL] [options]"
    mark_common(compare.add_argument(
        "model_tag", nargs="?", metavar="MODEL", help=USUAL_MODEL_HELP))
    compare.add_argument("--model", metavar="MODEL", help="the model, given as an option")
    group = compare.add_argument_group("comparison")
    group.add_argument("--disciplines", default=",".join(DISCIPLINES), metavar="A,B,...",
                       help=f"disciplines, in this order (default: {','.join(DISCIPLINES)})")
    group.add_argument("--slots", "--max-num-seqs", type=Number(whole(1, SLOTS)), default=COMPARED_SLOTS,
                       metavar="N",
                       help=f"rows of a step, at most (default: {COMPARED_SLOTS})")
    group.add_argument("--repeats", type=Number(whole(1, MAX_REPEATS)), default=REPEATS, metavar="N",
                       help="rounds, each of which runs every discipline once; figures are medians, with their range "
                       f"(default: {REPEATS})")
    group.add_argument("--online", action="store_true",
                       help="measure as clients of a real server, which is switched from discipline to discipline")
    group.add_argument("--equal-memory", type=Bytes(whole(1, BYTES), {"auto": 0}), metavar="BYTES|auto",
                       help="also run Orca's reservation against pages in a cache of so many bytes, with slots to "
                       "spare; auto: what Orca needs to fill the slots")
    group.add_argument("--speculative-config", type=reader(Speculation.read), metavar="JSON",
                       help="also run continuous batching with drafts from texts, as {\"method\": \"suffix\"}; "
                       "docs/speculation.md has all keys")
    group.add_argument("--vary", action="append", default=[], choices=SWEEPS,
                       help="also sweep: static over continuous by how outputs vary or by slots, tokens per second by "
                       "rows, step times by how prompts join; repeatable")
    group.add_argument("--price-per-hour", type=Number(real(0, 1e9)), metavar="PRICE",
                       help="price of this machine, for the cost of tokens")
    group.add_argument("--output", default="report.html", metavar="FILE", help="the report (default: report.html)")
    group.add_argument("--json", metavar="FILE", help="write the result here")
    add_engine_options(compare, (*ENGINE, "batch_size", "max_wait_ms"))
    add_workload_options(compare, WORKLOAD)
    add_seed_option(compare)
    mark_common(*(action for action in group._group_actions if action.dest in COMMON_OF_COMPARE))
    _mark_workload(compare)


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
        settings: dict[str, Any] = {name: getattr(asked, name) for name in ENGINE} | UNCACHED
        _choose_real_chats(asked)
        workload = workload_of(asked, WORKLOAD)
        found = find_model(asked.model)
        model = str(found.path.absolute())
        EngineConfig.of(model=model, max_num_seqs=asked.slots, **settings)
        return cls(
            found.name, {"model": model, **settings}, chosen, in_tokens(workload, found.path),
            asked.slots, asked.repeats, asked.equal_memory, tuple(dict.fromkeys(asked.vary)))


def _choose_real_chats(asked: argparse.Namespace) -> None:
    """Chooses the real model where none is given and it has been downloaded, and chats where it is compared."""
    if asked.model is None and present(PUBLISHED[REAL_MODEL]) is not None:
        asked.model = REAL_MODEL
    shape = ("dataset_name", "workload", "trace", "prefix", "save_workload", *DRAWN)
    if asked.model == REAL_MODEL and all(getattr(asked, name) is None for name in shape):
        asked.dataset_name = chats.NAME


def run_compare(asked: argparse.Namespace) -> int:
    from slotwise.measure.bench.results import environment

    _choose_model(asked)
    plan = Plan.of(asked)
    if asked.model is None:
        print(f"compare: on the built-in model; `slotwise pull {REAL_MODEL}` downloads a real one, to compare on chats",
              file=sys.stderr)
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
        _show_comparison(comparison, asked.output, asked.json)
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
    from slotwise.compose.engine_builder import load
    from slotwise.measure.bench.results import progress

    with progress("loading"):
        loaded = load(EngineConfig.of(**plan.settings, max_num_seqs=plan.slots))
    make = _maker(loaded, plan, comparison)
    chosen = list(plan.contenders)
    if plan.equal_memory is not None:
        chosen += same_cache(
            plan.equal_memory or _orca_bytes(plan), min(len(plan.workload.requests), MAX_SAME_CACHE_SLOTS))
    workload = plan.workload
    tokens = None if workload.ends_by_itself else plan.repeats * len(chosen) * workload.output_tokens
    with progress("compare", tokens, "token") as bar:
        for words, contender in rounds(plan.repeats, chosen):
            bar.say(words)
            comparison.run(contender, make, _by_tokens(bar))
    for name in plan.sweeps:
        with progress(f"vary {name}") as bar:
            comparison.sweeps.append(_sweep(name, plan, comparison.lengths, make, bar.say))


def _by_tokens(bar: ProgressBar) -> OnStep:
    return lambda accounts, record: bar.show(accounts.sampled_tokens)


def _maker(loaded: Loaded, plan: Plan, comparison: Comparison) -> Make:
    """Returns a function that makes engines on the loaded weights."""
    from slotwise.measure.bench.offline_run import Stand

    def make(settings: Mapping[str, Any]) -> Stand:
        config = EngineConfig.of(**{**plan.settings, **settings})
        engine, info = loaded.engine(config)
        comparison.head["dtype"] = info.dtype
        return Stand(engine, info.limits, info.vocab_size)

    return make


def _orca_bytes(plan: Plan) -> int:
    """Bytes of cache in which Orca's reservations for this workload fill the slots: keys and values of every layer."""
    from slotwise.compose.default_sizes import BLOCK_SIZE
    from slotwise.compute.model.loading import DTYPES, read_config

    config = read_config(Path(plan.settings["model"]))
    kind = DTYPES.get(plan.settings["dtype"]) or config.dtype
    block = plan.settings["block_size"] or BLOCK_SIZE
    workload = plan.workload
    reserved = workload.prompt_tokens / len(workload.requests) + workload.max_tokens
    blocks = plan.slots * -(-int(reserved) // block)
    return blocks * block * 2 * config.num_layers * config.num_kv_heads * config.head_dim * min(kind.itemsize, 4)


def _sweep(name: str, plan: Plan, outputs: list[int], make: Make, say: Callable[[str], None]) -> dict[str, Any]:
    """Args: outputs: tokens of the workload's outputs."""
    from slotwise.measure.bench import sweeps

    if name == "slots":
        return sweeps.number_of_slots(make, outputs, say)
    if name == "rows":
        return sweeps.rows(make, say)
    if name == "prefill":
        return sweeps.prefill(make, say)
    mean = sweeps.fitting_mean(statistics.fmean(outputs), make({"max_num_seqs": plan.slots}).limits.max_model_len)
    return sweeps.output_cv(make, plan.slots, len(outputs), mean, say)


def _online(plan: Plan, comparison: Comparison) -> None:
    from slotwise.measure.bench.results import progress
    from slotwise.measure.bench.server_run import run_online, serving

    arguments = [plan.settings["model"], "--max-num-seqs", str(plan.slots), "--served-model-name", plan.model]
    for name in ENGINE:
        if (value := plan.settings[name]) is not None:
            arguments += [option_of(name), str(value)]
    arguments.append("--no-enable-prefix-caching")
    with contextlib.ExitStack() as stack:
        with progress("starting a server"):
            served = stack.enter_context(serving(arguments))
        comparison.head["dtype"] = served.dtype
        number = plan.repeats * len(plan.contenders) * len(plan.workload.requests)
        with progress("compare", number, "request") as bar:
            for words, contender in rounds(plan.repeats, plan.contenders):
                bar.say(words)
                comparison.add(contender, *run_online(served.target, plan.workload, contender.settings, bar.count))


def _show_comparison(comparison: Comparison, report: str, figures: str | None) -> None:
    from rich.console import Console

    from slotwise.measure.bench.report.comparison_page import write_report
    from slotwise.measure.bench.report.tables import comparison_tables
    from slotwise.measure.bench.results import write_json

    result = comparison.result()
    console = Console(highlight=False)
    if not console.is_terminal:
        console.width = FILE_WIDTH
    console.print(comparison_tables(result))
    if figures:
        write_json(figures, result)
    write_report(result, report)
    print(f"\nwritten to {report}" + (f" and {figures}" if figures else ""))
