"""On what terms a request is served: as which tier, and no better than that tier allows."""

from __future__ import annotations

from collections.abc import Sequence
from http import HTTPStatus

from slotwise.core.slo import SLO, Tier
from slotwise.server.errors import ApiError, bad_request
from slotwise.server.keys import Keys
from slotwise.server.protocol import Generate
from slotwise.server.quotas import Quota
from slotwise.server.tiers import BEST, ServedTier, TierSettings, quota_objection, seconds

UNTIERED = "default"  # what a request is served as where there are no tiers


class Tiers:
    """Those in force, and who may ask for which.

    Args:
        served: as at the start.
    """

    def __init__(self, served: Sequence[ServedTier], keys: Keys) -> None:
        self._keys = keys
        self._keyed = frozenset(one.settings.name for one in served if one.api_keys)
        self._owners = {keys.name_of(key): one.settings.name for one in served for key in one.api_keys}
        self.change([one.settings for one in served])

    def check(self, tiers: Sequence[TierSettings]) -> None:
        """Raises ValueError for tiers that make no sense with the server's keys."""
        if not self._keys.needed and (objection := quota_objection(tiers)):
            raise ValueError(objection)

    def change(self, tiers: Sequence[TierSettings]) -> None:
        """From here on these, the best first.  Keys stay with the names they had at the start."""
        self.settings = tuple(tiers)
        self._tiers = {one.name: one.tier() for one in tiers}
        self._bounds = {one.name: one.max_num_queued_reqs for one in tiers}
        self._has_quotas = self._keys.needed and any(one.quota != Quota() for one in tiers)

    def bound(self, name: str) -> int | None:
        """Requests of a tier that may wait; None: as many as may."""
        return self._bounds.get(name)

    def quota(self, tenant: str) -> Quota:
        """Of the holder of a key: that of the best tier it allows.  Who changes how the server works has none."""
        if not self._has_quotas or self._keys.is_admin(tenant):
            return Quota()
        best = self._best(tenant)
        return self.settings[best].quota if best < len(self.settings) else Quota()

    def choose(self, asked: str | None, tenant: str) -> Tier | None:
        """The tier of a request; None where there are none, and then anything may be asked for.

        Args:
            asked: its `service_tier`.

        Raises:
            ApiError: there is no such tier, or it is above what its key allows.
        """
        if not self._tiers:
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
        """Where what a key allows begins: with its own tier, else with the first that has no keys."""
        if self._keys.is_admin(tenant):
            return 0
        names = list(self._tiers)
        if (own := self._owners.get(tenant)) in names:
            return names.index(own)
        return next((place for place, name in enumerate(names) if name not in self._keyed), len(names))


def slo_of(request: Generate, tenant: str, tier: Tier | None) -> SLO:
    """On what terms a request is served.  One with a tier may ask for less than its tier promises, not for more.

    Args:
        tenant: whose key it came with.  Where nobody has keys the `user` it names stands for that: who has a key
            cannot get out of its tenant's lane by naming users.

    Raises:
        ApiError: it asks for more.
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
    """Seconds: what was asked for, or what the tier promises.  Raises ApiError for what it does not promise."""
    objective: float | None = getattr(tier, name)
    if asked is None or asked == objective:
        return objective
    if objective is None or asked < objective:
        what = "none" if objective is None else f"{objective * 1000:g} ms"
        raise bad_request(f"{name}_ms: the tier {tier.name} promises {what}; a request may ask for less, not for "
                          f"{asked * 1000:g} ms", f"{name}_ms", "above_tier")
    return asked
