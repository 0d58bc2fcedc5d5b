"""How byte-level vocabularies in GGUF files split a text into words, by `tokenizer.ggml.pre`.

The kinds are llama.cpp's; each is written with the expressions of the tokenizers that were published in its name.
"""

from __future__ import annotations

from typing import NamedTuple

from slotwise.text.linear_rules import CONTRACTIONS, LINES, LOWER, MARKED, SLASHED, UPPER, WORD

GPT2 = rf"{CONTRACTIONS}| ?\p{{L}}+| ?\p{{N}}+| ?[^\s\p{{L}}\p{{N}}]+|\s+(?!\S)|\s+"
LLAMA3 = WORD + r"\p{N}{1,3}" + MARKED
QWEN2 = WORD + r"\p{N}" + MARKED
QWEN35 = (rf"(?i:{CONTRACTIONS})|[^\r\n\p{{L}}\p{{N}}]?[\p{{L}}\p{{M}}]+|\p{{N}}"
          rf"| ?[^\s\p{{L}}\p{{M}}\p{{N}}]+[\r\n]*|{LINES}")
TEKKEN = rf"{LOWER}|{UPPER}|\p{{N}}{SLASHED}"
GPT4O = rf"{LOWER}(?i:{CONTRACTIONS})?|{UPPER}(?i:{CONTRACTIONS})?|\p{{N}}{{1,3}}{SLASHED}"
DEEPSEEK3 = (
    r"\p{N}{1,3}", "[\u4e00-\u9fa5\u3040-\u309f\u30a0-\u30ff]+",
    r"""[!"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+"""
    rf"| ?[\p{{P}}\p{{S}}]+[\r\n]*|{LINES}")
DEEPSEEK_CODER = (r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", "[\u4e00-\u9fa5\u0800-\u4e00\uac00-\ud7ff]+", r"\p{N}")
DEEPSEEK_LLM = (r"[\r\n]", r"\s?[\p{Lu}\p{Ll}\p{Lt}]+", r"\s?[!-/:-~！-／：-～‘-‟\x{3000}-。]+", r"\s+$",
                DEEPSEEK_CODER[3], r"\p{N}+")
FALCON = (r"[\p{P}\$\+<=>\^~\|`]+", GPT2, "[0-9][0-9][0-9]")
DIGIT = r"\p{N}"


class Splits(NamedTuple):
    expressions: tuple[str, ...]  # applied one after another, each to the pieces of the one before
    keeps_words: bool = False  # a word that is a token is not built by merges
    adds_bos: bool = False  # where the file does not say


_OF = {
    ("gpt-2", "phi-2", "mpt", "olmo", "jais", "exaone4", "gigachat", "a.x-4.0", "mellum", "trillion"): Splits((GPT2,)),
    ("llama-bpe", "llama3", "llama-v3", "falcon3", "falcon-h1", "pixtral", "midm-2.0", "lfm2"):
        Splits((LLAMA3,), keeps_words=True, adds_bos=True),
    ("dbrx", "smaug-bpe", "chatglm-bpe"): Splits((LLAMA3,)),
    ("glm4",): Splits((LLAMA3,), keeps_words=True),
    ("qwen2", "stablelm2", "deepseek-r1-qwen", "hunyuan", "megrez", "solar-open", "kormo", "grok-2"): Splits((QWEN2,)),
    ("qwen35",): Splits((QWEN35,)),
    ("tekken",): Splits((TEKKEN,), keeps_words=True, adds_bos=True),
    ("gpt-4o", "llama4", "kanana2", "minimax-m2"): Splits((GPT4O,)),
    ("deepseek-v3", "hunyuan-dense", "joyai-llm"): Splits(DEEPSEEK3),
    ("deepseek-llm",): Splits(DEEPSEEK_LLM),
    ("falcon",): Splits(FALCON),
    ("deepseek-coder",): Splits(DEEPSEEK_CODER),
    ("smollm", "starcoder", "refact", "command-r", "codeshell", "exaone", "minerva-7b", "mellum2"):
        Splits((DIGIT, GPT2)),
}  # fmt: skip
SPLITS = {kind: splits for kinds, splits in _OF.items() for kind in kinds}
