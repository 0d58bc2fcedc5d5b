"""Measures a server under a workload: resolves the model, warms up, sends all requests, computes the figures."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import uvloop

from slotwise.bench.client import (
    SAFE_VOCAB_SIZE,
    BenchError,
    Client,
    Phrasing,
    Target,
    list_models,
    open_session,
)
from slotwise.bench.load import Load, Watch, ignore
from slotwise.bench.measures import COMPLETED, Objectives, Outcome, samples, serving_metrics
from slotwise.bench.results import environment, workload_facts
from slotwise.workload.requests import Workload

WARMUP_TOKENS = 16  # the most output tokens of a warm-up request


@dataclass(frozen=True, slots=True)
class Measured:
    """The outcome of a run."""

    outcomes: list[Outcome]  # in order of completion
    duration: float  # seconds from the start to the last answer's end
    interrupted: bool


def resolve(target: Target, vocab_size: int = 0) -> tuple[Target, int]:
    """Query a server for what was not given: the target with its model, and the size of the vocabulary.

    Args:
        vocab_size: as given; 0: the server's if it reports one, else a safe one.

    Raises:
        BenchError: no server answers, or it lists no model and none was given.
    """
    async def ask() -> tuple[Target, int]:
        async with open_session() as session:
            cards = await list_models(session, target)
        if not cards and not target.model:
            raise BenchError(f"{target.base_url} does not say which models it has: name one with --model")
        model = target.model or cards[0].id
        reported = next((card.known_vocab_size for card in cards if card.id == model), 0)
        return replace(target, model=model), vocab_size or reported or SAFE_VOCAB_SIZE

    return uvloop.run(ask())


def measure(
    target: Target, workload: Workload, phrasing: Phrasing, *, num_warmups: int = 1, watch: Watch = ignore,
) -> Measured:
    """Send a workload and time the answers.  An interrupt ends it, and completed measurements are kept.

    Raises:
        BenchError: a warm-up request failed; the message has the server's answer.
        KeyboardInterrupt: before any request had an outcome.
    """
    load = Load(workload, lambda request: phrasing.body(target, workload, request), watch)

    async def run() -> None:
        async with open_session() as session:
            client = Client(session, target, load.clock)
            for number in range(num_warmups):
                await _warm_up(client, _warmup_body(target, workload, phrasing, number))
            await load.run(client.complete)

    interrupted = False
    try:
        uvloop.run(run())
    except KeyboardInterrupt:
        if not load.outcomes:
            raise
        interrupted = True
    duration = max((outcome.ended for outcome in load.outcomes), default=0.0)
    return Measured(load.outcomes, duration, interrupted)


def _warmup_body(target: Target, workload: Workload, phrasing: Phrasing, number: int) -> bytes:
    """A request like the first of the workload, with a short answer and a prompt that does not recur."""
    first = workload.requests[0]
    number += len(workload.requests)
    return phrasing.body(
        target, workload, replace(first, number=number, num_output=min(first.num_output, WARMUP_TOKENS)))


async def _warm_up(client: Client, body: bytes) -> None:
    outcome = Outcome(0)
    await client.complete(body, outcome)
    if outcome.status != COMPLETED:
        raise BenchError(f"the server does not serve the workload's kind of request: {outcome.error}")


def serving_result(
    target: Target, workload: Workload, measured: Measured, objectives: Objectives,
) -> dict[str, Any]:
    """The result of a run, with the field names of `vllm bench serve` where it has them."""
    where = environment()
    return {
        "version": 1, "kind": "serve", "status": "interrupted" if measured.interrupted else "completed",
        "environment": where, "date": where["created"],
        "backend": "openai", "endpoint_type": target.endpoint, "model_id": target.model,
        "num_prompts": len(workload.requests), "request_rate": offered_rate(workload),
        "max_concurrency": workload.users or None, "seed": workload.seed, "workload": workload_facts(workload),
        "goodput": objectives.limits,
        **serving_metrics(measured.outcomes, measured.duration, objectives), **samples(measured.outcomes),
    }


def offered_rate(workload: Workload) -> float | str:
    """Requests per second at which a workload arrives; "inf" if all at once or in a closed loop."""
    last = workload.requests[-1].arrives_at
    return (len(workload.requests) - 1) / last if last else "inf"
