"""Disciplines side by side: the same workload through one engine after another, in one result.

    Contender ──make──► Stand ──run_offline──► Accounts ──┐
                                                          ├──► Comparison.result() ──► table, JSON, HTML
    Contender ──switch a server──► load generator ────────┘

Each contender runs once in every round, so that whatever changes on the machine meanwhile affects all alike; its
figures are the medians of its rounds.  A comparison grows run by run, so an interrupted one still has all complete
measurements.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, NamedTuple

from slotwise.core.disciplines.batching_settings import KINDS, Batching
from slotwise.core.speculation.speculation_settings import DRAFT_MODEL, NONE, Speculation
from slotwise.measure.bench.accounting import StepSeconds, together
from slotwise.measure.bench.offline_run import OnStep, Stand, run_warm
from slotwise.measure.bench.results import workload_facts
from slotwise.measure.bench.theory import DECODE_STEPS
from slotwise.measure.workload.workloads import Workload

VERSION = 1  # of the result's format
DISCIPLINES = tuple(reversed(KINDS))  # from the naive one on, continuous last
LABELS = {"one_at_a_time": "one at a time"}
SEEN = ("seconds", "output_throughput", "request_throughput", "ttft", "itl", "e2e")  # figures with a median and a range

Make = Callable[[Mapping[str, Any]], Stand]
"""Builds an engine from settings of `EngineConfig`, on weights that stay loaded."""


class Contender(NamedTuple):
    """One discipline, with the engine's settings for it."""

    name: str
    label: str
    settings: dict[str, Any]  # fields of EngineConfig


def contenders(
    disciplines: Sequence[str], slots: int, batch_size: int | None = None, max_wait_ms: float | None = None,
) -> list[Contender]:
    """The disciplines as contenders, each checked before anything is loaded.

    Raises:
        ValueError: one line: an unknown or repeated discipline, or a setting that none of them can use or that does not
            fit the number of slots.
    """
    if len(set(disciplines)) < len(disciplines) or not disciplines:
        raise ValueError(f"disciplines: give each once, at least one of {', '.join(DISCIPLINES)}")
    if slots < 1:
        raise ValueError(f"slots must be at least 1, not {slots}")
    if batch_size is not None and not {"static", "dynamic"} & set(disciplines):
        raise ValueError("batch_size belongs to static and dynamic, and neither is compared")
    if max_wait_ms is not None and "dynamic" not in disciplines:
        raise ValueError("max_wait_ms belongs to dynamic, which is not compared")
    found = []
    for kind in disciplines:
        settings: dict[str, Any] = {"batching": kind, "max_num_seqs": slots}
        if kind in ("static", "dynamic") and batch_size is not None:
            settings["batch_size"] = batch_size
        if kind == "dynamic" and max_wait_ms is not None:
            settings["max_wait_ms"] = max_wait_ms
        Batching(kind, None, settings.get("batch_size"), settings.get("max_wait_ms")).discipline(slots)
        found.append(Contender(kind, LABELS.get(kind, kind), settings))
    return found


def same_cache(cache_bytes: int, slots: int) -> list[Contender]:
    """Orca's reservation against pages in a cache of `cache_bytes`, with more slots than memory can fill."""
    return [
        Contender(f"{kind}, same cache", f"{kind}, same cache",
                  {"batching": kind, "max_num_seqs": slots, "kv_cache_memory": cache_bytes})
        for kind in ("orca", "continuous")]


def with_drafts(speculation: Speculation, slots: int) -> Contender:
    """Continuous batching with drafts from texts.  Raises ValueError with one line for other settings."""
    if speculation.method in (DRAFT_MODEL, NONE):
        raise ValueError(f"compare has drafts from texts, as by the method ngram, not by {speculation.method}")
    given = {name: value for name, value in asdict(speculation).items() if value is not None}
    label = f"continuous, {speculation.method}"
    return Contender(label, label, {"batching": "continuous", "max_num_seqs": slots, "speculative_config": given})


def rounds(number: int, chosen: Sequence[Contender]) -> Iterator[tuple[str, Contender]]:
    """Each contender once in each round, with words for the run."""
    for one in range(number):
        for contender in chosen:
            yield f"round {one + 1} of {number}, {contender.label}", contender


@dataclass
class _Rounds:
    """The measurements of one contender, in the order of its rounds."""

    contender: Contender
    measured: list[Mapping[str, Any]] = field(default_factory=list)
    decode_times: StepSeconds = field(default_factory=StepSeconds)  # of all rounds
    prompt_times: StepSeconds = field(default_factory=StepSeconds)

    def entry(self) -> dict[str, Any]:
        """The run of median throughput (the lower of two), with the medians of all runs for what clients see."""
        ordered = sorted(self.measured, key=lambda one: one["output_throughput"])
        middle = ordered[(len(ordered) - 1) // 2]
        return {
            "name": self.contender.name, "label": self.contender.label, "settings": self.contender.settings, **middle,
            **{name: _median([one[name] for one in self.measured]) for name in SEEN},
            "repeats": [{name: one[name] for name in SEEN} for one in self.measured]}


def _median(values: Sequence[Any]) -> Any:
    """The median of numbers, or of the numbers under each key."""
    if isinstance(values[0], Mapping):
        return {key: _median([value[key] for value in values]) for key in values[0]}
    return statistics.median(values)


@dataclass
class Comparison:
    """All measurements so far."""

    workload: Workload
    head: dict[str, Any]  # environment, model, dtype, mode, seed, slots
    price_per_hour: float | None = None
    sweeps: list[dict[str, Any]] = field(default_factory=list)
    interrupted: bool = False
    num_runs: int = 0  # complete ones
    _rounds: dict[str, _Rounds] = field(default_factory=dict)  # by contender
    _outputs: dict[int, list[int]] = field(default_factory=dict)  # of the first run, by request
    _same: set[int] = field(default_factory=set)  # requests with these tokens in every run since
    _num_outputs: int = 0  # runs whose tokens are known
    _lengths: list[int] = field(default_factory=list)  # of the outputs of the first run

    def run(self, contender: Contender, make: Make, on_step: OnStep = lambda accounts, record: None) -> None:
        """Run the workload offline under one discipline, on a warm engine."""
        accounts = run_warm(make(contender.settings), self.workload, on_step)
        self._check(accounts.outputs)
        lengths = [len(accounts.outputs[number]) for number in sorted(accounts.outputs)]
        self.add(contender, {**accounts.entry(), "theory_steps": self._theory_steps(contender, lengths)}, lengths)
        measured = self._rounds[contender.name]
        measured.decode_times = together([measured.decode_times, accounts.decode_times])
        measured.prompt_times = together([measured.prompt_times, accounts.prompt_times])

    def add(self, contender: Contender, measured: Mapping[str, Any], lengths: Sequence[int]) -> None:
        """Adds a run that has been measured.

        Args:
            lengths: tokens of its outputs, in the order of requests.
        """
        self._lengths = self._lengths or list(lengths)
        self._rounds.setdefault(contender.name, _Rounds(contender)).measured.append(measured)
        self.num_runs += 1

    def _check(self, outputs: dict[int, list[int]]) -> None:
        if not self._num_outputs:
            self._outputs, self._same = outputs, set(outputs)
        self._same = {number for number in self._same if outputs[number] == self._outputs[number]}
        self._num_outputs += 1

    @property
    def lengths(self) -> list[int]:
        """Tokens of each output: the workload's, or where the model ends them those of the first run."""
        return self._lengths if self.workload.ends_by_itself else [one.num_output for one in self.workload.requests]

    @property
    def identical_tokens(self) -> bool | None:
        """Whether every run gave every request the same tokens; None with fewer than two runs."""
        return len(self._same) == len(self._outputs) if self._num_outputs > 1 else None

    @property
    def num_same_answers(self) -> int:
        """Requests to which all runs gave the same tokens."""
        return len(self._same)

    def result(self) -> dict[str, Any]:
        """The result as JSON, version 1; the report is made from it."""
        runs = [measured.entry() for measured in self._rounds.values()]
        for run, measured in zip(runs, self._rounds.values(), strict=True):
            run |= {"cost_per_million": self._cost(run), "step_time": self._step_time(measured)}
        return {
            "version": VERSION, **self.head,
            "workload": workload_facts(self.workload, outputs=self.lengths), "price_per_hour": self.price_per_hour,
            "identical_tokens": self.identical_tokens, "same_answers": self.num_same_answers,
            "interrupted": self.interrupted, "runs": runs, "sweeps": self.sweeps,
        }

    def _theory_steps(self, contender: Contender, lengths: Sequence[int]) -> int | None:
        """Decode steps by theory for outputs of these lengths.

        None where arrivals, memory or drafts matter, which theory does not model.
        """
        queued = all(request.arrives_at == 0.0 for request in self.workload.requests)
        if not queued or {"kv_cache_memory", "speculative_config"} & contender.settings.keys():
            return None
        slots = contender.settings.get("batch_size") or contender.settings["max_num_seqs"]
        return DECODE_STEPS[contender.name](lengths, slots)

    def _cost(self, measured: Mapping[str, Any]) -> float | None:
        """Cost of a million output tokens, in the currency of the price."""
        throughput: float = measured["output_throughput"]
        if self.price_per_hour is None or not throughput:
            return None
        return self.price_per_hour / 3600 / throughput * 1e6

    def _step_time(self, measured: _Rounds) -> dict[str, float] | None:
        """One line through the decode steps of all runs, and how far a contender's runs lie from it.

        `error` is predicted over measured seconds of their decode steps, less one; `wall_error` the same for the whole
        runs, with steps that compute prompts on a second line, through their tokens.  None for a single contender: its
        own line would always fit.
        """
        decode, prompts = measured.decode_times, measured.prompt_times
        if len(self._rounds) < 2 or not decode.total:
            return None
        by_rows = together(one.decode_times for one in self._rounds.values()).fitted()
        by_tokens = together(one.prompt_times for one in self._rounds.values()).fitted()
        predicted = by_rows.total(decode)
        whole = predicted + by_tokens.total(prompts)
        return {
            "a": by_rows.a, "b": by_rows.b, "error": predicted / decode.total - 1, "a_tokens": by_tokens.a,
            "b_tokens": by_tokens.b, "wall_error": whole / (decode.total + prompts.total) - 1}
