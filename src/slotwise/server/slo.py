"""Objectives of a request, from its fields and its tier."""

from __future__ import annotations

from collections.abc import Sequence
from http import HTTPStatus

from slotwise.core.slo import SLO, Tier
from slotwise.server.errors import ApiError, bad_request
from slotwise.server.keys import Keys
from slotwise.server.protocol import Generate
from slotwise.server.quotas import Quota
from slotwise.server.tiers import BEST, OPENAIS, ServedTier, TierSettings, quota_objection, seconds

UNTIERED = "default"  # the tier's name in responses of a server without tiers


class Tiers:
    """The tiers in force, and which tenants may use which.

    Args:
        served: the tiers at the start, with their keys.
    """

    def __init__(self, served: Sequence[ServedTier], keys: Keys) -> None:
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
