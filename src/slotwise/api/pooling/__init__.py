"""Routes that are answered from prompts alone, without output tokens: embeddings, scores, classes and decisions."""
