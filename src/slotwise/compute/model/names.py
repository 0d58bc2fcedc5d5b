"""One name for every tensor and module, and the names by which files call it.

Families use those of a language model with a head: `model.layers.0.mlp.up_proj`, `lm_head`.  Others are in use:

    layers.0.mlp.up_proj                         of a model that was saved without its head
    model.language_model.layers.0.mlp.up_proj    of one for images and text
    backbone.layers.0.mixer.in_proj              of Mamba and its hybrids
    language_model.model.layers.0.mlp.up_proj    the same before transformers 4.52, which it also saves

Tensors, adapters and whole names in the lists of a config are renamed by `canonical`; expressions and parts of names
are compared with all `spellings` of a module.
"""

from __future__ import annotations

from collections.abc import Callable

MODEL, HEAD = "model", "lm_head"
_INNER = "language_model"
_BACKBONE, _TABLE = "backbone", f"{MODEL}.embed_tokens"
_TABLES = [f"{each}.embedding{ending}" for each in (_BACKBONE, MODEL) for ending in ("", "s")]
_RENAMED = (  # beginnings of names
    *[(table, _TABLE) for table in _TABLES], (_BACKBONE, MODEL),
    (f"{_INNER}.{MODEL}", MODEL), (f"{MODEL}.{_INNER}", MODEL), (f"{_INNER}.{HEAD}", HEAD), (_INNER, MODEL),
    *[(part, f"{MODEL}.{part}") for part in ("layers", "embed_tokens", "norm", "norm_f")])
WITH_IMAGES = "ForConditionalGeneration"  # suffix of architectures that contain a language model
HEADLESS = ("TextModel", "Model")  # suffixes of architectures without a head
CLASSIFIES = "ForSequenceClassification"  # suffix of architectures with a head of labels
WITH_HEAD = "ForCausalLM"
ENCODER_HEADS = ("ForMaskedLM", "ForPreTraining")  # suffixes of encoders with heads that fill gaps

FIRST_TOKEN = ("Bert", "bert", "Roberta", "MPNet", "Electra")  # in names of models whose first token sums up a text

Spellings = Callable[[str], tuple[str, ...]]
"""The names by which a config may call the module that families call so."""


def canonical(name: str) -> str:
    """The name that families use of a tensor or a module; others stay."""
    for old, new in _RENAMED:
        if name == old or name.startswith(f"{old}."):
            return new + name.removeprefix(old)
    return name


def with_head(architecture: str) -> str:
    """The architecture of the same model with a head that generates."""
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


def pools_first_token(architecture: str) -> bool:
    """Whether the hidden state of the first token stands for a text, as in BERT and after it."""
    return any(part in architecture for part in FIRST_TOKEN)


def spellings(architecture: str) -> Spellings:
    """Maps the name of a module to its spellings in configs of `architecture`."""
    beginnings: tuple[str, ...] = (f"{MODEL}.",)
    if architecture.endswith(WITH_IMAGES):
        beginnings = f"{MODEL}.{_INNER}.", f"{_INNER}.{MODEL}."
    elif architecture.endswith(HEADLESS):
        beginnings = ("",)

    def of(module: str) -> tuple[str, ...]:
        if module.startswith(f"{MODEL}."):
            return tuple([beginning + module.removeprefix(f"{MODEL}.") for beginning in beginnings])
        return (module, f"{_INNER}.{module}") if architecture.endswith(WITH_IMAGES) else (module,)

    return of
