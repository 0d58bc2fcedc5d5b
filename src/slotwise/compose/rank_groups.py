"""Where a rank is, and its connections to the others: through shared memory on a CPU, else by torch.distributed.

    rank      0        1   |   2        3        two stages of two ranks: 0 and 1 sum, 0 hands on to 2, 2 returns to 0
    stage     0            |   1
"""

from __future__ import annotations

import os
from functools import cache
from typing import Any, NamedTuple

import torch

from slotwise.engine.config import EngineConfig
from slotwise.kernels.cpu.shared_group import (
    CHUNK,
    PipeMemory,
    SharedGroup,
    SharedMemory,
    SharedPipe,
    pipe_size,
    shared_file,
    size_of,
)
from slotwise.kernels.group import Alone, Group, NoPipe, Pipe, Stage, TorchGroup, TorchPipe
from slotwise.kernels.interface import Kernels
from slotwise.kernels.select import launcher_of
from slotwise.model.model_config import ModelConfig

LOGIT = 4  # bytes


class Rank(NamedTuple):
    """The place of a process among all ranks."""

    number: int
    width: int  # ranks of a stage
    stages: int
    splits_experts: bool

    @classmethod
    def of(cls, number: int, config: EngineConfig) -> Rank:
        return cls(number, config.tensor_parallel_size, config.pipeline_parallel_size, config.enable_expert_parallel)

    @property
    def size(self) -> int:
        return self.width * self.stages

    @property
    def stage(self) -> Stage:
        return Stage(self.number // self.width, self.stages)

    @property
    def within(self) -> int:
        """Its number within its stage."""
        return self.number % self.width

    @property
    def before(self) -> int:
        """The rank that hands hidden states to this one."""
        return (self.number - self.width) % self.size

    @property
    def after(self) -> int:
        return (self.number + self.width) % self.size


class RankFiles(NamedTuple):
    """Descriptors of the memory that ranks share."""

    of_stages: list[int]
    boxes: int

    @classmethod
    def made(cls, config: EngineConfig, described: ModelConfig) -> RankFiles:
        """Files for the largest exchange of any step; memory is taken as it is used."""
        width, stages = config.tensor_parallel_size, config.pipeline_parallel_size
        logits = LOGIT * -(-described.vocab_size // width)
        longest = min(config.max_model_len or described.max_position_embeddings, described.max_position_embeddings)
        tokens = config.step_tokens + config.max_num_seqs * longest  # whole prompts of a static batch
        message = tokens * described.hidden_size * described.dtype.itemsize
        return cls([shared_file(size_of(width, max(CHUNK, logits))) for _ in range(stages)],
                   shared_file(pipe_size(width * stages, message if stages > 1 else 0)))

    def close(self) -> None:
        for descriptor in (*self.of_stages, self.boxes):
            os.close(descriptor)


class RankMemory:
    """The memory of a rank's stage and that between stages, mapped in this process."""

    def __init__(self, stage: int, boxes: int, rank: Rank) -> None:
        self.stage = SharedMemory(stage, rank.width)
        self.boxes = PipeMemory(boxes, rank.size)


@cache
def store_file() -> int:
    """Descriptor of the file of this process's stores.

    It is never closed: a store opens it by its number, and does so a last time when its last process group is freed,
    which may be long after the engine was dropped.  Another file of that number would be written to.
    """
    return shared_file(0)


def store_of(descriptor: int, size: int) -> Any:
    """The store of torch.distributed through which ranks find each other, in a file that no other process can open.

    A TCPStore would listen on every address of the machine, and do what any client asks.
    """
    return torch.distributed.FileStore(f"/proc/self/fd/{descriptor}", size)  # type: ignore[attr-defined]


def group_of(kernels: Kernels, rank: Rank, memory: RankMemory, store: Any) -> Group:
    """This process' view of its stage and the others; `store` is None where they exchange through `memory`."""
    group = _of_memory(kernels, rank, memory) if store is None else _of_torch(kernels, rank, store)
    group.splits_experts = rank.splits_experts
    return group


def _of_memory(kernels: Kernels, rank: Rank, memory: RankMemory) -> Group:
    launcher = launcher_of(kernels)
    pipe: Pipe = NoPipe()
    if rank.stages > 1:
        pipe = SharedPipe(launcher, memory.boxes, rank.stage, rank.number, rank.after)
    return Alone(pipe) if rank.width == 1 else SharedGroup(launcher, memory.stage, rank.within, pipe)


def _of_torch(kernels: Kernels, rank: Rank, store: Any) -> Group:
    """Every rank makes all process groups, in the same order."""
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    backend, distributed = "nccl" if kernels.device.type == "cuda" else "gloo", torch.distributed
    distributed.init_process_group(backend, store=store, rank=rank.number, world_size=rank.size)
    if rank.stages == 1:
        return TorchGroup()
    ranks = [rank._replace(number=number) for number in range(rank.size)]
    edges = {one.number: distributed.new_group([one.number, one.after]) for one in ranks}
    stages = [distributed.new_group([*range(first, first + rank.width)]) for first in range(0, rank.size, rank.width)]
    pipe = TorchPipe(rank.stage, rank.before, rank.after, (edges[rank.before], edges[rank.number]), kernels.device)
    return Alone(pipe) if rank.width == 1 else TorchGroup(stages[rank.stage.number], pipe)
