"""Quantized weights as the packages that define their formats dequantize them, bit for bit."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from support import quantized_checkpoints as quantized
from torch import Tensor

from slotwise.compute.kernels.cpu.kernels import CpuKernels
from slotwise.compute.kernels.matrix import QuantizedMatrix
from slotwise.compute.model.fields import Fields
from slotwise.compute.model.quantization.mxfp4 import MXFP4Scheme
from slotwise.compute.model.quantization.quantization_methods import read_quantization
from slotwise.compute.model.quantization.scheme import Scheme, StoredLayer
from slotwise.errors import CheckpointError

SHAPES = [(256, 128), (128, 256), (384, 128)]
UP = "model.layers.0.mlp.up_proj"


def scheme_of(config: dict[str, Any], module: str = UP) -> Scheme | None:
    quantization = read_quantization(Fields({"quantization_config": config}, "config.json"))
    assert quantization is not None and quantization.description
    return quantization.scheme(module)


def layer(scheme: Scheme, tensors: dict[str, Tensor], shape: tuple[int, int]) -> StoredLayer:
    """The parts, once they are seen to be those that the scheme expects."""
    parts = scheme.parts(*shape)
    assert set(tensors) <= set(parts) and all(name in tensors or part.is_optional for name, part in parts.items())
    for name, tensor in tensors.items():
        assert not parts[name].shapes or tuple(tensor.shape) in parts[name].shapes
    return StoredLayer(UP, "model", *shape, tensors)


def written(name: str, shape: tuple[int, int] = (256, 128)) -> tuple[Scheme, dict[str, Tensor], Tensor]:
    torch.manual_seed(0)
    kind = quantized.KINDS[name]()
    scheme = scheme_of(kind.config)
    assert scheme is not None
    return scheme, *kind.write(torch.randn(shape))


def matrix(scheme: Scheme, tensors: dict[str, Tensor], shape: tuple[int, int] = (256, 128)) -> QuantizedMatrix:
    return scheme.matrix(layer(scheme, tensors, shape))


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("name", quantized.KINDS)
def test_weights_are_those_of_the_formats_own_package(name: str, shape: tuple[int, int]) -> None:
    scheme, tensors, expected = written(name, shape)
    found = matrix(scheme, tensors, shape)
    if name == "LLM.int8()":  # which divides by 127 after it has multiplied
        torch.testing.assert_close(found.dequantized(), expected, rtol=2**-22, atol=0)
    else:
        assert torch.equal(found.dequantized(), expected)
    assert found.shape == shape
    for first, end in ((0, 1), (3, 70), (64, 96), (shape[0] - 5, shape[0])):
        assert torch.equal(found.dequantized(first, end), found.dequantized()[first:end])
    known = scheme.format(shape[1])
    assert (known.bits, known.group, known.levels, known.zero, known.has_minimums) == (
        found.format.bits, found.format.group, found.format.levels, found.format.zero, found.format.has_minimums)


@pytest.mark.parametrize("name", quantized.KINDS)
def test_quantization_loses_little(name: str) -> None:
    """What a test of equality cannot tell: that a writer and a reader agree on something senseless."""
    torch.manual_seed(0)
    weight = torch.randn(256, 128)
    _, whole = quantized.KINDS[name]().write(weight)
    error = (whole - weight).norm() / weight.norm()
    assert error < (0.04 if any(part in name for part in ("8", "FP8", "fp8")) else 0.6 if "BitNet" in name else 0.2)


def test_blocks_of_gpt_oss_are_those_of_transformers() -> None:
    from transformers.integrations.mxfp4 import convert_moe_packed_tensors

    torch.manual_seed(0)
    blocks = torch.randint(256, (1, 96, 4, 16), dtype=torch.uint8)
    scales = torch.randint(100, 140, (1, 96, 4), dtype=torch.uint8)
    scheme = MXFP4Scheme("blocks", "scales")
    found = matrix(scheme, {"blocks": blocks[0], "scales": scales[0]}, (96, 128))
    [expected] = convert_moe_packed_tensors(blocks, scales, dtype=torch.float32)
    assert torch.equal(found.dequantized(), expected.t())


def test_the_smallest_scales_of_mxfp4() -> None:
    blocks = torch.full((1, 64), 0x77, dtype=torch.uint8)
    scales = torch.tensor([[0, 1, 2, 252]], dtype=torch.uint8)
    found = matrix(MXFP4Scheme("blocks", "scales"), {"blocks": blocks, "scales": scales}, (1, 128)).dequantized()
    assert found[0, ::32].tolist() == [6 * 2.0 ** (exponent - 127) for exponent in (0, 1, 2, 252)]


def test_a_zero_point_of_zero_in_the_first_version_of_gptq() -> None:
    """It was stored as -1, of which 4 bits are 15: adding the one again gives 16, whose 4 bits are 0."""
    scheme, tensors, _ = written("gptq 4, asymmetric")
    tensors["qzeros"].fill_(-1)
    found = matrix(scheme, tensors)
    rows = found.read(0, 256)
    assert not rows.minimums.floats().any() and found.dequantized().amin() >= 0


@pytest.mark.parametrize("name", ["W8A8", "W8A8, static", "W8A8, asymmetric", "LLM.int8()"])
@pytest.mark.parametrize("outlier", [1.0, 30.0])
def test_products_are_nearer_to_exact_ones_than_with_a_scale_for_each_token(name: str, outlier: float) -> None:
    """As W8A8 and FP8 dynamic quantize them; a static scale, for all tokens, is coarser still."""
    torch.manual_seed(0)
    kind = quantized.KINDS[name]()
    scheme = scheme_of(kind.config)
    assert scheme is not None
    tensors, weight = kind.write(torch.randn(256, 512))
    x = torch.randn(64, 512)
    x[:, 7] *= outlier
    exact = x.double() @ weight.double().t()
    step = x.abs().amax(1, keepdim=True) / 127
    by_token = (x / step).round().mul(step).double() @ weight.double().t()
    found = CpuKernels().linear(matrix(scheme, tensors, (256, 512)))(x)
    assert (found - exact).norm() < 1.1 * (by_token - exact).norm()


class TestRefusals:
    def refused(self, name: str, told: str, **changes: Tensor) -> None:
        scheme, tensors, _ = written(name)
        with pytest.raises(CheckpointError, match=told):
            matrix(scheme, tensors | changes).dequantized()

    @pytest.mark.parametrize(("name", "part"), [
        ("gptq 4", "scales"), ("awq", "scales"), ("W4A16", "weight_scale"), ("W8A8", "weight_scale"),
        ("FP8, static", "weight_scale"), ("DeepSeek's FP8", "weight_scale_inv"), ("NF4", "weight.absmax"),
        ("NF4, double", "weight.nested_absmax"), ("LLM.int8()", "SCB")])
    @pytest.mark.parametrize("value", [torch.nan, torch.inf])
    def test_scales_that_are_no_numbers(self, name: str, part: str, value: float) -> None:
        scales = written(name)[1][part].clone()
        scales.view(-1)[-1] = value
        self.refused(name, f"model: {UP}.{part} holds NaN or infinite", **{part: scales})

    def test_weights_beyond_float32(self) -> None:
        for name, part in (("DeepSeek's FP8", "weight_scale_inv"), ("LLM.int8()", "SCB")):
            scales = torch.full_like(written(name)[1][part], 3e38)
            self.refused(name, f"{part} gives weights that exceed float32", **{part: scales})

    @pytest.mark.parametrize("name", ["FP8, dynamic", "DeepSeek's FP8"])
    def test_codes_that_are_no_numbers(self, name: str) -> None:
        weight = written(name)[1]["weight"].view(torch.uint8).clone()
        weight[255, 7] = 0xFF
        self.refused(name, f"{UP}.weight holds NaN", weight=weight.view(torch.float8_e4m3fn))

    def test_an_exponent_that_is_no_number(self) -> None:
        scales = written("MXFP4")[1]["weight_scale"].clone()
        scales[3, 3] = 255
        self.refused("MXFP4", f"{UP}.weight_scale holds NaN", weight_scale=scales)

    def test_zero_points_that_contradict_the_config(self) -> None:
        zeros = torch.zeros_like(written("gptq 4")[1]["qzeros"])
        self.refused("gptq 4", "qzeros holds other zero points than the middle", qzeros=zeros)
        stored = torch.ones(256, 1, dtype=torch.int8)
        self.refused("W8A8", "weight_zero_point is not zero, but the config says symmetric", weight_zero_point=stored)

    @pytest.mark.parametrize(("place", "value"), [(0, 4), (5, -1), (9, 1 << 30), (127, -(1 << 31))])
    def test_an_order_that_is_none(self, place: int, value: int) -> None:
        order = torch.arange(128, dtype=torch.int32) // 32
        order[place] = value
        self.refused("gptq 4, act-order", "g_idx must give each group 32 inputs", g_idx=order)

    def test_a_stored_shape_of_another_weight(self) -> None:
        self.refused("W4A16", r"weight_shape must be \[256, 128\]", weight_shape=torch.tensor([128, 256]))

    def test_integers_of_more_bits(self) -> None:
        config = {**quantized.KINDS["W8A8"]().config}
        weights = {"num_bits": 4, "type": "int", "strategy": "channel"}
        config["config_groups"] = {"a": {"targets": ["Linear"], "weights": weights}}
        scheme, tensors, _ = scheme_of(config), *written("W8A8")[1:]
        with pytest.raises(CheckpointError, match="weight holds integers of more than 4 bits"):
            matrix(scheme, tensors).dequantized()

    def test_other_levels_than_those_of_nf4(self) -> None:
        self.refused("NF4", "weight.quant_map holds other levels", **{"weight.quant_map": torch.linspace(-1, 1, 16)})

    @pytest.mark.parametrize(("state", "told"), [
        (b"", "not a JSON object"), (b"[]", "not a JSON object"), (b"\xff", "not a JSON object"),
        (b"[" * 4000, "not a JSON"),
        (b" " * 5000, "too long"), (b'{"quant_type": "fp4"}', "quant_type must be nf4"),
        (b'{"quant_type": "nf4", "blocksize": 128}', "blocksize must be 64, not 128"),
        (b'{"quant_type": "nf4", "blocksize": 64, "shape": [128, 256]}', r"shape must be \[256, 128\]"),
        (b'{"quant_type": "nf4", "blocksize": 64, "shape": [256, 128], "nested_offset": 1}', "nested_offset is set")])
    def test_a_state_that_says_something_else(self, state: bytes, told: str) -> None:
        name = "weight.quant_state.bitsandbytes__nf4"
        self.refused("NF4", told, **{name: torch.tensor(list(state), dtype=torch.uint8)})

    def test_both_names_of_one_scale_and_none(self) -> None:
        scheme, tensors, _ = written("fp8, static")
        with pytest.raises(CheckpointError, match="weight_scale_inv and weight_scale are both there"):
            matrix(scheme, tensors | {"weight_scale": torch.ones(1)})
        del tensors["weight_scale_inv"]
        with pytest.raises(CheckpointError, match="are missing: one must be there"):
            matrix(scheme, tensors)
