"""Opening checkpoints, and one line that says what to do when that fails."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from support.checkpoints import SIZES, edit_config, make, prompts, reference_model
from support.ragged import Driver

from slotwise.compute.kernels.cpu.kernels import CpuKernels
from slotwise.compute.kernels.reference import ReferenceKernels
from slotwise.compute.model.decoder import Decoder
from slotwise.compute.model.family_table import tensor_shapes
from slotwise.compute.model.loading import load_model, read_config
from slotwise.compute.model.weights import CheckpointWeights
from slotwise.errors import CheckpointError


def load(folder: Path, dtype: str = "auto") -> Decoder:
    return load_model(folder, kernels=ReferenceKernels(), dtype=dtype)


def logits(decoder: Decoder) -> torch.Tensor:
    return Driver(decoder).step(list(enumerate(prompts([12, 3]))))


def refusal(folder: Path | str) -> str:
    with pytest.raises(CheckpointError) as caught:
        load_model(folder, kernels=ReferenceKernels())
    message = str(caught.value)
    assert message and "\n" not in message
    return message


@pytest.fixture
def folder(checkpoint: Callable[[str], Path], tmp_path: Path) -> Path:
    """A copy of a checkpoint, to be damaged."""
    return Path(shutil.copytree(checkpoint("llama2"), tmp_path / "model"))


@pytest.fixture
def sharded(tmp_path: Path) -> Path:
    folder = make("llama2", tmp_path / "sharded", shard_size="200KB")
    assert len(list(folder.glob("*.safetensors"))) > 3
    return folder


class TestFolders:
    def test_sharded_weights_are_those_of_one_file(self, sharded: Path, checkpoint: Callable[[str], Path]) -> None:
        assert not (sharded / "model.safetensors").exists()
        assert torch.equal(logits(load(sharded)), logits(load(checkpoint("llama2"))))

    def test_progress_reaches_the_size_of_the_weights(self, checkpoint: Callable[[str], Path]) -> None:
        seen: list[tuple[int, int]] = []
        folder = checkpoint("qwen3")
        load_model(folder, kernels=ReferenceKernels(), progress=lambda done, total: seen.append((done, total)))
        size = sum(t.nbytes for t in load_file(folder / "model.safetensors").values())
        assert seen[-1] == (size, size) and len(seen) > 10
        assert [done for done, _ in seen] == sorted({done for done, _ in seen})

    def test_weights_outlive_the_file(self, folder: Path) -> None:
        decoder = load(folder)
        before = logits(decoder)
        with open(folder / "model.safetensors", "r+b") as file:
            file.write(bytes(os.path.getsize(folder / "model.safetensors")))
        assert torch.equal(logits(decoder), before)

    def test_weights_written_by_mlx(self, folder: Path) -> None:
        before = logits(load(folder))
        weights = load_file(folder / "model.safetensors")
        (folder / "model.safetensors").unlink()
        save_file(weights, folder / "model.safetensors", metadata={"format": "mlx"})
        assert torch.equal(logits(load(folder)), before)

    def test_stored_rotary_frequencies_are_ignored(self, folder: Path) -> None:
        add_weights(folder, {"model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(16)})
        assert logits(load(folder)).isfinite().all()

    def test_max_positions_bounds_the_rotary_table(self, folder: Path) -> None:
        for asked, bound in ((100, 100), (10**9, 2048)):
            decoder = load_model(folder, kernels=ReferenceKernels(), max_positions=asked)
            [table] = decoder._rotary.values()  # all layers have one embedding
            assert table.until(1).shape == (bound, SIZES["head_dim"])


class TestDtypes:
    @pytest.mark.parametrize(("stored", "asked", "loaded"), [
        ("float32", "auto", torch.float32), ("bfloat16", "auto", torch.bfloat16), ("float16", "auto", torch.float16),
        ("float32", "bfloat16", torch.bfloat16), ("bfloat16", "float32", torch.float32),
    ])
    def test_weights_are_cast(self, stored: str, asked: str, loaded: torch.dtype, tmp_path: Path) -> None:
        decoder = load(make("qwen2", tmp_path / "model", dtype=stored), asked)
        assert decoder.config.dtype == loaded
        assert decoder.logits(torch.ones(1, SIZES["hidden_size"], dtype=loaded)).dtype == loaded

    def test_older_files_say_torch_dtype(self, folder: Path) -> None:
        edit_config(folder, dtype=..., torch_dtype="bfloat16")
        assert load(folder).config.dtype == torch.bfloat16

    def test_unknown(self, folder: Path) -> None:
        told = "dtype must be auto, bfloat16 or float16 or float32, not 'int4'"
        with pytest.raises(CheckpointError, match=told):
            load(folder, "int4")

    @pytest.mark.parametrize(("stored", "asked", "loaded", "is_told"), [
        ("float16", "auto", torch.bfloat16, True), ("float16", "float16", torch.bfloat16, True),
        ("bfloat16", "float16", torch.bfloat16, True), ("float16", "bfloat16", torch.bfloat16, False),
        ("float16", "float32", torch.float32, False), ("float32", "auto", torch.float32, False)])
    def test_float16_becomes_bfloat16_where_kernels_know_none(
        self, stored: str, asked: str, loaded: torch.dtype, is_told: bool, tmp_path: Path,
        caplog: pytest.LogCaptureFixture,
    ) -> None:
        folder = make("qwen2", tmp_path / "model", dtype=stored)
        assert load_model(folder, kernels=CpuKernels(), dtype=asked).config.dtype == loaded
        told = [record.getMessage() for record in caplog.records]
        assert len(told) == is_told and all("device cpu computes in bfloat16 and not in float16" in one for one in told)

    def test_float32_keeps_float16_exactly(self, tmp_path: Path) -> None:
        """The choice that the warning names: a float32 has all bits of a float16, a bfloat16 has not."""
        folder = make("qwen2", tmp_path / "model", dtype="float16")
        stored = load_file(folder / "model.safetensors")
        read = {kind: CheckpointWeights(folder).reader(tensor_shapes(read_config(folder)), kind)
                for kind in (torch.float32, torch.bfloat16)}
        name = "model.layers.0.mlp.up_proj.weight"
        assert torch.equal(read[torch.float32](name).half(), stored[name])
        assert not torch.equal(read[torch.bfloat16](name).half(), stored[name])


class TestEndTokens:
    def test_both_files_count(self, folder: Path) -> None:
        edit_config(folder, eos_token_id=7)
        (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [9, 7]}))
        assert read_config(folder).eos_token_ids == (7, 9)

    @pytest.mark.parametrize(("value", "ids"), [(None, ()), (-1, ()), (5, (5,)), ([5, 6], (5, 6))])
    def test_forms(self, folder: Path, value: object, ids: tuple[int, ...]) -> None:
        (folder / "generation_config.json").unlink()
        edit_config(folder, eos_token_id=value)
        assert read_config(folder).eos_token_ids == ids


class TestStoredHead:
    """`tie_word_embeddings` beside an `lm_head.weight` in the file."""

    @pytest.fixture
    def folder(self, checkpoint: Callable[[str], Path], tmp_path: Path) -> Path:
        """A checkpoint that ties, and stores no head."""
        return Path(shutil.copytree(checkpoint("llama3"), tmp_path / "model"))

    def test_a_different_one_is_used_as_in_transformers(self, folder: Path, caplog: pytest.LogCaptureFixture) -> None:
        tied = logits(load(folder))
        add_weights(folder, {"lm_head.weight": torch.linspace(-1, 1, 1024 * 96).reshape(1024, 96)})
        caplog.clear()
        decoder = load(folder)
        assert not decoder.config.tie_word_embeddings
        assert "lm_head.weight is stored and differs from model.embed_tokens.weight" in caplog.text
        (ids,) = prompts([12])
        with torch.inference_mode():
            expected = reference_model(folder, "float32")(torch.tensor([ids])).logits[:, -1]
        found = Driver(decoder).step([(0, ids)])
        assert (found - expected).abs().max() < 1e-3 < (expected - tied[:1]).abs().max()

    @pytest.mark.parametrize("kind", [torch.float32, torch.bfloat16])
    def test_an_equal_one_is_the_embedding(self, kind: torch.dtype, folder: Path,
                                           caplog: pytest.LogCaptureFixture) -> None:
        """Equal as loaded: the embedding is rounded to bfloat16, too."""
        table = load_file(folder / "model.safetensors")["model.embed_tokens.weight"]
        add_weights(folder, {"lm_head.weight": table.to(kind)})
        decoder = load(folder, "bfloat16")
        assert decoder.config.tie_word_embeddings and not caplog.records

    @pytest.mark.parametrize(("head", "told"), [
        (torch.ones(1024, 95), "lm_head.weight has shape"), (torch.ones(7), "lm_head.weight has shape"),
        (torch.ones(1024, 96, dtype=torch.int8), "lm_head.weight is stored as I8"),
        (torch.full((1024, 96), torch.nan), "lm_head.weight holds NaN")])
    def test_one_that_cannot_be_used_is_refused(self, head: torch.Tensor, told: str, folder: Path) -> None:
        add_weights(folder, {"lm_head.weight": head})
        assert told in refusal(folder)


class TestRefusals:
    def test_no_folder(self, tmp_path: Path) -> None:
        assert "no folder" in refusal(tmp_path / "absent")

    def test_a_file(self, folder: Path) -> None:
        assert "give the folder" in refusal(folder / "config.json")

    def test_no_config(self, folder: Path) -> None:
        (folder / "config.json").unlink()
        assert "has no config.json" in refusal(folder)

    @pytest.mark.parametrize("text", ["", "{", '{"a":\n nonsense}', "\udcff\udcfe", "[" * 100_000])
    def test_config_that_is_not_json(self, folder: Path, text: str) -> None:
        (folder / "config.json").write_bytes(text.encode("utf-8", "surrogateescape"))
        assert "not valid JSON" in refusal(folder)

    def test_config_that_is_no_object(self, folder: Path) -> None:
        (folder / "config.json").write_text("[1, 2]")
        assert "must hold a JSON object, not a list" in refusal(folder)

    @pytest.mark.parametrize("architectures", [["T5ForConditionalGeneration"], [], None, ["../../x"]])
    def test_unsupported_architecture(self, folder: Path, architectures: list[str] | None) -> None:
        message = refusal(edit_config(folder, architectures=architectures))
        assert "not supported" in message
        assert all(name in message for name in ("LlamaForCausalLM", "MistralForCausalLM", "Qwen2ForCausalLM"))

    def test_missing_weights_are_named_and_counted(self, folder: Path) -> None:
        keep_weights(folder, lambda name: "down_proj" not in name and "lm_head" not in name and "up_proj" not in name)
        message = refusal(folder)
        assert "lacks 7 of" in message and "lm_head.weight" in message and "and 4 more" in message

    def test_wrong_shape(self, folder: Path) -> None:
        message = refusal(edit_config(folder, intermediate_size=128))
        assert "gate_proj.weight has shape [160, 96], but config.json asks for [128, 96]" in message

    def test_weights_nobody_reads(self, folder: Path) -> None:
        add_weights(folder, {"model.layers.1.self_attn.q_norm.weight": torch.ones(32)})
        assert "leaves no room for: model.layers.1.self_attn.q_norm.weight" in refusal(folder)

    @pytest.mark.parametrize("keep", [0, 5, 300, 100_000])
    def test_truncated_weights(self, folder: Path, keep: int) -> None:
        path = folder / "model.safetensors"
        path.write_bytes(path.read_bytes()[:keep])
        assert "model.safetensors is damaged or incomplete" in refusal(folder)

    def test_corrupt_header(self, folder: Path) -> None:
        with open(folder / "model.safetensors", "r+b") as file:
            file.seek(20)
            file.write(b"\xff" * 40)
        assert "damaged or incomplete" in refusal(folder)

    def test_truncated_shard(self, sharded: Path) -> None:
        path = sorted(sharded.glob("*.safetensors"))[1]
        path.write_bytes(path.read_bytes()[:-1])
        assert f"{path.name} is damaged" in refusal(sharded)

    def test_missing_shard(self, sharded: Path) -> None:
        path = sorted(sharded.glob("*.safetensors"))[1]
        path.unlink()
        message = refusal(sharded)
        assert "lacks 1 of" in message and path.name in message

    @pytest.mark.parametrize("weight_map", [
        {}, None, {"lm_head.weight": "../model.safetensors"}, {"lm_head.weight": 7}, {"lm_head.weight": ["a"]}, [1],
    ])
    def test_malformed_index(self, sharded: Path, weight_map: object) -> None:
        (sharded / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
        assert "weight_map" in refusal(sharded)

    @pytest.mark.parametrize("name", ["pytorch_model.bin", "consolidated.00.pth"])
    def test_pickled_weights_are_never_opened(self, folder: Path, name: str) -> None:
        (folder / "model.safetensors").rename(folder / name)
        assert "pickled" in refusal(folder) and "safetensors" in refusal(folder)

    def test_no_weights(self, folder: Path) -> None:
        (folder / "model.safetensors").unlink()
        assert "has no model.safetensors" in refusal(folder)

    def test_quantized_in_a_way_that_is_not_supported(self, folder: Path) -> None:
        told = refusal(edit_config(folder, quantization_config={"quant_method": "aqlm"}))
        assert "quant_method must be one of awq, gptq" in told and "'aqlm'" in told

    def test_quantized_in_name_only(self, folder: Path) -> None:
        told = refusal(edit_config(folder, quantization_config={"quant_method": "awq"}))
        assert "lacks 63 tensors of quantized weights: model.layers.0.self_attn.q_proj.qweight" in told

    def test_quantized_by_mlx(self, folder: Path) -> None:
        settings = {"group_size": 64, "bits": 4}
        told = refusal(edit_config(folder, quantization=settings, quantization_config=settings))
        assert "quantization is set: checkpoints quantized by MLX are not supported: serve the one" in told

    def test_integer_weights(self, folder: Path) -> None:
        add_weights(folder, {"lm_head.weight": torch.zeros(1024, 96, dtype=torch.int8)})
        assert "lm_head.weight is stored as I8" in refusal(folder)


def keep_weights(folder: Path, wanted: Callable[[str], bool]) -> None:
    path = folder / "model.safetensors"
    weights = load_file(path)
    path.unlink()
    save_file({name: tensor for name, tensor in weights.items() if wanted(name)}, path)


def add_weights(folder: Path, more: dict[str, torch.Tensor]) -> None:
    path = folder / "model.safetensors"
    weights = load_file(path)
    path.unlink()
    save_file(weights | more, path)
