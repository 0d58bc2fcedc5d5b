"""Paces: how long the steps of a machine take, as learned from steps or as its roofline allows.

A roofline's times are lower bounds of a machine's peak rates, divided by the share of them that steps reach.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from math import inf
from typing import NamedTuple, Protocol

from slotwise.core.step_time import Roofline, StepTimeModel, Work

# Multiplicative hashing (Knuth): consecutive numbers are spread evenly.
GOLDEN, MASK = 0x9E3779B1, 0xFFFFFFFF
FAR = 1_000_003  # between the numbers of two seeds
LEAST_OF_CLASS, MAX_CLASSES = 32, 8  # steps of a class of a spread, and classes


class Pace(Protocol):
    """The time of a machine's steps, in seconds."""

    def step(self, work: Work, at: float = 0.0) -> float:
        """Returns what a step takes that begins `at`, in seconds; called once for each step, in order."""
        ...

    def decode_steps(self, work: Work, at: float = 0.0) -> Iterator[float]:
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


def each_step(pace: Pace, work: Work, at: float) -> Iterator[float]:
    """Yields as `Pace.decode_steps`."""
    while True:
        yield (seconds := pace.step(work, at))
        at += seconds + pace.between()
        work = Work(work.tokens, work.rows, work.context + work.rows, 0.0, work.longest + 1)


@dataclass(frozen=True, slots=True)
class CostPace:
    """Steps as a function of their work says."""

    cost: Callable[[Work], float]

    def step(self, work: Work, at: float = 0.0) -> float:
        return self.cost(work)

    def decode_steps(self, work: Work, at: float = 0.0) -> Iterator[float]:
        return each_step(self, work, at)

    def predicted(self, work: Work) -> float:
        return self.cost(work)

    def least(self, work: Work) -> float:
        return 0.0

    def between(self) -> float:
        return 0.0


class Ratio(NamedTuple):
    """Measured over predicted time of a step."""

    began: float  # seconds
    value: float


@dataclass(frozen=True, slots=True)
class Spread:
    """How steps varied, by predicted time: what a model errs by, and what interrupts a step, differ with its size."""

    ends: tuple[float, ...] = ()  # predicted seconds up to which each class but the last has its steps, ascending
    ratios: tuple[tuple[Ratio, ...], ...] = ((Ratio(0.0, 1.0),),)  # of each class, in order of time
    least: float = 1.0  # of all ratios

    @classmethod
    def of(cls, steps: Iterable[tuple[float, float, float]]) -> Spread:
        """Returns the spread of steps, by when they began, and predicted and measured seconds."""
        known = sorted([(predicted, Ratio(began, seconds / predicted))
                        for began, predicted, seconds in steps if predicted > 0])
        size = max(LEAST_OF_CLASS, -(-len(known) // MAX_CLASSES))
        classes: list[list[tuple[float, Ratio]]] = []
        for one in known:
            if not classes or (len(classes[-1]) >= size and one[0] > classes[-1][-1][0]):
                classes.append([])
            classes[-1].append(one)
        if not classes:
            return cls()
        if len(classes) > 1 and len(classes[-1]) < size:
            last = classes.pop()
            classes[-1] += last
        return cls(tuple([steps[-1][0] for steps in classes[:-1]]),
                   tuple([tuple(sorted([ratio for _, ratio in steps])) for steps in classes]),
                   min([ratio.value for _, ratio in known]))

    def drawn(self, predicted: float, number: int) -> float:
        """Returns a ratio of a step's class, which `number` chooses."""
        ratios = self.ratios[bisect_left(self.ends, predicted)]
        return ratios[(number * GOLDEN & MASK) * len(ratios) >> 32].value

    def nearest(self, predicted: float, at: float) -> float:
        """Returns the ratio of the step of a step's class that began next to `at`."""
        ratios = self.ratios[bisect_left(self.ends, predicted)]
        index = bisect_left(ratios, (at,))
        return min(ratios[max(0, index - 1) : index + 1], key=lambda one: abs(one.began - at)).value


AS_PREDICTED = Spread()


@dataclass(frozen=True, slots=True)
class LearnedPace:
    """Steps as a step-time model predicts them, where every graph has been captured before, and as varied as a log's.

    A model predicts typical times, and a few steps that others interrupt take many times as long: waits depend on
    these, too.  So a step takes its predicted time times the ratio of one of the log's steps that were about as large.
    In a replay of the log's own traffic it is the one nearest in time: a machine may be slow for seconds, in which
    queues grow.  In other traffic its work chooses, and when a prompt's chunk begins.
    """

    times: StepTimeModel
    gap: float = 0.0  # seconds between two steps
    decoding: Spread = AS_PREDICTED  # of steps without prompts
    prompts: Spread = AS_PREDICTED  # of steps with some
    seed: int = 0  # another one makes other choices
    replays: bool = False  # times of steps are those of the log

    def step(self, work: Work, at: float = 0.0) -> float:
        spread, predicted = self.prompts if work.pairs else self.decoding, self.predicted(work)
        if self.replays:
            return predicted * spread.nearest(predicted, at)
        number = work.context + work.tokens + self.seed * FAR
        if work.pairs:  # many prompts have a first chunk of the same size
            number += int(work.pairs) + round(at * 1e6)
        return predicted * spread.drawn(predicted, number)

    def decode_steps(self, work: Work, at: float = 0.0) -> Iterator[float]:
        return each_step(self, work, at)

    def predicted(self, work: Work) -> float:
        return self.times.typical(work._replace(longest=0))

    def least(self, work: Work) -> float:
        """No coefficient is negative."""
        return self.predicted(work) * (self.prompts if work.pairs else self.decoding).least

    def between(self) -> float:
        return self.gap


@dataclass(frozen=True, slots=True)
class RooflinePace:
    """Steps at a share of a machine's roofline, after a constant time of launches and planning."""

    roofline: Roofline
    memory_share: float = 1.0  # of the peak bandwidth that decode steps reach
    compute_share: float = 1.0  # of the peak rate that products reach
    overhead: float = 0.0  # seconds of each step

    def step(self, work: Work, at: float = 0.0) -> float:
        """The keys and values that a prompt's chunk reads before it are not counted: weights are more."""
        roofline, machine = self.roofline, self.roofline.machine
        read = roofline.weight_bytes + work.context * roofline.position_bytes
        operations = 2 * (work.tokens * roofline.token_weights + work.rows * roofline.head_weights) + int(
            work.context + work.pairs) * roofline.pair_operations
        return self.overhead + max(read / (machine.bytes_per_second * self.memory_share),
                                   operations / (machine.operations_per_second * self.compute_share))

    def decode_steps(self, work: Work, at: float = 0.0) -> Iterator[float]:
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

    def predicted(self, work: Work) -> float:
        return self.step(work)

    least = predicted

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
