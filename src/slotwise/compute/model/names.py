"""One name for every tensor and module, and the names by which files call it.

Families use those of a language model with a head: `model.layers.0.mlp.up_proj`, `lm_head`.  Others are in use:

    layers.0.mlp.up_proj                         of a model that was saved without its head
    model.language_model.layers.0.mlp.up_proj    of one for images and text
    backbone.layers.0.mixer.in_proj              of Mamba and its hybrids
    language_model.model.layers.0.mlp.up_proj    the same before transformers 4.52, which it also saves
    transformer.h.0.mlp.c_fc, h.0.mlp.c_fc       of GPT-2, with and without its head: `model.layers.0.mlp.c_fc`
    bert.encoder.layer.0.output.dense            of BERT, also without `bert.`: `model.layers.0.output.dense`

Tensors, adapters and whole names in the lists of a config are renamed by `canonical`; expressions and parts of names
are compared with all `spellings` of a module.
"""

from __future__ import annotations

from collections.abc import Callable

MODEL, HEAD = "model", "lm_head"
_INNER = "language_model"
_LAYERS, _EMBEDDING, _POSITIONS, _NORM, _EMBEDDING_NORM = (
    f"{MODEL}.{part}" for part in ("layers", "embed_tokens", "embed_positions", "norm", "embed_norm"))
_GPT2 = {"wte": _EMBEDDING, "wpe": _POSITIONS, "h": _LAYERS, "ln_f": _NORM}
_BERT = {
    "embeddings.word_embeddings": _EMBEDDING, "embeddings.position_embeddings": _POSITIONS,
    "embeddings.token_type_embeddings": f"{MODEL}.embed_types", "embeddings.LayerNorm": _EMBEDDING_NORM,
    "encoder.relative_attention_bias": f"{MODEL}.relative_attention_bias",
    "encoder.albert_layer_groups": _LAYERS, "encoder.embedding_hidden_mapping_in": f"{MODEL}.embed_projection",
    "embeddings_project": f"{MODEL}.embed_projection",
    "embeddings.tok_embeddings": _EMBEDDING, "embeddings.norm": _EMBEDDING_NORM, "emb_ln": _EMBEDDING_NORM,
    "encoder.ln": _NORM, "encoder.LayerNorm": _NORM,
    "encoder.layer": _LAYERS, "encoder.layers": _LAYERS, "transformer.layer": _LAYERS, "final_norm": _NORM}
_BERT_HEAD = {
    f"{HEAD}.decoder": HEAD, "cls.predictions.decoder": HEAD, "cls.predictions": HEAD,
    "cls.predictions.transform.dense": f"{HEAD}.dense", "cls.predictions.transform.LayerNorm": f"{HEAD}.layer_norm",
    **{f"{name}.decoder.bias": f"{HEAD}.decoder.bias" for name in (HEAD, "cls.predictions")}}  # a copy of `bias`
_MAMBA = {"embedding": _EMBEDDING, "embeddings": _EMBEDDING, "norm_f": _NORM}
_SCHEMES: dict[str, dict[str, str]] = {  # by what stands before them: parts of a model under other names
    "transformer": _GPT2 | {
        "blocks": _LAYERS, "norm_f": _NORM, "word_embeddings": _EMBEDDING, "word_embeddings_layernorm": _EMBEDDING_NORM,
        "tokens_embed": _EMBEDDING, "positions_embed": _POSITIONS, "w": _EMBEDDING, "layernorm": _NORM},
    "gpt_neox": {"embed_in": _EMBEDDING, "final_layer_norm": _NORM},
    "gpt_neox_japanese": {"embed_in": _EMBEDDING, "final_layer_norm": _NORM},
    f"{MODEL}.decoder": {"final_layer_norm": _NORM},
    "decoder": {"final_layer_norm": _NORM},
    "biogpt": {"layer_norm": _NORM},
    "backbone": _MAMBA,
    **dict.fromkeys((
        "bert", "roberta", "electra", "distilbert", "nomic_bert", "gte", "ernie", "mpnet", "albert"), _BERT),
    "data2vec_text": _BERT, "roberta_prelayernorm": _BERT | {"LayerNorm": _NORM},
    MODEL: _MAMBA | _BERT | {"final_layernorm": _NORM, "layer_norm": _NORM, "embedding_norm": _NORM},
    "": {**_GPT2, **_BERT, "norm_f": _NORM, "layers": _LAYERS, "embed_tokens": _EMBEDDING, "norm": _NORM,
         "embed_in": _EMBEDDING, "final_layer_norm": _NORM, "embed_out": HEAD, "output_projection": HEAD,
         **_BERT_HEAD},
}
_RENAMED = {  # beginnings of names
    f"{_INNER}.{MODEL}": MODEL, f"{MODEL}.{_INNER}": MODEL, f"{_INNER}.{HEAD}": HEAD, _INNER: MODEL,
    **{inner: MODEL for inner in _SCHEMES if inner not in ("", MODEL)},
    **{f"{inner}.{part}".removeprefix("."): new for inner, parts in _SCHEMES.items() for part, new in parts.items()}}
_PARTS = {  # of names
    ".attention.dense_bias": ".attention.dense.bias",  # GPT-NeoX-Japanese
    ".attention_layer_norm.": ".input_layernorm.",  # OLMo Hybrid, of layers with states, and as transformers saves all
    ".feedforward_layer_norm.": ".post_attention_layernorm.",
    **{f".block_sparse_moe.{part}.": f".mlp.{part}."  # Kimi Linear, as transformers saves it
       for part in ("gate_proj", "up_proj", "down_proj")}}
_LONGEST = max(name.count(".") for name in _RENAMED) + 1  # components of a beginning
_LAYERS_OF = {  # by architecture, where configs do not write `model.layers`
    architecture: layers for layers, architectures in {
        "transformer.h": ("GPT2LMHeadModel", "GPTBigCodeForCausalLM", "GPTJForCausalLM", "GPTNeoForCausalLM",
                          "CodeGenForCausalLM", "BloomForCausalLM", "FalconForCausalLM"),
        "transformer.blocks": ("MptForCausalLM", "DbrxForCausalLM"),
        "gpt_neox.layers": ("GPTNeoXForCausalLM",), "gpt_neox_japanese.layers": ("GPTNeoXJapaneseForCausalLM",),
        "model.decoder.layers": ("OPTForCausalLM",), "biogpt.layers": ("BioGptForCausalLM",),
        "backbone.layers": ("MambaForCausalLM", "Mamba2ForCausalLM", "FalconMambaForCausalLM", "NemotronHForCausalLM"),
    }.items() for architecture in architectures}
WITH_IMAGES = "ForConditionalGeneration"  # suffix of architectures that contain a language model
HEADLESS = ("TextModel", "Model")  # suffixes of architectures without a head
CLASSIFIES = "ForSequenceClassification"  # suffix of architectures with a head of labels
WITH_HEAD, OLDER_HEAD = "ForCausalLM", "LMHeadModel"
ENCODER_HEADS = ("ForMaskedLM", "ForPreTraining")  # suffixes of encoders with heads that fill gaps
_OLDER = ("GPT2", "OpenAIGPT", "CTRL")  # whose model with a head is called by the older suffix

Spellings = Callable[[str], tuple[str, ...]]
"""The names by which a config may call the module that families call so."""


def canonical(name: str) -> str:
    """The name that families use of a tensor or a module; others stay."""
    name = name.replace("LayerNorm.gamma", "LayerNorm.weight").replace("LayerNorm.beta", "LayerNorm.bias")
    parts = name.split(".", _LONGEST)
    for count in range(min(_LONGEST, len(parts)), 0, -1):
        beginning = ".".join(parts[:count])
        if beginning in _RENAMED:
            name = _RENAMED[beginning] + name.removeprefix(beginning)
            break
    for old, new in _PARTS.items():
        name = name.replace(old, new)
    return name


def with_head(architecture: str) -> str:
    """The architecture of the same model with a head that generates."""
    if architecture.endswith(OLDER_HEAD):
        return architecture
    if (stem := architecture.removesuffix(HEADLESS[-1]).removesuffix(CLASSIFIES)) in _OLDER:
        return stem + OLDER_HEAD
    for ending in (*HEADLESS, CLASSIFIES):
        if architecture.endswith(ending):
            return architecture.removesuffix(ending) + WITH_HEAD
    return architecture


def encoder_of(architecture: str) -> str:
    """The architecture of the same encoder without a head."""
    for ending in (*ENCODER_HEADS, CLASSIFIES):
        if architecture.endswith(ending):
            return architecture.removesuffix(ending) + HEADLESS[-1]
    return architecture


def spellings(architecture: str) -> Spellings:
    """Maps the name of a module to its spellings in configs of `architecture`."""
    beginnings: tuple[str, ...] = (f"{MODEL}.",)
    if architecture.endswith(WITH_IMAGES):
        beginnings = f"{MODEL}.{_INNER}.", f"{_INNER}.{MODEL}."
    elif architecture.endswith(HEADLESS) and not architecture.endswith(OLDER_HEAD):
        beginnings = ("",)

    def of(module: str) -> tuple[str, ...]:
        if module.startswith(f"{MODEL}."):
            inner = module.removeprefix(f"{MODEL}.")
            if module.startswith(f"{_LAYERS}.") and (layers := _LAYERS_OF.get(with_head(architecture))):
                return (layers + module.removeprefix(_LAYERS),)
            return tuple([beginning + inner for beginning in beginnings])
        return (module, f"{_INNER}.{module}") if architecture.endswith(WITH_IMAGES) else (module,)

    return of
