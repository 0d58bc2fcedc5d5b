"""Conversations and tokenizers of the offline API, on the built-in model."""

from __future__ import annotations

from pathlib import Path

import pytest

from slotwise import LLM, SamplingParams
from slotwise.core.params import LARK
from slotwise.offline.sampling_params import StructuredOutputsParams
from slotwise.text.grammar_check import check

pytestmark = pytest.mark.slow

PROMPT = "def is_empty(self):"
GREEDY = SamplingParams(temperature=0, max_tokens=4)
TEMPLATE = ("{% for message in messages %}[{{ message.role }}]{{ message.content }}\n{% endfor %}"
            "{% if tools %}{{ tools[0].function.name }}\n{% endif %}{{ hint }}"
            "{% if add_generation_prompt %}[a]{% endif %}")
CHAT = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": [{"type": "text", "text": "def f"}]}]


@pytest.fixture(scope="module")
def llm() -> LLM:
    return LLM(dtype="float32", max_num_seqs=4, max_model_len=256, kv_cache_memory=16 << 20)


def test_a_chat_has_the_template_and_the_variables_of_the_call(llm: LLM, tmp_path: Path):
    (tmp_path / "template").write_text(TEMPLATE)
    tools = [{"type": "function", "function": {"name": "look"}}]
    for template in (TEMPLATE, tmp_path / "template", str(tmp_path / "template")):
        (output,) = llm.chat(CHAT, GREEDY, use_tqdm=False, chat_template=template, tools=tools,
                             chat_template_kwargs={"hint": "?"}, chat_template_content_format="string")
        assert output.prompt == "[user]hi\n[assistant]def f\nlook\n?[a]"
        assert output.prompt_token_ids == llm.tokenizer.encode(output.prompt, add_special_tokens=False)
    (left,) = llm.chat(CHAT, GREEDY, use_tqdm=False, chat_template=TEMPLATE, add_generation_prompt=False,
                       continue_final_message=True)
    assert left.prompt == "[user]hi\n[assistant]def f"
    several = llm.chat([CHAT, CHAT[:1]], GREEDY, False, None, None, TEMPLATE)
    assert [output.prompt for output in several] == ["[user]hi\n[assistant]def f\n[a]", "[user]hi\n[a]"]


@pytest.mark.parametrize(("messages", "given", "says"), [
    (CHAT, {"continue_final_message": True}, "continue_final_message: not allowed when add_generation_prompt"),
    (CHAT, {"chat_template_kwargs": {"messages": []}}, "chat_template_kwargs: messages"),
    (CHAT, {"chat_template_content_format": "openai"}, "chat_template_content_format 'openai' is not supported"),
    (CHAT, {"lora_request": object()}, "lora_request must be a slotwise.LoRARequest"),
    ([CHAT, []], {}, "messages: must hold 1"), ([CHAT, ["hi"]], {}, "messages: each must be a dict"),
    ([{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}], {}, "takes text only"),
    ([{"content": "x"}], {}, "role: must be a string"), (CHAT, {"chat_template": "{{ 1 / 0 }}"}, "template failed")])
def test_a_chat_that_cannot_be_is_refused_before_anything_starts(llm: LLM, messages, given, says):
    with pytest.raises(ValueError, match=says):
        llm.chat(messages, GREEDY, use_tqdm=False, **given)
    assert not llm._engine.has_work


def test_a_template_of_the_engine_holds_for_its_chats():
    llm = LLM(chat_template=TEMPLATE, max_num_seqs=1, max_model_len=64, kv_cache_memory=8 << 20)
    assert llm.chat(CHAT[:1], GREEDY, False)[0].prompt == "[user]hi\n[a]"


def test_the_tokenizer_has_the_methods_of_transformers(llm: LLM):
    tokenizer, ids = llm.get_tokenizer(), llm.tokenizer.encode(PROMPT)
    assert tokenizer.encode(PROMPT) == ids == tokenizer(PROMPT)["input_ids"]
    assert tokenizer.encode(PROMPT, add_special_tokens=False) == ids[1:]
    assert tokenizer.decode(ids) == llm.tokenizer.decode(ids, skip_special_tokens=False)
    assert tokenizer.decode(ids, skip_special_tokens=True) == PROMPT and tokenizer.decode(ids[1]) == "def"
    assert tokenizer.eos_token_id in llm.info.eos_token_ids and tokenizer.bos_token_id == ids[0]
    assert tokenizer.vocab_size == llm.tokenizer.vocab_size
    asked = [{"role": "user", "content": PROMPT}]
    text = tokenizer.apply_chat_template(asked, tokenize=False, add_generation_prompt=True)
    assert isinstance(text, str) and PROMPT in text
    assert tokenizer.apply_chat_template(asked, add_generation_prompt=True) == llm.template(asked)
    assert tokenizer.apply_chat_template(CHAT, chat_template=TEMPLATE, tokenize=False, hint="!") == (
        "[user]hi\n[assistant]def f\n!")


NEVER_ENDS = 'start: "a" x\nx: x "b"\n'


def test_a_grammar_that_a_server_refuses_is_refused_with_its_words(llm: LLM):
    params = SamplingParams(max_tokens=4, structured_outputs=StructuredOutputsParams(grammar=NEVER_ENDS))
    with pytest.raises(ValueError) as found:
        llm.generate(PROMPT, params, use_tqdm=False)
    assert str(found.value) == f"structured_outputs: {check(LARK, NEVER_ENDS, [])}"
    assert llm.generate(PROMPT, GREEDY, use_tqdm=False)[0].finished
