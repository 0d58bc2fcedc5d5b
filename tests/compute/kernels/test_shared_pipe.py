"""Messages between stages, through memory that threads of one process share as processes would."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable
from functools import partial

import pytest
import torch
from torch import Tensor

from slotwise.compute.kernels.cpu.kernels import CpuKernels
from slotwise.compute.kernels.cpu.shared_group import PipeMemory, SharedPipe, pipe_size, shared_file
from slotwise.compute.kernels.group import PLACES, PipelineStage

ROWS, HIDDEN = 5, 48
MESSAGE = ROWS * HIDDEN * 4  # bytes


@pytest.fixture
def memory() -> PipeMemory:
    descriptor = shared_file(pipe_size(2, MESSAGE))
    mapped = PipeMemory(descriptor, 2)
    os.close(descriptor)
    return mapped


def pipes(memory: PipeMemory) -> tuple[SharedPipe, SharedPipe]:
    """The two stages of a ring, each with kernels of its own."""
    found = [SharedPipe(CpuKernels(1).launcher, memory, PipelineStage(number, 2), number, 1 - number)
             for number in range(2)]
    for pipe in found:
        pipe.warm_up(torch.float32)
        pipe.warm_up(torch.bfloat16)
    return found[0], found[1]


def beside(work: Callable[[], object]) -> threading.Thread:
    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    return thread


@pytest.mark.parametrize("kind", [torch.float32, torch.bfloat16])
def test_messages_arrive_as_they_were_sent_and_in_order(memory: PipeMemory, kind: torch.dtype) -> None:
    first, second = pipes(memory)
    sent = [torch.randn(1 + number % ROWS, HIDDEN).to(kind) for number in range(40)]
    echoed: list[Tensor] = []

    def echo() -> None:
        for x in sent:
            echoed.append(second.receive(len(x), HIDDEN, kind))
            second.send(echoed[-1] * 2)

    thread = beside(echo)
    for x in sent:
        first.send(x)
        assert torch.equal(first.receive(len(x), HIDDEN, kind), x * 2)
    thread.join(120)
    assert all(torch.equal(one, other) for one, other in zip(sent, echoed, strict=True))


def test_a_stage_is_at_most_as_far_ahead_as_there_are_places(memory: PipeMemory) -> None:
    first, second = pipes(memory)
    done: list[int] = []

    def run() -> None:
        for number in range(PLACES + 1):
            first.send(torch.full((1, HIDDEN), float(number)))
            done.append(number)

    thread = beside(run)
    ends = time.monotonic() + 120
    while len(done) < PLACES and time.monotonic() < ends:
        time.sleep(0.01)
    time.sleep(0.1)
    assert len(done) == PLACES
    assert second.receive(1, HIDDEN, torch.float32)[0, 0] == 0
    thread.join(120)
    assert len(done) == PLACES + 1


def test_all_waiting_ends_with_the_pipe(memory: PipeMemory) -> None:
    first, second = pipes(memory)
    threads = [beside(partial(pipe.receive, 1, HIDDEN, torch.float32)) for pipe in (first, second)]
    memory.end()
    for thread in threads:
        thread.join(120)
        assert not thread.is_alive()


def test_a_message_that_is_too_large_is_refused(memory: PipeMemory) -> None:
    first, _ = pipes(memory)
    rows = memory.message // (4 * HIDDEN) + 1
    with pytest.raises(ValueError, match="lower max_num_batched_tokens"):
        first.send(torch.zeros(rows, HIDDEN))


def test_a_rank_tells_when_it_worked_on_its_latest_steps(memory: PipeMemory) -> None:
    memory.note(1, 7, 100, 250)
    assert memory.span(1, 7) == (100, 250) and memory.span(0, 7) is None and memory.span(1, 8) is None
    for step in range(8, 8 + 64):
        memory.note(1, step, step, step + 1)
    assert memory.span(1, 7) is None and memory.span(1, 71) == (71, 72)
    first, second = pipes(memory)
    before = time.monotonic_ns()
    first.send(torch.zeros(1, HIDDEN))
    second.receive(1, HIDDEN, torch.float32)
    assert before <= memory.arrived(1) <= time.monotonic_ns() and memory.arrived(0) == 0
