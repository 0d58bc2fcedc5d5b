"""Bans, bias, penalties and log-probabilities.  The log-probabilities of a whole vocabulary show its edited logits."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from slotwise.compute.runner.sampling.cpu_sampler import Sampler
from slotwise.core.params import SamplingSpec
from slotwise.core.record import NewRequest, TokenLogprobs
from slotwise.core.request import RequestSpec

VOCAB = 20  # as many as log-probabilities may be asked for
quick = settings(deadline=None, max_examples=60, derandomize=True)
tokens_of_vocab = st.lists(st.integers(0, VOCAB - 1), max_size=12)
rows = st.lists(st.floats(-8, 8, width=32), min_size=VOCAB, max_size=VOCAB)


def describe(logits: torch.Tensor, params: SamplingSpec, prompt=(0,), outputs=(), stop_ids=()) -> TokenLogprobs:
    """Log-probabilities of the token after the outputs."""
    sampler = Sampler(1, logits.shape[-1])
    known = (*prompt, *outputs)
    sampler.join(NewRequest("r", 0, RequestSpec(prompt, params, 5), tuple(stop_ids), tuple(outputs)))
    [found] = sampler.sample(logits[None], [0], [len(known)]).logprobs
    assert found is not None
    return found


def logprobs_by_token(found: TokenLogprobs) -> np.ndarray:
    table = np.full(VOCAB, np.nan)
    table[list(found.top_ids)] = found.top_logprobs
    return table


def penalised(logits: torch.Tensor, params: SamplingSpec, prompt, outputs) -> torch.Tensor:
    """vLLM's rules, one token at a time, in float64."""
    edited = logits.double().clone()
    for token, bias in params.logit_bias.items():
        edited[token] += bias
    for token in {*prompt, *outputs}:
        factor = params.repetition_penalty
        edited[token] = edited[token] / factor if edited[token] > 0 else edited[token] * factor
    for token in set(outputs):
        edited[token] -= params.frequency_penalty * outputs.count(token) + params.presence_penalty
    return edited


class TestPenaltiesAndBias:
    @pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
    @quick
    @given(
        values=rows, prompt=tokens_of_vocab, outputs=tokens_of_vocab, repetition=st.sampled_from([0.6, 1.0, 1.4]),
        presence=st.sampled_from([-1.0, 0.0, 0.8]), frequency=st.sampled_from([-0.5, 0.0, 0.3]),
        bias=st.dictionaries(st.integers(0, VOCAB - 1), st.sampled_from([-100.0, -1.5, 2.0]), max_size=4),
    )
    def test_match_the_rules(self, dtype, values, prompt, outputs, repetition, presence, frequency, bias):
        params = SamplingSpec(
            temperature=0, logprobs=VOCAB, repetition_penalty=repetition, presence_penalty=presence,
            frequency_penalty=frequency, logit_bias=bias,
        )
        logits = torch.tensor(values).to(dtype)
        before = logits.clone()
        found = logprobs_by_token(describe(logits, params, prompt, outputs))
        expected = penalised(logits, params, prompt, outputs).log_softmax(0).numpy()
        np.testing.assert_allclose(found, expected, atol=2e-5, rtol=2e-6)
        assert torch.equal(logits, before)

    def test_own_outputs_count_as_they_are_sampled(self):
        sampler = Sampler(1, 3)
        sampler.join(NewRequest("r", 0, RequestSpec((0,), SamplingSpec(temperature=0, frequency_penalty=1.0)), ()))
        logits = torch.tensor([[2.5, 2.0, 0.0]])
        tokens = [sampler.sample(logits, [0], [1 + i]).tokens[0] for i in range(6)]
        assert tokens == [0, 1, 0, 1, 0, 1]

    def test_more_distinct_tokens_than_the_columns_start_with(self):
        prompt = tuple(range(0, 600, 2))
        params = SamplingSpec(temperature=0, repetition_penalty=2.0, logprobs=2)
        found = describe(torch.full((600,), 4.0), params, prompt)
        assert found.top_ids == (1, 3) and found.rank == 1

    def test_tokens_outside_the_vocabulary_are_ignored(self):
        bias = {99: 5.0, 1: 1.0}
        params = SamplingSpec(temperature=0, logprobs=1, logit_bias=bias, presence_penalty=0.5, min_tokens=2)
        found = describe(torch.zeros(VOCAB), params, prompt=(500, 1), outputs=(300,), stop_ids=(77,))
        assert found.top_ids == (1,)

    @pytest.mark.parametrize("params", [
        SamplingSpec(presence_penalty=1.0), SamplingSpec(temperature=0, repetition_penalty=2.0)])
    def test_edits_that_fail_cost_their_own_row_alone(self, params):
        sampler = Sampler(3, 4)
        logits = torch.tensor([[0.0, 1.0, 2.0, 3.0]] * 3)
        for slot, asked in enumerate((SamplingSpec(temperature=0, logit_bias={0: 9.0}), params,
                                      SamplingSpec(temperature=0))):
            sampler.join(NewRequest(str(slot), slot, RequestSpec((1, 2), asked), ()))
        sampled = sampler.sample(logits, [0, 1, 2], [2, 5, 2])  # of the one in the middle three outputs are unknown
        assert sampled.failed == (1,)
        assert sampled.tokens[0] == 0 and sampled.tokens[2] == 3

    def test_a_slot_forgets_its_last_request(self):
        sampler = Sampler(1, 3)
        sampler.join(NewRequest("a", 0, RequestSpec((0,), SamplingSpec(temperature=0, logit_bias={2: 100.0})), ()))
        logits = torch.tensor([[1.0, 0.0, 0.0]])
        assert sampler.sample(logits, [0], [1]).tokens == [2]
        sampler.leave(0)
        sampler.join(NewRequest("b", 0, RequestSpec((0,), SamplingSpec(temperature=0)), ()))
        assert sampler.sample(logits, [0], [1]).tokens == [0]


class TestMinTokens:
    @pytest.mark.parametrize("temperature", [0.0, 1.0])
    def test_ends_are_banned_until_reached(self, temperature):
        sampler = Sampler(1, 6)
        sampler.join(NewRequest("r", 0, RequestSpec((0, 0), SamplingSpec(temperature=temperature, min_tokens=5), 1),
                                (2, 4)))
        logits = torch.tensor([[0.0, 1.0, 30.0, 0.5, 29.0, 0.0]])
        tokens = [sampler.sample(logits, [0], [2 + i]).tokens[0] for i in range(8)]
        assert not {2, 4} & set(tokens[:5])
        assert set(tokens[5:]) <= {2, 4}

    def test_a_later_join_counts_its_outputs(self):
        sampler = Sampler(1, 6)
        params = SamplingSpec(temperature=0, min_tokens=4)
        sampler.join(NewRequest("r", 0, RequestSpec((0, 0), params, 1), (2,), (1, 1, 1)))
        logits = torch.tensor([[0.0, 1.0, 30.0, 0.5, 2.0, 0.0]])
        assert [sampler.sample(logits, [0], [5 + i]).tokens[0] for i in range(2)] == [4, 2]

    def test_nothing_left_to_sample_fails_the_row(self):
        sampler = Sampler(1, 2)
        sampler.join(NewRequest("r", 0, RequestSpec((0,), SamplingSpec(min_tokens=1), 1), (0, 1)))
        assert sampler.sample(torch.zeros(1, 2), [0], [1]).failed == (0,)


class TestLogprobs:
    @pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
    @pytest.mark.parametrize("temperature", [0.0, 1.5])
    def test_match_log_softmax(self, dtype, temperature):
        logits = (torch.randn(40, 5000, generator=torch.Generator().manual_seed(2)) * 3).to(dtype)
        sampler = Sampler(40, 5000)
        for slot in range(40):
            params = SamplingSpec(temperature=temperature, logprobs=slot % 21, top_k=100)
            sampler.join(NewRequest("r", slot, RequestSpec((0,), params, slot), ()))
        sampled = sampler.sample(logits, range(40), [1] * 40)
        for row, (token, found) in enumerate(zip(sampled.tokens, sampled.logprobs, strict=True)):
            expected = logits[row].double().log_softmax(0)
            top_ids = sorted(range(5000), key=lambda i: (-expected[i].item(), i))[: row % 21]
            assert found.logprob == pytest.approx(expected[token].item(), abs=5e-6)
            assert found.rank == 1 + int((expected > expected[token]).sum())
            assert found.top_ids == tuple(top_ids)
            assert found.top_logprobs == pytest.approx(expected[top_ids].tolist(), abs=5e-6)

    def test_rows_that_did_not_ask_get_none(self):
        sampler = Sampler(3, 8)
        for slot, asked in enumerate((None, 0, None)):
            sampler.join(NewRequest("r", slot, RequestSpec((0,), SamplingSpec(logprobs=asked), slot), ()))
        logprobs = sampler.sample(torch.zeros(3, 8), range(3), [1] * 3).logprobs
        assert logprobs[0] is None and logprobs[2] is None
        assert logprobs[1].top_ids == () and logprobs[1].logprob == pytest.approx(-np.log(8), abs=1e-6)

    def test_banned_tokens_come_last(self):
        logits = torch.tensor([-torch.inf, 1.0, -torch.inf, 0.0])
        found = describe(logits, SamplingSpec(temperature=0, logprobs=20))
        assert found.top_ids == (1, 3, 0, 2)
        assert found.top_logprobs[2:] == (-np.inf, -np.inf)
