"""Error responses in OpenAI's shape."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from http import HTTPStatus
from typing import NamedTuple

import msgspec

from slotwise.api.http.turns import QueueFull
from slotwise.core.params import InvalidParams
from slotwise.engine.refusals import DRAINING, DUPLICATE_ID, Refused
from slotwise.text.chat_source import ChatTemplateError
from slotwise.text.tokenizer import TokenizerError

TRY_LATER = (HTTPStatus.TOO_MANY_REQUESTS, HTTPStatus.SERVICE_UNAVAILABLE)
KINDS: dict[int, str] = {
    HTTPStatus.UNAUTHORIZED: "authentication_error", HTTPStatus.FORBIDDEN: "permission_error",
    HTTPStatus.NOT_FOUND: "not_found_error", HTTPStatus.TOO_MANY_REQUESTS: "rate_limit_error",
    HTTPStatus.SERVICE_UNAVAILABLE: "service_unavailable_error", HTTPStatus.GATEWAY_TIMEOUT: "timeout_error"}
CONTEXT_EXCEEDED = "context_length_exceeded"  # OpenAI's code of a prompt that is too long
MODEL_NOT_FOUND = "model_not_found"  # OpenAI's code
SHED = "shed"  # code of a request that could no longer meet its objectives

_AT = re.compile(r"^(?P<what>.*) - at (?:`key` in )?`\$\.?(?P<param>[^`.\[]*)(?P<rest>[^`]*)`$", re.DOTALL)
_BYTE = re.compile(r"\(byte (\d+)\)$")
_KEY = re.compile(rb'"([A-Za-z_]\w{0,63})"\s*:')
_NOT_JSON = re.compile(rb"-?(NaN|Infinity|nan|inf)")
NEAR = 200  # bytes before an error in which to look for the name of its field
MAX_WHAT = 400  # characters of what is wrong with a value


class ErrorContent(msgspec.Struct):
    message: str
    type: str
    param: str | None
    code: str | None


class ErrorBody(msgspec.Struct):
    """OpenAI's error object."""

    error: ErrorContent


class ClientGone(Exception):
    """The client has disconnected; there is no response to send."""


class ApiError(Exception):
    """An HTTP error response.

    Args:
        status: HTTP status.
        param: the field of the request at fault, if any.
        code: a machine-readable code.
        retry_after: seconds after which a refused client may retry.
        more: additional headers.
    """

    def __init__(self, status: int, message: str, param: str | None = None, code: str | None = None,
                 retry_after: int = 1, more: tuple[tuple[bytes, bytes], ...] = ()) -> None:
        super().__init__(message)
        self.more = more
        self.status = status
        self.message = message
        self.param = param
        self.code = code
        self.retry_after = retry_after

    @property
    def kind(self) -> str:
        """OpenAI's `type`."""
        others = "invalid_request_error" if self.status < HTTPStatus.INTERNAL_SERVER_ERROR else "server_error"
        return KINDS.get(self.status, others)

    def content(self) -> ErrorContent:
        return ErrorContent(self.message, self.kind, self.param, self.code)

    def body(self) -> bytes:
        return msgspec.json.encode(ErrorBody(self.content()))

    def headers(self) -> list[tuple[bytes, bytes]]:
        if self.status in TRY_LATER:
            last = [(b"connection", b"close")] if self.code == DRAINING else []  # a retry on this connection would fail
            return [(b"retry-after", str(self.retry_after).encode()), *self.more, *last]
        if self.status == HTTPStatus.UNAUTHORIZED:
            return [(b"www-authenticate", b"Bearer"), *self.more]
        return list(self.more)


class ErrorFormat(NamedTuple):
    """How a route writes errors; each function also receives the request's id."""

    body: Callable[[ApiError, str], bytes]  # a response
    events: bytes  # the last events of a stream in progress: `%b` is that body
    of_stream: Callable[[ApiError, str], bytes] | None = None  # those events, where they are others

    def last(self, error: ApiError, request_id: str) -> bytes:
        """The last events of a stream in progress."""
        return self.events % self.body(error, request_id) if self.of_stream is None else self.of_stream(
            error, request_id)


OPENAI = ErrorFormat(lambda error, _: error.body(), b"data: %b\n\ndata: [DONE]\n\n")


def renamed(error: ApiError, fields: Mapping[str, str]) -> ApiError:
    """An error with a route's own name of the field at fault.  Args: fields: those names, by the shared ones."""
    own = fields.get(error.param or "")
    if own is None or error.param is None:
        return error
    message = error.message
    if message.startswith(error.param):
        message = own + message[len(error.param) :]
    return ApiError(error.status, message, own, error.code, error.retry_after, error.more)


def bad_request(message: str, param: str | None = None, code: str | None = None) -> ApiError:
    return ApiError(HTTPStatus.BAD_REQUEST, message, param, code)


class ContextExceeded(ApiError):
    """A prompt that, alone or with its output, exceeds the context.

    Clients read the numbers in their API's own sentence, to shorten what they send.  `message` is OpenAI's for chats
    or, where another field than `messages` holds the prompt, for completions; other routes write theirs.

    Args:
        longest: tokens that a prompt and its output may have.
        num_prompt: tokens of the prompt, or a lower bound.
        num_output: those that the request wants; 0: the prompt alone is too long.
        prompt: the field that holds the prompt.
        param: the field at fault; "": `prompt`.
        hint: a further sentence, for the operator.
    """

    def __init__(self, longest: int, num_prompt: int, num_output: int, prompt: str, param: str = "",
                 hint: str = "") -> None:
        self.longest, self.num_prompt, self.num_output = longest, num_prompt, num_output
        self.hint = f" {hint}" if hint else ""
        limit, num_tokens = f"This model's maximum context length is {longest} tokens", num_prompt + num_output
        if prompt != "messages":
            told = (f"{limit}, however you requested {num_tokens} tokens ({num_prompt} in your prompt; {num_output} "
                    "for the completion). Please reduce your prompt; or completion length.")
        elif num_prompt > longest:  # the last sentence is OpenAI's newer one, for which LangChain looks
            told = (f"{limit}. However, your messages resulted in {num_prompt} tokens. Please reduce the length of the "
                    f"messages. Input tokens exceed the configured limit of {longest} tokens.")
        else:
            told = (f"{limit}. However, you requested {num_tokens} tokens ({num_prompt} in the messages, {num_output} "
                    "in the completion). Please reduce the length of the messages or completion.")
        super().__init__(HTTPStatus.BAD_REQUEST, told + self.hint, param or prompt, CONTEXT_EXCEEDED)


def from_refusal(refused: Refused, retry_after: int = 1) -> ApiError:
    if refused.kind == DUPLICATE_ID:
        return bad_request(refused.message, "request_id", refused.kind)
    return ApiError(HTTPStatus.SERVICE_UNAVAILABLE, refused.message, code=refused.kind, retry_after=retry_after)


def from_queue_full(error: QueueFull, work: str, code: str = "tokenizer_busy") -> ApiError:
    """Args: work: the pieces of work that wait, as in "too many `work` at once"."""
    status = HTTPStatus.TOO_MANY_REQUESTS if error.of_one else HTTPStatus.SERVICE_UNAVAILABLE
    return ApiError(status, f"too many {work} at once; try again later", code=code)


def from_params(error: InvalidParams) -> ApiError:
    return bad_request(str(error), error.param)


def from_text(error: TokenizerError | ChatTemplateError, param: str) -> ApiError:
    return bad_request(str(error), param)


def from_decoding(error: Exception, body: bytes) -> ApiError:
    """The error of a body that is not JSON, or not of the expected shape: `param` names the field."""
    if not isinstance(error, msgspec.ValidationError):
        return _malformed(str(error), body)
    found = _AT.match(str(error))
    if found is None:
        return bad_request(str(error)[:MAX_WHAT])
    what = found["what"][:MAX_WHAT]  # it may repeat the value
    return bad_request(f"{found['param']}{found['rest']}: {what}", found["param"] or None)


def _malformed(message: str, body: bytes) -> ApiError:
    """Names the field that was being read, as far as a few bytes before the error show it."""
    place = _BYTE.search(message)
    at = int(place[1]) if place is not None else 0
    keys = _KEY.findall(body[max(0, at - NEAR):at])
    param = keys[-1].decode() if keys else None
    where = f", at or after {param}" if param else ""
    hint = "; NaN and Infinity are not JSON" if _NOT_JSON.match(body, at) else ""
    return bad_request(f"the body is not valid JSON: {message}{where}{hint}", param, "malformed_json")


def from_ending(reason: str, message: str) -> ApiError:
    """The error of a generation that the engine rejected or could not finish."""
    if reason == "rejected":
        return bad_request(message, code="rejected")
    if reason == "timeout":
        return ApiError(HTTPStatus.GATEWAY_TIMEOUT, message, code="timeout")
    if reason == SHED:
        return ApiError(HTTPStatus.SERVICE_UNAVAILABLE, message, code=SHED)
    return ApiError(HTTPStatus.INTERNAL_SERVER_ERROR, message or "the generation failed", code="engine_error")
