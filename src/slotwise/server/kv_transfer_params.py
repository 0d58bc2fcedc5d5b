"""The field `kv_transfer_params` of requests, with vLLM's names."""

from __future__ import annotations

from typing import Annotated

import msgspec

Name = Annotated[str, msgspec.Meta(min_length=1, max_length=256)]
Port = Annotated[int, msgspec.Meta(ge=1, le=65535)]


class KVTransferParams(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """Where a prompt's blocks come from, or that they are to be sent.  None stands for a field left out."""

    do_remote_decode: bool | None = None  # compute the prompt, and keep its blocks for another engine
    do_remote_prefill: bool | None = None  # another engine computes the prompt
    transfer_id: Name | None = None  # the same in both requests; by default the producer makes one up
    remote_engine_id: Name | None = None  # of the producer; changes nothing
    remote_host: Name | None = None  # of the producer, as the next
    remote_port: Port | None = None
    remote_block_ids: None = None  # of the vLLM connectors that have it
