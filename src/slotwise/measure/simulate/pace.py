"""Paces: how long the steps of a machine take, as learned from steps or as its roofline allows.

A roofline's times are lower bounds of a machine's peak rates, divided by the share of them that steps reach.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from math import inf
from typing import Protocol

from slotwise.core.step_time import Roofline, StepTimeModel, Work

# Multiplicative hashing (Knuth): consecutive numbers are spread evenly.
GOLDEN, MASK = 0x9E3779B1, 0xFFFFFFFF
FAR = 1_000_003  # between the numbers of two seeds


class Pace(Protocol):
    """The time of a machine's steps, in seconds."""

    def step(self, work: Work) -> float:
        """Returns what a step takes; called once for each step, in order."""
        ...

    def decode_steps(self, work: Work) -> Iterator[float]:
        """Yields what `step` does for a step of decoding rows, and for those after it, each with a token more a row."""
        ...

    def predicted(self, work: Work) -> float:
        """Returns what a scheduler expects a step to take; called any number of times."""
        ...

    def least(self, work: Work) -> float:
        """Returns a lower bound of this step and of any with longer contexts; 0 where there is none to tell."""
        ...

    def between(self) -> float:
        """Returns the time from the end of a step to the plan of the next, while there is work."""
        ...


def each_step(step: Callable[[Work], float], work: Work) -> Iterator[float]:
    """Yields as `Pace.decode_steps`."""
    while True:
        yield step(work)
        work = Work(work.tokens, work.rows, work.context + work.rows, 0.0, work.longest + 1)


@dataclass(frozen=True, slots=True)
class CostPace:
    """Steps as a function of their work says."""

    cost: Callable[[Work], float]

    def step(self, work: Work) -> float:
        return self.cost(work)

    def decode_steps(self, work: Work) -> Iterator[float]:
        return each_step(self.step, work)

    predicted = step

    def least(self, work: Work) -> float:
        return 0.0

    def between(self) -> float:
        return 0.0


@dataclass(frozen=True, slots=True)
class LearnedPace:
    """Steps as a step-time model predicts them, where every graph has been captured before, and as varied as a log's.

    A model predicts typical times, and a few steps that others interrupt take many times as long: waits depend on
    these, too.  So a step takes its predicted time times one of the log's ratios, which its work chooses.
    """

    times: StepTimeModel
    gap: float = 0.0  # seconds between two steps
    decoding: tuple[float, ...] = (1.0,)  # measured over predicted times of steps without prompts, the smallest first
    prompts: tuple[float, ...] = (1.0,)  # and of steps with some
    seed: int = 0  # another one makes other choices

    def step(self, work: Work) -> float:
        ratios = self.prompts if work.pairs else self.decoding
        number = work.context + work.tokens + int(work.pairs) + self.seed * FAR
        drawn = (number * GOLDEN & MASK) * len(ratios) >> 32
        return self.predicted(work) * ratios[drawn]

    def decode_steps(self, work: Work) -> Iterator[float]:
        return each_step(self.step, work)

    def predicted(self, work: Work) -> float:
        return self.times.typical(work._replace(longest=0))

    def least(self, work: Work) -> float:
        """No coefficient is negative."""
        return self.predicted(work) * (self.prompts if work.pairs else self.decoding)[0]

    def between(self) -> float:
        return self.gap


@dataclass(frozen=True, slots=True)
class RooflinePace:
    """Steps at a share of a machine's roofline, after a constant time of launches and planning."""

    roofline: Roofline
    memory_share: float = 1.0  # of the peak bandwidth that decode steps reach
    compute_share: float = 1.0  # of the peak rate that products reach
    overhead: float = 0.0  # seconds of each step

    def step(self, work: Work) -> float:
        """The keys and values that a prompt's chunk reads before it are not counted: weights are more."""
        roofline, machine = self.roofline, self.roofline.machine
        read = roofline.weight_bytes + work.context * roofline.position_bytes
        operations = 2 * (work.tokens * roofline.token_weights + work.rows * roofline.head_weights) + int(
            work.context + work.pairs) * roofline.pair_operations
        return self.overhead + max(read / (machine.bytes_per_second * self.memory_share),
                                   operations / (machine.operations_per_second * self.compute_share))

    def decode_steps(self, work: Work) -> Iterator[float]:
        """As `step`, with what does not change computed once."""
        roofline, machine, overhead, context = self.roofline, self.roofline.machine, self.overhead, work.context
        read = roofline.weight_bytes + context * roofline.position_bytes
        operations = 2 * (work.tokens * roofline.token_weights + work.rows * roofline.head_weights) + (
            context * roofline.pair_operations)
        more_read, more_operations = work.rows * roofline.position_bytes, work.rows * roofline.pair_operations
        bandwidth = machine.bytes_per_second * self.memory_share
        rate = machine.operations_per_second * self.compute_share
        while True:
            yield overhead + max(read / bandwidth, operations / rate)
            read += more_read
            operations += more_operations

    predicted = least = step

    def between(self) -> float:
        return 0.0


class PaceStepTimes(StepTimeModel):
    """A step-time model that knows a pace, and learns nothing."""

    learns = False

    def __init__(self, pace: Pace) -> None:
        super().__init__()
        self.seconds = self.typical = pace.predicted  # type: ignore[method-assign]

    @property
    def is_trained(self) -> bool:
        return True

    def measured(self, work: Work) -> float:
        """Every step is known: none has to be measured."""
        return inf

    def step(self, work: Work, started: float, ended: float) -> None:
        """Learns nothing: the pace does not change."""
