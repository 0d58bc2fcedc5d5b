"""What a family builds: the layers of a decoder-only transformer, in order, and which of them each stage holds.

    h += attention(norm(h))
    h += mlp(norm(h))

is Llama's layer (`families/llama.py`).  A family whose layer differs has a class with a `forward` of its own.

Stages read about as many bytes of weights per token as each other; the first also holds the head:

    4 layers, a head as large as two of them    | head 0 | 1 2 3 |
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import ClassVar, NamedTuple, Protocol

from torch import Tensor

from slotwise.compute.kernels.group import PipelineStage
from slotwise.compute.kernels.interface import PlainActivation
from slotwise.compute.model.layers.attention import LayerStep
from slotwise.compute.model.layers.embedding_and_head import EndOptions, Ends, PooledHead, read_dense, read_ends
from slotwise.compute.model.layers.linear import Linear
from slotwise.compute.model.layers.mlp import (
    SPLIT,
    GatedMLP,
    MixtureOfExperts,
    PlainMLP,
    SharedExpert,
    separate_experts,
    stacked_experts,
)
from slotwise.compute.model.layers.norm import LayerNormOptions, NoNorm, Norm, NormOptions, ResidualStream
from slotwise.compute.model.layers.rank_weights import WeightSource
from slotwise.compute.model.layers.rope import Rope
from slotwise.compute.model.model_config import ModelConfig
from slotwise.errors import CheckpointError


class TokenMixer(Protocol):
    """What lets a token see earlier tokens: attention, or a recurrent state."""

    bytes: int  # of the weights, as packed

    @property
    def ropes(self) -> tuple[Rope, ...]:
        """The embeddings whose rotary tables it reads."""
        ...

    def __call__(self, x: Tensor, step: LayerStep) -> Tensor:
        """`[tokens, hidden] -> [kept tokens, hidden]`."""
        ...

    def store(self, x: Tensor, step: LayerStep) -> Tensor:
        """Write to the cache what later tokens need of `x [tokens, hidden]`, and compute no more than that."""
        ...


class MLP(Protocol):
    """`[tokens, hidden] -> [tokens, hidden]`."""

    bytes: int  # of the weights, as packed
    token_bytes: int  # of the weights that one token reads

    def __call__(self, x: Tensor) -> Tensor: ...


class DecoderLayer:
    """One layer.  A family's class reads its parts, under the names of the checkpoint, and runs them in `forward`."""

    attention_norm: Norm
    attention: TokenMixer
    mlp: MLP

    live_states: ClassVar[int] = 3  # the most hidden states of a token that `forward` holds at a time

    def forward(self, h: ResidualStream, step: LayerStep) -> None:
        """Add to the residual stream what this layer computes."""
        raise NotImplementedError

    @property
    def mlps(self) -> tuple[MLP, ...]:
        """All that computes token by token between norms."""
        return (self.mlp,)

    @property
    def bytes(self) -> int:
        """Bytes of the weights, as packed."""
        return sum(part.bytes for name, part in vars(self).items() if not name.startswith("_"))


class StreamStart(Protocol):
    """What a family computes before its first layer, and keeps in a stream of its own."""

    @property
    def bytes(self) -> int:
        """Of the weights, as packed."""
        ...

    @property
    def token_bytes(self) -> int:
        """Of the weights that one token reads."""
        ...

    def __call__(self, token_ids: Tensor, x: Tensor) -> ResidualStream:
        """The stream of tokens `[tokens]` whose embedding is `x [tokens, hidden]`."""
        ...


@dataclass(frozen=True, slots=True)
class Network:
    """A model, or one of its stages: the first has the ends, the last has the norm after all layers."""

    ends: Ends | None
    layers: Sequence[DecoderLayer]
    norm: Norm
    classifier: PooledHead | None = None  # None: the model has no such head, or this is not the first stage
    dense: Sequence[PooledHead] = ()  # the modules that vectors pass, on the first stage
    start: StreamStart | None = None  # None: the stream is the embedding

    @property
    def bytes(self) -> int:
        """Bytes of the weights, as packed; a tied head counts in addition to the embedding."""
        ends = 0 if self.ends is None else self.ends.embedding.bytes + self.ends.embedding.more_bytes
        ends += 0 if self.ends is None or self.ends.head is None else self.ends.head.bytes
        ends += sum(part.bytes for part in ([self.classifier] if self.classifier else []) + [*self.dense])
        start = 0 if self.start is None else self.start.bytes
        layers = {id(layer): layer.bytes for layer in self.layers}  # of which several may be one
        return ends + start + sum(layers.values()) + self.norm.bytes

    @property
    def token_bytes(self) -> int:
        """Bytes of the weights that a step of one token reads: not the embedding, nor experts that are not chosen."""
        unread = sum(part.bytes - part.token_bytes for layer in self.layers for part in layer.mlps)
        unread += 0 if self.start is None else self.start.bytes - self.start.token_bytes
        return self.bytes - (0 if self.ends is None else self.ends.embedding.bytes) - unread

    @property
    def live_states(self) -> int:
        """The most hidden states of a token that are in memory at a time."""
        return max(layer.live_states for layer in self.layers)


def read_network(
    config: ModelConfig, source: WeightSource, layer: Callable[[int], DecoderLayer], ends: EndOptions,
    norms: NormOptions | LayerNormOptions | None,
) -> Network:
    """Reads the stage of a model that `source` is for; `layer(index)` reads one layer.

    `norms` are those of the norm after all layers; None: hidden states are not normed.
    """
    stage = source.group.pipe.stage
    ends = replace(ends, has_head=config.has_head)
    read = read_ends(source, config.vocab_size, config.hidden_size, ends) if stage.is_first else None
    layers = [layer(index) for index in layers_of(config, stage)]
    norm: Norm = NoNorm()
    if norms is not None and stage.is_last:
        norm = norms.read(source, "model.norm", config.hidden_size)
    score = PooledHead((Linear(source, {"score": config.num_labels}, config.hidden_size, is_exact=True), "")) if (
        config.num_labels and stage.is_first) else None
    return Network(read, layers, norm, score, [read_dense(module, source) for module in config.dense if stage.is_first])


class ExpertNames(NamedTuple):
    """What a family calls the tensors of a mixture, within a layer."""

    router: str = "mlp.gate"
    experts: str = "mlp.experts"
    # Of each expert: gate, what it gates, and down; without gates the two products.
    parts: tuple[str, ...] = SPLIT
    # Two tensors of all experts: gates and ups, and down; (): each expert has its own.
    stacked: tuple[str, str] | tuple[()] = ()
    # Each matrix in them is `[inputs, outputs]`.
    are_transposed: bool = False
    shared: str = "mlp.shared_experts"
    # Of the shared expert; two where gates and what they gate are one weight.
    shared_parts: tuple[str, ...] = SPLIT
    # The products before and behind the experts, where they do not compute on hidden states.
    latent: tuple[str, str] = ("", "")
    # Of the shared expert, one output; "": it is not weighted.
    shared_gate: str = ""
    # Its name, a number for each expert; "": choices are not corrected.
    correction: str = ""
    # Those of a checkpoint whose experts are not split are `[1, experts]`.
    is_correction_row: bool = False


def read_experts(config: ModelConfig, source: WeightSource, at: str, names: ExpertNames) -> MixtureOfExperts:
    """The experts of the layer called `at`."""
    mixture, hidden = config.mixture_of_experts, config.hidden_size
    inputs, activation, routing, shared, latent = (
        mixture.latent_size or hidden, mixture.activation, mixture.routing, None, None)
    sizes = inputs, mixture.intermediate_size
    router = Linear(source, {f"{at}.{names.router}": routing.num_experts}, hidden, is_exact=True)
    if names.correction:
        shape: tuple[int, ...] = (routing.num_experts,)
        if names.is_correction_row and not mixture.are_split:
            shape = (1, *shape)
        routing = replace(routing, correction=source.floats({f"{at}.{names.correction}": shape}).flatten())
    if mixture.shared_intermediate_size:
        gate = Linear(source, {f"{at}.{names.shared_gate}": 1}, hidden, is_exact=True) if names.shared_gate else None
        shared = SharedExpert(_read_shared(config, source, f"{at}.{names.shared}", names.shared_parts), gate)
    if mixture.latent_size:
        before, behind = (f"{at}.{each}" for each in names.latent)
        latent = (Linear(source, {before: inputs}, hidden, bias=config.mlp_bias),
                  Linear(source, {behind: hidden}, inputs, bias=config.mlp_bias))
    experts, count = f"{at}.{names.experts}", routing.num_experts
    if names.stacked and not mixture.are_split:
        stacked = f"{at}.{names.stacked[0]}", f"{at}.{names.stacked[1]}"
        weights = stacked_experts(source, stacked, sizes, count, are_transposed=names.are_transposed)
    else:
        weights = separate_experts(source, experts, names.parts, sizes, count)
    return MixtureOfExperts(
        router, weights, sizes, routing, source, activation=activation, shared=shared, latent=latent)


def _read_shared(config: ModelConfig, source: WeightSource, name: str, parts: tuple[str, ...]) -> GatedMLP | PlainMLP:
    mixture = config.mixture_of_experts
    sizes, activation = (config.hidden_size, mixture.shared_intermediate_size), mixture.activation
    if isinstance(activation, PlainActivation):
        up, down = parts
        return PlainMLP(source, name, (up, down), sizes, activation=activation.name, bias=config.mlp_bias,
                        is_partial=True)
    if mixture.are_split:
        parts = (*SPLIT[:-1], parts[-1])
    return GatedMLP(source, name, sizes, bias=config.mlp_bias, is_fused=len(parts) < len(SPLIT), is_partial=True,
                    names=parts)


def refuse_stages(source: WeightSource, what: str) -> None:
    """Raises CheckpointError where layers are divided into stages, none of which has all that `what` needs."""
    if source.group.pipe.stage.total > 1:
        raise CheckpointError(f"pipeline_parallel_size {source.group.pipe.stage.total}: {what} needs all layers in one "
                              "stage: serve this model with pipeline_parallel_size 1")


def caches_of(config: ModelConfig, stage: PipelineStage) -> range:
    """The caches of a stage: those of its layers and, where there is one stage, the second ones of layers with two."""
    layers = layers_of(config, stage)
    return layers if stage.total > 1 else range(len(layers) + len(config.doubled_layers))


def layers_of(config: ModelConfig, stage: PipelineStage) -> range:
    """The layers of a stage, at least one.

    Raises:
        CheckpointError: the model has fewer layers than there are stages.
    """
    number, count = config.num_layers, stage.total
    if count == 1:
        return range(number)
    if number < count:
        raise CheckpointError(f"pipeline_parallel_size {count}: the model has {number} layers, fewer than stages: "
                              "lower it")
    head = config.vocab_size * config.hidden_size / (config.layer_weights / number)  # in layers
    ends = [0]
    for index in range(1, count):
        even = round(index * (number + head) / count - head)
        ends.append(min(max(even, ends[-1] + 1), number - (count - index)))
    return range(*[*ends, number][stage.number : stage.number + 2])
