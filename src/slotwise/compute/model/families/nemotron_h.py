"""Nemotron-H (NVIDIA, 2025): layers of one part each, which is Mamba-2's layer, attention without positions, or an MLP;
in Nemotron 3 (NVIDIA, 2025) also a mixture of experts without gates, chosen as DeepSeek-V3's.

    h += part(norm(h))

Here a layer is one that has a cache, with the MLPs behind it.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

from slotwise.compute.kernels.interface import PlainActivation, Routing, StateSpaceShape
from slotwise.compute.model.families.mamba2 import read_groups
from slotwise.compute.model.fields import Fields
from slotwise.compute.model.layers.attention import Attention, LayerStep
from slotwise.compute.model.layers.embedding_and_head import EndOptions
from slotwise.compute.model.layers.mamba2 import Mamba2
from slotwise.compute.model.layers.mlp import NoMLP, PlainMLP
from slotwise.compute.model.layers.norm import NormOptions, ResidualStream, RMSNorm
from slotwise.compute.model.layers.rank_weights import WeightSource
from slotwise.compute.model.layers.rope import NoRope
from slotwise.compute.model.model_config import (
    FULL,
    LINEAR,
    MAX_EXPERT_SIZE,
    MAX_LAYERS,
    OLDER,
    ConfigDefaults,
    MixtureConfig,
    ModelConfig,
    RecurrentConfig,
    read_common,
    read_grouped_mixture,
)
from slotwise.compute.model.network import (
    MLP,
    DecoderLayer,
    ExpertNames,
    Network,
    TokenMixer,
    read_experts,
    read_network,
)

PLAIN, EXPERTS = "mlp", "moe"
PATTERN = {"M": LINEAR, "*": FULL, "-": PLAIN, "E": EXPERTS}  # of `hybrid_override_pattern`
KINDS = "layers_block_type"
PARTS = "up_proj", "down_proj"
NAMES = ExpertNames(
    "mixer.gate", "mixer.experts", PARTS, shared="mixer.shared_experts", shared_parts=PARTS,
    latent=("mixer.fc1_latent_proj", "mixer.fc2_latent_proj"), correction="mixer.gate.e_score_correction_bias")
Activation = Literal["relu2", "silu", "relu", "gelu"]
ACTIVATIONS: tuple[Activation, ...] = ("relu2", "silu", "relu", "gelu")


@dataclass(frozen=True, slots=True)
class NemotronHConfig:
    """What the checkpoint calls the layers.

    Args:
        firsts: the number in the checkpoint of each layer's part with a cache.
        behind: the numbers of the MLPs behind it.
        with_experts: those of them that are mixtures.
    """

    firsts: tuple[int, ...]
    behind: tuple[tuple[int, ...], ...]
    with_experts: frozenset[int]
    activation: Activation


def configure(fields: Fields) -> ModelConfig:
    kinds = _read_kinds(fields)
    firsts = [number for number, kind in enumerate(kinds) if kind in (LINEAR, FULL)]
    if not firsts or firsts[0]:
        raise fields.error(KINDS, f"must begin with {LINEAR} or {FULL}, not {kinds[0]}")
    behind = [tuple(range(first + 1, end)) for first, end in zip(firsts, [*firsts[1:], len(kinds)], strict=True)]
    for name in ("mamba_hidden_act",):
        if (found := fields.text(name, default="silu")) != "silu":
            raise fields.error(name, f"must be silu, not {found!r:.40}")
    activation = fields.text("mlp_hidden_act", default="relu2")
    own = next((each for each in ACTIVATIONS if each == activation), None)
    if own is None:
        raise fields.error("mlp_hidden_act", f"must be one of {', '.join(ACTIVATIONS)}, not {activation!r:.40}")
    absent: dict[str, object] = {
        "hidden_size": 4096, "intermediate_size": 21504, "num_attention_heads": 32, "max_position_embeddings": 4096}
    known = {name: value for name, value in fields.values.items() if value is not None}
    merged = Fields({**absent, **known, "num_hidden_layers": len(firsts)}, fields.where)
    config = read_common(merged, ConfigDefaults(num_kv_heads=8, head_dim=128), ropes=(NoRope(),) * len(firsts))
    states = tuple(kinds[first] == LINEAR for first in firsts)
    return replace(
        config, norm_eps=fields.number("layer_norm_epsilon", default=1e-5), mlp_bias=fields.flag("mlp_bias"),
        recurrent=_read_recurrent(fields, states) if any(states) else None,
        mixture=_read_mixture(fields, kinds, behind, own),
        own=NemotronHConfig(tuple(firsts), tuple(behind), _numbers(kinds, EXPERTS), own))


def _numbers(kinds: Sequence[str], kind: str) -> frozenset[int]:
    return frozenset(number for number, each in enumerate(kinds) if each == kind)


def _read_mixture(
    fields: Fields, kinds: Sequence[str], behind: Sequence[Sequence[int]], activation: Activation,
) -> MixtureConfig | None:
    if EXPERTS not in kinds:
        return None
    mixture = read_grouped_mixture(fields, len(behind), Routing(8, 2, is_normalized=True), intermediate_size=7688)
    return replace(
        mixture,
        activation=PlainActivation(activation),
        layers=tuple(any(kinds[number] == EXPERTS for number in numbers) for numbers in behind),
        shared_intermediate_size=fields.integer(
            "moe_shared_expert_intermediate_size", default=7688, maximum=MAX_EXPERT_SIZE),
        latent_size=fields.integer("moe_latent_size", default=0, minimum=0))


def _read_kinds(fields: Fields) -> list[str]:
    """The kind of each of the checkpoint's layers."""
    name = KINDS if fields.has(KINDS) else "layer_types"
    kinds = [OLDER.get(kind, kind) for kind in fields.texts(name)]
    if not kinds:
        pattern = fields.text("hybrid_override_pattern", default="ME*-")
        kinds = [PATTERN.get(letter, letter) for letter in pattern]
    if unknown := set(kinds) - set(PATTERN.values()):
        raise fields.error(KINDS, f"holds {min(unknown)!r:.40}, which is not supported")
    if not 0 < len(kinds) <= MAX_LAYERS:
        raise fields.error(KINDS, f"must name 1 to {MAX_LAYERS} layers")
    return kinds


def _read_recurrent(fields: Fields, states: tuple[bool, ...]) -> RecurrentConfig:
    def read(name: str, older: str, default: int, maximum: int = 1 << 12) -> int:
        return fields.integer(older if fields.has(older) else name, default=default, maximum=maximum)

    heads = fields.integer("mamba_num_heads", default=128, maximum=1 << 16)
    groups_name = "mamba_n_groups" if fields.has("mamba_n_groups") else "n_groups"
    groups = read_groups(fields, groups_name, heads, 8)
    conv_bias = "mamba_conv_bias" if fields.has("mamba_conv_bias") else "use_conv_bias"
    least = "mamba_dt_min" if fields.has("mamba_dt_min") else "time_step_min"
    shape = StateSpaceShape(
        heads, fields.integer("mamba_head_dim", default=64, maximum=1 << 12), groups,
        fields.integer("ssm_state_size", default=128, maximum=1 << 12), read("conv_kernel", "mamba_d_conv", 4, 64),
        groups, least_step=fields.number(least, default=0.001), largest_step=math.inf)
    return RecurrentConfig(shape, states, has_bias=fields.flag("use_bias"),
                           has_convolution_bias=fields.flag(conv_bias, default=True))


class NemotronHLayer(DecoderLayer):
    """A part with a cache, and the MLPs behind it, each with a norm of its own."""

    attention: TokenMixer

    def __init__(self, config: ModelConfig, source: WeightSource, index: int) -> None:
        own, hidden, norms = config.own, config.hidden_size, NormOptions(config.norm_eps)
        assert isinstance(own, NemotronHConfig)
        at, recurrent = f"model.layers.{own.firsts[index]}", config.recurrent
        self.attention_norm = RMSNorm(source, f"{at}.norm", hidden, norms)
        if recurrent is not None and recurrent.layers[index]:
            assert isinstance(recurrent.shape, StateSpaceShape)
            self.attention = Mamba2(
                source, f"{at}.mixer", recurrent.shape, hidden, config.norm_eps, bias=recurrent.has_bias,
                convolution_bias=recurrent.has_convolution_bias)
        else:
            self.attention = Attention(
                source, f"{at}.mixer", config.attention_shape(index), config.ropes[index], hidden)
        self.mlp = NoMLP()
        self.behind = _Behind([_NormedMLP(config, own, source, number) for number in own.behind[index]])

    @property
    def mlps(self) -> tuple[MLP, ...]:
        return tuple([part.mlp for part in self.behind.parts])

    def forward(self, h: ResidualStream, step: LayerStep) -> None:
        h += self.attention(self.attention_norm(h), step)
        for part in self.behind.parts:
            h += part.mlp(part.norm(h))


class _NormedMLP:
    """An MLP and the norm before it."""

    def __init__(self, config: ModelConfig, own: NemotronHConfig, source: WeightSource, number: int) -> None:
        at = f"model.layers.{number}"
        self.norm = RMSNorm(source, f"{at}.norm", config.hidden_size, NormOptions(config.norm_eps))
        self.mlp: MLP = read_experts(config, source, at, NAMES) if number in own.with_experts else PlainMLP(
            source, f"{at}.mixer", PARTS, (config.hidden_size, config.intermediate_size), activation=own.activation,
            bias=config.mlp_bias)
        self.bytes = self.norm.bytes + self.mlp.bytes


class _Behind:
    """The MLPs behind a part with a cache."""

    def __init__(self, parts: Sequence[_NormedMLP]) -> None:
        self.parts = parts
        self.bytes = sum(part.bytes for part in parts)


def compose(config: ModelConfig, source: WeightSource) -> Network:
    ends, norms = EndOptions(config.tie_word_embeddings), NormOptions(config.norm_eps)
    return read_network(config, source, functools.partial(NemotronHLayer, config, source), ends, norms)
