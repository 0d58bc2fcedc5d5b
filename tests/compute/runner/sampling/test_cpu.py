"""Tokens, their distribution and their log-probabilities, against plain float64 references."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, reject, settings
from hypothesis import strategies as st

from slotwise.compute.kernels.cpu.launcher import KernelLauncher
from slotwise.compute.kernels.reference import FAILED
from slotwise.compute.runner.sampling.cpu_sampler import Sampler
from slotwise.compute.runner.sampling.sampler import SampledTokens
from slotwise.core.params import SamplingSpec
from slotwise.core.record import NewRequest
from slotwise.core.request import RequestSpec

DTYPES = [torch.bfloat16, torch.float32]
quick = settings(deadline=None, max_examples=40, derandomize=True)


def join(slot: int, params: SamplingSpec, tokens=(1, 2, 3), num_prompt=3, seed=0, stop_ids=()) -> NewRequest:
    return NewRequest(f"r{slot}", slot, RequestSpec(tokens[:num_prompt], params, seed), tuple(stop_ids),
                      tuple(tokens[num_prompt:]))


def sample_one(logits: torch.Tensor, params: SamplingSpec, **about) -> SampledTokens:
    """The next token of one request, alone."""
    sampler = Sampler(1, logits.shape[-1])
    request = join(0, params, **about)
    sampler.join(request)
    return sampler.sample(logits[None], [0], [len(request.tokens)])


def draws(logits: torch.Tensor, params: SamplingSpec, count: int, seed: int = 0) -> np.ndarray:
    """Outputs 0 to `count` of one request that sees the same logits each time."""
    sampler = Sampler(count, len(logits))
    for slot in range(count):
        sampler.join(join(slot, params, seed=seed))
    sampled = sampler.sample(logits.expand(count, -1).contiguous(), range(count), range(3, 3 + count))
    return np.array(sampled.tokens)


class TooClose(Exception):
    """The reference cannot say which side of a cut a token is on."""


def distribution(logits: torch.Tensor, params: SamplingSpec) -> np.ndarray:
    """What should be sampled, in float64: sorted, with ties at a cut kept."""
    scores = logits.double().numpy() / params.temperature
    weights = np.exp(scores - scores.max())
    weights[weights < params.min_p] = 0
    if params.top_k > 0:
        weights[weights < np.sort(weights)[::-1][: params.top_k][-1]] = 0
    if params.top_p < 1:
        descending = np.sort(weights)[::-1]
        mass = np.cumsum(descending) / descending.sum()
        if np.abs(mass - params.top_p).min() < 1e-5:
            raise TooClose  # float32 may rightly differ by a token
        weights[weights < descending[np.argmax(mass >= params.top_p)]] = 0
    return weights / weights.sum()


def philox(counter: tuple[int, ...], key: tuple[int, int]) -> tuple[int, ...]:
    """Philox4x32-10 as its paper writes it."""
    (c0, c1, c2, c3), (k0, k1) = counter, key
    for _ in range(10):
        product0, product1 = 0xD2511F53 * c0, 0xCD9E8D57 * c2
        c0, c1, c2, c3 = (
            (product1 >> 32) ^ c1 ^ k0, product1 & 0xFFFFFFFF, (product0 >> 32) ^ c3 ^ k1, product0 & 0xFFFFFFFF,
        )
        k0, k1 = (k0 + 0x9E3779B9) & 0xFFFFFFFF, (k1 + 0xBB67AE85) & 0xFFFFFFFF
    return c0, c1, c2, c3


coarse = st.integers(-12, 12).map(lambda n: n / 4)  # exact in bfloat16, and full of ties
filters = st.builds(
    SamplingSpec,
    temperature=st.sampled_from([0.5, 1.0, 1.7]),
    top_k=st.integers(-1, 12),
    top_p=st.sampled_from([0.05, 0.3, 0.77, 0.95, 1.0]),
    min_p=st.sampled_from([0.0, 0.02, 0.3, 1.0]),
)


class TestGreedy:
    @pytest.mark.parametrize("dtype", DTYPES)
    @pytest.mark.parametrize("vocab", [1, 7, 512, 513, 5000])
    def test_takes_the_first_of_the_largest(self, dtype, vocab):
        logits = torch.randint(-8, 8, (17, vocab), generator=torch.Generator().manual_seed(vocab)).to(dtype) / 4
        sampler = Sampler(17, vocab, KernelLauncher(3))
        for slot in range(17):
            sampler.join(join(slot, SamplingSpec(temperature=0)))
        expected = [row.index(max(row)) for row in logits.tolist()]
        assert sampler.sample(logits, range(17), [3] * 17) == SampledTokens(expected, [], ())
        alone = [sampler.sample(logits[row : row + 1], [row], [3]).tokens for row in range(17)]  # in parts
        assert alone == [[token] for token in expected]

    def test_zeros_of_either_sign_tie(self):
        logits = torch.tensor([-1.0, -0.0, 0.0])
        assert sample_one(logits, SamplingSpec(temperature=0)).tokens == [1]

    def test_a_temperature_close_to_zero_is_greedy(self):
        assert set(draws(torch.tensor([0.0, 0.001, -3]), SamplingSpec(temperature=1e-6), 50)) == {1}

    def test_a_slot_is_greedy_as_long_as_its_request_is(self):
        logits = torch.tensor([[4.0, 3.0, 2.0, 1.0]])
        drawn, banned = SamplingSpec(temperature=0, logit_bias={0: -9.0}), SamplingSpec(temperature=0, min_tokens=1)
        for before in (drawn, banned):
            sampler = Sampler(1, 4)
            for request, token in ((join(0, before, stop_ids=(0,)), 1), (join(0, SamplingSpec(temperature=0)), 0),
                                   (join(0, before, stop_ids=(0,)), 1)):
                sampler.join(request)
                assert sampler.sample(logits, [0], [3]).tokens == [token]
                sampler.leave(0)
            sampler.join(join(0, before, stop_ids=(0,)))
            sampler.join(join(0, SamplingSpec(temperature=0)))  # resumed, without a `leave`
            assert sampler.sample(logits, [0], [3]).tokens == [0]

    def test_logits_that_are_a_view_with_gaps(self):
        wide = torch.randn(4, 300, generator=torch.Generator().manual_seed(0))
        sampler = Sampler(4, 100)
        for slot in range(4):
            sampler.join(join(slot, SamplingSpec(temperature=0)))
        part = wide[:, 100:200]
        assert sampler.sample(part, range(4), [3] * 4).tokens == part.argmax(1).tolist()


class TestDistribution:
    @pytest.mark.parametrize("dtype", DTYPES)
    @quick
    @given(values=st.lists(coarse, min_size=2, max_size=40), params=filters)
    def test_filters_keep_what_they_should(self, dtype, values, params):
        logits = torch.tensor(values, dtype=dtype)
        try:
            expected = distribution(logits, params)
        except TooClose:
            reject()
        drawn = draws(logits, params, 1500)
        assert set(drawn) <= set(np.flatnonzero(expected))
        assert set(np.flatnonzero(expected > 0.015)) <= set(drawn)

    def test_ties_at_the_cut_are_all_kept(self):
        logits = torch.tensor([2.0, 1.0, 1.0, 1.0, 0.0])
        assert set(draws(logits, SamplingSpec(top_k=2), 500)) == {0, 1, 2, 3}
        assert set(draws(logits, SamplingSpec(top_p=0.6), 500)) == {0, 1, 2, 3}

    def test_no_mass_at_all_keeps_one_token(self):
        logits = torch.tensor([1.0, 2.0, 2.0, 1.9])
        assert set(draws(logits, SamplingSpec(top_p=0), 500)) == {1}
        assert set(draws(logits, SamplingSpec(top_p=1e-30), 500)) == {1, 2}

    @pytest.mark.parametrize("vocab", [20, 700, 3000])
    @pytest.mark.parametrize(
        "params",
        [
            SamplingSpec(),
            SamplingSpec(temperature=0.6, top_k=9),
            SamplingSpec(temperature=1.4, top_p=0.9),
            SamplingSpec(top_k=15, top_p=0.8, min_p=0.01),
        ],
        ids=["plain", "top-k", "top-p", "all"],
    )
    def test_frequencies_match(self, vocab, params):
        logits = torch.randn(vocab, generator=torch.Generator().manual_seed(vocab)) * 2
        expected = distribution(logits, params)
        count = 4000
        observed = np.bincount(draws(logits, params, count), minlength=vocab)
        bins = np.minimum(np.cumsum(expected) * 10, 9.999).astype(int)  # about equal mass, in order of token id
        expected, observed = np.bincount(bins, expected) * count, np.bincount(bins, observed)
        present = expected > 0
        chi_square = ((observed - expected)[present] ** 2 / expected[present]).sum()
        assert chi_square < 30  # 9 degrees of freedom: 0.9995 of fair draws stay below
        assert observed[~present].sum() == 0

    def test_a_token_banned_by_the_model_is_never_drawn(self):
        logits = torch.tensor([-torch.inf, 0.0, -torch.inf, 0.0, -200.0])
        assert set(draws(logits, SamplingSpec(temperature=2), 300)) == {1, 3}


class TestRandomNumbers:
    def test_the_reference_passes_the_known_answers_of_random123(self):
        assert philox((0,) * 4, (0, 0)) == (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)
        ones = 0xFFFFFFFF
        assert philox((ones,) * 4, (ones, ones)) == (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)

    @pytest.mark.parametrize("seed", [0, 1, 2**63 - 1, -1, -(2**63), 0x123456789ABCDEF0])
    def test_are_philox_of_seed_and_output_index(self, seed):
        key = seed & (2**64 - 1)
        words = [philox((i, 0, 0, 0), (key & 0xFFFFFFFF, key >> 32)) for i in range(200)]
        uniforms = [((high << 32) | low) / 2**64 for low, high, *_ in words]
        drawn = draws(torch.zeros(1024), SamplingSpec(), 200, seed)  # equal weights: the token spells the number
        assert drawn.tolist() == [int(u * 1024) for u in uniforms]


class TestIndependence:
    PARAMS = (
        SamplingSpec(),
        SamplingSpec(temperature=0),
        SamplingSpec(temperature=0.7, top_p=0.9, top_k=30, logprobs=3),
        SamplingSpec(min_p=0.05, repetition_penalty=1.3, frequency_penalty=0.5),
        SamplingSpec(logit_bias={5: 4.0}, top_p=0.5),
        SamplingSpec(temperature=0, presence_penalty=0.7, logprobs=0),
    )

    @pytest.mark.parametrize("dtype", DTYPES)
    def test_company_and_place_change_nothing(self, dtype):
        generator = torch.Generator().manual_seed(3)
        logits = (torch.randn(32, 1500, generator=generator) * 2).to(dtype)
        new_requests = [join(slot, self.PARAMS[slot % len(self.PARAMS)], seed=slot) for slot in range(32)]
        alone = [sample_one(logits[i], one.spec.params, seed=one.spec.seed) for i, one in enumerate(new_requests)]
        for turn in range(0, 32, 3):
            order = np.roll(np.arange(32), turn)
            sampler = Sampler(32, 1500)
            for place, i in enumerate(order):
                sampler.join(new_requests[i]._replace(slot=31 - place))
            together = sampler.sample(logits[order], range(31, -1, -1), [3] * 32)
            assert together.tokens == [alone[i].tokens[0] for i in order]
            assert together.logprobs == [alone[i].logprobs[0] if alone[i].logprobs else None for i in order]

    @pytest.mark.parametrize("params", PARAMS)
    def test_preemption_changes_nothing(self, params):
        logits = torch.randn(40, 200, generator=torch.Generator().manual_seed(5)) * 3
        sampler = Sampler(2, 200)
        start = join(0, params, tokens=(7, 7, 9), seed=11)
        runs = []
        for preempted_at in (None, 1, 17):
            tokens, slot = [7, 7, 9], 0
            sampler.join(start)
            for step in range(40):
                if step == preempted_at:
                    sampler.leave(slot)
                    slot = 1
                    sampler.join(start._replace(slot=slot, sampled=tuple(tokens[3:])))
                sampled = sampler.sample(logits[step : step + 1], [slot], [len(tokens)])
                tokens.append(sampled.tokens[0])
            runs.append(tokens)
        assert runs[0] == runs[1] == runs[2]

    @pytest.mark.parametrize("params", PARAMS)
    def test_a_step_run_again_gives_the_same(self, params):
        logits = torch.randn(10, 50, generator=torch.Generator().manual_seed(6))
        sampler = Sampler(1, 50)
        sampler.join(join(0, params))
        first = [sampler.sample(logits[i : i + 1], [0], [3 + i]) for i in range(10)]
        again = [sampler.sample(logits[i : i + 1], [0], [3 + i]) for i in range(4, 10)]
        assert again == first[4:]

    def test_seeds_differ(self):
        logits = torch.zeros(1000)
        assert len({tuple(draws(logits, SamplingSpec(), 5, seed)) for seed in range(50)}) == 50


class TestRowsThatFail:
    @pytest.mark.parametrize("dtype", DTYPES)
    @pytest.mark.parametrize("params", [SamplingSpec(temperature=0), SamplingSpec(logprobs=2), SamplingSpec()])
    def test_are_named_and_leave_the_others_alone(self, dtype, params):
        logits = torch.randn(6, 600, generator=torch.Generator().manual_seed(1)).to(dtype)
        sampler = Sampler(6, 600, KernelLauncher(3))
        for slot in range(6):
            sampler.join(join(slot, params, seed=slot))
        sound = sampler.sample(logits, range(6), [3] * 6)
        logits[1, 555] = torch.nan
        logits[2, 3] = torch.inf
        logits[4] = -torch.inf
        logits[5, 0] = -torch.nan
        sampled = sampler.sample(logits, range(6), [3] * 6)
        assert sampled.failed == (1, 2, 4, 5)
        assert [sampled.tokens[row] for row in sampled.failed] == [FAILED] * 4
        assert [sampled.tokens[row] for row in (0, 3)] == [sound.tokens[row] for row in (0, 3)]
        alone = [sampler.sample(logits[row : row + 1], [row], [3]).failed for row in range(6)]
        assert alone == [(), (0,), (0,), (), (0,), (0,)]
        if params.logprobs is not None:
            assert sampled.logprobs[1] is None and sampled.logprobs[3] == sound.logprobs[3]

    def test_a_failure_is_not_recorded(self):
        sampler = Sampler(1, 4)
        sampler.join(join(0, SamplingSpec(presence_penalty=1.0)))
        assert sampler.sample(torch.full((1, 4), torch.nan), [0], [3]).failed == (0,)
        assert sampler.sample(torch.zeros(1, 4), [0], [3]).failed == ()
