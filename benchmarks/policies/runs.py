"""The five runs, one promise each, on a real server or a virtual clock; and how each policy fails if misused.

`RUNS` are the promises.  `FAILURES`, on a virtual clock, measure how a policy fails if it is misconfigured or gamed,
and the effect of its settings.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import fmean, median
from typing import Any

from slotwise.core.policies.policy_settings import AGED_TOKENS, AGEING
from slotwise.core.policies.shortest import PROMPT_SHARE
from slotwise.core.scheduler_limits import SLO, Tier
from slotwise.measure.bench.measures import COMPLETED, RequestOutcome, percentile
from slotwise.measure.workload.distributions import Poisson

from .worlds import Ask, Setting, azure, bursty

World = Callable[[Sequence[Ask], Setting, int], list[RequestOutcome]]
SLOTS = 32
FCFS = Setting({"max_num_seqs": SLOTS})


@dataclass(frozen=True)
class Where:
    """The resources and the duration of a run."""

    world: World
    trace: Path | None
    seconds: float  # of arrivals
    kinds: tuple[str, ...] = ("azure", "bursty")
    seed: int = 1
    turns: int = 1  # of each comparison: a shared machine may be twice as fast a minute later

    def in_turns(self, asked: Sequence[Ask], settings: dict[str, Setting]) -> list[dict[str, list[RequestOutcome]]]:
        """Runs the same requests under each of the settings, one after the other, `turns` times."""
        return [{name: self.serve(asked, one) for name, one in settings.items()} for _ in range(self.turns)]

    def serve(self, asked: Sequence[Ask], setting: Setting) -> list[RequestOutcome]:
        return self.world(asked, setting, self.seed)

    def workloads(self) -> dict[str, Callable[[int, float], list[Ask]]]:
        """Returns makers of workloads by name, each of a count and a rate."""
        known = {"azure": lambda count, rate: azure(self.trace, count, rate, self.seed),
                 "bursty": lambda count, rate: bursty(count, rate, self.seed)}
        return {kind: known[kind] for kind in self.kinds}

    def capacity(self, make: Callable[[int, float], list[Ask]]) -> float:
        """Returns the requests per second that `fcfs` completes when all requests arrive at once."""
        outcomes = self.serve([ask._replace(at=0.0) for ask in make(300, 100.0)], FCFS)
        return len(outcomes) / max(outcome.ended for outcome in outcomes)


@dataclass(frozen=True)
class Finding:
    """One line: the promise, the measurement, and curves to draw, by name."""

    promise: str
    holds: bool
    figures: dict[str, float]
    curves: dict[str, list[float]] = field(default_factory=dict)

    def as_json(self) -> dict[str, Any]:
        return {"promise": self.promise, "holds": self.holds, "figures": self.figures}


def p99(values: Sequence[float]) -> float:
    return percentile(sorted(values), 99)


def setting(policy: str, tiers: tuple[Tier, ...] = (), **options: object) -> Setting:
    return Setting({"max_num_seqs": SLOTS, "scheduling_policy": policy, **options}, tiers)


# -- giant prompts against running streams -------------------------------------------------------------------------

GIANT, TOGETHER = 600, 8  # tokens of its prompt; requests that arrive at once
STREAM_TOKENS, STREAM_EVERY, GIANT_EVERY = 400, 0.6, 1.2  # seconds
LEAST = 20  # milliseconds of a budget, above the noise of two busy cores
LOOSE = 1.25  # times the budget, within which 99 of 100 gaps stay
WORTH = 1.3  # times an unlimited chunk's time to the first token


def giants(where: Where) -> list[Finding]:
    asked = [Ask(STREAM_EVERY * n, 32, STREAM_TOKENS) for n in range(int(where.seconds / STREAM_EVERY))]
    asked += [Ask(1.5 + GIANT_EVERY * (n // TOGETHER), GIANT, 8)
              for n in range(TOGETHER * int(where.seconds / GIANT_EVERY))]
    asked.sort(key=lambda ask: ask.at)
    unlimited = _streams(where, asked, {"max_num_batched_tokens": TOGETHER * GIANT, "max_stall_ms": 0})
    budget = round(max(LEAST, 5000 * percentile(sorted(unlimited[0]), 50)))
    limited = _streams(where, asked, {"max_num_batched_tokens": TOGETHER * GIANT, "max_step_ms": budget})
    within = sum(gap <= LOOSE * budget / 1000 for gap in limited[0]) / len(limited[0])
    slower = fmean(limited[1]) / fmean(unlimited[1])
    figures = {
        "budget_ms": budget, "within_share": within, "ttft_ratio": slower,
        "gap_p99_ms": 1000 * p99(limited[0]), "gap_p99_unlimited_ms": 1000 * p99(unlimited[0]),
        "gap_max_ms": 1000 * max(limited[0]), "gap_max_unlimited_ms": 1000 * max(unlimited[0]),
        "ttft_ms": 1000 * fmean(limited[1]), "ttft_unlimited_ms": 1000 * fmean(unlimited[1])}
    return [Finding(
        f"99% of gaps within {LOOSE}x --max-step-ms, giants' first token after at most {WORTH}x", within >= 0.99
        and slower <= WORTH, figures, {"unlimited": unlimited[0], f"--max-step-ms {budget}": limited[0]})]


def _streams(where: Where, asked: Sequence[Ask], options: dict[str, object]) -> tuple[list[float], list[float]]:
    """Returns the gaps of streams and the giants' times to the first token, in seconds."""
    outcomes = where.serve(asked, Setting({"max_num_seqs": SLOTS, **options}))
    gaps = [gap for ask, outcome in zip(asked, outcomes, strict=True) if ask.num_prompt < GIANT for gap in outcome.itls]
    return gaps, [outcome.ttft for ask, outcome in zip(asked, outcomes, strict=True) if ask.num_prompt == GIANT]


# -- two tiers at twice the load -----------------------------------------------------------------------------------

PREMIUM = Tier("premium", ttft=0.5, tpot=0.05, priority=-10, weight=4.0, slots=8)
BULK = Tier("bulk", priority=0)
NEVER_YIELDS = 1000  # steps of priority: preempted requests would be recomputed at the cost of bulk's share
PREMIUM_LOAD, OVERLOAD = 0.5, 2.0
BULK_SHARE = 0.6  # of the tokens that the same arrivals received without tiers by the same moment, less premium's


def tiers(where: Where) -> list[Finding]:
    found = []
    for name, make in where.workloads().items():
        capacity = where.capacity(make)
        count = int(OVERLOAD * capacity * where.seconds)
        draw = random.Random(where.seed)
        asked = [ask._replace(slo=SLO(tier=PREMIUM.name if draw.random() < PREMIUM_LOAD / OVERLOAD else BULK.name))
                 for ask in make(count, OVERLOAD * capacity)]
        curves, served = {}, {}
        for policy, options in (("fcfs", {}), ("priority", {"preemption_gap": NEVER_YIELDS})):
            outcomes = where.serve(asked, setting(policy, (PREMIUM, BULK), **options))
            premium, bulk = ([o for ask, o in zip(asked, outcomes, strict=True) if ask.slo.tier == tier.name]
                             for tier in (PREMIUM, BULK))
            curves[policy] = [outcome.ttft for outcome in premium]
            served[policy] = _tokens_by(asked[-1].at, premium), _tokens_by(asked[-1].at, bulk)
        share = served["priority"][1] / (sum(served["fcfs"]) - served["priority"][0])
        ttft, tpot = p99([o.ttft for o in premium]), p99([o.tpot for o in premium if o.num_output > 1])
        found.append(Finding(
            f"{name}: premium's p99 within {PREMIUM.ttft} s and {PREMIUM.tpot} s a token, and the rest to bulk",
            ttft <= PREMIUM.ttft and tpot <= PREMIUM.tpot and share >= BULK_SHARE,
            {"capacity": capacity, "ttft_p99": ttft, "tpot_p99": tpot, "bulk_share": share,
             "ttft_p99_fcfs": p99(curves["fcfs"])}, curves))
    return found


def _tokens_by(moment: float, outcomes: Sequence[RequestOutcome]) -> float:
    """Returns the output tokens received by `moment`; an event may contain several."""
    return sum(o.num_output * sum(time <= moment for time in o.token_times) / len(o.token_times)
               for o in outcomes if o.token_times)


# -- goodput -------------------------------------------------------------------------------------------------------

OBJECTIVES, MET, BETTER = (0.4, 4.0), 0.6, 1.3  # seconds to the first token, equally likely; FCFS's share; the promise
AGAIN = "fcfs again"
ABOUT, CORRECTED, TRIES = 0.15, 0.05, 4  # tolerance of FCFS's share; correction of the load; attempts per turn


def goodput(where: Where) -> list[Finding]:
    found = []
    for name, make in where.workloads().items():
        rate, turns = _pressed_turns(where, make)
        met = [{label: _met(asked, outcomes) for label, outcomes in served.items()} for asked, served in turns]
        figures = {"rate": rate, "turns": len(turns)} | {
            label: median(turn[label] for turn in met) for label in (met[0] if met else ())}
        figures["ratio"] = median(turn["deadline"] / _usual(turn) for turn in met) if met else 0.0
        curves = {label: [outcome.ttft for outcome in outcomes if outcome.status == COMPLETED]
                  for label, outcomes in (turns[-1][1] if turns else {}).items() if label != AGAIN}
        found.append(Finding(f"{name}: {BETTER}x the requests within their objectives, where FCFS serves {MET:.0%} so",
                             figures["ratio"] >= BETTER, figures, curves))
    return found


def _pressed_turns(
    where: Where, make: Callable[[int, float], list[Ask]]
) -> tuple[float, list[tuple[list[Ask], dict[str, list[RequestOutcome]]]]]:
    """Returns the last load, and the counted turns: those in which FCFS, before and after, meets about MET of the
    objectives.  If the machine has become faster or slower, the load is corrected and the turn repeated.
    """
    rate, asked = _hard_pressed(where, make)
    deadline = {"deadline": setting("deadline"), "deadline, shedding": setting("deadline", shed_late=True)}
    turns = []
    for _ in range(TRIES * where.turns):
        served = {"fcfs": where.serve(asked, FCFS)}
        if abs(_met(asked, served["fcfs"]) - MET) <= ABOUT:
            served |= {label: where.serve(asked, one) for label, one in deadline.items()}
            served[AGAIN] = where.serve(asked, FCFS)
            if abs(_usual_of(asked, served) - MET) <= ABOUT:
                turns.append((asked, served))
            if len(turns) == where.turns:
                break
        rate *= 1 + CORRECTED * (1 if _usual_of(asked, served) > MET else -1)
        asked = _promised(where, make, rate)
    return rate, turns


def _usual_of(asked: Sequence[Ask], served: dict[str, list[RequestOutcome]]) -> float:
    return _usual({label: _met(asked, outcomes) for label, outcomes in served.items()})


def _usual(met: dict[str, float]) -> float:
    """Returns the mean share that FCFS met, before and after."""
    return fmean(share for label, share in met.items() if label.startswith("fcfs"))


def _hard_pressed(where: Where, make: Callable[[int, float], list[Ask]]) -> tuple[float, list[Ask]]:
    """Returns the load at which FCFS meets about MET of the objectives, by bisection."""
    low, high = 0.5 * where.capacity(make), 2.0 * where.capacity(make)
    for _ in range(5):
        rate = (low + high) / 2
        asked = _promised(where, make, rate)
        met = _met(asked, where.serve(asked, FCFS))
        if abs(met - MET) < 0.03:
            break
        low, high = (rate, high) if met > MET else (low, rate)
    return rate, asked


def _promised(where: Where, make: Callable[[int, float], list[Ask]], rate: float) -> list[Ask]:
    """Returns requests with objectives."""
    draw = random.Random(where.seed)
    return [ask._replace(slo=SLO(ttft=draw.choice(OBJECTIVES)))
            for ask in make(max(50, int(rate * where.seconds)), rate)]


def _met(asked: Sequence[Ask], outcomes: Sequence[RequestOutcome]) -> float:
    good = sum(outcome.status == COMPLETED and outcome.ttft <= (ask.slo.ttft or 0.0)
               for ask, outcome in zip(asked, outcomes, strict=True))
    return good / len(asked)


# -- shortest first ------------------------------------------------------------------------------------------------

SATURATED, GAINED, UNHARMED = 1.6, 0.7, 1.05


def shortest(where: Where) -> list[Finding]:
    found = []
    for name, make in where.workloads().items():
        rate = SATURATED * where.capacity(make)
        asked = make(int(rate * where.seconds), rate)
        turns = where.in_turns(asked, {
            "fcfs": FCFS, "predicted": setting("shortest"), "oracle": setting("shortest", length_oracle=True)})
        means = [{label: fmean(outcome.e2el for outcome in outcomes) for label, outcomes in turn.items()}
                 for turn in turns]
        mean = {label: median(turn[label] for turn in means) for label in means[0]}
        gain = (mean["fcfs"] - mean["predicted"]) / max(mean["fcfs"] - mean["oracle"], 1e-9)
        longest = max(outcome.ttft for turn in turns for outcome in turn["predicted"])
        work = max(ask.num_prompt for ask in asked) * PROMPT_SHARE + max(ask.num_output for ask in asked)
        bound = work * AGEING / AGED_TOKENS + max(
            outcome.ttft for turn in turns for outcome in turn["fcfs"])
        is_known = name == "azure"
        found.append(Finding(
            f"{name}: " + (f"{GAINED:.0%} of an oracle's gain" if is_known else "no worse than 5% behind FCFS")
            + ", longest wait within its bound", longest <= bound and (
                gain >= GAINED if is_known else mean["predicted"] <= UNHARMED * mean["fcfs"]),
            {**mean, "share_of_gain": gain, "longest_wait": longest, "bound": bound},
            {label: [outcome.e2el for outcome in outcomes] for label, outcomes in turns[-1].items()}))
    return found


# -- fair ----------------------------------------------------------------------------------------------------------

FLOOD, LIGHT_LOAD, DELAYED = 20, 0.1, 1.5
KEPT = (Tier("light", slots=4), Tier("flood"))


def fair(where: Where) -> list[Finding]:
    found = []
    for name, make in where.workloads().items():
        rate = LIGHT_LOAD * where.capacity(make)
        count, draw = int(rate * where.seconds), random.Random(where.seed)
        times = Poisson(rate).times(draw, count)
        light = [ask._replace(at=at, slo=SLO("light")) for at, ask in zip(times, make(count, rate), strict=True)]
        flood = [ask._replace(slo=SLO("flood"), whole=True) for ask in make(FLOOD * count, FLOOD * rate)]
        both = sorted(light + flood, key=lambda ask: ask.at)
        curves: dict[str, list[float]] = {"alone": [], "fcfs": _light_waits(both, where.serve(both, FCFS)), "fair": []}
        for _ in range(where.turns):  # pooled: of one turn's few requests the slowest is the 99th percentile
            curves["alone"] += [outcome.ttft for outcome in where.serve(light, setting("fair"))]
            curves["fair"] += _light_waits(both, where.serve(both, setting("fair")))
        named = [ask._replace(slo=SLO(ask.slo.tenant, ask.slo.tenant)) for ask in both]
        curves["fair, 4 slots kept"] = _light_waits(both, where.serve(named, setting("fair", KEPT)))
        ratio = p99(curves["fair"]) / p99(curves["alone"])
        figures = {f"{label}_p99_ms": 1000 * p99(values) for label, values in curves.items()} | {"ratio": ratio}
        found.append(Finding(f"{name}: beside a flood of {FLOOD}x, p99 to the first token within {DELAYED}x of alone",
                             ratio <= DELAYED, figures, curves))
    return found


def _light_waits(asks: Sequence[Ask], outcomes: Sequence[RequestOutcome]) -> list[float]:
    """Returns the light tenant's seconds to the first token.  Raises RuntimeError if a request was refused."""
    light = [outcome for ask, outcome in zip(asks, outcomes, strict=True) if ask.slo.tenant == "light"]
    if refused := sum(outcome.status != COMPLETED for outcome in light):
        raise RuntimeError(f"{refused} of {len(light)} light requests were refused because of the flood")
    return [outcome.ttft for outcome in light]


RUNS: dict[str, Callable[[Where], list[Finding]]] = {
    run.__name__: run for run in (giants, tiers, goodput, shortest, fair)}


SHORT, LONG = 24, 300  # output tokens
LOW, HIGH = SLO(priority=9), SLO(priority=0)


def steady(rate: float, seconds: float, ask: Ask, start: float = 0.0) -> list[Ask]:
    return [ask._replace(at=start + number / rate) for number in range(int(rate * seconds))]


def merged(*streams: list[Ask]) -> list[Ask]:
    return sorted((ask for stream in streams for ask in stream), key=lambda ask: ask.at)


def waits(where: Where, asked: Sequence[Ask], policy: str, who: SLO, **options: object) -> list[float]:
    """Returns the seconds to the first token of requests with the objectives `who`."""
    outcomes = where.serve(asked, setting(policy, **options))
    return [outcome.ttft for ask, outcome in zip(asked, outcomes, strict=True) if ask.slo == who]


def starvation(where: Where) -> list[Finding]:
    """Requests of high priority exceed the capacity, beside a few of low priority."""
    asked = merged(steady(150, where.seconds, Ask(0, 64, SHORT, HIGH)),
                   steady(3, where.seconds / 4, Ask(0, 64, SHORT, LOW)))
    curves = {"hardly any ageing": waits(where, asked, "priority", LOW, ageing=86_400),
              "ageing 0.5 s": waits(where, asked, "priority", LOW, ageing=0.5)}
    return [_finding("starvation of low priority", curves, "ageing 0.5 s", "hardly any ageing")]


def inversion(where: Where) -> list[Finding]:
    """Long outputs of low priority hold every slot when requests of high priority arrive."""
    asked = merged(steady(60, where.seconds, Ask(0, 64, LONG, LOW)),
                   steady(4, where.seconds, Ask(0, 64, SHORT, HIGH), 1))
    curves = {"running is left alone": waits(where, asked, "priority", HIGH, preemption_gap=10_000),
              "may take places": waits(where, asked, "priority", HIGH, preemption_gap=1)}
    return [_finding("inversion: high behind long answers", curves, "may take places", "running is left alone")]


def thrashing(where: Where) -> list[Finding]:
    """Ten priorities arrive in turn: each step of difference preempts, and computed tokens are lost."""
    asked = [Ask(number / 22, 500, 100, SLO(priority=number * 7 % 10)) for number in range(int(22 * where.seconds))]
    curves = {}
    for label, gap in (("gap 1", 1), ("gap 10, no preemption", 10)):
        outcomes = where.serve(asked, setting("priority", preemption_gap=gap))
        curves[label] = [outcome.e2el for outcome in outcomes]
    return [_finding("thrashing: time to the whole answer", curves, "gap 10, no preemption", "gap 1")]


def gaming(where: Where) -> list[Finding]:
    """Outputs of equal length; one client splits its own into requests of few max_tokens."""
    honest, gamer = SLO("honest"), SLO("gamer")
    asked = merged(steady(30, where.seconds, Ask(0, 64, 160, honest)),
                   steady(250, where.seconds, Ask(0, 64, 16, gamer, max_tokens=16), 0.01))
    curves = {"honest, shortest": waits(where, asked, "shortest", honest),
              "gamer, shortest": waits(where, asked, "shortest", gamer),
              "honest, fair": waits(where, asked, "fair", honest), "gamer, fair": waits(where, asked, "fair", gamer)}
    return [_finding("gaming by max_tokens", curves, "honest, fair", "honest, shortest")]


def _finding(promise: str, curves: dict[str, list[float]], cured: str, failing: str) -> Finding:
    figures = {f"p99 {label}": p99(values) for label, values in curves.items()}
    figures |= {f"mean {label}": fmean(values) for label, values in curves.items()}
    return Finding(promise, figures[f"mean {cured}"] < figures[f"mean {failing}"], figures, curves)


FAILURES: dict[str, Callable[[Where], list[Finding]]] = {
    run.__name__: run for run in (starvation, inversion, thrashing, gaming)}
