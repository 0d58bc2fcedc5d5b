"""The workload of real conversations: what is drawn, and what a tokenizer makes of it."""

from __future__ import annotations

from collections import Counter

import pytest

from slotwise.measure.workload import chats
from slotwise.measure.workload.distributions import parse_arrivals
from slotwise.measure.workload.workloads import Conversation

NUM = 64


def test_equal_seeds_give_equal_conversations() -> None:
    assert chats.draw(NUM, 3) == chats.draw(NUM, 3)
    assert chats.draw(NUM, 3) != chats.draw(NUM, 4)
    assert chats.draw(8, 3) == chats.draw(NUM, 3)[:8], "more requests leave the first ones as they are"


def test_no_conversation_recurs_among_64() -> None:
    assert len(set(chats.draw(NUM, 0))) == NUM


def test_half_are_chat_turns_and_a_quarter_each_code_and_documents() -> None:
    drawn = chats.draw(NUM, 0)
    code = [one for one in drawn if "```" in one[0][1]]
    long = [one for one in drawn if len(one[0][1]) > 1500 and one not in code]
    assert (len(code), len(long)) == (NUM // 4, NUM // 4)


def test_speakers_take_turns_and_the_user_has_the_last_word() -> None:
    for conversation in chats.draw(200, 1):
        assert [role for role, _ in conversation] == [chats.SPEAKERS[at % 2] for at in range(len(conversation))]
        assert conversation[-1][0] == "user"
        assert all(text.strip() for _, text in conversation)


def test_documents_share_the_beginnings_of_prompts() -> None:
    starts = Counter(one[0][1][:400] for one in chats.draw(NUM, 0) if len(one[0][1]) > 1500)
    assert max(starts.values()) > 1


def test_a_tokenizer_replaces_the_estimated_lengths() -> None:
    workload = chats.generate_chats(6, parse_arrivals("closed:2"), max_tokens=20, seed=5)
    assert workload.ends_by_itself and workload.users == 2
    assert {request.num_output for request in workload.requests} == {20}

    def bytes_of(one: Conversation) -> list[int]:
        return list("".join(text for _, text in one).encode())

    read = chats.in_tokens(workload, bytes_of)
    for request, one, estimate in zip(read.requests, read.conversations, workload.requests, strict=True):
        assert read.prompt_ids(request, vocab_size=1) == bytes_of(one)
        assert request.num_prompt == len(bytes_of(one))
        assert abs(request.num_prompt - chats.BYTES_PER_TOKEN * estimate.num_prompt) < chats.BYTES_PER_TOKEN


def test_prompts_have_no_ids_before_a_tokenizer_has_read_them() -> None:
    workload = chats.generate_chats(1)
    with pytest.raises(ValueError, match="tokenizer"):
        workload.prompt_ids(workload.requests[0], 1000)
