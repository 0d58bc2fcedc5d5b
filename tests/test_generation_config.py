"""generation_config.json from the file to the answer: a server, the command line and the offline API."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from support.live import Live, cli, serving

from slotwise import LLM, SamplingParams, builtin
from slotwise.cli import main

pytestmark = pytest.mark.slow

PROMPT = "def add(a, b):"
SMALL = ("--dtype", "float32", "--max-num-seqs", "4", "--kv-cache-memory", str(32 << 20))


def edited(folder: Path, **fields: Any) -> Path:
    """The built-in model, with another generation_config.json."""
    shutil.copytree(builtin.path(), folder, ignore=shutil.ignore_patterns("*.py", "*.md", "__pycache__"))
    (folder / "generation_config.json").write_text(json.dumps(fields))
    return folder


def texts(live: Live, count: int = 4, **fields: Any) -> set[str]:
    body = {"prompt": PROMPT, "max_tokens": 16, "ignore_eos": True, **fields}
    answers = [live.client.post("/v1/completions", json=body | {"seed": seed}) for seed in range(count)]
    assert all(answer.status_code == 200 for answer in answers), answers[0].text
    return {answer.json()["choices"][0]["text"] for answer in answers}


def test_a_server_samples_as_the_file_says_until_a_request_says_otherwise(tmp_path: Path) -> None:
    folder = edited(tmp_path / "model", temperature=0.0, max_new_tokens=9, num_beams=4)
    log = tmp_path / "log"
    with serving(str(folder), *SMALL, log=log) as live:
        greedy = texts(live)
        assert len(greedy) == 1 and texts(live, temperature=0) == greedy
        assert len(texts(live, temperature=1.5)) > 1
        chat = live.client.post("/v1/chat/completions", json={
            "messages": [{"role": "user", "content": PROMPT}], "ignore_eos": True}).json()
        assert chat["usage"]["completion_tokens"] == 9
        (model,) = live.client.get("/v1/models").json()["data"]
        assert model["default_sampling_params"] == {"temperature": 0.0, "max_tokens": 9}
    lines = log.read_text().splitlines()
    (told,) = [line for line in lines if "sampling by default" in line]
    assert "temperature 0.0, max_tokens 9" in told and str(folder / "generation_config.json") in told
    (warned,) = [line for line in lines if "num_beams would change the answers" in line]
    assert "WARNING" in warned


def test_the_operator_may_choose_and_change_the_file(tmp_path: Path) -> None:
    folder = edited(tmp_path / "model", temperature=0.0, eos_token_id=1)
    other = edited(tmp_path / "other", temperature=0.0, top_k=1, max_new_tokens=5)
    with serving(str(folder), *SMALL, "--generation-config", "vllm", log=tmp_path / "a") as live:
        assert len(texts(live)) > 1
        assert live.client.get("/v1/models").json()["data"][0]["default_sampling_params"] == {}
    with serving(str(folder), *SMALL, "--generation-config", str(other), "--override-generation-config",
                 '{"temperature": 0.7}', log=tmp_path / "b") as live:
        assert live.client.get("/v1/models").json()["data"][0]["default_sampling_params"] == {
            "temperature": 0.7, "top_k": 1, "max_tokens": 5}
        assert len(texts(live)) == 1, "the most probable token alone"
        answer = live.client.post("/v1/completions", json={"prompt": PROMPT, "max_tokens": 50, "ignore_eos": True})
        assert answer.json()["usage"]["completion_tokens"] == 5
        assert answer.json()["choices"][0]["finish_reason"] == "length"


@pytest.mark.parametrize(("fields", "arguments", "told"), [
    ({"temperature": float("nan")}, (), "generation_config.json: temperature must be a number from 0 to 100, not nan"),
    ({"top_k": "x"}, (), "generation_config.json: top_k must be a whole number"),
    ({}, ("--generation-config", "/nowhere"), "/nowhere does not exist"),
    ({}, ("--override-generation-config", '{"num_beams": 3}'), "num_beams is not supported")])
def test_what_is_wrong_ends_the_start_with_one_line(
        fields: dict[str, Any], arguments: tuple[str, ...], told: str, tmp_path: Path) -> None:
    done = cli("serve", str(edited(tmp_path / "model", **fields)), "--port", "0", *arguments)
    assert done.returncode == 1
    (line,) = done.stderr.splitlines()
    assert line.startswith("slotwise serve: ") and told in line


@pytest.mark.parametrize("text", ["{", "[1]", "5", "[" * 9000, '{"a": "' + "x" * (1 << 16) + '"}'])
def test_an_override_that_is_no_object_is_refused(text: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["serve", "--override-generation-config", text])
    told = capsys.readouterr().err
    assert ended.value.code == 2 and "must be a JSON object" in told and len(told.splitlines()) == 1


def test_offline_a_call_without_parameters_uses_them(tmp_path: Path) -> None:
    folder = str(edited(tmp_path / "model", temperature=0.0, max_new_tokens=9))
    small: dict[str, Any] = {"dtype": "float32", "max_num_seqs": 2, "max_model_len": 64}
    llm = LLM(folder, **small)
    assert llm.get_default_sampling_params() == SamplingParams(temperature=0.0, max_tokens=9)
    greedy = llm.generate(PROMPT, SamplingParams(temperature=0, max_tokens=9), use_tqdm=False)[0].outputs[0]
    assert greedy.finish_reason == "length"
    asked = {"role": "user", "content": PROMPT}
    for outputs in (llm.generate([PROMPT] * 3, use_tqdm=False), llm.chat([asked], use_tqdm=False)):
        assert {output.outputs[0].text for output in outputs} == {greedy.text}
    assert "".join(llm.stream(PROMPT)) == greedy.text
    long = llm.generate({"prompt_token_ids": [5] * 60}, use_tqdm=False)[0].outputs[0]
    assert len(long.token_ids) <= 4, "a default is lowered to what fits"


def test_offline_settings_have_the_servers_meaning(tmp_path: Path) -> None:
    folder = str(edited(tmp_path / "model", temperature=0.0, max_new_tokens=9, eos_token_id=1))
    other = str(edited(tmp_path / "other", top_k=3, eos_token_id=7) / "generation_config.json")
    small: dict[str, Any] = {"dtype": "float32", "max_num_seqs": 2, "max_model_len": 64}
    neutral = LLM(folder, generation_config="vllm", **small)
    assert neutral.get_default_sampling_params() == SamplingParams() and neutral.info.eos_token_ids == (1,)
    changed = LLM(folder, generation_config=other, override_generation_config={"top_p": 0.5}, **small)
    assert changed.get_default_sampling_params() == SamplingParams(top_k=3, top_p=0.5)
    assert changed.info.eos_token_ids == (1, 7)


def test_the_terminal_uses_them_too(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = str(edited(tmp_path / "model", temperature=0.0, max_new_tokens=5))

    def generated(*options: str) -> str:
        assert main(["generate", "--model", folder, *options, PROMPT]) == 0
        return capsys.readouterr().out

    default, longer = generated(), generated("--max-tokens", "24")
    assert default == generated("--temperature", "0", "--max-tokens", "5")
    assert longer.startswith(default.rstrip("\n")) and len(longer) > len(default)
