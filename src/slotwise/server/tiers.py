"""Tiers: classes of service, read from a small TOML file, changed by `PUT /admin/scheduling` with the same fields.

    [[tier]]                     the first is the best; a key of one tier also allows those below it
    name = "interactive"
    ttft_ms = 1000
    requests_per_minute = 60
    api_keys_env = "INTERACTIVE_KEYS"

The engine receives the fields it schedules by (`core.slo.Tier`); queue bounds and quotas stay here.  Keys come from
the file alone: tied to a tier's name, they outlast any change of the tiers in force.
"""

from __future__ import annotations

import logging
import tomllib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, TypeVar

import msgspec

from slotwise.core.settings import LARGEST
from slotwise.core.slo import LEAST_WEIGHT, MOST_WEIGHT, Tier
from slotwise.engine.scheduling import MAX_TIERS
from slotwise.errors import printable
from slotwise.files import read_regular
from slotwise.server.keys import key_of
from slotwise.server.protocol import Milliseconds, Priority
from slotwise.server.quotas import Quota

logger = logging.getLogger(__name__)

BEST = ("auto", "default")  # OpenAI's names for the best tier allowed
OPENAIS = ("auto", "default", "flex", "priority", "scale")  # names accepted where there are no tiers
MAX_KEYS = 4096  # of a tier
MAX_BYTES = 16 << 20  # of the file

Count = Annotated[int, msgspec.Meta(ge=1, le=LARGEST)]


class TiersError(ValueError):
    """The tiers cannot be used; the message is one line that names the tier and the field."""


class TierSettings(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """A tier without its keys."""

    name: Annotated[str, msgspec.Meta(min_length=1, max_length=64)]  # in responses; not `auto` or `default`
    ttft_ms: Milliseconds | None = None  # objective, milliseconds to the first token; requests may set looser ones only
    tpot_ms: Milliseconds | None = None  # objective, milliseconds between two tokens, likewise
    priority: Priority = 0  # lower is earlier
    weight: Annotated[float, msgspec.Meta(ge=LEAST_WEIGHT, le=MOST_WEIGHT)] = 1.0  # its share of service under `fair`
    slots: Annotated[int, msgspec.Meta(ge=0, le=LARGEST)] = 0  # slots reserved for it, even while they are free
    max_num_queued_reqs: Count | None = None  # that may wait for a first slot; None: only the server's bound
    requests_per_minute: Count | None = None  # quota of each of its keys, whichever tier a request names
    tokens_per_minute: Count | None = None  # quota of prompt and output tokens, likewise
    max_num_queued_reqs_per_key: Count | None = None  # quota of waiting requests, likewise

    @property
    def quota(self) -> Quota:
        return Quota(self.requests_per_minute, self.tokens_per_minute, self.max_num_queued_reqs_per_key)

    def tier(self) -> Tier:
        """The tier for the engine.  Raises ValueError for invalid numbers."""
        return Tier(self.name, seconds(self.ttft_ms), seconds(self.tpot_ms), self.priority, self.weight, self.slots)


class Listed(TierSettings, kw_only=True):
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
    tiers = tuple([_served(_entry(Listed, entry, number), max_num_seqs, environment)
                   for number, entry in enumerate(entries, 1)])
    _check_together(tiers, max_num_seqs)
    return tiers


def _served(listed: Listed, max_num_seqs: int, environment: Mapping[str, str]) -> ServedTier:
    if listed.share is not None:
        if listed.slots:
            raise TiersError(
                f"tier {listed.name}: share and slots both say how many slots are kept: give one of them")
        listed.slots = _slots(listed.share, max_num_seqs)
    if listed.max_step_context:
        logger.warning("tier %s: max_step_context has no effect any more", listed.name)
    settings = TierSettings(**{name: getattr(listed, name) for name in TierSettings.__struct_fields__})
    return ServedTier(settings, _keys(listed, environment), listed.api_keys_env or "")


def _slots(share: float, max_num_seqs: int) -> int:
    """Slots of a share: at least one, where there is more than one."""
    return min(max(1, int(share * max_num_seqs)), max_num_seqs - 1)


def _keys(listed: Listed, environment: Mapping[str, str]) -> tuple[str, ...]:
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
    """What is wrong with the tiers beside the server's other `keys`; empty: nothing."""
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


Entry = TypeVar("Entry", TierSettings, Listed)


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
