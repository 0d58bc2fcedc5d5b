"""The components of the service that the endpoints work with."""

from __future__ import annotations

import asyncio
import itertools
import random
from collections.abc import Awaitable, Callable
from http import HTTPStatus
from typing import NamedTuple

from slotwise.core.slo import SLO
from slotwise.core.tenant_capacity import TenantCapacity
from slotwise.engine.admission_control import AdmissionControl
from slotwise.engine.client import EngineClient
from slotwise.engine.refusals import QUEUE_FULL, Refused
from slotwise.engine.sleep import Sleep
from slotwise.observe.batched_observer import BatchedObserver
from slotwise.observe.metrics import Metrics
from slotwise.observe.prefix_index import PrefixIndex
from slotwise.observe.recorder import Recorder
from slotwise.observe.step_time import StepTimeModel
from slotwise.observe.traces import Traces
from slotwise.server.active_requests import ActiveRequests
from slotwise.server.bodies import Bodies
from slotwise.server.browsers import Browsers
from slotwise.server.errors import ApiError, from_refusal
from slotwise.server.explainer import Explainer
from slotwise.server.grammars import GrammarChecker
from slotwise.server.http_exchange import HttpExchange
from slotwise.server.keys import Keys
from slotwise.server.logprobs import MAX_HELD
from slotwise.server.parsers.registry import UNPARSED, OutputFormat
from slotwise.server.prompts import Prompts
from slotwise.server.protocol import Generate
from slotwise.server.queue_headers import headers_of
from slotwise.server.quotas import Account, Quotas
from slotwise.server.request_log import RequestLog
from slotwise.server.response_store import ResponseStore
from slotwise.server.served_models import ServedModels
from slotwise.server.settings import ServerSettings
from slotwise.server.slo import Tiers, slo_of
from slotwise.server.subscribers import Subscribers
from slotwise.server.turns import Turns
from slotwise.server.what_if import WhatIf

MAX_NUMBERS = 1 << 24  # of the vectors of all responses: some 350 MB as JSON
MAX_QUERIES, MAX_QUERIES_OF_ONE = 63, 16  # of queue positions that wait, of all clients and of one


LoadModel = Callable[[str, str], Awaitable[str]]
"""Serves the model in a folder or a file, by a name or "", in the place of this one; returns its name."""


class Clients(NamedTuple):
    """What the server keeps of its clients, whatever model it serves."""

    keys: Keys
    browsers: Browsers
    bodies: Bodies
    subscribers: Subscribers
    responses: ResponseStore

    @classmethod
    def of(cls, settings: ServerSettings) -> Clients:
        keys = Keys(settings.all_keys, settings.admin_api_key)
        return cls(keys, Browsers(settings), Bodies(settings), Subscribers(), ResponseStore())


class Api:
    """All components, built on an engine that is ready.

    Args:
        step_times: a step-time model, possibly fitted earlier.
        output_format: how the model's outputs are parsed.
        sleep: of the engine; None: it cannot sleep here.
        clients: of the model before; None: this is the first.
    """

    def __init__(self, engine_client: EngineClient, prompts: Prompts, settings: ServerSettings,
                 step_times: StepTimeModel, output_format: OutputFormat = UNPARSED,
                 sleep: Sleep | None = None, clients: Clients | None = None) -> None:
        limits = engine_client.info.limits
        self.clients = clients if clients is not None else Clients.of(settings)
        self.keys, self.browsers, self.bodies, self.subscribers, self.responses = self.clients
        self.tiers = Tiers(settings.tiers, self.keys)
        self.sleep = sleep
        self.is_over = False  # another model is served
        self.load_model: LoadModel | None = None  # set by what exchanges models
        self.engine_client = engine_client
        self.prompts = prompts
        self.settings = settings
        self.output_format = output_format
        self.admission_control = AdmissionControl(limits, settings.max_num_queued_reqs, settings.max_num_queued_tokens,
                                                  engine_client.max_live)
        self.recorder = Recorder()
        self.metrics = Metrics(settings.served_model_name, engine_client.info, self.recorder.timelines,
                               lambda: engine_client.healthy, has_vllm_names=settings.vllm_metrics)
        self.recorder.add_reader(self.metrics)
        self.recorder.started(engine_client.info)
        self.quotas = Quotas(self.tiers.quota, self.admission_control, self.refused)
        self.step_times = step_times
        self.metrics.extra_gauges |= {
            "step_time_model_error": lambda: step_times.error, "sleep_level": lambda: self.sleep_level}
        self.traces: Traces | None = None  # set by `trace`
        self.prefix_index = PrefixIndex()
        self.prefix_index.started(engine_client.info)
        self.batched_observer = BatchedObserver([self.recorder, self.metrics, self.step_times, self.prefix_index])
        tokenizer = prompts.tokenizer
        self.grammars = GrammarChecker(tokenizer.special_texts)
        self.explainer = Explainer(self.batched_observer, self.recorder, step_times)
        self.what_if = WhatIf(self.batched_observer, self.recorder.ring)
        self.models = ServedModels(engine_client, settings)
        engine_client.observers += [self.admission_control, self.batched_observer, self.models]
        self.active_requests = ActiveRequests()
        self.position_queries = Turns(MAX_QUERIES, MAX_QUERIES_OF_ONE)
        self.prompt_entries = TenantCapacity("log-probabilities of prompts are held", MAX_HELD)
        self.vector_numbers = TenantCapacity("numbers of vectors are held", MAX_NUMBERS)
        self.formatting = asyncio.Lock()  # see server.logprobs
        self.num_exchanges = 0  # in progress, of any kind
        self.request_log = RequestLog(settings, prompts.tokenizer)
        self.seeds = random.Random(settings.seed)  # of requests without one
        self.serials = itertools.count()  # tracing ids may repeat; the engine's names may not

    @property
    def sleep_level(self) -> int:
        """How deeply the model sleeps; 0 while it is awake."""
        return 0 if self.sleep is None else self.sleep.level

    def check_capacity(self, slo: SLO, num_requests: int = 1, num_tokens: int = 0) -> None:
        """Raises ApiError when this many more do not fit the queue or their tier's bound, or the engine is closed.

        Args:
            slo: as far as it is known.
        """
        admission_control = self.admission_control
        try:
            self.engine_client.check_open()
        except Refused as refused:
            raise from_refusal(refused, admission_control.retry_after) from refused
        objection, retry_after = admission_control.objection(slo.tenant, num_requests, num_tokens), 0
        if not objection and (bound := self.tiers.bound(slo.tier)) is not None:
            objection = admission_control.tier_objection(slo, bound, num_requests)
            retry_after = admission_control.tier_retry_after(slo.tier, bound)
        if objection:
            self.refused(QUEUE_FULL)
            raise ApiError(HTTPStatus.SERVICE_UNAVAILABLE, objection, code=QUEUE_FULL,
                           retry_after=retry_after or admission_control.retry_after,
                           more=headers_of(admission_control.wait_estimate()))

    def account(self, exchange: HttpExchange) -> Account:
        """The account of a request's key; the response tells what is left of it."""
        account = self.quotas.account(exchange.tenant)
        exchange.late_headers = account.headers
        return account

    def slo(self, request: Generate, tenant: str) -> SLO:
        """The objectives of a request.  Raises ApiError for a request that exceeds what its tier allows."""
        return slo_of(request, tenant, self.tiers.choose(request.service_tier, tenant))

    @property
    def hopeless(self) -> asyncio.Event:
        """Set when no further engine will be started."""
        return self.engine_client.hopeless

    async def drain(self) -> None:
        """Refuse new requests, and abort those that are unfinished when the shutdown timeout is over."""
        await self.engine_client.drain(self.settings.shutdown_timeout)

    def close(self) -> None:
        """End the worker processes."""
        self.prompts.close()
        self.grammars.close()
        self.explainer.close()
        self.what_if.close()

    def trace(self, traces: Traces) -> None:
        """Trace every request from here on."""
        self.traces = traces
        self.recorder.add_reader(traces)

    def refused(self, kind: str) -> None:
        """Count a request that was refused before the engine service received it."""
        self.batched_observer.refused(kind)
