"""An engine on a virtual clock: times are what the cost function says, orders are the scheduler's."""

from __future__ import annotations

from dataclasses import replace

import pytest

from slotwise.core.disciplines.batching_settings import Batching
from slotwise.core.params import SamplingSpec
from slotwise.core.policies.policy_settings import Ordering
from slotwise.core.request import RequestSpec
from slotwise.core.scheduler_limits import SLO, SchedulerLimits
from slotwise.core.step_time import Work
from slotwise.engine.messages import Add
from slotwise.engine.scheduling import Scheduling
from slotwise.measure.simulate.figures import SimulatedRequest
from slotwise.measure.simulate.pace import CostPace
from slotwise.measure.simulate.simulator import NoEnd, Server, Setup, simulate

LIMITS = SchedulerLimits(max_model_len=64, num_blocks=64, block_size=4, max_num_seqs=1, max_num_batched_tokens=64)


def cost(work: Work) -> float:
    return 0.010 + 0.001 * work.tokens


def ask(name: str, at: float, prompt: int, output: int, slo: SLO | None = None) -> tuple[float, Add]:
    params = SamplingSpec(max_tokens=40, ignore_eos=True)
    return at, Add(name, RequestSpec([5] * prompt, params, slo=slo or SLO(), forced_length=output))


def scheduling(kind: str = "fcfs", **settings: object) -> Scheduling:
    return Scheduling(Batching(), Ordering(kind, **settings), max_num_seqs=1, max_num_batched_tokens=64)


def run(asks: list[tuple[float, Add]], settings: Scheduling, max_steps: int = 100_000) -> dict[str, SimulatedRequest]:
    return simulate(asks, [Server(Setup(LIMITS, settings, CostPace(cost), learns=True))], max_steps)


def test_every_token_comes_when_its_step_has_ended():
    lives = run([ask("a", 1.0, 10, 3), ask("b", 1.005, 4, 1)], scheduling())
    assert lives["a"].token_times == pytest.approx([1.020, 1.031, 1.042])
    assert lives["a"].ended == pytest.approx(1.042) and lives["a"].reason == "stop"
    assert lives["b"].token_times == pytest.approx([1.042 + 0.014])


def test_the_policy_decides_who_is_first():
    asks = [ask("long", 0.0, 4, 20), ask("later", 0.01, 4, 20, SLO(priority=5)), ask("urgent", 0.02, 4, 2)]
    lives = run(asks, scheduling("priority", preemption_gap=10))
    assert lives["long"].ended < lives["urgent"].ended < lives["later"].token_times[0]


def test_who_is_shed_has_no_tokens():
    asks = [ask("long", 0.0, 4, 40), ask("late", 0.01, 4, 2, SLO(ttft=0.1))]
    lives = run(asks, scheduling("deadline", shed_late=True))
    assert lives["late"].reason == "shed" and lives["late"].token_times == []


def test_the_same_asks_give_the_same_times():
    asks = [ask(f"r{number}", number / 100, 3 + number % 7, 1 + number % 5) for number in range(40)]
    assert run(asks, scheduling("fair")) == run(asks, scheduling("fair"))


def test_a_chunk_of_a_prompt_whose_log_probabilities_are_wanted_yields_no_token():
    params = SamplingSpec(max_tokens=3, ignore_eos=True, prompt_logprobs=0)
    few = Scheduling(Batching(), max_num_seqs=1, max_num_batched_tokens=4)
    lives = run([(0.0, Add("a", RequestSpec([5] * 10, params)))], few)
    assert len(lives["a"].token_times) == 3 and lives["a"].token_times[0] == pytest.approx(3 * 0.010 + 0.010)


def test_a_request_that_fills_a_batch_ends_the_wait_for_others():
    dynamic = Scheduling(Batching("dynamic", batch_size=2, max_wait_ms=50.0), Ordering(), max_num_seqs=2,
                         max_num_batched_tokens=64)
    limits = replace(LIMITS, max_num_seqs=2)
    asks = [ask("first", 1.0, 4, 2), ask("second", 1.01, 4, 2), ask("alone", 2.0, 4, 2)]
    lives = simulate(asks, [Server(Setup(limits, dynamic, CostPace(cost)))])
    assert lives["first"].token_times[-1] == pytest.approx(1.01 + 0.018 + 0.012)
    assert lives["alone"].token_times[-1] == pytest.approx(2.05 + 0.014 + 0.011)


def test_a_simulation_is_bounded():
    with pytest.raises(NoEnd, match="after 5 steps"):
        run([ask("a", 0.0, 4, 20)], scheduling(), max_steps=5)
