"""Tiers: classes of service, read from a small TOML file, changed by `PUT /admin/scheduling` with the same fields.

    [[tier]]                     the first is the best; a key of one tier also allows those below it
    name = "interactive"
    ttft_ms = 1000
    requests_per_minute = 60
    api_keys_env = "INTERACTIVE_KEYS"

The engine receives the fields it schedules by (`core.scheduler_limits.Tier`); queue bounds and quotas stay here.  Keys
come from the file alone: tied to a tier's name, they outlast any change of the tiers in force.

A request's objectives come from its fields and its tier: it may ask for less than its tier promises, not for more.
"""

from __future__ import annotations

import logging
import tomllib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from http import HTTPStatus
from typing import Annotated, Any, TypeVar

import msgspec

from slotwise.api.http.api_errors import ApiError, bad_request
from slotwise.api.limits.api_keys import ApiKeys, key_of
from slotwise.api.limits.quotas import Quota
from slotwise.api.protocol.protocol import Generate, Milliseconds, Priority
from slotwise.core.scheduler_limits import LEAST_WEIGHT, MOST_WEIGHT, SLO, Tier
from slotwise.core.setting_fields import LARGEST
from slotwise.engine.scheduling import MAX_TIERS
from slotwise.errors import printable
from slotwise.platform.files import read_regular

logger = logging.getLogger(__name__)

BEST = ("auto", "default")  # OpenAI's names for the best tier allowed
OPENAIS = ("auto", "default", "flex", "priority", "scale")  # names accepted where there are no tiers
MAX_KEYS = 4096  # of a tier
MAX_BYTES = 16 << 20  # of the file

Count = Annotated[int, msgspec.Meta(ge=1, le=LARGEST)]
UNTIERED = "default"  # the tier's name in responses of a server without tiers


class TiersError(ValueError):
    """The tiers cannot be used; the message is one line that names the tier and the field."""


class TierSettings(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """A tier without its keys."""

    name: Annotated[str, msgspec.Meta(min_length=1, max_length=64)]  # in responses; not `auto` or `default`
    ttft_ms: Milliseconds | None = None  # objective, milliseconds to the first token; requests may set looser ones only
    tpot_ms: Milliseconds | None = None  # objective, milliseconds between two tokens; requests may set looser ones only
    priority: Priority = 0  # lower is earlier
    weight: Annotated[float, msgspec.Meta(ge=LEAST_WEIGHT, le=MOST_WEIGHT)] = 1.0  # its share of service under `fair`
    slots: Annotated[int, msgspec.Meta(ge=0, le=LARGEST)] = 0  # slots reserved for it, even while they are free
    max_num_queued_reqs: Count | None = None  # that may wait for a first slot; None: only the server's bound
    requests_per_minute: Count | None = None  # quota of each of its keys, whichever tier a request names
    tokens_per_minute: Count | None = None  # quota of prompt and output tokens of each of its keys
    max_num_queued_reqs_per_key: Count | None = None  # quota of waiting requests of each of its keys

    @property
    def quota(self) -> Quota:
        return Quota(self.requests_per_minute, self.tokens_per_minute, self.max_num_queued_reqs_per_key)

    def tier(self) -> Tier:
        """The tier for the engine.  Raises ValueError for invalid numbers."""
        return Tier(self.name, seconds(self.ttft_ms), seconds(self.tpot_ms), self.priority, self.weight, self.slots)


class TierTable(TierSettings, kw_only=True):
    """A `[[tier]]` table of the file."""

    share: Annotated[float, msgspec.Meta(gt=0, le=1)] | None = None  # share of all slots, instead of `slots`
    api_keys: Annotated[list[str], msgspec.Meta(max_length=MAX_KEYS)] | None = None  # None: open to other keys
    api_keys_env: str | None = None  # an environment variable with further keys, comma separated
    max_step_context: Annotated[int, msgspec.Meta(ge=0, le=LARGEST)] = 0  # retired: warned about, without effect


@dataclass(frozen=True, slots=True)
class ServedTier:
    """A tier of the file, with its keys."""

    settings: TierSettings
    api_keys: tuple[str, ...] = ()
    variable: str = ""  # of the environment, from which some of the keys come

    @property
    def tier(self) -> Tier:
        return self.settings.tier()


# -- the file ----------------------------------------------------------------------------------------------------------


def load_tiers(path: str, max_num_seqs: int, environment: Mapping[str, str]) -> tuple[ServedTier, ...]:
    """The tiers of a file, the best first, checked whole.

    Args:
        max_num_seqs: slots, of which `share` is a share.

    Raises:
        TiersError: the file is not valid.
        OSError: it cannot be read.
    """
    try:
        content = tomllib.loads(read_regular(path, MAX_BYTES).decode())
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
    tiers = tuple([_served(_entry(TierTable, entry, number), max_num_seqs, environment)
                   for number, entry in enumerate(entries, 1)])
    _check_together(tiers, max_num_seqs)
    return tiers


def _served(listed: TierTable, max_num_seqs: int, environment: Mapping[str, str]) -> ServedTier:
    if listed.share is not None:
        if listed.slots:
            raise TiersError(
                f"tier {listed.name}: share and slots both say how many slots are kept: give one of them")
        listed.slots = _slots(listed.share, max_num_seqs)
    if listed.max_step_context:
        logger.warning("tier %s: max_step_context no longer has any effect", listed.name)
    settings = TierSettings(**{name: getattr(listed, name) for name in TierSettings.__struct_fields__})
    return ServedTier(settings, _keys(listed, environment), listed.api_keys_env or "")


def _slots(share: float, max_num_seqs: int) -> int:
    """Slots of a share: at least one, where there is more than one."""
    return min(max(1, int(share * max_num_seqs)), max_num_seqs - 1)


def _keys(listed: TierTable, environment: Mapping[str, str]) -> tuple[str, ...]:
    if listed.api_keys == []:
        raise TiersError(f"tier {listed.name}: api_keys: it is empty: name a key, or leave it out for a tier without")
    keys = _checked_keys(listed.name, "api_keys", listed.api_keys or ())
    if (variable := listed.api_keys_env) is not None:
        more = _checked_keys(listed.name, "api_keys_env", [
            key.strip() for key in environment.get(variable, "").split(",") if key.strip()])
        if not more:  # else the tier would be open to keys of no tier
            raise TiersError(f"tier {listed.name}: api_keys_env: the environment has no keys in {variable}")
        keys += more
    return tuple(dict.fromkeys(keys))


def _checked_keys(tier: str, field: str, keys: Iterable[str]) -> list[str]:
    try:
        return list(map(key_of, keys))
    except ValueError as error:
        raise TiersError(f"tier {tier}: {field}: {error}") from None


def _check_together(tiers: Sequence[ServedTier], max_num_seqs: int) -> None:
    names: set[str] = set()
    owners: dict[str, str] = {}
    kept = 0
    for served in tiers:
        name, slots = served.settings.name, served.settings.slots
        if name in names:
            raise TiersError(f"tier {name}: name: there are two of that name")
        names.add(name)
        kept += slots
        if slots and kept >= max_num_seqs:
            raise TiersError(f"tier {name}: slots: with it, tiers keep {kept} of the {max_num_seqs} there are; one "
                             "must be left to requests of any tier")
        for key in served.api_keys:
            if owners.setdefault(key, name) != name:
                raise TiersError(f"tier {name}: api_keys: one of them is also tier {owners[key]}'s")


def objection(tiers: Sequence[ServedTier], keys: Sequence[str]) -> str:
    """What is wrong with the tiers, given the server's other `keys`; empty: nothing."""
    listed = {key for served in tiers for key in served.api_keys}
    if all(served.api_keys for served in tiers) and not listed.issuperset(keys):
        return "an --api-key is in no tier, and there is no tier without keys for it"
    return "" if listed or keys else quota_objection([served.settings for served in tiers])


# -- changes -----------------------------------------------------------------------------------------------------------


def read_tiers(entries: object) -> tuple[TierSettings, ...]:
    """The tiers of a body, the best first, each checked by itself.

    Raises:
        TiersError: one of them is not valid.
    """
    if not isinstance(entries, list) or len(entries) > MAX_TIERS:
        raise TiersError(f"tiers must be a list of at most {MAX_TIERS} objects")
    return tuple([_entry(TierSettings, entry, number) for number, entry in enumerate(entries, 1)])


Entry = TypeVar("Entry", TierSettings, TierTable)


def _entry(kind: type[Entry], entry: object, number: int) -> Entry:
    given = entry.get("name") if isinstance(entry, dict) else None
    name = printable(given) if isinstance(given, str) and given else f"number {number}"
    try:
        settings = msgspec.convert(entry, kind)
        settings.tier()
    except ValueError as error:
        raise TiersError(f"tier {name:.80}: {str(error).replace('`$.', '`')}") from error
    if not settings.name.isprintable():
        raise TiersError(f"tier {name}: name: it must be of printable characters")
    if name in BEST:
        raise TiersError(f"tier {name}: name: {' and '.join(BEST)} are OpenAI's words for the best tier a key allows")
    return settings


def quota_objection(tiers: Sequence[TierSettings]) -> str:
    """Why the quotas have no effect on a server without keys; empty: there are none."""
    bounded = next((tier.name for tier in tiers if tier.quota != Quota()), "")
    return f"tier {bounded}: a quota is a key's, and the server has no keys" if bounded else ""


def seconds(milliseconds: float | None) -> float | None:
    return None if milliseconds is None else milliseconds / 1000


# -- tiers in force ----------------------------------------------------------------------------------------------------


class Tiers:
    """The tiers in force, and which tenants may use which.

    Args:
        served: the tiers at the start, with their keys.
    """

    def __init__(self, served: Sequence[ServedTier], keys: ApiKeys) -> None:
        self._keys = keys
        self._keyed = frozenset(one.settings.name for one in served if one.api_keys)
        self._owners = {keys.name_of(key): one.settings.name for one in served for key in one.api_keys}
        self.change([one.settings for one in served])

    def check(self, tiers: Sequence[TierSettings]) -> None:
        """Raises ValueError for tiers that do not fit the server's keys."""
        if not self._keys.needed and (objection := quota_objection(tiers)):
            raise ValueError(objection)

    def change(self, tiers: Sequence[TierSettings]) -> None:
        """Set the tiers, the best first.  Keys stay with the tier names they had at the start."""
        self.settings = tuple(tiers)
        self._tiers = {one.name: one.tier() for one in tiers}
        self._bounds = {one.name: one.max_num_queued_reqs for one in tiers}
        self._has_quotas = self._keys.needed and any(one.quota != Quota() for one in tiers)

    def bound(self, name: str) -> int | None:
        """Most queued requests of a tier; None: no bound of its own."""
        return self._bounds.get(name)

    def quota(self, tenant: str) -> Quota:
        """The quota of a tenant: that of the best tier its key allows.  The admin key has none."""
        if not self._has_quotas or self._keys.is_admin(tenant):
            return Quota()
        best = self._best(tenant)
        return self.settings[best].quota if best < len(self.settings) else Quota()

    def choose(self, asked: str | None, tenant: str) -> Tier | None:
        """The tier of a request; None where there are no tiers, and OpenAI's names of them are accepted.

        Args:
            asked: its `service_tier`.

        Raises:
            ApiError: there is no such tier, or it is above what its key allows.
        """
        if not self._tiers:
            if asked is not None and asked not in OPENAIS:
                raise bad_request(f"service_tier: there is no tier {asked!r:.80}; this server has none",
                                  "service_tier", "unknown_tier")
            return None
        names = list(self._tiers)
        allowed = names[self._best(tenant):]
        if asked is None or asked in BEST:
            asked = allowed[0] if allowed else names[-1]
        elif asked not in names:
            raise bad_request(f"service_tier: there is no tier {asked!r:.80}; there are {', '.join(names)}",
                              "service_tier", "unknown_tier")
        if asked not in allowed:
            raise ApiError(
                HTTPStatus.FORBIDDEN, f"service_tier: this key does not allow the tier {asked}; it allows "
                f"{', '.join(allowed) or 'none'}", "service_tier", "tier_not_allowed")
        return self._tiers[asked]

    def _best(self, tenant: str) -> int:
        """Index of the best tier a key allows: its own, else the first without keys."""
        if self._keys.is_admin(tenant):
            return 0
        names = list(self._tiers)
        if (own := self._owners.get(tenant)) in names:
            return names.index(own)
        return next((place for place, name in enumerate(names) if name not in self._keyed), len(names))


def slo_of(request: Generate, tenant: str, tier: Tier | None) -> SLO:
    """The objectives of a request.  A request with a tier may set looser objectives than its tier's, not tighter ones.

    Args:
        tenant: of its key.  Without keys, the `user` of the request is used: a client with a key cannot leave its
            tenant's fair share by naming users.

    Raises:
        ApiError: an objective is tighter than its tier's.
    """
    name = tenant or request.user or ""
    ttft, tpot = seconds(request.ttft_ms), seconds(request.tpot_ms)
    if tier is None:
        return SLO(name, "", request.priority or 0, ttft, tpot)
    priority = tier.priority if request.priority is None else request.priority
    if priority < tier.priority:
        raise bad_request(f"priority: the tier {tier.name} has {tier.priority}; a request may have a later (higher) "
                          f"one, not {priority}", "priority", "above_tier")
    return SLO(name, tier.name, priority, _objective("ttft", ttft, tier), _objective("tpot", tpot, tier))


def _objective(name: str, asked: float | None, tier: Tier) -> float | None:
    """Seconds: the request's objective, or its tier's.  Raises ApiError for one tighter than the tier's."""
    objective: float | None = getattr(tier, name)
    if asked is None or asked == objective:
        return objective
    if objective is None or asked < objective:
        what = "none" if objective is None else f"{objective * 1000:g} ms"
        raise bad_request(f"{name}_ms: the tier {tier.name} promises {what}; a request may ask for less, not for "
                          f"{asked * 1000:g} ms", f"{name}_ms", "above_tier")
    return asked
