"""Finds the reader of a `quantization_config`, by its `quant_method`."""

from __future__ import annotations

from collections.abc import Callable

from slotwise.model.fields import Fields
from slotwise.model.names import Spellings, spellings
from slotwise.model.quantization.awq import AWQ
from slotwise.model.quantization.bitsandbytes import BitsAndBytes
from slotwise.model.quantization.compressed_tensors import CompressedTensors
from slotwise.model.quantization.fp8 import FP8
from slotwise.model.quantization.gptq import GPTQ
from slotwise.model.quantization.mxfp4 import MXFP4
from slotwise.model.quantization.scheme import Quantization

METHODS: dict[str, Callable[[Fields, Spellings], Quantization]] = {
    "awq": AWQ, "gptq": GPTQ, "compressed-tensors": CompressedTensors, "fp8": FP8, "bitsandbytes": BitsAndBytes,
    "mxfp4": MXFP4}
GPT_OSS = ("GptOssForCausalLM",)
FIELD = "quantization_config"


def read_quantization(config: Fields) -> Quantization | None:
    """How the checkpoint of this config.json is quantised; None: it is not.

    Raises CheckpointError for another method than those of `METHODS`, and for a field that is malformed or whose
    meaning is not implemented.
    """
    fields = config.section(FIELD)
    if not fields.values:
        return None
    method = fields.text("quant_method")
    if method not in METHODS:
        raise fields.error("quant_method", f"must be one of {', '.join(METHODS)}, not {method!r:.40}: "
                           "serve the checkpoint that it was made from")
    if method == "mxfp4" and config.texts("architectures")[:1] != GPT_OSS:
        raise fields.error("quant_method", f"mxfp4 is that of the experts of {GPT_OSS[0]}")
    return METHODS[method](fields, spellings((config.texts("architectures") or ("",))[0]))
