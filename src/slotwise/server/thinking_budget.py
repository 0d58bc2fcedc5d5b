"""The budget of reasoning, from the field of a request to the tokens that begin and end the reasoning."""

from __future__ import annotations

from slotwise.core.params import ThinkingBudget
from slotwise.server.errors import bad_request
from slotwise.server.parsers.registry import HARMONY, OutputFormat
from slotwise.server.parsers.thinking import CLOSING, OPENING
from slotwise.text.tokenizer import Tokenizer

BUDGET = "thinking_token_budget"


def thinking_budget(form: OutputFormat, tokenizer: Tokenizer, num_tokens: int | None,
                    begun: bool | None) -> ThinkingBudget | None:
    """The budget that the sampler keeps; None: outputs do not reason, or as long as they will.

    Args:
        num_tokens: of the reasoning; None or -1: any number.
        begun: whether the prompt ends within reasoning; see `parsers.thinking.has_begun`.

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
    within = form.begins(begun)
    end_id, begin_id = _token_of(tokenizer, CLOSING), None if within else _token_of(tokenizer, OPENING)
    return ThinkingBudget(num_tokens, end_id, begin_id)


def _token_of(tokenizer: Tokenizer, tag: str) -> int:
    found = tokenizer.token_of(tag)
    if found is None:
        raise bad_request(f"{BUDGET}: {tag} is no single token of the model", BUDGET)
    return found
