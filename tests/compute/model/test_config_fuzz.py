"""Random configs mean here what they mean in transformers, or are refused: the logits of the same weights are equal."""

from __future__ import annotations

import random
import shutil
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from huggingface_hub.errors import StrictDataclassError
from support.checkpoints import edit_config, make, one_thread, prompts, reference_model
from support.ragged import Driver

from slotwise.compute.kernels.reference import ReferenceKernels
from slotwise.compute.model.loading import load_model
from slotwise.errors import CheckpointError

FAMILIES = {
    "llama2": {}, "qwen2": {}, "phi3": {}, "smollm3": {}, "gpt_oss": {"sliding_window": 20},
    "gemma3": {"sliding_window": 20}, "olmo3": {"sliding_window": 20}}
CASES = 20  # of a family
SEED = 45
LENGTHS = [5, 60]  # tokens; the second prompt is longer than every window
CLOSE = 2e-3  # of logits

SCALED: dict[str, list[Any]] = {  # of YaRN
    "attention_factor": [None, 0.9, 1.3], "beta_fast": [None, 32, 16], "beta_slow": [None, 1, 2],
    "mscale": [None, 1.0, 0.7], "mscale_all_dim": [None, 1.0, 0.5], "truncate": [None, True, False],
}  # fmt: skip
FIELDS: dict[str, list[Any]] = {  # ... (Ellipsis) takes one out
    "rope_theta": [1e4, 3e5, ...], "original_max_position_embeddings": [128, 512, ...],
    "partial_rotary_factor": [0.5, 1.0, ...], "sliding_window": [9, 30, None, ...],
    "use_sliding_window": [True, False, ...], "max_window_layers": [0, 1, 2], "sliding_window_pattern": [2, 3, None],
    "layer_types": [None, [], ...], "no_rope_layers": [None, [], ...], "tie_word_embeddings": [..., True, False],
    "rms_norm_eps": [1e-3, ...], "final_logit_softcapping": [2.0, None, ...], "swiglu_limit": [0.5, ...],
    "per_layer_config": [{}, None], "quantization_config": [None, ...], "eos_token_id": [None, [], [3]],
    "max_position_embeddings": [512, ...],
}  # fmt: skip


def rope(draw: random.Random) -> dict[str, Any]:
    kind = draw.choice(["default", "linear", "llama3", "yarn", "yarn"])
    found: dict[str, Any] = {draw.choice(["rope_type", "type"]): kind}
    if draw.random() < 0.6:
        found["rope_theta"] = draw.choice([1e4, 1234.0])
    if kind != "default":
        found["factor"] = draw.choice([2.0, 4.0])
    if kind == "llama3":
        found |= {"low_freq_factor": 1.0, "high_freq_factor": 4.0}
    if kind in ("llama3", "yarn") and draw.random() < 0.7:
        found["original_max_position_embeddings"] = draw.choice([128, 256])
    if kind == "yarn":
        found |= {name: draw.choice(values) for name, values in SCALED.items() if draw.random() < 0.4}
    return found


def changes(draw: random.Random) -> dict[str, Any]:
    """Fields of a config.json, the rotary embedding among them in half of all cases."""
    found = {name: draw.choice(FIELDS[name]) for name in draw.sample(sorted(FIELDS), draw.randint(0, 3))}
    if draw.random() < 0.5:
        by_kind = {kind: rope(draw) for kind in ("full_attention", "sliding_attention")}
        for name in ("rope_scaling", "rope_parameters"):
            value = draw.choice([{}, None, ..., rope(draw), by_kind, "unchanged"])
            found |= {} if value == "unchanged" else {name: value}
    return found


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    return cache(lambda family: make(family, tmp_path_factory.mktemp(family), **FAMILIES[family]))


@pytest.mark.parametrize("family", list(FAMILIES))
def test_a_config_means_what_it_means_in_transformers_or_is_refused(family, base, tmp_path):
    draw, asked, num_compared = random.Random(f"{SEED} {family}"), prompts(LENGTHS), 0
    for number in range(CASES):
        fields = changes(draw)
        folder = edit_config(Path(shutil.copytree(base(family), tmp_path / str(number))), **fields)
        with one_thread(), torch.inference_mode():
            try:
                found = Driver(load_model(folder, kernels=ReferenceKernels(), dtype="float32")).step(
                    list(enumerate(asked)))
            except CheckpointError:
                continue
            try:
                model = reference_model(folder, "float32")
                expected = torch.cat([model(torch.tensor([ids])).logits[:, -1] for ids in asked])
            except (StrictDataclassError, ValueError, TypeError, KeyError):  # it cannot load or run the config
                continue
        assert (found - expected).abs().max().item() <= CLOSE, fields
        num_compared += 1
    assert num_compared >= CASES // 3
