"""How much the cache may take, on a machine and in a control group."""

from __future__ import annotations

from pathlib import Path

import pytest

from slotwise.compute.runner import memory_budget

GIB = 1 << 30


@pytest.fixture
def group(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A control group of 8 GiB that has read a 6 GiB checkpoint and holds 1 GiB of its own."""
    (tmp_path / "memory.max").write_text(f"{8 * GIB}\n")
    (tmp_path / "memory.current").write_text(f"{7 * GIB}\n")
    (tmp_path / "memory.stat").write_text(f"anon {GIB}\nactive_file {GIB}\ninactive_file {5 * GIB}\n")
    monkeypatch.setattr(memory_budget, "_CGROUP", tmp_path)
    monkeypatch.setattr(memory_budget, "_machine_available", lambda: 64 * GIB)
    return tmp_path


def test_files_a_group_has_read_do_not_count_as_taken(group: Path):
    assert memory_budget.available_bytes() == 7 * GIB


def test_a_group_without_a_limit_leaves_it_to_the_machine(group: Path):
    (group / "memory.max").write_text("max\n")
    assert memory_budget.available_bytes() == 64 * GIB


def member(group: Path, monkeypatch: pytest.MonkeyPatch, listed: str) -> None:
    """This process is a member of the groups that `listed` names."""
    (group / "membership").write_text(listed)
    monkeypatch.setattr(memory_budget, "_MEMBERSHIP", group / "membership")


def limited(group: Path, free: int) -> None:
    """A group that may take `free` bytes more, and may not swap."""
    group.mkdir(parents=True, exist_ok=True)
    for name, value in (("max", 2 * GIB + free), ("current", 2 * GIB), ("swap.max", 0), ("swap.current", 0)):
        (group / f"memory.{name}").write_text(f"{value}\n")
    (group / "memory.stat").write_text("anon 1\n")


def test_the_limit_of_a_service_counts_and_so_do_those_above_it(group: Path, monkeypatch: pytest.MonkeyPatch):
    """`MemoryMax=` of a unit is in the unit's own group, which no container makes the root."""
    member(group, monkeypatch, "12:cpu:/other\n0::/system.slice/slotwise.service\n")
    assert memory_budget.available_bytes() == 7 * GIB, "the root's, as the others do not exist"
    limited(group / "system.slice" / "slotwise.service", 3 * GIB)
    assert memory_budget.available_bytes() == memory_budget.loadable_bytes() == 3 * GIB
    limited(group / "system.slice", 2 * GIB)
    assert memory_budget.available_bytes() == 2 * GIB
    limited(group / "other", GIB)
    assert memory_budget.available_bytes() == 2 * GIB


@pytest.mark.parametrize("listed", ["", "0::/\n", "0::/../outside\n", "3:memory:/old\n"])
def test_a_process_whose_group_is_not_seen_has_the_roots(
        group: Path, monkeypatch: pytest.MonkeyPatch, listed: str):
    limited(group.parent / "outside", GIB)
    limited(group / "old", GIB)
    member(group, monkeypatch, listed)
    assert memory_budget.available_bytes() == 7 * GIB


def test_a_full_group_is_told_apart_from_a_broken_number(group: Path):
    (group / "memory.current").write_text(f"{20 * GIB}\n")
    assert memory_budget.available_bytes() == 0
    with pytest.raises(MemoryError, match="kv_cache_memory"):
        memory_budget.cache_budget(0, 0, asked=None, share=None)


def test_the_cache_never_takes_more_than_can_be_used():
    assert memory_budget.num_blocks(1000, useful_blocks=10, budget=10**9) == 10
    assert memory_budget.num_blocks(1000, useful_blocks=10, budget=4500) == 4
    with pytest.raises(MemoryError, match=r"of 999 bytes holds no block: raise .* to at least the 1,000 bytes"):
        memory_budget.num_blocks(1000, useful_blocks=10, budget=999)


def test_the_cache_gets_a_share_of_what_is_free_or_what_the_workspace_leaves(group: Path):
    assert memory_budget.cache_budget(GIB, GIB, asked=None, share=None) == int(7 * GIB * memory_budget.SHARE)
    assert memory_budget.cache_budget(GIB, 6 * GIB, asked=None, share=None) == GIB


def test_a_share_of_everything_counts_weights_and_workspace(group: Path):
    assert memory_budget.cache_budget(GIB, 2 * GIB, asked=None, share=0.75) == 3 * GIB  # 6 of 8, less 1, less 2


@pytest.mark.parametrize(("workspace", "asked", "share"), [
    (GIB, 7 * GIB, None), (8 * GIB, None, None), (8 * GIB, 1, None), (7 * GIB, None, 0.5)])
def test_what_is_not_there_is_refused_with_the_numbers(group: Path, workspace: int, asked: int | None,
                                                      share: float | None):
    with pytest.raises(MemoryError, match=r"do not fit the 7.00 GiB that are free"):
        memory_budget.cache_budget(GIB, workspace, asked=asked, share=share)


def test_host_memory_for_blocks_is_counted_or_refused(group: Path):
    assert memory_budget.num_host_blocks(1000, asked=0, others=64 * GIB) == 0
    assert memory_budget.num_host_blocks(GIB // 2, asked=7 * GIB, others=0) == 14
    assert memory_budget.num_host_blocks(GIB, asked=GIB + 1, others=4 * GIB) == 1
    with pytest.raises(MemoryError, match=r"4.00 GiB of host memory for blocks do not fit the 3.00 GiB that are free"):
        memory_budget.num_host_blocks(1000, asked=4 * GIB, others=4 * GIB)


def test_this_machine_has_some():
    assert memory_budget.available_bytes() > 100 << 20
    # What is free changes from moment to moment.
    assert memory_budget.loadable_bytes() >= memory_budget.available_bytes() - (100 << 20)


@pytest.fixture
def machine(group: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The group on a machine of which 6 GiB are free, and 4 GiB of swap; the group may swap out 2 GiB, and has 1."""
    (group / "meminfo").write_text(f"MemTotal: 1 kB\nMemAvailable: {6 << 20} kB\nSwapFree:  {4 << 20} kB\n")
    (group / "memory.swap.max").write_text(f"{2 * GIB}\n")
    (group / "memory.swap.current").write_text(f"{GIB}\n")
    monkeypatch.setattr(memory_budget, "_MEMINFO", group / "meminfo")
    return group


def test_weights_may_take_what_can_be_swapped_out(machine: Path):
    assert memory_budget.loadable_bytes() == 8 * GIB, "7 of the group's memory, 1 of its swap"
    (machine / "memory.swap.max").write_text("0\n")
    assert memory_budget.loadable_bytes() == 7 * GIB
    (machine / "memory.swap.max").write_text("max\n")
    assert memory_budget.loadable_bytes() == 10 * GIB, "6 of the machine's memory and 4 of its swap; the group has 11"
    (machine / "memory.max").write_text("max\n")
    assert memory_budget.loadable_bytes() == 10 * GIB


def test_a_system_that_says_nothing_loads_what_it_can(machine: Path):
    (machine / "meminfo").unlink()
    assert memory_budget.loadable_bytes() == memory_budget.UNLIMITED


def test_weights_that_do_not_fit_are_refused_with_the_numbers():
    memory_budget.check_weights(GIB, GIB, "memory")
    with pytest.raises(MemoryError, match=r"take 3.00 GiB, and 2.00 GiB of memory are free .* quantization int8"):
        memory_budget.check_weights(3 * GIB, 2 * GIB, "memory")


def test_a_gpu_is_shared_by_weights_workspace_cache_and_others():
    asked = {"workspace": 2 * GIB, "asked": None}
    assert memory_budget.gpu_cache_budget(60 * GIB, 80 * GIB, share=0.5, **asked) == (40 - 20 - 2) * GIB
    assert memory_budget.gpu_cache_budget(60 * GIB, 80 * GIB, share=None, **asked) == int(80 * GIB * 0.9) - 22 * GIB
    assert memory_budget.gpu_cache_budget(60 * GIB, 80 * GIB, 2 * GIB, asked=5 * GIB, share=None) == 5 * GIB


@pytest.mark.parametrize(("free", "workspace", "asked", "share"), [
    (10 * GIB, GIB, 10 * GIB, None), (10 * GIB, GIB, None, 0.5), (10 * GIB, 11 * GIB, None, 1.0), (0, 0, None, None)])
def test_what_a_gpu_has_not_is_refused_with_the_numbers(free, workspace, asked, share):
    with pytest.raises(MemoryError, match=rf"{memory_budget.gib(free)} of its 80.00 GiB are free".replace(".", r"\.")):
        memory_budget.gpu_cache_budget(free, 80 * GIB, workspace, asked, share)
