"""Maps architectures to the modules that read their configs."""

from __future__ import annotations

from collections.abc import Callable

from slotwise.model import llama, mistral, qwen2, qwen3
from slotwise.model.config import ModelConfig
from slotwise.model.errors import CheckpointError
from slotwise.model.fields import Fields

FAMILIES: dict[str, Callable[[Fields], ModelConfig]] = {
    "LlamaForCausalLM": llama.configure,
    "MistralForCausalLM": mistral.configure,
    "Qwen2ForCausalLM": qwen2.configure,
    "Qwen3ForCausalLM": qwen3.configure,
}


def configure(fields: Fields) -> ModelConfig:
    """The decoder a config.json describes.  Raises CheckpointError for unsupported architectures."""
    architectures = fields.texts("architectures")
    if not architectures or architectures[0] not in FAMILIES:
        named = architectures[0] if architectures else "none"
        raise CheckpointError(
            f"{fields.where}: architecture {named:.60} is not supported; these are: {', '.join(FAMILIES)}"
        )
    return FAMILIES[architectures[0]](fields)
