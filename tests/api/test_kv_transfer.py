"""Requests whose prompts travel: what is taken, what is refused, and what a producer's response says."""

from __future__ import annotations

import json

import pytest

from slotwise.api.generate.prompt_transfer import HEADER, has_secret, transfer_fields, transfer_of
from slotwise.api.http.api_errors import ApiError
from slotwise.api.protocol.decoding import decode
from slotwise.api.protocol.protocol import CompletionRequest
from slotwise.core.params import SamplingSpec
from slotwise.core.transfer.kv_transfer_config import BOTH, CONSUMER, PRODUCER, TCP, KVTransferConfig

SENDS = KVTransferConfig(TCP, PRODUCER, "10.0.0.1", 9000, "engine")
RECEIVES = KVTransferConfig(TCP, CONSUMER, peers=("10.0.0.1:9000",), timeout=7.0)
SOURCE = {"do_remote_prefill": True, "transfer_id": "t", "remote_host": "10.0.0.1", "remote_port": 9000}


def asked(kv: object, config: KVTransferConfig | None, prompts: int = 1, params: SamplingSpec | None = None,
          is_trusted: bool = True, **fields: object):
    body = {"prompt": "a", "kv_transfer_params": kv, **fields}
    request = decode(CompletionRequest, json.dumps(body).encode())
    return transfer_of(request, [[1]] * prompts, params or SamplingSpec(), config, is_trusted=is_trusted)


@pytest.mark.parametrize("config", [None, SENDS, RECEIVES])
@pytest.mark.parametrize("kv", [None, {}, {"do_remote_decode": False, "remote_block_ids": None}])
def test_most_prompts_do_not_travel(kv, config):
    assert asked(kv, config, is_trusted=False) is None


def test_a_producers_response_is_what_a_consumer_takes():
    sent = asked({"do_remote_decode": True, "do_remote_prefill": False, "remote_engine_id": None,
                  "remote_block_ids": None, "remote_host": None, "remote_port": None}, SENDS)  # as vLLM's proxies do
    assert sent.sends and len(sent.transfer_id) == 32
    response = transfer_fields(sent, SENDS)["kv_transfer_params"]
    assert response["remote_engine_id"] == "engine"
    received = asked(response, RECEIVES)
    assert (received.transfer_id, received.host, received.port) == (sent.transfer_id, "10.0.0.1", 9000)
    assert not received.sends and received.timeout == 7.0
    assert transfer_fields(received, RECEIVES) == transfer_fields(None, None) == {}
    assert asked({"do_remote_decode": True, "transfer_id": "mine"}, SENDS).transfer_id == "mine"


@pytest.mark.parametrize(("kv", "config", "more", "why"), [
    (SOURCE, None, {}, "without --kv-transfer-config"),
    (SOURCE, SENDS, {}, "this server is a kv_producer"),
    ({"do_remote_decode": True}, RECEIVES, {}, "this server is a kv_consumer"),
    ({"do_remote_decode": True} | SOURCE, KVTransferConfig(TCP, BOTH, peers=("x",)), {}, "exclude each other"),
    ({"do_remote_decode": True}, SENDS, {"stream": True}, "stream is true"),
    (SOURCE | {"remote_port": 9001}, RECEIVES, {}, "10.0.0.1:9001 is not among the peers"),
    (SOURCE | {"remote_host": "internal"}, RECEIVES, {}, "internal:9000 is not among the peers"),
    (SOURCE | {"transfer_id": None}, RECEIVES, {}, "needs transfer_id"),
    (SOURCE, RECEIVES, {"prompts": 2}, "one prompt with one choice"),
    (SOURCE, RECEIVES, {"params": SamplingSpec(n=2)}, "one prompt with one choice"),
    (SOURCE, RECEIVES, {"params": SamplingSpec(prompt_logprobs=0)}, "prompt_logprobs"),
    (SOURCE | {"remote_block_ids": [1]}, RECEIVES, {}, "remote_block_ids"),
    (SOURCE | {"remote_port": 0}, RECEIVES, {}, "remote_port"),
    (SOURCE | {"tp_size": 1}, RECEIVES, {}, "tp_size"), ([], RECEIVES, {}, "kv_transfer_params")])
def test_others_are_refused_by_name(kv, config, more, why):
    with pytest.raises(ApiError, match=why) as error:
        asked(kv, config, **more)
    assert error.value.param.startswith("kv_transfer_params")


@pytest.mark.parametrize("kv", [SOURCE, {"do_remote_decode": True}, SOURCE | {"transfer_id": None}])
def test_only_clients_with_the_secret_may_let_a_prompt_travel(kv):
    for config in (SENDS, RECEIVES, KVTransferConfig(TCP, BOTH, peers=("10.0.0.1",))):
        with pytest.raises(ApiError, match="X-Slotwise-Transfer-Secret") as error:
            asked(kv, config, is_trusted=False)
        assert (error.value.status, error.value.code) == (403, "transfer_secret_needed")


def test_the_secret_is_sent_in_a_header_or_as_the_key():
    name, secret = HEADER.lower().encode(), "0123456789abcdef"
    key = (b"authorization", b"Bearer " + secret.encode())
    for headers in ([(name, secret.encode())], [key], [(b"x-api-key", secret.encode())], [(name, secret.encode()), (
            b"authorization", b"Bearer of a client")]):
        assert has_secret(headers, secret)
    for headers in ([], [(name, b"")], [(name, b"0123456789abcdeF")], [(name, b"\xff")], [key, (name, b"another")],
                    [(b"authorization", secret.encode())], [(b"cookie", secret.encode())]):
        assert not has_secret(headers, secret)
    for headers in ([], [(name, b"")], [(b"authorization", b"Bearer ")]):
        assert not has_secret(headers, "")  # a server without one
