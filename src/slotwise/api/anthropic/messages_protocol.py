"""Bodies of `/v1/messages`: Anthropic's fields, and what they are as a chat.

Types are strict.  A known field is obeyed, accepted where it changes nothing, or refused by name, as in
`api/protocol/protocol.py`; of content blocks the model takes text, tool calls and their results, and its own thinking.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal, TypeGuard

import msgspec

from slotwise.api.generate.shapes import to_json
from slotwise.api.http.api_errors import bad_request
from slotwise.api.protocol.protocol import (
    ChatRequest,
    GenerationFields,
    NoneOrMore,
    OneOrMore,
    Seed,
    Stop,
    Temperature,
    TopK,
    TopP,
    joined,
    optional_fields,
)
from slotwise.api.protocol.unsupported import refuse, refuse_others
from slotwise.compat.vllm import ANY
from slotwise.text.conversation import MAX_MESSAGES, Message

Json = dict[str, Any]
Text = str | list[dict[str, Any]]
StopSequences = Annotated[list[Stop], msgspec.Meta(max_length=64)]
MEDIA = {"image": "images", "document": "documents", "container_upload": "files"}
TIERS = {"standard_only": "default"}  # Anthropic's names of tiers, and OpenAI's

MAX_SESSION = 512  # characters of a user_id that name the session, too, as those of Claude Code do
LONG: Literal["1h"] = "1h"  # a `ttl` of cache_control; any other is the default, 5m
NEXT: list[Json] = [{"role": "user", "content": "."}]  # replaces the messages after a breakpoint

TOOL = ("type", "name", "description", "input_schema", "strict")  # keys of a tool
NEUTRAL_OF_TOOL: dict[str, tuple[Any, ...]] = {
    "cache_control": ANY, "eager_input_streaming": (False, True), "defer_loading": (False,), "input_examples": ([],),
    "allowed_callers": ([], ["direct"])}


class MessagesMetadata(msgspec.Struct):
    user_id: str | None = None  # the session, and the tenant where the server has no keys


class Thinking(msgspec.Struct):
    type: Literal["enabled", "disabled", "adaptive"]
    budget_tokens: NoneOrMore | None = None  # of `enabled`: tokens of reasoning, as `thinking_token_budget`
    display: Literal["summarized", "omitted"] | None = None  # omitted: the response has no thinking blocks


class OutputConfig(msgspec.Struct):
    effort: Literal["low", "medium", "high", "xhigh", "max"] | None = None  # the template's `reasoning_effort`
    format: dict[str, Any] | None = None  # `{"type": "json_schema", "schema": ...}`


class MessagesToolChoice(msgspec.Struct):
    type: Literal["auto", "any", "tool", "none"]
    name: str | None = None  # of `tool`
    disable_parallel_tool_use: bool | None = None  # the answer has one call at most


class CountTokensRequest(msgspec.Struct, kw_only=True):
    """The fields that make a prompt."""

    messages: list[dict[str, Any]]  # `user` and `assistant`; the answer continues a last message of the assistant's
    model: str | None = None  # the served model's name, by default
    system: Text | None = None  # the system message: a text, or blocks of type `text`
    tools: list[dict[str, Any]] | None = None  # `name`, `description` and `input_schema` of each
    tool_choice: MessagesToolChoice | None = None  # `auto`, `any`, `tool` with a name, or `none`
    thinking: Thinking | None = None  # turns reasoning on or off, where the template can; by default it decides
    output_config: OutputConfig | None = None  # `effort`, the template's `reasoning_effort`, and `format`
    chat_template_kwargs: dict[str, Any] | None = None  # further variables of the template
    cache_control: dict[str, Any] | None = None  # a hint: the whole prompt stays cached for the `ttl`, 5m or 1h
    speed: Literal["standard"] | None = None  # changes nothing
    container: Any = None  # not supported
    context_management: Any = None  # nothing is cleared
    diagnostics: Any = None  # not supported
    inference_geo: Any = None  # not supported
    mcp_servers: Any = None  # not supported, but an empty list

    def as_chat(self) -> ChatRequest:
        """The same conversation as a chat.  Raises ApiError for a field that is not valid, or not supported."""
        refuse(self)
        messages = messages_of(self.system, self.messages)
        continues = messages[-1]["role"] == "assistant" if messages else False
        chat = ChatRequest(messages=messages, model=self.model, chat_template_kwargs=self.chat_template_kwargs)
        chat.prompt_cache_retention = cache_control_of(self)
        if continues:
            chat.continue_final_message = True
        if self.tools:
            chat.tools = [_function(index, tool) for index, tool in enumerate(self.tools)]
        if (choice := self.tool_choice) is not None:
            chat.tool_choice = _tool_choice(choice)
            chat.parallel_tool_calls = False if choice.disable_parallel_tool_use else None
        if (config := self.output_config) is not None:
            chat.reasoning_effort = config.effort
            chat.response_format = None if config.format is None else _response_format(config.format)
        return chat


MessagesFields: Any = joined("MessagesFields", CountTokensRequest, optional_fields(GenerationFields), __name__)


class MessagesRequest(MessagesFields, CountTokensRequest, kw_only=True):  # type: ignore[misc]
    max_tokens: OneOrMore  # most output tokens, thinking included
    stop_sequences: StopSequences | None = None  # texts that end the answer, and are not part of it
    temperature: Temperature | None = None  # divides the logits; by default the model's own
    top_p: TopP | None = None  # keep the smallest set of tokens whose probabilities sum to this; 0: one token
    top_k: TopK | None = None  # keep the k most probable tokens
    metadata: MessagesMetadata | None = None  # `user_id`: the session, and the tenant where the server has no keys
    service_tier: str | None = None  # `auto`, `standard_only`, or one of the server's own: docs/tiers.md
    seed: Seed | None = None  # the same seed gives the same answer

    def as_chat(self) -> ChatRequest:
        chat = super().as_chat()
        for name in (*GenerationFields.__struct_fields__, "max_tokens", "temperature", "top_p", "top_k", "seed"):
            setattr(chat, name, getattr(self, name))
        chat.stop = self.stop_sequences or None
        chat.user = self.metadata.user_id if self.metadata else None
        chat.session_id = chat.user[:MAX_SESSION] if chat.user else None
        chat.service_tier = TIERS.get(self.service_tier or "", self.service_tier)
        return chat


def _response_format(form: Json) -> Json:
    if form.get("type") != "json_schema" or not isinstance(form.get("schema"), dict):
        raise bad_request('output_config.format: must be {"type": "json_schema", "schema": ...}', "output_config")
    refuse_others(form, "output_config.format", "output_config", ("type", "schema"))
    return {"type": "json_schema", "json_schema": {"name": "output", "schema": form["schema"], "strict": True}}


def _tool_choice(choice: MessagesToolChoice) -> str | Json:
    if choice.type == "tool":
        if choice.name is None:
            raise bad_request("tool_choice.name: is needed with the type tool", "tool_choice")
        return {"type": "function", "function": {"name": choice.name}}
    return {"any": "required"}.get(choice.type, choice.type)


def _function(index: int, tool: Json) -> Json:
    """A tool as chats have it; its name and schema are checked there."""
    kind = tool.get("type")
    if kind not in (None, "custom"):
        raise bad_request(f"tools[{index}]: a tool of type {kind!r:.60} runs on Anthropic's servers, and is not "
                          "supported", "tools", "unsupported_parameter")
    if "input_schema" not in tool:
        raise bad_request(f"tools[{index}].input_schema: is needed", "tools")
    refuse_others(tool, f"tools[{index}]", "tools", TOOL, NEUTRAL_OF_TOOL)
    function = {"name": tool.get("name"), "description": tool.get("description"), "parameters": tool["input_schema"],
                "strict": tool.get("strict")}
    return {"type": "function", "function": {name: value for name, value in function.items() if value is not None}}


def cache_control_of(request: CountTokensRequest) -> Literal["5m", "1h"] | None:
    """The longest retention that any part of the prompt asks for."""
    parts: list[object] = [{"cache_control": request.cache_control}, *(request.tools or ())]
    for content in (request.system, *[message.get("content") for message in request.messages]):
        parts += content if isinstance(content, list) else []
    asked = [part["cache_control"] for part in parts if _is_marked(part)]
    if not asked:
        return None
    return LONG if any(isinstance(one, dict) and one.get("ttl") == LONG for one in asked) else "5m"


def up_to_breakpoint(request: CountTokensRequest) -> CountTokensRequest:
    """Returns the request cut after its last part with a cache_control, or `request` if nothing follows that part.

    A prompt consists of tools, system message and messages, in this order.  A cut request that does not end with a user
    message gets a short one, so that the template accepts it; up to there both prompts are the same.
    """
    if request.cache_control:
        return request
    for index, message in reversed(list(enumerate(request.messages))):
        if (number := _num_up_to_mark(message.get("content"))) is None:
            continue
        if index == len(request.messages) - 1 and number == len(message["content"]):
            return request
        left = [*request.messages[:index], message | {"content": message["content"][:number]}]
        return msgspec.structs.replace(request, messages=left if message.get("role") == "user" else [*left, *NEXT])
    if (number := _num_up_to_mark(request.system)) is not None:
        assert isinstance(request.system, list)
        return msgspec.structs.replace(request, system=request.system[:number], messages=NEXT)
    number = _num_up_to_mark(request.tools)
    return request if number is None else msgspec.structs.replace(
        request, tools=(request.tools or [])[:number], messages=NEXT)


def _num_up_to_mark(parts: object) -> int | None:
    """Number of parts up to the last one with a cache_control; None if no part has one."""
    marked = [number for number, part in enumerate(parts, 1) if _is_marked(part)] if isinstance(parts, list) else []
    return marked[-1] if marked else None


def _is_marked(part: object) -> TypeGuard[Json]:
    return isinstance(part, dict) and bool(part.get("cache_control"))


# -- content blocks ------------------------------------------------------------------------------------------------


def messages_of(system: Text | None, messages: Sequence[Json]) -> list[Message]:
    """Messages as chats have them.  Raises ApiError for blocks of other kinds."""
    if not messages or len(messages) > MAX_MESSAGES:
        raise bad_request(f"messages: must hold 1 to {MAX_MESSAGES} messages", "messages")
    found: list[Message] = []
    if system:
        found.append({"role": "system", "content": _text("system", system, "system")})
    for index, message in enumerate(messages):
        where = f"messages[{index}]"
        role, content = message.get("role"), message.get("content")
        if role not in ("user", "assistant", "system"):
            raise bad_request(f"{where}.role: must be user or assistant, not {role!r:.40}", "messages")
        if isinstance(content, str):
            found.append({"role": role, "content": content})
        elif not isinstance(content, list):
            raise bad_request(f"{where}.content: must be a string or a list of blocks", "messages")
        elif role == "assistant":
            found.append(_of_assistant(where, content))
        elif role == "system":
            found.append({"role": role, "content": _text(where, content)})
        else:
            found += _of_user(where, content)
    return found


def _of_user(where: str, blocks: Sequence[object]) -> list[Message]:
    """A user's turn: the results of tools are messages of their own, in their place."""
    found: list[Message] = []
    texts: list[str] = []
    for block in blocks:
        match block:
            case {"type": "text", "text": str(text)}:
                texts.append(text)
            case {"type": "tool_result", "tool_use_id": str(called), **rest}:
                if texts:
                    found.append({"role": "user", "content": "\n".join(texts)})
                    texts = []
                result = _text(where, rest.get("content") or "")
                if rest.get("is_error"):
                    result = f"Error: {result}"
                found.append({"role": "tool", "tool_call_id": called, "content": result})
            case _:
                raise _unsupported(where, block)
    if texts or not found:
        found.append({"role": "user", "content": "\n".join(texts)})
    return found


def _of_assistant(where: str, blocks: Sequence[object]) -> Message:
    """A turn of the model's: its thinking, its text, and the tools it called."""
    texts: list[str] = []
    thoughts: list[str] = []
    calls: list[Json] = []
    for block in blocks:
        match block:
            case {"type": "text", "text": str(text)}:
                texts.append(text)
            case {"type": "thinking", "thinking": str(thought)}:
                thoughts.append(thought)
            case {"type": "tool_use", "id": str(called), "name": str(name), "input": dict(given)}:
                calls.append({"id": called, "type": "function",
                              "function": {"name": name, "arguments": to_json(given).decode()}})
            case _:
                raise _unsupported(where, block)
    message: Message = {"role": "assistant", "content": "\n".join(texts)}
    if thoughts:
        message["reasoning_content"] = "\n".join(thoughts)
    if calls:
        message["tool_calls"] = calls
    return message


def _text(where: str, content: object, param: str = "messages") -> str:
    """The text of a content that may hold nothing else."""
    if isinstance(content, str):
        return content
    texts = []
    for block in content if isinstance(content, list) else [content]:
        match block:
            case {"type": "text", "text": str(text)}:
                texts.append(text)
            case _:
                raise _unsupported(where, block, param)
    return "\n".join(texts)


def _unsupported(where: str, block: object, param: str = "messages") -> Exception:
    kind = block.get("type") if isinstance(block, Mapping) else None
    if isinstance(kind, str) and kind in MEDIA:
        return bad_request(f"{where}.content: the model takes text only; a block of type {kind} holds {MEDIA[kind]}",
                           param, "unsupported_content")
    if kind in ("text", "thinking", "tool_use", "tool_result"):
        return bad_request(f"{where}.content: a block of type {kind} lacks a field, or has one of another type", param)
    return bad_request(f"{where}.content: a block of type {kind!r:.60} is not supported", param, "unsupported_content")
