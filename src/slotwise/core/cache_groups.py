"""Cache groups: sets of layers that keep the same positions, each with a block table of its own per request.

A group whose layers attend to a *window* of the last tokens needs only the blocks that a later position may read; those
before them are freed while the request runs.  Full attention is the group whose window has no end.

    computed    |  0  |  1  |  2  |  3  |  4  |  5  |..        block_size 4, 26 tokens computed
    full        |■■■■■|■■■■■|■■■■■|■■■■■|■■■■■|■■■■■|■■|
    window 8    |     |     |     |     |■■■■■|■■■■■|■■|       blocks 0 to 3 are freed

A group of layers with a *recurrent state* keeps no keys and values: its blocks hold the state after their last token,
which the next token reads.  It is a group that looks back on one token; its full blocks in the prefix cache are
snapshots.  Unlike keys and values, a state cannot be computed again over itself.

    state        |     |     |     |     |     |■■■■■|■■|       blocks 0 to 4 are freed

All groups take their blocks from one pool, so layers of all groups have equally large blocks
(`compute/model/layer_groups.py`). After the hybrid cache managers of vLLM and Jenga (Zhang et al., arXiv 2503.18292).
"""

from __future__ import annotations

from collections.abc import Sequence

UNBOUNDED = 1 << 62  # blocks of a window without an end
STATE_WINDOW = 1  # tokens that layers with a recurrent state look back on
IN_FLIGHT = 2  # steps that may be planned and not committed: a request holds blocks for their tokens


class BlockTable:
    """A request's blocks in one group: of its tokens' blocks those from number `first` on."""

    __slots__ = ("blocks", "first")

    def __init__(self, first: int, blocks: list[int]) -> None:
        self.first = first
        self.blocks = blocks

    @property
    def end(self) -> int:
        return self.first + len(self.blocks)


class CacheGroups:
    """What the groups of a model keep.

    Args:
        windows: tokens that layers of each group look back on; 0: all.
        block_size: tokens of a block.
        max_chunk: tokens of a prompt that a step computes at most.
    """

    def __init__(self, windows: Sequence[int], block_size: int, max_chunk: int) -> None:
        self.block_size = block_size
        self.windows = tuple([-(-window // block_size) if window else UNBOUNDED for window in windows])  # in blocks
        ahead = -(-IN_FLIGHT * max_chunk // block_size) + 1
        self.have_states = STATE_WINDOW in windows
        self._most = [window + ahead for window in self.windows]

    def __len__(self) -> int:
        return len(self.windows)

    @property
    def are_windowed(self) -> bool:
        """Whether any group frees blocks of a running request."""
        return min(self.windows) < UNBOUNDED

    def firsts(self, num_computed: int) -> list[int]:
        """The first block that each group keeps once `num_computed` blocks are computed."""
        return [max(0, num_computed - window) for window in self.windows]

    def ends(self, num_computed: int, num_blocks: int) -> list[int]:
        """The block before which each group's table of a new request ends, which has `num_blocks` to compute in all.

        A windowed group begins with the most that it will hold, and later takes what it has freed.
        """
        firsts = self.firsts(num_computed)
        return [min(num_blocks, first + most) for first, most in zip(firsts, self._most, strict=True)]

    def most_blocks(self, num_tokens: int) -> int:
        """The most blocks that a sequence of `num_tokens` tokens holds at a time."""
        num_blocks = -(-num_tokens // self.block_size)
        return sum([min(num_blocks, most) for most in self._most])

    def longest(self, num_blocks: int, most: int) -> int:
        """The longest sequence, in tokens, that a pool of `num_blocks` holds; at most `most` blocks long."""
        low, high = 0, most
        while low < high:
            middle = (low + high + 1) // 2
            if self.most_blocks(middle * self.block_size) <= num_blocks:
                low = middle
            else:
                high = middle - 1
        return low * self.block_size
