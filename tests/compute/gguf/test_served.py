"""A GGUF file served over HTTP, and offline."""

from __future__ import annotations

from pathlib import Path

import pytest
from support.live import serving

from slotwise import LLM, SamplingParams

GREEDY = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)


@pytest.mark.slow
def test_a_file_is_served_by_its_name(folder: Path, file: Path, tmp_path: Path) -> None:
    with serving(str(file), "--dtype", "float32", "--max-num-seqs", "4", log=tmp_path / "log") as server:
        (model,) = server.client.get("/v1/models").json()["data"]
        assert (model["id"], model["root"]) == ("tiny", str(file))
        asked = {"model": str(file), "messages": [{"role": "user", "content": "hello"}], "max_tokens": 12,
                 "temperature": 0, "ignore_eos": True}
        answer = server.client.post("/v1/chat/completions", json=asked).json()
        assert answer["usage"]["completion_tokens"] == 12
        served = answer["choices"][0]["message"]["content"]
    (output,) = LLM(str(folder), dtype="float32", max_num_seqs=4).chat([{"role": "user", "content": "hello"}], GREEDY)
    assert served == output.outputs[0].text


@pytest.mark.slow
def test_offline(folder: Path, file: Path) -> None:
    answers = []
    for model in (folder, file):
        llm = LLM(str(model), dtype="float32", max_num_seqs=4)
        answers.append([output.outputs[0].text for output in llm.generate(["def add", "class A:"], GREEDY)])
    assert answers[0] == answers[1]
