"""Lengths: what is drawn has the moments, the caps and the quantiles that were asked for, the same for ever."""

from __future__ import annotations

import math
import random
from statistics import fmean, median, pstdev, quantiles

import pytest
from hypothesis import given
from hypothesis import strategies as st

from slotwise.measure.workload.distributions import (
    AZURE_OUTPUT,
    AZURE_PROMPT,
    QUANTILES,
    AzureOutput,
    AzurePrompt,
    Exponential,
    Fixed,
    LengthDistribution,
    LogNormal,
    Uniform,
    parse_lengths,
    quantile,
    stream,
)

FORMS = ["fixed:128", "uniform:1:128", "exponential:128:512", "lognormal:128:1.0:2048", "azure-prompt:0.125",
         "azure-output:0.125"]
tokens = st.integers(1, 5000)
sizes = st.floats(1, 5000)
scales = st.floats(0.001, 4)
anything = st.one_of(
    st.builds(Fixed, tokens),
    st.tuples(tokens, tokens).map(lambda ends: Uniform(min(ends), max(ends))),
    st.builds(Exponential, sizes, tokens),
    st.builds(LogNormal, sizes, st.floats(0, 4), tokens),
    st.builds(AzurePrompt, scales),
    st.builds(AzureOutput, scales),
)


def draws(text: str, count: int = 20_000) -> list[int]:
    rng, drawn = stream(1, "a test"), parse_lengths(text)
    return [drawn.draw(rng) for _ in range(count)]


@pytest.mark.parametrize("text", FORMS)
def test_text_forms_read_as_they_are_written(text: str) -> None:
    assert str(parse_lengths(text)) == text


@given(anything)
def test_any_lengths_come_back_from_their_text(some: LengthDistribution) -> None:
    assert parse_lengths(str(some)) == some


@given(anything, st.integers(0, 2**32))
def test_draws_stay_within_one_and_the_longest(some: LengthDistribution, seed: int) -> None:
    rng = random.Random(seed)
    assert all(1 <= some.draw(rng) <= some.longest for _ in range(50))


@pytest.mark.parametrize("text", ["", "normal:5", "fixed", "fixed:1:2", "fixed:many", "uniform:1", "lognormal:1:2"])
def test_what_cannot_be_read_is_told_the_forms(text: str) -> None:
    with pytest.raises(ValueError, match="lognormal:MEDIAN:SIGMA:CAP") as told:
        parse_lengths(text)
    assert "\n" not in str(told.value)


@pytest.mark.parametrize("text", [
    "fixed:0", "uniform:5:4", "uniform:0:4", "exponential:0.5:10", "exponential:nan:10", "exponential:inf:10",
    "lognormal:10:-1:20", "lognormal:10:1:0", "azure-prompt:0", "azure-output:-1", f"fixed:{10**400}",
])
def test_numbers_out_of_range_are_refused(text: str) -> None:
    with pytest.raises(ValueError, match="must be between"):
        parse_lengths(text)


@pytest.mark.parametrize(("text", "first"), [
    ("fixed:128", [128] * 8),
    ("uniform:1:128", [120, 17, 29, 38, 112, 108, 103, 121]),
    ("exponential:128:512", [8, 261, 190, 158, 17, 22, 29, 8]),
    ("lognormal:128:1.0:2048", [590, 42, 60, 74, 402, 349, 296, 607]),
    ("azure-prompt:1.0", [3726, 268, 371, 498, 2464, 2141, 1692, 3821]),
    ("azure-output:0.125", [55, 7, 10, 12, 52, 52, 51, 56]),
])
def test_a_seed_means_the_same_lengths_for_ever(text: str, first: list[int]) -> None:
    rng, drawn = stream(0, "test"), parse_lengths(text)
    assert [drawn.draw(rng) for _ in first] == first


def test_uniform_lengths_are_spread_evenly() -> None:
    found = draws("uniform:1:128")
    assert fmean(found) == pytest.approx(64.5, rel=0.02)
    assert pstdev(found) / fmean(found) == pytest.approx(0.57, abs=0.01)
    assert set(found) == set(range(1, 129))


def test_exponential_lengths_have_the_moments_of_a_cut_exponential() -> None:
    """For X exponential of mean m cut to c: E = m(1 − e^−r) and E[X²] = 2m²(1 − e^−r(1 + r)), with r = c/m."""
    mean, cap = 128, 512
    left = math.exp(-cap / mean)
    first, second = mean * (1 - left), 2 * mean**2 * (1 - left * (1 + cap / mean))
    found = draws(f"exponential:{mean}:{cap}")
    assert fmean(found) == pytest.approx(first, rel=0.02)
    assert pstdev(found) == pytest.approx(math.sqrt(second - first**2), rel=0.02)
    assert found.count(cap) / len(found) == pytest.approx(left, rel=0.15)


def test_log_normal_lengths_have_their_median_and_sigma() -> None:
    found = draws("lognormal:128:1.0:2048")
    assert median(found) == pytest.approx(128, rel=0.03)
    below, above = (quantiles(found, n=1000)[share - 1] for share in (159, 841))  # one deviation either way
    assert math.log(above / below) == pytest.approx(2, rel=0.03)
    assert max(found) == 2048


@pytest.mark.parametrize(("kind", "table"), [("azure-prompt", AZURE_PROMPT),
                                             ("azure-output", AZURE_OUTPUT)])
def test_azure_lengths_have_the_quantiles_of_the_trace(kind: str, table: tuple[int, ...]) -> None:
    found = sorted(draws(f"{kind}:1.0", 50_000))
    ranks = zip(QUANTILES, table, strict=True)
    for share, value in ranks:
        # Allow the rank to be off by what so many draws leave to chance: five deviations of a binomial.
        chance = 5 * math.sqrt(share * (1 - share) / len(found)) + 1e-3
        low = found[max(0, math.floor((share - chance) * len(found)))]
        high = found[min(len(found) - 1, math.ceil((share + chance) * len(found)))]
        assert low * 0.99 <= value <= high * 1.01, (share, value)


def test_a_scale_keeps_the_shape() -> None:
    whole, eighth = draws("azure-output:1.0", 500), draws("azure-output:0.125", 500)
    assert all(small == pytest.approx(large / 8, abs=1.0) for small, large in zip(eighth, whole, strict=True))


@pytest.mark.parametrize("table", [AZURE_PROMPT, AZURE_OUTPUT])
def test_quantiles_pass_through_their_table(table: tuple[int, ...]) -> None:
    assert [quantile(table, share) for share in QUANTILES] == pytest.approx(table)
    with pytest.raises(ValueError, match="between 0 and 1"):
        quantile(table, 1.5)
