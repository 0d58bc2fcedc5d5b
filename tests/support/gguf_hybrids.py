"""What llama.cpp's converter does with models that have states: their keys, and the form of their tensors."""

from __future__ import annotations

from typing import Any

import gguf
import torch

Tensors = dict[str, torch.Tensor]
STATELESS = 0  # heads of keys in layers without attention


def num_layers(config: dict[str, Any]) -> int:
    return len(config["layers_block_type"]) if _is(config, "NemotronH") else int(config["num_hidden_layers"])


def _is(config: dict[str, Any], *names: str) -> bool:
    return config["architectures"][0].removesuffix("ForCausalLM") in names


def _full(config: dict[str, Any]) -> list[bool]:
    """Whether each layer has attention."""
    layers = range(num_layers(config))
    if _is(config, "Jamba"):
        return [layer % config["attn_layer_period"] == config["attn_layer_offset"] for layer in layers]
    if _is(config, "Bamba"):
        return [layer in config["attn_layer_indices"] for layer in layers]
    return [kind == "full_attention" for kind in config.get("layer_types") or config["layers_block_type"]]


def common(config: dict[str, Any]) -> dict[str, Any]:
    """The config with the fields that all have, as the converter writes them."""
    if _is(config, "Mamba", "Mamba2", "FalconMamba"):
        return config | {"num_attention_heads": 1, "num_key_value_heads": 1, "head_dim": 2, "intermediate_size": 0,
                         "max_position_embeddings": 1 << 20, "rms_norm_eps": config["layer_norm_epsilon"]}
    changes: dict[str, Any] = {}
    if _is(config, "NemotronH"):
        changes = {"rms_norm_eps": config["layer_norm_epsilon"], "num_hidden_layers": num_layers(config),
                   "num_experts_per_tok": 0, "moe_intermediate_size": 0, "intermediate_size": [
                       config["intermediate_size"] if kind == "mlp" else 0 for kind in config["layers_block_type"]]}
    if _is(config, "Lfm2", "Lfm2Moe"):
        changes["rms_norm_eps"] = config["norm_eps"]
    if _is(config, "FalconH1"):
        return config | {"embedding_multiplier": 0}
    if _is(config, "Lfm2", "Lfm2Moe", "Jamba", "GraniteMoeHybrid", "Bamba", "NemotronH"):
        changes["num_key_value_heads"] = [config["num_key_value_heads"] if full else 0 for full in _full(config)]
    return config | changes


def add_states(writer: gguf.GGUFWriter, config: dict[str, Any]) -> None:
    if _is(config, "Lfm2", "Lfm2Moe"):
        writer.add_shortconv_l_cache(config["conv_L_cache"])
    if _is(config, "Lfm2Moe"):
        writer.add_leading_dense_block_count(config["num_dense_layers"])
        writer.add_expert_gating_func(gguf.ExpertGatingFuncType.SIGMOID)
        writer.add_expert_weights_scale(config["routed_scaling_factor"])
    if _is(config, "GraniteMoeHybrid"):
        writer.add_expert_shared_feed_forward_length(config["shared_intermediate_size"])
    if _is(config, "GraniteMoeHybrid", "Bamba"):
        writer.add_rope_scaling_finetuned(_is(config, "Bamba"))
    hidden = config["hidden_size"]
    if _is(config, "Mamba", "FalconMamba"):
        _add_ssm(writer, config["conv_kernel"], config["intermediate_size"], config["state_size"],
                 config["time_step_rank"])
        writer.add_ssm_dt_b_c_rms(_is(config, "FalconMamba"))
    elif _is(config, "Jamba"):
        _add_ssm(writer, config["mamba_d_conv"], config["mamba_expand"] * hidden, config["mamba_d_state"],
                 config["mamba_dt_rank"])
    elif _is(config, "Mamba2"):
        _add_ssm(writer, config["conv_kernel"], config["expand"] * hidden, config["state_size"], config["num_heads"],
                 config["n_groups"])
    elif _is(config, "NemotronH"):
        heads = config["mamba_num_heads"]
        _add_ssm(writer, config["conv_kernel"], heads * config["mamba_head_dim"], config["ssm_state_size"], heads,
                 config["n_groups"])
    elif "mamba_n_heads" in config:
        _add_ssm(writer, config["mamba_d_conv"], config["mamba_n_heads"] * config["mamba_d_head"],
                 config["mamba_d_state"], config["mamba_n_heads"], config["mamba_n_groups"])


def _add_ssm(writer: gguf.GGUFWriter, conv: int, inner: int, state: int, rank: int, groups: int = 0) -> None:
    writer.add_ssm_conv_kernel(conv)
    writer.add_ssm_inner_size(inner)
    writer.add_ssm_state_size(state)
    writer.add_ssm_time_step_rank(rank)
    if groups:
        writer.add_ssm_group_count(groups)


def multiplied(tensors: Tensors, config: dict[str, Any]) -> Tensors:
    """Falcon-H1's weights times its factors."""
    if not _is(config, "FalconH1"):
        return tensors
    inner, shared = config["mamba_d_ssm"], config["mamba_n_groups"] * config["mamba_d_state"]
    mixed = torch.cat([torch.full((size,), factor) for size, factor in zip(
        (inner, inner, shared, shared, config["mamba_n_heads"]), config["ssm_multipliers"], strict=True)])
    attention = config["attention_in_multiplier"]
    factors = {
        "q_proj": attention, "k_proj": attention * config["key_multiplier"], "v_proj": attention,
        "o_proj": config["attention_out_multiplier"], "out_proj": config["ssm_out_multiplier"],
        "in_proj": config["ssm_in_multiplier"] * mixed[:, None], "gate_proj": config["mlp_multipliers"][0],
        "down_proj": config["mlp_multipliers"][1], "lm_head": config["lm_head_multiplier"],
        "embed_tokens": config["embedding_multiplier"]}
    return {name: tensor * factors.get(name.removesuffix(".weight").rpartition(".")[2], 1.0)
            for name, tensor in tensors.items()}


def changed(tensors: Tensors, config: dict[str, Any]) -> Tensors:
    """Under names that the gguf package maps, in the form of the files."""
    found = {}
    for name, tensor in tensors.items():
        parts, stem = name.rpartition("."), name
        if name.endswith("dt_bias"):
            stem = f"{parts[0]}.dt_proj.bias"
        if name.endswith("expert_bias"):
            stem = f"{name}.bias"
        if _is(config, "NemotronH") and name.startswith("model."):
            stem = stem.replace("model.", "backbone.", 1)
        if _is(config, "Jamba"):
            stem = stem.replace(".feed_forward.experts.", ".mlp.experts.")
        if _is(config, "Lfm2Moe"):
            stem = stem.removeprefix("model.") if ".experts." in stem else stem
        if ".shared_mlp.input_linear" in stem:
            for half, part in zip(("gate", "up"), tensor.chunk(2), strict=True):
                found[stem.replace("input_linear", f"{half}_proj").replace(
                    "shared_mlp", "mlp.shared_expert")] = part.contiguous()
            continue
        if ".shared_mlp.output_linear" in stem:
            stem = stem.replace("shared_mlp.output_linear", "mlp.shared_expert.down_proj")
        if name.endswith("A_log"):
            tensor = -torch.exp(tensor)
        if name.endswith(("A_log", ".D")) and tensor.ndim == 1 and not _is(config, "Mamba", "FalconMamba", "Jamba"):
            tensor = tensor[:, None]
        if "conv" in name and tensor.ndim == 3:
            tensor = tensor.squeeze(1)
        if name.endswith(("mixer.norm.weight", "mamba.norm.weight")):
            groups = config.get("n_groups") or config["mamba_n_groups"]
            tensor = tensor.view(groups, -1)
        found[stem] = tensor
    return found
