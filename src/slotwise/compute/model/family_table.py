"""The table of families: which architecture is read and built by which module of `families/`."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import NamedTuple

from slotwise.compute.kernels.group import SINGLE_RANK, Group
from slotwise.compute.kernels.interface import Kernels
from slotwise.compute.kernels.matrix import Format
from slotwise.compute.kernels.reference import ReferenceKernels
from slotwise.compute.model.families import (
    afmoe,
    apertus,
    arcee,
    aria,
    axk1,
    bamba,
    bert,
    bert_decoder,
    bitnet,
    bloom,
    cohere,
    cwm,
    dbrx,
    deepseek,
    deepseek_v32,
    diffllama,
    doge,
    dots1,
    ernie4_5,
    eurobert,
    exaone4,
    exaone_moe,
    falcon,
    falcon_h1,
    flex_olmo,
    flint,
    gemma,
    gemma3n,
    gemma4,
    glm,
    glm4_moe,
    glm4_moe_lite,
    gpt2,
    gpt_neo,
    gpt_neox,
    gpt_oss,
    gptj,
    granite,
    granite_hybrid,
    helium,
    hunyuan,
    hy_v3,
    hyperclovax,
    jamba,
    jetmoe,
    kimi_linear,
    kolibri1,
    laguna,
    lfm2,
    lfm2_moe,
    lfm3,
    llama,
    llama4,
    mamba,
    mamba2,
    mellum,
    mimo_v2,
    minicpm3,
    minimax,
    minimax_m2,
    mistral,
    modernbert,
    mpt,
    nemotron,
    nemotron_h,
    olmo,
    olmo2,
    olmo_hybrid,
    olmoe,
    openai_gpt,
    opt,
    persimmon,
    phi,
    phi3,
    phimoe,
    qwen2,
    qwen3,
    qwen3_5,
    qwen3_next,
    seed_oss,
    smollm3,
    solar_open,
    stablelm,
    starcoder2,
    xglm,
    zamba,
    zamba2,
)
from slotwise.compute.model.fields import Fields
from slotwise.compute.model.layers.rank_weights import Listing, WeightSource
from slotwise.compute.model.lora_weights import AdaptableProduct, LoraWeights
from slotwise.compute.model.model_config import ModelConfig
from slotwise.compute.model.names import encoder_of, with_head
from slotwise.compute.model.network import Network
from slotwise.compute.model.quantization.quantization_methods import FIELD as QUANTIZATION
from slotwise.compute.model.unserved_families import UNSERVED
from slotwise.errors import CheckpointError


class Family(NamedTuple):
    """How a family's config is read, and what it is composed of."""

    configure: Callable[[Fields], ModelConfig]
    compose: Callable[[ModelConfig, WeightSource], Network]
    model_types: tuple[str, ...] = ()  # that a config may name; transformers chooses its class by them; (): any
    transposed: tuple[str, ...] = ()  # ends of the names of products that checkpoints store as [inputs, outputs]
    methods: tuple[str, ...] = ()  # of quantization, that no checkpoint of another family uses


FAMILIES: dict[str, Family] = {
    "LlamaForCausalLM": Family(llama.configure, llama.compose, ("llama",)),
    "MistralForCausalLM": Family(mistral.configure, llama.compose, ("mistral", "ministral")),
    "MinistralForCausalLM": Family(mistral.configure, llama.compose, ("ministral",)),
    "Qwen2ForCausalLM": Family(qwen2.configure, llama.compose, ("qwen2",)),
    "Qwen3ForCausalLM": Family(qwen3.configure, llama.compose, ("qwen3",)),
    "SmolLM3ForCausalLM": Family(smollm3.configure, llama.compose, ("smollm3",)),
    "Phi3ForCausalLM": Family(phi3.configure, llama.compose, ("phi3",)),
    "GraniteForCausalLM": Family(granite.configure, llama.compose, ("granite",)),
    "GlmForCausalLM": Family(glm.configure, llama.compose, ("glm",)),
    "Glm4ForCausalLM": Family(glm.configure, glm.compose, ("glm4",)),
    "Ernie4_5ForCausalLM": Family(ernie4_5.configure, llama.compose, ("ernie4_5",)),
    "HeliumForCausalLM": Family(helium.configure, llama.compose, ("helium",)),
    "SeedOssForCausalLM": Family(seed_oss.configure, llama.compose, ("seed_oss",)),
    "Exaone4ForCausalLM": Family(exaone4.configure, exaone4.compose, ("exaone4",)),
    "Olmo2ForCausalLM": Family(olmo2.configure, olmo2.compose, ("olmo2",)),
    "Olmo3ForCausalLM": Family(olmo2.configure_olmo3, olmo2.compose, ("olmo3",)),
    "CwmForCausalLM": Family(cwm.configure, llama.compose, ("cwm",)),
    "HunYuanDenseV1ForCausalLM": Family(hunyuan.configure, hunyuan.compose, ("hunyuan_v1_dense",)),
    "Ministral3ForCausalLM": Family(mistral.configure_ministral3, mistral.compose_ministral3, ("ministral3",)),
    "Mistral3ForConditionalGeneration": Family(mistral.configure_text, mistral.compose_text, ("mistral3",)),
    "Qwen2VLForConditionalGeneration": Family(qwen2.configure_vl, llama.compose, ("qwen2_vl",)),
    "Qwen2_5_VLForConditionalGeneration": Family(qwen2.configure_vl, llama.compose, ("qwen2_5_vl",)),
    "GotOcr2ForConditionalGeneration": Family(qwen2.configure_got, llama.compose, ("got_ocr2",)),
    "Qwen3VLForConditionalGeneration": Family(qwen3.configure_vl, llama.compose, ("qwen3_vl",)),
    "Qwen3VLMoeForConditionalGeneration": Family(
        qwen3.configure_vl_moe, qwen3.compose_vl_moe, ("qwen3_vl_moe",)),
    "BloomForCausalLM": Family(bloom.configure, bloom.compose, ("bloom",)),
    "MptForCausalLM": Family(mpt.configure, mpt.compose, ("mpt",)),
    "FalconForCausalLM": Family(falcon.configure, falcon.compose, ("falcon",)),
    "CohereForCausalLM": Family(cohere.configure, cohere.compose, ("cohere",)),
    "Cohere2ForCausalLM": Family(cohere.configure_cohere2, cohere.compose, ("cohere2",)),
    "CohereCompassForCausalLM": Family(cohere.configure_compass, cohere.compose, ("cohere_compass_text",)),
    "Cohere2MoeForCausalLM": Family(cohere.configure_moe, cohere.compose, ("cohere2_moe",)),
    "DiffLlamaForCausalLM": Family(diffllama.configure, diffllama.compose, ("diffllama",)),
    "DogeForCausalLM": Family(doge.configure, doge.compose, ("doge",)),
    "LagunaForCausalLM": Family(laguna.configure, laguna.compose, ("laguna",)),
    "DbrxForCausalLM": Family(dbrx.configure, dbrx.compose, ("dbrx",)),
    "ApertusForCausalLM": Family(apertus.configure, apertus.compose, ("apertus",)),
    "Apertus1p5TextForCausalLM": Family(apertus.configure_text, apertus.compose, ("apertus1p5_text",)),
    "ArceeForCausalLM": Family(arcee.configure, arcee.compose, ("arcee",)),
    "Jais2ForCausalLM": Family(arcee.configure_jais2, arcee.compose_jais2, ("jais2",)),
    "NanoChatForCausalLM": Family(arcee.configure_nanochat, arcee.compose_nanochat, ("nanochat",)),
    "BitNetForCausalLM": Family(bitnet.configure, bitnet.compose, ("bitnet",)),
    "HyperCLOVAXForCausalLM": Family(hyperclovax.configure, hyperclovax.compose, ("hyperclovax",)),
    "Gemma4UnifiedForCausalLM": Family(gemma4.configure_unified, gemma4.compose, ("gemma4_unified_text",)),
    "Gemma4UnifiedForConditionalGeneration": Family(
        gemma4.configure_unified_text, gemma4.compose, ("gemma4_unified",)),
    "GemmaForCausalLM": Family(gemma.configure_gemma1, gemma.compose_gemma1, ("gemma",)),
    "VaultGemmaForCausalLM": Family(gemma.configure, gemma.compose_vault, ("vaultgemma",)),
    "Gemma2ForCausalLM": Family(gemma.configure, gemma.compose, ("gemma2",)),
    "Gemma3ForCausalLM": Family(gemma.configure_gemma3, gemma.compose, ("gemma3_text",)),
    "Gemma3ForConditionalGeneration": Family(gemma.configure_gemma3_text, gemma.compose, ("gemma3",)),
    "Gemma3nForCausalLM": Family(gemma3n.configure, gemma3n.compose, ("gemma3n_text",)),
    "Gemma3nForConditionalGeneration": Family(gemma3n.configure_text, gemma3n.compose, ("gemma3n",)),
    "Gemma4ForCausalLM": Family(gemma4.configure, gemma4.compose, ("gemma4_text",)),
    "Gemma4ForConditionalGeneration": Family(gemma4.configure_text, gemma4.compose, ("gemma4",)),
    "MixtralForCausalLM": Family(mistral.configure_mixtral, mistral.compose_mixtral, ("mixtral",)),
    "Qwen2MoeForCausalLM": Family(qwen2.configure_moe, qwen2.compose_moe, ("qwen2_moe",)),
    "Qwen3MoeForCausalLM": Family(qwen3.configure_moe, qwen2.compose_moe, ("qwen3_moe",)),
    "OlmoeForCausalLM": Family(olmoe.configure, olmoe.compose, ("olmoe",)),
    "GraniteMoeForCausalLM": Family(granite.configure_moe, granite.compose_moe, ("granitemoe",)),
    "Qwen3NextForCausalLM": Family(qwen3_next.configure, qwen3_next.compose, ("qwen3_next",)),
    "Qwen3_5ForCausalLM": Family(qwen3_5.configure, qwen3_next.compose, ("qwen3_5_text",)),
    "Qwen3_5ForConditionalGeneration": Family(qwen3_5.configure_text, qwen3_next.compose, ("qwen3_5",)),
    "Qwen3_5MoeForCausalLM": Family(qwen3_5.configure_moe, qwen3_next.compose, ("qwen3_5_moe_text",)),
    "Qwen3_5MoeForConditionalGeneration": Family(qwen3_5.configure_moe_text, qwen3_next.compose, ("qwen3_5_moe",)),
    "OlmoHybridForCausalLM": Family(olmo_hybrid.configure, olmo_hybrid.compose, ("olmo_hybrid",)),
    "KimiLinearForCausalLM": Family(kimi_linear.configure, kimi_linear.compose, ("kimi_linear",)),
    "ZambaForCausalLM": Family(zamba.configure, zamba.compose, ("zamba",)),
    "Zamba2ForCausalLM": Family(zamba2.configure, zamba2.compose, ("zamba2",)),
    "Lfm3ForCausalLM": Family(lfm3.configure, lfm3.compose, ("lfm3",)),
    "Lfm2MoeForCausalLM": Family(lfm2_moe.configure, lfm2_moe.compose, ("lfm2_moe",)),
    "JetMoeForCausalLM": Family(jetmoe.configure, jetmoe.compose, ("jetmoe",)),
    "JambaForCausalLM": Family(jamba.configure, jamba.compose, ("jamba",)),
    "NemotronHForCausalLM": Family(nemotron_h.configure, nemotron_h.compose, ("nemotron_h",)),
    "FalconH1ForCausalLM": Family(falcon_h1.configure, falcon_h1.compose, ("falcon_h1",)),
    "MambaForCausalLM": Family(mamba.configure, mamba.compose, ("mamba",)),
    "FalconMambaForCausalLM": Family(mamba.configure_falcon, mamba.compose_falcon, ("falcon_mamba",)),
    "Mamba2ForCausalLM": Family(mamba2.configure, mamba2.compose, ("mamba2",)),
    "BambaForCausalLM": Family(bamba.configure, bamba.compose, ("bamba",)),
    "GraniteMoeHybridForCausalLM": Family(
        granite_hybrid.configure, granite_hybrid.compose, ("granitemoehybrid",)),
    "Lfm2ForCausalLM": Family(lfm2.configure, lfm2.compose, ("lfm2",)),
    "DeepseekV2ForCausalLM": Family(deepseek.configure_v2, deepseek.compose_v2, ("deepseek_v2",)),
    "DeepseekV3ForCausalLM": Family(deepseek.configure_v3, deepseek.compose, ("deepseek_v3", "kimi_k2", "sarvam_mla")),
    "DeepseekV32ForCausalLM": Family(deepseek_v32.configure, deepseek_v32.compose, ("deepseek_v32",)),
    "GlmMoeDsaForCausalLM": Family(deepseek_v32.configure_glm, deepseek_v32.compose, ("glm_moe_dsa",)),
    "Glm4MoeLiteForCausalLM": Family(glm4_moe_lite.configure, deepseek.compose, ("glm4_moe_lite",)),
    "AXK1ForCausalLM": Family(axk1.configure, axk1.compose, ("axk1",)),
    "YoutuForCausalLM": Family(deepseek.configure_youtu, deepseek.compose, ("youtu",)),
    "MiniCPM3ForCausalLM": Family(minicpm3.configure, deepseek.compose, ("minicpm3",)),
    "GptOssForCausalLM": Family(gpt_oss.configure, gpt_oss.compose, ("gpt_oss",), methods=("mxfp4",)),
    "Glm4MoeForCausalLM": Family(glm4_moe.configure, glm4_moe.compose, ("glm4_moe",)),
    "Dots1ForCausalLM": Family(dots1.configure, glm4_moe.compose, ("dots1",)),
    "SolarOpenForCausalLM": Family(solar_open.configure, glm4_moe.compose, ("solar_open",)),
    "MiMoV2FlashForCausalLM": Family(mimo_v2.configure, mimo_v2.compose, ("mimo_v2_flash",)),
    "MiniMaxForCausalLM": Family(minimax.configure, minimax.compose, ("minimax",)),
    "MiniMaxM2ForCausalLM": Family(minimax_m2.configure, minimax_m2.compose, ("minimax_m2",)),
    "Ernie4_5_MoeForCausalLM": Family(ernie4_5.configure_moe, ernie4_5.compose_moe, ("ernie4_5_moe",)),
    "GraniteMoeSharedForCausalLM": Family(granite.configure_shared, granite.compose_moe, ("granitemoeshared",)),
    "GraniteSWAForCausalLM": Family(granite.configure_windows, granite.compose_windows, ("granite_swa",)),
    "GraniteMoeSWAForCausalLM": Family(granite.configure_moe_windows, granite.compose_windows, ("granitemoe_swa",)),
    "FlexOlmoForCausalLM": Family(flex_olmo.configure, flex_olmo.compose, ("flex_olmo",)),
    "MellumForCausalLM": Family(mellum.configure, qwen2.compose_moe, ("mellum",)),
    "HYV3ForCausalLM": Family(hy_v3.configure, hy_v3.compose, ("hy_v3",)),
    "Kolibri1ForCausalLM": Family(kolibri1.configure, kolibri1.compose, ("kolibri1",)),
    "AriaTextForCausalLM": Family(aria.configure, aria.compose, ("aria_text",)),
    "FlintForCausalLM": Family(flint.configure, flint.compose, ("flint",)),
    "Llama4ForCausalLM": Family(llama4.configure, llama4.compose, ("llama4_text",)),
    "Llama4ForConditionalGeneration": Family(llama4.configure_text, llama4.compose, ("llama4",)),
    "HunYuanMoEV1ForCausalLM": Family(hunyuan.configure_moe, hunyuan.compose_moe, ("hunyuan_v1_moe",)),
    "PhimoeForCausalLM": Family(phimoe.configure, phimoe.compose, ("phimoe",)),
    "AfmoeForCausalLM": Family(afmoe.configure, afmoe.compose, ("afmoe",)),
    "ExaoneMoeForCausalLM": Family(exaone_moe.configure, exaone_moe.compose, ("exaone_moe",)),
    "GPT2LMHeadModel": Family(gpt2.configure, gpt2.compose, ("gpt2", "gpt-sw3"), gpt2.TRANSPOSED),
    "GPTBigCodeForCausalLM": Family(gpt2.configure_bigcode, gpt2.compose_bigcode, ("gpt_bigcode",)),
    "GPTNeoXForCausalLM": Family(gpt_neox.configure, gpt_neox.compose, ("gpt_neox",)),
    **{name: Family(functools.partial(bert_decoder.configure, options=options), bert_decoder.compose, (kind,))
       for name, options, kind in (
           ("BertLMHeadModel", bert_decoder.BERT, "bert"), ("ErnieForCausalLM", bert_decoder.BERT, "ernie"),
           ("BertGenerationDecoder", bert_decoder.GENERATION, "bert-generation"),
           ("MegatronBertForCausalLM", bert_decoder.MEGATRON, "megatron-bert"))},
    **{name: Family(functools.partial(bert_decoder.configure_roberta, options=options), bert_decoder.compose, (kind,))
       for name, options, kind in (
           ("RobertaForCausalLM", bert_decoder.BERT, "roberta"),
           ("XLMRobertaForCausalLM", bert_decoder.BERT, "xlm-roberta"),
           ("CamembertForCausalLM", bert_decoder.BERT, "camembert"),
           ("Data2VecTextForCausalLM", bert_decoder.BERT, "data2vec-text"),
           ("RobertaPreLayerNormForCausalLM", bert_decoder.PRE_NORM, "roberta-prelayernorm"),
           ("XLMRobertaXLForCausalLM", bert_decoder.XL, "xlm-roberta-xl"))},
    "OPTForCausalLM": Family(opt.configure, opt.compose, ("opt",)),
    "GPTNeoXJapaneseForCausalLM": Family(
        gpt_neox.configure_japanese, gpt_neox.compose_japanese, ("gpt_neox_japanese",)),
    "GPTNeoForCausalLM": Family(gpt_neo.configure, gpt_neo.compose, ("gpt_neo",)),
    "GPTJForCausalLM": Family(gptj.configure, gptj.compose, ("gptj",)),
    "CodeGenForCausalLM": Family(gptj.configure_codegen, gptj.compose_codegen, ("codegen",)),
    "PhiForCausalLM": Family(phi.configure, phi.compose, ("phi",)),
    "StableLmForCausalLM": Family(stablelm.configure, stablelm.compose, ("stablelm",)),
    "Starcoder2ForCausalLM": Family(starcoder2.configure, starcoder2.compose, ("starcoder2",)),
    "PersimmonForCausalLM": Family(persimmon.configure, persimmon.compose, ("persimmon",)),
    "NemotronForCausalLM": Family(nemotron.configure, nemotron.compose, ("nemotron",)),
    "OlmoForCausalLM": Family(olmo.configure, olmo.compose, ("olmo",)),
    "XGLMForCausalLM": Family(xglm.configure, xglm.compose, ("xglm",)),
    "BioGptForCausalLM": Family(xglm.configure_biogpt, xglm.compose_biogpt, ("biogpt",)),
    "CTRLLMHeadModel": Family(xglm.configure_ctrl, xglm.compose_ctrl, ("ctrl",)),
    "OpenAIGPTLMHeadModel": Family(openai_gpt.configure, openai_gpt.compose, ("openai-gpt",), gpt2.TRANSPOSED),
}


ENCODERS: dict[str, Family] = {
    "BertModel": Family(bert.configure, bert.compose, ("bert",)),
    "RobertaModel": Family(bert.configure_roberta, bert.compose, ("roberta",)),
    "XLMRobertaModel": Family(bert.configure_roberta, bert.compose, ("xlm-roberta",)),
    "CamembertModel": Family(bert.configure_roberta, bert.compose, ("camembert",)),
    "ElectraModel": Family(bert.configure_electra, bert.compose, ("electra",)),
    "MPNetModel": Family(bert.configure_mpnet, bert.compose, ("mpnet",)),
    "AlbertModel": Family(bert.configure_albert, bert.compose, ("albert",)),
    "DistilBertModel": Family(bert.configure_distilbert, bert.compose, ("distilbert",)),
    "NomicBertModel": Family(bert.configure_nomic, bert.compose, ("nomic_bert",)),
    "GteModel": Family(bert.configure_gte, bert.compose, ("gte",)),
    "ModernBertModel": Family(modernbert.configure, modernbert.compose, ("modernbert",)),
    "EuroBertModel": Family(eurobert.configure, eurobert.compose, ("eurobert",)),
}
"""Models whose tokens attend to later ones, by their classes without a head."""


def configure(fields: Fields) -> ModelConfig:
    """The model a config.json describes.

    Raises CheckpointError for unsupported architectures, and for a model_type or a quantization of another one.
    """
    named = next(iter(fields.texts("architectures")), "none")
    architecture, families = with_head(named), FAMILIES
    if (encoder := encoder_of(named)) in ENCODERS:
        architecture, families = encoder, ENCODERS
    if architecture not in families:
        part = UNSERVED.get(named, UNSERVED.get(architecture))
        raise CheckpointError(f"{fields.where}: architecture {named:.60} is not supported" + (
            f": {part}, which is not built" if part else f"; these are: {', '.join([*FAMILIES, *ENCODERS])}"))
    family = families[architecture]
    if family.model_types and fields.has("model_type") and fields.text("model_type") not in family.model_types:
        raise fields.error("model_type", f"must be {' or '.join(family.model_types)} with architecture "
                           f"{architecture}, not {fields.text('model_type')!r:.40}")
    quantized = fields.section(QUANTIZATION)
    method = quantized.text("quant_method", default="")
    owners = [name for name, each in FAMILIES.items() if method in each.methods]
    if owners and architecture not in owners:
        raise quantized.error("quant_method", f"{method} is that of {owners[0]} only")
    config = replace(family.configure(fields), architecture=architecture)
    return config if fields.flag("is_causal", default=not fields.is_null("is_causal")) else _of_both_sides(
        fields, config)


def _of_both_sides(fields: Fields, config: ModelConfig) -> ModelConfig:
    """A decoder whose tokens attend to later ones, as `is_causal` says in transformers' configs."""
    if any(config.windows) or config.recurrent is not None or config.latent is not None:
        raise fields.error("is_causal", "is false, which is not supported with windows, recurrent states or compressed "
                           "attention")
    return replace(config, is_causal=False)


def compose(config: ModelConfig, source: WeightSource) -> Network:
    """Reads and packs the layers of a model of any family."""
    return family_of(config).compose(config, source)


def family_of(config: ModelConfig) -> Family:
    """The family of a model."""
    return (ENCODERS if config.architecture in ENCODERS else FAMILIES)[config.architecture]


def tensor_shapes(config: ModelConfig, group: Group = SINGLE_RANK) -> dict[str, tuple[int, ...]]:
    """Every tensor that a model with this config reads, by its name in the checkpoint."""
    listing = Listing(config.dtype, group=group)
    compose(config, listing)
    return listing.shapes


def adaptable(config: ModelConfig, group: Group) -> list[AdaptableProduct]:
    """The products that adapters may change in the rank's part of a model."""
    kernels = ReferenceKernels()
    adapters = LoraWeights(kernels, 0, 1, config.dtype)
    compose(config, Listing(config.dtype, group=group, adapters=adapters))
    return adapters.products


def weight_bytes(
    config: ModelConfig, kernels: Kernels, formats: Mapping[str, Format], group: Group = SINGLE_RANK,
) -> int:
    """Bytes of all weights of a model with this config, as packed for these kernels.

    `formats` has the format of each quantized matrix, by name.
    """
    return compose(config, Listing(config.dtype, kernels, formats, group)).bytes
