"""API keys: authentication, the tenant of each key, and who may change how the server works."""

from __future__ import annotations

import hashlib
import hmac
import secrets
from collections.abc import Sequence
from http import HTTPStatus

from slotwise.api.http.api_errors import ApiError

NAME_BYTES = 16


def key_of(text: str) -> str:
    """Returns the API key in `text`, without surrounding spaces.

    Raises:
        ValueError: it is empty, or no client could send it as a bearer token.
    """
    key = text.strip()
    if not key or not text.isprintable():
        raise ValueError("a key must not be empty, and must be of characters that can be sent")
    return key


class ApiKeys:
    """The keys that grant access; without any, access is open.

    A key is stored as a digest under a secret: one of this process, or with blocks on disk one that outlives it.  All
    digests have the same length, and a given key is compared with every one of them, so that the time it takes reveals
    nothing about a key.
    """

    def __init__(self, keys: Sequence[str], admin_key: str = "", secret: bytes = b"") -> None:
        """Args: admin_key: the only key that may change how the server works; "": see `admin`."""
        self._secret = secret or secrets.token_bytes(32)
        self._tenants = [self.name_of(key) for key in keys]
        self._admin = self.name_of(admin_key) if admin_key else ""

    @property
    def needed(self) -> bool:
        """Whether access needs a key."""
        return bool(self._tenants)

    def name_of(self, key: str) -> str:
        """The tenant name of `key`."""
        return self._digest(key.encode())

    def is_admin(self, tenant: str) -> bool:
        """Whether `tenant` is that of the admin key."""
        return bool(self._admin) and tenant == self._admin

    def scope_of(self, tenant: str) -> str:
        """The tenant whose requests `tenant` may see and abort: its own; "": those of all.

        All are visible with the admin key, and where the server has at most one key.
        """
        only = len({*self._tenants, *([self._admin] if self._admin else [])}) <= 1
        return "" if only or not self._tenants or self.is_admin(tenant) else tenant

    def tenant(self, authorization: bytes) -> str:
        """The tenant of the key in this header; empty when there are no keys.

        Raises:
            ApiError: the key is missing or unknown.
        """
        if not self._tenants:
            return ""
        return self._known(authorization, [*self._tenants, self._admin] if self._admin else self._tenants)

    def admin(self, authorization: bytes, *, is_local: bool) -> str:
        """The tenant of a client that may change how the server works.

        Without an admin key these are clients on this machine, where no key is needed, and else none.

        Args:
            is_local: the client is on this machine.

        Raises:
            ApiError: the key is missing, unknown, or not the admin key, or there is none.
        """
        if not self._admin:
            tenant = self.tenant(authorization)
            if self._tenants or not is_local:
                raise _admin_key_needed("start the server with --admin-api-key")
            return tenant
        name = self._known(authorization, [*self._tenants, self._admin])
        if name != self._admin:
            raise _admin_key_needed("send it as a bearer token")
        return name

    def _known(self, authorization: bytes, names: Sequence[str]) -> str:
        scheme, _, key = authorization.partition(b" ")
        given = self._digest(key.strip())
        known = [hmac.compare_digest(given, name) for name in names]
        if not (any(known) and scheme.lower() == b"bearer"):
            raise ApiError(HTTPStatus.UNAUTHORIZED, "Incorrect API key provided: the server's is needed, as "
                           "Authorization: Bearer <key> or x-api-key: <key>", code="invalid_api_key")
        return given

    def _digest(self, key: bytes) -> str:
        return hashlib.blake2b(key, key=self._secret, digest_size=NAME_BYTES).hexdigest()


def _admin_key_needed(how: str) -> ApiError:
    return ApiError(HTTPStatus.FORBIDDEN, f"this needs the admin key: {how}", code="admin_key_needed")
