"""Log lines about exchanges: those that generate (`--enable-log-requests`), or all of them (`--access-log`).

An exchange has one line, at its end, whatever its outcome.  Times count from its first bytes.
"""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Sequence
from typing import Any
from urllib.parse import quote

from slotwise.api.http.http_exchange import HttpExchange
from slotwise.api.limits.server_settings import ServerSettings
from slotwise.observe.lines import tell
from slotwise.text.tokenizer import Tokenizer, TokenizerError

POOLING = ("/v1/embeddings", "/v2/embed", "/v1/rerank", "/rerank", "/v2/rerank", "/v1/score", "/score", "/v1/classify",
           "/classify", "/v1/systemone")  # routes that are answered from prompts alone
GENERATING = ("/v1/completions", "/v1/chat/completions", "/v1/messages", "/v1/responses",
              *POOLING)  # routes that use the model
MAX_PATH = 200  # characters
NS = 1e-9

logger = logging.getLogger(__name__)


class RequestLog:
    """Writes the lines that the settings ask for."""

    def __init__(self, settings: ServerSettings, tokenizer: Tokenizer | None = None) -> None:
        self._has_requests = settings.enable_log_requests
        self._has_all = settings.access_log
        self._max_text = settings.max_log_len
        self._tokenizer = tokenizer

    def ended(self, exchange: HttpExchange) -> None:
        """Logs an exchange that has ended, if it is to be logged."""
        generates = self._has_requests and exchange.scope["path"] in GENERATING
        if not (generates or self._has_all):
            return
        client = exchange.scope.get("client")
        fields = {
            "request_id": exchange.request_id, "client": client[0] if client else "",
            "method": exchange.scope["method"], "path": quote(exchange.scope["path"])[:MAX_PATH],
            "status": exchange.status or None, "seconds": seconds_since(exchange, time.monotonic_ns())}
        if generates:
            fields |= exchange.about_generation(exchange)
        tell(logger, sentence(fields), fields)

    def texts(self, prompts: Sequence[list[int]]) -> list[str]:
        """The beginnings of the prompts with special tokens, at most `max_log_len` characters in all."""
        texts, left = [], self._max_text
        for prompt in prompts:
            if left <= 0:
                break
            try:
                assert self._tokenizer is not None, "only a server tells of what it generates"
                text = self._tokenizer.decode(prompt[:left], skip_special_tokens=False)[:left]
            except TokenizerError as error:
                text = f"({error})"[:left]
            texts.append(text)
            left -= max(1, len(text))
        return texts


def seconds_since(exchange: HttpExchange, at_ns: int) -> float:
    return round((at_ns - exchange.received_ns) * NS, 6)


def sentence(fields: dict[str, Any]) -> str:
    """Returns the fields as a text line."""
    line = (f"{fields['client'] or 'a client'}: {fields['method']} {fields['path']} "
            f"{fields['status'] or 'without an answer'} after {fields['seconds']:.3f} s; id {fields['request_id']}")
    if "id" in fields:
        ends = ", ".join(f"{count} {reason}" for reason, count in fields["finish_reasons"].items()) or "none begun"
        line += (f"; {fields['prompt_tokens']} prompt tokens, {fields['cached_tokens']} cached; "
                 f"{fields['output_tokens']} output tokens, {ends}; read after {fields['read_s']:.3f} s")
        if fields["first_token_s"] is not None:
            line += f", first token after {fields['first_token_s']:.3f} s"
    if "adapter" in fields:
        line += f"; adapter {fields['adapter']}"
    if "prompts" in fields:
        line += f"; prompts {json.dumps(fields['prompts'], ensure_ascii=False)}"
    return line
