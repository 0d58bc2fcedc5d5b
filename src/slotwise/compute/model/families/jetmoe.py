"""JetMoE (Shen et al., "JetMoE: Reaching Llama2 Performance with 0.1M Dollars", 2024): Llama with experts in place of
the MLP and of the products of queries and output; all experts of a layer read the same keys and values.

    h += output_e(attention(query_e(x), keys(x), values(x))) for the chosen e, weighted;  x = norm(h)
    h += experts(norm(h))

The products of all experts of queries and outputs are computed, and what was not chosen is left out or is zero: they
are a small part of the weights.
"""

from __future__ import annotations

import functools
from dataclasses import replace

import torch
from torch import Tensor

from slotwise.compute.kernels.interface import AttentionShape, Routing
from slotwise.compute.model.fields import Fields
from slotwise.compute.model.layers.attention import LayerStep, refuse_parts
from slotwise.compute.model.layers.embedding_and_head import EndOptions
from slotwise.compute.model.layers.linear import Linear
from slotwise.compute.model.layers.norm import NormOptions, ResidualStream, RMSNorm
from slotwise.compute.model.layers.rank_weights import WeightSource
from slotwise.compute.model.model_config import ConfigDefaults, ModelConfig, read_common, read_mixture
from slotwise.compute.model.network import DecoderLayer, ExpertNames, Network, read_experts, read_network

NAMES = ExpertNames("mlp.router.layer", "mlp.experts", stacked=("mlp.input_linear.weight", "mlp.output_linear.weight"))
LAYER_EPS = 1e-6  # of the norms in layers, whatever the config says of the last one


def configure(fields: Fields) -> ModelConfig:
    fields = fields.with_defaults(
        hidden_size=2048, num_hidden_layers=12, num_key_value_heads=16, intermediate_size=5632, vocab_size=32000,
        max_position_embeddings=4096, num_local_experts=8)
    heads = fields.integer("num_key_value_heads") * fields.integer("num_experts_per_tok", default=2)
    if fields.text("activation_function", default="silu") != "silu":
        raise fields.error("activation_function", "must be silu")
    fields = fields.replaced(num_attention_heads=heads, head_dim=fields.integer("kv_channels", default=128))
    config = read_common(fields, ConfigDefaults(norm_eps=1e-6, tie_word_embeddings=True))
    return replace(config, mixture=read_mixture(fields, config, Routing(8, 2, is_normalized=True)))


class HeadMixture:
    """Attention whose queries and outputs are those of the experts that a token chooses."""

    def __init__(self, config: ModelConfig, source: WeightSource, name: str, index: int) -> None:
        refuse_parts(source, "a mixture of heads")
        hidden, routing, kernels = config.hidden_size, config.mixture_of_experts.routing, source.kernels
        self.shape: AttentionShape = config.attention_shape(index)
        self.ropes = (config.ropes[index],)
        self._kernels, self._routing = kernels, routing
        size, experts = config.num_kv_heads * config.head_dim, f"{name}.experts"
        self._router = Linear(source, {f"{experts}.router.layer": routing.num_experts}, hidden, is_exact=True)
        self._kv = Linear(source, {f"{name}.kv_proj": 2 * size}, hidden)
        queries = source.tensor({f"{experts}.input_linear.weight": (routing.num_experts, size, hidden)}).flatten(0, 1)
        outputs = source.tensor({f"{experts}.output_linear.weight": (routing.num_experts, hidden, size)})
        outputs = outputs.transpose(0, 1).flatten(1).contiguous()
        bias = source.tensor({f"{experts}.bias": (hidden,)})
        self._queries, self.output = kernels.linear(queries), kernels.linear(outputs, bias)
        self.bytes = self._router.bytes + self._kv.bytes + bias.nbytes
        self.bytes += kernels.linear_bytes(queries) + kernels.linear_bytes(outputs)

    def __call__(self, x: Tensor, step: LayerStep) -> Tensor:
        """`[tokens, hidden] -> [kept tokens, hidden]`."""
        logits = self._router(x)
        out = self._kernels.attention(self._stored(x, logits, step), step.cache, step.batch, self.shape)
        return self.output(step.kept(self._kernels.rowwise(self._of_all, out, logits)))

    def store(self, x: Tensor, step: LayerStep) -> Tensor:
        """Write keys and values to the cache; returns the queries `[tokens, heads, head_dim]`."""
        return self._stored(x, self._router(x), step)

    def _stored(self, x: Tensor, logits: Tensor, step: LayerStep) -> Tensor:
        qkv = self._kernels.rowwise(self._chosen, self._queries(x), logits, self._kv(x))
        return self._kernels.rotary_store(
            qkv, step.rotary[self.ropes[0]], step.batch, step.cache, self.shape, None)

    def _chosen(self, queries: Tensor, logits: Tensor, kv: Tensor) -> Tensor:
        """The queries of the chosen experts, those of one key head together, then keys and values."""
        each = queries.view(len(queries), self._routing.num_experts, self.shape.num_kv_heads, -1)
        chosen = logits.float().topk(self._routing.top_k, dim=1).indices
        own = each.gather(1, chosen[:, :, None, None].expand(-1, -1, *each.shape[2:]))
        return torch.cat((own.transpose(1, 2).flatten(1), kv), dim=1)

    def _of_all(self, out: Tensor, logits: Tensor) -> Tensor:
        """Results as inputs of the outputs' products of all experts, weighted; zeros for those that are not chosen.

        Weights are computed in float64, in which a result does not depend on its place in a vector of the processor.
        """
        best, chosen = logits.float().topk(self._routing.top_k, dim=1)
        weights = best.double().softmax(dim=1).to(out.dtype)
        of_expert = out.view(len(out), self.shape.num_kv_heads, self._routing.top_k, -1).transpose(1, 2).flatten(2)
        everyone = out.new_zeros(len(out), self._routing.num_experts, of_expert.shape[2])
        places = chosen.unsqueeze(2).expand_as(of_expert)
        return everyone.scatter_(1, places, of_expert * weights.unsqueeze(2)).flatten(1)


class Bias:
    """`x + bias` for every token."""

    def __init__(self, source: WeightSource, name: str, size: int) -> None:
        bias = source.tensor({name: (size,)})
        self._kernels, self._add, self.bytes = source.kernels, functools.partial(torch.add, bias), bias.nbytes

    def __call__(self, x: Tensor) -> Tensor:
        return self._kernels.rowwise(self._add, x)


class JetMoeLayer(DecoderLayer):
    """Two mixtures, each behind a norm."""

    def __init__(self, config: ModelConfig, source: WeightSource, index: int) -> None:
        at, hidden, norms = f"model.layers.{index}", config.hidden_size, NormOptions(LAYER_EPS)
        self.attention_norm = RMSNorm(source, f"{at}.input_layernorm", hidden, norms)
        self.attention = HeadMixture(config, source, f"{at}.self_attention", index)
        self.mlp_norm = RMSNorm(source, f"{at}.post_attention_layernorm", hidden, norms)
        self.mlp = read_experts(config, source, at, NAMES)
        self.bias = Bias(source, f"{at}.mlp.bias", hidden)

    def forward(self, h: ResidualStream, step: LayerStep) -> None:
        h += self.attention(self.attention_norm(h), step)
        h += self.bias(self.mlp(self.mlp_norm(h)))


def compose(config: ModelConfig, source: WeightSource) -> Network:
    layer = functools.partial(JetMoeLayer, config, source)
    return read_network(
        config, source, layer, EndOptions(config.tie_word_embeddings), NormOptions(config.norm_eps))
