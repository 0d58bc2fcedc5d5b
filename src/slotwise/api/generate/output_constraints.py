"""What the output of a request must match: its grammar, the tools that it may or must call, its budget of reasoning.

Grammars come from clients, and may take any time to compile, so a worker process checks them.  A grammar that compiles
there within the limits is sent to the engine, which compiles it between its steps.  Results are kept by content, so
that a grammar that is used again costs nothing here.
"""

from __future__ import annotations

import hashlib
import re
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from http import HTTPStatus
from typing import Any, NamedTuple

from slotwise.api.http.api_errors import ApiError, bad_request, from_queue_full
from slotwise.api.http.turns import QueueFull, Turns
from slotwise.api.http.worker_process import CallError, CallLimits, Worker, WorkerError
from slotwise.api.parsers.base_parser import MOST_CALLS, Tools
from slotwise.api.parsers.call_grammar import Schemas, lark_of_regex
from slotwise.api.parsers.parser_table import OutputFormat, Parsing
from slotwise.api.parsers.tool_formats import FORMATS as TOOL_PARSERS
from slotwise.api.parsers.tool_formats import HARMONY
from slotwise.api.protocol.decoding import GRAMMARS
from slotwise.api.protocol.protocol import ChatRequest, Generate
from slotwise.api.protocol.unsupported import refuse_others
from slotwise.core.params import JSON_SCHEMA, LARK, REGEX, Grammar, ThinkingBudget, is_gbnf
from slotwise.text.structured_output import (
    StructuredOutputError,
    json_schema,
    lark,
    of_response_format,
    of_structured_outputs,
)
from slotwise.text.tokenizer import Tokenizer

MAX_WAITING, MAX_WAITING_OF_ONE = 1024, 256  # grammars of all clients, and of one
MAX_KNOWN = 4096  # results
GUIDED, RESPONSE_FORMAT = "guided_", "response_format"
INVALID = f"Invalid schema for {RESPONSE_FORMAT}: "  # OpenAI's words, by which LangChain tells what to do instead
CHECK_LIMITS = CallLimits(seconds=5.0, memory=1 << 30, answer=1 << 16, niceness=5)
MAX_TOOLS = 512
NAME = re.compile(r"[\w.:/-]{1,128}", re.ASCII)

Tool = dict[str, Any]
BUDGET = "thinking_token_budget"


# -- grammars ----------------------------------------------------------------------------------------------------------


def grammar_of(request: Generate) -> Grammar | None:
    """What the output of a request must match; None: anything.

    Raises:
        ApiError: fields that describe no grammar, or several.
    """
    found: list[Grammar] = []
    for name in GRAMMARS:
        if (value := getattr(request, name)) is not None:
            try:
                grammar = _grammar(name, value)
            except StructuredOutputError as error:
                raise bad_request(str(error), name) from error
            found += [grammar] if grammar is not None else []
    if len(found) > 1:
        raise bad_request(f"{found[1].field}: not available with {found[0].field}", found[1].field)
    return found[0] if found else None


def _grammar(name: str, value: Any) -> Grammar | None:
    if name == RESPONSE_FORMAT:
        return of_response_format(value)
    return of_structured_outputs(value if name == "structured_outputs" else {name.removeprefix(GUIDED): value}, name)


class GrammarChecker:
    """Says which grammars the engine can use.

    Args:
        special: the tokenizer's special tokens, which a grammar may name.
    """

    def __init__(self, special: Iterable[str], limits: CallLimits = CHECK_LIMITS) -> None:
        self._special = list(special)
        self._known: OrderedDict[bytes, str] = OrderedDict()  # objections by digest, the latest use last
        self._worker = Worker("slotwise.text.grammar_check", limits, Turns(MAX_WAITING, MAX_WAITING_OF_ONE))

    async def check(self, grammar: Grammar, holder: str) -> None:
        """Raises ApiError for a grammar that does not compile within the limits.

        Args:
            holder: the client; clients take turns.
        """
        key = hashlib.blake2b(f"{grammar.kind}\n{grammar.text}".encode(errors="replace"), digest_size=16).digest()
        objection = self._known.get(key)
        if objection is None:
            objection = self._known[key] = await self._objection(grammar, holder)
        self._known.move_to_end(key)
        if len(self._known) > MAX_KNOWN:
            self._known.popitem(last=False)
        if objection:
            is_schema = grammar.kind == JSON_SCHEMA and grammar.field == RESPONSE_FORMAT
            raise bad_request(f"{grammar.field}: {INVALID * is_schema}{objection}", grammar.field)

    async def _objection(self, grammar: Grammar, holder: str) -> str:
        try:
            return str(await self._worker.call(holder, "check", lambda: (grammar.kind, grammar.text, self._special)))
        except QueueFull as error:
            raise from_queue_full(error, "grammars to compile") from error
        except WorkerError as error:  # it crashed twice, most likely by this grammar
            raise ApiError(HTTPStatus.BAD_REQUEST, f"{grammar.field}: the compiler of grammars {error}",
                           param=grammar.field, code="grammar_failed") from error
        except CallError as error:
            raise bad_request(f"{grammar.field}: compiling the grammar {error}", grammar.field) from error
        except UnicodeError as error:
            raise bad_request(f"{grammar.field}: not valid Unicode", grammar.field) from error

    def close(self) -> None:
        """End the worker."""
        self._worker.close()


# -- tools -------------------------------------------------------------------------------------------------------------


class Constraint(NamedTuple):
    """What an output must match."""

    grammar: Grammar | None = None  # None: anything
    writes_calls: bool = False  # calls, too, are written by the grammar


class AllowedTools(NamedTuple):
    """What an answer may call, or must."""

    tools: Tools | None = None  # schemas of arguments, by name; None: no tool may be called
    required: bool = False  # at least one is called
    strict: frozenset[str] = frozenset()  # arguments of these match their schemas


def allowed_tools(form: OutputFormat, request: ChatRequest) -> AllowedTools:
    """What the answer to a request may call.

    Args:
        form: of the model's outputs.

    Raises:
        ApiError: a field is not valid, or the server cannot do what it asks for.
    """
    chosen = tool_choice(request.tools or (), request.tool_choice)
    if chosen.tools is not None and not chosen.required and not form.tools:
        raise bad_request("tools is not supported, because the server has no parser of the model's tool calls: start "
                          f"it with --tool-call-parser and one of {', '.join(sorted(TOOL_PARSERS))}", "tools",
                          "unsupported_parameter")
    return chosen


def constraint_of(form: OutputFormat, request: ChatRequest, chosen: AllowedTools, begun: bool | None) -> Constraint:
    """What the output of a request must match.

    Args:
        begun: whether the output begins within reasoning; see `OutputFormat.has_begun`.

    Raises:
        ApiError: the fields describe no grammar, or none that this format has.
    """
    answer = grammar_of(request)
    if chosen.required:
        # A response format describes the text of an answer; one that must call tools has none.  Agents send both.
        if answer is not None and answer.field != RESPONSE_FORMAT:
            raise bad_request(f"{answer.field}: not available with a tool_choice that requires a call", answer.field)
        return Constraint(_lark(form.grammar_of_calls(_schemas(request, chosen), begun), "tools"), True)
    if answer is not None:
        if not form.parses(chosen.tools):
            return Constraint(answer)
        schemas = None if chosen.tools is None else _schemas(request, chosen)
        return Constraint(
            _lark(form.grammar_of_answer(_terms(answer), begun, schemas), answer.field), schemas is not None)
    if not chosen.strict:
        return Constraint()
    text = form.grammar_of_strict(_schemas(request, chosen), begun)
    if text is None:
        raise bad_request(f"tools: strict is not supported by the parser {form.tools} unless tool_choice requires a "
                          "call", "tools", "unsupported_parameter")
    return Constraint(_lark(text, "tools"), True)


def _lark(text: str, field: str) -> Grammar:
    """Args: field: of the request, that an error names."""
    try:
        return lark(text, field)
    except StructuredOutputError as error:
        raise bad_request(str(error), field) from error


def _schemas(request: ChatRequest, chosen: AllowedTools) -> Schemas:
    """The schemas that calls must match: of any object for tools that are neither strict nor required."""
    schemas = {}
    for name, schema in (chosen.tools or {}).items():
        if schema.get("type", "object") != "object":
            raise bad_request(f"tools: the parameters of {name} must be of type object", "tools")
        wanted = {"type": "object"} | dict(schema) if chosen.required or name in chosen.strict else {"type": "object"}
        try:
            schemas[name] = json_schema(wanted, "tools").text
        except StructuredOutputError as error:
            raise bad_request(str(error), "tools") from error
    is_one = request.parallel_tool_calls is False or isinstance(request.tool_choice, dict)
    return Schemas(schemas, 1 if is_one else MOST_CALLS, chosen.tools)


def _terms(answer: Grammar) -> str:
    """A grammar as terms of a rule.  Raises ApiError for GBNF, which is translated only where it stands alone."""
    if answer.kind == LARK and is_gbnf(answer.text):
        raise bad_request(f"{answer.field}: a grammar in GBNF is not available together with tools or reasoning; write "
                          "it in Lark's syntax", answer.field)
    if answer.kind == REGEX:
        return lark_of_regex(answer.text)
    return f"%json {answer.text}" if answer.kind == JSON_SCHEMA else f"%lark {{\n{answer.text}\n}}"


def parsing_of(form: OutputFormat, request: ChatRequest, chosen: AllowedTools, begun: bool | None, *,
               is_written: bool) -> Parsing | None:
    """How the outputs of a request are parsed; None where they are text.

    Args:
        is_written: a grammar writes the calls.
    """
    if not is_written and not form.parses(chosen.tools):
        return None
    return Parsing(form, chosen.tools, begun, 1 if request.parallel_tool_calls is False else None,
                   hides_reasoning=request.include_reasoning is False, is_written=is_written)


def tool_choice(tools: Sequence[Tool], choice: str | dict[str, Any] | None) -> AllowedTools:
    """What the fields `tools` and `tool_choice` of a request say.

    Raises:
        ApiError: a tool or the choice is not valid.
    """
    functions = _functions(tools)
    if choice == "none" or (not functions and choice in (None, "auto")):
        return AllowedTools()
    if not functions:
        raise bad_request("tool_choice: only allowed when tools are specified", "tool_choice")
    strict = frozenset(name for name, function in functions.items() if function.get("strict"))
    schemas = {name: function.get("parameters") or {} for name, function in functions.items()}
    if choice in (None, "auto", "required"):
        return AllowedTools(schemas, choice == "required", strict)
    name = _named(choice)
    if name not in schemas:
        raise bad_request(f"tool_choice: none of the tools is called {name!r:.200}", "tool_choice")
    return AllowedTools({name: schemas[name]}, True, strict)


def _functions(tools: Sequence[Tool]) -> dict[str, dict[str, Any]]:
    if len(tools) > MAX_TOOLS:
        raise bad_request(f"tools: at most {MAX_TOOLS} tools", "tools")
    functions: dict[str, dict[str, Any]] = {}
    for index, tool in enumerate(tools):
        function = _function(f"tools[{index}]", tool)
        if functions.setdefault(function["name"], function) is not function:
            raise bad_request(f"tools[{index}]: two tools are called {function['name']}", "tools")
    return functions


def _function(where: str, tool: Tool) -> dict[str, Any]:
    if (kind := tool.get("type")) != "function":
        raise bad_request(f"{where}.type: only function is supported, not {kind!r:.40}", "tools",
                          "unsupported_parameter")
    function = tool.get("function")
    if not isinstance(function, dict):
        raise bad_request(f"{where}.function: must be an object", "tools")
    if not isinstance(name := function.get("name"), str) or not NAME.fullmatch(name):
        raise bad_request(f"{where}.function.name: must be 1 to 128 letters, digits and _.:/-", "tools")
    for field, kind, meant in (("description", str, "a string"), ("parameters", dict, "an object"),
                               ("strict", bool, "true or false")):
        if not isinstance(function.get(field), kind | None):
            raise bad_request(f"{where}.function.{field}: must be {meant}", "tools")
    return function


def _named(choice: object) -> str:
    if isinstance(choice, dict) and choice.get("type") == "function":
        function = choice.get("function")
        if isinstance(function, dict) and isinstance(name := function.get("name"), str):
            refuse_others(choice, "tool_choice", "tool_choice", ("type", "function"))
            refuse_others(function, "tool_choice.function", "tool_choice", ("name",))
            return name
    raise _wrong(choice)


def _wrong(choice: object) -> ApiError:
    kind = choice.get("type") if isinstance(choice, dict) else choice
    return bad_request(
        'tool_choice: must be "none", "auto", "required", or {"type": "function", "function": {"name": ...}}, not '
        f"{kind!r:.40}", "tool_choice")


# -- the budget of reasoning -------------------------------------------------------------------------------------------


def thinking_budget(form: OutputFormat, tokenizer: Tokenizer, num_tokens: int | None,
                    begun: bool | None) -> ThinkingBudget | None:
    """The budget that the sampler keeps; None: outputs do not reason, or as long as they will.

    Args:
        num_tokens: of the reasoning; None or -1: any number.
        begun: whether the prompt ends within reasoning; see `OutputFormat.has_begun`.

    Raises:
        ApiError: nothing says where reasoning ends, or not by one token.
    """
    if num_tokens is None or num_tokens < 0:
        return None
    if not form.reasoning:
        raise bad_request(f"{BUDGET}: where reasoning ends is not known; start the server with --reasoning-parser",
                          BUDGET)
    if form.reasoning == HARMONY:
        raise bad_request(f"{BUDGET}: not available with the reasoning parser {HARMONY}, whose reasoning ends with "
                          "a message, and with no single token", BUDGET)
    if begun is False:
        return None
    if (tags := form.tags) is None:
        raise bad_request(f"{BUDGET}: not available with the reasoning parser {form.reasoning}", BUDGET)
    within = form.begins(begun)
    end_id, begin_id = _token_of(tokenizer, tags.closing), None if within else _token_of(tokenizer, tags.opening)
    return ThinkingBudget(num_tokens, end_id, begin_id)


def _token_of(tokenizer: Tokenizer, tag: str) -> int:
    found = tokenizer.token_of(tag)
    if found is None:
        raise bad_request(f"{BUDGET}: {tag} is no single token of the model", BUDGET)
    return found
