"""A conversation before it is rendered: its messages are checked, and its last one may be left open.

An open message ends where its text ends, whatever the template writes behind: a marker follows the text, and the
rendered prompt is cut at the marker.

    messages    ... {"role": "assistant", "content": "The answer is" + marker}
    rendered    ... <|assistant|>The answer is MARKER<|end|>
    prompt      ... <|assistant|>The answer is
"""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from typing import Any

MAX_MESSAGES = 4096
RESERVED_VARIABLES = ("messages", "tools", "documents", "add_generation_prompt", "continue_final_message",
                      "chat_template")  # of a chat template: fields and arguments set them
OTHER_MEDIA = {  # kinds of parts, by what they hold
    "image_url": "images", "input_image": "images", "image": "images", "image_pil": "images", "image_embeds": "images",
    "audio_url": "audio", "input_audio": "audio", "audio": "audio", "video_url": "video", "video": "video",
    "file": "files", "input_file": "files"}
EMPTY: tuple[Any, ...] = (None, "", [])  # values of a message's field that say as much as its absence
# Of a message, in addition to its content.
TEXT_FIELDS = ("name", "refusal", "reasoning_content", "reasoning", "tool_call_id")

Message = dict[str, Any]


class InvalidMessages(ValueError):
    """Messages of the wrong shape.  `param` names the field or argument, `code` is for machines."""

    def __init__(self, message: str, param: str, code: str | None = None) -> None:
        super().__init__(message)
        self.param = param
        self.code = code


class OpenEnd:
    """Leaves the last of checked messages open.  Raises InvalidMessages when it has no content."""

    def __init__(self, messages: Sequence[Message]) -> None:
        self._marker = f"OPEN{secrets.token_hex(16)}END"
        content = messages[-1].get("content")
        if isinstance(content, list) and content:
            content = [*content[:-1], {"type": "text", "text": text_of(content[-1]) + self._marker}]
        elif isinstance(content, str):
            content += self._marker
        else:
            raise InvalidMessages("continue_final_message: the last message has no content", "continue_final_message")
        self.messages = [*messages[:-1], messages[-1] | {"content": content}]

    def cut(self, rendered: str) -> str:
        """The prompt up to the end of the last message.  Raises InvalidMessages when its text is not in `rendered`."""
        prompt, marker, _ = rendered.rpartition(self._marker)
        if not marker:
            raise InvalidMessages("continue_final_message: the chat template leaves out the last message",
                                  "continue_final_message")
        return prompt.replace(self._marker, "")


def check_messages(messages: list[Message]) -> None:
    """Raises InvalidMessages for messages of the wrong shape."""
    if not messages or len(messages) > MAX_MESSAGES:
        raise InvalidMessages(f"messages: must hold 1 to {MAX_MESSAGES} messages", "messages")
    for index, message in enumerate(messages):
        _check_message(f"messages[{index}]", message)


def _check_message(where: str, message: Message) -> None:
    if not isinstance(message.get("role"), str):
        raise InvalidMessages(f"{where}.role: must be a string", "messages")
    if message.get("audio") not in EMPTY:  # OpenAI's reference to an earlier answer in audio
        raise InvalidMessages(f"{where}.audio: the model takes text only", "messages", "unsupported_content")
    if message.get("function_call") not in EMPTY:
        raise InvalidMessages(f"{where}.function_call: is not supported; send tool_calls", "messages",
                              "unsupported_parameter")
    for name in TEXT_FIELDS:
        if message.get(name) not in EMPTY and not isinstance(message[name], str):
            raise InvalidMessages(f"{where}.{name}: must be a string", "messages")
    _check_calls(f"{where}.tool_calls", message)
    content = message.get("content")
    if content is None or isinstance(content, str):
        return
    if not isinstance(content, list):
        raise InvalidMessages(f"{where}.content: must be a string or a list of parts", "messages")
    for part in content:
        _check_part(where, part, *["refusal"] * (message["role"] == "assistant"))


def _check_calls(where: str, message: Message) -> None:
    calls = message.get("tool_calls")
    if calls in EMPTY:
        return
    if message["role"] != "assistant":
        raise InvalidMessages(f"{where}: only a message of the assistant has calls", "messages")
    if not isinstance(calls, list):
        raise InvalidMessages(f"{where}: must be a list of calls", "messages")
    for index, call in enumerate(calls):
        function = call.get("function") if isinstance(call, dict) else None
        if not isinstance(function, dict) or not isinstance(function.get("name"), str):
            raise InvalidMessages(f'{where}[{index}]: must be {{"type": "function", "id", "function": {{"name", '
                                  '"arguments"}}', "messages")
        if not isinstance(call.get("id"), str | None):
            raise InvalidMessages(f"{where}[{index}].id: must be a string", "messages")


def text_of(part: dict[str, Any]) -> str:
    """The text of a checked part: one of type `refusal` is what the assistant said instead."""
    text: str = part[part["type"]]
    return text


def _check_part(where: str, part: object, *more: str) -> None:
    """Args: more: types of texts in addition to `text`."""
    if isinstance(part, dict) and (kind := part.get("type")) in ("text", *more) and isinstance(part.get(kind), str):
        return
    kind = part.get("type") if isinstance(part, dict) else None
    if isinstance(kind, str) and kind in OTHER_MEDIA:
        raise InvalidMessages(f"{where}.content: the model takes text only; a part of type {kind} holds "
                              f"{OTHER_MEDIA[kind]}", "messages", "unsupported_content")
    raise InvalidMessages(f"{where}.content: only parts of type text are supported", "messages")
