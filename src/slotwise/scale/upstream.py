"""A replica as the front door reaches it: its address, what is open to it, and when it was last heard.

Whatever waits for a replica does so within `until_lost`, which raises ReplicaLost the moment the replica is given up:
nothing waits for one that has died or shows no sign of life.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Mapping

import aiohttp
import msgspec
from yarl import URL

from slotwise.server.replica_state import AdapterState, ReplicaState

POLL_TIMEOUT = 5.0  # seconds for an answer of GET /replica


class ReplicaLost(Exception):
    """The replica was given up, or the connection to it broke."""


class Upstream:
    """Args: headers: of the door's own requests."""

    def __init__(self, name: str, url: str, session: aiohttp.ClientSession, headers: Mapping[str, str]) -> None:
        self.name, self.url = name, url
        self.heard = asyncio.get_running_loop().time()  # when it last told of itself, in seconds of the loop
        self.adapters: dict[str, AdapterState] = {}  # by name, as last told
        self.is_lost = False
        self._session = session
        self._headers = headers
        self._instance, self._version = "", 0
        self._open: set[asyncio.Timeout] = set()

    # -- requests ------------------------------------------------------------------------------------------------

    @contextlib.asynccontextmanager
    async def until_lost(self) -> AsyncIterator[asyncio.Timeout]:
        """Raises ReplicaLost when the replica is given up; the timeout may be used to leave earlier."""
        if self.is_lost:
            raise ReplicaLost
        scope = asyncio.timeout(None)
        try:
            async with scope:
                self._open.add(scope)
                yield scope
        except (TimeoutError, aiohttp.ClientError, OSError) as error:
            raise ReplicaLost(str(error)) from error
        finally:
            self._open.discard(scope)

    @contextlib.asynccontextmanager
    async def sending(self, method: str, target: str, headers: Mapping[str, str], body: bytes,
                      ) -> AsyncIterator[aiohttp.ClientResponse]:
        """Sends a request, and yields the response once its head is there.  For use within `until_lost`.

        Args:
            target: sent as it is: with its dots resolved it might be another route than the one that was checked.
        """
        url = URL(self.url + target, encoded=True)
        async with self._session.request(
                method, url, data=body or None, headers=headers, allow_redirects=False) as response:
            yield response

    async def get(self, target: str) -> tuple[int, bytes]:
        """Asks for something on behalf of the door itself, as `post` does."""
        async with self.until_lost(), self.sending("GET", target, self._headers, b"") as response:
            return response.status, await response.read()

    async def post(self, target: str, body: bytes) -> tuple[int, bytes]:
        """Sends a request of the door itself.  Returns the status and the content of the answer.

        Raises:
            ReplicaLost: the replica failed.
        """
        headers = {**self._headers, "content-type": "application/json"}
        async with self.until_lost(), self.sending("POST", target, headers, body) as response:
            return response.status, await response.read()

    def lose(self) -> None:
        """Everything that waits for the replica ends at once."""
        self.is_lost = True
        for scope in list(self._open):
            end(scope)

    # -- what it tells -------------------------------------------------------------------------------------------

    async def poll(self) -> ReplicaState:
        """Asks the replica for its state; its index is told as changes since the last one.

        Raises:
            ReplicaLost: it does not answer, or not as a replica does.
        """
        target = f"/replica?instance={self._instance}&since={self._version}"
        try:
            async with asyncio.timeout(POLL_TIMEOUT), self.until_lost(), self.sending(
                    "GET", target, self._headers, b"") as response:
                answer = await response.read()
                if response.status != 200:
                    raise ReplicaLost(f"GET /replica was answered with {response.status}: {answer[:200]!r}")
            state = msgspec.json.decode(answer, type=ReplicaState)
        except (TimeoutError, msgspec.DecodeError) as error:
            raise ReplicaLost(str(error) or "no answer") from error
        self._instance, self._version = state.instance, state.version
        self.heard = asyncio.get_running_loop().time()
        self.adapters = {one.name: one for one in state.adapters}
        return state


def end(scope: asyncio.Timeout) -> None:
    """Ends what waits within `scope`, with TimeoutError."""
    if not scope.expired():
        scope.reschedule(asyncio.get_running_loop().time())
