"""`/v1/systemone` over an engine whose token after x is x + 1 with probability 1/2, x + 2 with 1/4, and so on."""

from __future__ import annotations

import math
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from support.live_server import Server, eventually, running, unanswered

from slotwise.text.tokenizer import Tokenizer

PATH = "/v1/systemone"
TEAM = {"type": "choice", "instructions": "Which team?", "criteria": {"billing": "payments", "shipping": None}}
URGENT = {"type": "noul", "instructions": "Is it urgent?", "criteria": {"true": "money is moving"}}
TONE = {"type": "score", "instructions": "How upset?", "criteria": ["calm", "annoyed", "furious"]}
ASKED = {"team": TEAM, "urgent": URGENT, "tone": TONE}


def decide(server: Server, state: Any = "My card was charged twice.", questions: Any = ASKED, **more: Any) -> Any:
    response = server.post(PATH, {"state": state, "questions": questions, **more})
    assert response.status_code == 200, response.text
    return response.json()


def expected(tokenizer: Tokenizer, prompt: str, labels: list[str]) -> list[float]:
    """The probability of each label behind a prompt: the product of its tokens'."""
    ids, found = tokenizer.encode(prompt, add_special_tokens=False), []
    for label in labels:
        probability, last = 1.0, ids[-1]
        for token in tokenizer.encode("\n" + label, add_special_tokens=False)[1:]:
            probability *= 2.0 ** -((token - last - 1) % 400 + 1)
            last = token
        found.append(probability)
    return found


def test_answers_have_the_probabilities_of_their_labels(server: Server, tokenizer: Tokenizer) -> None:
    answer = decide(server, instructions="Be fair.")
    start = "<system>Be fair.<user>My card was charged twice.\n\nQuestion: "
    prompts = {
        "team": start + "Which team?\nA: billing - payments\nB: shipping\nAnswer with the letter of one option only.",
        "urgent": start + "Is it urgent?\nyes: money is moving\nno\nAnswer with yes or no only.",
        "tone": start + "How upset?\n0: calm\n1: annoyed\n2: furious\nAnswer with the number of one level only."}
    told, of = answer["answers"], {}
    for name, labels in (("team", ["A", "B"]), ("urgent", ["yes", "no"]), ("tone", ["0", "1", "2"])):
        of[name] = expected(tokenizer, prompts[name] + "<assistant>", labels)
    mass = {name: sum(found) for name, found in of.items()}
    first, second = of["team"]
    assert told["team"]["probabilities"] == pytest.approx({
        "billing": first / mass["team"], "shipping": second / mass["team"]}, rel=1e-4)
    assert told["team"]["choice"] == ("billing" if first >= second else "shipping") and told["team"]["type"] == "choice"
    assert told["team"]["confidence"] == pytest.approx(max(first, second), rel=1e-4)
    assert told["urgent"]["noul"] == pytest.approx(of["urgent"][0] / mass["urgent"], rel=1e-4)
    assert told["urgent"]["probabilities"] == pytest.approx({
        "yes": told["urgent"]["noul"], "no": 1 - told["urgent"]["noul"]}, rel=1e-4)
    shares = [one / mass["tone"] for one in of["tone"]]
    assert told["tone"]["score"] == pytest.approx(shares[1] + 2 * shares[2], rel=1e-4)
    assert told["tone"]["legend"] == {"0": "calm", "1": "annoyed", "2": "furious"}
    assert list(told) == ["team", "urgent", "tone"] and answer["object"] == "structured_decision"
    for name, diagnostics in answer["diagnostics"].items():
        assert diagnostics == {"label_mass": pytest.approx(mass[name], rel=1e-4), "argmax_is_label": False}


def test_the_likeliest_token_may_be_a_label(server: Server, tokenizer: Tokenizer) -> None:
    """A state of token ids cannot be given, so the label is searched that follows the prompt's last token."""
    last = tokenizer.encode("<assistant>", add_special_tokens=False)[-1]
    follower = tokenizer.decode([last + 1])
    answer = decide(server, questions={"a": {"type": "choice", "criteria": dict.fromkeys(map(chr, range(97, 123)))}})
    letters = [tokenizer.encode(chr(code))[-1] for code in range(65, 91)]
    assert answer["diagnostics"]["a"]["argmax_is_label"] == (last + 1 in letters), follower
    assert math.fsum(answer["answers"]["a"]["probabilities"].values()) == pytest.approx(1)


def test_reasoning_ends_before_an_answer_begins(folder: Path, tmp_path: Path, tokenizer: Tokenizer) -> None:
    """A model that thinks first is shown that it has thought."""
    with running(folder, tmp_path / "engine", "reasoning_parser=deepseek_r1") as thinking:
        answer = decide(thinking, questions={"team": TEAM})
    prompt = ("<user>My card was charged twice.\n\nQuestion: Which team?\nA: billing - payments\nB: shipping\n"
              "Answer with the letter of one option only.<assistant><think>\n\n</think>\n\n")
    first, second = expected(tokenizer, prompt, ["A", "B"])
    assert answer["answers"]["team"]["probabilities"]["billing"] == pytest.approx(first / (first + second), rel=1e-4)
    assert answer["usage"]["input_tokens"] == len(tokenizer.encode(prompt, add_special_tokens=False))


def test_a_state_may_be_json_and_a_question_stands_alone(server: Server) -> None:
    as_json = decide(server, {"ticket": "Zürich", "n": [1, 2.5, None]})
    as_text = decide(server, '{"ticket": "Zürich", "n": [1, 2.5, null]}')
    assert as_json["answers"] == as_text["answers"]
    assert decide(server, ["a", "b"])["answers"] == decide(server, '["a", "b"]')["answers"]
    alone = decide(server, questions={"tone": TONE})
    assert alone["answers"]["tone"] == decide(server)["answers"]["tone"]
    assert alone["usage"]["output_tokens"] == 0 and alone["usage"]["input_tokens"] == alone["usage"]["total_tokens"]
    assert alone["id"].startswith("decision-") and alone["model"] == "toy"


LONG = "the quick brown fox jumps over the lazy dog " * 20


def test_a_long_state_is_computed_once(slow: Server) -> None:
    """The first question computes it, and all reads behind it find its blocks."""
    two = {"team": TEAM, "level": TEAM | {"instructions": "Which one?"}}
    used = decide(slow, LONG, two, cache_salt="once")["usage"]
    one = decide(slow, LONG, {"team": TEAM}, cache_salt="other")["usage"]["input_tokens"]
    assert used["input_tokens_details"]["cached_tokens"] > 0.75 * (used["input_tokens"] - one)


def question(**fields: Any) -> dict[str, Any]:
    return {"questions": {"q": fields}}


@pytest.mark.parametrize(("body", "message"), [
    ({"questions": {}}, "questions"), ({"questions": {str(n): TONE for n in range(65)}}, "questions"),
    ({"questions": {"": TONE}}, "questions"), ({"state": None}, "state"), ({"state": 3}, "state"),
    (question(type="other"), "other"), (question(type="choice"), "1 to 26 options"),
    (question(type="choice", criteria={}), "1 to 26 options"),
    (question(type="choice", criteria=["a"]), "1 to 26 options"),
    (question(type="choice", criteria={str(n): None for n in range(27)}), "1 to 26 options"),
    (question(type="noul", criteria={"yes": "a"}), "true and false"), (question(type="noul", criteria=[]), "true"),
    (question(type="score", criteria=["one"]), "2 to 10 levels"), (question(type="score"), "2 to 10 levels"),
    (question(type="score", criteria=[str(n) for n in range(11)]), "2 to 10 levels"),
    (question(type="score", criteria=["same", "same"]), "same name"),
    (question(type="noul", weight=2), "weight"), ({"chat_template_kwargs": {"enable_thinking": True}}, "think"),
    ({"chat_template_kwargs": {"messages": []}}, "chat_template_kwargs"), ({"images": ["data:"]}, "images"),
    ({"seed": 4}, "seed"), ({"decision_template": "a"}, "decision_template"), ({"model": "other"}, "other"),
    ({"state": "a " * 2000}, "maximum context length")])
def test_what_is_wrong_is_named(server: Server, body: dict[str, Any], message: str) -> None:
    response = server.post(PATH, {"state": "a", "questions": ASKED} | body)
    assert response.status_code == (404 if "model" in body else 400), response.text
    assert message in response.json()["error"]["message"], response.text
    assert len(response.json()["error"]["message"]) < 500


def test_fields_are_obeyed_or_told(server: Server) -> None:
    response = server.post(PATH, {"state": "a", "questions": ASKED, "images": None, "question": 1,
                                  "chat_template_kwargs": {"enable_thinking": False, "shade": "x"}})
    assert response.status_code == 200
    told = response.headers.get_list("x-slotwise-warning", split_commas=False)
    assert any("'question'" in one for one in told) and any("shade" in one for one in told)


def test_large_bodies_are_bounded(server: Server) -> None:
    nested = {"state": [[1] * 9] * 30_000, "questions": ASKED}
    assert "commas and brackets" in server.post(PATH, nested).json()["error"]["message"]
    many = {str(n): {"type": "noul"} for n in range(30_000)}
    assert server.post(PATH, {"state": "a", "questions": many}).status_code == 400
    assert server.post(PATH, {"state": "a,[" * 40_000, "questions": ASKED}).json()["error"]["code"] == \
        "context_length_exceeded"


@pytest.fixture(scope="module")
def slow(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with running(folder, tmp_path_factory.mktemp("slow") / "engine", "seconds_per_step=0.3", "max_num_seqs=1",
                 "max_num_queued_reqs=100", "enable_prefix_caching=1") as one:
        yield one


def test_a_client_that_leaves_frees_its_slots_and_an_abort_ends_it(slow: Server) -> None:
    body = {"state": LONG, "questions": {str(n): TEAM for n in range(40)}}
    with unanswered(slow, PATH, body | {"request_id": "left"}):
        eventually(lambda: slow.get("/requests/left").status_code == 200)
    eventually(lambda: slow.get("/health").json()["num_live"] == 0)
    answers: list[Any] = []
    asking = threading.Thread(target=lambda: answers.append(slow.post(PATH, body | {"request_id": "gone"})))
    asking.start()
    eventually(lambda: answers or slow.get("/requests/gone").status_code == 200)
    assert not answers, answers[0].text
    assert slow.post("/abort_requests", {"request_id": "gone"}).json()["aborted"] == ["gone"]
    asking.join()
    assert answers[0].status_code == 400 and answers[0].json()["error"]["code"] == "abort"
    eventually(lambda: slow.get("/health").json()["num_live"] == 0)


def test_its_reads_are_explained(server: Server) -> None:
    decide(server, request_id="why")
    eventually(lambda: server.get("/explain/decision-why").status_code == 200)
    assert {one["completion_tokens"] for one in server.get("/explain/decision-why").json()["requests"]} == {0}
