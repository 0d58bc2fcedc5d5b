from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from slotwise.text import chat_template
from slotwise.text.chat_source import find_tool_template
from slotwise.text.chat_template import ChatTemplate, ChatTemplateError, load_chat_template, variables_of

CHATML = """\
{%- if messages[0]['role'] != 'system' %}
    {{- '<|im_start|>system\\nYou are helpful.<|im_end|>\\n' }}
{%- endif %}
{%- for message in messages %}
    {%- set content = message.content | trim if message.content else '' %}
    {%- if message.role == 'assistant' and '</think>' in content %}
        {%- set content = content.split('</think>')[-1].lstrip('\\n') %}
    {%- endif %}
    {{- '<|im_start|>' + message.role + '\\n' + content + '<|im_end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
    {%- if enable_thinking is defined and enable_thinking is false %}
        {{- '<think>\\n\\n</think>\\n\\n' }}
    {%- endif %}
{%- endif %}
"""
HEADERS = """\
{{ bos_token }}
{% if messages[0].role == "system" %}
    {% set system, messages = messages[0].content, messages[1:] %}
{% else %}
    {% set system = "" %}
{% endif %}
<|start_header_id|>system<|end_header_id|>

Today: {{ strftime_now("%Y") }}
{{ system }}<|eot_id|>
{% for message in messages %}
    {% if loop.index > 50 %}{% break %}{% endif %}
<|start_header_id|>{{ message.role }}<|end_header_id|>

{% generation %}{{ message.content | trim }}{% endgeneration %}<|eot_id|>
{% endfor %}
{{ {"a": "<é>", "n": [1, 2]} | tojson(indent=1) }}
{% if add_generation_prompt %}<|start_header_id|>assistant<|end_header_id|>

{% endif %}
"""
ALTERNATING = """\
{{- bos_token }}
{%- set ns = namespace(turn=0) %}
{%- for message in messages %}
    {%- if (message['role'] == 'user') != (ns.turn % 2 == 0) %}
        {{- raise_exception('roles must alternate user/assistant/user/assistant/...') }}
    {%- endif %}
    {%- set ns.turn = ns.turn + 1 %}
    {%- if message['role'] == 'user' %}
        {{- ' [INST] ' + message['content'] + ' [/INST]' }}
    {%- else %}
        {{- ' ' + message['content'] + eos_token }}
    {%- endif %}
{%- endfor %}
"""
TEMPLATES = {"chatml": CHATML, "headers": HEADERS, "alternating": ALTERNATING}
SPECIAL = {"bos_token": "<s>", "eos_token": "</s>"}
USER = {"role": "user", "content": "  Hi <b> & 'you' "}
CONVERSATIONS: dict[str, list[dict[str, Any]]] = {
    "one": [USER],
    "several": [
        USER, {"role": "assistant", "content": "<think>hm</think>\nHello."}, {"role": "user", "content": "日本?"}
    ],
    "system": [{"role": "system", "content": "Be brief."}, USER],
}


@pytest.mark.parametrize("name", TEMPLATES)
@pytest.mark.parametrize("conversation", CONVERSATIONS)
@pytest.mark.parametrize("opened", [True, False])
def test_renders_as_transformers_does(folder: Path, name: str, conversation: str, opened: bool) -> None:
    import transformers

    theirs = transformers.PreTrainedTokenizerFast(tokenizer_file=str(folder / "tokenizer.json"), **SPECIAL)
    messages = CONVERSATIONS[conversation]
    arguments = {"add_generation_prompt": opened, "enable_thinking": False}
    try:
        expected = theirs.apply_chat_template(
            messages, chat_template=TEMPLATES[name], tokenize=False, **arguments)
    except Exception as error:
        assert "alternate" in str(error) and conversation == "system", "there is no such role: the user says it"
        assert ChatTemplate(TEMPLATES[name], SPECIAL).render(messages, **arguments) == (
            "<s> [INST] Be brief.\n\n  Hi <b> & 'you'  [/INST]")
    else:
        assert ChatTemplate(TEMPLATES[name], SPECIAL).render(messages, **arguments) == expected


def test_text_parts_are_joined() -> None:
    parts = [{"type": "text", "text": "one"}, {"type": "text", "text": "two"}]
    template = ChatTemplate("{{ messages[0].content }}", {})
    assert template.render([{"role": "user", "content": parts}]) == "one\ntwo"


def test_reasoning_has_the_name_that_templates_know() -> None:
    template = ChatTemplate("{% for m in messages %}{{ m.content }}{{ m.reasoning_content }}{% endfor %}", {})
    for fields in ({"reasoning": "Hm."}, {"reasoning_content": "Hm.", "reasoning": "x"}):
        assert template.render([{"role": "assistant", "content": "No.", **fields}]) == "No.Hm."


def test_where_a_template_is_looked_for(folder: Path) -> None:
    assert load_chat_template(folder, {}) is None
    config = folder / "tokenizer_config.json"
    config.write_text(json.dumps({"chat_template": "config"}))
    assert load_chat_template(folder, {}).render([]) == "config"
    config.write_text(json.dumps({"chat_template": [{"name": "tool_use", "template": "t"},
                                                    {"name": "default", "template": "named"}]}))
    assert load_chat_template(folder, {}).render([]) == "named"
    assert find_tool_template(folder) == "t" and find_tool_template(folder, folder / "x") is None
    (folder / "chat_template.jinja").write_text("jinja {{ bos_token }}")
    assert find_tool_template(folder) is None
    (folder / "additional_chat_templates").mkdir()
    (folder / "additional_chat_templates" / "tool_use.jinja").write_text("for tools")
    assert find_tool_template(folder) == "for tools"
    assert load_chat_template(folder, SPECIAL).render([]) == "jinja <s>"
    (folder / "mine.jinja").write_text("mine")
    assert load_chat_template(folder, {}, folder / "mine.jinja").render([]) == "mine"


@pytest.mark.parametrize("config", [
    "{", '{"chat_template": "{% for %}"}', '{"chat_template": 5}',
    '{"chat_template": [{"name": "rag", "template": "x"}]}'])
def test_unusable_templates_are_clear_errors(folder: Path, config: str) -> None:
    (folder / "tokenizer_config.json").write_text(config)
    with pytest.raises(ChatTemplateError):
        load_chat_template(folder, {})
    with pytest.raises(ChatTemplateError, match="missing"):
        load_chat_template(folder, {}, folder / "missing.jinja")


@pytest.mark.parametrize("source", [
    "{{ ''.__class__.__mro__ }}", "{{ messages.append(1) }}", "{{ messages[0].content + 1 }}",
    "{% for i in range(10 ** 9) %}x{% endfor %}", "{{ cycler.__init__.__globals__ }}", "{{ raise_exception('no') }}"])
def test_a_template_can_neither_escape_nor_run_on(source: str) -> None:
    with pytest.raises(ChatTemplateError):
        ChatTemplate(source, {}).render([USER])


def test_output_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chat_template, "MAX_CHARACTERS", 1000)
    with pytest.raises(ChatTemplateError, match="more than 1000"):
        ChatTemplate("{% for i in range(99999) %}{{ i }}{% endfor %}", {}).render([])


@pytest.mark.parametrize(("source", "found"), [
    ("{{ messages }}{% if enable_thinking %}x{% endif %}", {"enable_thinking": {"type": "boolean"}}),
    ("{% if enable_thinking is defined and enable_thinking is false %}x{% endif %}",
     {"enable_thinking": {"type": "boolean"}}),
    ("{%- if effort is not defined %}{% set effort = 'low' %}{% endif %}{{ effort }}",
     {"effort": {"type": "string", "default": "low"}}),
    ("{% set budget = budget | default(-1) %}{{ budget }}", {"budget": {"type": "number", "default": -1}}),
    ("{% if mode | lower == 'on' or mode in ['off', 'auto'] %}x{% endif %}",
     {"mode": {"type": "string", "values": ["on", "off", "auto"]}}),
    ("{% set rs = strength if strength is defined and strength else 'high' %}{{ rs }}", {
        "strength": {"type": "string", "default": "high"}}),
    ("{% set rs = strength if strength is defined else 'high' %}{{ rs }}", {
        "strength": {"type": "string", "default": "high"}}),
    ("{% set ns = namespace(x=1) %}{% set content = 1 %}{% for m in messages %}{{ content }}{{ ns.x }}{{ bos }}"
     "{% endfor %}{% macro f(part) %}{{ part is defined }}{% endmacro %}", {"bos": {}}),
    ("{{ strftime_now('%Y') }}{{ raise_exception('x') }}{{ documents }}{% set documents = 3 %}", {"documents": {}}),
])
def test_what_a_template_reads(source: str, found: dict[str, object]) -> None:
    assert {name: about for name, about in variables_of(source).items() if name != "messages"} == found
