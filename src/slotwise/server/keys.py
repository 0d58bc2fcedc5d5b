"""API keys: who may come in, and which tenant each of them is."""

from __future__ import annotations

import hashlib
import hmac
import secrets
from collections.abc import Sequence
from http import HTTPStatus

from slotwise.server.errors import ApiError

NAME_BYTES = 16


class Keys:
    """The keys that open the door; without any it stands open.

    A key is kept as a digest under a secret that lives as long as this process.  Digests are all of one length, and
    what was given is compared with every one of them, so that the time it takes tells nothing about a key.
    """

    def __init__(self, keys: Sequence[str]) -> None:
        self._secret = secrets.token_bytes(32)
        self._tenants = [self._digest(key.encode()) for key in keys]

    def tenant(self, authorization: bytes) -> str:
        """A name for whoever holds the key in this header; empty when there are no keys.

        Raises:
            ApiError: it holds none of ours.
        """
        if not self._tenants:
            return ""
        scheme, _, key = authorization.partition(b" ")
        given = self._digest(key.strip())
        known = [hmac.compare_digest(given, tenant) for tenant in self._tenants]
        if not (any(known) and scheme.lower() == b"bearer"):
            raise ApiError(HTTPStatus.UNAUTHORIZED, "a valid API key is needed: Authorization: Bearer <key>",
                           code="invalid_api_key")
        return given

    def _digest(self, key: bytes) -> str:
        return hashlib.blake2b(key, key=self._secret, digest_size=NAME_BYTES).hexdigest()
