"""Requests without a slot that hold blocks, into which another engine's contents are written beside the steps.

    WAITING_FOR_KV ──land──► holds blocks ──admitted──► they are those of its slot
                                 └──others need them, or it ends──► released

Tenants share both the number of landings and the cache's half that these may hold (`core/tenant_capacity.py`): prompts
that never arrive cost their own tenant time, and others none.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator

from slotwise.core.request import Request
from slotwise.core.tenant_capacity import TenantCapacity


class Landings:
    """Args:
        max_requests: that may hold blocks at once; each is received by a thread of its own.
        num_blocks: of the cache.
    """

    def __init__(self, max_requests: int, num_blocks: int) -> None:
        self._requests: dict[str, Request] = {}
        self._landed = TenantCapacity("requests", max_requests, includes_reserve=True)
        self._blocks = TenantCapacity("blocks", max(1, num_blocks // 2), includes_reserve=True)

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._requests

    def __iter__(self) -> Iterator[Request]:
        """Yields the requests in the order in which they got blocks."""
        return iter(self._requests.values())

    def allows(self, tenant: str, num_blocks: int) -> bool:
        """Whether the tenant's share has room for one more request with so many blocks."""
        return not (self._landed.objection(tenant, 1) or self._blocks.objection(tenant, num_blocks))

    def add(self, request: Request) -> None:
        """A request has got its blocks."""
        self._requests[request.request_id] = request
        self._count(request, 1)

    def remove(self, request: Request) -> None:
        """A request that holds the blocks it was added with is admitted, or is about to release them."""
        del self._requests[request.request_id]
        self._count(request, -1)

    def _count(self, request: Request, sign: int) -> None:
        self._landed.acquire(request.slo.tenant, sign)
        self._blocks.acquire(request.slo.tenant, sign * len(request.blocks))

    def victim(self, candidates: Collection[Request]) -> Request:
        """The one that gives up its blocks first: the last arrival of the tenant that holds most."""
        return max(candidates, key=lambda request: (self._blocks.held(request.slo.tenant), request.arrival))
