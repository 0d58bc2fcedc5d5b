"""Writes a checkpoint with a real model's shape and random weights: speed does not depend on the weights' values.

usage: python -m benchmarks.checkpoint FOLDER [--shape smollm2-135m | qwen3-mixture | lfm2-350m | ...]  (`dev` extra)
       python -m benchmarks.checkpoint FOLDER --gguf FILE
       python -m benchmarks.checkpoint TARGET --gguf FILE --quantize Q8_0

With --gguf it has the dequantized weights of a Llama in a GGUF file, rounded to bfloat16, so that engines that read no
such files can be compared on the same model; the `transformers` library reads the weights.  With --quantize it is a
GGUF file with the same metadata, and the weights in another type of the `gguf` library.
"""

from __future__ import annotations

import json
from pathlib import Path

import torch
from benchmarks.commands import parser_of
from gguf import GGMLQuantizationType, GGUFReader, GGUFWriter, LlamaFileType
from gguf.quants import dequantize, quantize
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import (
    AutoModelForCausalLM,
    DeepseekV2Config,
    GgufConfig,
    GraniteMoeHybridConfig,
    Lfm2Config,
    LlamaConfig,
    Mamba2Config,
    MambaConfig,
    PretrainedConfig,
    Qwen3Config,
    Qwen3MoeConfig,
)

from slotwise.text.chat_source import find_chat_template
from slotwise.text.tokenizer import Tokenizer as SlotwiseTokenizer

QUANT_BLOCK = 32  # numbers in a row that share a scale
SHAPES: dict[str, PretrainedConfig] = {
    "smollm2-135m": LlamaConfig(
        vocab_size=49152, hidden_size=576, intermediate_size=1536, num_hidden_layers=30, num_attention_heads=9,
        num_key_value_heads=3, max_position_embeddings=8192, tie_word_embeddings=True, bos_token_id=0, eos_token_id=0,
        rope_theta=100000.0),
    "qwen3-0.6b": Qwen3Config(
        vocab_size=151936, hidden_size=1024, intermediate_size=3072, num_hidden_layers=28, num_attention_heads=16,
        num_key_value_heads=8, head_dim=128, max_position_embeddings=40960, tie_word_embeddings=True, bos_token_id=0,
        eos_token_id=0, rope_theta=1000000.0),
    "qwen3-mixture": Qwen3MoeConfig(  # 128 experts of which a token chooses eight
        vocab_size=16384, hidden_size=1024, intermediate_size=3072, moe_intermediate_size=384, num_experts=128,
        num_experts_per_tok=8, norm_topk_prob=True, num_hidden_layers=4, num_attention_heads=16, num_key_value_heads=2,
        head_dim=64, max_position_embeddings=4096, bos_token_id=0, eos_token_id=0, rope_theta=1000000.0),
    "lfm2-350m": Lfm2Config(
        vocab_size=49152, hidden_size=1024, intermediate_size=6656, num_hidden_layers=16, num_attention_heads=16,
        num_key_value_heads=8, max_position_embeddings=8192, full_attn_idxs=[2, 5, 8, 10, 12, 14], bos_token_id=0,
        eos_token_id=0, pad_token_id=0),
    "granite-4-h-350m": GraniteMoeHybridConfig(  # Mamba-2 in 28 of 32 layers
        vocab_size=49152, hidden_size=768, intermediate_size=2048, shared_intermediate_size=2048, num_hidden_layers=32,
        num_attention_heads=12, num_key_value_heads=4, num_local_experts=0, num_experts_per_tok=0, mamba_n_heads=48,
        mamba_d_head=32, mamba_d_state=128, mamba_n_groups=1, max_position_embeddings=8192, tie_word_embeddings=True,
        layer_types=["attention" if layer in (10, 13, 17, 27) else "mamba" for layer in range(32)],
        position_embedding_type=None, embedding_multiplier=12.0, attention_multiplier=0.015625, bos_token_id=0,
        eos_token_id=0, pad_token_id=0),
    "mamba-130m": MambaConfig(
        vocab_size=50280, hidden_size=768, num_hidden_layers=24, state_size=16, bos_token_id=0, eos_token_id=0,
        pad_token_id=0),
    "mamba2-130m": Mamba2Config(
        vocab_size=50288, hidden_size=768, num_hidden_layers=24, state_size=128, num_heads=24, head_dim=64, n_groups=1,
        bos_token_id=0, eos_token_id=0, pad_token_id=0),
    "deepseek-v2-lite": DeepseekV2Config(  # 4 layers of 27; llama.cpp reads so few only with compressed queries
        vocab_size=49152, hidden_size=2048, intermediate_size=10944, moe_intermediate_size=1408, num_hidden_layers=4,
        num_attention_heads=16, num_key_value_heads=16, kv_lora_rank=512, q_lora_rank=1536, qk_rope_head_dim=64,
        qk_nope_head_dim=128, v_head_dim=128, n_routed_experts=64, n_shared_experts=2, num_experts_per_tok=6,
        first_k_dense_replace=1, n_group=1, topk_group=1, topk_method="greedy", norm_topk_prob=False,
        routed_scaling_factor=1.0, max_position_embeddings=8192, bos_token_id=0, eos_token_id=0, pad_token_id=0),
}


def write(folder: Path, shape: str) -> None:
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(SHAPES[shape], dtype=torch.bfloat16).save_pretrained(folder)
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE({"<|end|>": 0} | {piece: 1 + at for at, piece in enumerate(alphabet)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": "<|end|>"}))


def write_dequantized(folder: Path, file: Path) -> None:
    AutoModelForCausalLM.from_pretrained(
        file.parent, gguf_file=file.name, dtype=torch.bfloat16,
        quantization_config=GgufConfig(dequantize=True)).save_pretrained(folder)
    described = json.loads((config := folder / "config.json").read_text())
    config.write_text(json.dumps(described | {  # for readers of before transformers 5
        "rope_theta": described["rope_parameters"]["rope_theta"], "torch_dtype": described["dtype"]}))
    tokenizer, template = SlotwiseTokenizer.load(file), find_chat_template(file)
    tokenizer.inner.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps(
        {"tokenizer_class": "PreTrainedTokenizerFast", "chat_template": template, **tokenizer.special_tokens}))


def write_requantized(target: Path, file: Path, kind: str) -> None:
    """Writes a GGUF file with the matrices of `file` in another type, but those that stayed in float32."""
    reader, wanted = GGUFReader(file), GGMLQuantizationType[kind]
    fields = {name: field for name, field in reader.fields.items() if not name.startswith("GGUF.")}
    writer = GGUFWriter(target, fields.pop("general.architecture").contents())
    writer.add_file_type(LlamaFileType[f"MOSTLY_{kind}"])
    for name, field in fields.items():
        if name != "general.file_type":
            writer.add_key_value(name, field.contents(), field.types[0], field.types[-1] if field.types[1:] else None)
    for tensor in reader.tensors:
        values, type_ = tensor.data, tensor.tensor_type
        if len(tensor.shape) > 1 and type_ is not GGMLQuantizationType.F32 and not tensor.shape[0] % QUANT_BLOCK:
            values, type_ = quantize(dequantize(tensor.data, tensor.tensor_type), wanted), wanted
        writer.add_tensor(tensor.name, values, raw_dtype=type_)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("folder", type=Path, metavar="FOLDER|TARGET", help="where to write it")
    parser.add_argument("--shape", choices=SHAPES, default="smollm2-135m", help="of which model")
    parser.add_argument("--gguf", type=Path, metavar="FILE", help="write this file's weights instead")
    parser.add_argument("--quantize", choices=("Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1"), metavar="TYPE",
                        help="write a GGUF file with weights of this type")
    asked = parser.parse_args()
    if asked.quantize:
        write_requantized(asked.folder, asked.gguf, asked.quantize)
    elif asked.gguf:
        write_dequantized(asked.folder, asked.gguf)
    else:
        write(asked.folder, asked.shape)
    print(f"wrote {asked.gguf or asked.shape} to {asked.folder}")


if __name__ == "__main__":
    main()
