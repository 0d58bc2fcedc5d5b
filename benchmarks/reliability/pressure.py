"""Scenarios with requests that can never fit, and with a cache that is far too small."""

from __future__ import annotations

import asyncio
import json
import random
from typing import Any

from slotwise import builtin

from . import clients, ledger
from .clients import Answer, Canary, ask
from .leaving import prompt
from .server import Metrics, Server, serving

NUM_IMPOSSIBLE = 200
NUM_POOLED = 64
POOLED_OUTPUT = 192  # tokens
SCARCITY = 20  # demand over pool size
BLOCK = 64  # tokens
F32 = 4  # bytes


# -- never fit ---------------------------------------------------------------------------------------------------


def impossible(seconds: float) -> ledger.Row:
    with serving("--dtype", "float32") as server:
        return asyncio.run(_impossible(server))


def impossible_bodies(rng: random.Random) -> list[tuple[dict[str, Any], str]]:
    """Returns requests, each with a number that its refusal must name."""
    bodies: list[tuple[dict[str, Any], str]] = []
    for number in range(NUM_IMPOSSIBLE):
        if number % 4 == 0:
            size = rng.randint(1024, 20_000)
            bodies.append(({"prompt": [7] * size, "max_tokens": 1}, str(size)))
        elif number % 4 == 1:
            asked = rng.randint(1024, 10**9)
            bodies.append(({"prompt": [7] * 10, "max_tokens": asked}, str(asked)))
        elif number % 4 == 2:
            size = rng.randint(500, 1000)
            bodies.append(({"prompt": [7] * size, "max_tokens": 1025 - size}, str(size)))
        else:
            bodies.append(({"prompt": "x = 1\n" * rng.randint(5_000, 100_000), "max_tokens": 1}, "1024"))
    return bodies


async def _impossible(server: Server) -> ledger.Row:
    bodies = impossible_bodies(random.Random(3))
    async with clients.session() as http, Canary(http, server).singing() as canary:
        answers: list[Answer] = []
        for start in range(0, len(bodies), 10):
            answers += await asyncio.gather(*(ask(http, server, body) for body, _ in bodies[start:start + 10]))
    async with clients.session() as http:
        await clients.quiet(http, server)
        status, _ = await clients.health(http, server)
        leaked = await clients.leaked(http, server)
    told = all("1024" in answer.error and named in answer.error
               for answer, (_, named) in zip(answers, bodies, strict=True))
    slowest = 1000 * max(answer.ended - answer.sent for answer in answers)
    return ledger.Row(
        f"{NUM_IMPOSSIBLE} requests of impossible size", ledger.tally(a.fate for a in [*answers, *canary.answers]),
        leaked,
        {"400 for each": all(answer.status == 400 for answer in answers), "with the numbers": told,
         "the server goes on": status == 200 and canary.unchanged},
        [f"each got 400, with the size and the limit in its message; the slowest, of up to 600 kB, took {slowest:.0f} "
         f"ms; a canary beside them gave the same tokens {len(canary.answers)} times"],
        {"slowest_ms": slowest, "example": answers[0].error, "canary": len(canary.answers)})


# -- pool --------------------------------------------------------------------------------------------------------


def block_bytes() -> int:
    """Returns the bytes of one block of the built-in model, over all layers."""
    model = json.loads((builtin.path() / "config.json").read_text())
    return 2 * model["num_hidden_layers"] * model["num_key_value_heads"] * model["head_dim"] * BLOCK * F32


def pooled_bodies() -> list[dict[str, Any]]:
    rng = random.Random(9)
    return [{"prompt": prompt(rng), "max_tokens": POOLED_OUTPUT, "temperature": 0, "ignore_eos": True}
            for _ in range(NUM_POOLED)]


def small_pool(seconds: float) -> ledger.Row:
    bodies = pooled_bodies()
    demand = sum(-(-(len(body["prompt"]) + POOLED_OUTPUT - 1) // BLOCK) for body in bodies)
    # A small cache implies a short queue; here all requests must wait.
    options = ("--dtype", "float32", "--block-size", str(BLOCK), "--max-num-queued-tokens", "100000")
    with serving(*options) as server:
        plenty, _, _ = asyncio.run(_pooled(server, bodies))
    with serving(*options, "--kv-cache-memory", str(demand // SCARCITY * block_bytes())) as server:
        answers, leaked, metrics = asyncio.run(_pooled(server, bodies))
        num_blocks = server.num_blocks
    same = sum(a.tokens == b.tokens for a, b in zip(answers, plenty, strict=True))
    again, computed = metrics["recomputed_tokens_total"], metrics["iteration_tokens_total_sum"]
    preemptions = metrics["num_preemptions_total"]
    return ledger.Row(
        f"a cache of 1/{SCARCITY} of the demand", ledger.tally(answer.fate for answer in [*plenty, *answers]), leaked,
        {"the same greedy tokens": same == len(bodies), "it was scarce": num_blocks * SCARCITY <= demand,
         "requests were preempted": preemptions > 0},
        [f"{num_blocks} blocks for {len(bodies)} requests at once that need {demand}: {same} of {len(bodies)} gave the "
         "tokens they give with a large cache (greedy, float32)",
         f"{preemptions:,.0f} preemptions, {again:,.0f} tokens computed again, {again / computed:.1%} of all computed"],
        {"num_blocks": num_blocks, "demand_blocks": demand, "same": same, "preemptions": preemptions,
         "recomputed_tokens": again, "computed_tokens": computed})


async def _pooled(server: Server, bodies: list[dict[str, Any]]) -> tuple[list[Answer], int, Metrics]:
    async with clients.session() as http:
        answers = await asyncio.gather(*(ask(http, server, body) for body in bodies))
        metrics = await Metrics.read(http, server)
        await clients.quiet(http, server)
        return answers, await clients.leaked(http, server), metrics
