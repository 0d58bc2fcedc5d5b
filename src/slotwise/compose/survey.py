"""What this machine is, and what an engine with given settings would choose on it: no weight is read.

The expected rate is that of a roofline, a bound that no engine exceeds; where an engine with the same traits has run
here, the step times that it learned give the rate that it reached.
"""

from __future__ import annotations

import platform
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from slotwise.compose.engine_builder import Expected, expected
from slotwise.compose.machine import CACHES, measure_machine, read_rate, roofline
from slotwise.compute.kernels.interface import Kernels
from slotwise.compute.kernels.select import choose, resolve
from slotwise.compute.runner import memory_budget
from slotwise.core.speculation.speculation_settings import PREDICTION, Speculation
from slotwise.core.step_time import Machine, Roofline, Work
from slotwise.engine.config import EngineConfig
from slotwise.engine.messages import EngineInfo
from slotwise.observe.step_time_store import load, path_for, traits
from slotwise.platform.host import last_cache_bytes

SECONDS = 0.15  # of each measurement
PRODUCT = 768  # rows and columns of the product that is timed
FAR = 1 << 62  # bytes: no cache holds so many
FEATURES = ("avx2", "avx512f", "avx512bf16", "avx512fp16", "avx512vnni", "avxvnni", "amx-bf16", "amx-int8", "neon")
STREAMS = (1, 8)
CONTEXT = 256  # tokens of each stream for which rates are told


@dataclass(frozen=True)
class Processor:
    """What the CPU's kernels find."""

    features: tuple[str, ...]  # that kernels may use, by LLVM's names
    paths: Mapping[str, str]  # of products, by the type of the weights
    threads: int
    num_compiled: int  # kernels on disk
    kernel_folder: Path | None  # None: nothing can be kept


def kernels_here() -> Kernels:
    """Returns the kernels that a server would choose without settings."""
    return choose(resolve("auto"))


def processor() -> Processor | None:
    """Returns what the CPU's kernels find; None where they do not run."""
    if resolve("cpu") != "cpu":
        return None
    from slotwise.compute.kernels.cpu.jit.compiler import store
    from slotwise.compute.kernels.cpu.kernels import CpuKernels
    from slotwise.compute.kernels.cpu.processor import features

    names = {name.removeprefix("+") for name in features().split(",") if name.startswith("+")}
    plain, quantized = CpuKernels(), CpuKernels(quantization="int8")
    folder = store().folder
    return Processor(
        tuple([name for name in FEATURES if name in names]),
        {"bfloat16": plain.product_path(torch.bfloat16), "quantized": quantized.product_path(torch.bfloat16)},
        torch.get_num_threads(),
        0 if folder is None else sum(not file.name.startswith(".") for file in folder.iterdir()), folder)


def bandwidth(kernels: Kernels) -> float:
    """Returns the bytes per second of reading memory, beyond every cache."""
    return read_rate(kernels, FAR, SECONDS, CACHES // 2)


def gpus() -> list[dict[str, Any]]:
    """Returns the GPUs that torch sees, each with its name, bytes and capability."""
    if not torch.cuda.is_available():
        return []
    found = [torch.cuda.get_device_properties(number) for number in range(torch.cuda.device_count())]
    return [{"name": one.name, "bytes": one.total_memory, "capability": f"{one.major}.{one.minor}"} for one in found]


def torch_build() -> str:
    """What torch was built for: CUDA's version, or the CPU."""
    return f"CUDA {torch.version.cuda}" if torch.version.cuda else "CPU"


def memory() -> dict[str, int]:
    """Bytes that this process may still take, and those of the last cache."""
    return {"free_bytes": memory_budget.available_bytes(), "last_cache_bytes": last_cache_bytes()}


@dataclass(frozen=True)
class Rate:
    """Output tokens per second of a number of streams."""

    streams: int
    bound: float  # of the roofline
    learned: float | None  # as learned by an earlier engine; None: none has run


@dataclass(frozen=True)
class Survey:
    """What an engine would choose for a model."""

    found: Expected
    machine: Machine
    path: str  # of products with its weights
    rates: list[Rate]


def survey(config: EngineConfig) -> Survey:
    """Returns what an engine with these settings would choose.

    Raises:
        CheckpointError, ConfigError, MemoryError: it could not be started; one line that says why.
    """
    found = expected(config)
    machine = measure_machine(found.model, (PRODUCT,), CACHES // 2, SECONDS)
    path, bound = _path(found), roofline(found.model, machine)
    return Survey(found, machine, path, [_rate(config, found, path, bound, streams) for streams in STREAMS])


def _path(found: Expected) -> str:
    """Returns the path of products with the model's weights.

    Kernels know it once they have packed quantized matrices; until then it is that of weights quantized at the start.
    """
    kernels, kind = found.model.kernels, found.model.config.dtype
    if kernels.name == "cpu" and any(not one.are_floats for one in found.model.formats.values()):
        return choose("cpu", "int8").product_path(kind)
    return kernels.product_path(kind)


def _rate(config: EngineConfig, found: Expected, path: str, bound: Roofline, streams: int) -> Rate:
    context = min(CONTEXT, found.limits.max_model_len - 1)
    seconds = bound.seconds(bound.cost([context] * streams, [1] * streams, streams))
    learned = _learned_seconds(config, found, path, streams, context)
    return Rate(streams, streams / seconds, streams / learned if learned else None)


def _learned_seconds(
    config: EngineConfig, found: Expected, path: str, streams: int, context: int,
) -> float | None:
    """Returns the seconds of a decode step that an earlier engine learned; None: none has run."""
    model = found.model.config
    for speculation in (Speculation(PREDICTION), None):  # a server's, and that of a process of one's own
        info = EngineInfo(
            model=config.model, device=found.device, dtype=str(model.dtype).removeprefix("torch."),
            vocab_size=model.vocab_size, limits=found.limits, scheduling=config.scheduling(),
            eos_token_ids=model.eos_token_ids, kv_cache_dtype=config.kv_cache_dtype, speculation=speculation,
            quantization=config.quantization if model.quantization is None else model.quantization.description,
            threads=torch.get_num_threads(), product_path=path)
        times = load(path_for(traits(config, info)))
        if times.is_trained:
            return times.typical(Work(streams, streams, streams * (context + 1), 0.0))
    return None


def versions() -> dict[str, str]:
    """Returns the versions of what computes."""
    import numba

    return {"python": platform.python_version(), "torch": torch.__version__, "numba": numba.__version__}


def disk_free(folder: Path) -> int:
    """Returns the bytes that are free where `folder` is, or would be."""
    while not folder.exists():
        folder = folder.parent
    return shutil.disk_usage(folder).free
