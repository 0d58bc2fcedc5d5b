"""Quotas of API keys: 429 beyond them, with the seconds until the request would fit.

    request arrives ──► may the key queue one more? ──► one of requests_per_minute ──► body is read, tokenized
                                                                                                     │
    request ends: unused tokens are given back ◄── runs ◄── prompt + max_tokens of tokens_per_minute ┘

A quota belongs to the key, by the key's own tier, whichever tier a request names.  Without keys there are no quotas.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http import HTTPStatus
from math import ceil
from typing import NamedTuple

from slotwise.engine.admission_control import AdmissionControl
from slotwise.server.bucket import Bucket
from slotwise.server.errors import ApiError, bad_request

RATE_LIMITED = "rate_limit_exceeded"  # OpenAI's `code` for any part of a quota
OVER_REQUESTS, OVER_TOKENS, OVER_QUEUE = "quota_requests", "quota_tokens", "quota_queue"  # the part, for /metrics
SECOND_NS = 10**9

Headers = list[tuple[bytes, bytes]]


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
        """Output tokens per choice that can ever fit beside so many of prompts, at least one; None: any number."""
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
        """Reserve the most tokens a request may need, and give back at the end what it has not `used`.

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
