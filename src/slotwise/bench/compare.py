"""Disciplines side by side: the same workload through one engine after another, in one result.

    Contender ──make──► Stand ──run_offline──► Accounts ──┐
                                                          ├──► Comparison.result() ──► table, JSON, HTML
    Contender ──switch a server──► load generator ────────┘

A comparison grows run by run, so an interrupted one still has all complete measurements.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from slotwise.batching.settings import KINDS, Batching
from slotwise.bench.accounting import Accounts
from slotwise.bench.fit import together
from slotwise.bench.offline_run import OnStep, Stand, run_warm
from slotwise.bench.results import workload_facts
from slotwise.bench.theory import DECODE_STEPS
from slotwise.workload.requests import Workload

VERSION = 1  # of the result's format
DISCIPLINES = tuple(reversed(KINDS))  # from the naive one on, continuous last
LABELS = {"one_at_a_time": "one at a time"}

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


@dataclass
class Comparison:
    """All measurements so far."""

    workload: Workload
    head: dict[str, Any]  # environment, model, dtype, mode, seed, slots
    price_per_hour: float | None = None
    runs: list[dict[str, Any]] = field(default_factory=list)
    sweeps: list[dict[str, Any]] = field(default_factory=list)
    interrupted: bool = False
    _accounts: list[Accounts] = field(default_factory=list)

    def run(self, contender: Contender, make: Make, on_step: OnStep = lambda accounts, record: None) -> None:
        """Run the workload offline under one discipline, on a warm engine."""
        accounts = run_warm(make(contender.settings), self.workload, on_step)
        self._accounts.append(accounts)
        self.add(contender, {**accounts.entry(), "theory_steps": self._theory_steps(contender)})

    def add(self, contender: Contender, measured: Mapping[str, Any]) -> None:
        """Add a run that has been measured."""
        self.runs.append({
            "name": contender.name, "label": contender.label, "settings": contender.settings, **measured,
            "cost_per_million": self._cost(measured), "step_time": None})

    @property
    def identical_tokens(self) -> bool | None:
        """Whether every run gave every request the same tokens; None with fewer than two runs."""
        if len(self._accounts) < 2:
            return None
        return all(accounts.outputs == self._accounts[0].outputs for accounts in self._accounts)

    @property
    def num_same_answers(self) -> int:
        """Requests to which all runs gave the same tokens."""
        outputs = [accounts.outputs for accounts in self._accounts] or [{}]
        return sum(all(one[number] == outputs[0][number] for one in outputs) for number in outputs[0])

    def result(self) -> dict[str, Any]:
        """The result as JSON, version 1; the report is made from it."""
        for run, accounts in zip(self.runs, self._accounts, strict=False):
            run["step_time"] = self._step_time(accounts)
        return {
            "version": VERSION, **self.head,
            "workload": workload_facts(self.workload), "price_per_hour": self.price_per_hour,
            "identical_tokens": self.identical_tokens, "same_answers": self.num_same_answers,
            "interrupted": self.interrupted, "runs": self.runs, "sweeps": self.sweeps,
        }

    def _theory_steps(self, contender: Contender) -> int | None:
        """Decode steps by theory; None where arrivals or memory matter, which theory does not model."""
        queued = all(request.arrives_at == 0.0 for request in self.workload.requests)
        if not queued or "kv_cache_memory" in contender.settings:
            return None
        slots = contender.settings.get("batch_size") or contender.settings["max_num_seqs"]
        return DECODE_STEPS[contender.name]([request.num_output for request in self.workload.requests], slots)

    def _cost(self, measured: Mapping[str, Any]) -> float | None:
        """Cost of a million output tokens, in the currency of the price."""
        throughput: float = measured["output_throughput"]
        if self.price_per_hour is None or not throughput:
            return None
        return self.price_per_hour / 3600 / throughput * 1e6

    def _step_time(self, accounts: Accounts) -> dict[str, float] | None:
        """One line through the decode steps of all runs, and how far this run lies from it.

        `error` is predicted over measured seconds of the run's decode steps, less one; `wall_error` the same for the
        whole run, with steps that compute prompts on a second line, through their tokens.  None for a single run: its
        own line would always fit.
        """
        decode, prompts = accounts.decode_times, accounts.prompt_times
        if len(self._accounts) < 2 or not decode.total:
            return None
        by_rows = together(one.decode_times for one in self._accounts).fitted()
        by_tokens = together(one.prompt_times for one in self._accounts).fitted()
        predicted = by_rows.total(decode)
        whole = predicted + by_tokens.total(prompts)
        return {
            "a": by_rows.a, "b": by_rows.b, "error": predicted / decode.total - 1, "a_tokens": by_tokens.a,
            "b_tokens": by_tokens.b, "wall_error": whole / (decode.total + prompts.total) - 1}
