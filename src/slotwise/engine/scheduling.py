"""Scheduling settings that may change while an engine runs: batching, queue order and the limits of a step.

`PUT /admin/scheduling` uses this module: the requesting process validates a change as a whole, which then either
applies from the next plan on or is refused with one line.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from typing import Any

from slotwise.core.disciplines.batching_settings import Batching
from slotwise.core.interfaces import Discipline, Policy
from slotwise.core.policies.policy_settings import Ordering
from slotwise.core.scheduler_limits import LiveLimits, SchedulerLimits, Tier
from slotwise.core.setting_fields import changed, nested, settings_of, values_of
from slotwise.core.step_time import StepTimeModel

MAX_TIERS = 64
KINDS = {"batching": Batching, "scheduling_policy": Ordering}  # settings that choose which others have a meaning

Order = tuple[Ordering, tuple[Tier, ...]]
DEFAULT_ORDER: Order = (Ordering(), ())


@dataclass(frozen=True, slots=True)
class Scheduling(LiveLimits):
    """The settings in force.  Raises ValueError when they contradict each other."""

    batching: Batching = nested(Batching)
    ordering: Ordering = nested(Ordering)

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
        return replace(now, **{field.name: getattr(self, field.name) for field in fields(LiveLimits)})

    def as_settings(self) -> dict[str, Any]:
        """Returns the settings by their command-line names; without tiers, which the server describes in full."""
        return values_of(self)

    def changed(self, changes: Mapping[str, Any], slots: SchedulerLimits) -> Scheduling:
        """Returns the settings with `changes`, named as on the command line; `tiers` are a list of `Tier`.

        A new `batching` or `scheduling_policy` resets the settings of the last one.

        Args:
            slots: the limits that the engine was started with.

        Raises:
            ValueError: nothing was changed; one line says why.
        """
        known = settings_of(Scheduling)
        for name, value in changes.items():
            if name != "tiers" and name not in known:
                raise ValueError(f"there is no scheduling setting {name!r}; there are {', '.join([*known, 'tiers'])}")
            if name in known and (wrong := known[name].objection(value)):
                raise ValueError(f"{name} {wrong}")
        before = replace(self, **{known[kind].path[0]: owner() for kind, owner in KINDS.items() if kind in changes})
        tiers = {"tiers": _tiers(changes["tiers"])} if "tiers" in changes else {}
        scheduling = changed(before, {**changes, **tiers})
        scheduling.limits(slots)
        if scheduling.max_num_seqs > slots.max_num_seqs:
            raise ValueError(f"max_num_seqs is at most the {slots.max_num_seqs} slots this engine was started with")
        return scheduling


def _tiers(given: object) -> tuple[Tier, ...]:
    """Returns the tiers; raises ValueError for anything but a list of tiers."""
    if not isinstance(given, (list, tuple)) or len(given) > MAX_TIERS or not all(
            isinstance(tier, Tier) for tier in given):
        raise ValueError(f"tiers must be a list of at most {MAX_TIERS} tiers")
    return tuple(given)


def changes_schema() -> dict[str, Any]:
    """Returns the JSON schema of what `changed` takes, without tiers."""
    return {"type": "object", "properties": {name: one.schema for name, one in settings_of(Scheduling).items()},
            "additionalProperties": False}
