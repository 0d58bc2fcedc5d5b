"""Every field of the config classes of encoders is without effect, obeyed as in transformers, or refused by name.

The fields are found by inspection: a release that adds one fails here until it stands in one of the lists.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from support.checkpoints import COMPARED_ENCODERS, ENCODERS, edit_config, make, one_thread, prompts
from support.config_fields import FieldLists, distance, editor
from support.ragged import Driver

from slotwise.compute.kernels.reference import ReferenceKernels
from slotwise.compute.model.loading import load_model, read_config
from slotwise.compute.model.model_config import ModelConfig
from slotwise.errors import CheckpointError

pytestmark = pytest.mark.slow

LENGTHS = [5, 60]  # tokens; the second prompt is longer than every window
CLOSE, FAR = 1e-3, 1e-2  # differences of hidden states: of two ways to compute, and of two models
DERIVED = ("layer_types",)  # that transformers writes, from other fields

# Values that change nothing, neither in transformers' hidden states nor in what Slotwise reads.
NOTHING: dict[str, Any] = dict.fromkeys(
    ("attention_probs_dropout_prob", "classifier_dropout", "hidden_dropout_prob", "dropout", "attention_dropout",
     "qa_dropout", "seq_classif_dropout", "classifier_dropout_prob",
     "summary_last_dropout", "mlp_dropout", "embedding_dropout"), 0.5) | {
    "transformers_version": "4.1.0", "output_hidden_states": True, "return_dict": False, "chunk_size_feed_forward": 5,
    "id2label": {"0": "a"}, "label2id": {"a": 0}, "problem_type": "regression", "num_labels": 3, "pretraining_tp": 2,
    "initializer_range": 0.9, "initializer_cutoff_factor": 1.0, "use_cache": False, "bos_token_id": 5,
    "pad_token_id": 5, "cls_token_id": 5, "sep_token_id": 5, "mask_token_id": 5, "name_or_path": "elsewhere",
    "output_attentions": True, "tie_word_embeddings": False, "sinusoidal_pos_embds": True,
    "allow_global_per_layer_attribute_access": True, "serialize_explicit_per_layer_config": True,
    "summary_type": "last", "summary_activation": "tanh", "summary_use_proj": False, "classifier_pooling": "mean",
    "decoder_bias": False, "deterministic_flash_attn": True, "sparse_prediction": True, "sparse_pred_ignore_index": -1,
}  # fmt: skip
# Values that the same weights obey: the hidden states change, in both alike.
LINEAR = {"rope_type": "linear", "rope_theta": 10_000.0, "factor": 3.0}
EDITED: dict[str, Any] = {
    "layer_norm_eps": 0.5, "norm_eps": 0.5, "rms_norm_eps": 0.5, "hidden_act": "relu", "activation": "relu",
    "hidden_activation": "silu", "rope_parameters": LINEAR, "rope_scaling": LINEAR, "local_attention": 10,
    "sliding_window": 5, "layer_types": ["sliding_attention", "full_attention"] * 2, "num_attention_heads": 6,
    "n_heads": 6,
}  # fmt: skip
# Values that other weights obey: a checkpoint is made with each.
BUILT: dict[str, Any] = {
    "vocab_size": 1000, "hidden_size": 64, "dim": 64, "intermediate_size": 192, "hidden_dim": 192,
    "num_hidden_layers": 5, "n_layers": 5, "num_key_value_heads": 1,
    "head_dim": 16, "type_vocab_size": 3, "norm_bias": False, "attention_bias": True, "mlp_bias": True,
    "embedding_size": 64, "num_hidden_groups": 4,
}  # fmt: skip
# Values that the reader obeys without the hidden states: what must be read from them.
READ: dict[str, tuple[Any, Callable[[ModelConfig], Any], Any]] = {
    "dtype": ("bfloat16", lambda config: config.dtype, torch.bfloat16),
    "torch_dtype": ("bfloat16", lambda config: config.dtype, torch.bfloat16),
    "eos_token_id": ([7, 9], lambda config: config.eos_token_ids, (7, 9)),
    "max_position_embeddings": (128, lambda config: config.max_position_embeddings, 128),
    "classifier_activation": ("relu", lambda config: config.own.classifier_activation, "relu"),
    "classifier_bias": (True, lambda config: config.own.classifier_bias, True),
}
REFUSED: dict[str, Any] = {
    "is_encoder_decoder": True, "is_decoder": True, "add_cross_attention": True, "model_type": "opt",
    "architectures": ["OPTModel"], "per_layer_config": {"0": {"intermediate_size": 64}}, "inner_group_num": 2,
    "relative_attention_num_buckets": 16,
}  # fmt: skip
LISTS = (NOTHING, EDITED, BUILT, READ, REFUSED)

# Where a class differs from the others: the list of a field, and its value.
OF_POSITIONS = {"pad_token_id": (EDITED, 2), "rope_scaling": (NOTHING, LINEAR),
                "max_position_embeddings": (READ, (128, lambda config: config.max_position_embeddings, 126))}
PLAIN = {"rope_type": "default", "rope_theta": 1e5}
BY_KIND = {"full_attention": LINEAR, "sliding_attention": PLAIN}
OWN: dict[str, dict[str, tuple[dict[str, Any], Any]]] = {
    **dict.fromkeys(("roberta", "xlm_roberta", "camembert"), OF_POSITIONS),
    "bert": {"rope_scaling": (NOTHING, LINEAR)},
    "electra": {"rope_scaling": (NOTHING, LINEAR)},
    "electra_small": {"rope_scaling": (NOTHING, LINEAR)},
    "albert": {"rope_scaling": (NOTHING, LINEAR), "num_hidden_layers": (EDITED, 5)},
    "mpnet": OF_POSITIONS | {"pad_token_id": (NOTHING, 5), "num_attention_heads": (BUILT, 6)},
    "distilbert": {"rope_scaling": (NOTHING, LINEAR)},
    "nomic_bert": {"num_attention_heads": (BUILT, 6), "hidden_size": (BUILT, 128), "hidden_act": (EDITED, "gelu")},
    "eurobert": {"num_attention_heads": (BUILT, 8), "hidden_act": (REFUSED, "gelu")},
    "modernbert": {"rope_parameters": (EDITED, BY_KIND)},
}


def class_of(name: str) -> Any:
    import transformers

    return getattr(transformers, f"{ENCODERS[name][0]}Config")


FIELDS = FieldLists(LISTS, OWN, class_of)
listed = FIELDS.listed


def made(name: str, folder: Path, **fields: Any) -> Path:
    return edit_config(make(name, folder, kind="Model", **fields), **dict.fromkeys(DERIVED, ...))


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """A checkpoint of each class, without the layer types that transformers derives from other fields."""
    return cache(lambda name: made(name, tmp_path_factory.mktemp(name) / "model"))


@pytest.fixture
def edited(base: Callable[[str], Path], tmp_path: Path) -> Callable[..., Path]:
    return editor(base, tmp_path / "edited")


@pytest.fixture(autouse=True)
def threads() -> Iterator[None]:
    with one_thread():
        yield


def theirs(folder: Path) -> torch.Tensor:
    """The mean of the hidden states `[prompts, hidden]` that transformers gives."""
    from transformers import AutoModel

    model = AutoModel.from_pretrained(folder, dtype="float32", attn_implementation="eager").eval()
    with torch.inference_mode():
        return torch.stack([model(torch.tensor([ids]) % model.config.vocab_size, return_dict=True)
                            .last_hidden_state[0].mean(0) for ids in prompts(LENGTHS)])


def ours(folder: Path) -> torch.Tensor:
    decoder = load_model(folder, kernels=ReferenceKernels(), dtype="float32")
    decoder.logits = lambda hidden: hidden  # type: ignore[method-assign]
    rows = [[token % decoder.config.vocab_size for token in ids] for ids in prompts(LENGTHS)]
    hidden = Driver(decoder).step(list(enumerate(rows)), list(range(sum(LENGTHS))))
    return torch.stack([part.mean(0) for part in hidden.split(LENGTHS)])


@pytest.mark.parametrize("name", ENCODERS)
def test_every_field_stands_in_one_list(name: str) -> None:
    FIELDS.check_that_each_stands_in_one(name)


def test_the_lists_name_fields_that_exist() -> None:
    FIELDS.check_that_each_exists(ENCODERS)


@pytest.mark.parametrize("name", COMPARED_ENCODERS)
def test_what_changes_nothing(name: str, base: Callable[[str], Path], edited: Callable[..., Path]) -> None:
    config, hidden = read_config(base(name)), theirs(base(name))
    fields = listed(name, NOTHING)
    for field, value in fields.items():
        found = read_config(edited(name, **{field: value}))
        assert dataclasses.replace(found, tie_word_embeddings=config.tie_word_embeddings) == config, field
    assert distance(theirs(edited(name, **fields)), hidden) <= CLOSE, fields  # one that mattered would show among all


@pytest.mark.parametrize("name", COMPARED_ENCODERS)
def test_what_is_obeyed(name: str, base: Callable[[str], Path], edited: Callable[..., Path]) -> None:
    hidden = theirs(base(name))
    for field, value in listed(name, EDITED).items():
        folder = edited(name, **{field: value})
        expected = theirs(folder)
        assert distance(expected, hidden) > FAR, f"{field}: a value that tells nothing"
        assert distance(ours(folder), expected) <= CLOSE, field


@pytest.mark.parametrize("name", COMPARED_ENCODERS)
def test_what_other_weights_obey(name: str, edited: Callable[..., Path], tmp_path: Path) -> None:
    for field, value in listed(name, BUILT).items():
        folder = made(name, tmp_path / field, **{field: value})
        assert distance(ours(folder), theirs(folder)) <= CLOSE, field
        with pytest.raises(CheckpointError, match=r"has shape|lacks|leaves no room|must be"):
            load_model(edited(name, **{field: value}), kernels=ReferenceKernels())


@pytest.mark.parametrize("name", COMPARED_ENCODERS)
def test_what_is_read(name: str, edited: Callable[..., Path]) -> None:
    for field, (value, read, expected) in listed(name, READ).items():
        folder = edited(name, **({"dtype": ...} if field == "torch_dtype" else {}) | {field: value})
        assert read(read_config(folder)) == expected, field


@pytest.mark.parametrize("name", COMPARED_ENCODERS)
def test_what_is_refused(name: str, edited: Callable[..., Path]) -> None:
    FIELDS.check_refused(name, REFUSED, edited)


@pytest.mark.parametrize("name", COMPARED_ENCODERS)
def test_what_is_absent_is_as_in_transformers_or_refused(name: str, edited: Callable[..., Path]) -> None:
    FIELDS.check_absent(name, edited, EDITED, BUILT)
