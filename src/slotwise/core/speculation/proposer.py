"""The proposer that the scheduler calls: looks up how rows go on, and chooses how many drafts a step verifies."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain

from slotwise.core.drafting import MAX_DRAFTS, MEASURING, NO_GAIN, NO_MATCH, NO_ROOM, RESTING
from slotwise.core.interfaces import DraftRow, Due, Proposal, Proposer
from slotwise.core.record import Proposing
from slotwise.core.request import Request
from slotwise.core.speculation.budget import Acceptance, Costs, best, may_gain
from slotwise.core.speculation.draft_model import DraftModelProposer
from slotwise.core.speculation.lookups import ForcedTokens, NgramLookup, PredictionLookup
from slotwise.core.speculation.speculation_settings import DRAFT_MODEL, NGRAM, NONE, PREDICTION, SUFFIX, Speculation
from slotwise.core.speculation.suffix import SuffixIndex, SuffixLookup
from slotwise.core.speculation.token_text import NO_GUESS, DraftSource, TokenText
from slotwise.core.step_time import StepTimeModel, Work

FORCED = "forced"  # by a grammar
PRIORS = {  # shares of right drafts by group of positions (`budget.py`), before anything is known
    NGRAM: (0.3, 0.3, 0.4, 0.55, 0.7, 0.8, 0.85, 0.85),
    SUFFIX: (0.3, 0.3, 0.4, 0.6, 0.75, 0.85, 0.9, 0.9),
    FORCED: (0.9,) * 8,
    PREDICTION: (0.8, 0.8, 0.85, 0.9, 0.9, 0.95, 0.95, 0.95)}
PATIENCE = 3  # looks without a gain after which a row is looked at less often
MAX_REST = 32  # tokens between two looks, at most
MAX_FAILURES = PATIENCE + 4  # of the request before: the first look is at most 16 tokens late
MAX_LOOKS = 8  # rows that a step looks at, in turns: the time of a look is bounded, and so is that of all
UNPAID = 16  # steps of a batch that no drafts pay for in which it is not asked again
MAX_OUTPUT = 4096  # tokens of an output that are indexed, its last ones
WORTH_WAITING = 1.0  # right drafts that a row must expect to leave out a step


def rest_after(failures: int) -> int:
    """Returns how many tokens to leave out before the next look, after so many looks in succession without a gain."""
    return min(MAX_REST, 1 << max(0, min(8, failures - PATIENCE)))


class RowDrafts:
    """What is known about one request.

    Args:
        failures: looks without a gain with which the request before it ended.
    """

    __slots__ = ("_acceptance", "_base", "_source", "_sources", "failures", "guess", "known", "look_at")

    def __init__(
        self, request: Request, sources: dict[str, DraftSource], shared: dict[str, Acceptance], failures: int,
    ) -> None:
        self.known = TokenText()  # the request's tokens as of the last look
        self._sources = sources
        self._acceptance = {name: Acceptance(shared[name]) for name in sources}
        self.guess = NO_GUESS  # the last one, with the source it is from, and the known tokens it is about to follow
        self._source = ""
        self._base = 0
        self.failures = failures  # looks without a gain in succession
        # Known tokens from which on it is looked at again.
        self.look_at = len(request.tokens) + rest_after(failures) if failures > PATIENCE else 0

    def look(self, request: Request, most: int) -> list[float]:
        """Look up how the request goes on.  Returns the probabilities of `guess.tokens`, in falling order."""
        known = self.known
        if len(request.tokens) > len(known):
            known.extend(request.tokens[len(known) :])
        self._compare()
        self.guess, probabilities, expected = NO_GUESS, [], 0.0
        for name, source in self._sources.items():
            guess = source.guess(known, most)
            if guess.tokens:
                survival = self._acceptance[name].survival(guess.match, len(guess.tokens))
                if (total := sum(survival)) > expected:
                    self.guess, self._source, probabilities, expected = guess, name, survival, total
        self._base = len(known)
        return probabilities

    def _compare(self) -> None:
        """Learn from the last guess, verified or not, as far as its tokens are known by now."""
        guess, ids = self.guess, self.known.ids
        came = ids[self._base : self._base + len(guess.tokens)]
        num_right = 0
        while num_right < len(came) and came[num_right] == guess.tokens[num_right]:
            num_right += 1
        if came:
            self._acceptance[self._source].observe(guess.match, num_right, diverged=num_right < len(came))

    def drafts(self, number: int) -> tuple[int, ...]:
        """Returns the first tokens of the guess, to be verified; 0: none of them is worth it."""
        if not number:
            self.rest()
            return ()
        self.failures = 0
        return tuple(self.guess.tokens[:number])

    def rest(self) -> None:
        """The look gave nothing: look again later, after a while less often."""
        if FORCED in self._sources:  # what a grammar forces comes without warning, and costs nothing to look up
            return
        self.failures += 1
        self.look_at = len(self.known) + rest_after(self.failures)


class DraftProposer:
    """Proposes drafts from texts (see `core.interfaces.Proposer`).

    Args:
        times: the scheduler's, which learns from every step.
    """

    def __init__(self, settings: Speculation, times: StepTimeModel) -> None:
        method = settings.method
        self._looks_up = method in (NGRAM, SUFFIX)
        self._settings = settings
        self._times = times
        self._costs = Costs(times)
        self._rows: dict[int, RowDrafts] = {}
        self._next_look = 0  # place among the rows
        self._full = self._unpaid = 0  # rows of a step that no drafts paid for, and steps that this holds for
        self._failures = 0  # of the request that ended last: where looks gave nothing, the next one begins with few
        self._shared = {name: Acceptance(prior) for name, prior in PRIORS.items()}
        self._index = SuffixIndex() if method == SUFFIX else None

    def due(self, requests: Sequence[Request]) -> Due:
        if not self._times.is_trained or self._is_full(len(requests)):
            return Due((), NO_GAIN)
        found: list[int] = []
        reason, rest, begin = NO_MATCH, MAX_REST, self._next_look % len(requests)
        for place in chain(range(begin, len(requests)), range(begin)):
            request = requests[place]
            row = self._rows.get(request.request_id) or self._new_row(request)
            if row is None:
                continue
            if (left := row.look_at - len(request.tokens)) > 0:
                reason, rest = RESTING, min(rest, left - 1)
            elif len(found) < MAX_LOOKS:
                found.append(place)
            else:
                self._next_look = place
                break
        return Due(found, reason, rest)

    def _is_full(self, num_rows: int) -> bool:
        """Whether a step of fewer rows, or as many, did not pay for drafts a few steps ago."""
        if not self._unpaid or num_rows < self._full:
            return False
        self._unpaid -= 1
        return True

    def propose(self, rows: Sequence[DraftRow], num_decoding: int, work: Work, most: int) -> Proposal:
        costs = self._costs.curve(work, num_decoding, work.context)
        if not may_gain(costs, num_decoding, self._settings.num_drafts):
            self._full, self._unpaid = num_decoding, UNPAID
            return Proposal([()] * len(rows), NO_GAIN)
        if self._costs.measures(work):
            return Proposal([()] * len(rows), MEASURING)
        found: list[tuple[float, int]] = []  # by draft: less its probability, its row
        limits: set[str] = set()
        known = [self._rows[request.request_id] for request, _ in rows]
        for at, (row, (request, limit)) in enumerate(zip(known, rows, strict=True)):
            probabilities = row.look(request, min(limit, self._settings.num_drafts))
            if not probabilities:
                continue
            if len(probabilities) < len(row.guess.tokens):
                limits.add(NO_GAIN)
            elif len(probabilities) in (limit, self._settings.num_drafts):
                limits.add(NO_ROOM if len(probabilities) == limit else MAX_DRAFTS)
            found += [(-probability, at) for probability in probabilities]
        found.sort()
        choice = best(costs, num_decoding, [-draft[0] for draft in found[:most]])
        counts = [0] * len(rows)
        for _, at in found[: choice.num_drafts]:
            counts[at] += 1
        drafts = [row.drafts(count) for row, count in zip(known, counts, strict=True)]
        if found and not choice.wants_more:
            return Proposal(drafts, NO_GAIN)
        return Proposal(drafts, "" if len(found) > most else min(limits, default=NO_MATCH))

    def seconds(self, num_rows: int, num_drafts: int) -> float:
        return 0.0

    def waits(self, request: Request) -> bool:
        row = self._rows.get(request.request_id) or self._new_row(request)
        if row is None or len(request.tokens) < row.look_at or not self._times.is_trained:
            return False
        if sum(row.look(request, self._settings.num_drafts)) > WORTH_WAITING:
            return True
        row.rest()
        return False

    def committed(
        self, requests: Sequence[Request], drafts: Sequence[Sequence[int]], proposing: Proposing | None = None,
    ) -> None:
        """Learns nothing here: what came is compared at the next look."""

    def finished(self, request: Request) -> None:
        row = self._rows.pop(request.request_id, None)
        if row is not None:
            self._failures = min(row.failures, MAX_FAILURES)
        if self._index is not None and request.num_output:
            begin = max(request.num_prompt, len(request.tokens) - MAX_OUTPUT)
            self._index.add(request.block_hashes.salt, request.tokens[begin:])

    def _new_row(self, request: Request) -> RowDrafts | None:
        """Begin to keep what is known about a request; None if nothing can propose drafts for it."""
        if not self._looks_up and not request.spec.prediction and request.spec.params.grammar is None:
            return None
        sources = self._sources(request)
        failures = 0 if FORCED in sources or PREDICTION in sources else self._failures
        row = self._rows[request.request_id] = RowDrafts(request, sources, self._shared, failures)
        return row

    def _sources(self, request: Request) -> dict[str, DraftSource]:
        sources: dict[str, DraftSource] = {} if request.spec.params.grammar is None else {FORCED: ForcedTokens(request)}
        if request.spec.prediction:
            sources[PREDICTION] = PredictionLookup(request.spec.prediction, request.num_prompt)
        if self._looks_up:
            sources[NGRAM] = NgramLookup(*self._settings.lookup)
        if self._index is not None:
            sources[SUFFIX] = SuffixLookup(self._index, request.block_hashes.salt)
        return sources


def proposer_of(settings: Speculation | None, times: StepTimeModel) -> Proposer | None:
    """Returns the proposer of settings that are `resolved`; None where no request has drafts."""
    if settings is None or settings.method == NONE:
        return None
    texts = DraftProposer(settings, times)
    return DraftModelProposer(texts, settings, times) if settings.method == DRAFT_MODEL else texts
