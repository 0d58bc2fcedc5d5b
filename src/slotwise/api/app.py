"""The routes of a server, and the application over its engine."""

from __future__ import annotations

from functools import cache

from slotwise.api.admin import admin, lifecycle, pages, request_status
from slotwise.api.admin.cache_report import cache_report
from slotwise.api.admin.event_stream import events
from slotwise.api.admin.html import reference_page
from slotwise.api.admin.lifecycle import LOAD, UNLOAD, load_adapter, unload_adapter
from slotwise.api.admin.openapi import bodies_of, document
from slotwise.api.admin.pages import timeline
from slotwise.api.admin.replica_state import replica
from slotwise.api.anthropic.anthropic_messages import count_tokens, messages
from slotwise.api.asgi import OPEN_TO_ALL
from slotwise.api.generate.checkpoint_workers import Template
from slotwise.api.generate.context import Api
from slotwise.api.generate.prompts import Prompts
from slotwise.api.http.http_exchange import Endpoint, HttpExchange, about
from slotwise.api.limits.server_settings import ServerSettings
from slotwise.api.openai.completions import chat_completions, completions
from slotwise.api.openai.responses import RESPONSES, delete_response, responses, stored_response
from slotwise.api.parsers.parser_table import UNPARSED, OutputFormat
from slotwise.api.pooling.classify import classify
from slotwise.api.pooling.decisions import systemone
from slotwise.api.pooling.embeddings import cohere_embed, embeddings
from slotwise.api.pooling.scoring import rerank, score
from slotwise.engine.client import EngineClient
from slotwise.engine.sleep import Sleep
from slotwise.observe.step_time_store import ObservedStepTimes
from slotwise.text.tokenizer import Tokenizer


async def openapi(settings: ServerSettings, exchange: HttpExchange) -> None:
    """The OpenAPI document of this service."""
    await exchange.respond(_document(settings.root_path))


@about(media_type="text/html")
async def docs(settings: ServerSettings, exchange: HttpExchange) -> None:
    """The routes, their bodies, and a form to try each, from the OpenAPI document, as an HTML page."""
    await pages.respond_reference(exchange, _reference(settings.root_path))


@cache
def _document(root_path: str) -> bytes:
    return document(ROUTES, OPEN_TO_ALL, root_path)


@cache
def _reference(root_path: str) -> bytes:
    return reference_page.page(document(ROUTES, OPEN_TO_ALL), root_path)


ROUTES: tuple[tuple[str, str, Endpoint], ...] = (
    ("POST", "/v1/completions", completions),
    ("POST", "/v1/chat/completions", chat_completions),
    ("POST", RESPONSES, responses),
    ("GET", RESPONSES + "/{response_id:path}", stored_response),
    ("DELETE", RESPONSES + "/{response_id:path}", delete_response),
    ("POST", "/v1/messages", messages),
    ("POST", "/v1/messages/count_tokens", count_tokens),
    ("POST", "/v1/embeddings", embeddings),
    ("POST", "/v2/embed", cohere_embed),
    ("POST", "/v1/rerank", rerank),
    ("POST", "/rerank", rerank),
    ("POST", "/v2/rerank", rerank),
    ("POST", "/v1/score", score),
    ("POST", "/score", score),
    ("POST", "/v1/classify", classify),
    ("POST", "/classify", classify),
    ("POST", "/v1/systemone", systemone),
    ("GET", "/v1/models", admin.models),
    ("GET", "/v1/models/{model:path}", admin.model),
    ("POST", LOAD, load_adapter),
    ("POST", UNLOAD, unload_adapter),
    ("POST", "/tokenize", admin.tokenize),
    ("POST", "/detokenize", admin.detokenize),
    ("POST", "/abort_requests", request_status.abort_requests),
    ("GET", "/health", admin.health),
    ("GET", "/ping", admin.health),
    ("POST", "/ping", admin.health),
    ("GET", "/version", admin.version),
    ("GET", "/", pages.index),
    ("GET", "/links", pages.links),
    ("GET", "/docs", docs),
    ("GET", "/openapi.json", openapi),
    ("GET", "/metrics", admin.metrics),
    ("GET", "/load", admin.load),
    ("GET", "/replica", replica),
    ("GET", "/experts", admin.experts),
    ("GET", "/admin/scheduling", admin.scheduling),
    ("PUT", "/admin/scheduling", admin.reschedule),
    ("POST", "/what_if", admin.what_if),
    ("POST", lifecycle.SLEEP, lifecycle.sleep),
    ("POST", lifecycle.WAKE_UP, lifecycle.wake_up),
    ("GET", "/is_sleeping", lifecycle.is_sleeping),
    ("POST", lifecycle.RESET, lifecycle.reset_prefix_cache),
    ("POST", lifecycle.LOAD_MODEL, lifecycle.load_model),
    ("GET", "/timeline", timeline),
    ("GET", "/events", events),
    ("GET", "/explain/{request_id:path}", request_status.explain),
    ("GET", "/cache/report", cache_report),
    ("GET", "/requests/{request_id:path}", request_status.status),
)

BODIES = bodies_of(ROUTES)  # that have a type of their own, by path


def build_api(engine_client: EngineClient, tokenizer: Tokenizer, chat_template: Template | None,
              settings: ServerSettings, step_times: ObservedStepTimes | None = None,
              output_format: OutputFormat = UNPARSED, sleep: Sleep | None = None, before: Api | None = None) -> Api:
    """What answers requests over an engine that is ready.

    Args:
        step_times: a model fitted earlier; None: an empty one.
        output_format: how the model's outputs are parsed.
        sleep: of the engine; None: it cannot sleep here.
        before: of the model that was served until now, whose clients go on.
    """
    prompts = Prompts(tokenizer, chat_template, lambda: engine_client.info)
    clients = None if before is None else before.clients
    return Api(engine_client, prompts, settings, step_times or ObservedStepTimes(), output_format, sleep, clients)
