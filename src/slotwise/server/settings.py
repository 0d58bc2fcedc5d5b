"""What the HTTP service may be told."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class ServerSettings:
    served_model_name: str
    api_key: str = ""  # empty: everybody may come in
    max_body_bytes: int = 16 << 20
    body_timeout: float = 60.0  # seconds a request's body may take to arrive
    max_choices: int = 1024  # continuations that one request may ask for, prompts times `n`
    shutdown_timeout: float = 30.0  # seconds that running requests get at the end
    stream_interval: int = 1  # tokens per streamed event, after the first
    seed: int = 0  # draws the seeds of requests that bring none
