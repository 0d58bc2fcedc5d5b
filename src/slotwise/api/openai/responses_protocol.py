"""Bodies of `/v1/responses`: OpenAI's fields, and what they are as a chat.

Types are strict.  A known field is obeyed, accepted where it changes nothing, or refused by name, as in
`api/protocol/protocol.py`; of input items the model takes texts, function calls and their outputs, and its own
reasoning.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal

import msgspec

from slotwise.api.http.api_errors import bad_request
from slotwise.api.protocol.protocol import (
    CacheRetention,
    ChatRequest,
    Effort,
    GenerationFields,
    Hint,
    OneOrMore,
    Seed,
    Temperature,
    TopK,
    TopP,
    User,
)
from slotwise.api.protocol.unsupported import refuse, refuse_others
from slotwise.text.conversation import MAX_MESSAGES, OTHER_MEDIA, Message

Json = dict[str, Any]
ROLES = ("user", "assistant", "system", "developer")
TEXTS = ("input_text", "output_text", "text", "reasoning_text", "summary_text")  # kinds of parts


Included = Literal["reasoning.encrypted_content", "file_search_call.results", "web_search_call.results",
                   "web_search_call.action.sources", "message.input_image.image_url",
                   "computer_call_output.output.image_url", "code_interpreter_call.outputs"]
FUNCTION = ("type", "name", "description", "parameters", "strict")  # keys of a tool
NEUTRAL_OF_TOOL = {"defer_loading": (False,), "allowed_callers": ([], ["direct"]), "async": (False,)}


class ReasoningConfig(msgspec.Struct):
    effort: Effort | None = None  # the template's `reasoning_effort`
    summary: Literal["auto"] | None = None  # changes nothing: reasoning is returned as it is
    generate_summary: Any = None


class TextConfig(msgspec.Struct):
    format: dict[str, Any] | None = None  # `text`, `json_object`, or `json_schema` with `name` and `schema`
    verbosity: Any = None


class ResponseStreamOptions(msgspec.Struct):
    include_obfuscation: Literal[False] | None = None


class ResponsesRequest(GenerationFields, kw_only=True):
    input: str | list[dict[str, Any]]  # a user's text, or items: messages, function calls and their outputs, reasoning
    instructions: str | None = None  # the system message; that of an earlier response does not hold
    previous_response_id: str | None = None  # the input continues the conversation of this stored response
    store: bool | None = None  # whether the response can be continued and fetched later; by default it can
    stream_options: ResponseStreamOptions | None = None  # changes nothing
    max_output_tokens: OneOrMore | None = None  # most output tokens, reasoning included; None: what fits
    temperature: Temperature | None = None  # divides the logits; by default the model's own
    top_p: TopP | None = None  # keep the smallest set of tokens whose probabilities sum to this; 0: one token
    tools: list[dict[str, Any]] | None = None  # `function` tools: `name`, `description` and `parameters` of each
    tool_choice: str | dict[str, Any] | None = None  # `auto`, `none`, `required`, or a function to call
    parallel_tool_calls: bool | None = None  # false: the response has one call at most
    reasoning: ReasoningConfig | None = None  # `effort`, the template's `reasoning_effort`
    text: TextConfig | None = None  # `format` of the answer
    metadata: dict[str, str] | None = None  # stands in the response, and changes nothing else
    user: User | None = None  # the tenant, where the server has no keys
    safety_identifier: Hint | None = None  # changes nothing
    prompt_cache_key: Hint | None = None  # names its session
    prompt_cache_retention: CacheRetention | None = None  # a hint of how long its prompt stays cached
    top_k: TopK | None = None  # keep the k most probable tokens
    seed: Seed | None = None  # the same seed gives the same answer
    chat_template_kwargs: dict[str, Any] | None = None  # further variables of the template
    background: Any = None  # not supported
    context_management: Any = None  # not supported
    conversation: Any = None  # not supported: previous_response_id continues a response
    include: list[Included] | None = None  # changes nothing: reasoning is returned as text, and no tool is hosted here
    max_tool_calls: OneOrMore | None = None  # changes nothing: it bounds calls of hosted tools
    moderation: Any = None  # not supported
    prompt: Any = None  # not supported
    prompt_cache_options: Any = None  # not supported
    top_logprobs: Any = None  # not supported
    truncation: Any = None  # not supported: an input that is too long is refused

    @property
    def stores(self) -> bool:
        return self.store is not False

    def check(self) -> None:
        """Raises ApiError for an unsupported field."""
        refuse(self)
        if self.text is not None:
            _refuse_within("text", self.text)
        if self.reasoning is not None:
            _refuse_within("reasoning", self.reasoning)

    def as_chat(self, before: Sequence[Message]) -> ChatRequest:
        """The same conversation as a chat.

        Args:
            before: messages of the response that it continues.

        Raises:
            ApiError: an item or a field is not valid, or not supported.
        """
        system = [{"role": "system", "content": self.instructions}] if self.instructions else []
        chat = ChatRequest(messages=[*system, *before, *messages_of(self.input)], max_tokens=self.max_output_tokens)
        for name in (*GenerationFields.__struct_fields__, "temperature", "top_p", "user", "top_k", "seed",
                     "chat_template_kwargs", "parallel_tool_calls", "prompt_cache_key", "prompt_cache_retention"):
            setattr(chat, name, getattr(self, name))
        chat.reasoning_effort = self.reasoning.effort if self.reasoning else None
        chat.tools = [_tool(f"tools[{index}]", tool) for index, tool in enumerate(self.tools or ())] or None
        chat.tool_choice = _tool_choice(self.tool_choice)
        if self.text is not None and self.text.format is not None:
            chat.response_format = _response_format(self.text.format)
        return chat


def _refuse_within(name: str, section: msgspec.Struct) -> None:
    try:
        refuse(section)
    except Exception as error:
        raise bad_request(f"{name}.{error}", name, "unsupported_parameter") from error


def _tool(where: str, tool: Json) -> Json:
    """A tool as chats have it; its values are checked there."""
    if tool.get("type") != "function":
        return tool
    refuse_others(tool, where, "tools", FUNCTION, NEUTRAL_OF_TOOL)
    function = {name: tool[name] for name in FUNCTION[1:] if tool.get(name) is not None}
    return {"type": "function", "function": function}


def _tool_choice(choice: str | Json | None) -> str | Json | None:
    if isinstance(choice, dict) and choice.get("type") == "function":
        refuse_others(choice, "tool_choice", "tool_choice", ("type", "name"))
        return {"type": "function", "function": {"name": choice.get("name")}}
    return choice


def _response_format(form: Json) -> Json:
    if form.get("type") != "json_schema":
        return form
    schema = {name: value for name, value in form.items() if name != "type" and value is not None}
    return {"type": "json_schema", "json_schema": schema}


# -- items ---------------------------------------------------------------------------------------------------------


def messages_of(given: str | Sequence[Json]) -> list[Message]:
    """Items as the messages of a chat: neighbors of one turn of the model's are one message.

    Raises:
        ApiError: an item of another kind or shape.
    """
    if isinstance(given, str):
        return [{"role": "user", "content": given}]
    if not given or len(given) > MAX_MESSAGES:
        raise bad_request(f"input: must hold 1 to {MAX_MESSAGES} items", "input")
    found: list[Message] = []
    turn: Message | None = None  # of the model's, that the next item may continue
    for index, item in enumerate(given):
        where = f"input[{index}]"
        kind = item.get("type") or "message"
        if kind == "function_call_output":
            turn = None
            found.append(_output(where, item))
        elif kind == "message" and item.get("role") != "assistant":
            turn = None
            found.append(_message(where, item))
        else:
            if turn is None or (kind in ("message", "reasoning") and (turn["content"] or "tool_calls" in turn)):
                turn = {"role": "assistant", "content": ""}
                found.append(turn)
            _continue_turn(turn, where, kind, item)
    return found


def _message(where: str, item: Json) -> Message:
    role = item.get("role")
    if role not in ROLES:
        raise bad_request(f"{where}.role: must be user, assistant, system or developer, not {role!r:.40}", "input")
    return {"role": role, "content": _text(f"{where}.content", item.get("content"))}


def _output(where: str, item: Json) -> Message:
    if not isinstance(called := item.get("call_id"), str):
        raise bad_request(f"{where}.call_id: must be a string", "input")
    return {"role": "tool", "tool_call_id": called, "content": _text(f"{where}.output", item.get("output"))}


def _continue_turn(turn: Message, where: str, kind: str, item: Json) -> None:
    """Add what the model said, thought or called to its turn."""
    match kind, item:
        case "message", _:
            turn["content"] = _text(f"{where}.content", item.get("content"))
        case "reasoning", _:
            texts = _text(f"{where}.content", item.get("content") or item.get("summary") or [])
            if texts:
                turn["reasoning_content"] = "\n".join([*filter(None, [turn.get("reasoning_content")]), texts])
        case "function_call", {"call_id": str(called), "name": str(name), "arguments": str(arguments)}:
            turn.setdefault("tool_calls", []).append(
                {"id": called, "type": "function", "function": {"name": name, "arguments": arguments}})
        case "function_call", _:
            raise bad_request(f"{where}: a function_call has call_id, name and arguments, each a string", "input")
        case _:
            raise bad_request(f"{where}: an item of type {kind!r:.60} is not supported", "input", "unsupported_content")


def _text(where: str, content: object) -> str:
    """The text of a content that may hold nothing else."""
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise bad_request(f"{where}: must be a string or a list of parts", "input")
    texts = []
    for part in content:
        match part:
            case {"type": kind, "text": str(text)} if kind in TEXTS:
                texts.append(text)
            case {"type": "refusal", "refusal": str(text)}:
                texts.append(text)
            case _:
                kind = part.get("type") if isinstance(part, Mapping) else None
                holds = OTHER_MEDIA.get(kind) if isinstance(kind, str) else None
                told = (f"the model takes text only; a part of type {kind} holds {holds}" if holds
                        else f"a part of type {kind!r:.60} is not supported")
                raise bad_request(f"{where}: {told}", "input", "unsupported_content")
    return "\n".join(texts)
