"""Fields of OpenAI's and vLLM's protocols that Slotwise does not implement.

A *neutral* field is accepted with the values that change nothing, listed in `NEUTRAL`; any other value is refused by
the field's name.  A *refused* field has no such value but null.  No value of a *hint* changes an answer: hints are for
accounts, stores and routers that stand before a server.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import msgspec

from slotwise.neutral import SAMPLING, is_neutral
from slotwise.server.errors import bad_request

NEUTRAL: dict[str, tuple[Any, ...]] = SAMPLING | {  # beside null
    "return_token_offsets": (False,), "return_mm_kwargs": (True,),
    "kv_transfer_params": ({},), "ec_transfer_params": ({},), "vllm_xargs": ({},), "detokenize": (True,),
    "prompt_embeds": ([],), "suffix": ("",),
    "tools": ([],), "tool_choice": ("none", "auto"), "functions": ([],), "function_call": ("none", "auto"),
    "modalities": (["text"],), "include_reasoning": (True,), "media_io_kwargs": ({},), "mm_processor_kwargs": ({},),
    "prompt_cache_options": ({},), "prompt_cache_retention": ("in_memory",), "store": (False,),
    "verbosity": ("medium",),
}
HINTS = ("metadata", "parallel_tool_calls", "prompt_cache_key", "safety_identifier", "session_id")


class Unsupported(msgspec.Struct, kw_only=True):
    """Of both endpoints."""

    use_beam_search: Any = None
    length_penalty: Any = None
    spaces_between_special_tokens: Any = None
    logprob_token_ids: Any = None
    repetition_detection: Any = None
    thinking_token_budget: Any = None
    return_token_offsets: Any = None
    return_mm_kwargs: Any = None
    routed_experts_prompt_start: Any = None
    kv_transfer_params: Any = None
    ec_transfer_params: Any = None
    vllm_xargs: Any = None
    logits_processors: Any = None
    detokenize: Any = None
    watermarking: Any = None
    prompt_embeds: Any = None


@cache
def unsupported_fields(kind: type[msgspec.Struct]) -> dict[str, tuple[Any, ...]]:
    """Fields of type Any, which are not supported, each with the values that are accepted."""
    names = [field.name for field in msgspec.structs.fields(kind) if field.type is Any]
    return {name: (None, *NEUTRAL.get(name, ())) for name in names}


def refuse(request: msgspec.Struct) -> None:
    """Raises ApiError for a value that would change the answer if its field were supported."""
    for name, accepted in unsupported_fields(type(request)).items():
        if not is_neutral(getattr(request, name), accepted):
            raise bad_request(f"{name} is not supported", name, "unsupported_parameter")
