"""Hostile bodies: encodings, depths, sizes, types, numbers."""

from __future__ import annotations

import json
import random
from typing import Any

from .exchanges import ANSWERED, Exchange
from .hostile_heads import BODY, head

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
LIMIT = 4 << 20  # maximum bytes of a body
COMMON = ("model", "stream", "stream_options", "request_id", "service_tier", "priority", "ttft_ms", "tpot_ms", "user",
          "queue_timeout", "cache_salt", "n", "temperature", "top_p", "top_k", "min_p", "max_tokens", "min_tokens",
          "stop",
          "stop_token_ids", "ignore_eos", "seed", "presence_penalty", "frequency_penalty", "repetition_penalty",
          "logit_bias", "explain", "bench_output_tokens", "logprobs", "response_format", "prompt_logprobs",
          "guided_json")
FIELDS = {
    COMPLETIONS: (*COMMON, "prompt", "suffix", "echo", "best_of", "prompt_embeds"),
    CHAT: (*COMMON, "messages", "max_completion_tokens", "top_logprobs", "add_generation_prompt",
           "chat_template_kwargs",
           "tools", "tool_choice", "functions", "chat_template", "continue_final_message", "documents"),
    "/tokenize": ("model", "prompt", "messages", "add_special_tokens", "add_generation_prompt", "return_token_strs"),
    "/detokenize": ("model", "tokens"), "/abort_requests": ("request_ids", "request_id"),
    "/admin/scheduling": ("batching", "prefill", "tiers", "max_num_seqs", "max_num_batched_tokens", "max_stall_ms")}
BASES: dict[str, dict[str, Any]] = {
    COMPLETIONS: {"prompt": [2], "max_tokens": 2},
    CHAT: {"messages": [{"role": "user", "content": "x"}], "max_tokens": 2}, "/tokenize": {"prompt": "x"},
    "/detokenize": {"tokens": [2]}, "/abort_requests": {"request_ids": ["x"]}, "/admin/scheduling": {}}
VALUES: tuple[Any, ...] = (
    None, True, False, 0, 1, -1, 2, 0.5, "", "x", "1", "null", [], {}, [[]], [None], [True], [""], ["x"], [0], [-1],
    [[0]],
    [[""]], [1.5], {"": ""}, {"a": {"b": []}}, {"1": 1}, {"-1": 100}, {"x": 1}, {"1": None}, [{}], [[[]]],
    ["a", [], []],
    [5, "a"], [[5], "a"], [2**31], [2**63], [[2**64]], "\x00", "\U0001f600", "a" * 600, ["stop"] * 50, "\ud800", [4095],
    [10**6], {"include_usage": 1}, {"include_usage": True}, [{"role": "user"}], [{"role": 1, "content": "x"}],
    [{"role": "user", "content": None}], [{"role": "user", "content": [{"type": "text"}]}],
    [{"role": "", "content": ""}],
    [{"role": "system", "content": "x"}], [{"role": "user", "content": {"a": 1}}], [{"content": "x"}])
NUMBERS = ("0", "-0", "0.0", "-0.0", "5e-324", "1e-308", "1e-38", "1e-39", "1.4e-45", "1e-7", "0.999999999999999999",
           "1.0000000000000002", "1e38", "3.5e38", "1e308", "1e309", "-1e309", "1e999", "NaN", "Infinity", "-Infinity",
           "nan",
           "2147483647", "2147483648", "-2147483649", "4294967296", "9007199254740993", "9223372036854775807",
           "9223372036854775808", "-9223372036854775809", "18446744073709551616", "1" * 400, "0x10", "01", "1.", ".5",
           "+1",
           "1e", "--1", "1_000", "1e-400", "0e99999", "0.1e-1000000")
NUMERIC = ("n", "temperature", "top_p", "top_k", "min_p", "max_tokens", "min_tokens", "seed", "presence_penalty",
           "frequency_penalty", "repetition_penalty", "priority", "ttft_ms", "tpot_ms", "queue_timeout", "logprobs",
           "best_of", "bench_output_tokens", "max_completion_tokens", "top_logprobs")


def request(path: str, body: str, content_type: str = "application/json") -> str:
    """Returns a complete request.  `body` is text of bytes."""
    method = "PUT" if path.startswith("/admin/") else "POST"
    return head(method, path, f"Content-Type: {content_type}\r\nContent-Length: {len(body)}\r\n") + body


def _asked(name: str, path: str, body: str) -> Exchange:
    return Exchange(name, [["send", request(path, body)]], ANSWERED)


def _latin(value: Any) -> str:
    """Returns JSON with surrogates escaped, as text of bytes."""
    return json.dumps(value)


def types(rng: random.Random) -> Exchange:
    path = rng.choice(list(FIELDS))
    body = dict(BASES[path])
    for name in rng.sample(FIELDS[path], min(len(FIELDS[path]), rng.choice((1, 1, 1, 2, 4)))):
        body[name] = rng.choice(VALUES)
    return _asked("types", path, _latin(body))


def numbers(rng: random.Random) -> Exchange:
    path = rng.choice((COMPLETIONS, CHAT))
    told = "".join(f',"{rng.choice(NUMERIC)}":{rng.choice(NUMBERS)}' for _ in range(rng.choice((1, 1, 2))))
    return _asked("numbers", path, _latin(BASES[path])[:-1] + told + "}")


def sampled(rng: random.Random) -> Exchange:
    """Extreme numbers in or near their range, combined with sampling, so that they reach the sampler."""
    tiny = ("5e-324", "1e-300", "1e-45", "1e-38", "1e-20", "1e-6", "0.01", "1e6", "1e30", "1e38", "1e300", "100")
    body = {"prompt": "def f(", "max_tokens": 4, "seed": rng.randrange(100)}
    told = "".join(f',"{name}":{rng.choice(tiny)}' for name in rng.sample(
        ("temperature", "repetition_penalty", "top_p", "min_p", "presence_penalty", "frequency_penalty"), 2))
    if rng.random() < 0.4:
        told += f',"logit_bias":{{"{rng.randrange(5000)}":{rng.choice(("-100", "100", "1e300", "-1e300", "1e-300"))}}}'
    if rng.random() < 0.3:
        told += f',"logprobs":{rng.choice((0, 1, 5, 20))}'
    return _asked("sampling", COMPLETIONS, _latin(body)[:-1] + told + "}")


def encodings(rng: random.Random) -> Exchange:
    inside = rng.choice(("\xff", "\xc3\x28", "\xed\xa0\x80", "\xf8\x88\x80\x80\x80", "\x00", "\\u0000", "\\ud800",
                         "\\udfff\\ud800",
                         "\\ud83d", "\xf0\x9f\x98", "\x80" * 100, "\\x41", "\\u12", "\\", "\n", "\x1f",
                         "\\ud83d\\ude00",
                         "\xe2\x80\xa8", "\xef\xbf\xbf", "\xf4\x90\x80\x80"))
    form = rng.choice((
        '{"prompt":"%s","max_tokens":2}', '{"prompt":["%s"],"max_tokens":2}',
        '{"prompt":[2],"max_tokens":2,"stop":"%s"}',
        '{"prompt":[2],"max_tokens":2,"user":"%s"}', '{"prompt":[2],"model":"%s"}',
        '{"prompt":[2],"max_tokens":2,"%s":1}',
        '{"prompt":[2],"max_tokens":2,"request_id":"%s"}', '{"prompt":[2],"max_tokens":2,"cache_salt":"%s"}',
        '{"prompt":[2],"max_tokens":2,"note":"%s"}', '{"prompt":[2],"max_tokens":2,"stream":true,"stop":["%s"]}'))
    if rng.random() < 0.3:
        role = rng.choice(("user", inside))
        told = f'"role":"{role}","content":"{inside}","name":"{inside}"'
        return _asked("encoding", CHAT, f'{{"messages":[{{{told}}}],"max_tokens":2}}')
    return _asked("encoding", COMPLETIONS, form % inside)


def whole_encodings(rng: random.Random) -> Exchange:
    body = rng.choice((
        "\xef\xbb\xbf" + BODY, BODY.encode("utf-16").decode("latin-1"), BODY.encode("utf-32").decode("latin-1"),
        BODY + "\x00",
        BODY + BODY, BODY + "x", "\x00" + BODY, " " * 5000 + BODY, BODY + "\n" * 5000, "", " ", "null", "[]", "1",
        '"x"',
        "{", "{}", "{,}", '{"prompt":', "{'prompt':[2]}", "prompt=x&max_tokens=1", "\x1f\x8b\x08" + "\x00" * 30,
        '{"prompt":[2],"prompt":[2],"max_tokens":1,"max_tokens":2}', '{"prompt":[2],"max_tokens":1}//', "NaN",
        "\xff\xfe"))
    return _asked("whole body", COMPLETIONS, body)


def content_types(rng: random.Random) -> Exchange:
    kind = rng.choice(("text/plain", "", "application/x-www-form-urlencoded", "multipart/form-data; boundary=x", "\xff",
                       "application/json; charset=utf-16", "application/json;" * 500, "APPLICATION/JSON", "json", "*/*",
                       "application/json, text/plain", "application/vnd.api+json", "text/plain;application/json",
                       "a/b" * 900))
    return Exchange("content type", [["send", request(COMPLETIONS, BODY, kind)]], ANSWERED)


def depths(rng: random.Random) -> Exchange:
    deep = rng.choice((10, 100, 500, 900, 1100, 5000, 200_000))
    opens, closes = rng.choice((("[", "]"), ('{"a":', "}"), ('[{"":', "}]")))
    inside = opens * deep + rng.choice(("", "1", '"x"')) + (closes * deep if rng.random() < 0.7 else "")
    form = rng.choice(('{"prompt":%s}', '{"prompt":[2],"max_tokens":1,"x":%s}', '{"prompt":[2],"logit_bias":%s}', "%s",
                       '{"prompt":["a",%s]}'))
    if rng.random() < 0.4:
        return _asked("depth", CHAT, rng.choice((
            '{"messages":%s}', '{"messages":[{"role":"user","content":%s}],"max_tokens":1}',
            '{"messages":[{"role":%s}]}',
            '{"messages":[{"role":"user","content":"x"}],"chat_template_kwargs":%s,"max_tokens":1}')) % inside)
    return _asked("depth", COMPLETIONS, form % inside)


def sizes(rng: random.Random) -> Exchange:
    """Large bodies of many small elements, within a mebibyte; sometimes one beyond the limit."""
    item = rng.choice(("[]", '""', "5", "[2]", '"a"', "{}", "null", "1e5", "[[]]", '"\\""', '"\\u0041"', "-1",
                       '"a",[]'))
    count = rng.choice((1000, 50_000, (1 << 20) // (len(item) + 1)))
    if rng.random() < 0.05:
        count = LIMIT // (len(item) + 1) + 10
    path, form = rng.choice((
        (COMPLETIONS, '{"prompt":[%s],"max_tokens":1}'), (COMPLETIONS, '{"prompt":["a",%s],"max_tokens":1}'),
        (COMPLETIONS, '{"prompt":[2],"max_tokens":1,"stop":[%s]}'),
        (COMPLETIONS, '{"prompt":[2],"x":[%s],"max_tokens":1}'),
        (COMPLETIONS, '{"prompt":[2],"max_tokens":1,"stop_token_ids":[%s]}'),
        (CHAT, '{"messages":[%s],"max_tokens":1}'),
        (CHAT, '{"messages":["",%s],"max_tokens":1}'),
        (CHAT, '{"messages":[{"role":"user","content":[%s]}],"max_tokens":1}'),
        ("/detokenize", '{"tokens":[%s]}'), ("/abort_requests", '{"request_ids":[%s]}'),
        ("/tokenize", '{"messages":[%s]}'),
        ("/admin/scheduling", '{"tiers":[%s]}')))
    before, _, after = form.partition("%s")
    size = len(before) + len(after) + count * (len(item) + 1) - 1
    method = "PUT" if path.startswith("/admin/") else "POST"
    begin = head(method, path, f"Content-Type: application/json\r\nContent-Length: {size}\r\n")
    return Exchange("size", [["send", begin + before], ["repeat", item + ",", count - 1], ["send", item + after]],
                    ANSWERED)


def long_texts(rng: random.Random) -> Exchange:
    piece = rng.choice(("x", "x y ", "\\u0041", "\\ud800", "\\n", " ", "0", "\\ud83d\\ude00", "\xc3\xa9", "\\u0000",
                        "_", "</s>",
                        "<|im_start|>"))
    count = rng.choice((2000, 100_000, (1 << 20) // len(piece)))
    path, before, after = rng.choice((
        (COMPLETIONS, '{"prompt":"', '","max_tokens":1}'), (COMPLETIONS, '{"prompt":[2],"stop":"', '","max_tokens":1}'),
        (CHAT, '{"messages":[{"role":"user","content":"', '"}],"max_tokens":1}'), ("/tokenize", '{"prompt":"', '"}'),
        (COMPLETIONS, '{"prompt":[2],"max_tokens":1,"user":"', '"}'), (COMPLETIONS, '{"prompt":[2],"model":"', '"}'),
        (COMPLETIONS, '{"prompt":[2],"max_tokens":1,"', '":1}'), (COMPLETIONS, '{"prompt":[2],"max_tokens":', "1}")))
    size = len(before) + len(after) + count * len(piece)
    begin = head("POST", path, f"Content-Type: application/json\r\nContent-Length: {size}\r\n")
    return Exchange("long text", [["send", begin + before], ["repeat", piece, count], ["send", after]], ANSWERED)


GENERATORS = (types, types, types, numbers, numbers, sampled, sampled, encodings, encodings, whole_encodings,
              content_types, depths, depths, sizes, sizes, long_texts)
