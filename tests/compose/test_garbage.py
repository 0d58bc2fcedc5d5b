from __future__ import annotations

import gc

from slotwise.compose.launch import settle


def test_what_was_loaded_is_not_walked_again():
    loaded = [[] for _ in range(1000)]
    before = len(gc.get_objects())
    settle()
    try:
        assert len(gc.get_objects()) < before / 10 and gc.get_freeze_count() > len(loaded)
    finally:
        gc.unfreeze()
