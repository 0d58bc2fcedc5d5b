"""Scheduling settings that may change while an engine runs: batching, queue order and the limits of a step.

`PUT /admin/scheduling` uses this module: the requesting process validates a change as a whole, which then either
applies from the next plan on or is refused with one line.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields, replace
from typing import Any, TypeVar

from slotwise.batching import settings as batching_settings
from slotwise.batching.settings import KINDS, PREFILLS, Batching
from slotwise.core.interfaces import Discipline, Policy
from slotwise.core.limits import LEAST_MS, MOST_MS, SchedulerLimits
from slotwise.core.settings import Range, whole
from slotwise.core.slo import Tier
from slotwise.core.step_time import StepTimeModel
from slotwise.policies import settings as policy_settings
from slotwise.policies.settings import POLICIES, Ordering

LIMITS = ("max_num_seqs", "max_num_batched_tokens", "max_step_ms", "max_stall_ms")
MILLISECONDS = Range(LEAST_MS, MOST_MS, is_whole=False, may_be_none=True)
RANGES = {  # of all numeric settings that may change
    **batching_settings.RANGES, **policy_settings.RANGES, "max_num_seqs": whole(1), "max_num_batched_tokens": whole(1),
    "max_step_ms": MILLISECONDS, "max_stall_ms": MILLISECONDS}
NEVER_NULL = ("max_num_seqs", "max_num_batched_tokens", "long_prefill_token_threshold")
MAX_TIERS = 64

Settings = TypeVar("Settings", Batching, Ordering)
Order = tuple[Ordering, tuple[Tier, ...]]
DEFAULT_ORDER: Order = (Ordering(), ())


@dataclass(frozen=True, slots=True)
class Scheduling:
    """The settings in force.  Raises ValueError when they contradict each other."""

    batching: Batching
    max_num_seqs: int  # slots in use, at most those allocated at the start
    max_num_batched_tokens: int  # tokens of one step
    ordering: Ordering = field(default_factory=Ordering)
    max_step_ms: float | None = None  # as in SchedulerLimits, like the next
    max_stall_ms: float | None = None
    tiers: tuple[Tier, ...] = ()

    def __post_init__(self) -> None:
        self.discipline()

    @property
    def order(self) -> Order:
        """The settings that determine the policy."""
        return self.ordering, self.tiers

    def discipline(self) -> Discipline:
        return self.batching.discipline(self.max_num_seqs)

    def policy(self, times: StepTimeModel) -> Policy:
        """Returns the policy; `times` predicts step times for policies that need them."""
        return self.ordering.policy(self.tiers, times)

    def limits(self, now: SchedulerLimits) -> SchedulerLimits:
        """Returns `now` with these settings.

        Raises ValueError for limits under which no request can run, and for batches that leave together where a cache
        group has recurrent states: a row whose batch has not ended computes its last token again.
        """
        if now.groups.have_states and self.discipline().leaves_together:
            raise ValueError(f"batching {self.batching.kind} computes the last token of a request again until its "
                             "batch has ended, and this model's recurrent states would advance: choose continuous")
        return replace(now, tiers=self.tiers, **{name: getattr(self, name) for name in LIMITS})

    def as_settings(self) -> dict[str, Any]:
        """Returns the settings by their command-line names; without tiers, which the server describes in full."""
        batching, ordering = asdict(self.batching), asdict(self.ordering)
        return {
            "batching": batching.pop("kind"), **batching, "scheduling_policy": ordering.pop("kind"), **ordering,
            **{name: getattr(self, name) for name in LIMITS}}

    def changed(self, changes: Mapping[str, Any], slots: SchedulerLimits) -> Scheduling:
        """Returns the settings with `changes`, named as on the command line; `tiers` are a list of `Tier`.

        A new `batching` or `scheduling_policy` resets the settings of the last one.

        Args:
            slots: the limits that the engine was started with.

        Raises:
            ValueError: nothing was changed; one line says why.
        """
        for name, value in changes.items():
            if name not in SETTINGS:
                raise ValueError(f"there is no scheduling setting {name!r}; there are {', '.join(SETTINGS)}")
            if (name in LIMITS or name in NEVER_NULL) and (wrong := RANGES[name].objection(value)):
                raise ValueError(f"{name} {wrong}")
        limits: dict[str, Any] = {name: changes[name] for name in LIMITS if name in changes}
        if "tiers" in changes:
            limits["tiers"] = _tiers(changes["tiers"])
        changed = replace(
            self, batching=_changed(self.batching, "batching", changes),
            ordering=_changed(self.ordering, "scheduling_policy", changes), **limits)
        changed.limits(slots)
        if changed.max_num_seqs > slots.max_num_seqs:
            raise ValueError(f"max_num_seqs is at most the {slots.max_num_seqs} slots this engine was started with")
        return changed


def _names(settings: type[Batching | Ordering]) -> list[str]:
    return [known.name for known in fields(settings) if known.name != "kind"]


SETTINGS = ("batching", *_names(Batching), "scheduling_policy", *_names(Ordering), *LIMITS, "tiers")


def _changed(now: Settings, kind: str, changes: Mapping[str, Any]) -> Settings:
    start = type(now)() if kind in changes else now
    given = {name: changes[name] for name in _names(type(now)) if name in changes}
    return replace(start, **given, **({"kind": changes[kind]} if kind in changes else {}))


def _tiers(given: object) -> tuple[Tier, ...]:
    """Returns the tiers; raises ValueError for anything but a list of tiers."""
    if not isinstance(given, (list, tuple)) or len(given) > MAX_TIERS or not all(
            isinstance(tier, Tier) for tier in given):
        raise ValueError(f"tiers must be a list of at most {MAX_TIERS} tiers")
    return tuple(given)


def changes_schema() -> dict[str, Any]:
    """Returns the JSON schema of what `changed` takes, without tiers."""
    import msgspec  # needed by the server only, not by the offline API

    def of(settings: type) -> dict[str, Any]:
        return dict(msgspec.json.schema(settings)["$defs"][settings.__name__]["properties"])

    properties: dict[str, Any] = {}
    for kind, settings, values in (("batching", Batching, KINDS), ("scheduling_policy", Ordering, POLICIES)):
        properties |= of(settings)
        properties[kind] = properties.pop("kind") | {"enum": values}
    properties["prefill"] = {"enum": [*PREFILLS, None]}
    for name, allowed in RANGES.items():
        number = {"type": "integer" if allowed.is_whole else "number", "minimum": allowed.least,
                  "maximum": allowed.most}
        properties[name] = number if name in NEVER_NULL else {"anyOf": [number, {"type": "null"}]}
    return {"type": "object", "properties": properties, "additionalProperties": False}
