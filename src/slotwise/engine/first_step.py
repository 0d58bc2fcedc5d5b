"""Checks at start that the engine computes valid probabilities, with real steps on the real executor.

A damaged kernel, weights that overflow or a failing device stop the start here.  The row uses the first slot and the
first block, before there is any request, and releases both.
"""

from __future__ import annotations

from slotwise.batching.continuous import Chunked
from slotwise.core.limits import SchedulerLimits
from slotwise.core.params import SamplingParams
from slotwise.core.scheduler import Scheduler
from slotwise.engine.engine import Clock, Engine
from slotwise.engine.executor import Executor
from slotwise.engine.messages import Add
from slotwise.errors import OneLineError
from slotwise.policies.fcfs import FirstComeFirstServed

PROMPT = 16  # tokens, at most
ANY_TOKEN = 0
KINDS = (  # the two paths through a sampler; the second token comes from a decode step
    SamplingParams(temperature=0.0, max_tokens=2, ignore_eos=True),
    SamplingParams(temperature=1.0, max_tokens=1, logprobs=1, ignore_eos=True))
OVERFLOW = ("its logits are NaN or infinite: a kernel computes wrongly, or the model's numbers are too large for its "
            "type; try --dtype float32")


class FirstStepError(OneLineError, RuntimeError):
    """The engine cannot compute; the message says why."""


def check(executor: Executor, limits: SchedulerLimits, clock: Clock) -> None:
    """Runs a prompt and decode steps, greedy and sampled, on an executor that serves no request yet.

    Raises:
        FirstStepError: a step failed, or its logits were not finite.
    """
    longest = min(limits.block_size + 1, limits.max_model_len)
    if longest < 2:  # then no request can run
        return
    prompt = max(1, min(PROMPT, longest - 2))
    alone = SchedulerLimits(
        max_model_len=longest, num_blocks=1, block_size=limits.block_size, max_num_seqs=1,
        max_num_batched_tokens=prompt)
    engine = Engine(Scheduler(alone, Chunked(), FirstComeFirstServed()), executor, clock)
    for number, params in enumerate(KINDS):
        engine.handle(Add(f"first-{number}", [ANY_TOKEN] * prompt, params, seed=0))
        _run(engine)


def _run(engine: Engine) -> None:
    tokens = 0
    while engine.has_work:
        try:
            record = engine.step()
        except Exception as error:
            raise _failed(f"{type(error).__name__}: {error}") from error
        if record.failure or record.failed:
            raise _failed(record.failure or OVERFLOW)
        tokens += sum(map(len, record.token_ids))
    if not tokens:
        raise _failed("it yielded no token")
    engine.step()  # its plan releases the slot


def _failed(why: str) -> FirstStepError:
    return FirstStepError(f"the first step failed: {why}")
