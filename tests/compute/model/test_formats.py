"""What is no checkpoint is told as what it is, in one line, before anything is started."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from support.live import cli

from slotwise.compute.model.checkpoint import locate
from slotwise.errors import CheckpointError

CONFIG = {"architectures": ["LlamaForCausalLM"], "model_type": "llama"}
ADAPTER = {"peft_type": "LORA", "r": 8, "base_model_name_or_path": "owner/base"}
KINDS = {  # by what is told: files of a folder
    "a LoRA adapter for owner/base": {"adapter_config.json": ADAPTER, "adapter_model.safetensors": ""},
    "a GGML file": {"model-q4_0.ggml": "", "config.json": CONFIG, "tokenizer.json": {}},
    "pickled weights": {"pytorch_model.bin": "", "config.json": CONFIG, "tokenizer.json": {}},
    "an ONNX model": {"config.json": CONFIG, "onnx/model_q4.onnx": "", "tokenizer.json": {}},
    "an OpenVINO model": {"config.json": CONFIG, "openvino_model.bin": "", "openvino_model.xml": ""},
    "an MLX model": {"config.json": CONFIG, "weights.npz": ""},
    "a diffusers pipeline": {"model_index.json": {"_class_name": "FluxPipeline"}, "unet/config.json": {},
                             "text_encoder/model.safetensors": ""},
    "a tokenizer without a model": {"tokenizer.json": {}, "tokenizer_config.json": {}},
    "a Core ML model": {"config.json": {}, "Model.mlpackage/Manifest.json": {}},
    "a TensorFlow or Flax model": {"config.json": CONFIG, "flax_model.msgpack": ""},
    "weights in their maker's own layout": {"params.json": {}, "consolidated.00.pth": "", "tokenizer.model": ""},
    "a TensorRT engine": {"config.json": {}, "rank0.engine": ""},
    "a part of a training state": {"__0_0.distcp": "", ".metadata": ""},
    "no model.safetensors": {"config.json": CONFIG, "tokenizer.json": {}},
    "give one of them": {"a/config.json": CONFIG, "b/config.json": CONFIG, "logs/x": ""},
    "no config.json": {"model.safetensors": "", "tokenizer.json": {}},
}  # fmt: skip
FILES = {
    "llama.gguf": "does not begin as a GGUF file does",
    "pytorch_model.bin": "is pickled weights", "model.onnx": "is an ONNX model",
    "model.safetensors": "is a file of a checkpoint: give the folder",
    "x.txt": "is not a model: give a GGUF file, or the folder that holds config.json",
    "consolidated.00.pth": "is weights in their maker's own layout"}


def written(folder: Path, files: dict[str, object]) -> Path:
    for name, content in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(content if isinstance(content, str) else json.dumps(content))
    return folder


def refusal(path: Path) -> str:
    with pytest.raises(CheckpointError) as caught:
        locate(path)
    assert str(caught.value).isprintable()
    return str(caught.value)


@pytest.mark.parametrize("told", KINDS)
def test_a_folder_is_told_as_what_it_holds(told: str, tmp_path: Path) -> None:
    message = refusal(written(tmp_path / "model", KINDS[told]))
    assert told in message and message.startswith(f"{tmp_path / 'model'} h")


@pytest.mark.parametrize("name", FILES)
def test_a_file_is_told_as_what_it_is(name: str, tmp_path: Path) -> None:
    (tmp_path / name).write_bytes(b"")
    assert f"{tmp_path / name} {FILES[name]}" in refusal(tmp_path / name)


def test_a_pipe_is_not_waited_for(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    assert "is not a model: give a GGUF file" in refusal(tmp_path / "pipe")


def test_folders_that_are_offered_are_there(tmp_path: Path) -> None:
    written(tmp_path, {f"{name}/config.json": CONFIG for name in "abcde"})
    assert f"({', '.join(str(tmp_path / name) for name in 'abc')})" in refusal(tmp_path)


def test_other_formats_beside_a_checkpoint_are_left_alone(checkpoint: Callable[[str], Path], tmp_path: Path) -> None:
    folder = Path(shutil.copytree(checkpoint("llama2"), tmp_path / "model"))
    written(folder, {"model.gguf": "GGUF", "onnx/model.onnx": "", "pytorch_model.bin": "", "tf_model.h5": ""})
    assert locate(folder) == folder


@pytest.mark.parametrize(
    "content", ["{", "[]", "{}", '{"base_model_name_or_path": 5}', '{"base_model_name_or_path": "a\\nb"}'])
def test_an_adapter_beside_weights_is_refused_too(
    content: str, checkpoint: Callable[[str], Path], tmp_path: Path
) -> None:
    """transformers loads such a folder as the adapter on its base model: other answers than the weights beside it."""
    folder = Path(shutil.copytree(checkpoint("llama2"), tmp_path / "model"))
    (folder / "adapter_config.json").write_text(content)
    message = refusal(folder)
    assert "holds a LoRA adapter" in message and "or remove adapter_config.json" in message


def test_a_folder_that_may_not_be_read_is_said_to_be_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def denied(path: object) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(os, "scandir", denied)
    assert "cannot read" in refusal(tmp_path) and "Permission denied" in refusal(tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("command", ["serve", "generate"])
def test_the_command_line_says_it_in_one_line(command: str, tmp_path: Path) -> None:
    save_file({"base_model.model.q_proj.lora_A.weight": torch.ones(8, 96)}, tmp_path / "adapter_model.safetensors")
    written(tmp_path, {"adapter_config.json": ADAPTER})
    model = [str(tmp_path)] if command == "serve" else ["--model", str(tmp_path), "x"]
    done = cli(command, *model)
    assert done.returncode == 1 and not done.stdout
    (line,) = done.stderr.splitlines()
    assert line.startswith(f"slotwise {command}: {tmp_path} holds a LoRA adapter for owner/base")


@pytest.mark.parametrize("config", ['{"architectures": ', "[]"])
def test_a_config_that_is_damaged_is_told_before_weights_are_missed(config: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(config)
    assert "config.json" in refusal(tmp_path) and "model.safetensors" not in refusal(tmp_path)
