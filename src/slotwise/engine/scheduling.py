"""What may be changed while an engine runs: how batches are made, and the limits of a step.

`PUT /admin/scheduling` is answered from here: a change is checked whole, by the process that asks for it, and is either
in force from the next plan on or refused with one line.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields, replace
from typing import Any

from slotwise.batching.settings import KINDS, PREFILLS, Batching
from slotwise.core.limits import SchedulerLimits
from slotwise.core.seams import Discipline

LIMITS = ("max_num_seqs", "max_num_batched_tokens")
LARGEST = 1 << 31  # of integers: larger ones mean nothing, and could not be sent to an engine
NEVER_NONE = (*LIMITS, "long_prefill_token_threshold")


@dataclass(frozen=True, slots=True)
class Scheduling:
    """Raises ValueError for settings that contradict each other."""

    batching: Batching
    max_num_seqs: int  # slots in use, at most those made at the start
    max_num_batched_tokens: int  # tokens of one step

    def __post_init__(self) -> None:
        self.discipline()

    def discipline(self) -> Discipline:
        return self.batching.discipline(self.max_num_seqs)

    def limits(self, now: SchedulerLimits) -> SchedulerLimits:
        """Raises ValueError for numbers that nothing can run under."""
        return replace(now, max_num_seqs=self.max_num_seqs, max_num_batched_tokens=self.max_num_batched_tokens)

    def as_settings(self) -> dict[str, Any]:
        """Flat, by the names of the command line."""
        batching = asdict(self.batching)
        return {"batching": batching.pop("kind"), **batching, **{name: getattr(self, name) for name in LIMITS}}

    def changed(self, changes: Mapping[str, Any], slots: SchedulerLimits) -> Scheduling:
        """With `changes`, named as on the command line.  Another `batching` lets go of what belonged to the last one.

        Args:
            slots: as the engine was started.

        Raises:
            ValueError: one line that says why nothing was changed.
        """
        names = ["batching", *(field.name for field in fields(Batching) if field.name != "kind"), *LIMITS]
        for name, value in changes.items():
            if name not in names:
                raise ValueError(f"there is no scheduling setting {name!r}; there are {', '.join(names)}")
            _check_type(name, value)
        given = dict(changes)
        limits = {name: given.pop(name) for name in LIMITS if name in given}
        start = Batching() if "batching" in given else self.batching
        batching = replace(start, **{"kind" if name == "batching" else name: value for name, value in given.items()})
        changed = replace(self, batching=batching, **limits)
        changed.limits(slots)
        if changed.max_num_seqs > slots.max_num_seqs:
            raise ValueError(f"max_num_seqs is at most the {slots.max_num_seqs} slots this engine was started with")
        return changed


def changes_schema() -> dict[str, Any]:
    """What `changed` takes, as JSON schema."""
    import msgspec  # of those who serve: an engine that is called does not need it

    properties = dict(msgspec.json.schema(Batching)["$defs"]["Batching"]["properties"])
    properties["batching"] = properties.pop("kind") | {"enum": KINDS}
    properties["prefill"] = {"enum": [*PREFILLS, None]}
    limits = {name: {"type": "integer", "minimum": 1} for name in LIMITS}
    return {"type": "object", "properties": properties | limits, "additionalProperties": False}


def _check_type(name: str, value: object) -> None:
    if name in ("batching", "prefill"):
        kinds, wanted = (str,), "a string"
    elif name == "max_wait_ms":
        kinds, wanted = (int, float), "a number"
    else:
        kinds, wanted = (int,), "an integer"
    if isinstance(value, bool) or not isinstance(value, (*kinds, type(None))) or (value is None and name in NEVER_NONE):
        raise ValueError(f"{name} must be {wanted}, not {value!r}")
    if isinstance(value, int) and abs(value) > LARGEST:
        raise ValueError(f"{name} must be at most {LARGEST}, not {value!r:.40}")
