"""BERT's layers as a decoder (Rothe et al., "Leveraging pre-trained checkpoints for sequence generation", 2020): each
token attends to earlier ones, and hidden states pass a product and a norm before the head.

    h = norm(h + attention(h)),  h = norm(h + down(gelu(up(h))))
    logits = head(norm(gelu(dense(h)))) + bias

Megatron-BERT (Shoeybi et al., 2019), XLM-R XL (Goyal et al., 2021) and RoBERTa-PreLayerNorm (Ott et al., "fairseq",
2019) norm the inputs of attention and MLP, as GPT-2 does.  In RoBERTa (Liu et al., 2019) and its descendants, the first
position is the row after that of the padding token.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass, replace

from slotwise.compute.model.families.bert import DEFAULTS, OTHERS
from slotwise.compute.model.families.gpt2 import ClassicLayer, Parts, read_plain, table_ends
from slotwise.compute.model.families.opt import SumNormLayer
from slotwise.compute.model.fields import Fields
from slotwise.compute.model.layers.attention import AttentionOptions
from slotwise.compute.model.layers.embedding_and_head import HeadTransform
from slotwise.compute.model.layers.norm import LayerNormOptions
from slotwise.compute.model.layers.rank_weights import WeightSource
from slotwise.compute.model.model_config import ModelConfig
from slotwise.compute.model.network import Network, read_network

OPTIONS = AttentionOptions(True, True, names=("self.query", "self.key", "self.value", "output.dense"))


@dataclass(frozen=True, slots=True)
class DecoderOptions:
    """What a family of this shape does in its own way."""

    parts: Parts
    norms_sums: bool = True  # else what is added
    norms_embedding: bool = True
    offset: int = 0  # rows of the table of positions before the first position
    has_types: bool = True  # of tokens, all of which are of the first type
    has_transform: bool = True  # between the last layer and the head


BERT = DecoderOptions(Parts(
    "attention.output.LayerNorm", "attention", "output.LayerNorm", "intermediate.dense", "output.dense"))
GENERATION = replace(BERT, has_types=False, has_transform=False)
PRE_NORM = replace(BERT, norms_sums=False, parts=BERT.parts._replace(
    attention_norm="attention.LayerNorm", mlp_norm="intermediate.LayerNorm"))
MEGATRON = replace(PRE_NORM, norms_embedding=False, parts=BERT.parts._replace(
    attention_norm="attention.ln", mlp_norm="ln"))
XL = replace(MEGATRON, parts=BERT.parts._replace(attention_norm="attention.self_attn_layer_norm", mlp_norm="LayerNorm"))


def configure_roberta(fields: Fields, options: DecoderOptions = BERT) -> ModelConfig:
    """Positions start in the row after that of the padding token."""
    offset = fields.integer("pad_token_id", default=1, minimum=0) + 1
    places = fields.integer("max_position_embeddings", default=512)
    if places <= offset:
        raise fields.error("max_position_embeddings", f"({places}) must be more than pad_token_id + 1 ({offset})")
    return configure(fields.replaced(max_position_embeddings=places - offset), replace(options, offset=offset))


def configure(fields: Fields, options: DecoderOptions = BERT) -> ModelConfig:
    if not fields.flag("is_decoder"):
        raise fields.error("is_decoder", "must be true in this architecture: without it tokens attend to later ones, "
                           "and the model does not generate")
    if not fields.flag("tie_word_embeddings", default=True):
        raise fields.error("tie_word_embeddings", "is false, which is not supported in this architecture")
    if fields.flag("add_cross_attention"):
        raise fields.error("add_cross_attention", "is true: only decoders are supported")
    if fields.flag("use_task_id"):
        raise fields.error("use_task_id", "is true, which is not supported")
    types = fields.integer("type_vocab_size", default=2, maximum=1024) if options.has_types else 0
    fields = fields.replaced(**OTHERS).renamed({"layer_norm_eps": "rms_norm_eps"})
    return replace(read_plain(fields, DEFAULTS, "gelu"), token_types=types, own=options)


def compose(config: ModelConfig, source: WeightSource) -> Network:
    options, norms = config.own, LayerNormOptions(config.norm_eps)
    assert isinstance(options, DecoderOptions)
    transform = functools.partial(HeadTransform, size=config.hidden_size, activation=config.activation, norms=norms)
    ends = replace(
        table_ends(config, options.offset), token_types=config.token_types, head_bias=True,
        norm=norms if options.norms_embedding else None, transform=transform if options.has_transform else None)
    layer = functools.partial(
        SumNormLayer if options.norms_sums else ClassicLayer, config, source, options=OPTIONS, norms=norms,
        parts=options.parts)
    return read_network(config, source, layer, ends, None if options.norms_sums else norms)
