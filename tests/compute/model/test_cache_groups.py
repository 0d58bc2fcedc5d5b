"""Layers are grouped by their windows, in groups of equally many layers."""

from __future__ import annotations

import pytest

from slotwise.compute.kernels.interface import AttentionShape, DeltaShape, LayerShape
from slotwise.compute.model.layer_groups import cache_shapes, layer_groups, least_block_size
from slotwise.core.cache_groups import STATE_WINDOW


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


STATE = DeltaShape(2, 4, 16, 16, 4)


def test_states_share_memory_with_keys_and_values():
    """Qwen3-Next: 36 layers with a state, and 12 with attention; every block holds a layer's part of either."""
    layers = [STATE, STATE, STATE, *shapes([0])] * 12
    groups = layer_groups(layers, longest=32_768)
    assert (groups.windows, groups.num_caches) == ((0, STATE_WINDOW, STATE_WINDOW, STATE_WINDOW), 12)
    assert [groups.windows[group] == 0 for group in groups.of_layers] == [isinstance(one, AttentionShape)
                                                                          for one in layers]

    def num_bytes(tokens: int, shape: LayerShape) -> int:
        return shape.state_bytes if isinstance(shape, DeltaShape) else 512 * tokens

    assert least_block_size(groups, layers, num_bytes) == -(-STATE.state_bytes // 512)
    assert least_block_size(layer_groups(shapes([0, 0]), 512), shapes([0, 0]), num_bytes) == 1
    as_large = STATE.state_bytes // 512
    assert num_bytes(as_large, layers[3]) == STATE.state_bytes, "of equal ones attention's: it needs the layout"
    for tokens, expected in ((1, STATE), (as_large, layers[3]), (64, layers[3])):
        made = cache_shapes(groups, layers, range(48), lambda shape, tokens=tokens: num_bytes(tokens, shape))
        assert made == dict.fromkeys(range(12), expected)
