"""Sessions: requests that follow one another, with the contents of their prompts, so that a cache finds what it would.

A prompt is a list of pieces: an id and a number of tokens.  Equal ids stand for equal tokens, so prompts with equal
first pieces share a prefix.  A turn is sent `pause` seconds after the end of the turn before it: a server that answers
sooner is asked sooner.  Three kinds of traffic:

    conversations   Mooncake's trace (Qin et al., FAST '25): arrival times and a hash for each 512 tokens of a prompt
    agents          drawn from a seed: tool calls with pauses, sub-agents, and compaction of contexts that grow too long
    prefixes        drawn from a seed: groups of requests that share a system prompt
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import count
from math import exp, log
from pathlib import Path
from random import Random
from typing import NamedTuple

from slotwise.measure.workload.distributions import MAX_LENGTH, require_within, stream

HASHED = 512  # tokens of a prompt for each hash of Mooncake's traces
MAX_SESSIONS = 100_000
MAX_LINE = 1 << 20  # characters
FIRST_ID = 1000  # of a piece; smaller ids may be special tokens
AGENTS, PREFIXES = "agents", "prefixes"  # kinds that are drawn
AGENT_STARTS, PREFIX_RATE = 6, 10.0  # sessions of agents that start in a minute; requests with shared prefixes a second
OWN = 1 << 31  # ids of hashes are below this, those of other pieces above


class Piece(NamedTuple):
    content: int  # equal ones have equal tokens
    num_tokens: int


class Turn(NamedTuple):
    pause: float  # seconds since the end of the turn before; of a first turn 0
    prompt: tuple[Piece, ...]
    output: Piece

    @property
    def num_prompt(self) -> int:
        return sum([piece.num_tokens for piece in self.prompt])

    @property
    def prompt_ids(self) -> list[int]:
        return [content for content, number in self.prompt for _ in range(number)]

    @property
    def output_ids(self) -> list[int]:
        return [self.output.content] * self.output.num_tokens


class Session(NamedTuple):
    starts_at: float  # seconds
    turns: tuple[Turn, ...]
    name: str = ""  # that its requests are sent with; "": they have none


def read_mooncake(path: Path | str, seconds: float, scale: float = 1.0) -> list[Session]:
    """Returns the requests of the first `seconds` of a trace, each a session of one turn.

    Args:
        scale: factor of all token counts.

    Raises:
        OSError: the file cannot be read.
        ValueError: the file is not such a trace; the message names the line.
    """
    sessions: list[Session] = []
    with Path(path).open(encoding="utf-8", errors="replace") as file:
        for number in range(1, MAX_SESSIONS + 1):
            line = file.readline(MAX_LINE)
            if not line:
                break
            try:
                session = _conversation(json.loads(line), OWN + number, scale)
            except (ValueError, TypeError, KeyError, RecursionError) as error:
                raise ValueError(f"{path}, line {number}: not a request of a Mooncake trace ({error!r:.80})") from None
            if session.starts_at >= seconds:
                break
            sessions.append(session)
    if not sessions:
        raise ValueError(f"{path}: the trace has no requests")
    return sessions


def _conversation(row: dict[str, object], own: int, scale: float) -> Session:
    at, length, output, hashes = (row[name] for name in ("timestamp", "input_length", "output_length", "hash_ids"))
    if not (isinstance(at, int) and isinstance(length, int) and isinstance(output, int) and isinstance(hashes, list)):
        raise TypeError("a field has another type")
    require_within("input_length", length, 1, MAX_LENGTH)
    require_within("output_length", output, 0, MAX_LENGTH)
    if len(hashes) != -(-length // HASHED) or not all(isinstance(one, int) and 0 <= one < OWN for one in hashes):
        raise ValueError(f"there must be a hash for each {HASHED} tokens")
    size, left = max(1, round(HASHED * scale)), max(1, round(length * scale))
    prompt = []
    for one in hashes:
        prompt.append(Piece(FIRST_ID + one, min(size, left)))
        left -= prompt[-1].num_tokens
        if not left:
            break
    return Session(at / 1000, (Turn(0.0, tuple(prompt), Piece(own, max(1, round(output * scale)))),))


# -- drawn sessions ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Agents:
    """Coding agents.  Lengths are log-normal, by median and sigma.

    The prefix, prompts and outputs are as in public traces of Claude Code (SemiAnalysis' cc-traces of April 2026: some
    12,500 tokens of tools and 3,000 of system prompt, outputs of some 160); tools take from milliseconds to tens of
    seconds (Continuum, Li et al., arXiv 2511.02230).  Other numbers are assumed.
    """

    num_sessions: int = 60
    rate: float = AGENT_STARTS / 60  # sessions that start in a second
    prefix: int = 15_500  # tokens of tools and system prompt, equal in all sessions
    question: tuple[float, float] = (1500, 1.0)  # tokens
    output: tuple[float, float] = (160, 0.8)  # tokens
    result: tuple[float, float] = (700, 1.0)  # tokens that a tool returns
    pause: tuple[float, float] = (1.5, 1.5)  # seconds that a tool takes
    turns: float = 25  # mean, of a geometric distribution
    person: float = 0.05  # share of the pauses in which a person answers
    answer: tuple[float, float] = (60, 0.8)  # seconds that a person takes
    helper: float = 0.04  # share of the turns that start a sub-agent, and wait for it
    helper_prefix: int = 4000  # tokens
    helper_turns: float = 6
    longest: int = 60_000  # tokens of a context, beyond which it is compacted
    summary: int = 3000  # tokens that stand for a compacted context
    scale: float = 1.0  # factor of all token counts


def agents(recipe: Agents, seed: int) -> list[Session]:
    """Returns sessions of agents; equal seeds give equal ones."""
    require_within("num_sessions", recipe.num_sessions, 1, MAX_SESSIONS)
    draw, contents, at = stream(seed, "agents"), count(OWN), 0.0
    shared = Piece(next(contents), _tokens(recipe.prefix, recipe)), Piece(
        next(contents), _tokens(recipe.helper_prefix, recipe))
    sessions = []
    for number in range(recipe.num_sessions):
        turns = tuple(_turns(recipe, draw, contents, shared, recipe.turns))
        sessions.append(Session(at, turns, f"agent {number}"))
        at += draw.expovariate(recipe.rate)
    return sessions


def _turns(
    recipe: Agents, draw: Random, contents: Iterator[int], shared: tuple[Piece, ...], mean: float,
) -> Iterator[Turn]:
    """Yields the turns of an agent that begins with the first of the `shared` pieces; the next one is a sub-agent's."""
    def drawn(lengths: tuple[float, float]) -> Piece:
        return Piece(next(contents), _tokens(_lognormal(draw, lengths), recipe))

    context, pause = [shared[0], drawn(recipe.question)], 0.0
    for _ in range(1 + int(draw.expovariate(1 / mean))):
        output = drawn(recipe.output)
        yield Turn(pause, tuple(context), output)
        if shared[1:] and draw.random() < recipe.helper:
            for index, turn in enumerate(_turns(recipe, draw, contents, shared[1:], recipe.helper_turns)):
                yield turn if index else turn._replace(pause=0.01)
            pause = 0.01
        else:
            waits = recipe.answer if draw.random() < recipe.person else recipe.pause
            pause = min(600.0, 0.01 + _lognormal(draw, waits))
        context += [output, drawn(recipe.result)]
        if sum([piece.num_tokens for piece in context]) > recipe.longest * recipe.scale:
            context = [shared[0], Piece(next(contents), _tokens(recipe.summary, recipe))]


def prefixes(seed: int, num_requests: int, rate: float, groups: int = 40, prefix: int = 4000, scale: float = 1.0,
             ) -> list[Session]:
    """Returns single requests whose system prompts belong to groups, some of which are far more popular (Zipf, 1).

    Args:
        rate: requests a second, at random times.
        prefix: tokens of a system prompt.
        scale: factor of all token counts.
    """
    require_within("num_requests", num_requests, 1, MAX_SESSIONS)
    draw, contents, at, sessions = stream(seed, "prefixes"), count(OWN + groups), 0.0, []
    weights = [1 / (1 + group) for group in range(groups)]
    for _ in range(num_requests):
        group = draw.choices(range(groups), weights)[0]
        question = Piece(next(contents), max(1, round(scale * _lognormal(draw, (400, 1.0)))))
        output = Piece(next(contents), max(1, round(scale * _lognormal(draw, (150, 0.8)))))
        shared = Piece(OWN + group, max(1, round(prefix * scale)))
        sessions.append(Session(at, (Turn(0.0, (shared, question), output),)))
        at += draw.expovariate(rate)
    return sessions


def sessions_of(kind: str, minutes: float, seed: int) -> list[Session]:
    """Returns sessions that start within so many minutes: `agents`, `prefixes`, or those of a trace's file."""
    if kind == AGENTS:
        return agents(Agents(num_sessions=max(1, round(AGENT_STARTS * minutes))), seed)
    if kind == PREFIXES:
        return prefixes(seed, max(1, round(PREFIX_RATE * 60 * minutes)), PREFIX_RATE)
    return read_mooncake(kind, minutes * 60)


def _lognormal(draw: Random, lengths: tuple[float, float]) -> float:
    median, sigma = lengths
    return exp(draw.gauss(log(median), sigma))


def _tokens(number: float, recipe: Agents) -> int:
    return max(1, min(recipe.longest, round(number * recipe.scale)))
