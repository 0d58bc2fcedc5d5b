"""Requests played on an engine with drafts, and what came of them."""

from __future__ import annotations

import random
from typing import Any, NamedTuple

from slotwise.core.params import SamplingSpec
from slotwise.core.record import StepRecord, TokenLogprobs
from slotwise.core.request import RequestSpec
from slotwise.core.step_time import StepTimeModel, Work
from slotwise.engine.engine import Engine
from slotwise.engine.messages import Add, Finish


def slow_steps() -> StepTimeModel:
    """Steps take a second, whatever they compute: drafts are worth their time."""
    times = StepTimeModel()
    for _ in range(20):
        times.learn(Work(1, 1, 10, 0.0, longest=10), 1.0)
        times.learn(Work(9, 9, 0, 0.0, drafts=8), 1.0)
        times.learn(Work(100, 3, 0, 1e4), 1.0)
    return times


class Output(NamedTuple):
    tokens: tuple[int, ...]
    logprobs: tuple[TokenLogprobs, ...]
    reason: str


class Played(NamedTuple):
    outputs: dict[str, Output]
    records: list[StepRecord]

    @property
    def num_drafts(self) -> int:
        return sum(len(drafts) for record in self.records for drafts in record.plan.drafts)

    @property
    def num_right(self) -> int:
        return sum(max(0, len(tokens) - 1) for record in self.records for drafts, tokens in zip(
            record.plan.drafts, record.result.tokens, strict=False) if drafts)


def play(subject: Engine, adds: list[Add], aborts: dict[int, str] | None = None) -> Played:
    """Adds the requests, some in every step; `aborts` ends requests before a step."""
    waiting, tokens, logprobs, reasons = list(adds), {}, {}, {}
    records: list[StepRecord] = []
    while waiting or subject.has_work:
        for one in waiting[:3]:
            subject.handle(one)
        del waiting[:3]
        if aborts and (name := aborts.pop(len(records), "")):
            subject.handle(Finish(name, "abort"))
        record = subject.step()
        assert not record.outcome.failure, record.outcome.failure
        records.append(record)
        entries = record.logprobs or ((),) * len(record.tokens)
        for name, found, described in zip(record.plan.request_ids, record.tokens, entries, strict=True):
            tokens[name] = tokens.get(name, ()) + found
            logprobs[name] = logprobs.get(name, ()) + described
        reasons |= {end.request_id: end.reason for end in record.ended}
        subject._scheduler.check()
    return Played({name: Output(tokens.get(name, ()), logprobs.get(name, ()), reason)
                   for name, reason in reasons.items()}, records)


def several(prompt: list[int], number: int = 4, **params: Any) -> list[Add]:
    params = {"max_tokens": 40, "ignore_eos": True, "temperature": 0.3} | params
    return [Add(f"r{at}", RequestSpec(prompt[at:], SamplingSpec(**params), at)) for at in range(number)]


def mixed(prompt: list[int], number: int, seed: int) -> list[Add]:
    """Greedy, seeded, with penalties, log-probabilities, `min_p`, `min_tokens`, stop tokens; some share a beginning."""
    draw, adds = random.Random(seed), []
    for at in range(number):
        params = SamplingSpec(
            temperature=draw.choice((0.0, 0.0, 0.2, 1.0)), max_tokens=draw.randint(1, 48),
            ignore_eos=draw.random() < 0.7, min_p=draw.choice((0.0, 0.05)), top_p=draw.choice((1.0, 0.9)),
            logprobs=draw.choice((None, None, 0, 3)), presence_penalty=draw.choice((0.0, 0.0, 0.5)),
            frequency_penalty=draw.choice((0.0, 0.0, 0.4)), repetition_penalty=draw.choice((1.0, 1.0, 1.2)),
            stop_token_ids=tuple(draw.sample(prompt, draw.choice((0, 0, 1)))), min_tokens=draw.choice((0, 0, 1)),
            logit_bias=draw.choice(({}, {prompt[3]: 2.0})))
        begin = draw.choice((0, 0, draw.randrange(len(prompt) // 2)))
        text = prompt[begin : draw.randint(begin + 1, len(prompt))]
        guessed = tuple(token if draw.random() < 0.9 else draw.choice(prompt) for token in prompt)
        adds.append(Add(f"r{at}", RequestSpec(
            text, params, draw.getrandbits(60), salt=draw.choice(("", "other")), prediction=guessed)))
    return adds
