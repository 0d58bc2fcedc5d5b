"""Speculative decoding against none, in interleaved pairs, and what proposing costs.

usage: python -m benchmarks.speculation lookups MODEL NAME [--only edit:1 flat:64 ...] [--dtype bfloat16] [--pairs 10]
           [--seconds 150] [--json FILE]

    edit:N     code editing with N streams: the prompt is a function of the library, the output repeats it with edits
    flat:N     nothing to gain with N streams: n-grams recur, and what follows them is random
    mixed      64 requests at once with log-normal lengths (benchmarks/peers/same_requests.py); the model's own tokens

Two engines share the weights, and pairs alternate which runs first.  Pairs are added to those that FILE has of the same
model, case and data type, and no pair begins after so many seconds: short runs add up.  A model with random weights
repeats nothing, and the built-in one is small: in `edit` and `flat` the executor computes everything and then replaces
each sampled token by the script's at that index of the output.  `mixed` is not scripted.  Figures are output tokens per
second; a ratio above 1 means that drafts are faster, and its interval is that of the mean of the logarithms, by
resampling.  A pair during which other processes took more than a twentieth of the processors is not counted.
The share of the time that goes to proposing and budgeting is timed inside all runs.
"""

from __future__ import annotations

import ast
import contextlib
import json
import os
import random
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from difflib import SequenceMatcher
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.commands import bar, parser_of
from benchmarks.pairs import interval
from benchmarks.peers.same_requests import VOCABULARY, workload

from slotwise import builtin
from slotwise.compose.engine_builder import Loaded, load
from slotwise.core.params import SamplingSpec
from slotwise.core.record import StepPlan, StepResult
from slotwise.core.request import RequestSpec
from slotwise.core.speculation.speculation_settings import Speculation
from slotwise.engine.config import EngineConfig
from slotwise.engine.engine import Engine
from slotwise.engine.executor import Executor
from slotwise.engine.messages import Add
from slotwise.measure.bench.results import environment, write_json
from slotwise.text.tokenizer import Tokenizer

MODULES = ("textwrap", "shlex", "heapq", "bisect", "fnmatch", "calendar", "csv", "difflib", "statistics", "string")
FUNCTION = (120, 320)  # tokens of a function that is edited
EDITED = 0.06  # share of its tokens at which an edit begins
ALPHABET = 12  # different tokens where there is nothing to gain
DISTURBED = 0.05  # share of the processors that other processes take in a run that is not counted
FLAT_TOKENS = 64  # of each output there
CASES = ("edit:1", "edit:8", "flat:1", "flat:8", "flat:32", "flat:64", "mixed")
GREEDY = {"temperature": 0.0, "ignore_eos": True}


class Job(NamedTuple):
    """One request, and the output that it is made to have; (): the model's own."""

    prompt: list[int]
    max_tokens: int
    script: tuple[int, ...] = ()


class Scripted:
    """Computes every step, and replaces the sampled tokens by those of scripts."""

    def __init__(self, executor: Executor) -> None:
        self.scripts: dict[str, tuple[int, ...]] = {}
        self._executor = executor
        self._plans: list[StepPlan] = []
        self._num_prompt: dict[str, int] = {}

    def submit(self, plan: StepPlan) -> None:
        self._num_prompt |= {join.request_id: join.num_prompt for join in plan.new_requests}
        self._plans.append(plan)
        self._executor.submit(plan)

    def collect(self) -> StepResult:
        plan, result = self._plans.pop(0), self._executor.collect()
        tokens = [self._replaced(plan, row, sampled) for row, sampled in enumerate(result.tokens)]
        return result._replace(tokens=tuple(tokens))

    def _replaced(self, plan: StepPlan, row: int, sampled: tuple[int, ...]) -> tuple[int, ...]:
        script = self.scripts.get(plan.request_ids[row])
        if not script or not sampled:
            return sampled
        drafts = plan.drafts[row] if plan.drafts else ()
        begin = plan.starts[row] + plan.counts[row] - len(drafts) - self._num_prompt[plan.request_ids[row]]
        to_come = script[begin : begin + len(drafts) + 1]
        right = 0
        while right < len(drafts) and right + 1 < len(to_come) and drafts[right] == to_come[right]:
            right += 1
        return to_come[: right + 1]


def functions(tokenizer: Tokenizer) -> list[list[int]]:
    """The functions of some modules of Python's library, of a suitable size, as tokens."""
    found = []
    for name in MODULES:
        source = (Path(ast.__file__).parent / f"{name}.py").read_text()
        for node in ast.walk(ast.parse(source)):
            if isinstance(node, ast.FunctionDef) and (text := ast.get_source_segment(source, node)):
                ids = tokenizer.encode(text + "\n")
                if FUNCTION[0] <= len(ids) <= FUNCTION[1]:
                    found.append(ids)
    return found


def edited(ids: Sequence[int], draw: random.Random) -> list[int]:
    """Replaces, inserts or leaves out one to three tokens now and then."""
    output, at = [], 0
    while at < len(ids):
        if draw.random() < EDITED:
            kind, size = draw.choice(("replace", "replace", "insert", "leave out")), draw.randint(1, 3)
            if kind != "leave out":
                output += draw.choices(ids, k=size)
            at += size if kind != "insert" else 0
        if at < len(ids):
            output.append(ids[at])
        at += 1
    return output


def editing(tokenizer: Tokenizer, number: int, seed: str) -> tuple[list[Job], float]:
    """Jobs, and the share of their outputs that repeats the function."""
    draw, jobs, shares = random.Random(seed), [], []
    for ids in draw.sample(functions(tokenizer), number):
        script = edited(ids, draw)
        matched = sum(one.size for one in SequenceMatcher(None, ids, script, autojunk=False).get_matching_blocks())
        shares.append(matched / len(script))
        jobs.append(Job(tokenizer.encode("Rewrite this function:\n") + ids, len(script), tuple(script)))
    return jobs, sum(shares) / len(shares)


def flat(number: int, seed: str) -> list[Job]:
    """Of so few tokens every three recur soon, and what follows them is random."""
    draw = random.Random(seed)
    alphabet = draw.sample(range(1, 2000), ALPHABET)
    return [Job(draw.choices(alphabet, k=128), FLAT_TOKENS, tuple(draw.choices(alphabet, k=FLAT_TOKENS)))
            for _ in range(number)]


def mixed(seed: int) -> list[Job]:
    work = workload(f"mixed:{seed}", 64)
    return [Job(work.prompt_ids(one, VOCABULARY), one.num_output) for one in work.requests]


class Figures(NamedTuple):
    rate: float  # output tokens per second
    first: float  # mean seconds to the first token
    drafts: int
    right: int
    full_steps: int  # decode steps of 64 rows
    full_with_drafts: int
    others: float  # share of the processors that other processes took
    proposing: float = 0.0  # share of the time that finding drafts and choosing their number took


def others_seconds() -> float:
    """Returns the processor time that other processes have taken, of all processors; 0 where it is not told."""
    stat = Path("/proc/stat")
    if not stat.exists():
        return 0.0
    user, nice, system, _, _, *interrupts = map(int, stat.read_text().split("\n", 1)[0].split()[1:9])
    return (user + nice + system + sum(interrupts)) / os.sysconf("SC_CLK_TCK") - sum(os.times()[:2])


@contextlib.contextmanager
def timed(owner: Any, *names: str) -> Iterator[list[float]]:
    """Collects the seconds of each call of some methods."""
    found: list[float] = []

    def wrapped(inner: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any) -> Any:
            began = time.perf_counter()
            try:
                return inner(*args)
            finally:
                found.append(time.perf_counter() - began)
        return call

    for name in names:
        setattr(owner, name, wrapped(getattr(owner, name)))
    try:
        yield found
    finally:
        for name in names:
            delattr(owner, name)


def run(engine: Engine, jobs: Sequence[Job], together: int) -> Figures:
    """As `played`, with the share of the time that drafting takes."""
    with timed(engine._scheduler._drafting, "add", "committed", "finished") as seconds:
        began = time.perf_counter()
        figures = played(engine, jobs, together)
    return figures._replace(proposing=sum(seconds) / (time.perf_counter() - began))


def played(engine: Engine, jobs: Sequence[Job], together: int) -> Figures:
    """Runs jobs, `together` at a time."""
    assert isinstance(engine.executor, Scripted)
    adds = [Add(at, RequestSpec(job.prompt, SamplingSpec(max_tokens=job.max_tokens, **GREEDY), at))
            for at, job in enumerate(jobs)]
    engine.executor.scripts = {one.request_id: job.script for one, job in zip(adds, jobs, strict=True)}
    sent: dict[int, float] = {}
    firsts: list[float] = []
    drafts = right = full = drafted = num_tokens = 0
    began, others = time.perf_counter(), others_seconds()
    while adds or engine.has_work:
        while adds and engine._scheduler.num_unfinished < together:
            one = adds.pop(0)
            sent[one.request_id] = time.perf_counter()
            engine.handle(one)
        record = engine.step()
        now = time.perf_counter()
        num_tokens += sum(map(len, record.tokens))
        for request_id, tokens in zip(record.plan.request_ids, record.tokens, strict=True):
            if tokens and request_id in sent:
                firsts.append(now - sent.pop(request_id))
        is_full = len(record.plan.counts) == 64 and not any(kind == 0 for kind in record.plan.kinds)
        full, drafted = full + is_full, drafted + (is_full and bool(record.plan.drafts))
        for found, tokens in zip(record.plan.drafts, record.tokens, strict=False):
            if found:
                drafts, right = drafts + len(found), right + max(0, len(tokens) - 1)
    seconds = time.perf_counter() - began
    others = (others_seconds() - others) / seconds / (os.cpu_count() or 1)
    return Figures(num_tokens / seconds, sum(firsts) / max(1, len(firsts)), drafts, right, full, drafted, others)


def built(loaded: Loaded, config: EngineConfig) -> Engine:
    engine, _ = loaded.engine(config)
    engine.executor = Scripted(engine.executor)
    return engine


def jobs_of(case: str, tokenizer: Tokenizer, pair: int) -> tuple[list[Job], float]:
    """Returns the jobs of a pair, and the share that they repeat.  No two cases or pairs share an output."""
    kind, _, number = case.partition(":")
    if kind == "mixed":
        return mixed(pair), 0.0
    seed, jobs = f"{case} {pair}", max(4, int(number))
    return editing(tokenizer, jobs, seed) if kind == "edit" else (flat(jobs, seed), 0.0)


class Case(NamedTuple):
    """The figures of a case so far, as they are in the result file."""

    row: dict[str, Any]

    def add(self, off: Figures, on: Figures, repeated: float) -> None:
        row = self.row
        row.setdefault("uncounted", 0)
        if max(off.others, on.others) > DISTURBED:
            row["uncounted"] += 1
            return
        for name, figures in (("off", off), ("on", on)):
            row.setdefault(name, []).append(round(figures.rate, 1))
            row.setdefault(f"first_{name}", []).append(round(figures.first, 5))
        row.setdefault("repeated", []).append(round(repeated, 3))
        row["proposing_shares"].append(round(on.proposing, 5))
        for name in ("drafts", "right", "full_steps", "full_with_drafts"):
            row[name] = row.get(name, 0) + getattr(on, name)
        row["ratio"] = interval([this / other for this, other in zip(row["on"], row["off"], strict=True)])
        row["first_token_ratio"] = interval(
            [other / this for this, other in zip(row["first_on"], row["first_off"], strict=True)])

    def say(self) -> None:
        row = self.row
        if "on" not in row:
            print(row["case"], "every pair was disturbed", file=sys.stderr)
            return
        print(row["model"], row["dtype"], row["case"], f"{len(row['on'])} pairs", *(
            f"{part:.3f}" for part in row["ratio"]), f"{row['right']}/{row['drafts']} right",
            f"{row['full_with_drafts']}/{row['full_steps']} full steps with drafts",
            f"{statistics.median(row['proposing_shares']):.2%} proposing", file=sys.stderr)


def measure(engines: dict[str, Engine], case: Case, pairs: int, ends: float) -> Iterator[None]:
    """Adds pairs to a case; yields after each."""
    tokenizer = Tokenizer.load(builtin.path())  # its ids are ids of every model: only their number matters
    name = case.row["case"]
    streams, begin = int(name.partition(":")[2] or 64), len(case.row.get("on", ()))
    for engine in engines.values():
        short = [Job(job.prompt[:32], 8) for job in jobs_of(name, tokenizer, 1000 + begin)[0]]
        run(engine, short, streams)
    for pair in range(begin + case.row.get("uncounted", 0), 100_000):
        if len(case.row.get("on", ())) == begin + pairs or time.perf_counter() > ends:
            break
        jobs, repeated = jobs_of(name, tokenizer, pair)
        figures = {which: run(engines[which], jobs, streams)
                   for which in list(engines)[:: 1 if pair % 2 else -1]}
        case.add(figures["off"], figures["on"], repeated)
        yield


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("model", help="a checkpoint's folder; builtin: the built-in model")
    parser.add_argument("name", help="of the model, in the result")
    parser.add_argument("--only", nargs="+", default=CASES, metavar="CASE", help="which cases")
    parser.add_argument("--dtype", default="float32", help="of the weights")
    parser.add_argument("--pairs", type=int, default=10, help="pairs of runs")
    parser.add_argument("--seconds", type=float, default=150.0, help="after which no pair begins; cases share them")
    parser.add_argument("--json", type=Path, help="write the figures here")
    asked = parser.parse_args()
    began = time.perf_counter()
    config = EngineConfig(str(builtin.path()) if asked.model == "builtin" else asked.model, dtype=asked.dtype,
                          enable_prefix_caching=False, max_model_len=1024)
    loaded = load(config)
    engines = {"off": built(loaded, config),
               "on": built(loaded, replace(config, speculative_config=Speculation("suffix")))}
    rows = json.loads(asked.json.read_text())["rows"] if asked.json and asked.json.exists() else []
    for at, name in bar(list(enumerate(asked.only, 1)), "cases"):
        key = {"model": asked.name, "dtype": asked.dtype, "case": name}
        found = next((row for row in rows if row.items() >= key.items()), None)
        if found is None:
            rows.append(found := key | {"proposing_shares": []})
        case = Case(found)
        for _ in measure(engines, case, asked.pairs, began + asked.seconds * at / len(asked.only)):
            if asked.json:
                write_json(asked.json, {"environment": environment(), "rows": rows})
        case.say()
