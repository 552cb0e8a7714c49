"""Text to learn from: corpora, documents, what the target writes itself."""
