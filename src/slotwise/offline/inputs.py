"""Prompts of the offline API: texts, token ids, and vLLM's dicts of either."""

from __future__ import annotations

import operator
from collections.abc import Iterable, Mapping, Sequence
from numbers import Integral
from typing import Any, NamedTuple, NotRequired, TypedDict

from slotwise.compat.vllm import is_neutral
from slotwise.errors import nearest

NAMES = ("prompt", "prompt_token_ids", "cache_salt")
UNSUPPORTED: dict[str, tuple[Any, ...]] = {  # with the values that are accepted like None, and what to do for another
    **dict.fromkeys(("multi_modal_data", "multi_modal_uuids", "mm_processor_kwargs", "media_io_kwargs"), ({}, [])),
    "prompt_embeds": (), "prompt_is_token_ids": (), "token_type_ids": (), "prompt_token_offsets": (),
    "encoder_prompt": (), "decoder_prompt": (),
}


class TextPrompt(TypedDict):
    prompt: str
    cache_salt: NotRequired[str]  # cached prefixes are shared only among prompts of one salt


class TokensPrompt(TypedDict):
    prompt_token_ids: Sequence[int]
    prompt: NotRequired[str]  # the text they stand for, repeated in the output
    cache_salt: NotRequired[str]


PromptType = str | Sequence[int] | TextPrompt | TokensPrompt | Mapping[str, Any]


class ParsedPrompt(NamedTuple):
    """A prompt of any form."""

    text: str | None
    ids: list[int] | None  # None: those of the text
    salt: str = ""


def as_batch(prompts: PromptType | Sequence[PromptType]) -> Sequence[PromptType]:
    """A list of prompts, of one or of many."""
    single = isinstance(prompts, str | Mapping) or (len(prompts) > 0 and isinstance(prompts[0], Integral))
    return [prompts] if single else prompts  # type: ignore[return-value, list-item]


def parsed(prompt: PromptType) -> ParsedPrompt:
    """Raises ValueError for a prompt of another form; the message names the key or the position."""
    if isinstance(prompt, str):
        return ParsedPrompt(prompt, None)
    if not isinstance(prompt, Mapping):
        return ParsedPrompt(None, _token_ids("a prompt", prompt))
    _check_keys(prompt)
    text, salt = prompt.get("prompt"), prompt.get("cache_salt")
    for name, value in (("prompt", text), ("cache_salt", salt)):
        if value is not None and not isinstance(value, str):
            raise ValueError(f"{name} must be a text, not {value!r:.40}")
    if (ids := prompt.get("prompt_token_ids")) is not None:
        return ParsedPrompt(text, _token_ids("prompt_token_ids", ids), salt or "")
    if text is None:
        raise ValueError("a prompt given as a dict needs prompt or prompt_token_ids")
    return ParsedPrompt(text, None, salt or "")


def _check_keys(prompt: Mapping[str, Any]) -> None:
    for name, value in prompt.items():
        if name in UNSUPPORTED:
            if not is_neutral(value, UNSUPPORTED[name]):
                raise ValueError(f"{name} is not supported: a prompt is a text or token ids")
        elif name not in NAMES:
            near = nearest(str(name), NAMES)
            raise ValueError(f"a prompt has no {name!r:.40}" + (f"; did you mean {near}?" if near else
                             "; it needs prompt or prompt_token_ids"))


def _token_ids(name: str, ids: Any) -> list[int]:
    if isinstance(ids, str | bytes) or not isinstance(ids, Iterable):
        raise ValueError(f"{name} must be a list of token ids, not {ids!r:.40}")
    return [_token_id(f"{name}[{position}]", token) for position, token in enumerate(ids)]


def _token_id(name: str, token: object) -> int:
    """A whole number of any library; a boolean counts as a number in Python, and here it is a mistake."""
    try:
        if not isinstance(token, bool):
            return operator.index(token)  # type: ignore[arg-type]
    except TypeError:
        pass
    raise ValueError(f"{name} must be a token id, a whole number, not {token!r:.40}")
