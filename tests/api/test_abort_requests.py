"""POST /abort_requests over real processes: whoever is named ends, whatever they were doing, and nobody else."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pytest
from api.test_lifecycle import COMPLETIONS, SLOW, eventually, gauge
from support.live_server import ENDLESS, Server, counted, running

from slotwise.api.protocol.decoding import MAX_ABORTS
from slotwise.text.tokenizer import Tokenizer


class Asking:
    """A request in a thread of its own."""

    def __init__(self, server: Server, body: dict[str, Any], **headers: str) -> None:
        self.answer: Any = None
        self._server, self._body, self._headers = server, body, headers
        self._thread = threading.Thread(target=self._ask)
        self._thread.start()

    def _ask(self) -> None:
        if self._body.get("stream"):
            self.answer = self._server.events(COMPLETIONS, self._body)
        else:
            self.answer = self._server.post(COMPLETIONS, self._body, **self._headers)

    def wait(self) -> Any:
        self._thread.join(120)
        assert self.answer is not None
        return self.answer


def aborted(server: Server, *names: str, **headers: str) -> list[str]:
    answer = server.post("/abort_requests", {"request_ids": list(names)}, **headers)
    assert answer.status_code == 200, answer.text
    return answer.json()["aborted"]


def test_the_named_end_and_their_neighbors_do_not_notice(folder: Path, tmp_path: Path, tokenizer: Tokenizer) -> None:
    with running(folder, tmp_path / "engine", *SLOW, "max_num_seqs=4") as server:
        neighbor = Asking(server, {"prompt": [40], "max_tokens": 150})
        decoding = Asking(server, ENDLESS | {"stream": True, "request_id": "decoding"})
        several = Asking(server, ENDLESS | {"n": 2}, **{"X-Request-Id": "several"})
        eventually(lambda: gauge(server, "num_requests_running") == 4)
        queued = Asking(server, ENDLESS | {"request_id": "queued"})
        eventually(lambda: gauge(server, "num_requests_waiting") == 1)
        assert aborted(server, "queued", "nobody", "cmpl-decoding", "several") == ["queued", "cmpl-decoding", "several"]
        answer = queued.wait().json()
        assert answer["choices"][0]["finish_reason"] == "abort" and answer["choices"][0]["text"] == ""
        assert [choice["finish_reason"] for choice in several.wait().json()["choices"]] == ["abort", "abort"]
        assert decoding.wait()[-1]["choices"][0]["finish_reason"] == "abort"
        eventually(lambda: gauge(server, "num_requests_running") == 1)
        assert neighbor.wait().json()["choices"][0]["text"] == tokenizer.decode(counted(40, 150))
        eventually(lambda: gauge(server, "kv_cache_usage_perc") == 0)
        assert 'finished_reason="abort",model_name="toy"} 4.0' in server.get("/metrics").text
        again = server.post("/abort_requests", {"request_id": "decoding"})
        assert again.json() == {"aborted": [], "not_found": ["decoding"]}


def test_a_name_that_several_have_ends_them_all(folder: Path, tmp_path: Path) -> None:
    with running(folder, tmp_path / "engine", *SLOW) as server:
        twins = [Asking(server, ENDLESS | {"request_id": "twin"}) for _ in range(2)]
        eventually(lambda: gauge(server, "num_requests_running") == 2)
        assert aborted(server, "twin") == ["twin"]
        assert [twin.wait().json()["choices"][0]["finish_reason"] for twin in twins] == ["abort"] * 2


def test_tenants_do_not_end_each_others_requests(folder: Path, tmp_path: Path) -> None:
    with running(folder, tmp_path / "engine", *SLOW, "api_keys=one,two") as server:
        one, two = ({"Authorization": f"Bearer {key}"} for key in ("one", "two"))
        asking = Asking(server, ENDLESS | {"request_id": "mine"}, **one)
        eventually(lambda: "num_live\":1" in server.get("/health").text)
        assert aborted(server, "mine", **two) == []
        assert aborted(server, "mine", **one) == ["mine"]
        assert asking.wait().json()["choices"][0]["finish_reason"] == "abort"


@pytest.mark.parametrize("body", [
    {}, {"request_id": "a", "request_ids": ["b"]}, {"request_ids": "a"}, {"request_ids": [1]}, {"request_id": 7}, [],
    "{", {"request_ids": ["x"] * (MAX_ABORTS + 1)}])
def test_bodies_that_name_nobody(server: Server, body: Any) -> None:
    answer = server.post("/abort_requests", body)
    assert answer.status_code == 400 and answer.json()["error"]["type"] == "invalid_request_error"
