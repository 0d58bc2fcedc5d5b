"""Faults of ranks under load: how streams are judged, and a few real ones."""

from __future__ import annotations

import pytest

from attacks import ledger
from attacks.clients import Answer
from attacks.rank_faults import HUNG, FaultTally, faults, judge

STRUCK = 10.0
WHOLE = "one two three"


def answer(text: str, *, sent: float = 9.0, ended: float = 11.0, error: str = "", ends: int = 1) -> Answer:
    return Answer(sent, 200, {0: text}, ends=ends, ended=ended, error=error, finish_reason="" if error else "length")


def judged(*answers: Answer) -> FaultTally:
    seen = FaultTally()
    judge(seen, [(0, one) for one in answers], [WHOLE], [STRUCK])
    return seen


def test_streams_that_end_once_with_what_they_must_say_are_good() -> None:
    seen = judged(answer(WHOLE), answer("one t", error="rank 1 ended"), answer(WHOLE, sent=20.0, ended=60.0))
    assert (seen.hung, seen.doubled, seen.fates[ledger.LOST]) == (0, 0, 0)
    assert seen.told == [1.0] and seen.errors == {"rank 1 ended": 1}


@pytest.mark.parametrize(("bad", "hung", "doubled", "lost"), [
    (answer(WHOLE, ended=STRUCK + HUNG + 1), 1, 0, 0), (answer("one two two", error="lost"), 0, 1, 0),
    (answer("one"), 0, 1, 0), (answer("one", error="lost", ends=2), 0, 1, 1), (answer("one", ends=0), 0, 0, 1)])
def test_what_hangs_is_doubled_or_is_lost_is_counted(bad: Answer, hung: int, doubled: int, lost: int) -> None:
    seen = judged(bad, answer(WHOLE))
    assert (seen.hung, seen.doubled, seen.fates[ledger.LOST]) == (hung, doubled, lost)


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_ranks_that_are_killed_leave_no_stream_hanging_or_doubled() -> None:
    """How soon service is back depends on what else the machine does: only what never ends fails."""
    found = faults(2, width=1, stages=2, hangs_after=140.0, gone_after=600.0, num_clients=3)
    assert sum(found["faults"].values()) == 2 and found["errors"] and found["streams"][ledger.COMPLETED]
    assert found["hung"] == found["doubled"] == found["lost"] == found["not_back"] == 0


@pytest.mark.drill
@pytest.mark.timeout(7200)
@pytest.mark.parametrize(("width", "stages"), [(1, 2), (2, 1)])
def test_fifty_faults_leave_no_stream_hanging_or_doubled(width: int, stages: int, pytestconfig: pytest.Config) -> None:
    found = faults(50, width, stages, pytestconfig.getoption("--attack-seed"))
    assert found["hung"] == found["doubled"] == found["lost"] == found["not_back"] == 0, found
