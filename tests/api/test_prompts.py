"""Long texts of many clients at one thread, and the engine that prompts are checked against."""

from __future__ import annotations

import asyncio
import json
from dataclasses import replace
from pathlib import Path

import msgspec
import pytest

from slotwise import builtin
from slotwise.api.generate.checkpoint_workers import TOKENIZER_LIMITS, LimitedTokenizer
from slotwise.api.generate.prompts import MAX_WAITING_OF_ONE, Prompts
from slotwise.api.http.api_errors import ApiError
from slotwise.api.http.turns import Turns
from slotwise.api.http.worker_process import CallLimits
from slotwise.core.disciplines.batching_settings import Batching
from slotwise.core.scheduler_limits import SchedulerLimits
from slotwise.engine.messages import EngineInfo
from slotwise.engine.scheduling import Scheduling
from slotwise.text.tokenizer import SHORT, Tokenizer

LIMITS = SchedulerLimits(max_model_len=10_000, num_blocks=2500, block_size=4)
INFO = EngineInfo("toy", "cpu", "float32", 400, LIMITS, Scheduling(Batching(), max_num_seqs=4,
                                                                   max_num_batched_tokens=32), (1,))
WIDE = msgspec.structs.replace(INFO, vocab_size=100_000)
LONG = "the quick fox " * (SHORT // 10)


def test_a_client_with_many_long_texts_delays_no_other(tokenizer: Tokenizer) -> None:
    prompts, done = Prompts(tokenizer, None, lambda: INFO), list[str]()

    async def ask(holder: str, way: int) -> ApiError | None:
        try:
            if way == 0:
                assert await prompts.decode([40] * (SHORT + 1), holder)
            elif way == 1:
                assert await prompts.plain(LONG, holder, add_special_tokens=True)
            else:
                assert len(await prompts.of_completion([LONG, "x"], 2, holder)) == 2
        except ApiError as error:
            return error
        done.append(holder)
        return None

    async def crowd() -> list[ApiError | None]:
        greedy = [asyncio.create_task(ask("greedy", number % 3)) for number in range(MAX_WAITING_OF_ONE + 44)]
        await asyncio.sleep(0)
        others = [asyncio.create_task(ask("other", way)) for way in range(3)]
        assert [await task for task in others] == [None] * 3
        return await asyncio.gather(*greedy)

    refused = [error for error in asyncio.run(crowd()) if error is not None]
    assert [(error.status, error.code) for error in refused] == [(429, "tokenizer_busy")] * 43
    assert done.index("other") <= 2 and done.count("other") == 3
    last = len(done) - 1 - done[::-1].index("other")
    assert last <= 6, "clients take turns"


def test_only_what_a_text_adds_to_one_before_is_encoded(
        tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch) -> None:
    prompts, lengths = Prompts(tokenizer, None, lambda: WIDE), list[int]()

    def encode(text: str, **more: bool) -> list[int]:
        lengths.append(len(text))
        return tokenizer.inner.encode(text, **more).ids

    turns = ["<s>" + "the quick fox " * 90 + "</s>jumps over the dog\n" * 3 for _ in range(9)]
    for holder, is_new in (("one", True), ("another", True), ("one", False)):
        for number in range(5, 10):
            text = "".join(turns[:number])
            expected = tokenizer.inner.encode(text).ids
            with monkeypatch.context() as patch:
                patch.setattr(tokenizer, "encode", encode)
                lengths.clear()
                assert asyncio.run(prompts.of_completion(text, 1, holder)) == [expected]
            is_whole = is_new and number == 5
            assert sum(lengths) == len(text) if is_whole else sum(lengths) < 2 * len(turns[0])


def test_a_replacement_engine_with_a_smaller_cache_bounds_prompts() -> None:
    engines = [INFO]
    prompts = Prompts(Tokenizer.load(builtin.path()), None, lambda: engines[-1])
    prompts.check([INFO.vocab_size - 1], "prompt")
    assert prompts.max_tokens(40, 10, None) == 40
    engines.append(msgspec.structs.replace(
        INFO, vocab_size=INFO.vocab_size - 1, limits=replace(INFO.limits, num_blocks=4)))
    with pytest.raises(ApiError):
        prompts.check([INFO.vocab_size - 1], "prompt")
    with pytest.raises(ApiError):
        prompts.max_tokens(40, 10, None)


def slow(folder: Path, regex: str) -> Tokenizer:
    """The built-in model's tokenizer with another regular expression before its own."""
    description = json.loads((Path(builtin.path()) / "tokenizer.json").read_text())
    split = {"type": "Split", "pattern": {"Regex": regex}, "behavior": "Isolated", "invert": False}
    description["pre_tokenizer"]["pretokenizers"].insert(0, split)
    (folder / "tokenizer.json").write_text(json.dumps(description))
    return Tokenizer.load(folder)


def test_a_text_that_a_tokenizer_takes_any_time_for_stops_no_other(
        tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    limits = msgspec.structs.replace(TOKENIZER_LIMITS, seconds=2.0)
    monkeypatch.setattr(LimitedTokenizer.__init__, "__defaults__", (limits,))
    prompts = Prompts(slow(tmp_path, r"(?:a|a){20}[^a\n]"), None, lambda: WIDE)
    plain = Tokenizer.load(builtin.path())

    async def play() -> None:
        await prompts.of_completion("def add(", 1, "b")  # the worker has started
        asked = asyncio.create_task(prompts.of_completion("a" * 9000, 1, "a"))
        for _ in range(100):  # the event loop goes on
            await asyncio.sleep(0.001)
        assert not asked.done()
        with pytest.raises(ApiError, match="the tokenizer took more than 2 seconds") as told:
            await asked
        assert (told.value.status, told.value.code) == (500, "tokenizer_failed")
        assert await prompts.of_completion("def add(", 1, "b") == [plain.encode("def add(")]
        assert await prompts.plain("日本 x", "b", add_special_tokens=False) == plain.encode(
            "日本 x", add_special_tokens=False)
        for text, why in (("x" * 999_999, "context_length_exceeded"), ("\ud800", None)):
            with pytest.raises(ApiError) as told:
                await prompts.of_completion(text, 1, "b")
            assert (told.value.status, told.value.code) == (400, why)
        prompts.close()

    asyncio.run(play())


def test_a_panic_on_a_text_is_an_error_and_writes_nothing(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    prompts = Prompts(slow(tmp_path, "(a+)+$"), None, lambda: WIDE)

    async def play() -> None:
        with pytest.raises(ApiError, match="cannot encode the text") as told:
            await prompts.of_completion("a" * 200 + "!", 1, "a")
        assert told.value.status == 400
        assert await prompts.of_completion("def", 1, "a")
        prompts.close()

    asyncio.run(play())
    assert capfd.readouterr() == ("", "")


def test_a_tokenizer_has_limits(tmp_path: Path) -> None:
    digest = slow(tmp_path, "b*b*c").digest
    limited = LimitedTokenizer(tmp_path, digest, Turns(4, 4), CallLimits(seconds=60.0, memory=32 << 20, answer=1 << 20))

    async def play() -> None:
        with pytest.raises(ApiError, match="the tokenizer ") as told:
            await limited.encode("a", "x" * 30_000_000, add_special_tokens=False)
        assert told.value.status == 500
        limited.close()

    asyncio.run(play())


@pytest.mark.parametrize("change", ["other", "broken", "missing", "linear"])
def test_a_tokenizer_changed_since_the_start_gives_no_tokens(
        tmp_path: Path, caplog: pytest.LogCaptureFixture, change: str) -> None:
    tokenizer, file = slow(tmp_path, "b*b*c"), tmp_path / "tokenizer.json"
    prompts, before = Prompts(tokenizer, None, lambda: WIDE), file.read_text()
    if change == "other":
        vocab = json.loads(before)["model"]["vocab"]
        first, second = (f"{json.dumps(name)}:{vocab[name]}" for name in ("d", "e"))
        swapped = f'"d":{vocab["e"]}', f'"e":{vocab["d"]}'
        compact = json.dumps(json.loads(before), separators=(",", ":"))
        assert first in compact and second in compact
        file.write_text(compact.replace(first, swapped[0]).replace(second, swapped[1]))
    elif change == "broken":
        file.write_text(before[:1000])
    elif change == "missing":
        file.unlink()
    else:
        file.write_bytes((Path(builtin.path()) / "tokenizer.json").read_bytes())

    async def play() -> None:
        for _ in range(2):
            with pytest.raises(ApiError) as told:
                await prompts.of_completion("def add(", 1, "a")
            assert (told.value.status, told.value.code) == (503, "checkpoint_changed")
            assert told.value.message == "the checkpoint has changed since the start: restart the server"
        file.write_text(before)
        expected = [tokenizer.encode("def add(")]
        assert await prompts.of_completion("def add(", 1, "a") == expected
        file.unlink()  # a worker that has read it goes on
        assert await prompts.of_completion("def add(", 1, "a") == expected
        prompts.close()

    asyncio.run(play())
    assert caplog.text.count("the checkpoint has changed") == 1


def test_a_relative_folder_is_found_by_the_worker(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A worker's current folder is another one."""
    (tmp_path / "checkpoint").mkdir()
    whole = slow(tmp_path / "checkpoint", r"(?:b|b){22}[^b]")
    monkeypatch.chdir(tmp_path)
    tokenizer = Tokenizer.load("checkpoint")
    assert tokenizer.slow_folder is not None
    limited = LimitedTokenizer(tokenizer.slow_folder, tokenizer.digest, Turns(4, 4))
    try:
        ids, offsets = (asyncio.run(limited.encode(
            "one", "def add(a):", add_special_tokens=False, wants_offsets=wants)) for wants in (False, True))
    finally:
        limited.close()
    assert ids == whole.encode("def add(a):", add_special_tokens=False)
    assert offsets == whole.offsets("def add(a):", add_special_tokens=False)
