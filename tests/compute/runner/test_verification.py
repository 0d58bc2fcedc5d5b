"""Drafts verified in one draw, against a token at a time: the same tokens, log-probabilities, failures and state."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from slotwise.compute.kernels.reference import draw
from slotwise.compute.runner.input_batch import SlotTable
from slotwise.compute.runner.sampling.cpu_sampler import Sampler
from slotwise.compute.runner.sampling.gpu_sampler import DeviceSampler
from slotwise.compute.runner.sampling.sampler import Sampling
from slotwise.compute.runner.verification import verify
from slotwise.core.params import SamplingSpec, ThinkingBudget
from slotwise.core.record import NewRequest, RowKind, StepPlan, StepResult
from slotwise.core.request import RequestSpec

CPU = torch.device("cpu")
VOCAB, TOKENS, SEED = 24, 64, 11
PROMPT = (3, 5, 7)
STOP = (1, 2)


class Row(NamedTuple):
    """A decode row: what its drafts are, compared with what will be sampled, and positions without a distribution."""

    right: tuple[bool, ...]
    unsound: int  # the first position whose logits are not finite; 99: none


def logits_of(seed: int, slot: int, place: int) -> Tensor:
    """Logits of a position, alike whenever they are computed; few tokens are likely, so that penalties matter."""
    return torch.randn(VOCAB, generator=torch.Generator().manual_seed(seed * 10_000 + slot * 100 + place)) * 3


params = st.builds(
    SamplingSpec,
    temperature=st.sampled_from([0.0, 0.7, 1.3]), top_k=st.sampled_from([0, 5]), top_p=st.sampled_from([1.0, 0.8]),
    min_p=st.sampled_from([0.0, 0.1]), min_tokens=st.sampled_from([0, 2, 6]), logprobs=st.sampled_from([None, 0, 3]),
    presence_penalty=st.sampled_from([0.0, 0.0, 1.5]), repetition_penalty=st.sampled_from([1.0, 1.0, 1.6]),
    frequency_penalty=st.sampled_from([0.0, 0.0, 0.9]), logit_bias=st.sampled_from([{}, {4: 3.0, 9: -2.0}]),
    allowed_token_ids=st.sampled_from([(), (), (1, 2, 4, 9, 11)]),
    bad_words_token_ids=st.sampled_from([(), (), ((4,), (9, 4), (11, 9, 9))]),
    thinking=st.sampled_from([None, None, ThinkingBudget(0, 9), ThinkingBudget(2, 11), ThinkingBudget(1, 2, 9)]))
rows = st.builds(Row, st.lists(st.booleans(), max_size=5).map(lambda right: tuple(right)),
                 st.sampled_from([99, 99, 99, 0, 1, 3]))


class Side:
    """A sampler and its token table."""

    def __init__(self, asked: list[SamplingSpec], is_device: bool) -> None:
        self.table = SlotTable(len(asked), TOKENS, 4, 99)
        self.sampler: Sampling = (
            DeviceSampler(self.table, VOCAB, draw, CPU) if is_device else Sampler(len(asked), VOCAB))
        joins = tuple(NewRequest(f"r{slot}", slot, RequestSpec(PROMPT, each, SEED + slot), STOP)
                      for slot, each in enumerate(asked))
        self.table.apply(StepPlan(0, 0.0, (), joins, *[()] * 13, None))
        for join in joins:
            self.sampler.join(join)

    def verified(self, starts: list[int], drafts: list[tuple[int, ...]], logits: Tensor) -> StepResult:
        counts = tuple(1 + len(each) for each in drafts)
        slots = tuple(range(len(starts)))
        plan = StepPlan(0, 0.0, (), (), (), (), tuple(f"r{slot}" for slot in slots), slots, tuple(starts), counts,
                        tuple(drafts), counts, (RowKind.DECODE,) * len(starts), (), (), (), (), None)
        self.table.apply(plan)
        _, targets = self.table.gather(plan)
        return verify(plan, logits, targets, self.sampler, self.table, CPU).result()

    def known(self, slot: int, end: int) -> list[int]:
        return self.table.known(slot, 0, end).tolist()


def a_token_at_a_time(side: Side, slot: int, start: int, logits: list[Tensor]) -> tuple[list[int], list[object]]:
    """Tokens and their log-probabilities at each position, until one fails."""
    tokens, entries = [], []
    for place, each in enumerate(logits):
        position = start + place + 1
        drawn = side.sampler.sample(each[None], [slot], [position])
        side.table.append(torch.tensor([slot * (TOKENS + 1) + position]), drawn.column)
        found = drawn.read()
        if found.failed:
            break
        tokens += found.tokens
        entries += found.logprobs or [None]
    return tokens, entries


@pytest.mark.parametrize("is_device", [False, True], ids=["host", "device"])
@settings(max_examples=30, deadline=None)
@given(st.lists(st.tuples(params, st.lists(rows, min_size=3, max_size=3)), min_size=1, max_size=4),
       st.integers(0, 1000))
def test_drafts_verified_together_give_what_a_token_at_a_time_gives(is_device, requests, seed):
    asked = [each for each, _ in requests]
    together, alone = Side(asked, is_device), Side(asked, is_device)
    ends = [len(PROMPT)] * len(asked)  # known tokens
    for step in range(3):
        drafts, logits, expected = [], [], []
        for slot, (_, steps) in enumerate(requests):
            right, unsound = steps[step]
            mine = [logits_of(seed, slot, ends[slot] + place) for place in range(len(right) + 1)]
            for place, each in enumerate(mine):
                if place >= unsound:
                    each[3] = torch.nan
            # What the request would sample with all drafts right; the state of a side of its own is not touched.
            scout = Side(asked, is_device)
            replay(scout, slot, together.known(slot, ends[slot]))
            to_come, _ = a_token_at_a_time(scout, slot, ends[slot] - 1, mine)
            to_come += [0] * len(mine)
            drafts.append(tuple(token if good else (token + 1) % VOCAB
                                for token, good in zip(to_come, right, strict=False)))
            accepted = next((place for place, good in enumerate(right) if not good), len(right))
            expected.append(a_token_at_a_time(alone, slot, ends[slot] - 1, mine[: accepted + 1]))
            logits += mine
        result = together.verified([end - 1 for end in ends], drafts, torch.stack(logits))
        assert result.tokens == tuple(tuple(tokens) for tokens, _ in expected)
        assert result.failed == tuple(slot for slot, (tokens, _) in enumerate(expected) if not tokens)
        for slot, (_, entries) in enumerate(expected):
            found = result.logprobs[slot] if result.logprobs else ()
            assert len(found) == (0 if asked[slot].logprobs is None else len(entries))
            for ours, theirs in zip(found, entries, strict=False):
                assert (ours.rank, ours.top_ids) == (theirs.rank, theirs.top_ids)
                np.testing.assert_allclose([ours.logprob, *ours.top_logprobs], [theirs.logprob, *theirs.top_logprobs],
                                           rtol=1e-5, atol=1e-5)
            ends[slot] += len(result.tokens[slot])
            assert together.known(slot, ends[slot]) == alone.known(slot, ends[slot])


def replay(side: Side, slot: int, tokens: list[int]) -> None:
    """Let a request have sampled `tokens` behind its prompt: it is resumed, as after a preemption."""
    request = side.sampler._params._requests[slot]
    spec = RequestSpec(PROMPT, request.params, SEED + slot)
    join = NewRequest(f"r{slot}", slot, spec, STOP, tuple(tokens[len(PROMPT):]))
    side.table.apply(StepPlan(0, 0.0, (), (join,), *[()] * 13, None))
    side.sampler.join(join)


class Counting(Sampler):
    """Counts the draws."""

    draws = 0

    def sample(self, logits, slots, positions):
        self.draws += 1
        return super().sample(logits, slots, positions)


@pytest.mark.parametrize(("asked", "draws"), [
    (SamplingSpec(temperature=0.0), 1), (SamplingSpec(temperature=1.0, min_p=0.1, logprobs=2), 1),
    (SamplingSpec(temperature=1.0, logit_bias={3: 2.0}, min_tokens=3), 1),
    (SamplingSpec(temperature=1.0, repetition_penalty=1.2), 4), (SamplingSpec(bad_words_token_ids=((4, 5),)), 4),
    (SamplingSpec(thinking=ThinkingBudget(2, 5)), 4)])
def test_one_draw_where_no_token_changes_the_logits_of_the_next(asked, draws):
    side = Side([asked], is_device=False)
    side.sampler = Counting(1, VOCAB)
    replay_from = NewRequest("r0", 0, RequestSpec(PROMPT, asked, SEED), STOP)
    side.sampler.join(replay_from)
    logits = [logits_of(1, 0, place) for place in range(4)]
    scout = Side([asked], is_device=False)
    tokens, _ = a_token_at_a_time(scout, 0, len(PROMPT) - 1, logits)
    result = side.verified([len(PROMPT) - 1], [tuple(tokens[:3])], torch.stack(logits))
    assert result.tokens == (tuple(tokens),)
    assert side.sampler.draws == draws


def critical(freedom: int) -> float:
    """The chi-square that one sample in ten thousand exceeds (Wilson and Hilferty, 1931)."""
    return float(freedom * (1 - 2 / (9 * freedom) + 3.719 * (2 / (9 * freedom)) ** 0.5) ** 3)


@pytest.mark.slow
@pytest.mark.parametrize("asked", [
    SamplingSpec(temperature=1.0), SamplingSpec(temperature=0.7, min_p=0.05),
    SamplingSpec(temperature=1.3, logit_bias={4: 1.0})])
def test_tokens_drawn_with_drafts_have_the_distribution_of_the_target(asked):
    """100,000 draws of the first position, and of the next ones as many as were reached."""
    num_rows, rounds, places = 500, 200, 4
    logits = torch.stack([logits_of(5, 0, place) for place in range(places)]) / 3
    scores = logits.double().numpy() + [asked.logit_bias.get(token, 0.0) for token in range(VOCAB)]
    target = np.exp(scores / asked.temperature)
    target[target < asked.min_p * target.max(1, keepdims=True)] = 0
    target /= target.sum(1, keepdims=True)
    drafts = tuple(np.argsort(target, 1)[:-1, -1].tolist())  # the most probable, which is accepted most often
    sampler, table = Sampler(num_rows, VOCAB), SlotTable(num_rows, rounds * places + 8, 4, 99)
    for slot in range(num_rows):
        sampler.join(NewRequest("r", slot, RequestSpec(PROMPT, asked, SEED + slot), STOP))
    counts = np.zeros((places, VOCAB), np.int64)
    ones, slots = (1,) * num_rows, tuple(range(num_rows))
    for number in range(rounds):
        plan = StepPlan(
            0, 0.0, (), (), (), (), ("r",) * num_rows, slots, (len(PROMPT) - 1 + number * places,) * num_rows,
            tuple(places * one for one in ones), (drafts,) * num_rows, tuple(places * one for one in ones),
            (RowKind.DECODE,) * num_rows, (), (), (), (), None)
        targets = torch.zeros(num_rows * places, dtype=torch.int64)
        outcome = verify(plan, logits.repeat(num_rows, 1), targets, sampler, table, CPU)
        for tokens in outcome.tokens:
            for place, token in enumerate(tokens):
                counts[place, token] += 1
    assert counts[0].sum() == num_rows * rounds
    for place in range(places):
        drawn, expected = counts[place], counts[place].sum() * target[place]
        assert drawn.sum() > 500, "the drafts before it are accepted often enough"
        assert not drawn[expected == 0].any()
        possible = expected > 5
        chi_square = ((drawn - expected)[possible] ** 2 / expected[possible]).sum()
        assert chi_square < critical(int(possible.sum()) - 1), place
