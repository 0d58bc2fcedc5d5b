"""Measures how each policy fails if misconfigured or gamed, and the effect of its settings.  On a virtual clock."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from statistics import fmean

from slotwise.core.slo import SLO

from .runs import Finding, Where, p99, setting
from .worlds import Ask

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
