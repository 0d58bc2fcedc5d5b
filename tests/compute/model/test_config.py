"""config.json in all the ways it is written, and in the ways it must not be."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest

from slotwise.compute.kernels.interface import AttentionShape
from slotwise.compute.model.family_table import configure
from slotwise.compute.model.fields import Fields
from slotwise.compute.model.layers.rope import Llama3Rope, Rope
from slotwise.compute.model.model_config import ModelConfig
from slotwise.errors import CheckpointError

BASE = {
    "architectures": ["LlamaForCausalLM"], "vocab_size": 1000, "hidden_size": 64, "intermediate_size": 128,
    "num_hidden_layers": 4, "num_attention_heads": 8, "num_key_value_heads": 2, "max_position_embeddings": 512,
}  # fmt: skip


def read(**fields: Any) -> ModelConfig:
    return configure(Fields(BASE | fields, "config.json"))


class TestLlama:
    def test_defaults(self) -> None:
        config = read()
        assert (config.num_layers, config.num_heads, config.num_kv_heads, config.head_dim) == (4, 8, 2, 8)
        assert config.ropes == (Rope(10_000.0),) * 4 and config.windows == (0, 0, 0, 0) and config.norm_eps == 1e-6
        assert not (config.tie_word_embeddings or config.qkv_bias or config.output_bias or config.mlp_bias)
        assert config.eos_token_ids == ()

    def test_null_counts_as_absent(self) -> None:
        assert read(num_key_value_heads=None, head_dim=None, rope_scaling=None) == read(num_key_value_heads=8)

    def test_an_empty_object_is_not_a_value(self) -> None:
        yarn = {"rope_type": "yarn", "rope_theta": 5e5, "factor": 4.0}
        assert read(rope_scaling={}, rope_parameters=yarn) == read(rope_parameters=yarn) != read()

    def test_a_null_is_false_where_yarn_rounds_its_bounds(self) -> None:
        yarn = {"rope_type": "yarn", "factor": 4.0}
        assert read(rope_parameters=yarn | {"truncate": None}) == read(rope_parameters=yarn | {"truncate": False})
        assert read(rope_parameters=yarn | {"truncate": None}) != read(rope_parameters=yarn)

    def test_head_dim_may_differ_from_the_share_of_hidden(self) -> None:
        assert read(head_dim=32).head_dim == 32
        assert read(head_dim=32, num_attention_heads=6).num_heads == 6

    def test_a_window_in_the_file_is_not_llamas(self) -> None:
        assert read(sliding_window=16, use_sliding_window=True).windows == (0, 0, 0, 0)

    def test_biases(self) -> None:
        config = read(attention_bias=True, mlp_bias=True)
        assert config.qkv_bias and config.output_bias and config.mlp_bias


class TestOtherFamilies:
    @pytest.mark.parametrize(("window", "windows"), [(16, (16,) * 4), (None, (0,) * 4)])
    def test_mistral(self, window: int | None, windows: tuple[int, ...]) -> None:
        assert read(architectures=["MistralForCausalLM"], sliding_window=window).windows == windows

    @pytest.mark.parametrize("name", ["Qwen2ForCausalLM", "Qwen3ForCausalLM"])
    @pytest.mark.parametrize(("fields", "windows"), [
        ({"sliding_window": 16, "max_window_layers": 1}, (0, 0, 0, 0)),
        ({"sliding_window": 16, "use_sliding_window": True, "max_window_layers": 3}, (0, 0, 0, 16)),
        ({"sliding_window": 16, "use_sliding_window": True, "max_window_layers": 0}, (16,) * 4),
        ({"sliding_window": 16, "use_sliding_window": True,
          "layer_types": ["sliding_attention", "full_attention"] * 2}, (16, 0, 16, 0)),
    ])
    def test_qwen_windows(self, name: str, fields: dict[str, Any], windows: tuple[int, ...]) -> None:
        assert read(architectures=[name], **fields).windows == windows

    def test_qwen2_always_has_biases(self) -> None:
        config = read(architectures=["Qwen2ForCausalLM"])
        assert config.qkv_bias and not config.output_bias and not config.qk_norm

    def test_qwen3(self) -> None:
        config = read(architectures=["Qwen3ForCausalLM"])
        assert config.qk_norm and not config.qkv_bias and config.head_dim == 128
        assert read(architectures=["Qwen3ForCausalLM"], head_dim=16).head_dim == 16


class TestGemma2:
    def read(self, **fields: Any) -> ModelConfig:
        return read(**{"architectures": ["Gemma2ForCausalLM"], "hidden_activation": "gelu_pytorch_tanh"} | fields)

    def test_what_is_absent_is_as_in_transformers(self) -> None:
        config = self.read(head_dim=None)
        assert (config.head_dim, config.windows) == (256, (4096, 0, 4096, 0)) and config.tie_word_embeddings
        assert (config.attention_soft_cap, config.logit_soft_cap, config.attention_scale) == (50.0, 30.0, 1 / 16)

    def test_a_null_cap_is_none(self) -> None:
        config = self.read(attn_logit_softcapping=None, final_logit_softcapping=None)
        assert (config.attention_soft_cap, config.logit_soft_cap) == (0.0, 0.0)

    def test_options_reach_the_kernels(self) -> None:
        config = self.read(sliding_window=16, attn_logit_softcapping=7.0, query_pre_attn_scalar=64, head_dim=32)
        assert config.attention_shape(0) == AttentionShape(8, 2, 32, 0.125, window=16, soft_cap=7.0)
        assert config.attention_shape(1) == AttentionShape(8, 2, 32, 0.125, window=0, soft_cap=7.0)

    @pytest.mark.parametrize(("fields", "problem"), [
        ({"hidden_activation": "silu"}, "hidden_activation must be gelu_pytorch_tanh, not 'silu'"),
        ({"hidden_act": "gelu"}, "hidden_act must be gelu_pytorch_tanh, not 'gelu'"),
        ({"use_bidirectional_attention": True}, "use_bidirectional_attention is true, which is not supported"),
        ({"attn_logit_softcapping": -1.0}, "attn_logit_softcapping must be a number above 0"),
    ])
    def test_refusals(self, fields: dict[str, Any], problem: str) -> None:
        with pytest.raises(CheckpointError, match=problem):
            self.read(**fields)


LLAMA3 = {"factor": 8, "low_freq_factor": 1, "high_freq_factor": 4, "original_max_position_embeddings": 128}


class TestRope:
    @pytest.mark.parametrize("fields", [
        {"rope_theta": 5e5, "rope_scaling": LLAMA3 | {"rope_type": "llama3"}},
        {"rope_theta": 5e5, "rope_scaling": LLAMA3 | {"type": "llama3"}},
        {"rope_parameters": LLAMA3 | {"rope_type": "llama3", "rope_theta": 5e5}},
    ])
    def test_older_and_newer_form(self, fields: dict[str, Any]) -> None:
        assert read(**fields).ropes == (Llama3Rope(5e5, 8.0, 1.0, 4.0, 128),) * 4

    def test_theta_alone(self) -> None:
        assert read(rope_theta=1e6).ropes == read(rope_parameters={"rope_theta": 1e6}).ropes == (Rope(1e6),) * 4

    @pytest.mark.parametrize(("scaling", "problem"), [
        ({"rope_type": "proportional"}, "type 'proportional' is not supported; these are: default, linear"),
        ({"rope_type": "longrope"}, "longrope is not supported in this architecture"),
        ({"rope_type": "dynamic"}, "factor is missing"),
        ({"type": "mrope"}, "not supported"),
        ({"rope_type": "linear"}, "factor is missing"),
        ({"rope_type": "linear", "factor": -1}, "factor must be a number above 0"),
        ({"rope_type": "linear", "factor": float("nan")}, "factor must be a number"),
        (LLAMA3 | {"rope_type": "llama3", "high_freq_factor": 1}, "high_freq_factor must be a number above 1"),
        ({"full_attention": {"rope_type": "default"}}, "differs by layer type"),
        ({"rope_type": 3}, "rope_type must be a string"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor must be 1"),
        ("llama3", "must be an object"),
    ])
    def test_refusals(self, scaling: object, problem: str) -> None:
        with pytest.raises(CheckpointError, match=problem):
            read(rope_scaling=scaling)


@pytest.mark.parametrize(("fields", "problem"), [
    ({"hidden_size": None}, "hidden_size is missing"),
    ({"hidden_size": "64"}, "hidden_size must be a whole number from 1 to 16777216, not '64'"),
    ({"hidden_size": True}, "hidden_size must be a whole number"),
    ({"hidden_size": 64.0}, "hidden_size must be a whole number"),
    ({"hidden_size": 65}, r"hidden_size \(65\) must be a multiple of num_attention_heads \(8\)"),
    ({"num_hidden_layers": 0}, "num_hidden_layers must be a whole number from 1"),
    ({"num_hidden_layers": 10**9}, "num_hidden_layers must be a whole number from 1 to 1024"),
    ({"vocab_size": -5}, "vocab_size must be"),
    ({"vocab_size": 10**30}, "vocab_size must be"),
    ({"num_key_value_heads": 3}, r"num_attention_heads \(8\) must be a multiple of num_key_value_heads \(3\)"),
    ({"head_dim": 7}, "head_dim must be even"),
    ({"rms_norm_eps": 0}, "rms_norm_eps must be a number above 0"),
    ({"rms_norm_eps": float("inf")}, "rms_norm_eps must be"),
    ({"rope_theta": "big"}, "rope_theta must be a number"),
    ({"max_position_embeddings": 0}, "max_position_embeddings must be"),
    ({"tie_word_embeddings": 1}, "tie_word_embeddings must be true or false"),
    ({"hidden_act": "gelu"}, "hidden_act must be silu, not 'gelu'"),
    ({"dtype": "int8"}, "dtype must be one of"),
    ({"eos_token_id": "</s>"}, "eos_token_id must be a token id or a list"),
    ({"eos_token_id": [1, None]}, "eos_token_id must be a token id or a list"),
    ({"architectures": "LlamaForCausalLM"}, "architectures must be a list of strings"),
    ({"architectures": ["MistralForCausalLM"], "sliding_window": 0}, "sliding_window must be"),
    ({"architectures": ["Qwen2ForCausalLM"], "layer_types": ["full_attention"]}, "names 1 layers, num_hidden_layers 4"),
    ({"architectures": ["Qwen2ForCausalLM"], "layer_types": ["linear_attention"] * 4}, "'linear_attention', which is"),
    ({"architectures": ["Qwen2ForCausalLM"], "layer_types": ["sliding_attention"] * 4}, "use_sliding_window is false"),
])
def test_refusals(fields: dict[str, Any], problem: str) -> None:
    with pytest.raises(CheckpointError, match=problem) as caught:
        read(**fields)
    assert "config.json" in str(caught.value)


MISTRAL = {"architectures": ["MistralForCausalLM"]}


@pytest.mark.parametrize(("fields", "windows"), [
    ({"sliding_window": 16, "layer_types": ["full_attention", "sliding_attention"] * 2}, (0, 16, 0, 16)),
    ({"sliding_window": None, "layer_types": ["full_attention"] * 4}, (0,) * 4),
    ({"sliding_window": None, "layer_types": None}, (0,) * 4), ({}, (4096,) * 4),
    ({"layer_types": ["full_attention"] * 3 + ["sliding_attention"]}, (0, 0, 0, 4096)),
])
def test_windows_of_mistral(fields: dict[str, Any], windows: tuple[int, ...]) -> None:
    assert read(**MISTRAL, **fields).windows == windows


def test_a_null_window_of_qwen_is_none() -> None:
    fields = {"architectures": ["Qwen2ForCausalLM"], "use_sliding_window": True, "max_window_layers": 0}
    assert read(**fields, sliding_window=None).windows == (0,) * 4


@pytest.mark.parametrize(("fields", "problem"), [
    (MISTRAL | {"sliding_window": None, "layer_types": ["sliding_attention"] * 4}, "sliding_window is null, but"),
    (MISTRAL | {"layer_types": ["full_attention"]}, "names 1 layers, num_hidden_layers 4"),
    (MISTRAL | {"layer_types": []}, "names 0 layers, num_hidden_layers 4"),
    (MISTRAL | {"layer_types": ["chunked_attention"] * 4}, "'chunked_attention', which is"),
    (MISTRAL | {"model_type": "llama"}, "model_type must be mistral or ministral with architecture Mistral"),
    ({"model_type": "mistral"}, "model_type must be llama with architecture LlamaForCausalLM, not 'mistral'"),
    ({"architectures": ["Gemma2ForCausalLM"], "hidden_activation": "gelu_pytorch_tanh", "sliding_window": None},
     "sliding_window is null, but layers have sliding attention"),
    ({"per_layer_config": {"0": {"head_dim": 4}}}, "per_layer_config gives layers sizes of their own"),
    ({"is_encoder_decoder": True}, "is_encoder_decoder is true: only decoders"),
])
def test_refusals_of_what_would_change_the_answer(fields: dict[str, Any], problem: str) -> None:
    with pytest.raises(CheckpointError, match=problem):
        read(**fields)


def test_absent_key_value_heads_are_those_of_the_family() -> None:
    absent = {"num_key_value_heads": ..., "num_attention_heads": 64}
    fields = {name: value for name, value in (BASE | absent).items() if value is not ...}
    for name, expected in (("Llama", 64), ("Mistral", 8), ("Qwen2", 32), ("Qwen3", 32)):
        fields["architectures"] = [f"{name}ForCausalLM"]
        assert configure(Fields(fields | {"head_dim": 16}, "config.json")).num_kv_heads == expected
        null = fields | {"head_dim": 16, "num_key_value_heads": None}
        assert configure(Fields(null, "config.json")).num_kv_heads == 64


class TestMixtures:
    def read(self, **fields: Any) -> ModelConfig:
        return read(**{"architectures": ["Qwen3MoeForCausalLM"], "num_experts": 16, "num_experts_per_tok": 4,
                       "moe_intermediate_size": 32} | fields)

    def test_layers(self) -> None:
        assert self.read().mixture_of_experts.layers == (True,) * 4
        config = self.read(decoder_sparse_step=2, mlp_only_layers=[3])
        assert config.mixture_of_experts.layers == (False, True, False, False)
        assert [config.has_experts(layer) for layer in range(4)] == [False, True, False, False]

    def test_a_token_is_multiplied_by_the_experts_that_it_chooses(self) -> None:
        heads = (2 * 8 + 2 * 2) * 8
        assert read().layer_weights == 4 * 64 * (heads + 3 * 128)
        assert self.read().layer_weights == 4 * 64 * (heads + 3 * 4 * 32 + 16)
        assert self.read(mlp_only_layers=[0]).layer_weights == 64 * (4 * heads + 3 * 128 + 3 * (3 * 4 * 32 + 16))

    @pytest.mark.parametrize(("fields", "problem"), [
        ({"num_experts_per_tok": 17}, r"num_experts_per_tok \(17\) must be at most num_experts \(16\)"),
        ({"num_local_experts": 8}, r"num_experts \(16\) differs from num_local_experts"),
        ({"num_experts": 10**6}, "num_experts must be a whole number from 1 to 4096"),
        ({"n_group": 4}, "n_group is set, which is not supported"),
        ({"scoring_func": "sigmoid"}, "scoring_func is set"),
        ({"mlp_only_layers": 3}, "mlp_only_layers must be a list of at most"),
        ({"mlp_only_layers": [-1]}, "mlp_only_layers must be a whole number from 0"),
        ({"norm_topk_prob": 1}, "norm_topk_prob must be true or false"),
        ({"architectures": ["OlmoeForCausalLM"], "clip_qkv": 8.0}, "clip_qkv is set"),
        ({"architectures": ["GptOssForCausalLM"], "swiglu_limit": 0}, "swiglu_limit must be a number above 0"),
    ])
    def test_refusals(self, fields: dict[str, Any], problem: str) -> None:
        with pytest.raises(CheckpointError, match=problem):
            self.read(**fields)


@pytest.mark.parametrize(("name", "fields", "problem"), [
    ("Gemma3", {"hidden_activation": "gelu_pytorch_tanh", "rope_parameters": {"rope_type": "linear", "factor": 2.0}},
     "rope_parameters must have an object for each of full_attention, sliding_attention, not 'rope_type'"),
    ("Gemma3", {"hidden_activation": "gelu_pytorch_tanh", "attn_logit_softcapping": 50.0}, "attn_logit_softcapping"),
    ("SmolLM3", {"no_rope_layers": [1, 0]}, "no_rope_layers names 2 layers, num_hidden_layers 4"),
    ("SmolLM3", {"no_rope_layers": [1, 2, 1, 1]}, "no_rope_layers must be a whole number from 0 to 1"),
    ("Granite", {"residual_multiplier": 0}, "residual_multiplier must be a number above 0"),
    ("Phi3", {"rope_parameters": {"rope_type": "yarn", "factor": 2.0}}, "short_factor is missing"),
    ("Helium", {"head_dim": 16}, r"head_dim \(16\) times num_attention_heads \(8\) must be hidden_size \(64\)"),
])
def test_refusals_by_family(name: str, fields: dict[str, Any], problem: str) -> None:
    with pytest.raises(CheckpointError, match=problem):
        read(architectures=[f"{name}ForCausalLM"], **fields)


def test_an_empty_object_beside_a_text_config_hides_nothing_of_it() -> None:
    text = {name: value for name, value in BASE.items() if name != "architectures"} | {
        "quantization_config": {"quant_method": "fp8"}}
    config = configure(Fields({"architectures": ["Gemma3ForConditionalGeneration"], "quantization_config": {},
                               "text_config": text}, "config.json"))
    assert config.quantization is not None


@pytest.mark.parametrize("value", [False, None])
def test_attention_to_later_tokens_is_read(value: bool | None) -> None:
    """Some models that make vectors have it; a null is false in transformers."""
    assert read(is_causal=True) == read() and read().is_causal
    assert read(is_causal=value) == replace(read(), is_causal=False)
    with pytest.raises(CheckpointError, match="is_causal is false, which is not supported with windows"):
        read(is_causal=value, architectures=["MistralForCausalLM"], sliding_window=8)


def test_an_architecture_without_a_head_is_the_same_model() -> None:
    assert read(architectures=["LlamaModel"]) == read()
    with pytest.raises(CheckpointError, match="architecture T5Model is not supported"):
        read(architectures=["T5Model"])


DEEPSEEK_V2_LITE = {  # the fields that its config.json has, but those without effect
    "architectures": ["DeepseekV2ForCausalLM"], "model_type": "deepseek_v2", "first_k_dense_replace": 1,
    "hidden_act": "silu", "hidden_size": 2048, "intermediate_size": 10944, "kv_lora_rank": 512,
    "max_position_embeddings": 163840, "moe_intermediate_size": 1408, "moe_layer_freq": 1, "n_group": 1,
    "n_routed_experts": 64, "n_shared_experts": 2, "norm_topk_prob": False, "num_attention_heads": 16,
    "num_experts_per_tok": 6, "num_hidden_layers": 27, "num_key_value_heads": 16, "q_lora_rank": None,
    "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "rms_norm_eps": 1e-6, "rope_theta": 10000,
    "rope_scaling": {"beta_fast": 32, "beta_slow": 1, "factor": 40, "mscale": 0.707, "mscale_all_dim": 0.707,
                     "original_max_position_embeddings": 4096, "type": "yarn"},
    "routed_scaling_factor": 1.0, "scoring_func": "softmax", "tie_word_embeddings": False, "topk_group": 1,
    "topk_method": "greedy", "torch_dtype": "bfloat16", "v_head_dim": 128, "vocab_size": 102400}


def test_the_published_config_of_deepseek_v2_lite() -> None:
    config = configure(Fields(DEEPSEEK_V2_LITE, "config.json"))
    assert config.latent is not None
    assert config.mixture is not None
    shape, routing = config.latent.shape, config.mixture.routing
    assert (shape.width, shape.query_dim, shape.value_dim, config.latent.query_rank) == (576, 192, 128, 0)
    assert shape.scale == pytest.approx(192**-0.5 * (0.1 * 0.707 * math.log(40) + 1) ** 2)
    assert config.ropes[0].magnitude == 1.0
    assert (routing.num_experts, routing.top_k, routing.groups, config.mixture.shared_intermediate_size) == (
        64, 6, None, 2816)
    assert config.mixture.layers == (False, *[True] * 26)


@pytest.mark.parametrize(("fields", "problem"), [
    ({"scoring_func": "sigmoid"}, "scoring_func must be softmax"), ({"moe_layer_freq": 2}, "moe_layer_freq must be 1"),
    ({"topk_method": "noaux_tc"}, "topk_method must be greedy or group_limited_greedy"),
    ({"num_key_value_heads": 4}, r"num_key_value_heads \(4\) must be num_attention_heads"),
    ({"head_dim": 128}, r"head_dim must be qk_rope_head_dim \(64\)"), ({"is_causal": False}, "compressed attention")])
def test_refusals_of_compressed_attention(fields: dict[str, Any], problem: str) -> None:
    with pytest.raises(CheckpointError, match=problem):
        configure(Fields(DEEPSEEK_V2_LITE | fields, "config.json"))
