"""What is supported, and what is not: lists for one page, from the code that supports it."""

from __future__ import annotations

import ast
import json
import sys
from pathlib import Path
from types import ModuleType

from docs.generate import names
from docs.generate.blocks import ROOT
from docs.generate.markdown import code, escaped, first_sentence, listed, sentence, table

from slotwise.compute.model import model_config
from slotwise.compute.model.checkpoint import ADAPTER, FORMATS, TOKENIZER
from slotwise.compute.model.family_table import ENCODERS, FAMILIES, Family
from slotwise.compute.model.gguf.architectures import ARCHITECTURES
from slotwise.compute.model.gguf.block_types import BLOCK_TYPES
from slotwise.compute.model.quantization.quantization_methods import METHODS
from slotwise.compute.model.weights import DENSE
from slotwise.engine.config import DEVICES, KV_CACHE_DTYPES, QUANTIZATIONS, ConfigError, EngineConfig
from slotwise.text.gguf_tokenizer import SPLITS

KERNELS = {  # files, not imported: Triton may be absent
    "cpu": "cpu/kernels.py", "cuda": "cuda/kernels.py", "reference": "reference.py"}
MEASURED = {
    "cpu": "Measured on x86-64 with AVX2, AVX-512 (FP16, BF16) and AMX; on aarch64 only emulated.",
    "cuda": "Never measured on hardware; its kernels are tested under Triton's interpreter.",
    "reference": "Plain torch, for tests and comparisons: slow."}
OF_METHODS = {  # methods of a quantization_config: what is read and what is not
    "gptq": ("4 and 8 bits, groups of 16 to 128 or whole rows, `sym` or not, `desc_act` with `g_idx`, `lm_head`, "
             "`dynamic`; `checkpoint_format` `gptq` and `gptq_v2`.", "2 and 3 bits; Marlin's and other packings."),
    "awq": ("4 bits, groups of 16 to 128 or whole rows, `version` `gemm`.",
            "`gemv`, `llm-awq`; weights without zero points."),
    "compressed-tensors": (
        "`pack-quantized` (W4A16, W8A16), `int-quantized` (W8A8), `float-quantized` (FP8), `naive-quantized`, "
        "`mxfp4-pack-quantized`, and `mixed-precision` of these; scales by matrix, channel, group or block; zero "
        "points, `actorder`.", "Sparse and rotated weights, NVFP4, a quantized cache (`kv_cache_scheme`)."),
    "fp8": ("E4M3 with `weight_block_size` (DeepSeek, Qwen3) or a scale for each matrix.", "E5M2."),
    "mxfp4": ("The experts of gpt-oss (`_blocks`, `_scales`), multiplied packed.", ""),
    "bitnet": ("Ternary weights, four to a byte, `linear_class` `bitlinear` and `autobitlinear`; activations are not "
               "rounded.", "`quantization_mode` `online`; norms in products."),
    "bitsandbytes": ("NF4, with and without double quantization; int8.", "FP4; another `bnb_4bit_quant_storage`.")}
WITHOUT = (  # a capability, and a name that would be there with it
    ("data parallelism within one server: `slotwise scale` starts several behind one address", "--data-parallel-size"),
    ("audio routes", "/v1/audio/transcriptions"),
    ("TLS: a proxy in front of the server can add it", "--ssl-certfile"),
    ("a prefix of all paths", "--root-path"),
    ("a file of options", "--config"),
    ("code of a checkpoint: it is never run", "--trust-remote-code"),
    ("a revision of a hub model: the newest is downloaded", "--revision"))


FOUND = ROOT / "docs" / "families.json"  # written by `make families`
TOKENS = ("alone", "in company", "chunked", "preempted", "prefix-cached")
NOT_RUN = "—"
TEXT_PART = "the text part of a model for images and text"


def architectures() -> str:
    """Returns the architectures that a config.json may name: their models, and what `make families` found of each."""
    found = json.loads(FOUND.read_text())
    by_class: dict[str, list[dict[str, str]]] = {}
    for outcomes in found["families"].values():
        by_class.setdefault(outcomes["class"], []).append(outcomes)
    head = (f"{len(FAMILIES)} classes, compared with transformers {found['transformers']} on {found['date']} by "
            f"`make families`, in float32 on small random weights. Tokens are compared {', '.join(TOKENS)}.")
    return head + "\n\n" + table(
        ("`architectures` in config.json", "models", "tokens", "GGUF", "LoRA", "ranks", "`--quantization int8`"),
        [(code(name), escaped(first_sentence(_module(family).__doc__)),
          *_cells(by_class.get(name, []), name)) for name, family in FAMILIES.items()])


def encoders() -> str:
    """Returns the encoders that a config.json may name, and their models."""
    head = ("Vectors and labels of each equal those of transformers in float32, alone and in company. `architectures` "
            "may also name the same model with a head of labels (`ForSequenceClassification`), or with one that fills "
            "gaps, which is not read.")
    return head + "\n\n" + table(("`architectures` in config.json", "models"), [
        (code(name), escaped(first_sentence(_module(family).__doc__)))
        for name, family in ENCODERS.items()])


def _module(family: Family) -> ModuleType:
    """The module that reads a family's configs."""
    return sys.modules[getattr(family.configure, "func", family.configure).__module__]


def _cells(found: list[dict[str, str]], name: str) -> list[str]:
    if not found:
        return [TEXT_PART if name.endswith("ForConditionalGeneration") else NOT_RUN, *[NOT_RUN] * 4]
    tokens = [what for what in TOKENS if any(each.get(what) != "passed" for each in found)]
    cells = ["not " + ", ".join(tokens) if tokens else "equal"]
    for what in ("GGUF", "LoRA", "ranks", "int8"):
        keys = (what, f"no {what}", f"not all {what}", *(["converted"] if what == "GGUF" else []))
        said = {each[key] for each in found for key in keys if key in each}
        cells.append("; ".join(sorted("yes" if one == "passed" else escaped(one) for one in said)) or NOT_RUN)
    return cells


def checkpoints() -> str:
    """Returns what the files of a checkpoint may hold."""
    return table(("of a checkpoint", "what is read"), [
        ("weights", "`model.safetensors`, or the shards that `model.safetensors.index.json` names; or a GGUF file."),
        ("types of stored weights", f"{listed(DENSE)}."),
        ("types in GGUF files", f"{listed((*DENSE, *BLOCK_TYPES))}."),
        ("architectures of GGUF files", f"{listed(ARCHITECTURES)}."),
        ("words of byte-level vocabularies in GGUF files (`tokenizer.ggml.pre`)", f"{listed(SPLITS)}."),
        ("rotary embeddings (`rope_type`)", f"{listed(model_config._READERS)}."),
        ("tokenizer", "`tokenizer.json`, with the special tokens of `tokenizer_config.json`."),
        ("chat template", "That of `--chat-template`, else `chat_template.jinja`, else the one in "
         "`tokenizer_config.json`; without one chats are refused.")])


def quantized() -> str:
    """Returns the methods by which the weights of a checkpoint may be quantized, and what of each is read."""
    if set(OF_METHODS) != set(METHODS):
        raise ValueError(f"there are other methods than {', '.join(OF_METHODS)}")
    return table(("`quant_method`", "what is read", "what is refused"), [
        (code(name), read, refused) for name, (read, refused) in OF_METHODS.items()])


def formats() -> str:
    """Returns the formats that are recognized and refused."""
    adapter = (f"{code(ADAPTER)}.", "A LoRA adapter.",
               "Name it with `--lora-modules`, or offline in `lora_request`.")
    rows = [(f"{listed(known.patterns)}.", sentence(known.what), sentence(known.advice))
            for known in (*FORMATS, TOKENIZER)]
    return table(("files", "what they are", "what to do"), [adapter, *rows])


def devices() -> str:
    """Returns the types in which each device computes, quantizes and caches."""
    rows = []
    for device, path in KERNELS.items():
        types = (_kinds(path), _quantizations(device), _caches(path))
        rows.append((code(device), *[f"{listed(each)}." for each in types], MEASURED[device]))
    if set(KERNELS) | {"auto"} != set(DEVICES):
        raise ValueError(f"there are other devices than {', '.join(KERNELS)}")
    return table(("`--device`", "`--dtype`", "`--quantization`", "`--kv-cache-dtype`", "state"), rows)


def without() -> str:
    """Returns the capabilities that are absent, as a list."""
    return "\n".join(f"- {what[0].upper() + what[1:]} ({code(name)})." for what, name in WITHOUT if not names.has(name))


def _tree(path: str) -> ast.Module:
    return ast.parse((ROOT / "src" / "slotwise" / "compute" / "kernels" / Path(path)).read_text())


def _kinds(path: str) -> list[str]:
    """The types that the kernels in a file compute in: the field `kinds` of their class."""
    (found,) = [node.value for node in ast.walk(_tree(path)) if isinstance(node, ast.AnnAssign)
                and isinstance(node.target, ast.Name) and node.target.id == "kinds"]
    return [kind.attr for kind in ast.walk(found or ast.Tuple()) if isinstance(kind, ast.Attribute)]


def _caches(path: str) -> list[str]:
    """The types of a cache that the kernels in a file accept: the last argument of `cache_kind`."""
    (call,) = [node for node in ast.walk(_tree(path)) if isinstance(node, ast.Call)
               and isinstance(node.func, ast.Name) and node.func.id == "cache_kind"]
    given = call.args[-1]
    return list(ast.literal_eval(given)) if isinstance(given, ast.Tuple) else list(KV_CACHE_DTYPES)


def _quantizations(device: str) -> list[str]:
    """The types to which weights may be quantized on a device, as a config accepts them."""
    taken = []
    for name in QUANTIZATIONS:
        try:
            EngineConfig(model="", device=device, quantization=name)
        except ConfigError:
            continue
        taken.append(name)
    return taken
