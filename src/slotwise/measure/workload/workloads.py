"""A workload: requests with prompt lengths, output lengths and arrival times, drawn from a recipe or read from a file.

    Recipe ──generate(seed)──► Workload ──save_workload──► JSON lines ──load_workload──► the same Workload
    Trace ───replay(seed)────►    │
                                  └──prompt_ids──► token ids, the same on every machine

Every request has the `max_tokens` of its workload, as clients send it; only the workload holds actual output lengths.
Where requests are conversations (`chats.py`), the model ends its answers, and `num_output` is only their upper bound.
The file has a header and one line for each request: any run can be repeated from its file.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import Any, TextIO

from slotwise.measure.workload.distributions import (
    MAX_LENGTH,
    NO_GROUP,
    Arrivals,
    AtOnce,
    LengthDistribution,
    Prefixes,
    below,
    require_within,
    stream,
)
from slotwise.platform.files import write_output

MAX_REQUESTS = 1_000_000
MAX_SECONDS = 10**9
FIRST_PLAIN_ID = 10  # smaller ids are often special tokens that begin, end or pad
NO_PREFIX = Prefixes()
VERSION = 1
Conversation = tuple[tuple[str, str], ...]  # pairs of a role and its words
MAX_LINE = 65_536  # characters


@dataclass(frozen=True, slots=True)
class WorkRequest:
    """One request.  Raises ValueError for numbers that contradict each other."""

    number: int  # 0, 1, 2, ...
    arrives_at: float | None  # seconds from the start; None in a closed loop
    num_prompt: int  # tokens, the shared prefix included
    num_output: int  # tokens after which it ends, at most `max_tokens`
    prefix: int = NO_GROUP  # the group whose prefix it shares; -1: none
    num_prefix: int = 0  # tokens of that prefix

    def __post_init__(self) -> None:
        if self.arrives_at is not None:
            require_within("arrives_at", self.arrives_at, 0, MAX_SECONDS)
        require_within("num_prompt", self.num_prompt, 1, 2 * MAX_LENGTH)
        require_within("num_output", self.num_output, 1, MAX_LENGTH)
        require_within("num_prefix", self.num_prefix, 0, self.num_prompt)
        if self.prefix < NO_GROUP or (self.prefix == NO_GROUP) != (self.num_prefix == 0):
            raise ValueError(f"a prefix of {self.num_prefix} tokens cannot belong to group {self.prefix}")


@dataclass(frozen=True, slots=True)
class Workload:
    """Requests in order of arrival.

    Raises:
        ValueError: requests not numbered 0, 1, 2, ..., out of order, longer than `max_tokens`, none, or too many.
    """

    requests: tuple[WorkRequest, ...]
    max_tokens: int  # of every request
    users: int = 0  # of a closed loop; 0: an open loop
    seed: int = 0  # of the prompts' tokens
    description: dict[str, str] = field(default_factory=dict)  # its settings, for reports
    conversations: tuple[Conversation, ...] = ()  # of each request; empty: prompts are random ids
    prompts: tuple[tuple[int, ...], ...] = ()  # token ids of the conversations, once a tokenizer has counted them

    def __post_init__(self) -> None:
        require_within("the number of requests", len(self.requests), 1, MAX_REQUESTS)
        require_within("max_tokens", self.max_tokens, 1, MAX_LENGTH)
        last = 0.0
        for number, request in enumerate(self.requests):
            objection = self._objection(request, number, last)
            if objection:
                raise ValueError(f"request {number}: {objection}")
            last = request.arrives_at or 0.0

    def _objection(self, request: WorkRequest, number: int, last: float) -> str:
        """Why `request` cannot follow one that arrived at `last`; empty if it can."""
        if request.number != number:
            return f"is numbered {request.number}"
        if request.num_output > self.max_tokens:
            return f"{request.num_output} output tokens exceed the workload's max_tokens of {self.max_tokens}"
        if (request.arrives_at is None) != (self.users > 0):
            return "a closed loop has no times of arrival, and an open one needs them"
        if request.arrives_at is not None and request.arrives_at < last:
            return f"arrives at {request.arrives_at}, before the one ahead of it"
        return ""

    @property
    def ends_by_itself(self) -> bool:
        """True where the model ends its answers: `num_output` is an upper bound."""
        return bool(self.conversations)

    def with_prompts(self, prompts: Sequence[tuple[int, ...]]) -> Workload:
        """Returns the workload with the token ids of its conversations, and their lengths."""
        requests = tuple(replace(request, num_prompt=len(prompt))
                         for request, prompt in zip(self.requests, prompts, strict=True))
        return replace(self, requests=requests, prompts=tuple(prompts))

    @property
    def prompt_tokens(self) -> int:
        return sum(request.num_prompt for request in self.requests)

    @property
    def output_tokens(self) -> int:
        return sum(request.num_output for request in self.requests)

    def prompt_ids(self, request: WorkRequest, vocab_size: int) -> list[int]:
        """Returns the token ids of a request's prompt; random ones of one group share a prefix.

        Raises:
            ValueError: the vocabulary has no tokens, or conversations have not been tokenized.
        """
        if self.conversations:
            if not self.prompts:
                raise ValueError("conversations have no token ids before a tokenizer has read them")
            return list(self.prompts[request.number])
        if vocab_size < 1:
            raise ValueError(f"a vocabulary has at least 1 token, not {vocab_size}")
        shared = self._ids(f"prefix {request.prefix}", request.num_prefix, vocab_size)
        return shared + self._ids(f"prompt {request.number}", request.num_prompt - request.num_prefix, vocab_size)

    def _ids(self, purpose: str, count: int, vocab_size: int) -> list[int]:
        rng = stream(self.seed, purpose)
        first = min(FIRST_PLAIN_ID, vocab_size - 1)
        return [first + below(rng, vocab_size - first) for _ in range(count)]


def as_workload(asked: Sequence[tuple[float, int, int]]) -> Workload:
    """Returns requests of the given (seconds of arrival, prompt tokens, output tokens)."""
    requests = tuple(WorkRequest(number, *one) for number, one in enumerate(asked))
    return Workload(requests, max(request.num_output for request in requests))


@dataclass(frozen=True, slots=True)
class Recipe:
    """The distributions of a workload.  Raises ValueError for a number out of range."""

    num_requests: int
    inputs: LengthDistribution
    outputs: LengthDistribution
    arrivals: Arrivals = field(default_factory=AtOnce)
    prefixes: Prefixes = NO_PREFIX
    max_tokens: int = 0  # of every request, and its longest output; 0: the longest that can be drawn

    def __post_init__(self) -> None:
        require_within("the number of requests", self.num_requests, 1, MAX_REQUESTS)
        require_within("max_tokens", self.max_tokens, 0, MAX_LENGTH)

    @property
    def description(self) -> dict[str, str]:
        return {
            "input_lengths": str(self.inputs), "output_lengths": str(self.outputs), "arrivals": str(self.arrivals),
        } | ({"prefix": str(self.prefixes)} if self.prefixes.groups else {})


def generate(recipe: Recipe, seed: int = 0) -> Workload:
    """Draws a workload.  Prompts, outputs, arrivals and prefixes have independent random streams."""
    inputs, outputs = stream(seed, "inputs"), stream(seed, "outputs")
    lengths = [
        (recipe.inputs.draw(inputs), recipe.outputs.draw(outputs)) for _ in range(recipe.num_requests)]
    times = recipe.arrivals.times(stream(seed, "arrivals"), recipe.num_requests)
    max_tokens = recipe.max_tokens or recipe.outputs.longest
    return Workload(
        requests_of(lengths, times, max_tokens, recipe.prefixes, seed), max_tokens, recipe.arrivals.users, seed,
        recipe.description)


def requests_of(
    lengths: Sequence[tuple[int, int]], times: Sequence[float], max_tokens: int, prefixes: Prefixes, seed: int,
) -> tuple[WorkRequest, ...]:
    """Returns requests of the given (prompt, output) tokens, outputs clipped at `max_tokens`, prefixes from `seed`.

    Args:
        times: seconds; empty for a closed loop.
    """
    groups = stream(seed, "groups")
    return tuple(
        WorkRequest(
            number, times[number] if times else None, prefixes.tokens + num_prompt, min(num_output, max_tokens),
            prefixes.draw(groups), prefixes.tokens)
        for number, (num_prompt, num_output) in enumerate(lengths))


# -- files -------------------------------------------------------------------------------------------------------------

HEADER: dict[str, type | tuple[type, ...]] = {
    "slotwise_workload": int, "num_requests": int, "max_tokens": int, "users": int, "seed": int, "description": dict}
REQUEST: dict[str, type | tuple[type, ...]] = {
    field.name: (int, float, type(None)) if field.name == "arrives_at" else int for field in fields(WorkRequest)}


def save_workload(workload: Workload, path: Path | str) -> None:
    """Writes a workload of random prompts; raises OSError when the file cannot be written."""
    header = {
        "slotwise_workload": VERSION, "num_requests": len(workload.requests), "max_tokens": workload.max_tokens,
        "users": workload.users, "seed": workload.seed, "description": workload.description}
    lines = (header, *map(asdict, workload.requests))
    write_output(path, "".join([json.dumps(line, allow_nan=False) + "\n" for line in lines]).encode())


def load_workload(path: Path | str) -> Workload:
    """Returns a saved workload.

    Raises:
        OSError: the file cannot be read.
        ValueError: the file is not a workload; the message names the line.
    """
    with Path(path).open(encoding="utf-8", errors="replace") as file:
        requests: list[WorkRequest] = []
        header: dict[str, Any] = {}
        try:
            header = _header(file)
            while len(requests) < header["num_requests"]:
                requests.append(WorkRequest(**_object(file, REQUEST)))
            if file.readline(1):
                raise ValueError(f"more lines than the {len(requests)} requests of the header")
        except ValueError as error:
            line = len(requests) + (2 if header else 1)
            raise ValueError(f"{path}, line {line}: {error}") from None
    try:
        return Workload(
            tuple(requests), header["max_tokens"], header["users"], header["seed"], header["description"])
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from None


def _header(file: TextIO) -> dict[str, Any]:
    header = _object(file, HEADER)
    if header["slotwise_workload"] != VERSION:
        raise ValueError(f"a workload of version {header['slotwise_workload']}; this Slotwise reads {VERSION}")
    require_within("num_requests", header["num_requests"], 1, MAX_REQUESTS)
    require_within("users", header["users"], 0, MAX_REQUESTS)
    if not all(isinstance(text, str) for text in header["description"].values()):
        raise ValueError("description must hold texts")
    return header


def _object(file: TextIO, shape: Mapping[str, type | tuple[type, ...]]) -> dict[str, Any]:
    """Returns the next line, which must be an object with exactly these keys."""
    line = file.readline(MAX_LINE + 1)
    if not line:
        raise ValueError("the file ends here, too early")
    if len(line) > MAX_LINE:
        raise ValueError(f"longer than {MAX_LINE} characters")
    try:
        found = json.loads(line)
    except (ValueError, RecursionError):
        raise ValueError("not valid JSON") from None
    if not isinstance(found, dict) or found.keys() != shape.keys():
        raise ValueError(f"must be an object of {', '.join(shape)}")
    for name, kinds in shape.items():
        if isinstance(found[name], bool) or not isinstance(found[name], kinds):
            raise ValueError(f"{name} has the wrong type")
    return found
