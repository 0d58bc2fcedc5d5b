"""What llama.cpp's converter does with models of one kind of layer: their keys, and the form of their tensors."""

from __future__ import annotations

from statistics import NormalDist
from typing import Any

import gguf
import torch

Tensors = dict[str, torch.Tensor]
NAMES = {  # of fields
    "n_embed": "hidden_size", "d_model": "hidden_size", "n_layer": "num_hidden_layers", "n_layers": "num_hidden_layers",
    "n_head": "num_attention_heads", "n_heads": "num_attention_heads", "max_seq_len": "max_position_embeddings",
    "num_kv_heads": "num_key_value_heads"}
ALTUP = {"altup_projections": "model.altup_projections", "altup_unembed_projections": "model.altup_unembed_projections"}


def is_of(config: dict[str, Any], *names: str) -> bool:
    return config["architectures"][0].removesuffix("ForCausalLM") in names


def has_layer_norms(config: dict[str, Any]) -> bool:
    return is_of(config, "Bloom", "Mpt", "Falcon", "Cohere", "Cohere2", "Jais2")


def common(config: dict[str, Any]) -> dict[str, Any]:
    """The config with the fields that all have."""
    if is_of(config, "HunYuanDenseV1"):
        rope, size = config["rope_parameters"], config["head_dim"]
        theta = rope["rope_theta"] * rope["alpha"] ** (size / (size - 2))
        return config | {"rope_parameters": {"rope_type": "default", "rope_theta": theta}}
    if is_of(config, "Gemma4"):
        layers, own = range(config["num_hidden_layers"]), config["per_layer_config"]
        full = next(iter(own.values()))
        wide = config["num_hidden_layers"] - (config["num_kv_shared_layers"] if config["use_double_wide_mlp"] else 0)
        return config | {
            "intermediate_size": [config["intermediate_size"] * (1 + (layer >= wide)) for layer in layers],
            "num_key_value_heads": [(own.get(str(layer)) or {}).get(
                "num_key_value_heads", config["num_key_value_heads"]) for layer in layers],
            "head_dim": full["head_dim"],
            "rope_parameters": {"rope_theta": config["rope_parameters"]["full_attention"]["rope_theta"]}}
    if not has_layer_norms(config):
        return config
    config = config | {NAMES[name]: value for name, value in config.items() if name in NAMES and value is not None}
    if is_of(config, "Falcon") and not config["new_decoder_architecture"]:
        config["num_key_value_heads"] = 1
    absent = {"intermediate_size": 4 * config["hidden_size"], "num_key_value_heads": config["num_attention_heads"],
              "max_position_embeddings": 2048}
    return absent | config


def add_keys(writer: gguf.GGUFWriter, config: dict[str, Any], tensors: Tensors) -> None:
    if is_of(config, "Cohere", "Cohere2"):
        writer.add_logit_scale(config["logit_scale"])
    if is_of(config, "Mpt"):
        if config["attn_config"]["clip_qkv"]:
            writer.add_clamp_kqv(config["attn_config"]["clip_qkv"])
        writer.add_max_alibi_bias(8.0)
    if is_of(config, "Ministral3"):
        rope = config["rope_parameters"]
        writer.add_rope_scaling_yarn_log_mul(rope["mscale_all_dim"])
        writer.add_attn_temperature_scale(rope["llama_4_scaling_beta"])
    if is_of(config, "Apertus"):
        for name, add in (("alpha_n", writer.add_xielu_alpha_n), ("alpha_p", writer.add_xielu_alpha_p),
                          ("beta", writer.add_xielu_beta), ("eps", writer.add_xielu_eps)):
            add([tensors[f"model.layers.{layer}.mlp.act_fn.{name}"].item()
                 for layer in range(config["num_hidden_layers"])])
    if is_of(config, "Gemma4"):
        writer.add_shared_kv_layers(config["num_kv_shared_layers"])
        writer.add_embedding_length_per_layer_input(config["hidden_size_per_layer_input"])
        writer.add_sliding_window_pattern([kind == "sliding_attention" for kind in config["layer_types"]])
        writer.add_key_length_swa(config["head_dim"])
        writer.add_value_length_swa(config["head_dim"])
        writer.add_rope_dimension_count_swa(config["head_dim"])
    if is_of(config, "Gemma3n"):
        writer.add_altup_active_idx(config["altup_active_idx"])
        writer.add_altup_num_inputs(config["altup_num_inputs"])
        writer.add_embedding_length_per_layer_input(config["hidden_size_per_layer_input"])
        writer.add_shared_kv_layers(config["num_kv_shared_layers"])
        writer.add_activation_sparsity_scale([
            NormalDist().inv_cdf(each) if each else float("-inf") for each in config["activation_sparsity_pattern"]])
        writer.add_sliding_window_pattern([kind == "sliding_attention" for kind in config["layer_types"]])


def changed(tensors: Tensors, config: dict[str, Any]) -> Tensors:
    """Tensors in the form and under the names that the converter maps."""
    found: Tensors = {}
    if is_of(config, "Gemma4"):
        pairs = common(config)["head_dim"] // 2
        turning = int(pairs * config["rope_parameters"]["full_attention"]["partial_rotary_factor"])
        found["rope.freqs.weight"] = torch.tensor([1.0] * turning + [1e30] * (pairs - turning))
    for name, tensor in tensors.items():
        if ".act_fn." in name:
            continue
        if is_of(config, "Bloom"):
            name = name.removeprefix("transformer.")
        if is_of(config, "Bloom", "Falcon") and "query_key_value" in name:
            heads = common(config)
            groups = heads["num_key_value_heads"]
            parts = tensor.view(groups, heads["num_attention_heads"] // groups + 2, -1, *tensor.shape[1:])
            queries, keys, values = parts[:, :-2], parts[:, -2:-1], parts[:, -1:]
            tensor = torch.cat([part.reshape(-1, *tensor.shape[1:]) for part in (queries, keys, values)])
        stem, _, kind = name.rpartition(".")
        if kind in ("correct_output_scale", "layer_scalar"):
            name = f"{name}.weight"
        above, _, number = stem.rpartition(".")
        if is_of(config, "Gemma3n") and above in ALTUP.values():
            name, before = f"{above}.weight", found.get(f"{above}.weight")
            assert number == str(0 if before is None else len(before))
            tensor = tensor[None] if before is None else torch.cat((before, tensor[None]))
        found[name] = tensor
    return found
