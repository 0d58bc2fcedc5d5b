"""Speculation on a virtual clock: drafts are right as often as the curve says, and steps cost what they verify."""

from __future__ import annotations

from dataclasses import replace

import pytest

from slotwise.core.disciplines.batching_settings import Batching
from slotwise.core.params import SamplingSpec
from slotwise.core.policies.policy_settings import Ordering
from slotwise.core.record import PROPOSED, StepRecord
from slotwise.core.request import RequestSpec
from slotwise.core.scheduler_limits import SchedulerLimits
from slotwise.core.step_time import Work
from slotwise.engine.messages import Add
from slotwise.engine.scheduling import Scheduling
from slotwise.measure.simulate.figures import Figures, figures
from slotwise.measure.simulate.pace import CostPace
from slotwise.measure.simulate.recorded import read_recording
from slotwise.measure.simulate.simulator import Server, Setup, simulate
from slotwise.measure.simulate.virtual_machine import SimulatedDraftModel, Verifier
from slotwise.observe.event_log import Entry, decode
from slotwise.observe.recorder import Recorder

LIMITS = SchedulerLimits(max_model_len=2048, num_blocks=400, block_size=16, max_num_seqs=4, max_num_batched_tokens=256)
CURVE = (0.8, 0.75)


def free(work: Work) -> float:
    """Steps whose drafts cost next to nothing."""
    return 0.010 + 1e-5 * work.tokens


def dear(work: Work) -> float:
    return 0.001 + 0.010 * work.tokens


class Lines:
    def __init__(self) -> None:
        self.entries: list[Entry] = []

    def write(self, line: bytes) -> None:
        self.entries.append(decode(line))


def played(setup: Setup, number: int = 4, output: int = 600) -> tuple[Figures, list[Entry]]:
    params = SamplingSpec(max_tokens=output, ignore_eos=True)
    file, recorder = Lines(), Recorder(clock=lambda: 0)
    recorder.write_to(file)
    found = simulate([(0.0, Add(one, RequestSpec([5 + one] * 20, params, one))) for one in range(number)],
                     [Server(setup, observers=[recorder])])
    assert all(request.num_tokens == output for request in found.values())
    return figures(list(found.values())), file.entries


def setup(cost=free, model: SimulatedDraftModel | None = None, policy: str = "fcfs") -> Setup:
    plain = Setup(LIMITS, Scheduling(Batching(), Ordering(policy), max_num_seqs=4, max_num_batched_tokens=256),
                  CostPace(cost))
    return plain if model is None else replace(plain, speculation=model.speculation, draft_model=model)


def test_a_curve_gives_as_many_tokens_a_step_as_it_says():
    found, entries = played(setup(model=SimulatedDraftModel(CURVE)))
    verified = [pair for entry in entries if isinstance(entry, StepRecord) for pair in entry.verified if pair[0] == 2]
    assert len(verified) > 200
    assert sum(right for _, right in verified) / len(verified) == pytest.approx(0.8 + 0.8 * 0.75, rel=0.15)
    plain, _ = played(setup())
    assert found.output_throughput > 1.7 * plain.output_throughput


def test_drafts_that_are_never_right_or_not_worth_their_time_cost_little():
    for cost, shares in ((free, (0.0, 0.0)), (dear, (0.9, 0.9))):
        found, _ = played(setup(cost, SimulatedDraftModel(shares)))
        plain, _ = played(setup(cost))
        assert found.output_throughput > 0.9 * plain.output_throughput


def test_passes_of_the_draft_model_take_their_time():
    quick, slow = (played(setup(model=SimulatedDraftModel(CURVE, seconds)))[0] for seconds in (0.0, 0.002))
    assert slow.output_throughput < 0.9 * quick.output_throughput


def test_a_log_shows_the_curve_of_its_draft_model():
    _, entries = played(setup(model=SimulatedDraftModel(CURVE, 0.001)))
    again, _ = read_recording(entries)
    assert again.speculation == SimulatedDraftModel(CURVE).speculation and again.draft_model is not None
    assert again.draft_model.shares == pytest.approx(CURVE, abs=0.08)
    assert again.draft_model.seconds == pytest.approx(0.001)


def test_drafts_from_texts_are_compared_with_the_output():
    verifier = Verifier(None)
    assert verifier.verified((3, 4, 9), [3, 4, 5, 6]) == ((3, 4, 9), (3, 4, 5))
    assert verifier.verified((3, 4), [3, 4, 5]) == ((3, 4), (3, 4, 5))
    named, tokens = Verifier(SimulatedDraftModel((1.0, 0.0))).verified((PROPOSED, PROPOSED), [3, 4, 5])
    assert named[0] == 3 and named[1] != 4 and tokens == (3, 4)


@pytest.mark.parametrize("shares", [(), (1.1,), (-0.1,), (float("nan"),), (0.5,) * 65])
def test_a_curve_that_is_none_is_refused(shares: tuple[float, ...]):
    with pytest.raises(ValueError, match="acceptance curve"):
        SimulatedDraftModel(shares)
