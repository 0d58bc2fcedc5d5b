"""The budget of reasoning on both samplers, against a reference that reads the whole output before each token."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from slotwise.compute.kernels.reference import draw
from slotwise.compute.runner.input_batch import SlotTable
from slotwise.compute.runner.sampling.cpu_sampler import Sampler
from slotwise.compute.runner.sampling.gpu_sampler import DeviceSampler
from slotwise.compute.runner.sampling.logit_edits import CERTAIN, LogitEdits, ReasoningState, end_reasoning
from slotwise.compute.runner.sampling.sampler import RequestParams
from slotwise.core.params import InvalidParams, SamplingSpec, ThinkingBudget
from slotwise.core.record import NewRequest, StepPlan
from slotwise.core.request import RequestSpec

CPU = torch.device("cpu")
BEGIN, END, VOCAB, TOKENS = 0, 1, 5, 64
budgets = st.builds(ThinkingBudget, st.integers(0, 4), st.just(END), st.sampled_from([None, BEGIN]))
outputs_of = st.lists(st.integers(0, VOCAB - 1), max_size=12)


def must_end(budget: ThinkingBudget, outputs: list[int]) -> bool:
    """Whether the reasoning is open and has used up its budget."""
    if END in outputs:
        return False
    if budget.begin_id is None:
        return len(outputs) >= budget.num_tokens
    return BEGIN in outputs and len(outputs) - outputs.index(BEGIN) - 1 >= budget.num_tokens


@settings(deadline=None, max_examples=300, derandomize=True)
@given(budgets, outputs_of, outputs_of, st.integers(0, 12))
def test_the_end_is_certain_where_the_budget_is_used_up(budget, first, then, kept):
    """Outputs up to `kept` stay known when a step is run again; others follow them."""
    reasoning = ReasoningState(budget, first[:3])  # known when it joins, as after a preemption
    for token in first[3:]:
        reasoning.record(token)
    outputs = first[:kept]
    reasoning.forget_after(len(outputs))
    for token in [*then, 2]:
        on_host, on_device = np.zeros(VOCAB, np.float32), torch.zeros(VOCAB)
        reasoning.apply(on_host)
        end_reasoning(on_device, torch.tensor(outputs, dtype=torch.int64), budget)
        expected = [0.0] * VOCAB
        if must_end(budget, outputs):
            expected[END] = CERTAIN
        assert on_host.tolist() == on_device.tolist() == expected
        reasoning.record(token)
        outputs.append(token)


@settings(deadline=None, max_examples=60, derandomize=True)
@given(budgets, st.integers(0, 1000), st.sampled_from([0.0, 0.01, 1.0, 100.0]), st.booleans())
def test_no_output_reasons_beyond_its_budget(budget, seed, temperature, is_edited):
    """The same tokens on both samplers, whatever else edits the logits."""
    more = {"repetition_penalty": 1.5, "logit_bias": {END: -100.0}, "bad_words_token_ids": ((2, END),),
            "min_tokens": 30} if is_edited else {}
    params = SamplingSpec(temperature=temperature, max_tokens=40, logprobs=VOCAB, thinking=budget, **more)
    table = SlotTable(1, TOKENS, 4, 99)
    device, host = DeviceSampler(table, VOCAB, draw, CPU), Sampler(1, VOCAB)
    join = NewRequest("r", 0, RequestSpec((3, 3), params, seed), (END,))
    table.apply(StepPlan(0, 0.0, (), (join,), *[()] * 13, None))
    device.join(join)
    host.join(join)
    assert device.draws_in_order(0) and host.draws_in_order(0)
    generator, outputs = torch.Generator().manual_seed(seed), []
    for step in range(24):
        logits = torch.randn(1, VOCAB, generator=generator) * 3
        if step % 5 == 4:
            host.sample(logits, [0], [2 + step])  # a step that fails, and is run again
        expected, drawn = host.sample(logits, [0], [2 + step]), device.sample(logits, [0], [2 + step])
        table.append(torch.tensor([2 + step]), drawn.column)
        assert drawn.read().tokens == expected.tokens and not expected.failed
        if must_end(budget, outputs):
            assert expected.tokens == [END] and expected.logprobs[0].logprob == 0
        outputs += expected.tokens
    begin = 0 if budget.begin_id is None else outputs.index(BEGIN) + 1 if BEGIN in outputs else 24
    if END in outputs or begin + budget.num_tokens < 24:
        assert outputs.index(END) <= begin + budget.num_tokens


def test_a_token_that_is_not_allowed_cannot_end_reasoning():
    for more in ({"allowed_token_ids": (3, 4)}, {"bad_words_token_ids": ((END,),)}):
        with pytest.raises(InvalidParams, match="thinking_token_budget"):
            SamplingSpec(thinking=ThinkingBudget(3, END), **more)
    SamplingSpec(thinking=ThinkingBudget(3, END), allowed_token_ids=(3, END))
    with pytest.raises(InvalidParams, match="thinking_token_budget"):
        SamplingSpec(thinking=ThinkingBudget(-1, END))
    with pytest.raises(InvalidParams, match="thinking_token_budget"):
        SamplingSpec(thinking=ThinkingBudget(3, 300)).check_vocabulary(300)


def test_outputs_that_are_not_known_are_an_error():
    params = SamplingSpec(thinking=ThinkingBudget(3, END))
    edits = LogitEdits(RequestParams.of(NewRequest("r", 0, RequestSpec((3,), params, 1), ()), VOCAB), (3,), VOCAB)
    with pytest.raises(ValueError, match="0 are known"):
        edits.apply(np.zeros(VOCAB, np.float32), 1)
