"""Quotas of API keys: 429 beyond them, with the seconds until the request would fit.

    request arrives ──► may the key queue one more? ──► one of requests_per_minute ──► body is read, tokenized
                                                                                                     │
    request ends: unused tokens are given back ◄── runs ◄── prompt + max_tokens of tokens_per_minute ┘

A quota belongs to the key, by the key's own tier, whichever tier a request names.  Without keys there are no quotas.

A quota is a token bucket: `capacity` tokens a minute, and up to a minute's worth at once.

    level
    capacity ┐╲        ╱‾‾‾‾‾‾     level(t) = min(capacity, level + rate · t)
             │ ╲   ╱╲ ╱            `take` takes all of `amount` or nothing
           0 ┴──╲╱───╳─── time

What is taken in any time `t`, less what was given back, is at most capacity + rate · t, whatever the order.  Kept in
integers: this bound is exact, and a client that returns after `until` finds the amount.

J. Turner: New directions in communications (or which way to the information age?), 1986.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http import HTTPStatus
from math import ceil
from typing import NamedTuple

from slotwise.api.http.api_errors import ApiError, bad_request
from slotwise.engine.admission_control import AdmissionControl, WaitEstimate

MINUTE_NS = 60 * 10**9
RATE_LIMITED = "rate_limit_exceeded"  # OpenAI's `code` for any part of a quota
OVER_REQUESTS, OVER_TOKENS, OVER_QUEUE = "quota_requests", "quota_tokens", "quota_queue"  # the part, for /metrics
SECOND_NS = 10**9

Headers = list[tuple[bytes, bytes]]
POSITION, START = "X-Queue-Position", "X-Estimated-Start-Ms"


class Bucket:
    """A token bucket, full at first.  Times are monotonic nanoseconds.

    Args:
        capacity: tokens it holds, and tokens that flow in every minute.
        now: when it is created.
    """

    __slots__ = ("_at", "_parts", "capacity")

    def __init__(self, capacity: int, now: int) -> None:
        self.capacity = capacity
        self._parts = capacity * MINUTE_NS  # the level at `_at`, in units; `capacity` units flow in every nanosecond
        self._at = now

    def level(self, now: int) -> int:
        """Tokens in the bucket, rounded down."""
        return self._parts_at(now) // MINUTE_NS

    def until(self, amount: int, now: int) -> int:
        """Nanoseconds until `amount` is there if nothing is taken meanwhile; 0: it is there."""
        return -min(0, (self._parts_at(now) - amount * MINUTE_NS) // self.capacity)

    def take(self, amount: int, now: int) -> bool:
        """Take `amount` if it is there.  Returns whether it was."""
        parts = self._parts_at(now) - amount * MINUTE_NS
        if parts < 0:
            return False
        self._parts, self._at = parts, max(now, self._at)
        return True

    def give(self, amount: int, now: int) -> None:
        """Give back tokens that were taken; what exceeds the capacity is lost."""
        self._parts, self._at = self._parts_at(now) + amount * MINUTE_NS, max(now, self._at)

    def change(self, capacity: int, now: int) -> None:
        """Set the capacity; the level stays, up to it."""
        self._parts, self._at = min(self._parts_at(now), capacity * MINUTE_NS), max(now, self._at)
        self.capacity = capacity

    def _parts_at(self, now: int) -> int:
        """The level at `now`, in `_parts`, up to the capacity."""
        return min(self.capacity * MINUTE_NS, self._parts + self.capacity * max(0, now - self._at))


class Quota(NamedTuple):
    """The quota of one key; None: no bound."""

    requests_per_minute: int | None = None
    tokens_per_minute: int | None = None  # of prompts and outputs together
    max_num_queued_reqs: int | None = None  # waiting for their first slot at once


class Account:
    """The remaining quota of one client."""

    def __init__(self, tenant: str, clock: Callable[[], int]) -> None:
        """Args: tenant: the name of its key."""
        self.tenant = tenant
        self.quota = Quota()
        self.requests: Bucket | None = None
        self.tokens: Bucket | None = None
        self._clock = clock

    def change(self, quota: Quota) -> None:
        """Set another quota; what is left stays, up to the new bounds."""
        now = self._clock()
        self.quota = quota
        self.requests = _changed(self.requests, quota.requests_per_minute, now)
        self.tokens = _changed(self.tokens, quota.tokens_per_minute, now)

    def output_capacity(self, num_prompt: int, num_choices: int) -> int | None:
        """The most output tokens per choice that can ever fit with such prompts, at least one; None: any number."""
        return None if self.tokens is None else max(1, (self.tokens.capacity - num_prompt) // num_choices)

    def headers(self) -> Headers:
        """OpenAI's rate-limit headers, as of now."""
        now = self._clock()
        return [header for name, bucket in ((b"requests", self.requests), (b"tokens", self.tokens))
                if bucket is not None for header in _headers(name, bucket, now)]


class Quotas:
    """The accounts of all clients; their keys are known, so their number is bounded.

    Args:
        quota_of: returns the quota in force for a tenant.
        refused: receives the reason of each refusal.
        clock: monotonic nanoseconds.
    """

    def __init__(self, quota_of: Callable[[str], Quota], admission_control: AdmissionControl,
                 refused: Callable[[str], None],
                 clock: Callable[[], int] = time.monotonic_ns) -> None:
        self._quota_of = quota_of
        self._admission_control = admission_control
        self._refused = refused
        self._clock = clock
        self._accounts: dict[str, Account] = {}
        self._boundless = Account("", clock)

    def account(self, tenant: str) -> Account:
        quota = self._quota_of(tenant)
        account = self._accounts.get(tenant)
        if account is None:
            if quota == Quota():
                return self._boundless
            account = self._accounts[tenant] = Account(tenant, self._clock)
        if quota != account.quota:
            account.change(quota)
        return account

    def check_queue(self, account: Account, num_requests: int = 1) -> None:
        """Raises ApiError when so many more requests of a client exceed its bound of queued requests."""
        if (bound := account.quota.max_num_queued_reqs) is None:
            return
        if objection := self._admission_control.tenant_objection(account.tenant, bound, num_requests):
            raise self._refusal(OVER_QUEUE, objection,
                                self._admission_control.tenant_retry_after(account.tenant, bound))

    def count_request(self, account: Account) -> None:
        """Count one request, whatever becomes of it.  Raises ApiError when it exceeds the quota."""
        bucket = account.requests
        if bucket is None or bucket.take(1, now := self._clock()):
            return
        wait = bucket.until(1, now)
        raise self._refusal(
            OVER_REQUESTS, f"this key may send {bucket.capacity} requests a minute and has none left; please try "
            f"again in {duration(wait)}", ceil(wait / SECOND_NS))

    @contextmanager
    def reserved(self, account: Account, most: int, used: Callable[[], int]) -> Iterator[None]:
        """Reserve the most tokens a request may need, and return what it has not `used` at the end.

        Raises:
            ApiError: they are not left, or exceed the capacity.
        """
        if (bucket := account.tokens) is None:
            yield
            return
        self._reserve(bucket, most)
        try:
            yield
        finally:
            bucket.give(max(0, most - used()), self._clock())

    def _reserve(self, bucket: Bucket, most: int) -> None:
        if most > bucket.capacity:  # no 429: the client would retry in vain
            self._refused(OVER_TOKENS)
            raise bad_request(f"this key may use {bucket.capacity} tokens a minute, prompts and outputs together; this "
                              f"request may need {most}, which can never fit", "max_tokens", "quota_too_small")
        now = self._clock()
        if bucket.take(most, now):
            return
        wait = bucket.until(most, now)
        raise self._refusal(
            OVER_TOKENS, f"this key may use {bucket.capacity} tokens a minute, prompts and outputs together, and has "
            f"{bucket.level(now)} left; this request may need {most}; please try again in "
            f"{duration(wait)}", ceil(wait / SECOND_NS))

    def _refusal(self, reason: str, message: str, retry_after: int) -> ApiError:
        self._refused(reason)
        return ApiError(HTTPStatus.TOO_MANY_REQUESTS, message, code=RATE_LIMITED, retry_after=retry_after)


def _changed(bucket: Bucket | None, per_minute: int | None, now: int) -> Bucket | None:
    if bucket is None or per_minute is None:
        return None if per_minute is None else Bucket(per_minute, now)
    bucket.change(per_minute, now)
    return bucket


def _headers(name: bytes, bucket: Bucket, now: int) -> Headers:
    until_full = bucket.until(bucket.capacity, now)
    return [(b"x-ratelimit-limit-" + name, b"%d" % bucket.capacity),
            (b"x-ratelimit-remaining-" + name, b"%d" % bucket.level(now)),
            (b"x-ratelimit-reset-" + name, duration(until_full).encode())]


def duration(nanoseconds: int) -> str:
    """A duration as OpenAI writes it, rounded up to milliseconds: 20ms, 1.5s, 1m0s."""
    milliseconds = -(-nanoseconds // 10**6)
    if milliseconds < 1000:
        return f"{milliseconds}ms"
    minutes, rest = divmod(milliseconds, 60_000)
    return f"{minutes}m{rest / 1000:g}s" if minutes else f"{rest / 1000:g}s"


# -- headers about the queue -------------------------------------------------------------------------------------------


def headers_of(wait_estimate: WaitEstimate) -> tuple[tuple[bytes, bytes], ...]:
    """The queue headers of a wait estimate.  Without a measured rate there is no estimated start."""
    position = (POSITION.lower().encode(), b"%d" % wait_estimate.position)
    if wait_estimate.start is None:
        return (position,)
    return position, (START.lower().encode(), b"%d" % round(wait_estimate.start * 1000))
