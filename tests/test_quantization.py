"""Quantized weights through a whole model: options, what is told of them, and one answer whatever the company."""

from __future__ import annotations

import pytest
from support import quantized_checkpoints as quantized
from support.checkpoints import make, prompts
from support.live import cli

from slotwise import LLM, SamplingParams
from slotwise.engine.config import ConfigError, EngineConfig

GREEDY = SamplingParams(temperature=0.0, max_tokens=24, ignore_eos=True)
SMALL = {"max_num_seqs": 8, "max_model_len": 256, "max_num_batched_tokens": 64}


@pytest.mark.parametrize("quantization", ["int8", "int4"])
def test_greedy_outputs_are_the_same_alone_and_in_company(quantization):
    llm = LLM(quantization=quantization, **SMALL)
    asked = [{"prompt_token_ids": ids} for ids in prompts([5, 90, 33, 64, 17, 70])]
    together = llm.generate(asked, GREEDY, use_tqdm=False)
    for prompt, crowd in zip(asked, together, strict=True):
        [alone] = llm.generate([prompt], GREEDY, use_tqdm=False)
        assert alone.outputs[0].token_ids == crowd.outputs[0].token_ids


def test_what_was_chosen_is_told_and_takes_less():
    engines = {name: LLM(quantization=name, **SMALL).info for name in ("none", "int8", "int4")}
    sizes = [info.memory.weights for info in engines.values()]
    assert sizes == sorted(sizes, reverse=True) and len(set(sizes)) == 3
    assert [info.weights for info in engines.values()] == ["bfloat16", "int8, bfloat16", "int4, bfloat16"]


def test_a_signature_is_completed_with_int8_weights():
    [output] = LLM(quantization="int8", **SMALL).generate(
        ["def __init__(self, name):"], SamplingParams(temperature=0.0, max_tokens=12), use_tqdm=False)
    assert "self.name = name" in output.outputs[0].text


@pytest.mark.parametrize("settings", [
    {"quantization": "int3"}, {"quantization": "int8", "device": "reference"}])
def test_what_cannot_be_is_refused(settings):
    with pytest.raises(ConfigError, match="quantization"):
        EngineConfig(model="anywhere", **settings)


def test_a_bad_option_is_one_line():
    run = cli("generate", "--quantization", "int8", "--device", "reference", "def f(x):")
    assert run.returncode == 1
    assert run.stderr == "slotwise generate: --quantization int8 needs device cpu: the reference computes exactly\n"


def test_a_quantized_checkpoint_is_served_as_it_is_stored(tmp_path):
    dense = make("llama3", tmp_path / "dense", tokenizer=True, dtype="bfloat16", **quantized.SIZES)
    quantized.quantize(dense, tmp_path / "awq", quantized.KINDS["awq"]())
    with pytest.raises(ConfigError, match=r"those of .*awq are quantized already \(AWQ, 4 bits\)"):
        LLM(model=str(tmp_path / "awq"), quantization="int8", **SMALL)
    served = LLM(model=str(tmp_path / "awq"), **SMALL)
    asked = [{"prompt_token_ids": ids} for ids in prompts([5, 90, 33])]
    together = served.generate(asked, GREEDY, use_tqdm=False)
    for prompt, crowd in zip(asked, together, strict=True):
        [alone] = served.generate([prompt], GREEDY, use_tqdm=False)
        assert alone.outputs[0].token_ids == crowd.outputs[0].token_ids
    assert served.info.weights == "AWQ, 4 bits, bfloat16"
    assert served.info.memory.weights < LLM(model=str(dense), **SMALL).info.memory.weights
