"""Machines that are not here, from a file of their makers' numbers (`machines.toml`), with sources."""

from __future__ import annotations

import tomllib
from dataclasses import dataclass
from importlib import resources
from typing import Any

from slotwise.core.scheduler_limits import SchedulerLimits
from slotwise.core.step_time import Machine, Roofline
from slotwise.engine.config import MAX_PASSES, WATERMARK, EngineConfig
from slotwise.measure.simulate.pace import RooflinePace
from slotwise.measure.simulate.simulator import Setup

BLOCK = 64  # tokens of a cache block
LINK = 20e-6  # seconds in which ranks exchange the sums of a layer; assumed, as the shares of `machines.toml`
CACHE_SHARE = 0.9  # of the memory, for weights and cache together


@dataclass(frozen=True, slots=True)
class ModelShape:
    """A model as its roofline sees it."""

    weight_bytes: int  # of all weights that a step reads
    position_bytes: int  # keys and values of one position, in all layers
    token_weights: int
    head_weights: int
    pair_operations: int
    max_model_len: int
    num_layers: int = 1


def names() -> list[str]:
    return sorted(_machines())


def _machines() -> dict[str, dict[str, Any]]:
    text = resources.files(__package__).joinpath("machines.toml").read_text(encoding="utf-8")
    return tomllib.loads(text)


def described(name: str) -> str:
    """Returns a machine's full name and the source of its numbers."""
    machine = _machines()[name]
    return f"{machine['name']} ({machine['source']})"


def setup_of(name: str, shape: ModelShape, config: EngineConfig, link: float = LINK) -> Setup:
    """Returns a server of a model on a machine of the file, or on as many as the config has ranks.

    The ranks of a stage divide every layer, and wait for each other twice a layer, to add up what they computed.

    Args:
        link: seconds of such a wait, and of handing a step on to the next stage.

    Raises:
        ValueError: the machine is unknown, or the model does not fit its memory.
    """
    machines = _machines()
    if name not in machines:
        raise ValueError(f"there is no machine {name!r}; there are {', '.join(sorted(machines))}, or name an event log")
    machine = machines[name]
    width, stages = config.tensor_parallel_size, config.pipeline_parallel_size
    memory = machine["memory_bytes"] * width * stages
    blocks = int((memory * CACHE_SHARE - shape.weight_bytes) / (shape.position_bytes * BLOCK))
    longest = config.max_model_len or shape.max_model_len
    if blocks * BLOCK < longest:
        ranks = f"{width * stages} times " if width * stages > 1 else ""
        raise ValueError(f"{ranks}{machine['name']}: weights of {shape.weight_bytes / 1e9:.3g} GB and a sequence of "
                         f"{longest} tokens exceed {CACHE_SHARE:.0%} of {memory / 1e9:g} GB")
    blocks = min(blocks, config.max_num_seqs * -(-longest // BLOCK))  # what the slots can use, as a server's
    scheduling = config.scheduling()
    limits = scheduling.limits(SchedulerLimits(
        **config.chosen_limits(), max_model_len=longest, num_blocks=blocks, block_size=BLOCK,
        watermark_blocks=blocks // WATERMARK, max_passes=MAX_PASSES, stages=stages))
    roofline = Roofline(
        Machine(machine["bytes_per_second"] * width, machine["operations_per_second"] * width), shape.weight_bytes,
        shape.position_bytes, shape.token_weights, shape.head_weights, shape.pair_operations)
    waits = 2 * shape.num_layers * (width > 1) + stages * (stages > 1)
    pace = RooflinePace(roofline, machine["memory_share"], machine["compute_share"],
                        machine["overhead_ms"] / 1000 + waits * link)
    return Setup(limits, scheduling, pace, stages - 1)
