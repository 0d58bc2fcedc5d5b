"""Runs the mixed trace through this engine: all requests at once, random lengths, greedy, no early end."""

from __future__ import annotations

import time
from collections.abc import Iterator

from benchmarks.gpu.figures import tell
from benchmarks.gpu.setup import Setup, asked, load

from slotwise.core.params import SamplingSpec
from slotwise.core.request import RequestSpec
from slotwise.engine.engine import Engine
from slotwise.engine.messages import Add
from slotwise.measure.workload.distributions import parse_lengths
from slotwise.measure.workload.workloads import Recipe, Workload, generate


def workload(setup: Setup) -> Workload:
    """Returns the workload, the same for every engine."""
    inputs, outputs = map(parse_lengths, setup.trace)
    return generate(Recipe(setup.num_requests, inputs, outputs))


def requests(setup: Setup) -> Iterator[tuple[list[int], int]]:
    """Yields the token ids of each prompt, and the length of its output."""
    trace = workload(setup)
    for request in trace.requests:
        yield trace.prompt_ids(request, setup.model.vocab_size), request.num_output


def main() -> None:
    setup = asked(__doc__)
    engine, _ = load(setup).engine(setup.engine_config())
    trace = list(requests(setup))
    run(engine, "warm", trace)
    seconds, tokens, steps = run(engine, "timed", trace)
    tell(trace={
        "requests": len(trace), "prompt_tokens": sum(len(prompt) for prompt, _ in trace), "output_tokens": tokens,
        "seconds": seconds, "steps": steps, "output_tokens_per_second": tokens / seconds})


def run(engine: Engine, name: str, trace: list[tuple[list[int], int]]) -> tuple[float, int, int]:
    """Returns seconds, output tokens and steps.

    Raises:
        RuntimeError: a request failed, or ended with too few tokens.
    """
    started, tokens, steps = time.perf_counter(), 0, 0
    for number, (prompt, num_output) in enumerate(trace):
        params = SamplingSpec(temperature=0.0, max_tokens=num_output, ignore_eos=True)
        engine.handle(Add(number, RequestSpec(prompt, params, number), name=f"{name}-{number}"))
    while engine.has_work:
        record = engine.step()
        steps += 1
        tokens += sum(map(len, record.tokens))
        for end in record.ended:
            if end.message or record.outcome.failure:
                raise RuntimeError(end.message or record.outcome.failure)
    seconds = time.perf_counter() - started
    if tokens != sum(num_output for _, num_output in trace):
        raise RuntimeError(f"{tokens} tokens came of a trace of {sum(num_output for _, num_output in trace)}")
    return seconds, tokens, steps


if __name__ == "__main__":
    main()
