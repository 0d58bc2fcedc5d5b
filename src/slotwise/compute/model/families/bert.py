"""BERT (Devlin et al., 2018) and encoders of its shape, whose tokens attend to both sides and whose sums are normed.

    h = norm(embedding(tokens) + types + positions)
    h = norm(h + attention(h)),  h = norm(h + down(gelu(up(h))))
    labels = classifier(tanh(pooler(h[0])))

RoBERTa (Liu et al., 2019), XLM-R (Conneau et al., 2019) and CamemBERT have the same layers, a table of positions that
begins behind that of the padding, and another head.  DistilBERT (Sanh et al., 2019) and ELECTRA (Clark et al., 2020)
differ in names and heads; ELECTRA's smaller models and ALBERT (Lan et al., 2019), whose layers are one, have smaller
embeddings.  MPNet (Song et al., 2020) adds a bias to scores by the distance of query and key.  NomicBERT (Nussbaum et
al., 2024) and GTE (Zhang et al., "mGTE", 2024) have rotary positions and gated MLPs.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from torch import Tensor

from slotwise.compute.model.families.gpt2 import NO_ROPE, table_ends
from slotwise.compute.model.fields import Fields
from slotwise.compute.model.layers.attention import Attention, AttentionOptions, LayerStep
from slotwise.compute.model.layers.embedding_and_head import EndOptions, PooledHead, learned_positions
from slotwise.compute.model.layers.linear import Linear
from slotwise.compute.model.layers.mlp import GatedMLP, PlainMLP
from slotwise.compute.model.layers.norm import LayerNormOptions, ResidualStream
from slotwise.compute.model.layers.rank_weights import WeightSource
from slotwise.compute.model.layers.rope import Rope
from slotwise.compute.model.model_config import (
    MAX_LAYERS,
    OF_TOKENIZER,
    ConfigDefaults,
    ModelConfig,
    read_activation,
    read_common,
)
from slotwise.compute.model.network import MLP, DecoderLayer, Network, read_network

DEFAULTS = ConfigDefaults(norm_eps=1e-12, tie_word_embeddings=True)
EPS = {"rms_norm_eps": None, "num_key_value_heads": None}
OTHERS = EPS | {"head_dim": None}  # of other families, which transformers does not read in these


class Names(NamedTuple):
    """What the parts of a layer are called in the checkpoint."""

    attention: str
    products: tuple[str, str, str, str]  # of queries, keys, values and the output, or "" and the output
    attention_norm: str
    mlp: Sequence[str]  # up and down; gate, up and down; or both first ones in one, and down
    mlp_norm: str
    qkv: str = ""  # of queries, keys and values in one


class Head(NamedTuple):
    """The products of a head of labels, each with the activation behind it."""

    first: str
    activation: str
    last: str = "classifier"


@dataclass(frozen=True, slots=True)
class BertOptions:
    """What an encoder of this shape does in its own way."""

    names: Names
    head: Head
    offset: int = 0  # rows of the table of positions before the first position
    gates_last: bool = False  # in one weight with what they gate
    down_bias: bool = True
    embedding_size: int = 0  # 0: the hidden size
    num_groups: int = 0  # of layers that are one; 0: each layer has weights of its own
    has_distances: bool = False  # scores have biases by distance


BERT = BertOptions(
    Names("attention", ("self.query", "self.key", "self.value", "output.dense"), "attention.output.LayerNorm",
          ("intermediate.dense", "output.dense"), "output.LayerNorm"), Head("model.pooler.dense", "tanh"))
ROBERTA = replace(BERT, head=Head("classifier.dense", "tanh", "classifier.out_proj"))
ELECTRA = replace(ROBERTA, head=Head("classifier.dense", "gelu", "classifier.out_proj"))
DISTILBERT = BertOptions(
    Names("attention", ("q_lin", "k_lin", "v_lin", "out_lin"), "sa_layer_norm", ("ffn.lin1", "ffn.lin2"),
          "output_layer_norm"), Head("pre_classifier", "relu"))
MPNET = replace(ROBERTA, offset=2, has_distances=True, names=BERT.names._replace(
    products=("attn.q", "attn.k", "attn.v", "attn.o"), attention_norm="attention.LayerNorm"))
ALBERT_LAYER = "albert_layers.0"
ALBERT = BertOptions(
    Names(f"{ALBERT_LAYER}.attention", ("query", "key", "value", "dense"), f"{ALBERT_LAYER}.attention.LayerNorm",
          (f"{ALBERT_LAYER}.ffn", f"{ALBERT_LAYER}.ffn_output"), f"{ALBERT_LAYER}.full_layer_layer_norm"),
    Head("model.pooler", "tanh"))
NOMIC = replace(BERT, down_bias=False, names=Names(
    "attn", ("", "", "", "out_proj"), "norm1", ("mlp.fc12", "mlp.fc11", "mlp.fc2"), "norm2", "Wqkv"))
GTE = replace(BERT, gates_last=True, names=Names(
    "attention", ("", "", "", "o_proj"), "attn_ln", ("mlp.up_gate_proj", "mlp.down_proj"), "mlp_ln", "qkv_proj"))


def configure(fields: Fields) -> ModelConfig:
    return _encoder(fields, BERT, separator=OF_TOKENIZER)


def configure_roberta(fields: Fields) -> ModelConfig:
    """Positions are counted from behind the padding's."""
    offset = fields.integer("pad_token_id", default=1, minimum=0) + 1
    places = fields.integer("max_position_embeddings", default=512)
    if places <= offset:
        raise fields.error("max_position_embeddings", f"({places}) must be more than pad_token_id + 1 ({offset})")
    return _encoder(fields.replaced(max_position_embeddings=places - offset), replace(ROBERTA, offset=offset))


def configure_electra(fields: Fields) -> ModelConfig:
    hidden = fields.integer("hidden_size", default=256)
    size = fields.integer("embedding_size", default=128)
    options = replace(ELECTRA, embedding_size=0 if size == hidden else size)
    return _encoder(fields.with_defaults(hidden_size=hidden), options, separator=OF_TOKENIZER)


BUCKETS, FARTHEST = 32, 128  # of distances, half of them for keys behind the query; tokens from which on they are one


def configure_mpnet(fields: Fields) -> ModelConfig:
    if fields.integer("relative_attention_num_buckets", default=BUCKETS) != BUCKETS:
        raise fields.error("relative_attention_num_buckets", f"must be {BUCKETS}")
    places = fields.integer("max_position_embeddings", default=512, minimum=MPNET.offset + 1) - MPNET.offset
    fields = fields.replaced(max_position_embeddings=places, type_vocab_size=0)
    return replace(_encoder(fields, MPNET), has_relative_biases=True)


def _biases(source: WeightSource, config: ModelConfig) -> Tensor:
    """Those of each distance of a key from its query, `[heads, 2 * positions - 1]`, by T5's buckets."""
    table = source.floats({"model.relative_attention_bias.weight": (BUCKETS, config.num_heads)})
    if table.is_meta:  # which is listed, not read
        table = torch.zeros(table.shape)
    distances = torch.arange(1 - config.max_position_embeddings, config.max_position_embeddings)
    half, near = BUCKETS // 2, BUCKETS // 4
    far = distances.abs().clamp(min=1)
    steps = (torch.log(far.float() / near) / math.log(FARTHEST / near) * (half - near)).long()
    buckets = torch.where(far < near, distances.abs(), (near + steps).clamp(max=half - 1)) + half * (distances > 0)
    return table[buckets.to(table.device)].T.contiguous()


def configure_albert(fields: Fields) -> ModelConfig:
    if fields.integer("inner_group_num", default=1) != 1:
        raise fields.error("inner_group_num", "must be 1: groups of several layers are not supported")
    fields = fields.with_defaults(
        hidden_size=4096, num_hidden_layers=12, num_attention_heads=64, intermediate_size=16384,
        max_position_embeddings=512, vocab_size=30000)
    options = replace(ALBERT, embedding_size=fields.integer("embedding_size", default=128),
                      num_groups=fields.integer("num_hidden_groups", default=1, maximum=MAX_LAYERS))
    return _encoder(fields, options, "gelu_new", separator=OF_TOKENIZER)


def configure_distilbert(fields: Fields) -> ModelConfig:
    fields = fields.replaced(intermediate_size=None).renamed({
        "dim": "hidden_size", "hidden_dim": "intermediate_size", "n_layers": "num_hidden_layers",
        "n_heads": "num_attention_heads", "activation": "hidden_act"})
    fields = fields.with_defaults(
        hidden_size=768, intermediate_size=3072, num_hidden_layers=6, num_attention_heads=12)
    return _encoder(fields.replaced(type_vocab_size=0), DISTILBERT)


def configure_nomic(fields: Fields) -> ModelConfig:
    return replace(
        _encoder(fields, NOMIC, "silu", theta=1000.0, separator=OF_TOKENIZER), has_gated_mlp=True, qkv_bias=False,
        output_bias=False, mlp_bias=False)


def configure_gte(fields: Fields) -> ModelConfig:
    fields = fields.with_defaults(type_vocab_size=1)
    return replace(_encoder(fields, GTE, theta=160_000.0), has_gated_mlp=True, mlp_bias=False)


def _encoder(
    fields: Fields, options: BertOptions, activation: str = "gelu", theta: float | None = None, separator: int = -1,
) -> ModelConfig:
    """An encoder; `theta` is the default of rotary positions, None: it has a table of positions."""
    for name in ("is_decoder", "add_cross_attention"):
        if fields.flag(name):
            raise fields.error(name, "is true: only encoders are supported in this architecture")
    fields = fields.replaced(**OTHERS if theta is None else EPS).renamed({"layer_norm_eps": "rms_norm_eps"})
    layers = fields.integer("num_hidden_layers", maximum=MAX_LAYERS)
    ropes: Sequence[Rope] | None = (NO_ROPE,) * layers if theta is None else None
    defaults = DEFAULTS if theta is None else replace(DEFAULTS, rope_theta=theta)
    types = fields.integer("type_vocab_size", default=2, minimum=0, maximum=1024)
    return replace(
        read_common(fields, defaults, (), ropes), is_causal=False, qkv_bias=True, output_bias=True, mlp_bias=True,
        has_gated_mlp=False, activation=read_activation(fields, activation), token_types=types, separator=separator,
        pooling="cls", own=options)


def _own(config: ModelConfig) -> BertOptions:
    assert isinstance(config.own, BertOptions)
    return config.own


class BertLayer(DecoderLayer):
    """A layer whose sums are normed."""

    live_states = 4

    def __init__(
        self, config: ModelConfig, source: WeightSource, index: int, biases: Tensor | None = None,
    ) -> None:
        at, hidden, own = f"model.layers.{index}", config.hidden_size, _own(config)
        names, norms, sizes = own.names, LayerNormOptions(config.norm_eps), (hidden, config.intermediate_size)
        options = AttentionOptions(
            config.qkv_bias, config.output_bias, names=names.products, qkv_name=names.qkv, biases=biases)
        self.attention = Attention(
            source, f"{at}.{names.attention}", config.attention_shape(index), config.ropes[index], hidden, options)
        self.attention_norm = norms.read(source, f"{at}.{names.attention_norm}", hidden)  # of the sum behind it
        self.mlp: MLP
        if config.has_gated_mlp:
            self.mlp = GatedMLP(
                source, at, sizes, activation=config.activation, names=names.mlp, bias=config.mlp_bias,
                gates_last=own.gates_last, down_bias=own.down_bias)
        else:
            self.mlp = PlainMLP(source, at, (names.mlp[0], names.mlp[-1]), sizes, activation=config.activation)
        self.mlp_norm = norms.read(source, f"{at}.{names.mlp_norm}", hidden)

    def forward(self, h: ResidualStream, step: LayerStep) -> None:
        h += self.attention(h.sum(), step)
        h.replace(self.attention_norm(h))
        h += self.mlp(h.sum())
        h.replace(self.mlp_norm(h))


def compose(config: ModelConfig, source: WeightSource) -> Network:
    own, size = _own(config), config.hidden_size
    has_table = config.ropes[0] == NO_ROPE
    ends = table_ends(config, own.offset) if has_table else EndOptions(tied=True)
    ends = replace(ends, token_types=config.token_types, separator=config.separator,
                   norm=LayerNormOptions(config.norm_eps))
    if own.embedding_size:
        positions = functools.partial(
            learned_positions, count=config.max_position_embeddings, hidden_size=own.embedding_size)
        ends = replace(ends, embedding_size=own.embedding_size, projects_last=True, positions=positions)
    biases = _biases(source, config) if own.has_distances else None
    layer: Callable[[int], BertLayer] = functools.partial(BertLayer, config, source, biases=biases)
    if own.num_groups:
        layer = _shared(layer, config.num_layers / own.num_groups)
    network = read_network(replace(config, num_labels=0), source, layer, ends, None)
    return replace(network, classifier=_classifier(source, own.head, size, config.num_labels))


def _shared(read: Callable[[int], BertLayer], layers_per_group: float) -> Callable[[int], BertLayer]:
    """Reads the layer of each group once."""
    layers = functools.cache(read)
    return lambda index: layers(int(index / layers_per_group))


def _classifier(source: WeightSource, head: Head, size: int, num_labels: int) -> PooledHead | None:
    if not num_labels:
        return None
    first = Linear(source, {head.first: size}, size, bias=True, is_exact=True)
    last = Linear(source, {head.last: num_labels}, size, bias=True, is_exact=True)
    return PooledHead((first, head.activation), (last, ""))
