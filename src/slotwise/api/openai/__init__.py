"""OpenAI's endpoints: completions, chat, responses and embeddings."""
