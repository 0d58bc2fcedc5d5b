"""Ranks give the tokens of one process in every family: ragged, chunked, preempted, with drafts, adapters and experts.

The ranks are threads (`rank_threads.py`); `test_ranks.py` has them as processes.
"""

from __future__ import annotations

import dataclasses
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from support import lora_adapters as lora
from support import quantized_checkpoints as quantized
from support.checkpoints import ARE_ALL_ASKED, DIFFERENT_CACHES, FAMILIES, RECURRENT, SIZES, make, prompts
from support.drafted import Played, play, slow_steps
from support.paged import distance
from support.ragged import Driver
from support.rank_threads import Paired, ranks_on_threads

from slotwise.compose.engine_builder import build_engine
from slotwise.compute.kernels.cpu.kernels import CpuKernels
from slotwise.compute.kernels.group import SINGLE_RANK
from slotwise.compute.kernels.interface import AttentionShape, Kernels, LatentShape
from slotwise.compute.kernels.reference import ReferenceKernels
from slotwise.compute.model.loading import load_model, read_config
from slotwise.core.params import REGEX, Grammar, SamplingSpec
from slotwise.core.request import RequestSpec
from slotwise.core.speculation.proposer import proposer_of
from slotwise.engine.config import ConfigError, EngineConfig
from slotwise.engine.engine import Engine
from slotwise.engine.messages import Add
from slotwise.errors import CheckpointError

pytestmark = pytest.mark.slow

# What no ranks divide for another reason.
WHOLE = [("gemma3n", "tp"), ("gemma3n", "pp"), ("gemma4", "pp"), ("bitnet", "tp"), ("diffllama", "tp"),
         ("jetmoe", "tp"), ("doge", "tp")]
DOUBLED = ("falcon_h1", "zamba", "zamba2")  # with layers that have two caches, which no stages divide
NEAR = {"roberta_prelayernorm": 2e-3}  # whose scores are so large that a softmax has one number, or nearly a tie
LAYOUTS = {"tp": (2, 1), "pp": (1, 2), "both": (2, 2)}  # ranks of a stage, stages
EVERY_LAYOUT = ("llama3", "gpt_oss")  # others divide the same layers
SHAPES = {"smollm2": {"num_attention_heads": 4}}  # three heads of queries with one of keys cannot be divided
LENGTHS = [5, 40, 17, 70, 1, 33, 61, 9]
SAMPLED = SamplingSpec(temperature=1.0, top_p=0.9, max_tokens=6, ignore_eos=True, logprobs=2, prompt_logprobs=1)
PENALISED = dataclasses.replace(SAMPLED, prompt_logprobs=None, presence_penalty=0.6, repetition_penalty=1.2)
WORDS = SamplingSpec(temperature=1.0, max_tokens=12, grammar=Grammar(REGEX, "[a-z]{3,12} [0-9]+"))
LAST = SIZES["num_hidden_layers"] - 1  # of the layers: with stages, of another rank than 0
LONG = SamplingSpec(temperature=0.0, max_tokens=18, ignore_eos=True)


@pytest.fixture(autouse=True)
def threads() -> Iterator[None]:
    with ranks_on_threads():
        yield


def engine_of(folder: Path, layout: tuple[int, int] = (1, 1), **settings: Any) -> Engine:
    width, stages = layout
    config = EngineConfig.of(**{
        "model": str(folder), "dtype": "float32", "max_model_len": 128, "max_num_seqs": 4, "block_size": 16,
        "max_num_batched_tokens": 24, "kv_cache_memory": memory(folder, width), "tensor_parallel_size": width,
        "pipeline_parallel_size": stages} | settings)
    engine = build_engine(config)[0]
    if config.speculative_config:
        engine._scheduler._drafting.proposer = proposer_of(config.speculative_config, slow_steps())
    return engine


def memory(folder: Path, width: int = 1) -> int:
    """Bytes of a cache in which four rows do not fit, but where windows leave blocks to the others."""
    config, block = read_config(folder), 0
    for shape in map(config.layer_shape, range(config.num_layers)):
        copies = width if isinstance(shape, LatentShape) else 1  # each rank has all latents, and some heads
        if isinstance(shape, AttentionShape):
            shape = replace(shape, num_kv_heads=max(width, shape.num_kv_heads))
        block += copies * CpuKernels().cache_bytes_per_block(16, shape, torch.float32)
    return (18 if any(config.windows) else 9) * block


def requests(guesses: dict[str, list[int]] | None = None, grammar: SamplingSpec | None = None) -> list[Add]:
    """Greedy ones with guesses of what they give, and some that sample: with penalties, log-probabilities, grammars."""
    kinds = {1: SAMPLED, 3: PENALISED} | ({} if grammar is None else {4: grammar, 6: grammar})
    return [Add(at,
                RequestSpec(prompt, kinds.get(at, LONG), at, prediction=tuple((guesses or {}).get(at, ()))))
            for at, prompt in enumerate(prompts(LENGTHS))]


def assert_same(several: Played, plain: Played, near: float = 1e-3) -> None:
    """Tokens and ends are, and log-probabilities as far as another order of sums leaves them alike."""
    found, expected = ({name: (one.tokens, one.reason, [entry.rank for entry in one.logprobs])
                        for name, one in played.outputs.items()} for played in (several, plain))
    assert found == expected
    for name, one in several.outputs.items():
        assert [entry.logprob for entry in one.logprobs] == pytest.approx(
            [entry.logprob for entry in plain.outputs[name].logprobs], abs=near)


def disturbed(played: Played) -> dict[str, list[int]]:
    """Guesses of the outputs, wrong at every fifth token."""
    return {name: [token if at % 5 else token ^ 1 for at, token in enumerate(one.tokens, 1)]
            for name, one in played.outputs.items()}


CUT_ALIKE = (
    "llama2", "smollm2", "mistral", "qwen2", "qwen3", "gemma3", "smollm3", "olmo3", "exaone4", "ernie4_5", "granite",
    "glm4", "ministral3", "hunyuan", "nanochat", "mixtral", "qwen3_moe", "glm4_moe", "granite_swa", "kolibri1",
    "deepseek_v2", "minicpm3", "falcon_rw", "gptj", "phi")
"""Families whose weights are cut as those of others: `make families` compares these, too."""


@pytest.mark.parametrize("family", [family for family in FAMILIES if family not in (*RECURRENT, "gemma3n") and (
    ARE_ALL_ASKED or family not in CUT_ALIKE)])
def test_every_family(family: str, tmp_path: Path) -> None:
    folder = make(family, tmp_path / "model", **SHAPES.get(family, {}))
    plain = play(engine_of(folder), requests())
    adds = requests(disturbed(plain))
    for layout in LAYOUTS.values() if family in EVERY_LAYOUT else [
        LAYOUTS["tp" if (family, "pp") in WHOLE else "pp" if (family, "tp") in WHOLE else "both"]]:
        several = play(engine_of(folder, layout, speculative_config={"method": "prediction"}), adds)
        assert_same(several, plain, NEAR.get(family, 1e-3))
        assert several.num_drafts > several.num_right > 0
        assert any(record.preempted for record in several.records) or any(read_config(folder).windows)
        assert any(len(set(record.plan.kinds)) == 2 for record in several.records), "beside prompts, in chunks"


@pytest.mark.parametrize(("family", "layout"), [
    ("qwen2_moe", "both"), ("gpt_oss", "both"), ("granite_moe", "tp")])
def test_ranks_that_hold_experts_whole(family: str, layout: str, tmp_path: Path) -> None:
    folder = make(family, tmp_path / "model")
    plain = play(engine_of(folder), requests())
    several = engine_of(folder, LAYOUTS[layout], enable_expert_parallel=True)
    assert_same(play(several, requests()), plain)


@pytest.mark.parametrize(("family", "layout", "biases"), [
    ("qwen2", "tp", True), ("phi3", "tp", False), ("llama_bias", "both", True)])
def test_adapters_with_drafts_and_grammars(family: str, layout: str, biases: bool, tmp_path: Path) -> None:
    folder = make(family, tmp_path / "model", tokenizer=True)
    adapters = [lora.write(tmp_path / "a", folder, seed=1, biases=biases), lora.write(
        tmp_path / "b", folder, seed=2, rank=7, targets=("v_proj", "qkv_proj", "o_proj", "down_proj"))]
    found: list[Played] = []
    for ranks in ((1, 1), LAYOUTS[layout]):
        guesses = disturbed(found[0]) if found else None
        adds = [with_adapter(add, at % 3) for at, add in enumerate(requests(guesses, WORDS))]
        engine = engine_of(folder, ranks, enable_lora=True, max_loras=2, max_cpu_loras=2, kv_cache_memory=8 << 20,
                           speculative_config={"method": "prediction"})
        assert engine.adapters is not None
        for number, adapter in enumerate(adapters, 1):
            engine.adapters.load(number, adapter)
        first = play(engine, adds)
        engine.unload_adapter(2)
        engine.adapters.load(3, adapters[1])
        again = play(engine, [with_adapter(adds[2], 3, 100)])
        found.append(Played(first.outputs | again.outputs, first.records))
    assert_same(found[1], found[0])
    assert found[1].num_drafts > found[1].num_right > 0
    tokens = [one.tokens for one in found[0].outputs.values()]
    assert len(set(tokens)) == len(tokens) - 1, "all differ, but for the one that comes twice"


def with_adapter(add: Add, adapter: int, request_id: int | None = None) -> Add:
    return Add(add.request_id if request_id is None else request_id,
               replace(add.spec, adapter=adapter))


@pytest.mark.parametrize("layout", ["tp", "both"])
def test_an_adapter_that_a_rank_cannot_load_is_loaded_by_none(layout: str, tmp_path: Path) -> None:
    folder = make("llama2", tmp_path / "model")
    good, bad = (lora.write(tmp_path / name, folder, seed=1) for name in ("good", "bad"))
    tensors = load_file(bad / "adapter_model.safetensors")
    tensors[f"base_model.model.model.layers.{LAST}.mlp.down_proj.lora_A.weight"][0, 0] = float("nan")
    save_file(tensors, bad / "adapter_model.safetensors")
    engine = engine_of(folder, LAYOUTS[layout], enable_lora=True, max_cpu_loras=1)
    assert engine.adapters is not None
    for number, (adapter, says) in enumerate([(bad, "not finite"), (tmp_path, "adapter_config.json")], 1):
        with pytest.raises(CheckpointError, match=says):
            engine.adapters.load(number, adapter)
    engine.adapters.load(3, good)
    adds = [with_adapter(add, 3) for add in requests()[:3]]
    assert all(one.reason == "length" for one in play(engine, adds).outputs.values())


@pytest.mark.parametrize("layout", ["tp", "both"])
def test_a_draft_model_on_rank_0(layout: str, tmp_path: Path) -> None:
    folder = make("llama3", tmp_path / "model", tokenizer=True)
    draft = {"method": "draft_model", "model": str(folder), "num_speculative_tokens": 3}
    plain = play(engine_of(folder), requests(grammar=WORDS))
    several = play(engine_of(
        folder, LAYOUTS[layout], speculative_config=draft, kv_cache_memory=2 * memory(folder)), requests(grammar=WORDS))
    assert_same(several, plain)
    assert several.num_right > 0.5 * several.num_drafts > 0, "it drafts for itself"
    assert any(record.result.proposing and record.result.proposing.passes > 1 for record in several.records)


@pytest.mark.parametrize("kind", ["gptq 4, act-order", "awq"])
def test_stages_of_a_quantized_checkpoint(kind: str, tmp_path: Path) -> None:
    dense = make("llama3", tmp_path / "dense", **quantized.SIZES)
    folder = tmp_path / "quantized"
    quantized.quantize(dense, folder, quantized.KINDS[kind]())
    assert_same(play(engine_of(folder, LAYOUTS["pp"]), requests()), play(engine_of(folder), requests()))
    if "act-order" in kind:
        with pytest.raises(CheckpointError, match=r"o_proj\.weight: a rank would have .* not neighbors"):
            engine_of(folder, LAYOUTS["tp"])


@pytest.mark.parametrize(("kind", "kernels", "close"), [
    *((kind, ReferenceKernels, 1e-4) for kind in (
        "gptq 4", "gptq 8", "gptq 8, rows", "awq", "W4A16, asymmetric", "FP8, blocks")),
    *((kind, lambda: CpuKernels(1), 0.05) for kind in ("gptq 8", "awq", "W8A16"))])
def test_shares_of_a_quantized_checkpoint(
    kind: str, kernels: Callable[[], Kernels], close: float, tmp_path: Path,
) -> None:
    """In plain torch, and where a rank rounds its own activations."""
    dense = make("llama3", tmp_path / "dense", head_dim=64, **quantized.SIZES)
    folder = tmp_path / "quantized"
    quantized.quantize(dense, folder, quantized.KINDS[kind]())
    given, barrier, rows = [None, None], threading.Barrier(2), list(enumerate(prompts([5, 40])))
    whole, *ranks = (load_model(folder, kernels=kernels(), dtype="float32", group=group)
                     for group in (SINGLE_RANK, Paired(0, given, barrier), Paired(1, given, barrier)))
    with ThreadPoolExecutor(2) as pool:
        logits, _ = pool.map(lambda decoder: Driver(decoder).step(rows), ranks)
    assert distance(logits, Driver(whole).step(rows)) < close
    assert sum(decoder.weight_bytes for decoder in ranks) < 1.1 * whole.weight_bytes


def test_a_share_that_divides_a_group_is_refused(tmp_path: Path) -> None:
    dense, folder = make("llama3", tmp_path / "dense", **quantized.SIZES), tmp_path / "quantized"
    quantized.quantize(dense, folder, quantized.KINDS["gptq 4"]())
    with pytest.raises(CheckpointError, match=r"o_proj\.weight: a rank would have inputs 0 to 64 of 128, in groups"):
        engine_of(folder, LAYOUTS["tp"])


@pytest.mark.parametrize(("family", "layout"), WHOLE)
def test_what_needs_all_of_a_layer_is_refused(
    family: str, layout: str, tmp_path: Path, record_property: Callable[[str, object], None],
) -> None:
    with pytest.raises(CheckpointError, match=r"serve this model with (tensor|pipeline)_parallel_size 1") as refusal:
        engine_of(make(family, tmp_path / "model"), LAYOUTS[layout])
    record_property("refused", str(refusal.value))


@pytest.mark.parametrize("family", [family for family in FAMILIES if family in RECURRENT and "zamba" not in family and (
    ARE_ALL_ASKED or family in DIFFERENT_CACHES)])
def test_states_with_drafts_and_in_stages(family: str, tmp_path: Path) -> None:
    folder = make(family, tmp_path / "model")
    plain = play(engine_of(folder, kv_cache_memory=300 << 10), requests())
    drafted = play(engine_of(folder, kv_cache_memory=300 << 10, speculative_config={"method": "prediction"}),
                   requests(disturbed(plain)))
    assert_same(drafted, plain)
    assert drafted.num_drafts > drafted.num_right > 0
    if family not in DOUBLED:
        assert_same(play(engine_of(folder, LAYOUTS["pp"], kv_cache_memory=300 << 10), requests()), plain)


@pytest.mark.parametrize(("family", "layout"), [
    *[(family, "tp") for family in FAMILIES if family in RECURRENT],
    *[(family, "pp") for family in FAMILIES if family in DOUBLED]])
def test_recurrent_states_are_refused(
    family: str, layout: str, tmp_path: Path, record_property: Callable[[str, object], None],
) -> None:
    with pytest.raises((CheckpointError, ConfigError), match=r"a recurrent state .*(is|are) not divided") as refusal:
        engine_of(make(family, tmp_path / "model"), LAYOUTS[layout])
    record_property("refused", str(refusal.value))


@pytest.mark.parametrize(("settings", "says"), [
    ({"tensor_parallel_size": 2}, "has none"), ({"pipeline_parallel_size": 2}, "give 2 or more")])
def test_experts_that_cannot_be_divided_are_refused(settings: dict[str, int], says: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=says):
        build_engine(EngineConfig.of(
            model=str(make("llama2", tmp_path / "model")), enable_expert_parallel=True, **settings))
