"""Keys of a GGUF file that no reader asks for: each has a value that changes nothing, or is refused by name."""

from __future__ import annotations

import math
from collections.abc import Sequence

from slotwise.gguf.metadata import Metadata
from slotwise.gguf.model import TYPE
from slotwise.gguf.reader import ALIGNMENT
from slotwise.model.config import ModelConfig
from slotwise.model.generation import NOT_OBEYED, OF_OTHERS, SAMPLING
from slotwise.model.gguf.keys import ARCHITECTURE, Keys
from slotwise.model.layers.rope import YarnRope

ANY = (  # keys without effect here, whatever they say
    "tensor_data_layout", "rope.scaling.finetuned", "attention.layer_norm_epsilon",  # norms are RMS norms
    "expert_feed_forward_length",  # the shapes of tensors are compared with the config
    "pooling_type",  # `compose/pooling.py` reads it
)  # fmt: skip
OF_YARN = "rope.scaling.yarn_beta_"
OF_EXPERTS = "expert_"
GENERAL = "general."
OBEYED = {ARCHITECTURE, TYPE, ALIGNMENT, *SAMPLING.values(), *NOT_OBEYED, *OF_OTHERS}
DESCRIPTIVE = {GENERAL + name for name in (
    "name", "author", "version", "organization", "finetune", "basename", "description", "quantized_by", "size_label",
    "license", "url", "doi", "uuid", "repo_url", "tags", "languages", "datasets", "file_type")}
DESCRIPTIONS = tuple(f"{GENERAL}{name}." for name in ("license", "source", "base_model", "dataset"))
QUANTIZATION = f"{GENERAL}quantization_version"
BLOCKS_VERSION = 2  # of the layouts in `quantization/gguf_blocks.py`
CLOSE = 1e-6  # relative, of float32


def check_unread(keys: Keys, config: ModelConfig) -> None:
    """Raises CheckpointError for a key that nothing has read and that may change the answer."""
    neutral = _neutral(config)
    for key in keys.unread():
        if key in ANY or key.startswith(OF_YARN) or (config.mixture is None and key.startswith(OF_EXPERTS)):
            continue
        if key == "rope.freq_base_swa" and not any(config.windows):
            continue
        allowed, values = neutral.get(key, ()), keys.values(key)
        if not all(_is_among(value, allowed) for value in values):
            shown = f"{values[0]!r:.40}" if len(values) == 1 else "set"
            raise keys.error(key, f"is {shown}, which is not supported in this architecture")


def check_general(metadata: Metadata) -> None:
    """Raises CheckpointError for a key beside the architecture's that is not known to change nothing."""
    for key in metadata.keys(GENERAL):
        if key in OBEYED or key in DESCRIPTIVE or key.startswith(DESCRIPTIONS):
            continue
        if key != QUANTIZATION:
            raise metadata.error(key, "is set, and what it asks for is not known")
        if (version := metadata.integer(key)) != BLOCKS_VERSION:
            raise metadata.error(key, f"is {version}, and only blocks of version {BLOCKS_VERSION} are supported")


def _neutral(config: ModelConfig) -> dict[str, tuple[object, ...]]:
    """The values of keys that say what is done anyway."""
    head_dim, rope = config.head_dim, config.ropes[0]
    return {
        "attention.causal": (True,),
        "attention.scale": (0, config.attention_scale or head_dim**-0.5),
        "attention.sliding_window": (0,) if not any(config.windows) else (),
        "attention.key_length_swa": (head_dim,), "attention.value_length_swa": (head_dim,),
        "attention.clamp_kqv": (0,), "attention.max_alibi_bias": (0,), "attention.output_scale": (0, 1),
        "attention.temperature_scale": (0,), "attention.shared_kv_layers": (0,),
        "attn_logit_softcapping": (0,), "final_logit_softcapping": (0,), "router_logit_softcapping": (0,),
        "logit_scale": (0, 1), "embedding_scale": (0, 1), "residual_scale": (0, 1),
        "embedding_length_out": (config.hidden_size,), "embedding_length_per_layer_input": (0,),
        "use_parallel_residual": (False,), "nextn_predict_layers": (0,), "n_deepstack_layers": (0,),
        "leading_dense_block_count": (0,), "interleave_moe_layer_step": (0, 1), "moe_every_n_layers": (0, 1),
        "expert_shared_count": (0,), "expert_shared_feed_forward_length": (0,),
        "expert_group_count": (0, 1), "expert_group_used_count": (0, 1),
        "expert_weights_scale": (0, 1), "expert_weights_norm": (_is_normalised(config),),
        "expert_gating_func": (0, 1, 3) if _is_normalised(config) else (0, 1),  # softmax, before or after the choice
        "rope.dimension_count_swa": (rope.rotated(head_dim),), "rope.dimension_sections": (0,),
        "rope.freq_base_swa": (rope.theta,),
        "rope.scaling.alpha": (0,), "rope.scaling.attn_factor": (1,), "rope.scaling.factor": (1,),
        "rope.scale_linear": (1,), "rope.scaling.yarn_attn_factor": (1,), "rope.scaling.yarn_log_multiplier": (0,),
        "rope.scaling.yarn_ext_factor": (-1, 1) if isinstance(rope, YarnRope) else (-1, 0),
    }


def _is_normalised(config: ModelConfig) -> bool:
    return config.mixture is not None and config.mixture.routing.is_normalised


def _is_among(value: object, allowed: Sequence[object]) -> bool:
    if isinstance(value, (bool, str)):
        return value in allowed
    return isinstance(value, (int, float)) and any(
        isinstance(each, (int, float)) and not isinstance(each, bool) and math.isclose(value, each, rel_tol=CLOSE)
        for each in allowed)
