"""Request bodies of the routes in `api/admin/admin.py`: tokenizing, aborts, and what-ifs."""

from __future__ import annotations

from typing import Annotated, Any

import msgspec

from slotwise.api.http.api_errors import bad_request
from slotwise.api.protocol import decoding
from slotwise.api.protocol.protocol import ChatRequest, Hint, Int, Milliseconds, Seconds, TemplateSource

Path = Annotated[str, msgspec.Meta(min_length=1, max_length=4096)]
Name = Annotated[str, msgspec.Meta(min_length=1, max_length=256)]
MAX_RETENTIONS = 64
OF_MESSAGES = ("add_generation_prompt", "continue_final_message", "chat_template", "chat_template_kwargs", "tools")


class TokenizeRequest(msgspec.Struct, kw_only=True):
    model: str | None = None  # the served model's name, by default
    prompt: str | None = None  # a text; either this or `messages`
    messages: list[dict[str, Any]] | None = None  # a conversation, rendered with the chat template
    add_special_tokens: bool | None = None  # by default the tokenizer adds its tokens to a text, and not to messages
    add_generation_prompt: bool | None = None  # the template begins the answer; by default it does
    continue_final_message: bool | None = None  # the answer continues the last message; then none is begun
    chat_template: TemplateSource | None = None  # the template, where the server has `--trust-request-chat-template`
    chat_template_kwargs: dict[str, Any] | None = None  # further variables of the template
    tools: list[dict[str, Any]] | None = None  # functions that the template describes to the model
    return_token_strs: bool | None = None  # return each token as the tokenizer's string, too

    def as_chat(self) -> ChatRequest:
        """The chat whose prompt is tokenized.  Raises ApiError for fields that exclude each other."""
        chat = ChatRequest(messages=self.messages or [], **{name: getattr(self, name) for name in OF_MESSAGES})
        chat.refuse_unsupported()
        return chat

    def check_text(self) -> None:
        """Raises ApiError for a field that belongs to messages."""
        for name in OF_MESSAGES:
            if getattr(self, name) is not None:
                raise bad_request(f"{name}: only allowed with messages", name)


class DetokenizeRequest(msgspec.Struct, kw_only=True):
    model: str | None = None  # the served model's name, by default
    tokens: list[Int]  # ids of the vocabulary


Retentions = Annotated[dict[Hint, Seconds], msgspec.Meta(max_length=MAX_RETENTIONS)]


class WhatIfRequest(msgspec.Struct, kw_only=True):
    """Settings under which the last minutes are replayed, and what the answer contains."""

    changes: dict[str, Any]  # scheduling settings, as `PUT /admin/scheduling` takes them, without tiers
    ttft_ms: Milliseconds | None = None  # goodput: most milliseconds to the first token; by default any
    tpot_ms: Milliseconds | None = None  # goodput: most milliseconds per token after it; by default any
    request_id: str | None = None  # also tell when this request would have had its first and its last token
    retain: Retentions | None = None  # by session, or "*" for all: seconds for which its prompts would stay cached


class LoadModelRequest(msgspec.Struct, kw_only=True):
    """The model that is to be served in the place of this one."""

    model: Path  # the absolute path of a checkpoint's folder or of a GGUF file, or a name that `slotwise pull` lists
    served_model_name: Name | None = None  # for clients; by default the names of `--served-model-name`, else its own


class AbortRequest(msgspec.Struct, kw_only=True):
    """One name or several: an `X-Request-Id`, a `request_id`, or the `id` of a response."""

    request_id: str | None = None  # one name; either this or `request_ids`
    request_ids: list[str] | None = None  # several names

    def names(self) -> list[str]:
        """Raises ApiError for no name, or for too many."""
        if (self.request_id is None) == (self.request_ids is None):
            raise bad_request("give either request_id or request_ids", "request_ids")
        names = [self.request_id] if self.request_id is not None else self.request_ids or []
        if len(names) > decoding.MAX_ABORTS:
            raise bad_request(f"request_ids: at most {decoding.MAX_ABORTS} at once", "request_ids")
        return names
