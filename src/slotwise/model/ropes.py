"""Reads the rotary embeddings of a config.json, in either of the two formats in use.

Since transformers 5 one object, `rope_parameters`, holds everything; before, `rope_theta` was a separate field and
`rope_scaling` held the rest.  Models whose layers rotate differently have such an object for each kind of layer.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import NamedTuple

from slotwise.model.fields import Fields
from slotwise.model.layers.rope import LinearRope, Llama3Rope, LongRope, Rope, YarnRope

ORIGINAL = "original_max_position_embeddings"


class _Context(NamedTuple):
    """What a scaling depends on beside its own fields."""

    theta: float
    original: int  # tokens of the context before it was extended
    longest: int  # tokens
    pairs: int  # that turn


def read_rope(
    fields: Fields, theta: float = 10_000.0, *, head_dim: int | None = None, aliases: Mapping[str, str] | None = None,
) -> Rope:
    """The one embedding of all layers.

    `theta` is the base where a config names none, `aliases` are further names of types.  `head_dim` is needed where
    a type has a factor for each pair, and for models that rotate a part of a head; None: there are none of either.

    Raises CheckpointError for variants that are not implemented.
    """
    name = "rope_scaling" if fields.section("rope_scaling").values else "rope_parameters"
    scaling = fields.section(name)
    if any(isinstance(value, dict) for value in scaling.values.values()):
        raise fields.error(name, "differs by layer type, which is not supported")
    if fields.has(ORIGINAL):
        scaling = Fields({**scaling.values, ORIGINAL: fields.values[ORIGINAL]}, scaling.where)
    base = scaling.number("rope_theta", default=fields.number("rope_theta", default=theta))
    return _read(fields, name, scaling, base, head_dim, aliases or {})


def read_ropes(fields: Fields, thetas: Mapping[str, float]) -> dict[str, Rope]:
    """The embedding of each kind of layer in `thetas`, with that base where `rope_parameters` names none.

    `rope_scaling`, from before transformers 5, is that of layers with full attention.  As in transformers, `truncate`
    has no effect in the object of a kind of layer.

    Raises CheckpointError for variants that are not implemented, and where `rope_parameters` is not by kind of layer.
    """
    by_kind, old = fields.section("rope_parameters"), fields.section("rope_scaling")
    for key in by_kind.values:
        if key not in thetas:
            known = ", ".join(thetas)
            raise fields.error("rope_parameters", f"must have an object for each of {known}, not {key!r:.40}")
    ropes = {}
    for kind, theta in thetas.items():
        scaling = by_kind.section(kind)
        if kind == "full_attention" and old.values:
            scaling = Fields({**scaling.values, **old.values}, f"{fields.where}, rope_scaling")
        scaling = Fields({name: value for name, value in scaling.values.items() if name != "truncate"}, scaling.where)
        ropes[kind] = _read(fields, "rope_parameters", scaling, scaling.number("rope_theta", default=theta), None, {})
    return ropes


def _read(
    fields: Fields, name: str, scaling: Fields, theta: float, head_dim: int | None, aliases: Mapping[str, str],
) -> Rope:
    share = scaling.number("partial_rotary_factor", default=fields.number("partial_rotary_factor", default=1.0))
    rotated = int((head_dim or 0) * share)
    source = scaling if scaling.has("partial_rotary_factor") else fields
    if share != 1.0 and head_dim is None:
        raise source.error("partial_rotary_factor", "must be 1: rotating part of a head is not supported here")
    if share > 1.0 or (head_dim and (rotated % 2 or not rotated)):
        raise source.error("partial_rotary_factor",
                           f"must rotate an even number of {head_dim} dimensions, not {share!r:.40}")
    kind = scaling.text("rope_type", default=scaling.text("type", default="default"))
    kind = aliases.get(kind, kind)
    if kind not in _READERS:
        raise fields.error(name, f"type {kind!r:.40} is not supported; these are: {', '.join(_READERS)}")
    longest = fields.integer("max_position_embeddings")
    original = scaling.integer(ORIGINAL, default=longest)
    return _READERS[kind](scaling, _Context(theta, original, longest, rotated // 2), share)


def _read_plain(scaling: Fields, context: _Context, share: float) -> Rope:
    return Rope(context.theta, share=share)


def _read_dynamic(scaling: Fields, context: _Context, share: float) -> Rope:
    """Dynamic NTK scaling begins behind `max_position_embeddings`, and no position is served there."""
    scaling.number("factor")
    return Rope(context.theta, share=share)


def _read_linear(scaling: Fields, context: _Context, share: float) -> Rope:
    return LinearRope(context.theta, scaling.number("factor"), share=share)


def _read_llama3(scaling: Fields, context: _Context, share: float) -> Rope:
    low = scaling.number("low_freq_factor")
    high = scaling.number("high_freq_factor", minimum=low)
    return Llama3Rope(context.theta, scaling.number("factor"), low, high, context.original, share=share)


def _read_yarn(scaling: Fields, context: _Context, share: float) -> Rope:
    factor = scaling.number("factor")
    if context.theta <= 1:
        raise scaling.error("rope_theta", f"must be above 1 with yarn, not {context.theta!r:.40}")
    sharper = _mscale(factor, 1.0)
    if scaling.has("mscale") and scaling.has("mscale_all_dim"):
        sharper = _mscale(factor, scaling.number("mscale")) / _mscale(factor, scaling.number("mscale_all_dim"))
    return YarnRope(
        context.theta, factor, context.original,
        beta_fast=scaling.number("beta_fast", default=32.0),
        beta_slow=scaling.number("beta_slow", default=1.0),
        attention_factor=scaling.number("attention_factor", default=sharper),
        truncate=scaling.flag("truncate", default=not scaling.is_null("truncate")),  # null: as in transformers
        share=share,
    )


def _mscale(factor: float, weight: float) -> float:
    return 0.1 * weight * math.log(max(factor, 1.0)) + 1.0


def _read_longrope(scaling: Fields, context: _Context, share: float) -> Rope:
    if not context.pairs:
        raise scaling.error("rope_type", "longrope is not supported in this architecture")
    factor = scaling.number("factor", default=context.longest / context.original)
    sharper = 1.0
    if factor > 1 and context.original > 1:
        sharper = math.sqrt(1 + math.log(factor) / math.log(context.original))
    short, long = (_factors(scaling, name, context.pairs) for name in ("short_factor", "long_factor"))
    return LongRope(context.theta, short, long, context.original,
                    scaling.number("attention_factor", default=sharper), share=share)


def _factors(scaling: Fields, name: str, pairs: int) -> tuple[float, ...]:
    factors = scaling.numbers(name)
    if len(factors) != pairs:
        raise scaling.error(name, f"must have {pairs} numbers, one for each pair that turns, not {len(factors)}")
    return factors


_READERS: dict[str, Callable[[Fields, _Context, float], Rope]] = {
    "default": _read_plain, "linear": _read_linear, "dynamic": _read_dynamic, "llama3": _read_llama3,
    "yarn": _read_yarn, "longrope": _read_longrope}
