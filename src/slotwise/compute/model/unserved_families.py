"""The classes of `transformers`' causal models that no composition of layers reaches, by the part that each lacks.

A class that is served is in `family_table.py`; a test finds each causal class in one of the two tables.
"""

from __future__ import annotations

from collections.abc import Mapping

CROSS_ATTENTION = "cross-attention of a decoder to the states of an encoder"
HEAD_OF_BERT = "the head of an encoder (a product, an activation and a norm before the vocabulary)"
HYPER_CONNECTIONS = "hyper-connections (several residual streams that layers mix)"
OF_AUDIO = "codes of audio, several per step, as the model's tokens"

DECODERS: Mapping[str, str] = {
    "AXK2ForCausalLM": "gated norms (a low-rank gate of each norm's output)",
    "BailingHybridForCausalLM": "compressed attention with a gate for each head",
    "BeamForCausalLM": "residual sums weighted by depth, and a bias of gates for each head",
    "BltForCausalLM": "patches of bytes, cut where a smaller model's entropy rises",
    "CpmAntForCausalLM": "learned biases by the distance between segments of a prompt",
    "DeepseekV4ForCausalLM": f"attention to compressed runs of tokens, and {HYPER_CONNECTIONS}",
    "DoryForCausalLM": "hidden states on the unit sphere (nGPT), with layers that run several times",
    "Dots3NoteForCausalLM": "compressed attention with windows, gates and sizes by layer",
    "HYV4ForCausalLM": f"{HYPER_CONNECTIONS}, and sinks of compressed attention",
    "HrmTextForCausalLM": "two stacks of layers that run in turns, several times for a token, each time with a cache",
    "Inkling2ForCausalLM": "biases of scores that each token computes for its distances, and residuals by attention",
    "Inkling2LoopForCausalLM": "layers that run several times, and biases of scores that each token computes",
    "InklingForCausalLM": "biases of scores that each token computes for its distances",
    "LaraMiniForCausalLM": "windows and recurrent states in one model",
    "LongcatFlashForCausalLM": "two attentions in a layer, around experts of which some return their input",
    "MiniMaxM3VLForCausalLM": "attention to blocks of tokens that an indexer selects",
    "Qwen4ExpForCausalLM": f"embeddings of n-grams in layers, an indexer, and {HYPER_CONNECTIONS}",
    "RecurrentGemmaForCausalLM": "a gated linear recurrence (RG-LRU)",
    "ReformerModelWithLMHead": "attention to tokens of the same hash, in reversible layers",
    "RwkvForCausalLM": "RWKV's recurrence (WKV)",
    "XLMWithLMHeadModel": "an embedding of languages next to that of tokens",
    "XLNetLMHeadModel": "two streams of attention over permuted tokens",
    "ZayaForCausalLM": "attention in a compressed, convolved space, and routers with memory of earlier layers",
    "xLSTMForCausalLM": "the recurrence of xLSTM (matrix memories)",
}
"""Decoders for text."""

ENCODERS_AS_DECODERS: Mapping[str, str] = {
    "ElectraForCausalLM": f"an embedding and a head of different sizes, and {HEAD_OF_BERT}",
    "BigBirdForCausalLM": "attention to random and global blocks",
    "ModernBertDecoderForCausalLM": f"windows that look back only, and {HEAD_OF_BERT}",
    "RemBertForCausalLM": f"an embedding and a head of different sizes, and {HEAD_OF_BERT}",
    "RoCBertForCausalLM": "embeddings of a character's shape and sound",
    "RoFormerForCausalLM": f"an embedding that is projected, and {HEAD_OF_BERT}",
    "XmodForCausalLM": "an adapter for each language in every layer",
}
"""Encoders for text, saved as decoders."""

OF_ENCODER_DECODERS: Mapping[str, str] = dict.fromkeys((
    "BartForCausalLM", "BigBirdPegasusForCausalLM", "BlenderbotForCausalLM", "BlenderbotSmallForCausalLM",
    "MBartForCausalLM", "MarianForCausalLM", "MvpForCausalLM", "PLBartForCausalLM", "PegasusForCausalLM",
    "ProphetNetForCausalLM", "TrOCRForCausalLM", "WhisperForCausalLM",
), CROSS_ATTENTION)
"""Decoders of models that also have an encoder."""

NOT_OF_TEXT: Mapping[str, str] = {
    "Emu3ForCausalLM": "codes of images in the vocabulary, and an embedding that drops out",
    "FuyuForCausalLM": "patches of images as the model's tokens",
    "GitForCausalLM": "an encoder of images before the text",
    "MllamaForCausalLM": "cross-attention of some layers to the states of images",
    "MoshiForCausalLM": OF_AUDIO,
    "MossTranscribeDiarizeForConditionalGeneration": "an encoder of audio before the text",
    "MusicgenForCausalLM": OF_AUDIO,
    "MusicgenMelodyForCausalLM": OF_AUDIO,
    "Phi4MultimodalForCausalLM": "encoders of images and audio, each with a LoRA of its own for the text part",
}
"""Models of images or audio."""

DRAFT_MODELS: Mapping[str, str] = dict.fromkeys((
    "Gemma4AssistantForCausalLM", "Gemma4UnifiedAssistantForCausalLM",
), "a draft model that reads the keys and values of the model it drafts for")
"""Models that serve only together with another one."""

GROUPS: Mapping[str, Mapping[str, str]] = {
    "decoder for text": DECODERS,
    "encoder for text, saved as a decoder": ENCODERS_AS_DECODERS,
    "decoder of a model with an encoder": OF_ENCODER_DECODERS,
    "model of images or audio": NOT_OF_TEXT,
    "draft model": DRAFT_MODELS,
}
UNSERVED: Mapping[str, str] = {name: part for group in GROUPS.values() for name, part in group.items()}
"""The part that is not built, by class."""
