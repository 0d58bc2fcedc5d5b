"""Adapters of requests: the tokens of merged weights, and never more adapters in a step than allowed."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from support import checkpoints
from support import lora_adapters as lora

from slotwise import LLM, AsyncLLM, LoRARequest, SamplingParams
from slotwise.core.reasons import NO_ADAPTER_SLOT
from slotwise.core.record import StepRecord
from slotwise.engine.config import ConfigError
from slotwise.errors import CheckpointError
from slotwise.measure.simulate.replay import replay
from slotwise.observe.event_log import RequestEntry
from slotwise.observe.log_file import read_file

pytestmark = pytest.mark.slow

LENGTHS = [3, 40, 17, 70, 9, 33]
TOKENS = 12
GREEDY = SamplingParams(temperature=0, max_tokens=TOKENS, ignore_eos=True)


def make_llm(folder: Path, **arguments: Any) -> LLM:
    return LLM(str(folder), dtype="float32", max_model_len=128, **({
        "enable_lora": True, "max_num_seqs": 8, "kv_cache_memory": 8 << 20, "max_loras": 4} | arguments))


def run(llm: LLM, prompts: list[list[int]], adapters: Any) -> list[list[int]]:
    given = [{"prompt_token_ids": prompt} for prompt in prompts]
    return [list(output.outputs[0].token_ids)
            for output in llm.generate(given, GREEDY, use_tqdm=False, lora_request=adapters)]


class Case:
    """A checkpoint, three adapters of it, and what transformers makes of each when it is merged, the base first."""

    def __init__(self, family: str, folder: Path, variants: list[dict[str, Any]]) -> None:
        self.base = checkpoints.make(family, folder / "base", tokenizer=True)
        self.prompts = checkpoints.prompts(LENGTHS)
        self.requests: list[LoRARequest | None] = [None]
        self.expected = [checkpoints.greedy(self.base, self.prompts, TOKENS)]
        for number, variant in enumerate(variants, 1):
            path = lora.write(folder / f"adapter{number}", self.base, seed=number, **variant)
            whole = lora.merged(folder / f"merged{number}", self.base, path)
            self.expected.append(checkpoints.greedy(whole, self.prompts, TOKENS))
            self.requests.append(LoRARequest(f"adapter{number}", number, str(path)))

    def mixed(self) -> tuple[list[LoRARequest | None], list[list[int]]]:
        """Prompts with the base and the adapters in turn."""
        which = [i % len(self.requests) for i in range(len(self.prompts))]
        return [self.requests[each] for each in which], [self.expected[each][i] for i, each in enumerate(which)]


VARIANTS: dict[str, list[dict[str, Any]]] = {
    "nemotron_h": [{"targets": ("in_proj", "out_proj", "o_proj", "up_proj")}, {"rank": 7, "targets": ("in_proj",)},
                   {"targets": ("out_proj", "down_proj"), "use_rslora": True}],
    "qwen2": [{}, {"biases": True, "rank": 7}, {"targets": ("v_proj", "down_proj"), "use_rslora": True}],
    "phi3": [{}, {"rank": 16, "targets": ("qkv_proj", "gate_up_proj")}],
    "glm": [{"alpha_pattern": {"gate_up_proj": 3.0}}, {"targets": ("q_proj", "k_proj")}],
}


@pytest.fixture(scope="module", params=list(VARIANTS))
def case(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Case:
    return Case(request.param, tmp_path_factory.mktemp(request.param), VARIANTS[request.param])


def test_the_tokens_are_those_of_merged_weights_alone_and_in_company(case):
    llm = make_llm(case.base)
    assert len({str(tokens) for tokens in case.expected}) == len(case.expected)
    requests, expected = case.mixed()
    assert run(llm, case.prompts, requests) == expected
    for request, tokens in zip(case.requests, case.expected, strict=True):
        assert run(llm, case.prompts[1:2], request) == tokens[1:2]
    for request, tokens in zip(case.requests, case.expected, strict=True):  # prefixes are cached by now
        assert run(llm, case.prompts, request) == tokens


@pytest.mark.parametrize("arguments", [
    {"max_num_batched_tokens": 16}, {"kv_cache_memory": 1 << 20, "block_size": 16}, {"device": "reference"},
    {"max_loras": 1}, {"max_loras": 1, "scheduling_policy": "priority"}, {"max_loras": 1, "batching": "static"},
    {"speculative_config": {"method": "suffix"}}, {"enable_prefix_caching": False}])
@pytest.mark.parametrize("case", ["qwen2"], indirect=True)
def test_however_steps_are_formed(case, arguments):
    llm = make_llm(case.base, **arguments)
    requests, expected = case.mixed()
    assert run(llm, case.prompts, requests) == expected


@pytest.fixture(scope="module")
def llm(plain: Path) -> LLM:
    return make_llm(plain)


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return checkpoints.make("llama2", tmp_path_factory.mktemp("plain") / "base", tokenizer=True)


def test_vectors_are_those_of_merged_weights(plain, tmp_path):
    path = lora.write(tmp_path / "a", plain, seed=1)
    prompts = [{"prompt_token_ids": prompt} for prompt in checkpoints.prompts([9, 30])]
    whole = make_llm(lora.merged(tmp_path / "merged", plain, path), enable_lora=False)
    requests = [None, LoRARequest("a", 1, str(path))]
    found = make_llm(plain).embed(prompts, use_tqdm=False, lora_request=requests)
    for each, llm in zip(range(2), (make_llm(plain, enable_lora=False), whole), strict=True):
        expected = llm.embed(prompts, use_tqdm=False)[each].outputs.embedding
        assert found[each].outputs.embedding == pytest.approx(expected, abs=1e-5)


def test_adapters_in_use_stay_and_idle_ones_make_room(plain, tmp_path):
    paths = [lora.write(tmp_path / str(number), plain, seed=number) for number in range(3)]
    requests = [LoRARequest(str(number), number + 1, str(path)) for number, path in enumerate(paths)]
    prompt = checkpoints.prompts([10])
    llm = make_llm(plain, max_loras=1, max_cpu_loras=2)
    first = [run(llm, prompt, request) for request in requests]
    assert [run(llm, prompt, request) for request in requests] == first
    assert len({str(tokens) for tokens in first}) == 3
    with pytest.raises(ValueError, match="one adapter more than max_cpu_loras 2"):
        run(llm, prompt * 3, requests)
    assert run(llm, prompt, requests[2]) == first[2]


def test_what_a_request_may_say(plain, tmp_path):
    path = lora.write(tmp_path / "a", plain, seed=1)
    with pytest.raises(ValueError, match="enable_lora=True"):
        run(make_llm(plain, enable_lora=False), [[5]], LoRARequest("a", 1, str(path)))
    llm = make_llm(plain)
    with pytest.raises(ValueError, match="lora_request must be"):
        run(llm, [[5]], object())
    run(llm, [[5]], LoRARequest("a", 1, str(path)))
    with pytest.raises(ValueError, match="lora_int_id 1 is that of 'a'"):
        run(llm, [[5]], LoRARequest("b", 1, str(path)))
    with pytest.raises(ValueError, match="lora_int_id must be"):
        LoRARequest("a", 0, str(path))


@pytest.mark.parametrize("beginning", ["model.language_model.", "language_model.model.", ""])
def test_an_adapter_may_name_modules_as_its_base_was_loaded(beginning, plain, tmp_path):
    """As a part of a model for images and text, or without a head."""
    path = lora.write(tmp_path / "a", plain, seed=1, alpha_pattern={"model.layers.1.mlp.up_proj": 9.0})
    expected = run(make_llm(plain), [[5, 6, 7]], LoRARequest("a", 1, str(path)))
    tensors = load_file(path / "adapter_model.safetensors")
    save_file({name.replace("base_model.model.model.", f"base_model.model.{beginning}"): value
               for name, value in tensors.items()}, path / "adapter_model.safetensors")
    config = path / "adapter_config.json"
    config.write_text(config.read_text().replace("model.layers.1", f"{beginning}layers.1"))
    assert run(make_llm(plain), [[5, 6, 7]], LoRARequest("a", 1, str(path))) == expected


def test_what_initialized_an_adapter_changes_nothing(plain, tmp_path):
    plainly = lora.write(tmp_path / "a", plain, seed=1)
    by_eva = lora.write(tmp_path / "b", plain, seed=1, init_lora_weights="eva", eva_config={
        "rho": 2.0, "tau": 0.99, "use_label_mask": True, "adjust_scaling_factors": True})
    llm = make_llm(plain)
    assert run(llm, [[5]], LoRARequest("b", 2, str(by_eva))) == run(llm, [[5]], LoRARequest("a", 1, str(plainly)))


@pytest.mark.parametrize(("config", "message"), [
    ({"use_dora": True}, "use_dora"), ({"peft_type": "IA3"}, "peft_type"),
    ({"modules_to_save": ["lm_head"]}, "modules_to_save"), ({"bias": "some"}, "bias"),
    ({"init_lora_weights": "pissa"}, "init_lora_weights"), ({"lora_alpha": -1}, "lora_alpha"),
    ({"layer_replication": [[0, 1]]}, "layer_replication"),
    ({"alpha_pattern": {"(a+)+": 1.0}}, "alpha_pattern"), ({"something_new": 3}, "something_new")])
def test_a_config_that_is_not_computed_is_refused_by_name(plain, llm, tmp_path, config, message):
    path = lora.write(tmp_path / "a", plain, seed=1, **config)
    with pytest.raises(CheckpointError, match=message) as error:
        run(llm, [[5]], LoRARequest("a", 1, str(path)))
    assert "\n" not in str(error.value)


def _edited(tensors: dict[str, torch.Tensor], edit: str) -> dict[str, torch.Tensor]:
    name = next(name for name in tensors if name.endswith("lora_A.weight"))
    if edit == "rank":
        return {key: torch.ones(17, 96) if key == name else value for key, value in tensors.items()}
    if edit == "shape":
        return tensors | {name: torch.ones(4, 95)}
    if edit == "nan":
        return tensors | {name: tensors[name] * float("nan")}
    if edit == "half":
        return {key: value for key, value in tensors.items() if key != name}
    if edit == "whole numbers":
        return tensors | {name: torch.ones(4, 96, dtype=torch.int32)}
    return tensors | {edit: torch.ones(4, 96)}


@pytest.mark.parametrize(("edit", "message"), [
    ("rank", "rank 17 .* max_lora_rank 16"), ("shape", r"\[4, 95\]; this model needs \[4, 160\]"),
    ("nan", "not finite"), ("half", "one factor of"), ("whole numbers", "I32"),
    ("base_model.model.lm_head.lora_A.weight", "lm_head"), ("model.embed_tokens.lora_embedding_A", "embed_tokens"),
    ("base_model.model.model.layers.99.mlp.up_proj.lora_A.weight", "layers.99"),
    ("base_model.model.model.layers.0.mlp.up_proj.bias", "tensor of|has a bias of")])
def test_a_file_that_does_not_fit_is_refused_by_name(plain, llm, tmp_path, edit, message):
    path = lora.write(tmp_path / "a", plain, seed=1)
    save_file(_edited(load_file(path / "adapter_model.safetensors"), edit), path / "adapter_model.safetensors")
    before = run(llm, [[5]], None)
    with pytest.raises(CheckpointError, match=message):
        run(llm, [[5]], LoRARequest("a", 1, str(path)))
    assert run(llm, [[5]], None) == before


def test_damaged_and_pickled_files_are_refused(plain, llm, tmp_path):
    path = lora.write(tmp_path / "a", plain, seed=1)
    file = path / "adapter_model.safetensors"
    file.write_bytes(file.read_bytes()[:-7])
    with pytest.raises(CheckpointError, match="damaged or incomplete"):
        run(llm, [[5]], LoRARequest("a", 1, str(path)))
    file.rename(path / "adapter_model.bin")
    with pytest.raises(CheckpointError, match="safetensors only"):
        run(llm, [[5]], LoRARequest("a", 1, str(path)))
    (path / "adapter_config.json").write_text(json.dumps([1]))
    with pytest.raises(CheckpointError, match="JSON object"):
        run(llm, [[5]], LoRARequest("a", 1, str(path)))


def test_settings(plain):
    with pytest.raises(ConfigError, match="max_cpu_loras 2 must be at least max_loras 3"):
        make_llm(plain, max_loras=3, max_cpu_loras=2)


def test_a_log_has_the_adapters_of_requests_and_can_be_replayed(plain, tmp_path):
    path = lora.write(tmp_path / "a", plain, seed=1)
    llm = make_llm(plain, event_log=str(tmp_path / "log.jsonl"), max_loras=1)
    other = LoRARequest("b", 2, str(lora.write(tmp_path / "b", plain, seed=2)))
    run(llm, checkpoints.prompts([9, 20, 9]), [None, LoRARequest("a", 1, str(path)), other])
    del llm
    entries = list(read_file(tmp_path / "log.jsonl"))
    requests = [entry for entry in entries if isinstance(entry, RequestEntry)]
    assert [(entry.spec.adapter, entry.spec.adapter_name) for entry in requests] == [(0, ""), (1, "a"), (2, "b")]
    assert any(NO_ADAPTER_SLOT in step.plan.refused[0] for step in entries if isinstance(step, StepRecord)
               and step.plan.refused)
    outcome = replay(iter(entries))
    assert outcome.difference is None and outcome.requests == 3


def test_an_engine_in_a_process_of_its_own(plain, tmp_path):
    """AsyncLLM loads adapters beside the steps of other requests, and forgets idle ones."""
    paths = [lora.write(tmp_path / str(number), plain, seed=number) for number in range(3)]
    requests = [LoRARequest(str(number), number + 1, str(path)) for number, path in enumerate(paths)]
    prompt = checkpoints.prompts([10])[0]
    expected = [run(make_llm(plain), [prompt], request)[0] for request in [None, *requests]]
    engine = AsyncLLM(str(plain), dtype="float32", max_model_len=128, max_num_seqs=8, kv_cache_memory=8 << 20,
                      enable_lora=True, max_loras=2, max_cpu_loras=2)

    async def one(name: str, request: LoRARequest | None) -> list[int]:
        found = [output async for output in engine.generate(
            {"prompt_token_ids": prompt}, GREEDY, name, lora_request=request)]
        return list(found[-1].outputs[0].token_ids)

    async def play() -> None:
        together = await asyncio.gather(*(one(f"t{i}", each) for i, each in enumerate([None, *requests[:2]])))
        assert together == expected[:3]
        assert await one("third", requests[2]) == expected[3]
        assert await one("again", requests[0]) == expected[1]
        with pytest.raises(ValueError, match="no adapter_config"):
            await one("none", LoRARequest("none", 9, str(tmp_path)))

    try:
        asyncio.run(play())
    finally:
        engine.shutdown()
