"""Steps in flight: a device that runs behind the host gives the same tokens, whatever is asked and whoever yields.

The device here is slow on purpose: nothing that the host may look at is there before it waits for the step.
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch
from support import checkpoints
from support.toy import Proposing
from torch import Tensor

from slotwise.compose.engine_builder import load
from slotwise.compute.kernels.interface import Kernels
from slotwise.compute.kernels.reference import ReferenceKernels
from slotwise.compute.runner import model_runner
from slotwise.compute.runner.model_runner import DeviceLostError
from slotwise.compute.runner.sampling import gpu_sampler as gpu
from slotwise.core.params import SamplingSpec
from slotwise.core.record import StepRecord
from slotwise.core.request import Request, RequestSpec
from slotwise.engine.config import EngineConfig
from slotwise.engine.engine import Engine
from slotwise.engine.messages import Add

ROWS = 6


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return checkpoints.make("llama3", tmp_path_factory.mktemp("llama3"))


class Again:
    """Work that is simply done again: what a captured graph does, without the device."""

    def __init__(self, work: Callable[[], Tensor]) -> None:
        self._work = work
        self.runs = 0
        self.result = work()

    def run(self) -> Tensor:
        self.runs += 1
        self.result.copy_(self._work())
        return self.result


class PaddedKernels(ReferenceKernels):
    """The reference, recorded at a few sizes as a GPU's kernels are."""

    def __init__(self) -> None:
        super().__init__()
        self.recordings: list[Again] = []

    def graph_size(self, tokens: int, context: int) -> tuple[int, int]:
        return 1 << (tokens - 1).bit_length(), 64 if context <= 64 else 2048

    def record(self, work: Callable[[], Tensor]) -> Again:
        self.recordings.append(Again(work))
        return self.recordings[-1]


def engine(folder: Path, wrap: Callable[[Kernels], Kernels] = lambda kernels: kernels, **settings: object) -> Engine:
    config = EngineConfig.of(**{
        "model": str(folder), "device": "reference", "dtype": "float32", "block_size": 4, "max_model_len": 100,
        "max_num_seqs": ROWS, "max_num_batched_tokens": 32, "kv_cache_memory": 16 << 20} | settings)
    built, _ = load(config, wrap=wrap).engine(config)
    return built


def commands() -> list[Add]:
    draw = random.Random(4)
    prompts = checkpoints.prompts([draw.randint(1, 40) for _ in range(12)], seed=3)
    return [
        Add(f"r{index}", RequestSpec(prompt, SamplingSpec(
            temperature=draw.choice([0.0, 0.9]), top_p=draw.choice([1.0, 0.8]), max_tokens=draw.randint(1, 20),
            repetition_penalty=draw.choice([1.0, 1.3]), frequency_penalty=draw.choice([0.0, 0.7]),
            min_tokens=draw.choice([0, 4]), logprobs=draw.choice([None, 2])), index))
        for index, prompt in enumerate(prompts)]


def play(subject: Engine) -> tuple[dict[str, list[int]], list[StepRecord]]:
    """What every request was given, and all records."""
    outputs: dict[str, list[int]] = {}
    records, waiting = [], deque(commands())
    while waiting or subject.has_work:
        for _ in range(min(2, len(waiting))):
            subject.handle(waiting.popleft())
        records.append(subject.step())
        assert not any(end.message for end in records[-1].ended), records[-1].ended
        for name, tokens in zip(records[-1].plan.request_ids, records[-1].tokens, strict=True):
            outputs.setdefault(name, []).extend(tokens)
    return outputs, records


@pytest.fixture(scope="module")
def expected(folder: Path) -> dict[str, list[int]]:
    """The CPU's own kernels and sampler, no step in flight."""
    return play(engine(folder, device="cpu", overlap=0))[0]


@pytest.mark.parametrize("overlap", [0, 1])
@pytest.mark.parametrize("few_blocks", [False, True])
def test_the_device_samples_what_the_host_does(folder, expected, overlap, few_blocks):
    per_block = 2 * 4 * 2 * 32 * 4 * 3  # keys and values, tokens, heads, head_dim, float32, layers
    memory = per_block * 32 if few_blocks else 16 << 20
    outputs, records = play(engine(folder, overlap=overlap, kv_cache_memory=memory))
    assert outputs == expected
    assert any(record.preempted for record in records) == few_blocks


class Knowing(Proposing):
    """Proposes what a request is about to be given, with a wrong token now and then."""

    def __init__(self, outputs: dict[str, list[int]]) -> None:
        self._outputs = outputs
        self._draw = random.Random(5)

    def guess(self, request: Request, most: int) -> list[int]:
        to_come = self._outputs[request.request_id][request.num_output :][: min(most, self._draw.randint(0, 4))]
        return [token + 1 if self._draw.random() < 0.2 else token for token in to_come]

@pytest.mark.parametrize("settings", [
    {"device": "cpu", "overlap": 0}, {"overlap": 0}, {"overlap": 1}, {"kv_cache_memory": 2 * 4 * 2 * 32 * 4 * 3 * 32}],
    ids=["cpu", "device", "overlap", "few blocks"])
def test_rows_with_drafts_sample_what_they_would_without(folder, expected, settings):
    subject = engine(folder, **settings)
    subject._scheduler._drafting.proposer = Knowing(expected)
    outputs, records = play(subject)
    assert outputs == expected
    yielded = [len(tokens) for record in records for tokens, drafts in zip(
        record.tokens, record.plan.drafts, strict=False) if drafts]
    assert max(yielded) > 2 and yielded.count(1) > 3, "some were right, and some were not"


class SlowEvent:
    """An event of a device that works only when somebody waits for it."""

    def __init__(self, pending: list[Callable[[], object]]) -> None:
        self._pending = pending
        self._mine: list[Callable[[], object]] = []

    def record(self) -> None:
        self._mine = list(self._pending)
        self._pending.clear()

    @torch.inference_mode()
    def synchronize(self) -> None:
        for arrive in self._mine:
            arrive()


def test_the_host_looks_at_nothing_before_the_step_is_done(folder, expected, monkeypatch):
    """Copies to the host hold rubbish until the event of their step has been waited for."""
    pending: list[Callable[[], object]] = []

    def late(tensor: Tensor) -> Tensor:
        host = torch.full_like(tensor, 77)
        truth = tensor.clone()
        pending.append(partial(host.copy_, truth))
        return host

    monkeypatch.setattr(gpu, "to_host", late)
    monkeypatch.setattr(model_runner, "event_of", lambda device: SlowEvent(pending))
    outputs, _ = play(engine(folder, overlap=1))
    assert outputs == expected


@pytest.mark.parametrize("overlap", [0, 1])
def test_padded_recordings_change_nothing_and_touch_nobody(folder, expected, overlap):
    kernels = PaddedKernels()
    outputs, _ = play(engine(folder, wrap=lambda _: kernels, overlap=overlap))
    assert outputs == expected
    assert {len(recording.result) for recording in kernels.recordings} == {1, 2, 4, 8}
    assert sum(recording.runs for recording in kernels.recordings) > 10


def test_a_step_that_fails_ends_its_rows_and_no_others(folder, monkeypatch):
    kernels = ReferenceKernels()
    subject = engine(folder, wrap=lambda _: kernels, overlap=1)
    first, second = commands()[:2]
    subject.handle(first)
    subject.step()
    monkeypatch.setattr(kernels, "attention", lambda *given: 1 / 0)
    while not (record := subject.step()).outcome.failure:
        pass
    assert [end.reason for end in record.ended] == ["error"]
    monkeypatch.undo()
    subject.handle(replace_id(second))
    tokens = 0
    while subject.has_work:
        tokens += sum(map(len, subject.step().tokens))
    assert tokens > 0


def test_an_engine_does_not_outlive_its_device(folder, monkeypatch):
    """The step that broke ends its requests; the next does not begin, so whoever watches the process starts another."""
    kernels = ReferenceKernels()
    subject = engine(folder, wrap=lambda _: kernels, overlap=1)

    def fails(*given: object) -> None:
        raise torch.AcceleratorError("CUDA error: an illegal memory access was encountered")

    monkeypatch.setattr(kernels, "attention", fails)
    subject.handle(commands()[0])
    record = subject.step()
    assert "illegal memory access" in record.outcome.failure and [end.reason for end in record.ended] == ["error"]
    monkeypatch.undo()
    subject.handle(commands()[1])
    with pytest.raises(DeviceLostError, match="no step can follow: CUDA error"):
        subject.step()


def replace_id(command: Add) -> Add:
    return Add("later", replace(
        command.spec, params=replace(command.spec.params, min_tokens=0)))
