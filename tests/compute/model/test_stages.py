"""Which layers each stage of a model holds, and which tensors."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from support.checkpoints import make

from slotwise.compute.kernels.group import PipelineStage, UnconnectedRank
from slotwise.compute.model.family_table import tensor_shapes
from slotwise.compute.model.loading import read_config
from slotwise.compute.model.model_config import ModelConfig
from slotwise.compute.model.network import layers_of
from slotwise.errors import CheckpointError


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> ModelConfig:
    return read_config(make("llama2", tmp_path_factory.mktemp("stages") / "model"))


def with_layers(config: ModelConfig, number: int) -> ModelConfig:
    return replace(config, num_layers=number, windows=(0,) * number, ropes=config.ropes[:1] * number)


@pytest.mark.parametrize("count", [1, 2, 3, 4, 12])
def test_every_layer_is_held_once_and_each_stage_holds_some(config: ModelConfig, count: int) -> None:
    model = with_layers(config, 12)
    held = [layers_of(model, PipelineStage(number, count)) for number in range(count)]
    assert [layer for layers in held for layer in layers] == list(range(12)) and all(held)


def test_the_first_stage_has_fewer_layers_for_it_has_the_head(config: ModelConfig) -> None:
    a_layer = config.layer_weights / config.num_layers
    model = replace(with_layers(config, 12), vocab_size=round(4 * a_layer / config.hidden_size))
    assert [len(layers_of(model, PipelineStage(number, 2))) for number in range(2)] == [4, 8]


def test_more_stages_than_layers_are_refused(config: ModelConfig) -> None:
    with pytest.raises(CheckpointError, match="3 layers, fewer than stages"):
        layers_of(config, PipelineStage(0, 4))


@pytest.mark.parametrize("family", ["llama2", "gemma2", "glm4", "olmo2", "gpt_oss"])
def test_a_stage_reads_its_own_tensors_only(family: str, tmp_path: Path) -> None:
    model = read_config(make(family, tmp_path / "model"))
    whole = tensor_shapes(model)
    stages = [tensor_shapes(model, UnconnectedRank(1, PipelineStage(number, 3))) for number in range(3)]
    assert sum(map(len, stages)) == len(whole)
    assert {name: shape for stage in stages for name, shape in stage.items()} == whole
    assert "model.embed_tokens.weight" in stages[0] and "model.norm.weight" in stages[2]
