"""Arguments of calls, and methods, that vLLM's classes have and that are not supported here."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NoReturn

from slotwise.neutral import is_neutral, nearest

CALL: dict[str, tuple[Any, ...]] = {  # arguments, with what is accepted beside None
    "lora_request": ([], [None]), "tokenization_kwargs": ({},), "mm_processor_kwargs": ({},),
    "chat_template_content_format": ("auto", "string"), "prompt_adapter_request": (), "guided_options_request": (),
    "reset_connector": (False,), "trace_headers": ({},), "data_parallel_rank": (0,), "session_id": (), "kv_hints": (),
    "reasoning_ended": (), "reasoning_parser_kwargs": ({},), "tags": ([],),
}
METHODS = {  # what to do instead
    "beam_search": "set n, and choose among the outputs by cumulative_logprob",
    **dict.fromkeys(("encode", "classify", "score", "reward"), "LLM.embed gives vectors; no model here has a head"),
    **dict.fromkeys(("enqueue", "enqueue_chat", "wait_for_completion"), "generate() runs a list of prompts together"),
    **dict.fromkeys(("collective_rpc", "apply_model"), "the model is not exposed"),
    **dict.fromkeys(("start_profile", "stop_profile"), "start with event_log=FILE, and run `slotwise timeline FILE`"),
}


def check_call(given: Mapping[str, Any]) -> None:
    """Raises TypeError for an unknown argument of a call, and ValueError for one that is not supported."""
    for name, value in given.items():
        if name not in CALL:
            near = nearest(name, CALL)
            raise TypeError(f"there is no argument {name!r}" + f"; did you mean {near}?" * bool(near))
        if not is_neutral(value, CALL[name]):
            raise ValueError(f"{name} {value!r:.40} is not supported: leave it out")


class VllmMethods:
    """Base of a class that has vLLM's name: a method without an implementation says what to do instead."""


def _refused(name: str) -> Callable[..., NoReturn]:
    def method(self: object, *arguments: object, **given: object) -> NoReturn:
        raise NotImplementedError(f"{type(self).__name__}.{name} is not supported: {METHODS[name]}")

    return method


for _name in METHODS:
    setattr(VllmMethods, _name, _refused(_name))
