"""The tokenizer as scripts for vLLM use it: with names and defaults of transformers' tokenizers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from slotwise.offline.frontend import Frontend


class OfflineTokenizer:
    """Encodes and decodes texts, and applies the chat template."""

    def __init__(self, frontend: Frontend) -> None:
        self._frontend = frontend
        self._tokenizer = frontend.tokenizer

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        return self._tokenizer.encode(text, add_special_tokens=add_special_tokens)

    def __call__(self, text: str, add_special_tokens: bool = True) -> dict[str, list[int]]:
        return {"input_ids": self.encode(text, add_special_tokens)}

    def decode(self, token_ids: int | Sequence[int], skip_special_tokens: bool = False) -> str:
        ids = [token_ids] if isinstance(token_ids, int) else token_ids
        return self._tokenizer.decode(ids, skip_special_tokens=skip_special_tokens)

    def apply_chat_template(
        self, conversation: Sequence[Mapping[str, Any]], tools: Sequence[Any] | None = None,
        chat_template: str | Path | None = None, add_generation_prompt: bool = False,
        continue_final_message: bool = False, tokenize: bool = True, **variables: Any,
    ) -> str | list[int]:
        """A conversation as the chat template writes it, or its token ids.

        Raises:
            ChatTemplateError, ValueError: the template refuses these messages, or the model has none.
        """
        from slotwise.offline.frontend import template_variables

        chosen = template_variables(variables, tools, begins=add_generation_prompt, continues=continue_final_message)
        found = self._frontend.rendered(conversation, chosen, continues=continue_final_message, template=chat_template)
        return (found.ids or []) if tokenize else (found.text or "")

    @property
    def eos_token_id(self) -> int | None:
        return self._id_of("eos_token")

    @property
    def bos_token_id(self) -> int | None:
        return self._id_of("bos_token")

    @property
    def vocab_size(self) -> int:
        return self._tokenizer.vocab_size

    def _id_of(self, name: str) -> int | None:
        text = self._tokenizer.special_tokens.get(name)
        return None if text is None else self._tokenizer.inner.token_to_id(text)
