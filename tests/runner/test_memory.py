"""How much the cache may take, on a machine and in a control group."""

from __future__ import annotations

from pathlib import Path

import pytest

from slotwise.runner import memory

GIB = 1 << 30


@pytest.fixture
def group(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A control group of 8 GiB that has read a 6 GiB checkpoint and holds 1 GiB of its own."""
    (tmp_path / "memory.max").write_text(f"{8 * GIB}\n")
    (tmp_path / "memory.current").write_text(f"{7 * GIB}\n")
    (tmp_path / "memory.stat").write_text(f"anon {GIB}\nactive_file {GIB}\ninactive_file {5 * GIB}\n")
    monkeypatch.setattr(memory, "_CGROUP", tmp_path)
    monkeypatch.setattr(memory, "_machine_available", lambda: 64 * GIB)
    return tmp_path


def test_files_a_group_has_read_do_not_count_as_taken(group: Path):
    assert memory.available_bytes() == 7 * GIB


def test_a_group_without_a_limit_leaves_it_to_the_machine(group: Path):
    (group / "memory.max").write_text("max\n")
    assert memory.available_bytes() == 64 * GIB


def test_a_full_group_is_told_apart_from_a_broken_number(group: Path):
    (group / "memory.current").write_text(f"{20 * GIB}\n")
    assert memory.available_bytes() == 0
    with pytest.raises(MemoryError, match="kv_cache_memory"):
        memory.num_blocks(1000, useful_blocks=10, asked=None)


def test_the_cache_never_takes_more_than_can_be_used(group: Path):
    assert memory.num_blocks(1000, useful_blocks=10, asked=None) == 10
    assert memory.num_blocks(1000, useful_blocks=10, asked=4500) == 4


def test_this_machine_has_some():
    assert memory.available_bytes() > 100 << 20
