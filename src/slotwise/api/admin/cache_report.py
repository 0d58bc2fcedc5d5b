"""What divergences of prompts cost: the text around them, `GET /cache/report`, and what to change.

The ring's timelines say where each prompt left the nearest cached one, and the step-time model what it cost to compute
the rest.  The engine has the tokens on both sides, as long as they are cached; only the tenant whose prompts they are
sees their text.
"""

from __future__ import annotations

import asyncio
import re
import time
from collections.abc import Iterable, Sequence
from http import HTTPStatus
from typing import Any, NamedTuple

from slotwise.api.generate.context import Api
from slotwise.api.http.api_errors import from_queue_full
from slotwise.api.http.http_exchange import HttpExchange, about
from slotwise.api.http.turns import QueueFull
from slotwise.core import cache_causes
from slotwise.core.prompt_lookup import DivergedTokens
from slotwise.core.step_time import StepTimeModel
from slotwise.engine.refusals import Refused
from slotwise.observe.explain import CacheSpan, Solo
from slotwise.observe.request_timeline import RequestTimeline

PERIOD = 600.0  # seconds of a report
MOST = 10  # divergences in a report
COMPARED = 32  # divergences whose text is compared: those that cost most
MAX_REQUESTS = 4096  # of a report: the latest
AT_A_TIME = 128  # requests added up before other tasks run
SAME = 0.5  # share of the tokens behind a divergence from which on they are the same text
SHOWN = 60  # characters of a text in a sentence
NS = 1e-9

DATE = re.compile(r"\d{4}-\d\d|\d\d?:\d\d|\d\d?[./]\d\d?[./]\d\d|\b(mon|tues|wednes|thurs|fri|satur|sun)day"
                  r"|\b(jan|feb|mar|apr|may|jun|jul|aug|sep|oct|nov|dec)[a-z]* \d", re.IGNORECASE)
IDENTIFIER = re.compile(r"[0-9a-f]{8}", re.IGNORECASE)
TOOL = re.compile(r'"(function|parameters|input_schema)"')


class DivergedText(NamedTuple):
    """The text around a divergence, and what to change; empty where it is no longer cached."""

    before: str  # that both prompts have
    own: str  # of the request
    nearest: str  # of the nearest cached prompt
    share_same: float  # of the request's tokens behind the divergence, those that the nearest prompt has there, too

    def advice(self, position: int) -> str:
        """What to change so that such prompts find more in the cache."""
        if not (self.own or self.nearest):
            return "The text of the nearest prompt is no longer cached: ask sooner after such a request."
        if self.share_same < SAME:
            return (f"From token {position:,} on these are different prompts: put what many prompts share before what "
                    "differs.")
        return (f"{self._what} at token {position:,} ({_cut(self.own)}, and before {_cut(self.nearest)}), and "
                f"{self.share_same:.0%} of what follows is the same: move what changes to the end of the prompt, or "
                "leave it out.")

    @property
    def _what(self) -> str:
        """What differs, as far as its form shows."""
        around = [self.before[-12:] + text[:24] for text in (self.own, self.nearest)]
        if all(map(DATE.search, around)):
            return "A date or time changes"
        if TOOL.search(self.before) or all(map(TOOL.search, (self.own, self.nearest))):
            return "The tools, or their order, change"
        return "An identifier changes" if all(map(IDENTIFIER.search, around)) else "The text changes"

    def as_json(self, position: int) -> dict[str, Any]:
        shown = {"before": self.before, "own": self.own, "nearest": self.nearest} if self.own or self.nearest else None
        return {"text": shown, "same_behind": round(self.share_same, 4), "advice": self.advice(position)}


def _cut(text: str) -> str:
    return repr(text[:SHOWN])


NOT_CACHED = DivergedText("", "", "", 0.0)


async def diverged_texts(api: Api, holder: str, request_ids: Sequence[int]) -> dict[int, DivergedText]:
    """The texts around the divergences of these requests, as far as they are cached.  Clients take turns.

    Raises:
        ApiError: too many wait.
    """
    if not request_ids:
        return {}
    try:
        async with api.limits.position_queries.turn(holder):
            found = await api.engine.client.divergences(request_ids)
    except QueueFull as error:
        raise from_queue_full(error, "queries of divergences", "queries_full") from error
    except Refused:  # the engine is being replaced, and its cache is lost
        return {}
    return {one.request_id: await _text(api, holder, one) for one in found}


async def _text(api: Api, holder: str, tokens: DivergedTokens) -> DivergedText:
    before, own, nearest = [
        await api.text.prompts.decode(list(part), holder) if part else ""
        for part in (tokens.before, tokens.own, tokens.nearest)]
    return DivergedText(before, own, nearest, tokens.num_same / tokens.num_compared if tokens.num_compared else 0.0)


async def add_texts(api: Api, holder: str, explanations: Sequence[dict[str, Any]]) -> None:
    """Add the text around each divergence to the spans of explanations."""
    spans = [(one["number"], span) for one in explanations for span in one["cache"]["spans"] if "diverged_at" in span]
    texts = await diverged_texts(api, holder, [number for number, _ in spans])
    for number, span in spans:
        span |= texts.get(number, NOT_CACHED).as_json(span["diverged_at"])


class _Cost:
    """What spans of prompts cost together."""

    __slots__ = ("latest", "num_requests", "num_tokens", "seconds")

    def __init__(self) -> None:
        self.num_requests = self.num_tokens = 0
        self.seconds = 0.0
        self.latest: RequestTimeline | None = None

    def add(self, timeline: RequestTimeline, span: CacheSpan) -> None:
        self.num_requests += 1
        self.num_tokens += span.num_tokens
        self.seconds += span.ns * NS
        self.latest = timeline

    def as_json(self) -> dict[str, Any]:
        return {"requests": self.num_requests, "tokens": self.num_tokens, "seconds": round(self.seconds, 6)}


Place = tuple[str, str, int]
"""Salt, adapter and position of a divergence."""


@about(statuses=(HTTPStatus.TOO_MANY_REQUESTS,))
async def cache_report(api: Api, exchange: HttpExchange) -> None:
    """Prompt tokens of the last ten minutes by why they were cached or not, and the divergences that cost most."""
    api.limits.quotas.count_request(api.limits.account(exchange))
    observers, scope = api.observers, api.clients.keys.scope_of(exchange.tenant)
    observers.batched_observer.flush()
    since = time.monotonic_ns() - round(PERIOD / NS)
    latest = list(observers.recorder.timelines.by_number.values())[-MAX_REQUESTS:]
    found = [one for one in latest if one.prompt_spans and one.admitted_ns >= since and one.belongs_to(scope)]
    causes, places = await _costs(found, observers.step_times)
    dearest = sorted(places.items(), key=lambda one: one[1].seconds, reverse=True)[:COMPARED]
    numbers = [cost.latest.request.number for _, cost in dearest if cost.latest is not None]
    texts = await diverged_texts(api, exchange.holder, numbers)
    divergences = [_shown(place, cost, texts) for place, cost in dearest]
    divergences.sort(key=lambda one: (one["avoidable_seconds"], one["seconds"]), reverse=True)
    await exchange.respond_json({
        "object": "cache_report", "period_s": PERIOD, "requests": len(found),
        "causes": {cause: causes[cause].as_json() for cause in cache_causes.CAUSES if cause in causes},
        "divergences": divergences[:MOST], "step_time_model": observers.explainer.trust})


def _shown(place: Place, cost: _Cost, texts: dict[int, DivergedText]) -> dict[str, Any]:
    """A divergence in a report: seconds are avoidable where the same text follows."""
    _, adapter, position = place
    assert cost.latest is not None
    request = cost.latest.request
    text = texts.get(request.number, NOT_CACHED)
    return {"diverged_at": position, "adapter": adapter or None, **cost.as_json(),
            "avoidable_seconds": round(cost.seconds * text.share_same, 6), "latest": request.id,
            **text.as_json(position)}


async def _costs(timelines: Iterable[RequestTimeline], times: StepTimeModel,
                 ) -> tuple[dict[str, _Cost], dict[Place, _Cost]]:
    """Adds up spans by cause, and divergences by place."""
    causes: dict[str, _Cost] = {}
    places: dict[Place, _Cost] = {}
    for index, timeline in enumerate(timelines):
        if index % AT_A_TIME == 0:
            await asyncio.sleep(0)
        spec = timeline.request.spec
        for span in Solo(times, timeline.scheduling).cache_spans(timeline):
            causes.setdefault(span.cause, _Cost()).add(timeline, span)
            if span.cause == cache_causes.DIVERGED:
                places.setdefault((spec.salt, spec.adapter_name, span.position), _Cost()).add(timeline, span)
    return causes, places
