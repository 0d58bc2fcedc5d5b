"""Text to token ids and back: tokenizer, chat templates, incremental detokenizer, stop strings.

Begin with `tokenizer.py` (both directions), `chat_template.py` (messages to a prompt) and `detokenizer.py` (tokens to a
stream of text).
"""
