"""Real steps before an engine says that it is ready: it has computed, and what came of it were probabilities.

A damaged kernel, weights that overflow and a device that fails show here, and the engine does not start.  The row has
the first slot and the first block, before any request is there, and gives both back.
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
KINDS = (  # the two ways through a sampler; the second token is a decode step's
    SamplingParams(temperature=0.0, max_tokens=2, ignore_eos=True),
    SamplingParams(temperature=1.0, max_tokens=1, logprobs=1, ignore_eos=True))
OVERFLOW = ("its logits are NaN or infinite: a kernel computes wrongly, or the model's numbers are too large for its "
            "type; try --dtype float32")


class FirstStepError(OneLineError, RuntimeError):
    """The engine cannot compute; the message says why."""


def check(executor: Executor, limits: SchedulerLimits, clock: Clock) -> None:
    """Runs a prompt and steps that decode, greedily and drawn, on an executor that serves no request yet.

    Raises:
        FirstStepError: a step failed, or its logits are not finite.
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
    engine.step()  # its plan says who has left


def _failed(why: str) -> FirstStepError:
    return FirstStepError(f"the first step failed: {why}")
