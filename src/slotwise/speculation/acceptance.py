"""How often drafts are right, learned for each request and position.

A draft's position is counted from where its match begins: the third draft behind a match of five tokens is at position
eight, as the first behind a match of eight.  Positions are grouped by powers of two, and position 0 stands for a guess
without a match.  A request starts from what all requests have shown, and these from a prior.

A guess is compared with what came, whether its tokens were verified or not.  So a request whose drafts were not worth
their time shows for nothing when they are again.
"""

from __future__ import annotations

GROUPS = 8
PRIOR_WEIGHT = 4.0  # comparisons that a prior counts for
UNLIKELY = 0.05
REMEMBERED = 32.0  # comparisons of a request, and of all requests, after which older ones count half
REMEMBERED_BY_ALL = 512.0


class Acceptance:
    """Shares of right drafts by group of positions.

    Args:
        prior: where the shares come from until there are comparisons: of all requests, or a number for each group.
    """

    def __init__(self, prior: Acceptance | tuple[float, ...]) -> None:
        self._prior = prior
        self._remembered = REMEMBERED if isinstance(prior, Acceptance) else REMEMBERED_BY_ALL
        self._right = [0.0] * GROUPS
        self._compared = [0.0] * GROUPS

    def share(self, group: int) -> float:
        prior = self._prior.share(group) if isinstance(self._prior, Acceptance) else self._prior[group]
        return (self._right[group] + PRIOR_WEIGHT * prior) / (self._compared[group] + PRIOR_WEIGHT)

    def survival(self, match: int, number: int) -> list[float]:
        """Returns for each of `number` drafts behind a match the probability that it and all before it are right.

        Ends with the first that is below UNLIKELY: no step has a use for more.
        """
        shares: dict[int, float] = {}
        survival, alive = [], 1.0
        for position in range(match, match + number):
            group = min(GROUPS - 1, position.bit_length())
            if group not in shares:
                shares[group] = self.share(group)
            alive *= shares[group]
            survival.append(alive)
            if alive < UNLIKELY:
                break
        return survival

    def observe(self, match: int, num_right: int, *, diverged: bool) -> None:
        """Count `num_right` drafts behind a match that were right, and the one behind that was wrong if `diverged`."""
        for position in range(match, match + num_right):
            self._count(position, 1.0)
        if diverged:
            self._count(match + num_right, 0.0)

    def _count(self, position: int, right: float) -> None:
        group = min(GROUPS - 1, position.bit_length())
        if self._compared[group] >= self._remembered:
            self._compared[group] /= 2
            self._right[group] /= 2
        self._compared[group] += 1
        self._right[group] += right
        if isinstance(self._prior, Acceptance):
            self._prior._count(position, right)
