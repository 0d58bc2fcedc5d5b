"""A draft model's positions: what they say is held was computed from the request's own tokens, whatever has happened.

The draft model of this executor has a cache of digests, in the blocks of the plans, as the target has.
"""

from __future__ import annotations

from dataclasses import replace
from random import Random

from hypothesis import given, settings
from hypothesis import strategies as st
from support.operations import LIMITS, PROMPT
from support.toy import VOCAB, Driver, Placeholders, next_token, request

from slotwise.compute.runner.draft_model_runner import DraftPositions
from slotwise.compute.runner.input_batch import SlotTable
from slotwise.core.record import StepPlan
from slotwise.core.scheduler_limits import SchedulerLimits
from slotwise.engine.executor import FakeExecutor


class Drafting(FakeExecutor):
    """Proposes from its cache, which must hold what the positions say, and checks that it does."""

    def __init__(self, limits: SchedulerLimits, seed: int) -> None:
        super().__init__(limits.block_size, next_token)
        self.slots = SlotTable(limits.max_num_seqs, limits.max_model_len, limits.block_size, limits.num_blocks)
        self.positions = DraftPositions(self.slots, limits.num_blocks, limits.num_host_blocks)
        self.draft_cache: dict[tuple[int, int], int] = {}
        self.draft_host: dict[tuple[int, int], int] = {}
        self.draw = Random(seed)
        self.num_found = self.num_caught_up = 0

    def submit(self, plan: StepPlan) -> None:
        offsets = range(self._block_size)
        for block, place in plan.saves:
            self.draft_host |= {(place, at): self.draft_cache.get((block, at), 0) for at in offsets}
        for place, block in plan.loads:
            self.draft_cache |= {(block, at): self.draft_host[place, at] for at in offsets}
        self.slots.apply(plan)
        self.positions.apply(plan)
        self.num_found += sum(self.positions.held(join.slot) for join in plan.new_requests)
        super().submit(plan)

    def _named(self, plan: StepPlan, row: int) -> tuple[int, ...]:
        slot, end = plan.slots[row], plan.starts[row] + 1
        known, held = self._tokens[slot][:end], self.positions.held(slot)
        assert held < end
        last = min(end, held + self.draw.randint(1, 9))
        self._compute(slot, known, held, last)
        self.positions.known(slot, last)
        self.num_caught_up += last - held
        if last < end:
            return ()
        tokens = list(known)
        for _ in range(len(plan.drafts[row])):
            self._compute(slot, tokens, len(tokens) - 1, len(tokens))
            tokens.append(next_token(tokens) if self.draw.random() < 0.8 else self.draw.randrange(VOCAB))
        self.positions.drafted(slot, len(tokens) - 1)
        return tuple(tokens[end:])

    def _compute(self, slot: int, tokens: list[int], start: int, end: int) -> None:
        history = 0
        for position, token in enumerate(tokens[:end]):
            history = hash((history, token))
            place = self._place(slot, 0, position)
            if position < start:
                assert self.draft_cache[place] == history, "it does not hold what it should"
            else:
                self.draft_cache[place] = history


ROUND = st.tuples(st.lists(st.tuples(PROMPT, st.integers(1, 16)), max_size=2), st.sampled_from((
    "step", "step", "step", "ahead", "abort", "failed")))


def play(limits: SchedulerLimits, rounds: list, seed: int) -> Drafting:
    driver = Driver(limits, proposer=Placeholders(seed))
    driver.executor = executor = Drafting(limits, seed)
    num_added = 0
    for adds, what in rounds:
        for prompt, max_tokens in adds:
            driver.add(request(f"r{num_added}", prompt, max_tokens, ignore_eos=True))
            num_added += 1
        if len(driver.flying) < 2:
            driver.plan()
        if what == "abort" and driver.scheduler.requests():
            driver.finish(driver.scheduler.requests()[0].request_id)
        if what == "failed":  # the executor has computed, and its results are lost
            driver.scheduler.rollback()
            while driver.flying:
                driver.flying.pop()
                driver.executor.collect()
        elif what != "ahead":
            driver.commit()
    driver.run()
    assert driver.scheduler.num_free_blocks == limits.num_blocks
    return executor


@settings(max_examples=150, deadline=None)
@given(LIMITS, st.integers(0, 8), st.lists(ROUND, max_size=40), st.integers(0, 2**32 - 1))
def test_what_is_held_was_computed_from_the_tokens_before_it(limits, num_host_blocks, rounds, seed):
    limits = replace(limits, num_host_blocks=num_host_blocks if limits.enable_prefix_caching else 0)
    play(limits, rounds, seed)


def test_blocks_are_found_with_what_the_draft_model_has_computed_of_them():
    """The second request finds the blocks of the first, on the device or on the host, and those that were drafted."""
    limits = SchedulerLimits(max_model_len=40, num_blocks=8, block_size=4, max_num_seqs=1, max_num_batched_tokens=64,
                             num_host_blocks=8, enable_prefix_caching=True)
    for between in ([], [([9] * 20, 1)]):
        rounds = [([([3] * 13, 12)], "step"), *[([], "step")] * 12, (between, "step"), *[([], "step")] * 4,
                  ([([3] * 13, 12)], "step")]
        assert play(limits, rounds, 5).num_found >= 8
