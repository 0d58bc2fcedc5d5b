"""The text parts of models for images: logits of transformers' own classes, for prompts of text."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from support.checkpoints import SIZES, one_thread, prompts
from support.ragged import Driver

from slotwise.compute.kernels.reference import ReferenceKernels
from slotwise.compute.model.loading import load_model

pytestmark = pytest.mark.slow

TEXT = {name: value for name, value in SIZES.items() if name != "head_dim"}
SHARPENED = {"rope_type": "yarn", "rope_theta": 10_000.0, "factor": 4.0, "original_max_position_embeddings": 32,
             "mscale": 1.0, "mscale_all_dim": 0.5, "llama_4_scaling_beta": 0.5}
EYE = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "head_dim": 16,
       "patch_size": 4}
QWEN_EYE = {"depth": 1, "hidden_size": 32, "intermediate_size": 32, "num_heads": 2, "out_hidden_size": 96}
MODELS: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {  # by a name: class, text and the part for images
    "qwen2_vl": ("Qwen2VL", {"rope_parameters": {
        "rope_type": "mrope", "rope_theta": 1e4, "mrope_section": [4, 4, 4]}},
        {"depth": 1, "embed_dim": 32, "hidden_size": 96, "num_heads": 2}),
    "qwen2_5_vl": ("Qwen2_5_VL", {"rope_parameters": {
        "rope_type": "default", "rope_theta": 1e4, "mrope_section": [4, 4, 4]}}, QWEN_EYE),
    "qwen3_vl": ("Qwen3VL", {"head_dim": 32, "rope_parameters": {
        "rope_type": "default", "rope_theta": 1e4, "mrope_section": [6, 5, 5], "mrope_interleaved": True}},
        QWEN_EYE | {"deepstack_visual_indexes": [0], "num_position_embeddings": 16}),
    "qwen3_vl_moe": ("Qwen3VLMoe", {
        "head_dim": 32, "num_experts": 6, "num_experts_per_tok": 3, "moe_intermediate_size": 64,
        "mlp_only_layers": [1], "rope_parameters": {
            "rope_type": "default", "rope_theta": 1e4, "mrope_section": [6, 5, 5], "mrope_interleaved": True}},
        QWEN_EYE | {"deepstack_visual_indexes": [0], "num_position_embeddings": 16}),
    "mistral3": ("Mistral3", {"model_type": "mistral", "head_dim": 32, "sliding_window": None},
                 EYE | {"model_type": "pixtral", "image_size": 8}),
    "ministral3": ("Mistral3", {"model_type": "ministral3", "head_dim": 32, "rope_parameters": SHARPENED},
                   EYE | {"model_type": "pixtral", "image_size": 8}),
    "gemma4": ("Gemma4", {
        "head_dim": 32, "global_head_dim": 48, "num_hidden_layers": 6, "num_kv_shared_layers": 2,
        "hidden_size_per_layer_input": 16, "vocab_size_per_layer_input": 1024, "sliding_window": 48,
        "layer_types": ["sliding_attention", "full_attention"] * 3}, EYE | {"num_key_value_heads": 2}),
    "llama4": ("Llama4", {
        "head_dim": 32, "intermediate_size_mlp": 96, "num_local_experts": 4, "attention_chunk_size": 48,
        "no_rope_layers": [1, 0, 1], "moe_layers": [1]}, {
        "hidden_size": 32, "intermediate_size": 128, "num_hidden_layers": 1, "num_attention_heads": 2, "image_size": 8,
        "patch_size": 4, "vision_output_dim": 32, "projector_input_dim": 32, "projector_output_dim": 32}),
    "got_ocr2": ("GotOcr2", {"model_type": "qwen2"}, {
        "hidden_size": 32, "output_channels": 8, "num_hidden_layers": 1, "num_attention_heads": 2, "image_size": 16,
        "patch_size": 4, "mlp_dim": 32, "window_size": 2, "global_attn_indexes": [0]}),
}


@pytest.mark.parametrize("name", MODELS)
def test_prompts_of_text_have_the_logits_of_the_whole_model(name: str, tmp_path: Path) -> None:
    import transformers

    kind, text, eye = MODELS[name]
    made = getattr(transformers, f"{kind}ForConditionalGeneration")
    with torch.random.fork_rng(), one_thread():
        torch.manual_seed(0)
        model = made(made.config_class(text_config=TEXT | text, vision_config=eye)).eval()
        for key, tensor in model.named_parameters():
            if key.endswith("norm.weight"):
                torch.nn.init.uniform_(tensor, 0.5, 1.5)
        model.save_pretrained(tmp_path / "model")
        if kind == "Qwen3VLMoe":  # whose published files have matrices of experts the other way around
            file = tmp_path / "model" / "model.safetensors"
            save_file({key: tensor.transpose(1, 2).contiguous() if ".mlp.experts." in key else tensor
                       for key, tensor in load_file(file).items()}, file, metadata={"format": "pt"})
        rows = prompts([5, 60])
        decoder = load_model(tmp_path / "model", kernels=ReferenceKernels(), dtype="float32")
        ours = Driver(decoder).step(list(enumerate(rows)))
        with torch.inference_mode():
            whole = model.language_model if kind == "Llama4" else model  # which fails where there is no image
            theirs = torch.cat([whole(input_ids=torch.tensor([ids])).logits[:, -1] for ids in rows])
    assert (ours - theirs).abs().max() < 1e-4 * theirs.std()


def test_a_config_of_qwen2_vl_without_a_part_for_text_is_read_as_one(tmp_path: Path) -> None:
    """As in the first published files."""
    from slotwise.compute.model.family_table import configure
    from slotwise.compute.model.fields import Fields

    rope = {"type": "mrope", "mrope_section": [4, 4, 4]}
    flat = TEXT | {"rope_scaling": rope, "rope_theta": 1e6}
    outer = {"architectures": ["Qwen2VLForConditionalGeneration"], "model_type": "qwen2_vl"}
    within = {"text_config": flat}
    assert configure(Fields(outer | flat, "config.json")) == configure(Fields(outer | within | {
        "eos_token_id": TEXT["eos_token_id"]}, "config.json"))
