"""The table of transformers' causal models is that of the code, and each class that is served is compared in tests."""

from __future__ import annotations

import json

import pytest
from docs.generate import architectures
from support import checkpoints

from slotwise.compute.model.family_table import FAMILIES
from slotwise.compute.model.unserved_families import GROUPS, UNSERVED

ELSEWHERE = {  # their text parts: tests/compute/model/test_text_parts.py and test_decoder.py
    "Gemma3ForConditionalGeneration", "Qwen3_5ForConditionalGeneration", "Qwen3_5MoeForConditionalGeneration",
    "Mistral3ForConditionalGeneration", "Qwen2VLForConditionalGeneration", "Qwen2_5_VLForConditionalGeneration",
    "Qwen3VLForConditionalGeneration", "Qwen3VLMoeForConditionalGeneration", "Gemma3nForConditionalGeneration",
    "Gemma4ForConditionalGeneration", "Gemma4UnifiedForConditionalGeneration",
    "GotOcr2ForConditionalGeneration", "Llama4ForConditionalGeneration"}


@pytest.mark.slow
def test_the_table_is_up_to_date() -> None:
    """Renew it by `python -m docs.generate.architectures` and `python -m docs.generate`."""
    assert json.loads(architectures.FILE.read_text()) == architectures.survey()


def test_logits_of_every_class_that_is_served_are_compared() -> None:
    compared = {checkpoints.class_name(family) for family in checkpoints.EVERY}
    assert set(FAMILIES) == compared | ELSEWHERE


def test_some_are_served_and_the_others_refused_with_what_is_in_the_way() -> None:
    rows = {row["class"]: row["message"] for row in json.loads(architectures.FILE.read_text())["rows"]
            if row["class"] != "LlamaForCausalLM"}
    assert rows["Qwen3MoeForCausalLM"] == architectures.SERVED
    assert rows["RwkvForCausalLM"] == (
        "architecture RwkvForCausalLM is not supported: RWKV's recurrence (WKV), which is not built")
    assert {name for name, message in rows.items() if message == architectures.SERVED} <= set(FAMILIES)


def test_each_class_is_served_or_refused_by_the_part_that_it_lacks() -> None:
    """A class of a new release of transformers fails here, until it stands in one of the two tables."""
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    assert not set(FAMILIES) & set(UNSERVED)
    assert sum(map(len, GROUPS.values())) == len(UNSERVED), "a class stands in two groups"
    assert set(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.values()) - set(FAMILIES) == set(UNSERVED)
