"""Layers are grouped by their windows, in groups of equally many layers."""

from __future__ import annotations

import pytest

from slotwise.kernels.interface import AttentionShape
from slotwise.model.cache_groups import layer_groups


def shapes(windows: list[int], kv_heads: int = 2) -> list[AttentionShape]:
    return [AttentionShape(4, kv_heads, 32, 1.0, window) for window in windows]


@pytest.mark.parametrize(("windows", "num_groups", "size"), [
    ([0] * 24, 1, 24),  # Llama
    ([128, 0] * 12, 2, 12),  # gpt-oss-20b
    (([512] * 5 + [0]) * 4 + [512] * 2, 7, 4),  # Gemma 3 1B: 28 places for 26 layers
    (([1024] * 5 + [0]) * 8, 6, 8),  # Gemma 3 12B
    (([1024] * 5 + [0]) * 10 + [1024] * 2, 13, 5),  # Gemma 3 27B: 65 places for 62 layers
    ([4096] * 32, 1, 32),  # Mistral 7B
    ([64, 64, 0], 3, 1),
])
def test_groups_of_known_models(windows, num_groups, size):
    groups = layer_groups(shapes(windows), longest=32_768)
    assert (len(groups.windows), groups.num_caches) == (num_groups, size)
    assert [groups.windows[group] for group in groups.of_layers] == windows
    places = list(zip(groups.of_layers, groups.caches, strict=True))
    assert len(set(places)) == len(windows), "no two layers share memory of a block"


def test_a_window_as_long_as_any_sequence_is_none():
    assert layer_groups(shapes([512, 0]), longest=512).windows == (0,)


def test_layers_of_different_sizes_are_one_group():
    assert layer_groups([*shapes([0]), *shapes([64], kv_heads=1)], longest=512).windows == (0,)
