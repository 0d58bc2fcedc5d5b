"""The device's sampler on tensors of the CPU, against the CPU's own: the same tokens, the same probabilities."""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch

from slotwise.compute.kernels.reference import FAILED, draw, uniform
from slotwise.compute.runner.input_batch import SlotTable
from slotwise.compute.runner.sampling.cpu_sampler import Sampler
from slotwise.compute.runner.sampling.gpu_sampler import DeviceSampler, largest
from slotwise.compute.runner.sampling.sampler import SampledTokens
from slotwise.core.params import SamplingSpec
from slotwise.core.record import NewRequest, StepPlan
from slotwise.core.request import RequestSpec

CPU = torch.device("cpu")
VOCAB, SLOTS, TOKENS = 300, 24, 64
BAD = ((4,), (7, 8), (999, 3), *[(a, b) for a in range(0, 300, 40) for b in (0, 40)])


class Both:
    """Both samplers, told the same; tokens go to the table, as the runner does it."""

    def __init__(self, vocab: int = VOCAB, num_slots: int = SLOTS) -> None:
        self.table = SlotTable(num_slots, TOKENS, 4, 99)
        self.device = DeviceSampler(self.table, vocab, draw, CPU)
        self.host = Sampler(num_slots, vocab)

    def join(self, *new_requests: NewRequest) -> None:
        self.table.apply(StepPlan(0, 0.0, (), new_requests, *[()] * 13, None))
        for join in new_requests:
            self.device.join(join)
            self.host.join(join)

    def sample(
        self, logits: torch.Tensor, slots: list[int], positions: list[int],
    ) -> tuple[SampledTokens, SampledTokens]:
        expected = self.host.sample(logits, slots, positions)
        drawn = self.device.sample(logits, slots, positions)
        places = torch.tensor([slot * (TOKENS + 1) + position for slot, position in zip(slots, positions, strict=True)])
        self.table.append(places, drawn.column)
        return drawn.read(), expected


def asked(seed: int) -> SamplingSpec:
    """Anything a client may ask, or nothing."""
    pick = random.Random(seed)
    return SamplingSpec(
        temperature=pick.choice([0.0, 0.0, 0.7, 1.3]), top_k=pick.choice([0, 1, 20]),
        top_p=pick.choice([1.0, 0.9, 0.3]), min_p=pick.choice([0.0, 0.0, 0.05]), min_tokens=pick.choice([0, 3]),
        logprobs=pick.choice([None, None, 0, 5]), presence_penalty=pick.choice([0.0, 0.0, 0.8]),
        frequency_penalty=pick.choice([0.0, 0.0, 0.5]), repetition_penalty=pick.choice([1.0, 1.0, 1.4]),
        logit_bias=pick.choice([{}, {}, {5: 4.0, 999: 1.0, 7: -3.0}]),
        allowed_token_ids=pick.choice([(), (), (*range(0, 300, 40), 999)]),
        bad_words_token_ids=pick.choice([(), (), BAD]))


@pytest.mark.parametrize("kind", [torch.float32, torch.bfloat16])
def test_the_same_tokens_whatever_is_asked(kind):
    both, generator = Both(), torch.Generator().manual_seed(1)
    prompts = [tuple(random.Random(slot).choices(range(VOCAB), k=3 + slot % 5)) for slot in range(SLOTS)]
    both.join(*(NewRequest(f"r{slot}", slot, RequestSpec(prompt, asked(slot), 7 * slot + 1), (1, 2))
                for slot, prompt in enumerate(prompts)))
    for step in range(6):
        logits = (torch.randn(SLOTS, VOCAB, generator=generator) * 3).to(kind)
        before = logits.clone()
        found, expected = both.sample(logits, list(range(SLOTS)), [len(prompt) + step for prompt in prompts])
        assert found.tokens == expected.tokens and found.failed == expected.failed
        assert torch.equal(logits, before)
        for ours, theirs in zip(found.logprobs, expected.logprobs, strict=True):
            assert (ours is None) == (theirs is None)
            if ours is not None:
                assert ours.rank == theirs.rank and ours.top_ids == theirs.top_ids
                np.testing.assert_allclose([ours.logprob, *ours.top_logprobs], [theirs.logprob, *theirs.top_logprobs],
                                           rtol=1e-5, atol=1e-5)


class TestMasks:
    """Tokens that may not be chosen, on both samplers."""

    LOGITS = torch.tensor([[5.0, 4.0, 3.0, 2.0, 1.0, 0.0]])

    def sampled(self, params: SamplingSpec, known=(0,), num_prompt=1, steps=6, logits=LOGITS) -> list[int]:
        both = Both(logits.shape[1], 1)
        both.join(NewRequest("r", 0, RequestSpec(tuple(known)[:num_prompt], params, 1), (), tuple(known)[num_prompt:]))
        tokens = []
        for step in range(steps):
            found, expected = both.sample(logits, [0], [len(known) + step])
            assert found.tokens == expected.tokens and found.failed == expected.failed
            tokens += found.tokens
        return tokens

    def test_only_allowed_tokens(self):
        assert self.sampled(SamplingSpec(temperature=0, allowed_token_ids=(4, 2, 99))) == [2] * 6
        drawn = self.sampled(SamplingSpec(temperature=5.0, allowed_token_ids=(1, 3)), steps=40)
        assert set(drawn) == {1, 3}

    def test_allowed_tokens_keep_their_probabilities(self):
        params = SamplingSpec(temperature=0, logprobs=6, allowed_token_ids=(1, 3), logit_bias={3: 2.0, 0: 9.0})
        sampler = Sampler(1, 6)
        sampler.join(NewRequest("r", 0, RequestSpec((0,), params, 1), ()))
        [found] = sampler.sample(self.LOGITS, [0], [1]).logprobs
        assert found.logprob == pytest.approx(-np.log(2), abs=1e-6)
        assert found.top_logprobs[2:] == (-np.inf,) * 4

    def test_a_word_of_one_token_never_comes(self):
        assert self.sampled(SamplingSpec(temperature=0, bad_words_token_ids=((0,), (1,)))) == [2] * 6

    def test_a_word_of_several_tokens_is_never_completed(self):
        params = SamplingSpec(temperature=0, bad_words_token_ids=((0, 0), (0, 1, 0)))
        assert self.sampled(params) == [0, 1, 1, 0, 1, 1]
        # The prompt's last tokens begin no word; outputs before a preemption do.
        assert self.sampled(params, known=(0, 0), num_prompt=2, steps=1) == [0]
        assert self.sampled(params, known=(0, 0), num_prompt=1, steps=1) == [1]
        assert self.sampled(params, known=(5, 0, 1), num_prompt=1, steps=1) == [1]

    def test_a_step_that_is_run_again_forgets_its_outputs(self):
        sampler = Sampler(1, 6)
        params = SamplingSpec(temperature=0, bad_words_token_ids=((0, 0),))
        sampler.join(NewRequest("r", 0, RequestSpec((0,), params, 1), ()))
        for _ in range(3):
            assert sampler.sample(self.LOGITS, [0], [1]).tokens == [0]
        assert sampler.sample(self.LOGITS, [0], [2]).tokens == [1]

    def test_nothing_left_fails_the_row(self):
        assert self.sampled(SamplingSpec(allowed_token_ids=(2,), bad_words_token_ids=((2,),)), steps=1) == [FAILED]


def test_rows_that_cannot_sample_fail_alone():
    both = Both()
    both.join(*(NewRequest(f"r{slot}", slot,
                           RequestSpec((3,), SamplingSpec(temperature=slot % 2, logprobs=1), slot), ())
                for slot in range(8)))
    logits = torch.randn(8, VOCAB)
    logits[1, 4], logits[2, 9], logits[3] = torch.nan, torch.inf, -torch.inf
    found, expected = both.sample(logits, list(range(8)), [1] * 8)
    assert found.failed == expected.failed == (1, 2, 3)
    assert found.tokens == expected.tokens and found.tokens[1] == FAILED
    assert [one is None for one in found.logprobs] == [row in (1, 2, 3) for row in range(8)]


def test_edits_that_fail_cost_their_own_row_alone(monkeypatch):
    both = Both()
    penalty = SamplingSpec(temperature=0, presence_penalty=1.0)
    both.join(NewRequest("a", 0, RequestSpec((3,), SamplingSpec(temperature=0)), ()),
              NewRequest("b", 1, RequestSpec((3,), penalty), ()))
    monkeypatch.setattr(both.table, "known", lambda *where: 1 / 0)
    assert both.device.sample(torch.randn(2, VOCAB), [0, 1], [1, 1]).read().failed == (1,)


def test_a_token_still_on_its_way_is_penalised():
    """The host never saw the first token when the second was drawn."""
    both = Both(vocab=3)
    params = SamplingSpec(temperature=0, frequency_penalty=1.0)
    both.join(NewRequest("r", 0, RequestSpec((0,), params), ()))
    logits, drawn = torch.tensor([[2.5, 2.0, 0.0]]), []
    for position in range(1, 7):
        drawn.append(both.device.sample(logits, [0], [position]))
        both.table.append(torch.tensor([position]), drawn[-1].column)
    assert [one.read().tokens[0] for one in drawn] == [0, 1, 0, 1, 0, 1]


def test_tokens_outside_the_vocabulary_are_ignored():
    both = Both(vocab=8)
    params = SamplingSpec(temperature=0, logprobs=8, repetition_penalty=2.0, logit_bias={99: 5.0}, min_tokens=2)
    both.join(NewRequest("r", 0, RequestSpec((20, 1, 300), params), (77,)))
    found, expected = both.sample(torch.randn(1, 8), [0], [3])
    assert found.tokens == expected.tokens and found.logprobs[0].top_ids == expected.logprobs[0].top_ids


def test_a_slot_forgets_its_last_request():
    both, logits = Both(vocab=3), torch.tensor([[1.0, 0.0, 0.0]])
    both.join(NewRequest("a", 0, RequestSpec((0,), SamplingSpec(temperature=0, logit_bias={2: 100.0})), ()))
    assert both.sample(logits, [0], [1])[0].tokens == [2]
    both.device.leave(0)
    both.join(NewRequest("b", 0, RequestSpec((0,), SamplingSpec(temperature=0)), ()))
    assert both.device.sample(logits, [0], [1]).read().tokens == [0]


def test_the_largest_come_in_order_and_ties_by_place():
    scores = torch.tensor([[0.5, 2.0, -1.0, 2.0, -torch.inf, 0.5], [-3.0, -2.0, -2.0, -5.0, -2.0, -1.0]])
    assert largest(scores, 5).tolist() == [[1, 3, 0, 5, 2], [5, 1, 2, 4, 0]]


def test_uniform_numbers_are_those_of_philox():
    """Random123's published answer for key and counter 0 begins 6627e8d5 e169c58d."""
    zero = torch.zeros(1, dtype=torch.int64)
    assert uniform(zero, zero).item() == (0xE169C58D6627E8D5 >> 11) * 2.0**-53
