"""Ready means ready: no engine starts that cannot compute, and what is wrong with its weights is named."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from support.checkpoints import make
from support.live import cli

from slotwise.compose.engine_builder import build_engine
from slotwise.compute.kernels.reference import ReferenceKernels
from slotwise.compute.model.family_table import tensor_shapes
from slotwise.compute.model.loading import load_model, read_config
from slotwise.core.step_time import StepTimeModel, Work
from slotwise.engine.config import EngineConfig
from slotwise.engine.warmup import FirstStepError
from slotwise.errors import CheckpointError
from slotwise.observe import step_time_store as step_time

NAMES = ("model.embed_tokens.weight", "model.norm.weight", "lm_head.weight", "model.layers.1.self_attn.k_proj.weight",
         "model.layers.2.mlp.up_proj.bias", "model.layers.0.input_layernorm.weight")
LARGE = 3e38  # nearly the greatest float32


@pytest.fixture(scope="module")
def sound(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make("llama_bias", tmp_path_factory.mktemp("sound") / "model", tokenizer=True, tie_word_embeddings=False)


@pytest.fixture
def folder(sound: Path, tmp_path: Path) -> Path:
    """A copy, to be spoiled."""
    return Path(shutil.copytree(sound, tmp_path / "model"))


def spoil(folder: Path, name: str, value: float, kind: torch.dtype = torch.float32) -> Path:
    """Sets a number in the middle of the tensor; all of them, where it is to be large."""
    path = folder / "model.safetensors"
    weights = {one: tensor.to(kind) for one, tensor in load_file(path).items()}
    flat = weights[name].view(-1)
    flat[:] = value if value == LARGE else flat
    flat[len(flat) // 2] = value
    path.unlink()
    save_file(weights, path)
    (folder / "config.json").write_text(json.dumps(
        json.loads((folder / "config.json").read_text()) | {"dtype": str(kind).removeprefix("torch.")}))
    return folder


def config(folder: Path, **settings: object) -> EngineConfig:
    return EngineConfig.of(model=str(folder), kv_cache_memory=1 << 22, max_num_seqs=4, **settings)


@pytest.mark.parametrize("kind", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("name", NAMES)
def test_a_tensor_that_is_not_finite_is_named(folder: Path, name: str, value: float, kind: torch.dtype) -> None:
    with pytest.raises(CheckpointError, match=f": {name} holds NaN or infinite numbers: download"):
        load_model(spoil(folder, name, value, kind), kernels=ReferenceKernels())


def test_every_tensor_is_looked_at(folder: Path) -> None:
    names = list(tensor_shapes(read_config(folder)))
    weights = load_file(folder / "model.safetensors")
    assert len(names) > 30 and set(names) == set(weights)
    for name in names:
        spoilt = weights | {name: weights[name].clone()}
        spoilt[name].view(-1)[-1] = float("nan")
        (folder / "model.safetensors").unlink()
        save_file(spoilt, folder / "model.safetensors")
        with pytest.raises(CheckpointError, match=f": {name} holds NaN"):
            load_model(folder, kernels=ReferenceKernels())


def test_numbers_too_large_for_the_type_they_are_loaded_as(folder: Path) -> None:
    spoil(folder, "lm_head.weight", 1e30)
    with pytest.raises(CheckpointError, match=r"lm_head\.weight holds numbers too large for float16: try --dtype"):
        load_model(folder, kernels=ReferenceKernels(), dtype="float16")
    load_model(folder, kernels=ReferenceKernels(), dtype="float32")


@pytest.mark.parametrize("device", ["cpu", "reference"])
def test_finite_weights_whose_logits_are_not(folder: Path, device: str) -> None:
    spoil(folder, "model.norm.weight", LARGE)
    with pytest.raises(FirstStepError, match="its logits are NaN or infinite"):
        build_engine(config(folder, device=device, dtype="float32"))


def test_a_step_is_run_also_where_step_times_are_known(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(folder.parent / "cache"))
    monkeypatch.setenv("NUMBA_CACHE_DIR", "")
    asked = config(folder, device="reference")
    _, info = build_engine(asked)
    times = StepTimeModel()
    times.learn(Work(1, 1, 10, 0.0), 0.004)
    step_time.save(step_time.path_for(step_time.traits(asked, info)), times)  # the next start has no step to learn from
    spoil(folder, "model.norm.weight", LARGE)
    with pytest.raises(FirstStepError):
        build_engine(asked)


@pytest.mark.slow
def test_a_server_does_not_start(folder: Path) -> None:
    done = cli("serve", str(spoil(folder, "model.norm.weight", LARGE)), "--port", "0", "--dtype", "float32")
    assert done.returncode == 1 and "Ready" not in done.stdout
    (line,) = done.stderr.splitlines()
    assert "the first step failed: its logits are NaN or infinite" in line
