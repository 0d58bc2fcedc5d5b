"""Quantized checkpoints, truncated, mislabeled or hostile: an error that names file and field, or no change at all."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from support import quantized_checkpoints as quantized
from support.checkpoints import make, one_thread, prompts
from support.ragged import Driver
from torch import Tensor

from slotwise.compute.kernels.reference import ReferenceKernels
from slotwise.compute.model.loading import load_model
from slotwise.errors import MOST_CHARACTERS, CheckpointError

pytestmark = pytest.mark.slow
KINDS = ["gptq 4, act-order", "awq", "W4A16, asymmetric", "W8A8, static", "FP8, blocks", "MXFP4", "DeepSeek's FP8",
         "NF4, double"]
VALUES: list[Any] = [
    None, True, False, 0, 1, -1, 3, 8, 64, 2**31, 2**70, 0.5, -1e308, float("nan"), float("inf"), "", "x", "\ud800",
    "a\nb\x1b[31m", "x" * 10_000, [], [[]], [1, "a"], ["a", "b"], ["(a+)+$"], ["re:(a+)+$"], [2**70], [None],
    [128, 2**40], {}, {"a": 1}, [{}], {"group_0": 7}, json.loads("[" * 400 + "]" * 400)]
SIZES = quantized.SIZES | {"num_hidden_layers": 1, "vocab_size": 1024}
DTYPES = [torch.float32, torch.float16, torch.bfloat16, torch.int32, torch.int64, torch.int8, torch.uint8]


@pytest.fixture(scope="module", params=KINDS)
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A quantized checkpoint, put back by what changes it."""
    at = tmp_path_factory.mktemp("hostile")
    with one_thread():
        quantized.quantize(make("llama3", at / "dense", **SIZES), at / "model", quantized.KINDS[request.param]())
        yield at / "model"


def logits(folder: Path) -> Tensor:
    return Driver(load_model(folder, kernels=ReferenceKernels())).step([(0, prompts([5])[0])])


def check(folder: Path, expected: Tensor, *named: str) -> str:
    """What loading the folder is refused with, which must name one of `named`; "": it changes no logit."""
    try:
        found = logits(folder)
    except CheckpointError as error:
        message = str(error)
        assert 0 < len(message) <= MOST_CHARACTERS and message.isprintable()
        assert folder.name in message and any(name in message for name in named), (named, message)
        return message
    assert torch.equal(found, expected)
    return ""


def paths_of(config: Any, at: tuple[str, ...] = ()) -> Iterator[tuple[str, ...]]:
    """Every field of a config, nested ones too."""
    for name, value in config.items() if isinstance(config, dict) else ():
        yield (*at, name)
        yield from paths_of(value, (*at, name))


def test_fields_of_the_config(folder: Path) -> None:
    path, expected = folder / "config.json", logits(folder)
    before = path.read_text()
    fields = [*paths_of(json.loads(before)["quantization_config"]), ("rotation",), ("config_groups", "group_1")]
    draw, told = random.Random(0), 0
    for at, value in draw.sample([(at, value) for at in fields for value in VALUES], 60):
        config = json.loads(before)
        inner = config["quantization_config"]
        for part in at[:-1]:
            inner = inner.setdefault(part, {}) if isinstance(inner, dict) else {}
        inner[at[-1]] = value
        path.write_text(json.dumps(config))
        # A field may ask for tensors or shapes that are not there, and is then named by the file that says it.
        told += bool(check(folder, expected, at[-1], *at, "config.json"))
    path.write_text(before)
    assert told > 20 and not check(folder, expected)


def changed(draw: random.Random, tensor: Tensor) -> tuple[str, Tensor | None]:
    """One way to spoil a tensor, and what is then there; None: nothing."""
    kind = draw.choice(["missing", "renamed", "type", "flat", "longer", "shorter", "empty", "NaN"])
    other = draw.choice([dtype for dtype in DTYPES if dtype.is_floating_point is not tensor.dtype.is_floating_point])
    shapes = {"flat": (1, 1, tensor.numel()), "longer": (*tensor.shape[:-1], 7), "shorter": (3, *tensor.shape[1:]),
              "empty": (0,)}
    if kind in shapes:
        return kind, torch.zeros(shapes[kind], dtype=tensor.dtype)
    if kind == "NaN":
        return kind, torch.full(tensor.shape, torch.nan).to(torch.float32)
    return kind, tensor.to(other) if kind == "type" else None


def test_tensors_of_the_file(folder: Path) -> None:
    path, expected, draw = folder / "model.safetensors", logits(folder), random.Random(1)
    before = path.read_bytes()
    tensors = load_file(path)
    parts = [name for name in tensors if "_proj." in name]
    told = 0
    for _ in range(30):
        name = draw.choice(parts)
        kind, instead = changed(draw, tensors[name])
        others = {other: tensor for other, tensor in tensors.items() if other != name}
        if instead is None:
            quantized.save(others | ({f"{name}_": tensors[name]} if kind == "renamed" else {}), folder)
        else:
            quantized.save(others | {name: instead}, folder)
        told += bool(check(folder, expected, name))
    path.write_bytes(before)
    assert told > 20 and not check(folder, expected)


def test_bytes_of_the_file(folder: Path) -> None:
    """Truncated, and with a header that says something else."""
    path, expected, draw = folder / "model.safetensors", logits(folder), random.Random(2)
    before = path.read_bytes()
    header = int.from_bytes(before[:8], "little")
    for _ in range(10):
        path.write_bytes(before[: draw.randrange(len(before))])
        assert "damaged or incomplete" in check(folder, expected, "model.safetensors")
    for _ in range(15):
        spoilt = bytearray(before)
        for _ in range(draw.randrange(1, 4)):
            spoilt[8 + draw.randrange(header)] = draw.randrange(32, 127)
        path.write_bytes(spoilt)
        check(folder, expected, "model.")  # the file's name, or a tensor's
    path.write_bytes(before)
    assert not check(folder, expected)


def test_another_formats_config(tmp_path: Path) -> None:
    """Each file under the config of each other: never a wrong answer."""
    dense = make("llama3", tmp_path / "dense", **SIZES)
    configs = {}
    for name in KINDS:
        configs[name] = quantized.KINDS[name]().config
        quantized.quantize(dense, tmp_path / name, quantized.KINDS[name]())
    for name in KINDS:
        expected = logits(tmp_path / name)
        for other in KINDS:
            quantized.configure(tmp_path / name, configs[other])
            told = check(tmp_path / name, expected, "_proj.")
            assert not told if name == other else told or {name, other} == {"FP8, blocks", "DeepSeek's FP8"}
        quantized.configure(tmp_path / name, ...)
        assert check(tmp_path / name, expected, "_proj.")
