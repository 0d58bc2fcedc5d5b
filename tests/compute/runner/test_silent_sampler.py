"""The sampler of ranks that sample nothing."""

from __future__ import annotations

import torch

from slotwise.compute.runner.sampling.sampler import SilentSampler


def test_its_tokens_lie_where_the_logits_do() -> None:
    """A device that is not this one: what is written beside known tokens must lie there."""
    drawn = SilentSampler().sample(torch.empty(3, 7, device="meta"), [0, 1, 2], [4, 4, 4])
    assert drawn.column.device.type == "meta" and drawn.column.shape == (3,)
    assert drawn.read().tokens == [0, 0, 0] and not drawn.read().failed
