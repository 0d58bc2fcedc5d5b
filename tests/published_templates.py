"""Chat templates as models are published with: our rendering beside that of transformers' `apply_chat_template`.

usage: python tests/published_templates.py FOLDER     writes docs/templates.json about all templates of a folder
"""

from __future__ import annotations

import json
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from slotwise.server.parsers.registry import tool_parser_of
from slotwise.text.chat_template import ChatTemplate, ChatTemplateError
from slotwise.text.conversation import InvalidMessages, OpenEnd

SPECIAL = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>", "pad_token": "<pad>"}
TOOL = {"type": "function", "function": {
    "name": "weather", "description": "The weather <now> & later.", "parameters": {
        "type": "object", "properties": {"city": {"type": "string", "description": "été"},
                                         "days": {"type": "integer", "default": 1}}, "required": ["city"]}}}
USER = {"role": "user", "content": "Rain in Zürich?"}
SYSTEM = {"role": "system", "content": "Be brief."}
ANSWER = {"role": "assistant", "content": "No."}
CALL = {"role": "assistant", "content": "", "tool_calls": [{"id": "abcdefghi", "type": "function", "function": {
    "name": "weather", "arguments": {"city": "Zürich", "days": 2}}}]}
RESULT = {"role": "tool", "tool_call_id": "abcdefghi", "name": "weather", "content": "sunny"}
CONVERSATIONS: dict[str, tuple[list[dict[str, Any]], dict[str, Any]]] = {
    "user": ([USER], {}),
    "turns": ([SYSTEM, USER, ANSWER, USER], {}),
    "tools": ([SYSTEM, USER], {"tools": [TOOL]}),
    "calls": ([USER, CALL, RESULT], {"tools": [TOOL]}),
    "all": ([SYSTEM, USER, CALL, RESULT, ANSWER, USER], {"tools": [TOOL, TOOL]}),
    "reasoning": ([USER, ANSWER | {"reasoning_content": "Hm."}, USER],
                  {"enable_thinking": False, "reasoning_effort": "low"}),
}
ENDS = ("opened", "closed", "continued")  # by add_generation_prompt, by neither, by continue_final_message
OPEN = {"role": "assistant", "content": "It is"}


class Rendered(NamedTuple):
    conversation: str
    ours: str | None  # None: the template, or a library, refuses the conversation
    theirs: str | None


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
            yield Rendered(f"{name}, {end}", _ours(template, shown, end, variables),
                           _theirs(source, tokenizer, shown, end, variables))


def _ours(template: ChatTemplate, messages: list[dict[str, Any]], end: str, variables: dict[str, Any]) -> str | None:
    try:
        if end != "continued":
            return template.render(messages, add_generation_prompt=end == "opened", **variables)
        left_open = OpenEnd(messages)
        return left_open.cut(template.render(left_open.messages, add_generation_prompt=False, **variables))
    except (ChatTemplateError, InvalidMessages):
        return None


def _theirs(source: str, tokenizer: Any, messages: list[dict[str, Any]], end: str,
            variables: dict[str, Any]) -> str | None:
    try:
        return str(tokenizer.apply_chat_template(
            messages, chat_template=source, tokenize=False, add_generation_prompt=end == "opened",
            continue_final_message=end == "continued", **variables))
    except Exception:  # whatever a template raises
        return None


def main(folder: Path) -> None:
    import transformers

    tokenizer, rows = transformers_tokenizer(), []
    for path in sorted(folder.glob("*.jinja")):
        source = path.read_text()
        found = Counter("differ" if one.ours != one.theirs else "refused" if one.ours is None else "equal"
                        for one in renderings(source, tokenizer))
        rows.append({"template": path.stem, "parser": tool_parser_of(source)} | {
            kind: found[kind] for kind in ("equal", "refused", "differ")})
    content = {"transformers": transformers.__version__, "rows": rows}
    Path(__file__).parents[1].joinpath("docs", "templates.json").write_text(json.dumps(content, indent=1) + "\n")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
