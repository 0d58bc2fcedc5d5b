"""Normalizes a conversation to what a chat template accepts, so that nothing of it is lost.

The APIs allow what templates refuse or leave out: fields that are null, the role `developer`, system messages after
others, two turns of one role in a row, tools.  What a template does with a conversation is found by rendering its
skeleton, in which a mark stands in the place of every text, call and tool: what is not in the prompt was left out.

    messages ─► canonical ─► skeleton ─► rendered: every mark is there ──────────────────────► the canonical messages
                                                   a mark is missing, or the template refuses
                                                     └─► the fewest REWRITES that keep all ──► rewritten messages
                                                         there are none ─────────────────────► refused by name

The choice depends on the template and the skeleton alone, so the same conversation always gives the same prompt.  It is
cached.  Reasoning of earlier turns is the template's to keep or to leave out, as its model was trained.

Tool calls of earlier turns become what templates expect.  OpenAI's clients send a call's `arguments` as a text of
JSON.  Templates write `arguments | tojson`, or walk through them, so that a text would be encoded twice: it is parsed
first, as in vLLM, and no arguments become an empty object. A text that is not JSON, or no object, stays as it is:
models write such texts, and clients send them back.  (vLLM refuses what is not JSON.)
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cached_property, lru_cache, partial
from itertools import takewhile
from typing import Any, NamedTuple, NoReturn

from slotwise.text.chat_source import ChatTemplateError
from slotwise.text.conversation import EMPTY, Message, text_of

MAX_ARGUMENTS = 1 << 20  # of the arguments of one call
MAX_DEPTH = 64  # of objects and lists within each other
MAX_ROLE = 64  # characters
MAX_RUN = 8  # messages
MAX_SEARCHED = 512  # messages of a skeleton; a longer one that cannot stay as it is gets all rewrites
MAX_CHOICES = 256  # skeletons whose rewrites are remembered
ROLES = ("system", "user", "assistant", "tool")
INSTRUCTING = ("system", "developer")
REASONING = ("reasoning_content", "reasoning", "thinking")  # names of one field; the first is the usual one
SHORT_ID = re.compile(r"[A-Za-z0-9]{9}")  # of a call, as Mistral's templates demand

Variables = dict[str, Any]
Conversation = tuple[list[Message], Variables]
Write = Callable[[list[Message], Variables], str]

TOOLS_AS_TEXT, CALLS_AS_TEXT, CALLS_WRITTEN = "tools as text", "calls as text", "calls written"

_MARK = re.compile(r"zq\d+z", re.IGNORECASE)
_PROBED = {"type": "function", "function": {"name": "zq1z", "description": "d", "parameters": {
    "type": "object", "properties": {"x": {"type": "string", "description": "d"}}, "required": ["x"]}}}
_ASKED: Message = {"role": "user", "content": "zq2z"}

TOOLS = """\
# Tools

You are provided with function signatures within <tools></tools> XML tags, and may call one or more of them:
<tools>
{tools}
</tools>

For each function call, return a JSON object with the function's name and arguments within <tool_call></tool_call> tags:
<tool_call>
{{"name": <function-name>, "arguments": <args-json-object>}}
</tool_call>"""
"""What the system prompt says of tools where the template ignores them, in the form of Hermes models."""


# -- tool calls --------------------------------------------------------------------------------------------------------


class ArgumentsError(ValueError):
    """Arguments that are too large to be parsed; the message says which bound they exceed."""


def with_parsed_arguments(message: Mapping[str, Any]) -> Mapping[str, Any]:
    """A message of the assistant with the arguments of its tool calls as objects, and without an empty list of calls.

    Any other message, and what does not have the shape of a call, is returned as it is.

    Raises:
        ArgumentsError: the arguments of a call exceed a bound.
    """
    calls = message.get("tool_calls")
    if message.get("role") != "assistant" or not isinstance(calls, list):
        return message
    if not calls:
        return {name: value for name, value in message.items() if name != "tool_calls"}
    return {**message, "tool_calls": [_parsed_call(call) for call in calls]}


def _parsed_call(call: Any) -> Any:
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(function, dict):
        return call
    return {**call, "function": {**function, "arguments": _arguments(function.get("arguments"))}}


def _arguments(given: Any) -> Any:
    if given is None or given == "":
        return {}
    if not isinstance(given, str):
        return given
    if len(given) > MAX_ARGUMENTS:
        raise ArgumentsError(f"the arguments of a tool call have {len(given)} characters, "
                             f"more than {MAX_ARGUMENTS}")
    try:
        parsed = json.loads(given, parse_constant=_no_constant)
    except RecursionError:
        raise _too_deep() from None
    except ValueError:
        return given
    if not isinstance(parsed, dict):
        return given
    _check_depth(parsed)
    return parsed


def _check_depth(value: Any) -> None:
    """Raises ArgumentsError for objects and lists that are nested too deeply."""
    level: list[Any] = [value]
    for _ in range(MAX_DEPTH):
        level = [inner for outer in level for inner in (outer.values() if isinstance(outer, dict) else outer)
                 if isinstance(inner, (dict, list))]
        if not level:
            return
    raise _too_deep()


def _too_deep() -> ArgumentsError:
    return ArgumentsError(f"the arguments of a tool call are nested more than {MAX_DEPTH} levels deep")


def _no_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not JSON")


# -- conversations -----------------------------------------------------------------------------------------------------


class Normalizer:
    """Normalizes conversations for one template.

    Args:
        write: renders messages with all variables; raises ChatTemplateError.
        source: of the template.
    """

    def __init__(self, write: Write, source: str = "") -> None:
        self._write = write
        self._rewrites = dict(REWRITES)
        for form in WRITTEN_CALLS:
            if all(sign in source for sign in form.signs):
                rest = self._rewrites.copy()
                first = {name: rest.pop(name) for name in (TOOLS_AS_TEXT, CALLS_AS_TEXT)}
                self._rewrites = first | {CALLS_WRITTEN: partial(_calls_written, form)} | rest
                break
        self._chosen: dict[bytes, Sequence[str] | None] = {}  # by the digest of a skeleton
        self._knows = lru_cache(MAX_CHOICES)(self._finds_role)
        self._null_content = lru_cache(2)(self._finds_null_content)

    def normalized(self, messages: Sequence[Mapping[str, Any]], variables: Variables, *, is_open: bool) -> Conversation:
        """Messages and variables such that the template leaves nothing out.

        Args:
            is_open: the end of the prompt is the end of the last message.

        Raises:
            ChatTemplateError: the template refuses the messages or leaves one out, or a role is not known.
        """
        variables = variables | {"tools": _without_nulls(variables.get("tools"))}
        found = [self._canonical(index, message, variables) for index, message in enumerate(messages)]
        places = _outline(found)
        skeleton = _skeleton([found[place] for place in places], variables)
        digest = hashlib.sha256(json.dumps([*skeleton, is_open], default=str).encode()).digest()
        if digest not in self._chosen:
            if len(self._chosen) == MAX_CHOICES:
                del self._chosen[next(iter(self._chosen))]
            self._chosen[digest] = self._choose(*skeleton, is_open)
        names = self._chosen[digest]
        if names is None:
            self._write(found, variables)  # raises what the template has to say about it
            raise ChatTemplateError(self._loss(skeleton, places, is_open))
        return self._rewritten(found, variables, names)

    @cached_property
    def ignores_tools(self) -> bool:
        """Whether the template leaves tools out, or cannot write them."""
        return not _marks(_PROBED) <= _marks(self._tried([_ASKED], {"tools": [_PROBED]}) or "")

    def _canonical(self, index: int, given: Mapping[str, Any], variables: Variables) -> Message:
        """A message without nulls, whose content is a text and whose role the template knows."""
        message = {name: value for name, value in with_parsed_arguments(given).items()
                   if name == "role" or value not in EMPTY}
        role, content = message["role"], message.get("content", "")
        if isinstance(content, list):
            content = "\n".join(map(text_of, content))
        refusal = message.pop("refusal", None)
        message["content"] = content or refusal or ""
        reasoning = next((message.pop(name) for name in REASONING if name in message), None)
        if reasoning is not None:
            message[self._reasoning] = reasoning
        if role not in ROLES and not (len(role) <= MAX_ROLE and self._knows(role)):
            if role != "developer":
                raise ChatTemplateError(f"messages[{index}].role: must be system, developer, user, assistant or tool, "
                                        f"not {role!r:.80}")
            message["role"] = "system"
        if message.get("tool_calls") and not message["content"]:
            known = self._null_content(bool(variables["tools"]))
            if given.get("content") is None or "" not in known:
                message["content"] = known[0] if known else ""
        return message

    def _finds_role(self, role: str) -> bool:
        """Whether the template treats a role otherwise than one that is made up."""
        said: Message = {"role": role, "content": "zq3z"}
        for conversation in ([said, _ASKED], [_ASKED, said]):
            text, other = [self._tried([one | {"role": name} if one is said else one for one in conversation], {})
                           for name in (role, "zq4z")]
            if text is not None and "zq3z" in text and (other is None or text != other.replace("zq4z", role)):
                return True
        return False

    def _finds_null_content(self, has_tools: bool) -> list[str | None]:
        """What may be the content of a message that has tool calls and no text, that with the shortest prompt first."""
        tools, texts = {"tools": [_PROBED] if has_tools else None}, dict[str | None, str]()
        for content in ("", None):
            call = {"id": "abcdefghi", "type": "function", "function": {"name": "zq3z", "arguments": {"x": "zq4z"}}}
            probe = [_ASKED, {"role": "assistant", "content": content, "tool_calls": [call]},
                     {"role": "tool", "tool_call_id": "abcdefghi", "name": "zq3z", "content": "zq5z"}]
            text = self._tried(probe, tools)
            if text is not None and _marks(probe) <= _marks(text):
                texts[content] = text
        return sorted(texts, key=lambda content: len(texts[content]))

    @cached_property
    def _reasoning(self) -> str:
        """The name by which the template knows the reasoning of a message that calls a tool, or of any."""
        call = {"id": "abcdefghi", "type": "function", "function": {"name": "f", "arguments": {"x": "y"}}}
        for more in ({"tool_calls": [call]}, {"content": "a"}):
            for name in REASONING:
                said: Message = {"role": "assistant", "content": "", name: "zq3z"} | more
                if "zq3z" in (self._tried([_ASKED, said], {}) or ""):
                    return name
        return REASONING[0]

    def _tried(self, messages: list[Message], variables: Variables) -> str | None:
        """A rendering; None: the template refuses the messages."""
        try:
            return self._write(messages, {"add_generation_prompt": True, "tools": None, "documents": None} | variables)
        except ChatTemplateError:
            return None

    def _choose(self, messages: list[Message], variables: Variables, is_open: bool) -> Sequence[str] | None:
        """The fewest rewrites with which the template keeps all of a skeleton; None: nothing helps."""
        wanted = _marks([messages, variables["tools"]])
        always = [TOOLS_AS_TEXT] if variables["tools"] and self.ignores_tools else []
        others = [name for name in self._rewrites if name != TOOLS_AS_TEXT]

        def keeps(names: Sequence[str]) -> bool:
            text = self._tried(*self._rewritten(messages, variables, [*always, *names]))
            return text is not None and wanted <= _marks(text) and not (is_open and self._is_moved(messages, text))

        if keeps(()):
            return always
        if len(messages) > MAX_SEARCHED:
            return [*always, *others] if keeps(others) else None
        plain = self._rewritten(messages, variables, always)
        for name in reversed(others):
            changed = self._rewritten(messages, variables, [*always, name])
            if name != CALLS_AS_TEXT and changed != plain and keeps([name]):
                return [*always, name]
        chosen = others
        if not keeps(chosen):
            return None
        for name in others:
            fewer = [one for one in chosen if one != name]
            if keeps(fewer):
                chosen = fewer
        return [*always, *chosen]

    def _rewritten(self, messages: list[Message], variables: Variables, names: Iterable[str]) -> Conversation:
        chosen = set(names)
        for name, rewrite in self._rewrites.items():
            if name in chosen:
                messages, variables = rewrite(messages, variables)
        return messages, variables

    def _is_moved(self, messages: list[Message], text: str) -> bool:
        """Whether text of other messages stands behind that of the last one, which is to be left open."""
        ends = [text.lower().rfind(message["content"]) for message in messages if message["content"]]
        return not ends or ends[-1] != max(ends)

    def _loss(self, skeleton: Conversation, places: Sequence[int], is_open: bool) -> str:
        messages, variables = skeleton
        text = self._tried(messages, variables) or ""
        lost = [place for place, message in zip(places, messages, strict=True) if not _marks(message) <= _marks(text)]
        if not lost and is_open:
            return "continue_final_message: the chat template does not end with the last message"
        where = f"messages[{lost[0]}]" if lost else "tools"
        return f"{where}: the model's chat template leaves this out, so it would be lost; leave it out yourself"


# -- skeletons -----------------------------------------------------------------------------------------------------


def _marks(value: Any) -> set[str]:
    """The marks in a text, or in anything made of texts."""
    text = value if isinstance(value, str) else json.dumps(value, default=str)
    return {mark.lower() for mark in _MARK.findall(text)}  # templates may write capitals


def _outline(messages: Sequence[Message]) -> list[int]:
    """Places of messages, without what stands between the first and the last of equal runs that follow each other.

    What a template does with a run, it does with the next: so the skeleton of a long conversation is short.
    """
    kept: list[int] = []
    forms = [_form(message) for message in messages]

    def run(begin: int, end: int | None) -> list[str]:
        return [forms[place] for place in kept[begin:end]]

    for place in range(len(messages)):
        kept.append(place)
        for size in range(1, min(MAX_RUN, len(kept) // 3) + 1):
            last = run(-size, None)
            if messages[kept[-size]]["role"] != "tool" and run(-2 * size, -size) == last == run(-3 * size, -2 * size):
                del kept[-2 * size : -size]
                break
    return kept


def _form(message: Message) -> str:
    """What a skeleton keeps of a message."""
    calls = [(type(call["function"]["arguments"]).__name__, bool(call["function"]["arguments"]), bool(call.get("id")))
             for call in message.get("tool_calls", ())]
    return repr((message["role"], bool((message["content"] or "").strip()), sorted(message), calls))


def _skeleton(messages: Sequence[Message], variables: Variables) -> Conversation:
    """A conversation with marks in the place of its texts, and of the names of calls and tools."""
    marks = map("zq{}z".format, range(10, 1 << 30))
    names, ids = dict[Any, str](), dict[Any, str]()

    def name_of(given: Any) -> str:
        return names[given] if given in names else names.setdefault(given, next(marks))

    def id_of(given: Any) -> str:
        form = "{:09d}" if isinstance(given, str) and SHORT_ID.fullmatch(given) else "call_{:09d}"
        return ids.setdefault(given, form.format(len(ids)))

    def bare(message: Message) -> Message:
        found = dict(message)
        if message["content"]:
            found["content"] = next(marks) if message["content"].strip() else ""
        for name in REASONING:
            if name in found:
                found[name] = "thought"
        if "tool_call_id" in found:
            found["tool_call_id"] = id_of(found["tool_call_id"])
        if "name" in found:
            found["name"] = names.get(found["name"], "name")
        if "tool_calls" in found:
            found["tool_calls"] = [bare_call(call) for call in found["tool_calls"]]
        return found

    def bare_call(call: dict[str, Any]) -> dict[str, Any]:
        function = call["function"]
        arguments = function["arguments"]
        if isinstance(arguments, dict):
            arguments = {"x": next(marks)} if arguments else {}
        elif isinstance(arguments, str):
            arguments = next(marks)
        found = call | {"function": function | {"name": next(marks), "arguments": arguments}}
        return found | {"id": id_of(call["id"])} if "id" in call else found

    tools = [tool | {"function": tool["function"] | {"name": name_of(tool["function"].get("name"))}}
             if isinstance(tool, dict) and isinstance(tool.get("function"), dict) else tool
             for tool in variables["tools"] or ()]
    return [bare(message) for message in messages], variables | {"tools": tools or variables["tools"]}


def _without_nulls(tools: Any) -> Any:
    """Tools without the fields that are null."""
    return [{name: _fields(value) if name == "function" else value for name, value in tool.items()
             if value is not None} if isinstance(tool, dict) else tool for tool in tools] if tools else tools


def _object(value: Any) -> dict[str, Any]:
    """The value where it is an object; else an empty one."""
    return value if isinstance(value, dict) else {}


def _fields(function: Any) -> Any:
    if not isinstance(function, dict):
        return function
    return {name: value for name, value in function.items() if value is not None}


# -- rewrites ------------------------------------------------------------------------------------------------------


def _joined_text(*texts: str | None) -> str:
    return "\n\n".join([text for text in texts if text])


def _tools_as_text(messages: list[Message], variables: Variables) -> Conversation:
    """Tools in the system prompt, and calls as such a prompt asks for them."""
    text = TOOLS.format(tools="\n".join(json.dumps(tool, ensure_ascii=False) for tool in variables["tools"]))
    messages, variables = _calls_as_text(messages, variables)
    leading = list(takewhile(lambda message: message["role"] in INSTRUCTING, messages))
    *before, last = leading or [{"role": "system", "content": ""}]
    told = last | {"content": _joined_text(last["content"], text)}
    return [*before, told, *messages[len(leading) :]], variables | {"tools": None}


class WrittenCalls(NamedTuple):
    """How a model's calls stand in the content of a message, where its template leaves them to clients."""

    signs: tuple[str, ...]  # a template's source has all of them
    opening: str
    call: str  # with the places `name`, `number`, `json` and `python`: its arguments in two forms
    separator: str
    closing: str

    def of(self, calls: Sequence[Any], number: int) -> str:
        """The text of some calls.  Args: number: of earlier calls in the conversation."""
        texts = []
        for index, call in enumerate(calls, number):
            name, arguments = call["function"]["name"], call["function"]["arguments"]
            pairs = arguments.items() if isinstance(arguments, dict) else ()
            texts.append(self.call.format(
                name=name, number=index, python=", ".join([f"{key}={value!r}" for key, value in pairs]),
                json=arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)))
        return self.opening + self.separator.join(texts) + self.closing


WRITTEN_CALLS = (
    WrittenCalls(("<|im_system|>tool_declare",), "<|tool_calls_section_begin|>",
                 "<|tool_call_begin|>functions.{name}:{number}<|tool_call_argument_begin|>{json}<|tool_call_end|>", "",
                 "<|tool_calls_section_end|>"),  # Kimi K2
    WrittenCalls(("List of tools: ",), "<|tool_call_start|>[", "{name}({python})", ", ", "]<|tool_call_end|>"),  # LFM2
    WrittenCalls(("<|tool_call|>", "available_tools"), "<|tool_call|>[",
                 '{{"name": "{name}", "arguments": {json}}}', ", ", "]"),  # Granite 3
)


def _calls_written(form: WrittenCalls, messages: list[Message], variables: Variables) -> Conversation:
    """Calls at the end of the text of their messages, as the model writes them; see `WRITTEN_CALLS`."""
    found: list[Message] = []
    number = 0
    for message in messages:
        if calls := message.get("tool_calls"):
            others = {name: value for name, value in message.items() if name != "tool_calls"}
            found.append(others | {"content": (message["content"] or "") + form.of(calls, number)})
            number += len(calls)
        else:
            found.append(message)
    return found, variables


def _calls_as_text(messages: list[Message], variables: Variables) -> Conversation:
    """Calls in the text of their messages, and results as turns of the user, in the form of Hermes models."""
    found: list[Message] = []
    is_result = False
    for message in messages:
        was_result, is_result = is_result, message["role"] == "tool"
        if is_result:
            result = f"<tool_response>\n{message['content']}\n</tool_response>"
            if was_result:
                found[-1] = found[-1] | {"content": f"{found[-1]['content']}\n{result}"}
            else:
                found.append({"role": "user", "content": result})
        elif calls := message.get("tool_calls"):
            texts = [message["content"]] if message["content"] else []
            for call in calls:
                function = call["function"]
                written = json.dumps({"name": function["name"], "arguments": function["arguments"]}, ensure_ascii=False)
                texts.append(f"<tool_call>\n{written}\n</tool_call>")
            others = {name: value for name, value in message.items() if name != "tool_calls"}
            found.append(others | {"content": "\n".join(texts)})
        else:
            found.append(message)
    return found, variables


def _system_in_user(messages: list[Message], variables: Variables) -> Conversation:
    """System messages joined, before the text of the first user message."""
    system = [message for message in messages if message["role"] in INSTRUCTING]
    others = [message for message in messages if message["role"] not in INSTRUCTING]
    if not system:
        return messages, variables
    text = _joined_text(*[message["content"] for message in system])
    for index, message in enumerate(others):
        if message["role"] == "user":
            others[index] = message | {"content": _joined_text(text, message["content"])}
            return others, variables
    return [{"role": "user", "content": text}, *others], variables


def _system_first(messages: list[Message], variables: Variables) -> Conversation:
    """System messages joined, before all others."""
    system = [message for message in messages if message["role"] in INSTRUCTING]
    if not system:
        return messages, variables
    others = [message for message in messages if message["role"] not in INSTRUCTING]
    return [system[0] | {"content": _joined_text(*[message["content"] for message in system])}, *others], variables


def _calls_one_by_one(messages: list[Message], variables: Variables) -> Conversation:
    """Several calls of one message are messages of their own, each before its result."""
    found: list[Message] = []
    results: list[Message] = []  # of the calls that are being read
    for message in reversed(messages):
        calls = message.get("tool_calls", ())
        if message["role"] == "tool":
            results.insert(0, message)
            continue
        if len(calls) > 1:
            turns: list[Message] = []
            for place, call in enumerate(calls):
                one = message if not place else {"role": "assistant", "content": ""}
                own = [result for result in results if result.get("tool_call_id") == call.get("id")]
                turns += [one | {"tool_calls": [call]}, *own]
                results = [result for result in results if result not in own]
            results = [*turns, *results]
        else:
            results.insert(0, message)
        found, results = [*results, *found], []
    return [*results, *found], variables


def _users_in_results(messages: list[Message], variables: Variables) -> Conversation:
    """A user's text behind the result of a tool is part of that result."""
    found: list[Message] = []
    for message in messages:
        if message["role"] == "user" and found and found[-1]["role"] == "tool":
            found[-1] = found[-1] | {"content": _joined_text(found[-1]["content"], message["content"])}
        else:
            found.append(message)
    return found, variables


def _turns_joined(messages: list[Message], variables: Variables) -> Conversation:
    """Neighbors of one role, the user's or the assistant's, are one message."""
    found: list[Message] = []
    for message in messages:
        last = found[-1] if found else None
        if last is None or last["role"] != message["role"] or message["role"] not in ("user", "assistant"):
            found.append(message)
            continue
        joined = last | message | {"content": _joined_text(last["content"], message["content"])}
        if calls := [*last.get("tool_calls", ()), *message.get("tool_calls", ())]:
            joined["tool_calls"] = calls
        for name in REASONING:
            if name in last and name in message:
                joined[name] = _joined_text(last[name], message[name])
        found[-1] = joined
    return found, variables


def _texts_later(messages: list[Message], variables: Variables) -> Conversation:
    """Texts of messages with calls join the turn's last text: what follows the last call, else a message before it."""
    found: list[Message] = []
    texts: list[str] = []
    last_call = 0

    def put() -> None:
        if texts:
            found.insert(last_call, {"role": "assistant", "content": _joined_text(*texts)})
            texts.clear()

    for message in messages:
        if message.get("tool_calls"):
            last_call = len(found)
            if message["content"]:
                texts.append(message["content"])
                message = message | {"content": ""}
        elif message["role"] == "assistant" and texts:
            message = message | {"content": _joined_text(*texts, message["content"])}
            texts.clear()
        elif message["role"] != "tool":
            put()
        found.append(message)
    put()
    return found, variables


def _texts_apart(messages: list[Message], variables: Variables) -> Conversation:
    """The text of a message with calls is a message of its own, before them."""
    found: list[Message] = []
    for message in messages:
        if message.get("tool_calls") and message["content"]:
            found.append({"role": "assistant", "content": message["content"]})
            message = message | {"content": ""}
        found.append(message)
    return found, variables


def _results_named(messages: list[Message], variables: Variables) -> Conversation:
    """The result of a tool has the tool's name."""
    names = {call.get("id"): call["function"]["name"] for message in messages for call in message.get("tool_calls", ())}
    return [message | {"name": names[message.get("tool_call_id")]}
            if message["role"] == "tool" and "name" not in message and message.get("tool_call_id") in names else message
            for message in messages], variables


def _ids_short(messages: list[Message], variables: Variables) -> Conversation:
    """Ids of calls are nine letters and digits."""
    def short(given: Any) -> Any:
        is_long = isinstance(given, str) and not SHORT_ID.fullmatch(given)
        return hashlib.sha256(given.encode(errors="replace")).hexdigest()[:9] if is_long else given

    found = []
    for message in messages:
        if "tool_calls" in message:
            message = message | {"tool_calls": [call | {"id": short(call.get("id"))} for call in message["tool_calls"]]}
        found.append(message | {"tool_call_id": short(message["tool_call_id"])}
                     if "tool_call_id" in message else message)
    return found, variables


def _arguments_as_text(messages: list[Message], variables: Variables) -> Conversation:
    """Arguments of calls are a text of JSON, as in OpenAI's API: some templates join them with other texts."""
    def written(call: dict[str, Any]) -> dict[str, Any]:
        arguments = call["function"]["arguments"]
        text = arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)
        return call | {"function": call["function"] | {"arguments": text}}

    return [message | {"tool_calls": [written(call) for call in message["tool_calls"]]} if "tool_calls" in message
            else message for message in messages], variables


def _tools_complete(messages: list[Message], variables: Variables) -> Conversation:
    """Tools and their parameters have a description, if an empty one, and tools have parameters."""
    def complete(tool: Any) -> Any:
        if not isinstance(tool, dict) or not isinstance(tool.get("function"), dict):
            return tool
        given = _object(tool["function"].get("parameters"))
        properties = {name: {"description": "", **value} if isinstance(value, dict) else value
                      for name, value in _object(given.get("properties")).items()}
        parameters = {"type": "object", **given, "properties": properties}
        return tool | {"function": {"description": "", **tool["function"], "parameters": parameters}}

    return messages, variables | {"tools": variables["tools"] and [complete(tool) for tool in variables["tools"]]}


def _tools_listed(messages: list[Message], variables: Variables) -> Conversation:
    """No tools are an empty list."""
    return messages, variables | {"tools": variables["tools"] or []}


REWRITES: dict[str, Callable[[list[Message], Variables], Conversation]] = {
    TOOLS_AS_TEXT: _tools_as_text, CALLS_AS_TEXT: _calls_as_text, "system in user": _system_in_user,
    "system first": _system_first, "calls one by one": _calls_one_by_one, "users in results": _users_in_results,
    "turns joined": _turns_joined, "texts later": _texts_later, "texts apart": _texts_apart,
    "results named": _results_named, "ids short": _ids_short, "arguments as text": _arguments_as_text,
    "tools complete": _tools_complete,
    "tools listed": _tools_listed}
"""In the order in which they are applied, and given up if they are not needed: what changes most comes first.

The first one holds always or never, as the parser of calls does: where the template ignores tools."""
