"""From a plan's rows to a ragged batch: what each token is, where it goes, and what padding may touch."""

from __future__ import annotations

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from slotwise.compute.runner.input_batch import GatheredBatch, SlotTable
from slotwise.core.params import SamplingSpec
from slotwise.core.record import FreedBlocks, NewBlocks, NewRequest, RowKind, StepPlan
from slotwise.core.request import RequestSpec

BLOCK, NULL = 4, 99


def plan(rows: list[tuple[int, int, int, bool]], padding: tuple[int, ...] = ()) -> StepPlan:
    """Rows are (slot, start, count, samples); every slot's prompt and blocks come with them."""
    new_requests = tuple(
        NewRequest(f"r{slot}", slot, RequestSpec(range(100 * slot, 100 * slot + start + count), SamplingSpec()), ())
        for slot, start, count, _ in rows)
    new_blocks = tuple(NewBlocks(slot, 0, tuple(range(10 * slot, 10 * slot + 8))) for slot, *_ in rows)
    slots, starts, counts, samples = zip(*rows, strict=True)
    ids = tuple(join.request_id for join in new_requests)
    kinds = (RowKind.PREFILL,) * len(rows)
    return StepPlan(0, 0.0, (), new_requests, (), new_blocks, ids, slots, starts, counts, (), tuple(map(int, samples)),
                    kinds, padding, (), (), (), None)


def gathered(step: StepPlan):
    table = SlotTable(num_slots=8, max_tokens=32, block_size=BLOCK, null_block=NULL)
    table.apply(step)
    return table.gather(step).batch


ROW = st.tuples(st.integers(0, 10), st.integers(1, 12), st.booleans())


@settings(max_examples=100, deadline=None)
@given(st.lists(st.tuples(ROW, st.integers(0, 8)), min_size=1, max_size=6))
def test_padding_follows_the_rows_and_touches_nothing_of_theirs(drawn):
    rows = [(slot, *row) for slot, (row, _) in enumerate(drawn)]
    padding = tuple(pad for _, pad in drawn)
    bare, padded = gathered(plan(rows)), gathered(plan(rows, padding))
    tokens, num_rows = len(bare.token_ids), len(rows)
    assert padded.token_ids[:tokens].tolist() == bare.token_ids.tolist()
    assert padded.positions[:tokens].tolist() == bare.positions.tolist()
    assert padded.slot_mapping[:tokens].tolist() == bare.slot_mapping.tolist()
    assert padded.context_lens[:num_rows].tolist() == bare.context_lens.tolist()
    assert padded.sample_at.tolist() == bare.sample_at.tolist()
    width = bare.block_tables.shape[1]
    assert padded.block_tables[:num_rows, :width].tolist() == bare.block_tables.tolist()
    assert len(padded.token_ids) == tokens + sum(padding)
    assert set((padded.slot_mapping[tokens:] // BLOCK).tolist()) <= {NULL}
    ends = [start + count + pad for (_, start, count, _), pad in zip(rows, padding, strict=True) if pad]
    assert padded.context_lens[num_rows:].tolist() == ends, "a padding row costs what a longer prompt would"
    for table, end in zip(padded.block_tables[num_rows:].tolist(), ends, strict=True):
        assert set(table[: -(-end // BLOCK)]) == {NULL}
    assert padded.query_starts[-1] == len(padded.token_ids)
    assert padded.max_query_len == max(*(count for _, _, count, _ in rows), *padding)


def test_a_row_by_hand():
    batch = gathered(plan([(2, 3, 3, True)], padding=(2,)))
    assert batch.token_ids.tolist() == [203, 204, 205, 0, 0]
    assert batch.positions.tolist() == [3, 4, 5, 6, 7]
    assert batch.slot_mapping.tolist() == [83, 84, 85, NULL * BLOCK + 2, NULL * BLOCK + 3]
    assert batch.query_starts.tolist() == [0, 3, 5] and batch.context_lens.tolist() == [6, 8]
    assert batch.sample_at.tolist() == [2]


def test_each_group_has_blocks_of_its_own():
    table = SlotTable(num_slots=8, max_tokens=32, block_size=BLOCK, null_block=NULL, group_of_layer=(0, 1, 1, 2))
    step = plan([(2, 0, 6, True), (5, 0, 3, True)], padding=(0, 1))
    table.apply(step._replace(new_blocks=tuple(
        NewBlocks(slot, group, tuple(range(100 * group + 10 * slot, 100 * group + 10 * slot + 8)))
        for slot in (2, 5) for group in range(3))))
    batch = table.gather(step).batch
    columns = [(batch.slot_mapping, batch.block_tables), *batch.groups]
    for group, (places, tables) in enumerate(columns):
        rows = [[100 * group + 20, 100 * group + 21], [100 * group + 50, 100 * group + 51], [NULL, 0]]
        written = [rows[0][at // BLOCK] * BLOCK + at % BLOCK for at in range(6)]
        assert places.tolist() == [*written, *(rows[1][0] * BLOCK + at for at in range(3)), NULL * BLOCK + 3]
        assert tables.tolist() == rows
        assert places.is_contiguous() and tables.is_contiguous(), "kernels read them one number after the other"
    longs, tables = np.zeros((5, 2), np.int64), np.zeros((3, 2, 8), np.int32)
    decode = step._replace(padding=(), starts=(6, 3), counts=(1, 1), num_logits=(1, 1))
    table.write_decode(decode, longs, np.zeros(2, np.int32), tables)
    firsts = [(100 * group + 20, 100 * group + 50) for group in range(3)]
    assert longs[2:].tolist() == [[(one + 1) * BLOCK + 2, other * BLOCK + 3] for one, other in firsts]
    assert tables[:, :, 0].tolist() == [list(each) for each in firsts]


def drafted(table: SlotTable, step: StepPlan, drafts: tuple[tuple[int, ...], ...]) -> GatheredBatch:
    """The rows of `step` after it: each computes its last token, and `drafts`."""
    counts = tuple([1 + len(some) for some in drafts])
    starts = tuple([start + count - 1 for start, count in zip(step.starts, step.counts, strict=True)])
    again = step._replace(
        new_requests=(), new_blocks=(), starts=starts, counts=counts, drafts=drafts, num_logits=counts,
        kinds=(RowKind.DECODE,) * len(counts))
    table.apply(again)
    return table.gather(again)


def test_drafts_follow_the_last_token_and_logits_are_wanted_at_all_of_them():
    table = SlotTable(num_slots=8, max_tokens=32, block_size=BLOCK, null_block=NULL)
    step = plan([(0, 0, 5, True), (1, 0, 2, True), (2, 0, 7, True)])
    table.apply(step)
    batch, targets = drafted(table, step, ((7, 8), (), (9,)))
    assert batch.token_ids.tolist() == [4, 7, 8, 101, 206, 9]
    assert batch.positions.tolist() == [4, 5, 6, 1, 6, 7] and batch.context_lens.tolist() == [7, 2, 8]
    assert batch.sample_at.tolist() == [0, 1, 2, 3, 4, 5] and batch.max_query_len == 3
    assert targets.tolist() == [5, 6, 7, 33 + 2, 66 + 7, 66 + 8], "the place behind each"


@given(st.lists(st.tuples(st.integers(0, 9), st.integers(1, 9), st.integers(0, 9)), min_size=1, max_size=6))
def test_logits_are_wanted_at_the_last_positions_of_each_row(rows):
    table = SlotTable(num_slots=8, max_tokens=32, block_size=BLOCK, null_block=NULL)
    wanted = tuple([min(count, some) for _, count, some in rows])
    step = plan([(slot, start, count, False) for slot, (start, count, _) in enumerate(rows)])
    step = step._replace(num_logits=wanted)
    table.apply(step)
    batch, targets = table.gather(step)
    ends = batch.query_starts[1:].tolist()
    assert batch.sample_at.tolist() == [
        place for end, some in zip(ends, wanted, strict=True) for place in range(end - some, end)]
    assert targets.tolist() == [
        33 * slot + start + count - some + 1 + place for (slot, (start, count, _)), some in zip(
            enumerate(rows), wanted, strict=True) for place in range(some)]


def test_blocks_behind_accepted_tokens_leave_the_table_before_others_enter_it():
    table = SlotTable(num_slots=8, max_tokens=32, block_size=BLOCK, null_block=NULL)
    step = plan([(0, 0, 5, True)])
    table.apply(step)
    table.apply(step._replace(
        new_requests=(), freed_blocks=(FreedBlocks(0, 0, 6),), new_blocks=(NewBlocks(0, 0, (77,)),)))
    assert table.gather(step._replace(starts=(0,), counts=(12,))).batch.block_tables.tolist() == [[0, 1, 77]]
