"""OpenAI's endpoints: completions, chat and responses."""
