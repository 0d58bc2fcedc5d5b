"""`Api`: what the routes of a server work with, in five parts.

    clients      keys, browsers, bodies, subscribers of events, stored responses: kept when another model is served
    engine       the engine's client, the models it serves, the requests that are in it
    text         prompts, grammars, the format of outputs
    limits       tiers, quotas, admission control, and bounds on what responses hold
    observers    metrics, the event log's ring, predictions, explanations

An endpoint names the parts it uses as its parameters (see `asgi.App`).
"""

from __future__ import annotations

import asyncio
import itertools
import random
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from http import HTTPStatus

from slotwise.api.generate.choice import ActiveRequests
from slotwise.api.generate.explainer import Explainer
from slotwise.api.generate.logprobs import MAX_HELD
from slotwise.api.generate.output_constraints import GrammarChecker
from slotwise.api.generate.prompts import Prompts
from slotwise.api.generate.request_log import RequestLog
from slotwise.api.generate.response_store import ResponseStore
from slotwise.api.generate.served_adapters import ServedModels
from slotwise.api.generate.what_if_replay import WhatIf
from slotwise.api.http.api_errors import ApiError, from_refusal
from slotwise.api.http.http_exchange import HttpExchange
from slotwise.api.http.turns import Turns
from slotwise.api.limits.api_keys import ApiKeys
from slotwise.api.limits.bodies import Bodies
from slotwise.api.limits.browsers import Browsers
from slotwise.api.limits.quotas import Account, Quotas, headers_of
from slotwise.api.limits.server_settings import ServerSettings
from slotwise.api.limits.tiers import Tiers, slo_of
from slotwise.api.parsers.parser_table import UNPARSED, OutputFormat
from slotwise.api.protocol.protocol import Generate
from slotwise.core.scheduler_limits import SLO
from slotwise.core.tenant_capacity import TenantCapacity
from slotwise.engine.admission_control import AdmissionControl
from slotwise.engine.client import EngineClient
from slotwise.engine.refusals import QUEUE_FULL, Refused
from slotwise.engine.sleep import Sleep
from slotwise.observe.batched_observer import BatchedObserver
from slotwise.observe.metrics import Metrics
from slotwise.observe.prefix_index import PrefixIndex
from slotwise.observe.recorder import Recorder
from slotwise.observe.step_time_store import ObservedStepTimes
from slotwise.observe.traces import Traces

MAX_SUBSCRIBERS = 16
MAX_OF_ONE = 4  # subscribers with one key, or from one address where there are no keys
MAX_NUMBERS = 1 << 24  # of the vectors of all responses: some 350 MB as JSON
MAX_QUERIES, MAX_QUERIES_OF_ONE = 63, 16  # of queue positions that wait, of all clients and of one


LoadModel = Callable[[str, str], Awaitable[str]]
"""Serves the model in a folder or a file, by a name or "", in the place of this one; returns its name."""


class Clients:
    """What a service knows of its clients, and reads from them."""

    def __init__(self, settings: ServerSettings) -> None:
        self.keys = ApiKeys(settings.all_keys, settings.admin_api_key, settings.tenant_secret)
        self.browsers = Browsers(settings)
        self.bodies = Bodies(settings)


class Subscribers:
    """Counts subscribers, in all and by holder: a key, or an address where there are no keys."""

    def __init__(self) -> None:
        self._holders: Counter[str] = Counter()

    @contextmanager
    def entering(self, holder: str) -> Iterator[None]:
        """Raises ApiError when the bound is reached, in all or for this holder."""
        if self._holders[holder] >= MAX_OF_ONE:
            message = f"{MAX_OF_ONE} viewers of this client watch the events already"
            raise ApiError(HTTPStatus.TOO_MANY_REQUESTS, message, code="too_many_viewers")
        if (num := self._holders.total()) >= MAX_SUBSCRIBERS:
            raise ApiError(HTTPStatus.SERVICE_UNAVAILABLE, f"{num} viewers watch the events already",
                           code="too_many_viewers")
        self._holders[holder] += 1
        try:
            yield
        finally:
            self._holders[holder] -= 1
            if not self._holders[holder]:
                del self._holders[holder]


class ServerClients(Clients):
    """Also what a server keeps for its clients, whatever model it serves."""

    def __init__(self, settings: ServerSettings) -> None:
        super().__init__(settings)
        self.subscribers = Subscribers()
        self.responses = ResponseStore()


class ServedEngine:
    """The engine, the models that it serves, and the requests that are in it.

    Args:
        sleep: of the engine; None: it cannot sleep here.
    """

    def __init__(self, client: EngineClient, settings: ServerSettings, sleep: Sleep | None) -> None:
        self.client = client
        self.models = ServedModels(client, settings)
        self.active_requests = ActiveRequests()
        self.sleep = sleep
        self.load_model: LoadModel | None = None  # set by what exchanges models
        self.is_over = False  # another model is served
        self.seeds = random.Random(settings.seed)  # of requests without one
        self.serials = itertools.count()  # tracing ids may repeat; the engine's names may not

    @property
    def sleep_level(self) -> int:
        """How deeply the model sleeps; 0 while it is awake."""
        return 0 if self.sleep is None else self.sleep.level


class TextService:
    """From prompts to tokens, and from tokens to text.

    Args:
        output_format: how the model's outputs are parsed.
    """

    def __init__(self, prompts: Prompts, output_format: OutputFormat) -> None:
        self.prompts = prompts
        self.output_format = output_format
        self.grammars = GrammarChecker(prompts.tokenizer.special_texts)
        self.formatting = asyncio.Lock()  # see server.logprobs

    def close(self) -> None:
        """End the worker processes."""
        self.prompts.close()
        self.grammars.close()


class Observers:
    """What watches the engine: the event log's ring, metrics, predictions, and what is computed from them.

    Args:
        step_times: a step-time model, possibly fitted earlier.
    """

    def __init__(self, engine: ServedEngine, settings: ServerSettings, step_times: ObservedStepTimes) -> None:
        client = engine.client
        self.recorder = Recorder()
        self.metrics = Metrics(settings.served_model_name, client.info, self.recorder.timelines,
                               lambda: client.healthy, has_vllm_names=settings.vllm_metrics)
        self.recorder.add_reader(self.metrics)
        self.recorder.started(client.info)
        self.step_times = step_times
        self.metrics.extra_gauges |= {
            "step_time_model_error": lambda: step_times.error, "sleep_level": lambda: engine.sleep_level}
        self.traces: Traces | None = None  # set by `trace`
        self.prefix_index = PrefixIndex()
        self.prefix_index.started(client.info)
        self.batched_observer = BatchedObserver([self.recorder, self.metrics, step_times, self.prefix_index])
        self.explainer = Explainer(self.batched_observer, self.recorder, step_times)
        self.what_if = WhatIf(self.batched_observer, self.recorder.ring)

    def trace(self, traces: Traces) -> None:
        """Trace every request from here on."""
        self.traces = traces
        self.recorder.add_reader(traces)

    def refused(self, kind: str) -> None:
        """Count a request that was refused before the engine service received it."""
        self.batched_observer.refused(kind)

    def close(self) -> None:
        """End the worker processes."""
        self.explainer.close()
        self.what_if.close()


class RequestLimits:
    """What a client may send now: by the queue, its tier, its quota, and what responses in progress hold.

    Args:
        refused: counts a request that was refused.
    """

    def __init__(self, engine_client: EngineClient, settings: ServerSettings, keys: ApiKeys,
                 refused: Callable[[str], None]) -> None:
        self._engine_client = engine_client
        self._refused = refused
        self.tiers = Tiers(settings.tiers, keys)
        self.admission_control = AdmissionControl(
            engine_client.info.limits, settings.max_num_queued_reqs, settings.max_num_queued_tokens,
            engine_client.max_live)
        self.quotas = Quotas(self.tiers.quota, self.admission_control, refused)
        self.position_queries = Turns(MAX_QUERIES, MAX_QUERIES_OF_ONE)
        self.prompt_entries = TenantCapacity("log-probabilities of prompts are held", MAX_HELD)
        self.vector_numbers = TenantCapacity("numbers of vectors are held", MAX_NUMBERS)

    def check_capacity(self, slo: SLO, num_requests: int = 1, num_tokens: int = 0) -> None:
        """Raises ApiError when this many more do not fit the queue or their tier's bound, or the engine is closed.

        Args:
            slo: as far as it is known.
        """
        admission_control = self.admission_control
        try:
            self._engine_client.check_open()
        except Refused as refused:
            raise from_refusal(refused, admission_control.retry_after) from refused
        objection, retry_after = admission_control.objection(slo.tenant, num_requests, num_tokens), 0
        if not objection and (bound := self.tiers.bound(slo.tier)) is not None:
            objection = admission_control.tier_objection(slo, bound, num_requests)
            retry_after = admission_control.tier_retry_after(slo.tier, bound)
        if objection:
            self._refused(QUEUE_FULL)
            raise ApiError(HTTPStatus.SERVICE_UNAVAILABLE, objection, code=QUEUE_FULL,
                           retry_after=retry_after or admission_control.retry_after,
                           more=headers_of(admission_control.wait_estimate()))

    def account(self, exchange: HttpExchange) -> Account:
        """The account of a request's key; headers of the response say what is left of it."""
        account = self.quotas.account(exchange.tenant)
        exchange.late_headers = account.headers
        return account

    def slo(self, request: Generate, tenant: str) -> SLO:
        """The objectives of a request.  Raises ApiError for a request that exceeds what its tier allows."""
        return slo_of(request, tenant, self.tiers.choose(request.service_tier, tenant))


class Api:
    """All parts, built on an engine that is ready.

    Args:
        output_format: how the model's outputs are parsed.
        step_times: a step-time model, possibly fitted earlier.
        sleep: of the engine; None: it cannot sleep here.
        clients: of the model before; None: this is the first.
    """

    def __init__(self, engine_client: EngineClient, prompts: Prompts, settings: ServerSettings,
                 step_times: ObservedStepTimes, output_format: OutputFormat = UNPARSED,
                 sleep: Sleep | None = None, clients: ServerClients | None = None) -> None:
        self.settings = settings
        self.clients = clients if clients is not None else ServerClients(settings)
        self.engine = ServedEngine(engine_client, settings, sleep)
        self.text = TextService(prompts, output_format)
        self.observers = Observers(self.engine, settings, step_times)
        self.limits = RequestLimits(engine_client, settings, self.clients.keys, self.refused)
        engine_client.observers += [
            self.limits.admission_control, self.observers.batched_observer, self.engine.models]
        self.request_log = RequestLog(settings, prompts.tokenizer)
        self.num_exchanges = 0  # in progress, of any kind

    @property
    def hopeless(self) -> asyncio.Event:
        """Set when no further engine will be started."""
        return self.engine.client.hopeless

    def refused(self, kind: str) -> None:
        """Count a request that was refused before the engine service received it."""
        self.observers.refused(kind)

    async def drain(self) -> None:
        """Refuse new requests, and abort those that are unfinished when the shutdown timeout is over.

        Requests that are not rendered and tokenized yet are refused at once.
        """
        self.text.close()
        await self.engine.client.drain(self.settings.shutdown_timeout)

    def close(self) -> None:
        """End the worker processes."""
        self.text.close()
        self.observers.close()
