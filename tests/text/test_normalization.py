"""What a template refuses or leaves out is rewritten until nothing is lost, or refused by name."""

from __future__ import annotations

from typing import Any

import pytest

from slotwise.text import normalization
from slotwise.text.chat_template import ChatTemplate, ChatTemplateError
from slotwise.text.conversation import InvalidMessages, OpenEnd, check_messages

Json = dict[str, Any]
FIRST_ONLY = (  # a system message anywhere but first is left out, and so is any role but three
    "{% for m in messages %}{% if m.role == 'system' and loop.first %}[{{ m.content }}]"
    "{% elif m.role == 'user' %}<{{ m.content }}>{% elif m.role == 'assistant' %}({{ m.content }}){% endif %}"
    "{% endfor %}")
ANY_ROLE = "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}"
KNOWING = ("{% for m in messages %}{% if m.role in ('developer', 'ipython') %}!{{ m.role }} {{ m.content }}"
           "{% elif m.role in ('user', 'system') %}<{{ m.role }}>{{ m.content }}{% endif %}{% endfor %}")
WITH_CALLS = (  # as many templates do: content + '', and a text beside calls is left out
    "{% if tools %}TOOLS{{ tools | tojson }}{% endif %}"
    "{% for m in messages %}{% if m.tool_calls is defined %}"
    "{{ '' if '</think>' in m.content else '' }}{{ m.tool_calls | map(attribute='function') | list | tojson }}"
    "{% else %}<{{ m.role }}>{{ m.content + '' }}{% endif %}{% endfor %}")
TOOL: Json = {"type": "function", "function": {"name": "weather", "parameters": {"type": "object", "properties": {}}}}


def message(role: str, content: Any, **fields: Any) -> Json:
    return {"role": role, "content": content, **fields}


def call(content: Any = None, arguments: Any = '{"city": "Rome"}', **fields: Any) -> Json:
    return message("assistant", content, tool_calls=[
        {"id": "abcdefghi", "type": "function", "function": {"name": "weather", "arguments": arguments}}], **fields)


def rendered(source: str, *messages: Json, **variables: Any) -> str:
    check_messages(list(messages))
    return ChatTemplate(source, {}).render(messages, **variables)


LEFT_TO_CLIENTS = (  # what calls stand for is the client's to write; results are turns
    "{% if tools %}List of tools: {{ tools | tojson }}{% endif %}"
    "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}")


def test_calls_that_a_template_leaves_to_clients_are_written_as_the_model_writes_them() -> None:
    text = rendered(LEFT_TO_CLIENTS, USER, call("Well."), RESULT, call(arguments={"days": [2, None]}), RESULT)
    assert text == ("<user>hi<assistant>Well.<|tool_call_start|>[weather(city='Rome')]<|tool_call_end|><tool>sunny"
                    "<assistant><|tool_call_start|>[weather(days=[2, None])]<|tool_call_end|><tool>sunny")
    kimi = LEFT_TO_CLIENTS.replace("List of tools: ", "<|im_system|>tool_declare")
    text = rendered(kimi, USER, call(), RESULT, call(), RESULT, tools=[TOOL])
    assert "functions.weather:0" in text and 'functions.weather:1<|tool_call_argument_begin|>{"city": "Rome"}' in text


def test_arguments_are_a_text_where_a_template_joins_them() -> None:
    joining = ("{% for m in messages %}{{ m.content or '' }}{% for c in m.tool_calls or [] %}"
               "{{ '>' + c.function.name + ' ' + c.function.arguments }}{% endfor %}{% endfor %}")
    assert rendered(joining, USER, call(), RESULT) == 'hi>weather {"city": "Rome"}sunny'


USER, RULE, RESULT = message("user", "hi"), message("system", "rule"), {
    "role": "tool", "tool_call_id": "abcdefghi", "content": "sunny"}


def test_a_developer_acts_as_system_where_the_template_does_not_know_the_role() -> None:
    brief = message("developer", "brief")
    assert rendered(FIRST_ONLY, brief, USER) == "[brief]<hi>"
    assert rendered(ANY_ROLE, brief, USER) == "<system>brief<user>hi"
    assert rendered(KNOWING, brief, USER) == "!developer brief<user>hi"


@pytest.mark.parametrize("role", ["narrator", "function", "System", "", "x" * 100_000, "zq1z", "<|im_start|>"])
@pytest.mark.parametrize("source", [FIRST_ONLY, ANY_ROLE, KNOWING])
def test_a_role_that_is_not_known_is_refused_by_name(source: str, role: str) -> None:
    with pytest.raises(ChatTemplateError, match=r"messages\[1\].role: must be system, .* not '") as refused:
        rendered(source, USER, message(role, "x"))
    assert len(str(refused.value)) < 300


def test_a_role_of_the_templates_own_passes() -> None:
    assert rendered(KNOWING, USER, message("ipython", "4")) == "<user>hi!ipython 4"


def test_system_messages_come_first_where_others_would_be_lost() -> None:
    later = message("system", "later")
    assert rendered(FIRST_ONLY, RULE, USER, later) == "[rule\n\nlater]<hi>"
    assert rendered(FIRST_ONLY, USER, later, message("developer", "last")) == "[later\n\nlast]<hi>"
    assert rendered(ANY_ROLE, RULE, USER, later) == "<system>rule<user>hi<system>later", "nothing is lost"


def test_turns_are_joined_where_they_must_alternate() -> None:
    source = ("{% for m in messages %}{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}"
              "{{ raise_exception('must alternate') }}{% endif %}<{{ m.role }}>{{ m.content }}{% endfor %}")
    more = message("user", "more")
    assert rendered(source, USER, more, message("assistant", "a"), message("assistant", "b"), more) == (
        "<user>hi\n\nmore<assistant>a\n\nb<user>more")
    assert rendered(source, RULE, USER, more) == "<user>rule\n\nhi\n\nmore"
    with pytest.raises(ChatTemplateError, match="must alternate"):
        rendered(source, message("assistant", "a"), USER)
    assert rendered(ANY_ROLE, USER, more) == "<user>hi<user>more"


@pytest.mark.parametrize("empty", [None, "", [], ...])
def test_content_that_is_null_or_absent_is_empty(empty: Any) -> None:
    answer = call(empty)
    if empty is ...:
        del answer["content"]
    assert rendered(WITH_CALLS, USER, answer, RESULT) == (
        '<user>hi[{"name": "weather", "arguments": {"city": "Rome"}}]<tool>sunny')
    answer = {"role": "assistant"} | ({} if empty is ... else {"content": empty})
    assert rendered(ANY_ROLE, USER, answer) == "<user>hi<assistant>"


@pytest.mark.parametrize("parameters", [{"type": "object", "properties": None}, {"properties": ["x"]}, ["x"], "x"])
def test_schemas_of_any_shape_are_written_where_a_conversation_is_rewritten(parameters: Any) -> None:
    tool = {"type": "function", "function": {"name": "weather", "parameters": parameters}}
    alternating = ("{{ tools | tojson }}{% for m in messages %}{% if loop.index0 % 2 and m.role == 'user' %}"
                   "{{ raise_exception('no') }}{% endif %}<{{ m.content }}>{% endfor %}")
    text = rendered(alternating, USER, message("user", "there"), tools=[tool])
    assert "weather" in text and text.endswith("<hi\n\nthere>")


@pytest.mark.parametrize("field", ["tool_calls", "refusal", "audio", "function_call", "name", "reasoning_content",
                                   "reasoning", "annotations", "tool_call_id"])
@pytest.mark.parametrize("empty", [None, "", []])
def test_a_field_that_is_empty_does_not_reach_the_template(field: str, empty: Any) -> None:
    source = ANY_ROLE + "{{ messages[1].keys() | list | sort }}"
    assert rendered(source, USER, message("assistant", "a", **{field: empty})) == (
        "<user>hi<assistant>a['content', 'role']")


def test_fields_of_tools_that_are_null_do_not_reach_the_template() -> None:
    tool = {"type": "function", "function": TOOL["function"] | {"description": None, "strict": None}, "x": None}
    assert rendered(WITH_CALLS, USER, tools=[tool]) == rendered(WITH_CALLS, USER, tools=[TOOL])


def test_tools_are_completed_where_the_template_needs_it() -> None:
    source = "{% for t in tools %}{{ t.function.name + ': ' + t.function.description }}{% endfor %}" + ANY_ROLE
    assert rendered(source, USER, tools=[TOOL]) == "weather: <user>hi"


def test_a_text_beside_calls_is_kept() -> None:
    assert rendered(WITH_CALLS, USER, call("I look."), RESULT) == (
        '<user>hi<assistant>I look.[{"name": "weather", "arguments": {"city": "Rome"}}]<tool>sunny')


def test_tools_that_the_template_ignores_are_in_the_system_prompt() -> None:
    text = rendered(FIRST_ONLY, RULE, USER, call("I look."), RESULT, tools=[TOOL])
    system, _, turns = text.partition("]<hi>")
    assert system.startswith("[rule\n\n# Tools") and '<tools>\n{"type": "function", "function": {"name":' in system
    assert turns == ('(I look.\n<tool_call>\n{"name": "weather", "arguments": {"city": "Rome"}}\n</tool_call>)'
                     "<<tool_response>\nsunny\n</tool_response>>")
    assert "# Tools" in rendered(FIRST_ONLY, USER, tools=[TOOL]) and ChatTemplate(FIRST_ONLY, {}).ignores_tools
    assert "# Tools" not in rendered(WITH_CALLS, USER, tools=[TOOL]) and not ChatTemplate(WITH_CALLS, {}).ignores_tools


@pytest.mark.parametrize(("source", "messages", "named"), [
    ("{{ messages[-1].content }}", [USER, message("assistant", "a"), USER], "messages[0]: the model's chat"),
    ("nothing", [USER], "messages[0]: "),
    ("{% for m in messages if m.role != 'tool' %}<{{ m.content }}>{% endfor %}", [USER, RESULT], "")])
def test_what_would_be_lost_is_refused_by_name(source: str, messages: list[Json], named: str) -> None:
    if named:
        with pytest.raises(ChatTemplateError) as refused:
            rendered(source, *messages)
        assert str(refused.value).startswith(named)
    else:
        assert rendered(source, *messages) == "<hi><<tool_response>\nsunny\n</tool_response>>"


@pytest.mark.parametrize(("fields", "named"), [
    ({"role": "user", "tool_calls": [{"function": {"name": "f"}}]}, "only a message of the assistant has calls"),
    ({"tool_calls": {"function": {"name": "f"}}}, "must be a list"), ({"tool_calls": [5]}, r"tool_calls\[0\]"),
    ({"tool_calls": [{"type": "custom", "custom": {}}]}, r"tool_calls\[0\]"),
    ({"tool_calls": [{"function": {"name": "f"}, "id": 5}]}, r"tool_calls\[0\].id"),
    ({"function_call": {"name": "f", "arguments": ""}}, "function_call: is not supported; send tool_calls"),
    ({"name": 5}, "name: must be a string"), ({"reasoning": {"a": 1}}, "reasoning: must be a string"),
    ({"refusal": ["x"]}, "refusal"), ({"tool_call_id": 1}, "tool_call_id")])
def test_a_field_of_the_wrong_shape_is_refused_by_name(fields: Json, named: str) -> None:
    with pytest.raises(InvalidMessages, match=rf"messages\[1\].*{named}"):
        check_messages([USER, {"role": "assistant", "content": "a"} | fields])


def test_an_open_end_stays_at_the_end() -> None:
    def opened(source: str, *messages: Json) -> str:
        left_open = OpenEnd(list(messages))
        return left_open.cut(ChatTemplate(source, {}).render(left_open.messages, True))

    begun = message("assistant", "The ans")
    assert opened(FIRST_ONLY, USER, RULE, begun) == "[rule]<hi>(The ans"
    with pytest.raises(ChatTemplateError, match=r"messages\[1\]"):
        opened(FIRST_ONLY, USER, RULE)
    with pytest.raises(ChatTemplateError, match="does not end with the last message"):
        opened("{% for m in messages | reverse %}{{ m.content }}{% endfor %}", USER, begun)


class Counted(ChatTemplate):
    """Counts what it writes."""

    def __init__(self, source: str) -> None:
        super().__init__(source, {})
        self.lengths: list[int] = []

    def _write(self, messages: Any, variables: Any) -> str:
        self.lengths.append(len(messages))
        return super()._write(messages, variables)


@pytest.mark.parametrize("source", [FIRST_ONLY, ANY_ROLE, WITH_CALLS])
def test_what_is_found_of_a_template_costs_little(source: str) -> None:
    """A conversation is written once, and once its skeleton, which is short however long the conversation."""
    template, turn = Counted(source), [USER, call("look"), RESULT, message("assistant", "done")]
    template.render([RULE, *turn * 50], tools=[TOOL])
    assert sum(length > 40 for length in template.lengths) == 1 and len(template.lengths) < 60
    template.lengths.clear()
    template.render([RULE, *turn * 51], tools=[TOOL])
    assert len(template.lengths) == 1, "the skeleton is known"


def test_what_is_remembered_of_a_template_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(normalization, "MAX_CHOICES", 3)
    template = Counted(ANY_ROLE)
    turns = [[RULE] * rules + [USER] * users for rules, users in ((0, 1), (1, 1), (2, 1), (1, 2), (2, 2))]
    for one in turns:
        template.render(one)
    template.lengths.clear()
    template.render(turns[-1])
    assert len(template.lengths) == 1
    template.render(turns[0])
    assert len(template.lengths) == 3, "it was forgotten"


def test_a_conversation_too_long_to_be_searched_is_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(normalization, "MAX_SEARCHED", 3)
    template = Counted(FIRST_ONLY)
    assert template.render([RULE, USER, message("assistant", "a"), message("system", "later"), USER]) == (
        "<rule\n\nlater\n\nhi>(a)<hi>")
    assert len(template.lengths) == 3


def test_a_conversation_is_rendered_alike_whatever_was_rendered_before() -> None:
    one = [RULE, USER, message("system", "later"), call("look"), RESULT]
    alone = ChatTemplate(FIRST_ONLY, {}).render(one, tools=[TOOL])
    template = ChatTemplate(FIRST_ONLY, {})
    for other in ([USER], [RULE, USER], [USER, RULE], [*one, USER]):
        template.render(other)
    assert template.render(one, tools=[TOOL]) == alone


def test_marks_in_a_conversation_hide_nothing() -> None:
    with pytest.raises(ChatTemplateError, match=r"messages\[0\]"):
        rendered("{{ messages[-1].content }}", message("user", "zq10z"), message("assistant", "zq10z zq11z zq12z"))
    assert rendered(ANY_ROLE, message("user", "zq10z")) == "<user>zq10z"
