"""`GET /replica`: what a router in front of this server requests once or twice a second.

A router names the pieces of a prompt in the header `X-Slotwise-Prefix` (see `generate.named_prefix`), and learns
here which of them the prefix cache holds: all, or the changes since the version of its last request.
"""

from __future__ import annotations

from typing import Any

import msgspec

from slotwise.api.generate.context import Observers, RequestLimits, ServedEngine
from slotwise.api.http.api_errors import bad_request
from slotwise.api.http.http_exchange import HttpExchange, about
from slotwise.core.routing.replica import Report, prefill_rate
from slotwise.core.step_time import Prediction, StepTimeModel
from slotwise.observe.prefix_index import Changes

INSTANCE, SINCE = "instance", "since"
MAX_SINCE = 10**15 - 1


class AdapterState(msgspec.Struct, frozen=True):
    """An adapter that requests may name."""

    name: str
    path: str
    parent: str  # the base model's name for it; "": the served one
    digest: str  # of its files


class ReplicaState(msgspec.Struct, frozen=True):
    """The answer of `GET /replica`."""

    instance: str  # of the index; the next request repeats it
    version: int  # of the index; the next request repeats it
    is_whole: bool  # `added` are all pieces
    added: list[int]
    removed: list[int]
    accepts: bool  # requests are taken
    slots: int
    step_tokens: int
    num_running: int
    num_waiting: int
    starts_per_second: float  # 0: not measured
    piece_tokens: float  # 0: no prompt yet
    times: Prediction | None  # of its steps; None: not known yet
    adapters: tuple[AdapterState, ...] = ()
    max_loras: int = 1  # adapters among the rows of a step
    sends_prompts: bool = False  # to other engines, as --kv-transfer-config says
    receives_prompts: bool = False
    kv_host: str = ""  # where other engines request prompts
    kv_port: int = 0  # of `kv_host`

    def report(self) -> Report:
        """Returns what routers read of it."""
        rate = 0.0 if self.times is None else prefill_rate(
            StepTimeModel.predicting(self.times).typical, self.step_tokens, self.num_running)
        return Report(self.slots, self.step_tokens, self.num_running, self.num_waiting, self.starts_per_second,
                      rate, self.piece_tokens, tuple([one.name for one in self.adapters]), self.max_loras,
                      self.sends_prompts, self.receives_prompts, self.kv_host, self.kv_port)


@about(query=(
    {"name": INSTANCE, "schema": {"type": "string", "maxLength": 100}},
    {"name": SINCE, "schema": {"type": "integer", "minimum": 0, "maximum": MAX_SINCE}}))
async def replica(engine: ServedEngine, limits: RequestLimits, observers: Observers, exchange: HttpExchange) -> None:
    """What a router needs to know: load, step times, and which pieces of prompts are cached."""
    instance, since = _asked(exchange)
    observers.batched_observer.flush()
    client, index = engine.client, observers.prefix_index
    index.generation_is(engine.sleep.cache_generation if engine.sleep is not None else 0)
    adapters = engine.models.adapters
    index.adapters_are({one.number for one in adapters})
    changes: Changes = index.changes(instance, since)
    timelines, rate = observers.recorder.timelines, limits.admission_control.drain_rate
    accepts = client.refusal is None and not engine.is_over
    state = ReplicaState(
        index.instance, changes.version, changes.is_whole, changes.added, changes.removed,
        accepts, client.scheduling.max_num_seqs, client.info.limits.max_num_batched_tokens,
        timelines.num_running, timelines.num_waiting, rate, index.piece_tokens,
        observers.step_times.prediction() if observers.step_times.is_trained else None,
        tuple([AdapterState(one.name, one.module.path, one.module.base_model_name, one.digest) for one in adapters]),
        client.info.limits.max_loras)
    if (kv := client.info.kv_transfer) is not None:
        state = msgspec.structs.replace(state, sends_prompts=kv.is_producer, receives_prompts=kv.is_consumer,
                                        kv_host=kv.kv_ip, kv_port=kv.kv_port)
    await exchange.respond_json(state)


def _asked(exchange: HttpExchange) -> tuple[str, int]:
    found: dict[str, Any] = dict(exchange.query())
    since = found.get(SINCE, "0")
    if not (since.isascii() and since.isdigit() and len(since) <= len(str(MAX_SINCE))):
        raise bad_request(f"{SINCE} is a version that this route has told", SINCE)
    return found.get(INSTANCE, ""), int(since)
