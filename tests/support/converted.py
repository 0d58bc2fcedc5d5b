"""GGUF files that llama.cpp's own converter wrote of tiny random checkpoints, and the logits of `transformers`.

`python -m support.converted LLAMA_CPP [FAMILY ...]`, with a folder of its sources, rewrites all or some of
`tests/compute/gguf/converted`: a file for each of `CONVERTED`, and in `logits.safetensors` the logits that
`transformers` computes from the same checkpoint for `PROMPT`.  Weights are bfloat16 numbers that float16 represents
exactly.
"""

from __future__ import annotations

import json
import sys
import tempfile
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).parents[1] / "compute" / "gguf" / "converted"
LOGITS = FOLDER / "logits.safetensors"
VOCABULARY = 64
PROMPT = [5, 17, 60, 3, 44, 31, 8, 52, 23, 11, 39, 6, 27, 48, 14, 35, 9, 58, 20, 41]
WINDOW = 8
TINY = {"vocab_size": VOCABULARY, "hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 4,
        "num_key_value_heads": 2, "head_dim": 8, "max_position_embeddings": 256, "moe_intermediate_size": 16,
        "shared_expert_intermediate_size": 24, "sliding_window": WINDOW, "kv_lora_rank": 16, "q_lora_rank": 12,
        "qk_rope_head_dim": 4, "qk_nope_head_dim": 8, "v_head_dim": 6, "num_experts": 4, "n_routed_experts": 4,
        "num_local_experts": 4, "num_experts_per_tok": 2}
_GROUPS = {"n_group": 2, "topk_group": 1}
_STATES = {"hidden_size": 48, "mamba_d_head": 6, "mamba_n_heads": 8}
CONVERTED: dict[str, dict[str, Any]] = {  # fields that differ from the configs of other tests, by family
    "glm": {}, "exaone4": {}, "olmo3": {}, "dbrx": {"d_model": 32, "ffn_config": {
        "ffn_hidden_size": 16, "moe_num_experts": 4, "moe_top_k": 2}},
    "cohere2_moe": {"layer_types": ["full_attention"] + ["sliding_attention"] * 3, "intermediate_size": 16,
                    "prefix_dense_intermediate_size": 48},
    "laguna": {"layer_types": ["full_attention"] + ["sliding_attention"] * 3},
    "granite_swa": {"layer_rope_theta": [10_000.0, 10_000.0, 0], "no_rope_layers": [1, 1, 0]}, "granite_moe_swa": {},
    "mellum": {"mlp_layer_types": ["sparse"] * 3}, "hy_v3": {}, "solar_open": _GROUPS | {
        "rope_parameters": {"rope_type": "default", "rope_theta": 10_000.0, "partial_rotary_factor": 1.0}},
    **dict.fromkeys(("deepseek_v32", "glm_moe_dsa"), _GROUPS | {"num_key_value_heads": 4}),
    "qwen3_next": {"mlp_only_layers": []}, "qwen3_5": {}, "qwen3_5_moe": {"attention_bias": False},
    "kimi_linear": {"num_key_value_heads": 4, "n_group": 1, "topk_group": 1, "num_experts_per_tok": 2,
                    "linear_num_heads": 4},
    "nemotron_h_moe": _GROUPS | {"hidden_size": 64, "mamba_head_dim": 32, "layers_block_type": [
        "linear_attention", "moe", "full_attention", "linear_attention", "moe"]},
    "mimo_v2": _GROUPS | {"routed_scaling_factor": 1.0, "v_head_dim": 6, "head_dim": 12},
    "bamba": _STATES, "granite_hybrid": _STATES, "exaone_moe": _GROUPS, "nemotron": {},
    "minimax_m2": {"rotary_dim": 4}, "bitnet": {"hidden_act": "silu", "tie_word_embeddings": True},
    "gemma4_moe": {"num_global_key_value_heads": 1, "global_head_dim": 16, "moe_intermediate_size": 32,
                   "tie_word_embeddings": True},
    "glm4_moe_lite": _GROUPS | {"num_key_value_heads": 4},
}


FUSED = ("qwen3_next", "mimo_v2")  # converted with `--fuse-qkv`: with gates, and with values smaller than keys
HUB: dict[str, dict[str, Any]] = {  # fields of published configs that the converter reads
    "mimo_v2": {"hybrid_layer_pattern": [0, 1, 1, 0], "swa_num_key_value_heads": 4, "swa_num_attention_heads": 4,
                "swa_head_dim": 12, "swa_v_head_dim": 6, "topk_method": "noaux_tc", "scoring_func": "sigmoid",
                "swa_rope_theta": 10_000.0, "rope_theta": 5_000_000.0, "partial_rotary_factor": 0.334,
                "rope_parameters": {"partial_rotary_factor": 0.334, "rope_theta": 5_000_000.0,
                                    "sliding_attention": {"rope_theta": 10_000.0}},
                "model_type": "of the hub"},  # unknown to transformers, so that the converter reads the file as it is
    "granite_hybrid": {"layer_types": ["mamba", "attention", "mamba", "mamba"]},
    "kimi_linear": {"num_shared_experts": 2, "first_k_dense_replace": 1, "linear_attn_config": {
        "full_attn_layers": [2], "kda_layers": [1, 3, 4], "head_dim": 6, "num_heads": 4, "short_conv_kernel_size": 4}},
}


def make_tiny(family: str, folder: Path) -> Path:
    """Writes a checkpoint of `family` to `folder`, as small as its parts allow."""
    from safetensors.torch import load_file, save_file

    from support.checkpoints import make, own_fields

    known = own_fields(family)
    sizes = {name: value for name, value in TINY.items() if known.get(name, 0) is not ... and (
        name in known or name in ("vocab_size", "hidden_size", "intermediate_size", "num_attention_heads",
                                  "num_key_value_heads", "head_dim", "max_position_embeddings"))}
    sizes = {name: None if known.get(name, 0) is None else value for name, value in sizes.items()}
    make(family, folder, dtype="bfloat16", **(sizes | CONVERTED.get(family, {})))
    if family == "bitnet":  # whose converter rounds to the weights' mean and its negative
        tensors = load_file(folder / "model.safetensors")
        save_file({name: tensor.sign() / 8 if name.endswith("_proj.weight") else tensor
                   for name, tensor in tensors.items()}, folder / "model.safetensors", {"format": "pt"})
    if family == "kimi_linear":  # transformers saves its MLPs under another name
        tensors = load_file(folder / "model.safetensors")
        save_file({name.replace(".0.block_sparse_moe.", ".0.mlp."): tensor for name, tensor in tensors.items()},
                  folder / "model.safetensors", {"format": "pt"})
    return folder


def convert(family: str, folder: Path, target: Path, llama_cpp: Path) -> Path:
    """Runs llama.cpp's converter with a vocabulary of letters; adds fields that it reads to the checkpoint's config."""
    from safetensors.torch import load_file, save_file

    from support.checkpoints import edit_config

    edit_config(folder, **HUB.get(family, {}))
    (folder / "tokenizer.json").write_text(json.dumps(  # of which the converter of Gemma counts the tokens
        {"model": {"vocab": {str(number): number for number in range(VOCABULARY)}}, "added_tokens": []}))
    if family == "bitnet":  # whose converter knows the names of the first models only
        save_file({name.replace("attn_sub_norm", "inner_attn_ln").replace("ffn_sub_norm", "ffn_layernorm"): tensor
                   for name, tensor in load_file(folder / "model.safetensors").items()},
                  folder / "model.safetensors", {"format": "pt"})
    if str(llama_cpp) not in sys.path:
        sys.path[:0] = [str(llama_cpp / "gguf-py"), str(llama_cpp)]
    import gguf
    import torch
    from conversion import ModelBase, ModelType, get_model_architecture, get_model_class

    hparams = ModelBase.load_hparams(folder, False)
    made = get_model_class(get_model_architecture(hparams, ModelType.TEXT))

    def set_vocab(self: Any) -> None:
        tokens = [f"<{number}>" for number in range(3)] + [chr(33 + number) for number in range(VOCABULARY - 3)]
        self.gguf_writer.add_tokenizer_model("gpt2")
        self.gguf_writer.add_tokenizer_pre("gpt-2")
        self.gguf_writer.add_token_list(tokens)
        self.gguf_writer.add_token_types([gguf.TokenType.CONTROL] * 3 + [gguf.TokenType.NORMAL] * (VOCABULARY - 3))
        self.gguf_writer.add_token_merges(["! !"])
        self.gguf_writer.add_bos_token_id(1)
        self.gguf_writer.add_eos_token_id(2)

    made.no_mtp = made.no_mtp or made.supports_mtp_export  # the checkpoints have no layers that draft
    named = made.set_vocab
    made.set_vocab = set_vocab
    try:
        with torch.inference_mode():
            made(folder, gguf.LlamaFileType.MOSTLY_F16, target, model_name="tiny",
                 fuse_qkv=family in FUSED).write()
    finally:
        made.set_vocab = named
    return target


def expected(folder: Path) -> Any:
    """The logits of `transformers` at each token of the prompt: `[tokens, vocab]`."""
    import torch

    from support.checkpoints import one_thread, reference_model

    with torch.inference_mode(), one_thread():
        return reference_model(folder, "float32")(torch.tensor([PROMPT])).logits[0]


def main(llama_cpp: Path, families: list[str]) -> None:
    from safetensors.torch import load_file, save_file

    FOLDER.mkdir(parents=True, exist_ok=True)
    logits = load_file(LOGITS) if LOGITS.is_file() else {}
    for family in families or CONVERTED:
        with tempfile.TemporaryDirectory() as place:
            folder = make_tiny(family, Path(place) / "checkpoint")
            logits[family] = expected(folder)
            convert(family, folder, FOLDER / f"{family}.gguf", llama_cpp)
    save_file(logits, LOGITS)


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2:])
