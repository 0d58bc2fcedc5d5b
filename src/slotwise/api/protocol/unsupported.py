"""Fields of OpenAI's and vLLM's protocols that Slotwise does not implement.

A *neutral* field is accepted with the values that change nothing, listed in `NEUTRAL` and `AS_ANOTHER`; any other value
is refused by the field's name.  A *refused* field has no such value but null.  No value of a *hint* changes an answer:
hints are for accounts, stores and routers that stand before a server.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from difflib import get_close_matches
from functools import cache
from typing import Any

import msgspec

from slotwise.api.http.api_errors import bad_request
from slotwise.compat.vllm import SAMPLING, ignored_key, is_neutral

NEUTRAL: dict[str, tuple[Any, ...]] = SAMPLING | {  # in addition to null
    "return_token_offsets": (False,), "return_mm_kwargs": (True,),
    "ec_transfer_params": ({},), "vllm_xargs": ({},), "detokenize": (True,),
    "prompt_embeds": ([],), "functions": ([],), "function_call": ("none", "auto"),
    "modalities": (["text"],), "media_io_kwargs": ({},), "mm_processor_kwargs": ({},),
    "prompt_cache_options": ({},), "store": (False,),
    "verbosity": ("medium",), "background": (False,), "truncation": ("disabled",), "top_logprobs": (0,),
    "generate_summary": ("auto",), "mcp_servers": ([],),
    "padding": ("do_not_pad",), "embed_dtype": ("float32",), "endianness": ("native", "little"),
    "context_management": ({}, [], {"edits": []}, *({"edits": [{"type": "clear_thinking_20251015", "keep": keep}]}
                                                     for keep in ("all", {"type": "all"}))),
}
MAX_PATH = 100  # characters that are compared
LIKE = 0.75  # ratio of characters that a misspelled path has in common with a route
AS_ANOTHER = {"best_of": "n"}  # accepted with the value of another field, and with no other
PATHS = {  # of OpenAI's and vLLM's routes that are not served, by their beginnings
    "/v1/audio": "the model takes and gives text, and no audio",
    "/v1/images": "the model takes and gives text, and no images",
    "/pooling": "/v1/embeddings gives pooled vectors",
}
ELSEWHERE = {  # routes of Ollama, llama.cpp and TGI, and those that do the same here
    "/api/chat": "/v1/chat/completions",
    **dict.fromkeys(("/api/generate", "/generate", "/generate_stream", "/completion", "/infill"), "/v1/completions"),
    **dict.fromkeys(("/api/embed", "/api/embeddings", "/embed", "/embedding"), "/v1/embeddings"),
    **dict.fromkeys(("/api/tags", "/api/ps", "/api/show", "/props", "/info"), "/v1/models"),
    "/api/version": "/version", "/slots": "/timeline", "/predict": "/v1/classify", "/v1/decisions": "/v1/systemone",
    **dict.fromkeys(("/reranking", "/v1/reranking"), "/v1/rerank"),
}
HINTS = ("metadata", "prompt_cache_key", "safety_identifier", "session_id")


class Unsupported(msgspec.Struct, kw_only=True):
    """Of both endpoints."""

    use_beam_search: Any = None
    length_penalty: Any = None
    spaces_between_special_tokens: Any = None
    logprob_token_ids: Any = None
    repetition_detection: Any = None
    return_token_offsets: Any = None
    return_mm_kwargs: Any = None
    routed_experts_prompt_start: Any = None
    ec_transfer_params: Any = None
    vllm_xargs: Any = None
    logits_processors: Any = None
    detokenize: Any = None
    watermarking: Any = None
    prompt_embeds: Any = None


def why_not_served(path: str) -> str:
    """Why a known route of other servers is not there; "" for any other path."""
    for beginning, why in PATHS.items():
        if path == beginning or path.startswith(beginning + "/"):
            return f"{beginning} is not served: {why}"
    return ""


def meant(path: str, routes: Collection[str]) -> str:
    """The one of `routes` that a request to an unknown path was probably meant for, "" if there is none.

    The path may be another server's, may lack a beginning such as /v1 or have one too many, or may be misspelled.
    """
    path = path.rstrip("/")
    if (found := ELSEWHERE.get(path, "")) in routes:
        return found
    known = [route for route in routes if "{" not in route and len(route) > 1]
    if path and (longer := [route for route in known if route.endswith(path)]):
        return min(longer, key=len)
    if shorter := [route for route in known if path.endswith(route)]:
        return max(shorter, key=len)
    return next(iter(get_close_matches(path[:MAX_PATH], known, 1, LIKE)), "")


@cache
def unsupported_fields(kind: type[msgspec.Struct]) -> dict[str, tuple[Any, ...]]:
    """Fields of type Any, which are not supported, each with the values that are accepted."""
    names = [field.name for field in msgspec.structs.fields(kind) if field.type is Any]
    return {name: (None, *NEUTRAL.get(name, ())) for name in names}


def refuse_others(given: Mapping[str, Any], where: str, param: str, obeyed: Collection[str],
                  neutral: Mapping[str, Collection[Any]] | None = None) -> None:
    """Raises ApiError for a key of a free-form value that would be ignored though it has a meaning.

    Args:
        where: the value, for messages.
        param: the request's field that holds it.
        obeyed, neutral: see `slotwise.compat.vllm.ignored_key`.
    """
    if key := ignored_key(given, obeyed, neutral or {}):
        raise bad_request(f"{where}.{key:.60} is not supported", param, "unsupported_parameter")


def refuse(request: msgspec.Struct) -> None:
    """Raises ApiError for a value that would change the answer if its field were supported."""
    for name, accepted in unsupported_fields(type(request)).items():
        if not is_neutral(getattr(request, name), accepted):
            raise bad_request(f"{name} is not supported", name, "unsupported_parameter")
    for name, other in AS_ANOTHER.items():
        if getattr(request, name, None) not in (None, getattr(request, other, None) or 1):
            raise bad_request(f"{name}: only the value of {other} is supported", name, "unsupported_parameter")
