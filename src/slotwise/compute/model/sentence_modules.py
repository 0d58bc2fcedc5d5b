"""What a checkpoint's files say of vectors and labels: sentence-transformers' modules, pooling, prompts and labels.

    modules.json                         Transformer ─► Pooling ─► Dense ... ─► Normalize
    1_Pooling/config.json                which hidden states become the vector
    2_Dense/config.json                  a product behind it, with weights in 2_Dense/model.safetensors
    sentence_bert_config.json            tokens of the longest text
    config_sentence_transformers.json    prompts: texts that stand before the one to embed
    config.json                          names of labels, and what their numbers pass

Does not import torch.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import NamedTuple

from slotwise.compute.model.fields import MAX_JSON_BYTES, Fields, read_json
from slotwise.compute.model.names import CLASSIFIES, HEADLESS
from slotwise.errors import CheckpointError
from slotwise.platform.files import has_part, read_part

MODULES, POOLING, PROMPTS = "modules.json", "1_Pooling", "config_sentence_transformers.json"
SUPPORTED = ("Transformer", "Pooling", "Dense", "Normalize")  # by the last part of a module's type, in this order
TRANSFORMER = tuple(f"sentence_{model}_config.json" for model in (
    "bert", "roberta", "distilbert", "camembert", "albert", "xlm-roberta", "xlnet"))
TRANSFORMER_PLAIN: dict[str, tuple[object, ...]] = {  # values that are obeyed here, of the fields of such a file
    "do_lower_case": (False, None), "method_output_name": (None,), "model_args": ({}, None),
    "tokenizer_args": ({}, None), "config_args": ({}, None)}
TASK, TOKENS_TASK = "transformer_task", "feature-extraction"
TASKS = {  # for each task the names of the module's output, and of the model's
    TOKENS_TASK: ("token_embeddings", "last_hidden_state"), "sequence-classification": ("scores", "logits")}
FLAGS = {  # of a pooling module, with the pooling they stand for
    "pooling_mode_cls_token": "cls", "pooling_mode_mean_tokens": "mean", "pooling_mode_max_tokens": "max",
    "pooling_mode_mean_sqrt_len_tokens": "mean_sqrt_len_tokens", "pooling_mode_weightedmean_tokens": "weightedmean",
    "pooling_mode_lasttoken": "last"}
MODES = {"lasttoken": "last"}  # values of the newer field `pooling_mode` that are not the pooling's own name
CLASSIFIER_POOLING = {"bos": "cls"}  # values of `classifier_pooling` that are not the pooling's own name
SIGMOID, SOFTMAX, IDENTITY = "sigmoid", "softmax", "identity"
MAX_DENSE = 8  # modules
MAX_TOKENIZER_BYTES = 256 << 20
MAX_LABELS = 1 << 16
_PROBLEMS = {"regression": "", "single_label_classification": SOFTMAX, "multi_label_classification": SIGMOID}


class DenseFields(NamedTuple):
    """A `Dense` module: its folder, which holds its weights, and its sizes."""

    folder: str
    inputs: int
    outputs: int
    bias: bool
    activation: str  # the name of its class, in lower case; "": identity


class SentenceModules(NamedTuple):
    """The modules of a checkpoint."""

    pooling: str  # "": the files do not say
    normalizes: bool
    dense: tuple[DenseFields, ...] = ()
    is_declared: bool = False  # there are such files
    objection: str = ""  # why vectors would be wrong; "": they are not
    max_seq_length: int = 0  # tokens; 0: the files do not say


class Prompts(NamedTuple):
    """What texts begin with, by the name of their use."""

    by_name: dict[str, str]
    default: str  # the name; "": texts begin with nothing


class Labels(NamedTuple):
    """The labels of a model that classifies."""

    names: tuple[str, ...]
    activation: str  # of their numbers: `sigmoid`, `softmax` or ""


def read_modules(folder: Path) -> SentenceModules:
    """The modules of the checkpoint in `folder`.  Raises CheckpointError for a malformed file."""
    modules = _read_modules(folder)
    if (name := next((name for name in TRANSFORMER if has_part(folder / name)), None)) is None:
        return modules
    fields = read_json(folder / name)
    longest = fields.integer("max_seq_length") if fields.has("max_seq_length") else 0
    task = fields.values.get(TASK, TOKENS_TASK)
    if not isinstance(task, str) or task not in TASKS:
        return _refused(f"{name} has the {TASK} {task!r:.40}, which is not supported")
    scores, output = TASKS[task]
    plain = TRANSFORMER_PLAIN | {
        TASK: (task,), "module_output_name": (scores,),
        "modality_config": ({"text": {"method": "forward", "method_output_name": output}}, None)}
    for field, value in fields.values.items():
        if field != "max_seq_length" and value not in plain.get(field, ()):
            raise fields.error(field, f"{value!r:.60} is not supported")
    return modules._replace(max_seq_length=longest)


def _read_modules(folder: Path) -> SentenceModules:
    path, normalizes, pooling_folder = folder / MODULES, True, POOLING
    dense: list[DenseFields] = []
    if has_part(path):
        modules = _listed(path)
        kinds = [kind for kind, _ in modules]
        if others := [kind for kind in kinds if kind not in SUPPORTED]:
            return _refused(f"{MODULES} has the module {others[0]:.40}, which is not supported")
        if kinds != sorted(kinds, key=SUPPORTED.index) or any(kinds.count(one) > 1 for one in kinds if one != "Dense"):
            return _refused(f"{MODULES} has the modules {', '.join(kinds):.120}, and an order other than "
                            f"{', '.join(SUPPORTED)} is not supported")
        if kinds.count("Dense") > MAX_DENSE:
            return _refused(f"{MODULES} has more than {MAX_DENSE} Dense modules")
        normalizes = "Normalize" in kinds
        for kind, place in modules:
            if Path(place).name != place or (kind == "Dense" and not place):
                raise CheckpointError(f"{path}: the path of a module must be the name of a folder, not {place!r:.40}")
            if kind == "Pooling":
                pooling_folder = place or POOLING
            elif kind == "Dense":
                dense.append(_dense(folder, place))
    config = folder / pooling_folder / "config.json"
    if not has_part(config):
        return SentenceModules("", normalizes, tuple(dense), has_part(path))
    fields = read_json(config)
    kind = _pooling(fields)
    if kind not in (*FLAGS.values(), *MODES.values()):
        return _refused(f"{pooling_folder}/config.json says {kind:.60}, which is not supported")
    if not fields.flag("include_prompt", default=True):
        return _refused(f"{pooling_folder}/config.json leaves the prompt out of the pooling, which is not supported")
    return SentenceModules(kind, normalizes, tuple(dense), is_declared=True)


def _refused(objection: str) -> SentenceModules:
    return SentenceModules("", normalizes=True, is_declared=True, objection=objection)


def _pooling(fields: Fields) -> str:
    """The pooling that a module's config names; of several all, as text.  They would be concatenated."""
    if fields.has("pooling_mode"):
        mode = fields.text("pooling_mode")
        return MODES.get(mode, mode)
    kinds = [kind for name, kind in FLAGS.items() if fields.flag(name)]
    return " and ".join(kinds) if kinds else "mean"


def _dense(folder: Path, place: str) -> DenseFields:
    fields = read_json(folder / place / "config.json")
    activation = fields.text("activation_function", default="tanh").rpartition(".")[2].lower()
    return DenseFields(
        place, fields.integer("in_features"), fields.integer("out_features"), fields.flag("bias", default=True),
        "" if activation == IDENTITY else activation)


def _listed(path: Path) -> list[tuple[str, str]]:
    """Kind and folder of each of a checkpoint's modules; the kind is the last part of its type."""
    try:
        found = json.loads(read_part(path, MAX_JSON_BYTES))
    except OSError as error:
        raise CheckpointError(f"cannot read {path}: {error.strerror}") from error
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{path} is not valid JSON ({error}): download the checkpoint again") from error
    if not isinstance(found, list) or not all(isinstance(module, dict) for module in found):
        raise CheckpointError(f"{path} must hold a list of objects")
    return [(str(module.get("type", "")).rpartition(".")[2], str(module.get("path", ""))) for module in found]


def read_prompts(folder: Path) -> Prompts:
    """The prompts of a checkpoint.  Raises CheckpointError for a malformed file."""
    if not has_part(folder / PROMPTS):
        return Prompts({}, "")
    fields = read_json(folder / PROMPTS)
    prompts = fields.section("prompts")
    by_name = {name: prompts.text(name) for name in prompts.values if prompts.has(name)}
    default = fields.text("default_prompt_name", default="")
    if default and default not in by_name:
        raise fields.error("default_prompt_name", f"must be one of {', '.join(by_name) or 'the prompts'}, not "
                           f"{default!r:.40}")
    return Prompts(by_name, default)


def read_labels(fields: Fields) -> Labels:
    """The labels that a config.json names, as transformers counts them; () for a model that does not classify.

    Their numbers pass what the config says for sentence-transformers or for its `problem_type`; by default a sigmoid if
    there is one label, else a softmax.
    """
    if not is_classifier(fields):
        return Labels((), "")
    named = fields.section("id2label")
    count = len(named.values) or fields.integer("num_labels", default=2, maximum=MAX_LABELS)
    if count > MAX_LABELS:
        raise fields.error("id2label", f"must have at most {MAX_LABELS} labels, not {count}")
    names = tuple(named.text(str(index), default=f"LABEL_{index}") for index in range(count))
    own = fields.section("sentence_transformers").text("activation_fn", default=fields.text(
        "sbert_ce_default_activation_function", default=""))
    if own:
        activation = own.rpartition(".")[2].lower()
        if activation not in (SIGMOID, SOFTMAX, IDENTITY):
            raise fields.error("activation_fn", f"{own:.60} is not supported: Sigmoid, Softmax and Identity are")
        return Labels(names, "" if activation == IDENTITY else activation)
    activation = _PROBLEMS.get(fields.text("problem_type", default=""), SOFTMAX)
    return Labels(names, SIGMOID if count == 1 and activation == SOFTMAX else activation)


def is_classifier(fields: Fields) -> bool:
    """Whether a config.json is that of a model with a head of labels."""
    return any(name.endswith(CLASSIFIES) for name in fields.texts("architectures")[:1])


def makes_vectors(fields: Fields) -> bool:
    """Whether a config.json is that of a model without a head."""
    return any(name.endswith(HEADLESS) for name in fields.texts("architectures")[:1])


def classifier_pooling(fields: Fields) -> str:
    """The pooling that a config.json names for a head of labels; "": it names none."""
    pooling = fields.text("classifier_pooling", default="") if is_classifier(fields) else ""
    return CLASSIFIER_POOLING.get(pooling, pooling)


def read_separator(folder: Path) -> int:
    """The token that the tokenizer in `folder` writes behind each of two texts; -1: its files do not say."""
    tokenizer, text = folder / "tokenizer.json", "[SEP]"
    if not has_part(tokenizer):
        return -1
    for file in ("special_tokens_map.json", "tokenizer_config.json"):
        named = read_json(folder / file).values.get("sep_token") if has_part(folder / file) else None
        text = named.get("content", text) if isinstance(named, dict) else named or text
    fields = read_json(tokenizer, MAX_TOKENIZER_BYTES)
    added, vocabulary = fields.values.get("added_tokens"), fields.section("model").values.get("vocab")
    for token in added if isinstance(added, list) else ():
        if isinstance(token, dict) and token.get("content") == text and isinstance(token.get("id"), int):
            return max(-1, int(token["id"]))
    found = vocabulary.get(text) if isinstance(vocabulary, dict) else None
    return max(-1, found) if isinstance(found, int) else -1
