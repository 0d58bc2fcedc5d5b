"""Every field of a quantization_config: obeyed, or refused by name."""

from __future__ import annotations

from typing import Any

import pytest
from support import quantized_checkpoints as quantized

from slotwise.compute.model.family_table import configure
from slotwise.compute.model.fields import Fields
from slotwise.compute.model.quantization.quantization_methods import METHODS, read_quantization
from slotwise.compute.model.quantization.scheme import Quantization, Scheme
from slotwise.errors import CheckpointError

UP, DOWN, HEAD = "model.layers.0.mlp.up_proj", "model.layers.1.mlp.down_proj", "lm_head"
QUERY = "model.layers.1.self_attn.q_proj"
GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": 32}
AWQ = {"quant_method": "awq", "bits": 4, "group_size": 128}
FP8 = {"quant_method": "fp8", "weight_block_size": [128, 128], "activation_scheme": "dynamic"}
NF4 = {"quant_method": "bitsandbytes", "load_in_4bit": True, "bnb_4bit_quant_type": "nf4"}
INT4 = {"num_bits": 4, "type": "int", "strategy": "group", "group_size": 32}
INT8 = {"num_bits": 8, "type": "int", "strategy": "channel"}
E4M3 = {"num_bits": 8, "type": "float", "strategy": "tensor"}


def read(config: dict[str, Any]) -> Quantization:
    quantization = read_quantization(Fields({"quantization_config": config}, "config.json"))
    assert quantization is not None
    return quantization


def scheme(config: dict[str, Any], module: str = UP) -> Scheme:
    found = read(config).scheme(module)
    assert found is not None
    return found


def told(config: Any) -> str:
    with pytest.raises(CheckpointError) as caught:
        read(config)
    return str(caught.value)


def groups(*parts: dict[str, Any], kind: str = "pack-quantized", **more: Any) -> dict[str, Any]:
    """A quantization_config of compressed-tensors."""
    return {"quant_method": "compressed-tensors", "format": kind, "quantization_status": "compressed",
            "config_groups": {f"group_{place}": part for place, part in enumerate(parts)}, **more}


def group(weights: dict[str, Any], *targets: str, **more: Any) -> dict[str, Any]:
    return {"targets": list(targets) or ["Linear"], "weights": weights, **more}


def test_a_config_without_the_field_is_not_quantized() -> None:
    assert read_quantization(Fields({}, "config.json")) is None
    assert read_quantization(Fields({"quantization_config": None}, "config.json")) is None


@pytest.mark.parametrize("method", ["aqlm", "hqq", "quanto", "torchao", "mxfp8", "", "GPTQ"])
def test_other_methods_are_refused_by_name(method: str) -> None:
    assert "config.json, quantization_config: quant_method must be one of awq, gptq" in told({"quant_method": method})
    assert repr(method) in told({"quant_method": method})


def test_mxfp4_is_a_method_of_gpt_oss_only() -> None:
    fields = {"quantization_config": {"quant_method": "mxfp4"}, "architectures": ["LlamaForCausalLM"]}
    with pytest.raises(CheckpointError, match="quant_method mxfp4 is that of GptOssForCausalLM only"):
        configure(Fields(fields, "config.json"))
    quantization = read_quantization(Fields(fields | {"architectures": ["GptOssForCausalLM"]}, "config.json"))
    assert quantization is not None and quantization.scheme(UP) is None


def test_a_config_must_name_its_method() -> None:
    assert "quant_method is missing" in told({"bits": 4})
    assert set(METHODS) == {"mxfp4", *(kind().config["quant_method"] for kind in quantized.KINDS.values())}


@pytest.mark.parametrize("config", [GPTQ, AWQ, FP8, NF4, groups(group(INT4))])
def test_an_unknown_field_is_refused_where_it_is_set(config: dict[str, Any]) -> None:
    assert "rotation is not supported with" in told(config | {"rotation": "hadamard"})
    for value in (None, False, "", [], {}):
        assert read(config | {"rotation": value}).description


@pytest.mark.parametrize(("config", "field", "value", "problem"), [
    (GPTQ, "bits", 3, "must be 4 or 8, not 3"), (GPTQ, "bits", 2, "must be 4 or 8"), (GPTQ, "bits", None, "is missing"),
    (GPTQ, "group_size", 48, "must be -1, 16, 32, 64 or 128"), (GPTQ, "group_size", 0, "must be -1"),
    (GPTQ, "group_size", "32", "must be a whole number"), (GPTQ, "desc_act", 1, "must be true or false"),
    (GPTQ, "checkpoint_format", "marlin", "must be gptq or gptq_v2"), (GPTQ, "format", "gptq_p", "must be gptq or"),
    (GPTQ, "is_marlin_format", True, "is not supported"), (GPTQ, "pack_dtype", "int16", "must be int32"),
    (GPTQ, "sym", "yes", "must be true or false"), (GPTQ, "modules_in_block_to_quantize", [1], "must be lists"),
    (GPTQ, "dynamic", {"(a+)+": {}}, "repeats more than"), (GPTQ, "dynamic", {".*up": {"bits": 3}}, "bits must be"),
    (GPTQ, "dynamic", {".*up": 7}, "must be an object"), (GPTQ, "dynamic", {".*up": {"adapter": 1}}, "adapter is not"),
    (AWQ, "bits", 8, "must be 4 with AWQ"), (AWQ, "version", "gemv", "must be gemm"),
    (AWQ, "zero_point", False, "is false, which is not supported"),
    (AWQ, "group_size", 100, "must be -1"), (AWQ, "modules_to_not_convert", "lm_head", "must be a list of strings"),
    (AWQ, "backend", "llm-awq", "is not supported"), (AWQ, "lm_head", True, "is not supported with AWQ"),
    (FP8, "fmt", "e5m2", "must be e4m3"), (FP8, "activation_scheme", "none", "must be dynamic or static"),
    (FP8, "weight_block_size", [128], "must be two numbers"), (FP8, "weight_block_size", [0, 128], "must be two"),
    (FP8, "weight_block_size", [128, 100], "one of"), (FP8, "weight_block_size", [True, 128], "must be two numbers"),
    (FP8, "weight_block_size", "128", "must be two numbers"), (FP8, "scale_fmt", "e5m2", "must be float or ue8m0"),
    (NF4, "bnb_4bit_quant_type", "fp4", "must be nf4"), (NF4, "load_in_8bit", True, "and not both"),
    (NF4, "load_in_4bit", False, "must be true"), (NF4, "bnb_4bit_quant_storage", "bfloat16", "must be uint8"),
    (NF4, "llm_int8_has_fp16_weight", True, "is not supported")])
def test_a_field_that_is_not_supported_is_refused_by_name(
        config: dict[str, Any], field: str, value: object, problem: str) -> None:
    message = told(config | {field: value})
    assert message.startswith("config.json, quantization_config") and field in message and problem in message


@pytest.mark.parametrize(("config", "problem"), [
    (groups(), "config_groups must hold 1 to 64 groups, not 0"), (groups(*[group(INT4)] * 65), "not 65"),
    (groups(group({})), "group_0: weights is missing"), (groups(group(INT4), kind="marlin-24"), "format must be pack-"),
    (groups(group(INT4), kind="int-quantized", quantization_status="calibration"), "quantization_status must be"),
    (groups(group(INT4), kv_cache_scheme={"num_bits": 8}), "kv_cache_scheme is not supported"),
    (groups(group(INT4), sparsity_config={"format": "sparse-24-bitmask"}), "format must be dense"),
    (groups(group(INT4), transform_config={"config_groups": {"a": 1}}), "transform_config is not supported"),
    (groups(group(INT4 | {"num_bits": 3})), "num_bits must be 4 or 8"),
    (groups(group(INT4 | {"group_size": 100})), "group_size must be -1"),
    (groups(group(INT4 | {"group_size": -1})), "group_size must be one of"),
    (groups(group(INT4 | {"strategy": "tensor_group"})), "strategy must be tensor or channel or group or block"),
    (groups(group(INT4 | {"dynamic": True})), "dynamic must be false"),
    (groups(group(INT4 | {"actorder": "later"})), "actorder must be group"),
    (groups(group(INT4 | {"type": "float"})), "type float does not go with format pack-quantized"),
    (groups(group(INT4), kind="float-quantized"), "type int does not go with format float-quantized"),
    (groups(group(INT4 | {"zeros": 1})), "zeros is not supported"), (groups(group([1])), "weights must be an object"),
    (groups(group(E4M3 | {"num_bits": 4}), kind="float-quantized"), "num_bits must be 8"),
    (groups(group(E4M3 | {"symmetric": False}), kind="float-quantized"), "symmetric is false"),
    (groups(group(E4M3 | {"num_bits": 4}), kind="mxfp4-pack-quantized"), "group_size must be 32"),
    (groups(group(E4M3 | {"strategy": "block"}), kind="float-quantized"), "block_structure must be two numbers"),
    (groups(group(INT8 | {"strategy": "tensor", "symmetric": False})), "strategy tensor is not supported for integers"),
    (groups(group(INT4, input_activations={"num_bits": 2})), "input_activations: num_bits must be 4 or 8"),
    (groups(group(INT4, output_activations={"num_bits": 8})), "output_activations is not supported"),
    (groups(group(INT4, "re:(")), "targets holds '('"), (groups(group(INT4), ignore=["re:(a+)+"]), "ignore holds"),
    (groups({"targets": "Linear", "weights": INT4}), "targets must be a list of strings"),
    (groups(group(INT4, format="dense")), "format must be pack-quantized")])
def test_what_compressed_tensors_may_say_and_is_not_supported(config: dict[str, Any], problem: str) -> None:
    message = told(config)
    assert message.startswith("config.json, quantization_config") and problem in message


class TestModules:
    @pytest.mark.parametrize(("config", "is_quantized"), [
        (GPTQ, False), (GPTQ | {"lm_head": True}, True), (AWQ, False), (FP8, False), (NF4, False),
        (NF4 | {"llm_int8_skip_modules": []}, True), (NF4 | {"llm_int8_skip_modules": ["lm_head"]}, False),
        (groups(group(INT4)), True), (groups(group(INT4), ignore=["lm_head"]), False)])
    def test_the_head(self, config: dict[str, Any], is_quantized: bool) -> None:
        assert (read(config).scheme(HEAD) is not None) is is_quantized
        assert read(config).scheme(UP) is not None

    @pytest.mark.parametrize(("config", "field"), [
        (AWQ, "modules_to_not_convert"), (FP8, "modules_to_not_convert"), (FP8, "ignored_layers"),
        (NF4, "llm_int8_skip_modules")])
    def test_skipped_ones(self, config: dict[str, Any], field: str) -> None:
        quantization = read(config | {field: ["lm_head", "down_proj", "model.layers.1.self_attn"]})
        assert [quantization.scheme(module) is None for module in (UP, DOWN, QUERY, HEAD)] == [False, True, True, True]

    def test_those_that_gptq_lists(self) -> None:
        quantization = read(GPTQ | {"modules_in_block_to_quantize": [["self_attn.q_proj"], ["mlp.up_proj"]]})
        assert [quantization.scheme(module) is None for module in (UP, DOWN, QUERY)] == [False, True, False]

    def test_exceptions_of_gptqmodel(self) -> None:
        quantization = read(GPTQ | {"dynamic": {
            r"-:.*self_attn.*": {}, r"+:.*\.1\.mlp.*": {"bits": 8, "group_size": 64}, r".*mlp.*": {"sym": False}}})
        found = [quantization.scheme(module) for module in (QUERY, DOWN, UP)]
        assert found[0] is None
        formats = [each.format(128) for each in found[1:]]
        assert [(each.bits, each.group, each.has_minimums) for each in formats] == [(8, 64, False), (4, 32, True)]

    def test_targets_of_compressed_tensors(self) -> None:
        """A name before an expression, an expression before the class; `ignore` before all."""
        quantization = read(groups(
            group(INT4), group(INT8, r"re:.*down_proj"), group(INT4 | {"group_size": 64}, DOWN),
            ignore=[r"re:.*self_attn.*", "lm_head"]))
        assert quantization.scheme(DOWN).format(128).group == 64
        assert quantization.scheme("model.layers.0.mlp.down_proj").format(128).bits == 8
        assert quantization.scheme(UP).format(128).group == 32
        assert quantization.scheme(QUERY) is None and quantization.scheme(HEAD) is None
        assert "4 and 8 bits" in quantization.description

    def test_groups_without_the_class_leave_other_modules(self) -> None:
        assert read(groups(group(INT4, r"re:.*mlp.*"))).scheme(QUERY) is None

    def test_groups_may_have_formats_of_their_own(self) -> None:
        quantization = read(groups(
            group(INT4, "re:.*mlp.*", format="pack-quantized"),
            group(E4M3, "re:.*self_attn.*", format="float-quantized"), kind="mixed-precision"))
        assert quantization.scheme(QUERY).format(128).levels and not quantization.scheme(UP).format(128).levels


@pytest.mark.parametrize(("actorder", "is_ordered"), [
    (None, False), (False, False), ("weight", False), ("static", False), ("group", True), ("dynamic", True)])
def test_only_some_orders_of_compressed_tensors_are_stored(actorder: object, is_ordered: bool) -> None:
    part = scheme(groups(group(INT4 | {"actorder": actorder}))).parts(64, 128)["weight_g_idx"]
    assert part.is_optional is not is_ordered


def test_older_names_of_fields() -> None:
    assert scheme({"quant_method": "awq", "w_bit": 4, "q_group_size": 64}).format(128).group == 64
    assert read({"quant_method": "awq", "bits": 4, "format": "gemm", "sym": True, "damp_percent": 0.1,
                 "true_sequential": True, "backend": "auto"}).description == "AWQ, 4 bits"
    assert scheme(GPTQ | {"format": "gptq_v2"}).zero_offset == 0 and scheme(GPTQ).zero_offset == 1
