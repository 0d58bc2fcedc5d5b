"""The load of experts: the fold over records, and the exact counts of a real model's steps."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support import checkpoints

from slotwise import LLM, SamplingParams
from slotwise.observe.metrics import EXPERT_COUNTS, ExpertLoad

TABLES = st.lists(st.lists(st.lists(st.integers(0, 9), min_size=3, max_size=3), min_size=2, max_size=2), max_size=9)


@given(TABLES, st.integers(1, 40))
def test_totals_and_the_latest_counts(tables: list[list[list[int]]], repeats: int) -> None:
    load, told = ExpertLoad((1, 3)), tables * repeats
    for counts in told:
        load.add(counts)
    for place, layer in enumerate((1, 3)):
        whole = [sum(counts[place][expert] for counts in told) for expert in range(3)]
        lately = [sum(counts[place][expert] for counts in told[-EXPERT_COUNTS:]) for expert in range(3)]
        assert load.tokens[str(layer)] == sum(whole)
        if told:
            assert load.table()[place] == {
                "layer": layer, "tokens": whole, "tokens_lately": lately,
                "imbalance_lately": load.imbalance[str(layer)]}
            assert load.idle[str(layer)] == lately.count(0)
        assert load.imbalance[str(layer)] == pytest.approx(max(lately) / (sum(lately) / 3) if sum(lately) else 0)


def test_all_alike_is_one_and_one_expert_alone_is_their_number() -> None:
    load = ExpertLoad((0, 1))
    load.add(((5, 5, 5, 5), (0, 7, 0, 0)))
    assert load.imbalance == {"0": 1.0, "1": 4.0} and load.idle == {"0": 0, "1": 3}


@pytest.fixture(scope="module")
def mixture(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return checkpoints.make("qwen2_moe", tmp_path_factory.mktemp("mixture"), tokenizer=True)


@pytest.mark.parametrize("device", ["cpu", "reference"])
def test_every_token_that_a_step_routes_is_counted(mixture: Path, device: str) -> None:
    """Layer 1 of the three has no experts; the last layer's MLP computes the rows that sample alone."""
    llm = LLM(mixture, device=device, dtype="float32", max_num_seqs=4, kv_cache_memory_bytes=8 << 20,
              disable_log_stats=False)
    prompts, outputs, top_k = ([5, 6, 7, 8, 9], [11, 12, 13]), 6, 3
    params = SamplingParams(temperature=0, max_tokens=outputs, ignore_eos=True)
    for times in (1, 2):
        llm.generate([{"prompt_token_ids": prompt} for prompt in prompts], params, use_tqdm=False)
        told = {(metric.name, metric.labels["layer"]): metric.value for metric in llm.get_metrics()
                if "layer" in metric.labels}
        decoded = len(prompts) * (outputs - 1)
        assert told["slotwise:expert_tokens", "0"] == times * top_k * (sum(map(len, prompts)) + decoded)
        assert told["slotwise:expert_tokens", "2"] == times * top_k * (len(prompts) + decoded)
        assert told["slotwise:expert_imbalance", "0"] >= 1 and 0 <= told["slotwise:idle_experts", "0"] < 6
        assert ("slotwise:expert_tokens", "1") not in told
