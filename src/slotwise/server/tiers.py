"""Tiers: classes of service, read from a small TOML file, and who may ask for which.

    [[tier]]                     the first is the best; a key of one tier may also ask for those below it
    name = "interactive"
    ttft_ms = 1000
    api_keys_env = "INTERACTIVE_KEYS"

The engine knows of a tier what it schedules by (`core.terms.Tier`).  Its keys and its queue's bound stay here, tied to
its name: they outlast any change of the tiers in force.
"""

from __future__ import annotations

import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from http import HTTPStatus
from pathlib import Path
from typing import Annotated, Any

import msgspec

from slotwise.core.terms import Terms, Tier
from slotwise.engine.scheduling import LARGEST, MAX_TIERS
from slotwise.server.errors import ApiError, bad_request
from slotwise.server.keys import Keys
from slotwise.server.protocol import Generate, Milliseconds, Priority

BEST = ("auto", "default")  # OpenAI's words for whatever is best
UNTIERED = "default"  # what a request is served as where there are no tiers
MAX_KEYS = 4096  # of a tier

Count = Annotated[int, msgspec.Meta(ge=1, le=LARGEST)]


class TiersError(ValueError):
    """The file cannot be used; the message is one line that names the tier and the field."""


class Listed(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """A `[[tier]]` of the file."""

    name: Annotated[str, msgspec.Meta(min_length=1, max_length=64)]
    ttft_ms: Milliseconds | None = None  # objectives of its requests, which may ask for less, not for more
    tpot_ms: Milliseconds | None = None
    priority: Priority = 0
    weight: Annotated[float, msgspec.Meta(gt=0, le=1e6)] = 1.0
    share: Annotated[float, msgspec.Meta(gt=0, le=1)] | None = None  # of the slots, kept for it; or how many:
    slots: Annotated[int, msgspec.Meta(ge=0, le=LARGEST)] | None = None
    max_num_queued_reqs: Count | None = None  # that wait for their first slot; None: only the server's bound holds
    max_step_context: Annotated[int, msgspec.Meta(ge=0, le=LARGEST)] = 0
    api_keys: Annotated[list[str], msgspec.Meta(max_length=MAX_KEYS)] = []
    api_keys_env: str | None = None  # a variable of the environment that holds more of them, comma separated


@dataclass(frozen=True, slots=True)
class ServedTier:
    """A tier as the engine knows it, and what only the server knows of it."""

    tier: Tier
    max_num_queued_reqs: int | None = None
    api_keys: tuple[str, ...] = ()


# -- reading -----------------------------------------------------------------------------------------------------------


def load_tiers(path: str, max_num_seqs: int, environment: Mapping[str, str]) -> tuple[ServedTier, ...]:
    """The tiers of a file, the best first, checked whole.

    Args:
        max_num_seqs: slots, of which tiers keep shares.

    Raises:
        TiersError: something is wrong with it.
        OSError: it cannot be read.
    """
    try:
        content = tomllib.loads(Path(path).read_text())
    except ValueError as error:  # no TOML, or no text
        raise TiersError(f"{path}: {error}") from error
    try:
        return _checked(content, max_num_seqs, environment)
    except TiersError as error:
        raise TiersError(f"{path}: {error}") from None


def _checked(content: Mapping[str, Any], max_num_seqs: int, environment: Mapping[str, str]) -> tuple[ServedTier, ...]:
    entries = content.get("tier")
    if not isinstance(entries, list) or not 1 <= len(entries) <= MAX_TIERS:
        raise TiersError(f"it must have 1 to {MAX_TIERS} tables [[tier]]")
    if unknown := [name for name in content if name != "tier"]:
        raise TiersError(f"there is nothing but [[tier]] tables, no {unknown[0]!r}")
    tiers = tuple([_served(entry, number, max_num_seqs, environment) for number, entry in enumerate(entries, 1)])
    _check_together(tiers, max_num_seqs)
    return tiers


def _served(entry: Any, number: int, max_num_seqs: int, environment: Mapping[str, str]) -> ServedTier:
    given = entry.get("name") if isinstance(entry, dict) else None
    name = given if isinstance(given, str) and given else f"number {number}"
    try:
        listed = msgspec.convert(entry, Listed)
    except msgspec.ValidationError as error:
        raise TiersError(f"tier {name}: {str(error).replace('`$.', '`')}") from error
    if name in BEST:
        raise TiersError(f"tier {name}: name: {' and '.join(BEST)} are OpenAI's words for the best tier a key allows")
    if listed.share is not None and listed.slots is not None:
        raise TiersError(f"tier {name}: share and slots both say how many slots are kept: give one of them")
    slots = listed.slots or 0 if listed.share is None else _slots(listed.share, max_num_seqs)
    tier = Tier(name, _seconds(listed.ttft_ms), _seconds(listed.tpot_ms), listed.priority, listed.weight, slots,
                listed.max_step_context)
    return ServedTier(tier, listed.max_num_queued_reqs, _keys(listed, environment))


def _slots(share: float, max_num_seqs: int) -> int:
    """At least one, where there is more than one."""
    return min(max(1, int(share * max_num_seqs)), max_num_seqs - 1)


def _keys(listed: Listed, environment: Mapping[str, str]) -> tuple[str, ...]:
    keys = [key.strip() for key in listed.api_keys]
    if not all(keys):
        raise TiersError(f"tier {listed.name}: api_keys: a key must not be empty")
    if (variable := listed.api_keys_env) is not None:
        more = [key.strip() for key in environment.get(variable, "").split(",") if key.strip()]
        if not more:  # else the tier would stand open to those whose keys are in no tier
            raise TiersError(f"tier {listed.name}: api_keys_env: the environment has no keys in {variable}")
        keys += more
    return tuple(dict.fromkeys(keys))


def _check_together(tiers: Sequence[ServedTier], max_num_seqs: int) -> None:
    names: set[str] = set()
    owners: dict[str, str] = {}
    kept = 0
    for served in tiers:
        name = served.tier.name
        if name in names:
            raise TiersError(f"tier {name}: name: there are two of that name")
        names.add(name)
        kept += served.tier.slots
        if served.tier.slots and kept >= max_num_seqs:
            raise TiersError(f"tier {name}: slots: with it, tiers keep {kept} of the {max_num_seqs} there are; one "
                             "must be left to requests of any tier")
        for key in served.api_keys:
            if owners.setdefault(key, name) != name:
                raise TiersError(f"tier {name}: api_keys: one of them is also tier {owners[key]}'s")


def unreachable(tiers: Sequence[ServedTier], keys: Sequence[str]) -> str:
    """Why some of the server's other `keys` could ask for nothing; empty when all can."""
    listed = {key for served in tiers for key in served.api_keys}
    if all(served.api_keys for served in tiers) and not listed.issuperset(keys):
        return "an --api-key is in no tier, and there is no tier without keys for it"
    return ""


def _seconds(milliseconds: float | None) -> float | None:
    return None if milliseconds is None else milliseconds / 1000


# -- choosing ----------------------------------------------------------------------------------------------------------


class Tiers:
    """Which tier a request is served as.

    Args:
        served: as at the start.
    """

    def __init__(self, served: Sequence[ServedTier], keys: Keys) -> None:
        self._keys = keys
        self._bounds = {one.tier.name: one.max_num_queued_reqs for one in served}
        self._keyed = frozenset(one.tier.name for one in served if one.api_keys)
        self._owners = {keys.name_of(key): one.tier.name for one in served for key in one.api_keys}

    def bound(self, name: str) -> int | None:
        """Requests of a tier that may wait; None: as many as may."""
        return self._bounds.get(name)

    def choose(self, asked: str | None, tenant: str, in_force: Sequence[Tier]) -> Tier | None:
        """The tier of a request; None where there are none, and then anything may be asked for.

        Args:
            asked: its `service_tier`.

        Raises:
            ApiError: there is no such tier, or it is above what its key allows.
        """
        if not in_force:
            return None
        names = [tier.name for tier in in_force]
        allowed = names[self._best(tenant, names):]
        if asked is None or asked in BEST:
            asked = allowed[0] if allowed else names[-1]
        elif asked not in names:
            raise bad_request(f"service_tier: there is no tier {asked!r:.80}; there are {', '.join(names)}",
                              "service_tier", "unknown_tier")
        if asked not in allowed:
            raise ApiError(
                HTTPStatus.FORBIDDEN, f"service_tier: this key does not allow the tier {asked}; it allows "
                f"{', '.join(allowed) or 'none'}", "service_tier", "tier_not_allowed")
        return in_force[names.index(asked)]

    def _best(self, tenant: str, names: Sequence[str]) -> int:
        """Where what a key allows begins: with its own tier, else with the first that has no keys."""
        if self._keys.is_admin(tenant):
            return 0
        if (own := self._owners.get(tenant)) in names:
            return names.index(own)
        return next((place for place, name in enumerate(names) if name not in self._keyed), len(names))


def terms_of(request: Generate, tenant: str, tier: Tier | None) -> Terms:
    """On what terms a request is served.  One with a tier may ask for less than its tier promises, not for more.

    Args:
        tenant: whose key it came with.  Where nobody has keys the `user` it names stands for that: who has a key
            cannot get out of its tenant's lane by naming users.

    Raises:
        ApiError: it asks for more.
    """
    name = tenant or request.user or ""
    ttft, tpot = _seconds(request.ttft_ms), _seconds(request.tpot_ms)
    if tier is None:
        return Terms(name, "", request.priority or 0, ttft, tpot)
    priority = tier.priority if request.priority is None else request.priority
    if priority < tier.priority:
        raise bad_request(f"priority: the tier {tier.name} has {tier.priority}; a request may have a later (higher) "
                          f"one, not {priority}", "priority", "above_tier")
    return Terms(name, tier.name, priority, _objective("ttft", ttft, tier), _objective("tpot", tpot, tier))


def _objective(name: str, asked: float | None, tier: Tier) -> float | None:
    """Seconds: what was asked for, or what the tier promises.  Raises ApiError for what it does not promise."""
    promised: float | None = getattr(tier, name)
    if asked is None or asked == promised:
        return promised
    if promised is None or asked < promised:
        what = "none" if promised is None else f"{promised * 1000:g} ms"
        raise bad_request(f"{name}_ms: the tier {tier.name} promises {what}; a request may ask for less, not for "
                          f"{asked * 1000:g} ms", f"{name}_ms", "above_tier")
    return asked
