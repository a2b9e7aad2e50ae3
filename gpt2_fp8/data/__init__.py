"""Text to sequences: sources of documents, tokenizers, one order of samples, and the Lightning data module."""
