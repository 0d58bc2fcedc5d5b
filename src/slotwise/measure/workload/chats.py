"""Real conversations as a workload: chat turns, code and documents, whose answers end where the model ends them.

The texts are in `chats.toml`.  Half of the requests are chat turns, a quarter are about code and a quarter about a
document; each kind is drawn from a shuffled deck, and no conversation recurs before its deck is empty.  Code and
documents come with one of several tasks behind them, so requests may share the beginning of a prompt, as real ones do.
"""

from __future__ import annotations

import tomllib
from collections.abc import Callable, Iterator, Sequence
from functools import cache
from pathlib import Path
from random import Random
from typing import NamedTuple

from slotwise.measure.workload.distributions import Arrivals, AtOnce, stream
from slotwise.measure.workload.workloads import Conversation, Workload, WorkRequest

NAME = "chats"
FILE = Path(__file__).with_name("chats.toml")
MAX_TOKENS = 256  # of an answer, unless the workload says otherwise
BYTES_PER_TOKEN = 4  # of English text, roughly: prompts have this length until a tokenizer has counted them
SPEAKERS = ("user", "assistant")
TURNS = ("chat", "code", "chat", "document")  # the kinds of successive requests


class _Decks(NamedTuple):
    """All conversations, by kind."""

    chat: tuple[Conversation, ...]
    code: tuple[Conversation, ...]
    document: tuple[Conversation, ...]


@cache
def _decks() -> _Decks:
    texts = tomllib.loads(FILE.read_text(encoding="utf-8"))
    chat = [_spoken([question]) for question in texts["questions"]]
    chat += [_spoken(one["turns"]) for one in texts["conversations"]]
    code = [_spoken([f"{task}\n\n```\n{one['text'].strip()}\n```"])
            for one in texts["code"] for task in texts["code_tasks"]]
    documents = [_spoken([f"{one['text'].strip()}\n\n{task}"])
                 for one in texts["documents"] for task in texts["document_tasks"]]
    return _Decks(tuple(chat), tuple(code), tuple(documents))


def _spoken(turns: Sequence[str]) -> Conversation:
    return tuple((SPEAKERS[number % 2], text) for number, text in enumerate(turns))


def draw(num_requests: int, seed: int) -> list[Conversation]:
    """Returns conversations in the order of requests; equal seeds give equal ones."""
    decks = {kind: _shuffled(deck, stream(seed, f"{NAME} {kind}")) for kind, deck in _decks()._asdict().items()}
    return [next(decks[TURNS[number % len(TURNS)]]) for number in range(num_requests)]


def _shuffled(deck: Sequence[Conversation], rng: Random) -> Iterator[Conversation]:
    while True:
        yield from sorted(deck, key=lambda _: rng.random())


def generate_chats(num_requests: int, arrivals: Arrivals | None = None, max_tokens: int = 0, seed: int = 0) -> Workload:
    """Returns the workload.  Prompt lengths are estimates until `in_tokens` replaces them.

    Args:
        max_tokens: of every answer; 0: `MAX_TOKENS`.
    """
    arrivals, max_tokens = arrivals or AtOnce(), max_tokens or MAX_TOKENS
    conversations = tuple(draw(num_requests, seed))
    times = arrivals.times(stream(seed, "arrivals"), num_requests)
    requests = tuple(
        WorkRequest(number, times[number] if times else None,
                    -(-sum(len(text.encode()) for _, text in one) // BYTES_PER_TOKEN), max_tokens)
        for number, one in enumerate(conversations))
    return Workload(requests, max_tokens, arrivals.users, seed, {"dataset": NAME, "arrivals": str(arrivals)},
                    conversations=conversations)


def in_tokens(workload: Workload, tokenize: Callable[[Conversation], Sequence[int]]) -> Workload:
    """Returns a workload of conversations with the token ids of its prompts, and their exact lengths."""
    return workload.with_prompts([tuple(tokenize(one)) for one in workload.conversations])
