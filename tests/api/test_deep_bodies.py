"""Bodies of any depth, at and around the one where an encoder gives up: an answer or a 400, and never a 5xx."""

from __future__ import annotations

import pytest
from support.live_server import Server

CALL = ('{"max_tokens":2,"messages":[{"role":"user","content":"x"},{"role":"assistant","content":'
        '[{"type":"tool_use","id":"a","name":"b","input":%s}]}]}')
TOOL = '{"max_tokens":2,"messages":[{"role":"user","content":"x"}],"tool_choice":{"type":"none"},"tools":[%s]}'
FUNCTION = '{"max_output_tokens":2,"input":"x","stream":%s,"tool_choice":"none","tools":[%s]}'
BODIES = {
    "call": ("/v1/messages", CALL), "tool": ("/v1/messages", TOOL % '{"name":"f","input_schema":%s}'),
    "item": ("/v1/responses", '{"max_output_tokens":2,"input":[{"role":"user","content":%s}]}'),
    "whole": ("/v1/responses", FUNCTION % ("false", '{"type":"function","name":"f","parameters":%s}')),
    "stream": ("/v1/responses", FUNCTION % ("true", '{"type":"function","name":"f","parameters":%s}')),
    "embedding": ("/v1/embeddings", '{"input":%s}'),
    "chat": ("/v1/chat/completions", '{"max_tokens":2,"messages":[{"role":"user","content":"x"}],'
             '"tool_choice":"none","tools":[{"type":"function","function":{"name":"f","parameters":%s}}]}')}


@pytest.mark.parametrize("name", BODIES)
def test_no_depth_is_an_error_of_the_server(server: Server, name: str) -> None:
    path, body = BODIES[name]
    for depth in (1, 100, 480, *range(960, 1001), 5000, 20_000):
        response = server.post(path, body.replace("%s", '{"a":' * depth + "1" + "}" * depth))
        assert response.status_code in (200, 400), (depth, response.text[:200])
        assert "response.failed" not in response.text, depth
    assert server.post("/v1/embeddings", {"input": "a"}).status_code == 200
