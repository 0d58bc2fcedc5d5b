"""The rotary embedding of a GGUF file, as `rope_parameters` of a config.json."""

from __future__ import annotations

import math
from math import prod

import torch

from slotwise.model.errors import CheckpointError
from slotwise.model.gguf.keys import Fields, Keys

MAX_THETA = 1e12
MIN_FACTOR, MAX_FACTOR = 0.01, 1e6  # of a scaling
LONG, SHORT = "rope_factors_long", "rope_factors_short"  # tensors of LongRoPE


def read_rope(keys: Keys, context: int, head_dim: int) -> Fields:
    """`context` is the longest, in tokens."""
    rope: Fields = {"rope_type": "default", "rope_theta": theta(keys, "rope.freq_base", 10_000.0)}
    rotated = keys.integer("rope.dimension_count", default=head_dim)
    if rotated != head_dim:
        rope["partial_rotary_factor"] = rotated / head_dim
    original = {"original_max_position_embeddings": keys.integer("rope.scaling.original_context_length",
                                                                 default=context)}
    if factors := read_factors(keys, LONG, rotated // 2):
        if (kind := keys.text("rope.scaling.type", "longrope")) != "longrope":
            raise keys.error("rope.scaling.type", f"is {kind!r:.40}, but the file has tensors of longrope")
        return rope | original | {
            "rope_type": "longrope", "long_factor": [*factors],
            "short_factor": [*read_factors(keys, SHORT, rotated // 2)],
            "attention_factor": keys.number("rope.scaling.attn_factor", 1.0, maximum=MAX_FACTOR)}
    is_scaled = keys.has("rope.scale_linear") or keys.has("rope.scaling.factor")
    kind = keys.text("rope.scaling.type", "linear" if is_scaled else "none")  # as in llama.cpp
    if kind == "none":
        return rope
    older = keys.number("rope.scale_linear", 1.0, minimum=MIN_FACTOR, maximum=MAX_FACTOR)
    factor = keys.number("rope.scaling.factor", older, minimum=MIN_FACTOR, maximum=MAX_FACTOR)
    if kind == "linear":
        return rope | {"rope_type": "linear", "factor": factor}
    if kind != "yarn":
        raise keys.error("rope.scaling.type", f"{kind!r:.40} is not supported; these are: none, linear, yarn")
    length = math.log(max(factor, 1.0))
    sharper = (0.1 * length + 1.0) / (
        0.1 * length * keys.number("rope.scaling.yarn_log_multiplier", 0.0, minimum=-1.0, maximum=MAX_FACTOR) + 1.0)
    # The converter writes a checkpoint's `attention_factor` there, which is all of it.
    sharper = keys.number("rope.scaling.yarn_attn_factor", sharper, maximum=MAX_FACTOR)
    return rope | original | {
        "rope_type": "yarn", "factor": factor,
        "attention_factor": sharper * keys.number("rope.scaling.attn_factor", 1.0, maximum=MAX_FACTOR),
        "beta_fast": keys.number("rope.scaling.yarn_beta_fast", 32.0, maximum=MAX_FACTOR),
        "beta_slow": keys.number("rope.scaling.yarn_beta_slow", 1.0, maximum=MAX_FACTOR)}


def theta(keys: Keys, key: str, default: float) -> float:
    """A base of frequencies."""
    return keys.number(key, default, minimum=1.0, maximum=MAX_THETA)


def read_factors(keys: Keys, name: str, pairs: int) -> tuple[float, ...]:
    """A tensor of what the frequencies of each pair of dimensions are divided by; none where a file has it not."""
    stored = f"{name}.weight"
    if stored not in keys.tensors:
        return ()
    path, tensor = keys.tensors[stored]
    where = f"{path}: tensor {stored}"
    if tensor.type.name != "F32" or prod(tensor.shape) != pairs:
        raise CheckpointError(f"{where} must be {pairs} numbers of F32, half of what turns of a head, not "
                              f"{list(tensor.shape)} of {tensor.type.name}")
    with path.open("rb") as file:
        file.seek(tensor.start)
        factors = torch.frombuffer(bytearray(file.read(tensor.end - tensor.start)), dtype=torch.float32)
    if not (factors.isfinite().all() and (factors >= MIN_FACTOR).all() and (factors <= MAX_FACTOR).all()):
        raise CheckpointError(f"{where} must hold numbers from {MIN_FACTOR} to {MAX_FACTOR:g}")
    return tuple(factors.tolist())
