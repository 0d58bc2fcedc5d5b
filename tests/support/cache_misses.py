"""Why prompts of a live server missed the prefix cache: what a client sees for each cause."""

from __future__ import annotations

from typing import Any

from prometheus_client.parser import text_string_to_metric_families

from support.live import Live

BLOCK = 16
NUM_BLOCKS = 40  # of the cache, about
TEXT = """def read_lines(path):
    \"\"\"Returns the lines of a file, without their ends, for a caller who wants them as a list of strings.\"\"\"
    with open(path) as file:
        return [line.rstrip() for line in file]


def write_lines(path, lines):
    \"\"\"Writes the lines to a file, each with its end, for a caller who has them as a list of strings.\"\"\"
    with open(path, "w") as file:
        file.writelines(line + chr(10) for line in lines)
"""
OPTIONS = ("--api-key", "one", "--api-key", "two", "--admin-api-key", "root", "--max-num-seqs", "2",
           "--max-model-len", "512", "--block-size", str(BLOCK))


def get(server: Live, path: str, key: str = "root") -> Any:
    answer = server.client.get(path, headers={"Authorization": f"Bearer {key}"})
    return answer.raise_for_status()


def ask(server: Live, prompt: str | list[int], key: str = "one", **fields: Any) -> dict[str, Any]:
    """The explanation of a request."""
    body = {"prompt": prompt, "max_tokens": 1, "temperature": 0, **fields}
    answer = server.client.post("/v1/completions", json=body, headers={"Authorization": f"Bearer {key}"})
    (explanation,) = get(server, f"/explain/{answer.raise_for_status().json()['id']}", key).json()["requests"]
    return explanation


def causes(explanation: dict[str, Any]) -> list[str]:
    """Its causes, in order; each span takes a predicted time, and they cover the prompt."""
    spans = explanation["cache"]["spans"]
    assert all(span["seconds"] > 0 and span["tokens"] == span["to"] - span["from"] for span in spans)
    assert [0, *[span["to"] for span in spans]] == [*[span["from"] for span in spans], explanation["prompt_tokens"]]
    return [span["cause"] for span in spans]


def metric(server: Live, cause: str) -> float:
    families = text_string_to_metric_families(get(server, "/metrics").text)
    return next(sample.value for family in families for sample in family.samples
                if sample.name == "slotwise:prompt_tokens_by_cause_total" and sample.labels["cause"] == cause)


def check_each_cause(server: Live, begin: str) -> None:
    """Asks so that each cause that one server alone can have is given, with its seconds and its words.

    Args:
        begin: text that the tokenizer puts before every prompt.
    """
    tokens = server.client.post("/tokenize", json={"prompt": TEXT}, headers={"Authorization": "Bearer one"}).json()[
        "tokens"]
    assert 5 * BLOCK < len(tokens) < NUM_BLOCKS * BLOCK // 2
    end = (len(tokens) - 1) // BLOCK * BLOCK

    assert causes(ask(server, tokens[:5])) == ["too_short"]
    first = ask(server, tokens)
    assert causes(first) == ["new", "last_block"]
    assert "they were not cached: the engine started" in first["cache"]["sentence"]

    before = metric(server, "found")
    again = ask(server, tokens)
    assert causes(again) == ["found", "last_block"] and again["cached_tokens"] == end
    assert metric(server, "found") - before == end

    changed = [*tokens[: BLOCK + 3], tokens[BLOCK + 3] + 1, *tokens[BLOCK + 4 :]]
    diverged = ask(server, changed)
    assert causes(diverged) == ["found", "diverged", "last_block"]
    span = diverged["cache"]["spans"][1]
    assert span["diverged_at"] == BLOCK + 3 and f"from token {BLOCK + 3} on" in diverged["cache"]["sentence"]
    assert span["text"]["before"] + span["text"]["nearest"] in begin + TEXT
    assert span["text"]["own"] != span["text"]["nearest"] and span["same_behind"] > 0.8
    assert "is the same: move what changes to the end" in span["advice"]

    assert causes(ask(server, tokens, cache_salt="other")) == ["other_salt", "last_block"]
    assert causes(ask(server, tokens, prompt_logprobs=0)) == ["whole_prompt"]

    strange = [[number + 40] * (NUM_BLOCKS * BLOCK // 2) for number in range(3)]
    number = [ask(server, prompt)["number"] for prompt in strange][-1]
    evicted = ask(server, tokens)
    assert causes(evicted)[-2:] == ["evicted", "last_block"]
    span = evicted["cache"]["spans"][-2]
    assert 0 < span["evicted_for"] <= number and span["evicted_s_before"] >= 0

    for path in ("/sleep?level=1", "/wake_up"):
        server.client.post(path, headers={"Authorization": "Bearer root"}).raise_for_status()
    slept = ask(server, tokens)
    assert causes(slept) == ["reset", "last_block"] and "the model slept" in slept["cache"]["sentence"]
    assert causes(ask(server, tokens)) == ["found", "last_block"]
