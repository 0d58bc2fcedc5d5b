"""Prompts that travel between engines: from a request's `kv_transfer_params` to the engine, and into the response.

Only routers and proxies may say that a prompt travels: they send the transfer secret in a header, or as their API key,
which is all that a proxy written for vLLM can send.
"""

from __future__ import annotations

import hmac
import secrets
from collections.abc import Iterable
from http import HTTPStatus
from typing import Any

from slotwise.api.http.api_errors import ApiError, bad_request
from slotwise.api.protocol.protocol import Generate, KVTransferParams
from slotwise.core.params import SamplingSpec
from slotwise.core.request import KVTransfer
from slotwise.core.transfer.kv_transfer_config import KVTransferConfig

FIELD = "kv_transfer_params"
HEADER = "X-Slotwise-Transfer-Secret"
NEEDED = "transfer_secret_needed"  # the code of an error


def transfer_of(
    request: Generate, prompts: list[list[int]], params: SamplingSpec, config: KVTransferConfig | None, *,
    is_trusted: bool,
) -> KVTransfer | None:
    """Returns how the prompt of a request travels; None: it does not.

    Args:
        is_trusted: the client has the transfer secret.

    Raises:
        ApiError: it cannot travel like that.
    """
    asked = request.kv_transfer_params
    if asked is None or not (asked.do_remote_decode or asked.do_remote_prefill):
        return None
    if config is None:
        raise _wrong("this server was started without --kv-transfer-config", "unsupported_parameter")
    if not is_trusted:
        raise ApiError(HTTPStatus.FORBIDDEN, f"{FIELD}: prompts travel for routers and proxies, which send this "
                       f"server's transfer secret in {HEADER} or as their API key", FIELD, NEEDED)
    if asked.do_remote_decode and asked.do_remote_prefill:
        raise _wrong("do_remote_decode and do_remote_prefill exclude each other")
    if len(prompts) * params.n != 1:
        raise _wrong(f"one prompt with one choice can travel, not {len(prompts)} with {params.n}")
    return _as_producer(asked, request, config) if asked.do_remote_decode else _as_consumer(asked, params, config)


def has_secret(headers: Iterable[tuple[bytes, bytes]], secret: str) -> bool:
    """Whether a request's headers carry the transfer secret; "": the server has none."""
    given = dict(headers)
    key = given.get(HEADER.lower().encode()) or given.get(b"x-api-key") or (
        given.get(b"authorization", b"").partition(b" ")[2].strip())
    return bool(secret) and hmac.compare_digest(key, secret.encode())


def _as_producer(asked: KVTransferParams, request: Generate, config: KVTransferConfig) -> KVTransfer:
    if not config.is_producer:
        raise _wrong(f"do_remote_decode: this server is a {config.kv_role}")
    if request.stream:
        raise _wrong("do_remote_decode is not available when stream is true")
    return KVTransfer(asked.transfer_id or secrets.token_hex(16), True, config.pin_timeout)


def _as_consumer(asked: KVTransferParams, params: SamplingSpec, config: KVTransferConfig) -> KVTransfer:
    if not config.is_consumer:
        raise _wrong(f"do_remote_prefill: this server is a {config.kv_role}")
    if asked.transfer_id is None or asked.remote_host is None or asked.remote_port is None:
        raise _wrong("do_remote_prefill needs transfer_id, remote_host and remote_port, as the producer's response "
                     "has them")
    if params.prompt_logprobs is not None:
        raise _wrong("do_remote_prefill: prompt_logprobs need the prompt computed here")
    if not config.accepts(asked.remote_host, asked.remote_port):
        raise _wrong(f"{asked.remote_host}:{asked.remote_port} is not among the peers of this server")
    return KVTransfer(asked.transfer_id, False, config.timeout, asked.remote_host, asked.remote_port)


def transfer_fields(kv: KVTransfer | None, config: KVTransferConfig | None) -> dict[str, Any]:
    """The fields of a producer's response with which a consumer asks for the prompt."""
    if kv is None or not kv.sends or config is None:
        return {}
    return {FIELD: {
        "do_remote_prefill": True, "do_remote_decode": False, "transfer_id": kv.transfer_id,
        "remote_engine_id": config.engine_id, "remote_host": config.kv_ip, "remote_port": config.kv_port}}


def _wrong(message: str, code: str | None = None) -> ApiError:
    return bad_request(f"{FIELD}: {message}", FIELD, code)
