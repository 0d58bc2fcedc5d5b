"""Maps architectures to the modules that read their configs and compose their layers."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import NamedTuple

from slotwise.kernels.interface import Kernels
from slotwise.kernels.matrix import Format
from slotwise.model import gemma2, llama, mistral, qwen2, qwen3
from slotwise.model.config import ModelConfig
from slotwise.model.errors import CheckpointError
from slotwise.model.fields import Fields
from slotwise.model.layers.source import Listing, Source
from slotwise.model.network import Network


class Family(NamedTuple):
    """How a family's config is read, and what it is composed of."""

    configure: Callable[[Fields], ModelConfig]
    compose: Callable[[ModelConfig, Source], Network]
    model_types: tuple[str, ...] = ()  # that a config may name, by which transformers chooses its class; none: any


FAMILIES: dict[str, Family] = {
    "LlamaForCausalLM": Family(llama.configure, llama.compose, ("llama",)),
    "MistralForCausalLM": Family(mistral.configure, llama.compose, ("mistral", "ministral")),
    "Qwen2ForCausalLM": Family(qwen2.configure, llama.compose, ("qwen2",)),
    "Qwen3ForCausalLM": Family(qwen3.configure, llama.compose, ("qwen3",)),
    "Gemma2ForCausalLM": Family(gemma2.configure, gemma2.compose, ("gemma2",)),
}


def configure(fields: Fields) -> ModelConfig:
    """The decoder a config.json describes.

    Raises CheckpointError for unsupported architectures, and for a model_type of another one.
    """
    architectures = fields.texts("architectures")
    if not architectures or architectures[0] not in FAMILIES:
        named = architectures[0] if architectures else "none"
        raise CheckpointError(
            f"{fields.where}: architecture {named:.60} is not supported; these are: {', '.join(FAMILIES)}"
        )
    family = FAMILIES[architectures[0]]
    if family.model_types and fields.has("model_type") and fields.text("model_type") not in family.model_types:
        raise fields.error("model_type", f"must be {' or '.join(family.model_types)} with architecture "
                           f"{architectures[0]}, not {fields.text('model_type')!r:.40}")
    return family.configure(fields)


def compose(config: ModelConfig, source: Source) -> Network:
    """Reads and packs the layers of a model of any family."""
    return FAMILIES[config.architecture].compose(config, source)


def tensor_shapes(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Every tensor that a model with this config reads, by its name in the checkpoint."""
    listing = Listing(config.dtype)
    compose(config, listing)
    return listing.shapes


def weight_bytes(config: ModelConfig, kernels: Kernels, formats: Mapping[str, Format]) -> int:
    """Bytes of all weights of a model with this config, as packed for these kernels.

    `formats` are those of quantised matrices, by name.
    """
    return compose(config, Listing(config.dtype, kernels, formats)).bytes
