"""Decoders against transformers, family by family."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from contextlib import nullcontext
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from support.checkpoints import (
    ARE_ALL_ASKED,
    DIFFERENT_CACHES,
    FAMILIES,
    LLAMA3_ROPE,
    as_part,
    edit_config,
    greedy,
    make,
    one_thread,
    prompts,
    reference_model,
)
from support.ragged import Driver

from slotwise.compute.kernels.interface import Kernels
from slotwise.compute.kernels.reference import ReferenceKernels
from slotwise.compute.kernels.select import choose
from slotwise.compute.model.layers.rope import LinearRope, Rope
from slotwise.compute.model.loading import load_model, read_config

LENGTHS = [5, 70, 620]  # tokens; the last prompt reaches past every window and original context length
SINGLE = 4  # last tokens of each prompt, which come one at a time
CLOSE = 0.01  # standard deviations of the logits; rounding leaves a tenth of it
WHOLE = 10**6
EVERY_LAYER = ["llama3", "mistral", "gemma2", "gpt_oss", "qwen3_moe", "qwen3_next"]
"""Families that have windows, soft caps, sinks, experts and states: others are the same code."""

Checkpoints = Callable[[str], Path]  # by family
Logits = Callable[[str], list[torch.Tensor]]


@pytest.fixture(scope="module")
def expected(checkpoint: Checkpoints) -> Logits:
    """transformers' logits `[tokens, vocab]` of the prompts of LENGTHS."""

    @cache
    def of(family: str) -> list[torch.Tensor]:
        model = reference_model(checkpoint(family), "float32")
        with torch.inference_mode(), one_thread():
            return [model(torch.tensor([ids])).logits[0] for ids in prompts(LENGTHS)]

    return of


def distance(folder: Path, kernels: Kernels, expected: list[torch.Tensor], chunk: int = WHOLE) -> float:
    """How far logits are from those expected, in standard deviations of these.

    Of each prompt's tokens, first those that come in chunks, then those that come one at a time, nine in ten are at
    most as far: rounding may send a token to another expert.
    """
    driver, asked = Driver(load_model(folder, kernels=kernels, dtype="float32")), prompts(LENGTHS)
    parts = [[ids[at : min(at + chunk, len(ids) - SINGLE)] for at in range(0, len(ids) - SINGLE, chunk)]
             + [[token] for token in ids[-SINGLE:]] for ids in asked]
    found: list[list[torch.Tensor]] = [[] for _ in asked]
    while rows := [(row, left.pop(0)) for row, left in enumerate(parts) if left]:
        sizes = [len(tokens) for _, tokens in rows]
        for (row, _), logits in zip(rows, driver.step(rows, list(range(sum(sizes)))).split(sizes), strict=True):
            found[row].append(logits)
    off = [(torch.cat(ours) - theirs).abs().amax(1) / theirs.std(1)
           for ours, theirs in zip(found, expected, strict=True)]
    return max(part.quantile(0.9).item() for each in off for part in (each[:-SINGLE], each[-SINGLE:]))


@pytest.mark.slow
@pytest.mark.parametrize("family", FAMILIES if ARE_ALL_ASKED else [
    family for family in FAMILIES if family not in DIFFERENT_CACHES])
@pytest.mark.parametrize("kernels", ["reference"], indirect=True)
def test_logits_are_those_of_transformers(
        family: str, kernels: Kernels, checkpoint: Checkpoints, expected: Logits) -> None:
    """By the CPU's kernels tokens are compared in `test_parity.py`; of other families also those of a long context."""
    assert distance(checkpoint(family), kernels, expected(family)) < CLOSE


@pytest.mark.slow
@pytest.mark.parametrize("family", EVERY_LAYER)
def test_logits_in_chunks_and_in_company(
        family: str, kernels: Kernels, checkpoint: Checkpoints, expected: Logits) -> None:
    if type(kernels) is not ReferenceKernels:
        assert distance(checkpoint(family), kernels, expected(family)) < CLOSE
    assert distance(checkpoint(family), kernels, expected(family), 37) < CLOSE
    decoder = load_model(checkpoint(family), kernels=kernels, dtype="float32")
    asked = prompts([3, 40, 90, 17])
    together = Driver(decoder).greedy(asked, 12, 16)
    assert together == [Driver(decoder).greedy([ids], 12)[0] for ids in asked]


@pytest.mark.slow
class TestSensitivity:
    """The comparison above would notice a checkpoint that is disturbed in one place."""

    @pytest.fixture
    def disturbed(self, checkpoint: Checkpoints, tmp_path: Path) -> Checkpoints:
        return lambda family: Path(shutil.copytree(checkpoint(family), tmp_path / family))

    @pytest.mark.parametrize("family", ["mistral", "gemma2"])
    def test_rotary_base(self, family: str, disturbed: Checkpoints, expected: Logits) -> None:
        folder = disturbed(family)
        edit_config(folder, rope_parameters=_turned(_rope(folder)))
        assert_differs(folder, expected(family))

    @pytest.mark.parametrize(("field", "value"), [("original_max_position_embeddings", 512), ("factor", 9.0),
                                                  ("low_freq_factor", 1.2), ("high_freq_factor", 5.0)])
    def test_llama3_scaling(self, field: str, value: object, disturbed: Checkpoints, expected: Logits) -> None:
        folder = edit_config(disturbed("llama3"), rope_parameters=LLAMA3_ROPE | {field: value})
        assert_differs(folder, expected("llama3"))

    @pytest.mark.parametrize(("family", "fields"), [
        ("mistral", {"sliding_window": 49}), ("mistral", {"sliding_window": 47}),
        ("qwen2", {"layer_types": ["full_attention", "full_attention", "sliding_attention"]}),
        ("gemma2", {"layer_types": ["full_attention", "sliding_attention"] * 2}),
    ])
    def test_window(self, family: str, fields: dict[str, Any], disturbed: Checkpoints, expected: Logits) -> None:
        folder = edit_config(disturbed(family), **fields)
        assert_differs(folder, expected(family))

    @pytest.mark.parametrize("fields", [
        {"attn_logit_softcapping": 2.2}, {"attn_logit_softcapping": None}, {"query_pre_attn_scalar": 44}])
    def test_scores(self, fields: dict[str, Any], disturbed: Checkpoints, expected: Logits) -> None:
        assert_differs(edit_config(disturbed("gemma2"), **fields), expected("gemma2"))

    @pytest.mark.parametrize(("family", "name"), [
        *(("llama_bias", f"self_attn.{part}_proj.bias") for part in "qkvo"),
        *(("llama_bias", f"mlp.{part}_proj.bias") for part in ("gate", "up", "down")),
    ])
    def test_bias(self, family: str, name: str, disturbed: Checkpoints, expected: Logits) -> None:
        folder = edit_weight(disturbed(family), f"model.layers.1.{name}", torch.zeros_like)
        assert_differs(folder, expected(family))

    @pytest.mark.parametrize("name", ["q_norm", "k_norm"])
    def test_qk_norm(self, name: str, disturbed: Checkpoints, expected: Logits) -> None:
        folder = edit_weight(disturbed("qwen3"), f"model.layers.2.self_attn.{name}.weight", torch.ones_like)
        assert_differs(folder, expected("qwen3"))

    @pytest.mark.parametrize(("family", "names"), [
        ("llama2", ["norm", "layers.0.input_layernorm", "layers.2.post_attention_layernorm"]),
        ("gemma2", ["norm", "layers.0.input_layernorm", "layers.2.post_attention_layernorm",
                    "layers.1.pre_feedforward_layernorm", "layers.3.post_feedforward_layernorm"])])
    def test_norms(self, family: str, names: list[str], disturbed: Checkpoints, expected: Logits) -> None:
        for name in names:
            folder = edit_weight(disturbed(family), f"model.{name}.weight", torch.ones_like)
            assert_differs(folder, expected(family))
            shutil.rmtree(folder)


@pytest.mark.slow
@pytest.mark.parametrize("family", FAMILIES if ARE_ALL_ASKED else [
    *EVERY_LAYER, "mamba2", "deepseek_v2", "gemma4"])
def test_bfloat16_is_as_close_to_float32_as_that_of_transformers(family: str, tmp_path: Path) -> None:
    folder = make(family, tmp_path / family, dtype="bfloat16", initializer_range=0.1)
    [ids] = prompts([601], seed=3)
    exact = teacher_forced(reference_logits(folder, ids[:-1], "float32"), ids)
    theirs = teacher_forced(reference_logits(folder, ids[:-1], "bfloat16"), ids)
    assert exact.std() > 0.3  # nats: a model that predicts nothing would be easy to agree with

    chunks = [ids[start : start + 100] for start in range(0, 600, 100)]
    for name in ("reference", "cpu"):
        with one_thread() if name == "reference" else nullcontext():
            driver = Driver(load_model(folder, kernels=choose(name)))
            ours = teacher_forced(torch.cat([driver.step([(0, chunk)], list(range(100))) for chunk in chunks]), ids)
        assert driver.decoder.config.dtype == torch.bfloat16
        assert 0 < mean_difference(ours, exact) <= 1.5 * mean_difference(theirs, exact), name


@pytest.mark.parametrize("overrides", [
    {"rope_parameters": {"rope_type": "linear", "rope_theta": 5_000.0, "factor": 4.0}},
    {"rope_parameters": {"rope_type": "yarn", "rope_theta": 10_000.0, "factor": 4.0,
                         "original_max_position_embeddings": 256}},
    {"num_key_value_heads": 1, "num_attention_heads": 6, "head_dim": 16},
    {"attention_bias": True},
])
def test_further_llama_shapes(overrides: dict[str, Any], kernels: Kernels, tmp_path: Path) -> None:
    folder = make("llama2", tmp_path / "model", **overrides)
    [ids] = prompts([600])
    ours = logits(folder, ids, kernels)
    assert torch.allclose(ours, reference_logits(folder, ids, "float32")[-1], atol=1e-3, rtol=1e-4)


def test_qwen3_with_bias_and_windows(kernels: Kernels, tmp_path: Path) -> None:
    folder = make("qwen3", tmp_path / "model", attention_bias=True, use_sliding_window=True, sliding_window=20,
                  layer_types=["sliding_attention", "full_attention", "sliding_attention"])
    [ids] = prompts([300])
    ours = logits(folder, ids, kernels)
    assert torch.allclose(ours, reference_logits(folder, ids, "float32")[-1], atol=1e-3, rtol=1e-4)


@pytest.mark.parametrize("overrides", [
    {"tie_word_embeddings": True},  # the embedding is scaled, the head is not
    {"final_logit_softcapping": None, "attn_logit_softcapping": None, "attention_bias": True},
    {"final_logit_softcapping": 1.0, "hidden_size": 64, "head_dim": 48},
])
def test_further_gemma2_shapes(overrides: dict[str, Any], kernels: Kernels, tmp_path: Path) -> None:
    folder = make("gemma2", tmp_path / "model", **overrides)
    [ids] = prompts([300])
    ours = logits(folder, ids, kernels)
    assert torch.allclose(ours, reference_logits(folder, ids, "float32")[-1], atol=1e-3, rtol=1e-4)
    assert ours.abs().max() <= (overrides.get("final_logit_softcapping", 3.0) or 1e9)


@pytest.mark.parametrize(("family", "overrides"), [
    ("gemma3", {"final_logit_softcapping": 1.0, "attention_bias": True, "tie_word_embeddings": True}),
    ("phi3", {"head_dim": 32, "sliding_window": None,
              "rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 1.0}}),
    ("granite", {"logits_scaling": 6.0, "attention_bias": True, "mlp_bias": True, "tie_word_embeddings": True}),
    ("smollm3", {"no_rope_layers": [0, 1, 1, 0], "use_sliding_window": False, "attention_bias": True,
                 "mlp_bias": True}),
    ("olmo2", {"num_key_value_heads": 4, "attention_bias": True, "tie_word_embeddings": True}),
])
def test_further_shapes(family: str, overrides: dict[str, Any], kernels: Kernels, tmp_path: Path) -> None:
    folder = make(family, tmp_path / "model", **overrides)
    [ids] = prompts([300])
    ours = logits(folder, ids, kernels)
    assert torch.allclose(ours, reference_logits(folder, ids, "float32")[-1], atol=1e-3, rtol=1e-4)


@pytest.mark.parametrize("served", [128, 512])
def test_longrope_takes_the_factors_of_the_longest_sequence_served(
    served: int, kernels: Kernels, tmp_path: Path) -> None:
    """transformers takes those of the sequence at hand: the same for one as long, on the same side of the original."""
    folder = make("phi3", tmp_path / "model", original_max_position_embeddings=128, sliding_window=None,
                  rope_parameters={"rope_type": "longrope", "rope_theta": 10_000.0, "partial_rotary_factor": 0.75,
                                   "short_factor": [1.0 + i / 8 for i in range(9)],
                                   "long_factor": [2.0 + i for i in range(9)]})
    [ids] = prompts([served - 20])
    decoder = load_model(folder, kernels=kernels, dtype="float32", max_positions=served)
    assert Driver(decoder).greedy([ids], 12, 50) == greedy(folder, [ids], 12)


@pytest.mark.parametrize(("family", "beginning"), [
    ("gemma3", "model.language_model."), ("gemma3", "language_model.model."), ("qwen3_5", "model.language_model."),
    ("qwen3_5_moe", "model.language_model."), ("llama4", "language_model.model.")])
def test_the_text_of_a_model_for_images_and_text(family: str, beginning: str, tmp_path: Path) -> None:
    folder, asked = make(family, tmp_path / "text"), prompts([70, 5])
    both = as_part(folder, tmp_path / "both", beginning)
    of_text, of_both = (load_model(each, kernels=ReferenceKernels()) for each in (folder, both))
    assert Driver(of_both).greedy(asked, 8) == Driver(of_text).greedy(asked, 8)


def test_a_gemma3_for_images_and_text_leaves_out_what_is_as_in_the_smallest(tmp_path: Path) -> None:
    """As in published files: transformers' class has the rest."""
    from transformers import Gemma3TextConfig

    text = {"hidden_size": 2560, "intermediate_size": 10_240, "num_hidden_layers": 34, "sliding_window": 1024,
            "rope_scaling": {"factor": 8.0, "rope_type": "linear"}, "model_type": "gemma3_text"}
    (tmp_path / "config.json").write_text(json.dumps({
        "architectures": ["Gemma3ForConditionalGeneration"], "model_type": "gemma3", "torch_dtype": "bfloat16",
        "eos_token_id": [1, 106], "text_config": text, "vision_config": {"hidden_size": 1152}}))
    ours, theirs = read_config(tmp_path), Gemma3TextConfig(**text)
    assert (ours.vocab_size, ours.num_heads, ours.num_kv_heads, ours.head_dim, ours.max_position_embeddings) == (
        theirs.vocab_size, theirs.num_attention_heads, theirs.num_key_value_heads, theirs.head_dim,
        theirs.max_position_embeddings)
    assert [bool(window) for window in ours.windows] == [
        kind == "sliding_attention" for kind in theirs.layer_types]
    assert (ours.dtype, ours.eos_token_ids, ours.tie_word_embeddings) == (torch.bfloat16, (1, 106), True)
    assert ours.ropes[5] == LinearRope(1e6, 8.0) and ours.ropes[0] == Rope(1e4)


def test_a_step_that_samples_nothing_still_fills_the_cache(checkpoint: Checkpoints, kernels: Kernels) -> None:
    decoder = load_model(checkpoint("llama3"), kernels=kernels, dtype="float32")
    [ids] = prompts([90])
    driver = Driver(decoder)
    silent = driver.step([(0, ids[:64])], sample_at=[])
    assert silent.shape == (0, decoder.config.vocab_size) and silent.dtype == torch.float32
    assert torch.allclose(driver.step([(0, ids[64:])])[0], Driver(decoder).step([(0, ids)])[0], atol=1e-3)


def test_samples_come_in_the_order_asked_for(checkpoint: Checkpoints, kernels: Kernels) -> None:
    decoder = load_model(checkpoint("mistral"), kernels=kernels, dtype="float32")
    rows = list(enumerate(prompts([30, 9])))
    forward, backward = Driver(decoder).step(rows, [4, 29, 38]), Driver(decoder).step(rows, [38, 29, 4])
    assert torch.equal(forward, backward.flip(0))


def assert_differs(folder: Path, expected: list[torch.Tensor]) -> None:
    with one_thread():
        assert distance(folder, ReferenceKernels(), expected) > 2 * CLOSE


def edit_weight(folder: Path, name: str, change: Callable[[torch.Tensor], torch.Tensor]) -> Path:
    path = folder / "model.safetensors"
    weights = load_file(path)
    path.unlink()
    save_file(weights | {name: change(weights[name])}, path)
    return folder


def logits(folder: Path, ids: list[int], kernels: Kernels | None = None) -> torch.Tensor:
    """Of the last token: `[vocab]`."""
    return Driver(load_model(folder, kernels=kernels or ReferenceKernels(), dtype="float32")).step([(0, ids)])[0]


def reference_logits(folder: Path, ids: list[int], dtype: str) -> torch.Tensor:
    """transformers' logits of every token: `[tokens, vocab]`."""
    with torch.inference_mode(), one_thread():
        return reference_model(folder, dtype)(torch.tensor([ids])).logits[0]


def teacher_forced(logits: torch.Tensor, ids: list[int]) -> torch.Tensor:
    """Log-probability of each token given those before it: `[len(ids) - 1]` nats."""
    return logits.float().log_softmax(-1).gather(1, torch.tensor(ids[1:])[:, None])[:, 0]


def mean_difference(a: torch.Tensor, b: torch.Tensor) -> float:
    return (a - b).abs().mean().item()


def _turned(rope: dict[str, Any]) -> dict[str, Any]:
    """With another base, in each kind of layer."""
    if "rope_theta" in rope:
        return rope | {"rope_theta": rope["rope_theta"] * 2}
    return {kind: _turned(each) for kind, each in rope.items()}


def _rope(folder: Path) -> dict[str, Any]:
    return json.loads((folder / "config.json").read_text())["rope_parameters"]
