"""Chat templates as models are published with: our rendering beside that of transformers' `apply_chat_template`, and
what becomes of conversations that clients send and templates were not written for: nothing of them may be lost.

usage: python tests/support/published_templates.py FOLDER     writes docs/templates.json about all templates of a folder
"""

from __future__ import annotations

import html
import json
import re
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from slotwise.api.parsers.base_parser import gathered
from slotwise.api.parsers.harmony import Harmony
from slotwise.api.parsers.parser_table import output_format
from slotwise.text.chat_template import ChatTemplate, ChatTemplateError
from slotwise.text.conversation import RESERVED_VARIABLES, InvalidMessages, OpenEnd, check_messages

Json = dict[str, Any]
SPECIAL = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>", "pad_token": "<pad>"}
TOOL = {"type": "function", "function": {
    "name": "weather", "description": "The weather <now> & later.", "parameters": {
        "type": "object", "properties": {"city": {"type": "string", "description": "été"},
                                         "days": {"type": "integer", "default": 1}}, "required": ["city"]}}}
USER = {"role": "user", "content": "Rain in Zürich?"}
AGAIN = {"role": "user", "content": "Wind there?"}
SYSTEM = {"role": "system", "content": "Be brief."}
ANSWER = {"role": "assistant", "content": "No."}
CALL = {"role": "assistant", "content": "", "tool_calls": [{"id": "abcdefghi", "type": "function", "function": {
    "name": "weather", "arguments": {"city": "Oerlikon", "days": 2}}}]}
RESULT = {"role": "tool", "tool_call_id": "abcdefghi", "name": "weather", "content": "sunny"}
CONVERSATIONS: dict[str, tuple[list[Json], Json]] = {
    "user": ([USER], {}),
    "turns": ([SYSTEM, USER, ANSWER, AGAIN], {}),
    "tools": ([SYSTEM, USER], {"tools": [TOOL]}),
    "calls": ([USER, CALL, RESULT], {"tools": [TOOL]}),
    "all": ([SYSTEM, USER, CALL, RESULT, ANSWER, AGAIN], {"tools": [TOOL, TOOL]}),
    "reasoning": ([USER, ANSWER | {"reasoning_content": "Hm."}, AGAIN],
                  {"enable_thinking": False, "reasoning_effort": "low"}),
}
ENDS = ("opened", "closed", "continued")  # by add_generation_prompt, by neither, by continue_final_message
OPEN = {"role": "assistant", "content": "It is"}


FIELDS: dict[str, Json] = {  # optional fields of each role, with what changes nothing
    "system": {"name": None}, "user": {"name": None},
    "assistant": {"content": None, "tool_calls": None, "refusal": None, "audio": None, "function_call": None,
                  "name": None, "reasoning_content": None, "reasoning": None, "annotations": None},
    "tool": {"name": None}}
OF_FUNCTIONS = ("description", "parameters", "strict")
ABSENT = object()
EMPTY: tuple[Any, ...] = (ABSENT, None, "", [])


class Rendered(NamedTuple):
    conversation: str
    ours: str | None  # None: the template, or a library, refuses the conversation
    theirs: str | None
    is_kept: bool  # theirs has all of the conversation

    @property
    def verdict(self) -> str:
        """`normalized`: theirs is refused or lacks something, and ours has all."""
        if self.ours == self.theirs:
            return "refused" if self.ours is None else "equal"
        return "differ" if self.is_kept or self.ours is None else "normalized"


class Tried(NamedTuple):
    """A conversation that needs to be normalized by some templates."""

    name: str
    messages: list[Json]
    variables: Json
    like: str = ""  # the conversation that has to give the same prompt


def transformers_tokenizer() -> Any:
    from tokenizers import Tokenizer, models
    from transformers import PreTrainedTokenizerFast

    return PreTrainedTokenizerFast(tokenizer_object=Tokenizer(models.BPE()), **SPECIAL)


def renderings(source: str, tokenizer: Any) -> Iterator[Rendered]:
    """Every conversation with every end, through one template."""
    template = ChatTemplate(source, SPECIAL)
    for name, (messages, variables) in CONVERSATIONS.items():
        for end in ENDS:
            shown = [*messages, OPEN] if end == "continued" else messages
            theirs = _theirs(source, tokenizer, shown, end, variables)
            yield Rendered(f"{name}, {end}", _ours(template, shown, end, variables), theirs,
                           theirs is not None and not lost(shown, variables, theirs))


def _ours(template: ChatTemplate, messages: list[Json], end: str, variables: Json) -> str | None:
    try:
        check_messages(messages)
        if end != "continued":
            return template.render(messages, add_generation_prompt=end == "opened", **variables)
        left_open = OpenEnd(messages)
        return left_open.cut(template.render(left_open.messages, True, add_generation_prompt=False, **variables))
    except (ChatTemplateError, InvalidMessages):
        return None


def _theirs(source: str, tokenizer: Any, messages: list[Json], end: str, variables: Json) -> str | None:
    try:
        return str(tokenizer.apply_chat_template(
            messages, chat_template=source, tokenize=False, add_generation_prompt=end == "opened",
            continue_final_message=end == "continued", **variables))
    except Exception:  # whatever a template raises
        return None


# -- what clients send ---------------------------------------------------------------------------------------------


def said(role: str, text: str | None, **fields: Any) -> Json:
    return {"role": role, "content": text, **fields}


def called(text: Any, name: str = "alpha", **fields: Any) -> Json:
    """An answer with a call.  Args: text: ABSENT for none."""
    call = {"id": f"{name}1234", "type": "function", "function": {
        "name": name, "arguments": json.dumps({"city": f"city of {name}"})}}
    return {"role": "assistant", "tool_calls": [call], **fields} | ({} if text is ABSENT else {"content": text})


def result(text: str, name: str = "alpha", **fields: Any) -> Json:
    return {"role": "tool", "tool_call_id": f"{name}1234", "content": text, **fields}


def function(name: str, **fields: Any) -> Json:
    return {"type": "function", "function": {"name": name, **fields}}


FULL = function("alpha", description="first tool", parameters=TOOL["function"]["parameters"])
GIVEN: Json = {"tools": [FULL]}
ASKED, BRIEF, REPLY, MORE = (said("user", "question one"), said("system", "rule one"), said("assistant", "answer one"),
                             said("user", "question two"))
PLAIN = [BRIEF, ASKED, REPLY, MORE]
CALLED = [BRIEF, ASKED, called(""), result("result one"), REPLY, MORE]
OURS: dict[str, Json] = {  # answers as our routes write them
    "plain": said("assistant", "answer one", refusal=None),
    "reasoning": said("assistant", "answer one", refusal=None, reasoning_content="thought", reasoning="thought"),
    "call": called(None, refusal=None),
    "call with text": called("I look.", refusal=None),
    "call with reasoning": called(None, refusal=None, reasoning_content="thought", reasoning="thought"),
    "call with all": called("I look.", refusal=None, reasoning_content="thought", reasoning="thought"),
    "two calls": called(None, refusal=None) | {"tool_calls": [
        *called("")["tool_calls"], *called("", "bravo")["tool_calls"]]},
}


def conversations() -> Iterator[Tried]:
    """What clients may send: each has to be in the prompt, or to be refused."""
    yield Tried("plain", PLAIN, {})
    yield Tried("called", CALLED, GIVEN)
    for base, messages, variables in (("plain", PLAIN, {}), ("called", CALLED, GIVEN)):
        for index, message in enumerate(messages):
            for field in FIELDS[message["role"]]:
                if not message.get(field):
                    for value in EMPTY:
                        changed = {name: old for name, old in message.items() if name != field}
                        if value is not ABSENT:
                            changed[field] = value
                        yield Tried(f"{base}, {index} {field} {'absent' if value is ABSENT else repr(value)}",
                                    [*messages[:index], changed, *messages[index + 1 :]], variables, base)
    for field in OF_FUNCTIONS:
        for value in EMPTY if field == "description" else (ABSENT, None):
            fields = {name: old for name, old in FULL["function"].items() if name not in ("name", field)}
            fields |= {} if value is ABSENT else {field: value or None}
            yield Tried(f"tool, {field} {'absent' if value is ABSENT else repr(value)}", [ASKED],
                        {"tools": [function("alpha", **fields)]}, "" if value is ABSENT else f"tool, {field} absent")
    yield Tried("tool, name only", [ASKED], {"tools": [function("alpha")]})
    for name, answer in OURS.items():
        results = [result(f"result {place}", call["function"]["name"])
                   for place, call in enumerate(answer.get("tool_calls", ()))]
        tools = {"tools": [FULL, function("bravo", description="second tool", parameters={
            "type": "object", "properties": {}})]} if results else {}
        yield Tried(f"our {name}", [BRIEF, ASKED, answer, *results], tools)
        if not results:
            yield Tried(f"our {name}, next turn", [BRIEF, ASKED, answer, MORE], {})
        else:
            turns, done = [BRIEF, ASKED, answer, *results], said("assistant", "done")
            yield Tried(f"our {name}, user's text behind results", [*turns, MORE], tools)
            yield Tried(f"our {name}, answered", [*turns, done, MORE], tools)
            yield Tried(f"our {name}, without tools", turns, {})
    loop = [BRIEF, ASKED, called("step one"), result("result one"), called("step two"), result("result two")]
    yield Tried("a loop of calls", loop, GIVEN)
    yield Tried("a loop of calls, answered", [*loop, REPLY, MORE], GIVEN)
    rule = said("developer", "rule two")
    yield Tried("developer", [rule, ASKED], {})
    yield Tried("developer behind system", [BRIEF, rule, ASKED], {})
    yield Tried("developer with tools", [BRIEF, rule, ASKED], GIVEN)
    yield Tried("developer later", [ASKED, REPLY, rule, MORE], {})
    late = said("system", "rule two")
    yield Tried("two system messages", [BRIEF, late, ASKED], {})
    yield Tried("two system messages with tools", [BRIEF, late, ASKED], GIVEN)
    yield Tried("a later system message", [BRIEF, ASKED, REPLY, late, MORE], {})
    yield Tried("a system message at the end", [BRIEF, ASKED, late], {})
    yield Tried("two turns of the user", [BRIEF, ASKED, MORE], {})
    yield Tried("two answers", [BRIEF, ASKED, REPLY, said("assistant", "answer two"), MORE], {})
    yield Tried("an answer, then a call", [BRIEF, ASKED, REPLY, called(None), result("result one")], GIVEN)
    yield Tried("two turns and a later system message", [BRIEF, ASKED, MORE, said("system", "rule two"), REPLY,
                                                         said("user", "question three")], {})
    yield Tried("ids of other servers", [ASKED, called(None) | {"tool_calls": [
        called("")["tool_calls"][0] | {"id": "call_0123456789abcdef"}]},
        result("result one") | {"tool_call_id": "call_0123456789abcdef"}], GIVEN)


def lost(messages: list[Json], variables: Json, rendered: str) -> list[str]:
    """Texts, calls and tools that are not in a prompt.  Reasoning is the template's to leave out."""
    texts = [message["content"] for message in messages if message.get("content")]
    for message in messages:
        for call in message.get("tool_calls") or ():
            arguments = call["function"]["arguments"]
            arguments = json.loads(arguments) if isinstance(arguments, str) else arguments
            texts += [call["function"]["name"], *[value for value in arguments.values() if isinstance(value, str)]]
    for tool in variables.get("tools", ()):
        texts += [tool["function"]["name"], tool["function"].get("description") or ""]
    return [text for text in texts
            if all(form not in rendered for form in (text, json.dumps(text)[1:-1], html.escape(text)))]


def losses(source: str) -> Iterator[tuple[Tried, str]]:
    """What became of every conversation: `kept`, `refused`, `lost`, or `unlike` where an empty field changed it."""
    template, prompts = ChatTemplate(source, SPECIAL), dict[str, str | None]()
    for tried in conversations():
        text = prompts[tried.name] = _ours(template, tried.messages, "opened", tried.variables)
        if text is None:
            yield tried, "refused"
        elif tried.like and text != prompts[tried.like]:
            yield tried, "unlike"
        else:
            yield tried, "lost" if lost(tried.messages, tried.variables, text) else "kept"


# -- how outputs are read ------------------------------------------------------------------------------------------


CITY = {"city": 'Pa<r>is "x" é', "days": 2, "where": ["a", {"b": "c"}], "ok": True}
WEATHER = function("weather", description="d", parameters={"type": "object", "properties": {
    "city": {"type": "string"}, "days": {"type": "integer"}, "where": {"type": "array"}, "ok": {"type": "boolean"}}})
CALLING = [said("user", "Rain?"), said("assistant", "", reasoning_content="THOUGHT", tool_calls=[
    {"id": "alpha1234", "type": "function", "function": {"name": "weather", "arguments": CITY}},
    {"id": "bravo1234", "type": "function", "function": {"name": "weather", "arguments": {"city": "Rome"}}}]),
    result("sunny") | {"name": "weather"}, result("windy", "bravo") | {"name": "weather"}]


class Read(NamedTuple):
    """How the outputs of a template's model are read."""

    tools: str  # names of parsers
    reasoning: str
    verdict: str  # `calls`, and `reasoning` with it; `text`: the template leaves calls out; `lost`: they are not read


def read_back(source: str) -> Read:
    """What the parsers that a template calls for make of calls as the same template writes them."""
    template, tokens = ChatTemplate(source, SPECIAL), dict.fromkeys(re.findall(r"<\|[^<>\s]*\|>", source))
    tokens |= dict.fromkeys(Harmony.SPELLINGS) if "<|channel|>" in source else {}
    form = output_format("", "", None, source, {token: number for number, token in enumerate(tokens)},
                         ignores_tools=template.ignores_tools)
    try:
        before, whole = [template.render(messages, tools=[WEATHER]) for messages in (CALLING[:1], CALLING)]
    except ChatTemplateError:
        return Read(form.tools, form.reasoning, "lost")
    at = next(place for place in range(len(whole)) if whole[: place + 1] != before[: place + 1])
    if (begin := whole.rfind("<", 0, at)) >= 0 and ">" not in whole[begin:at]:
        at = begin  # within a tag
    tools = {"weather": WEATHER["function"]["parameters"]}
    parser = form.parser(tools, form.has_begun(whole[:at]))
    found = gathered(parser.feed(form.markers(tools).of(whole[at:])) + parser.end())
    if not found.calls:
        return Read(form.tools, form.reasoning, "text" if "<tool_call>\n{" in whole[at:] else "lost")
    calls = [(call.name, json.loads(call.arguments)) for call in found.calls[:2]]
    if calls != [("weather", CITY), ("weather", {"city": "Rome"})][: len(calls)]:
        return Read(form.tools, form.reasoning, "lost")
    return Read(form.tools, form.reasoning, "calls, reasoning" if found.reasoning.startswith("THOUGHT") else "calls")


def main(folder: Path) -> None:
    import transformers

    tokenizer, rows = transformers_tokenizer(), []
    for path in sorted(folder.glob("*.jinja")):
        source = path.read_text()
        found = Counter(one.verdict for one in renderings(source, tokenizer))
        found.update(f"sent {verdict}" for _, verdict in losses(source))
        template, read = ChatTemplate(source, SPECIAL), read_back(source)
        rows.append({"template": path.stem, "parser": read.tools, "reasoning": read.reasoning, "read": read.verdict,
                     "variables": {name: about for name, about in template.variables().items()
                                   if name not in RESERVED_VARIABLES},
                     "tools": "ignored" if template.ignores_tools else "written"} | {
            kind: found[kind] for kind in (
                "equal", "normalized", "refused", "differ", "sent kept", "sent refused", "sent lost", "sent unlike")})
    content = {"transformers": transformers.__version__, "rows": rows}
    Path(__file__).parents[2].joinpath("docs", "templates.json").write_text(json.dumps(content, indent=1) + "\n")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
