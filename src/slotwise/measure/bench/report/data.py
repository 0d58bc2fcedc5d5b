"""The result of a comparison as typed values.

A result is the JSON that `slotwise compare` writes (version 1).  It may come from an interrupted run, and a comparison
of servers has null for what no client can measure: what is missing or null is None or empty here, and "–" on the page.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import msgspec

Points = tuple[tuple[float, float], ...]


class ChartSpan(NamedTuple):
    """`steps` consecutive steps of one request in one slot, all of one kind."""

    slot: int
    first: int
    steps: int
    kind: str  # prefill, decode, held; idle where a request keeps its slot and is not computed
    request: int
    tokens: float

    @property
    def end(self) -> int:
        return self.first + self.steps


class Pad(NamedTuple):
    slot: int
    step: int
    tokens: float


class Latency(msgspec.Struct):
    """Percentiles of one latency over all requests, in seconds."""

    p50: float | None = None
    p99: float | None = None


class SlotChart(msgspec.Struct):
    """The request of every slot at every step.  `ends` has one number more than there are steps, in seconds."""

    slots: int = 0
    steps: int = 0
    ends: tuple[float, ...] = msgspec.field(name="step_ends", default=(0.0,))
    spans: tuple[ChartSpan, ...] = msgspec.field(name="runs", default=())
    pads: tuple[Pad, ...] = ()
    truncated: bool = False

    def __post_init__(self) -> None:
        self.spans = tuple(sorted(self.spans))


class Waste(msgspec.Struct):
    padded_tokens: float | None = None
    held_row_steps: float | None = None
    empty_slot_steps: float | None = None
    head_of_line_seconds: float | None = None
    reserved_unused: float | None = None


class StepTime(msgspec.Struct):
    """Seconds of a decode step: `a` + `b` x rows; `error` is relative, of the whole run."""

    a: float
    b: float
    error: float | None = None


class ClientFigures(msgspec.Struct):
    """What clients see of a run, or the medians of several runs."""

    seconds: float | None = None
    output_throughput: float | None = None
    ttft: Latency = msgspec.field(default_factory=Latency)
    itl: Latency = msgspec.field(default_factory=Latency)
    e2e: Latency = msgspec.field(default_factory=Latency)

    @property
    def whole(self) -> bool:
        """Whether answers came at once, so that there was no time between their tokens."""
        return self.ttft.p50 is not None and not self.itl.p50 and not self.itl.p99


class DisciplineRun(ClientFigures, kw_only=True):
    index: int
    name: str
    label: str = ""
    slots: int = msgspec.field(name="num_slots", default=0)
    repeats: tuple[ClientFigures, ...] = ()  # in the order of the rounds
    steps: float | None = None
    decode_steps: float | None = None
    theory_steps: float | None = None  # of decode_steps
    draft_tokens: float | None = None
    accepted_draft_tokens: float | None = None
    output_tokens: float | None = None
    occupancy: float | None = None
    mean_rows: float | None = None
    max_rows: float | None = None
    preemptions: float | None = None
    cost_per_million: float | None = None
    ttft_values: tuple[float, ...] = ()  # sorted samples
    itl_values: tuple[float, ...] = ()
    waste: Waste = msgspec.field(default_factory=Waste)
    step_time: StepTime | None = None
    lanes: SlotChart = msgspec.field(name="chart", default_factory=SlotChart)
    cumulative: Points = ()

    def __post_init__(self) -> None:
        self.label = (self.label or self.name).replace("_", " ")

    @property
    def rounds(self) -> tuple[ClientFigures, ...]:
        """What clients saw in each round; of a result without repeats, of its only one."""
        return self.repeats or (self,)


class AxisLabel(msgspec.Struct):
    label: str = ""
    log: bool = False


class Series(msgspec.Struct):
    label: str
    points: Points
    style: str = ""  # measured or theory
    subject: str = ""  # what is measured or predicted; "": the label

    def __post_init__(self) -> None:
        self.points = tuple(sorted(self.points))
        self.subject = self.subject or self.label

    @property
    def theory(self) -> bool:
        return self.style == "theory"


class Sweep(msgspec.Struct):
    title: str
    x: AxisLabel
    y: AxisLabel
    series: tuple[Series, ...] = ()
    notes: tuple[str, ...] = ()


class WorkloadFacts(msgspec.Struct):
    num_requests: int | None = None
    prompt_tokens: float | None = None
    description: dict[str, str] = {}


class Result(msgspec.Struct):
    model: str = ""
    dtype: str = ""
    mode: str = ""
    seed: int | None = None
    environment: dict[str, Any] = {}
    workload: WorkloadFacts = msgspec.field(default_factory=WorkloadFacts)
    identical: bool | None = msgspec.field(name="identical_tokens", default=None)
    interrupted: bool = False
    runs: tuple[DisciplineRun, ...] = ()
    sweeps: tuple[Sweep, ...] = ()


def read(result: Mapping[str, Any]) -> Result:
    """Returns a result as typed values; raises ValueError if it is not one."""
    runs = [_known(run) | {"index": index} for index, run in enumerate(result.get("runs", ()))]
    return msgspec.convert(_known(result) | {"runs": runs}, Result)


def _known(values: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in values.items() if value is not None}
