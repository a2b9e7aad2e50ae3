"""The model: GPT-2, its loss, its FLOPs, and text generation."""
