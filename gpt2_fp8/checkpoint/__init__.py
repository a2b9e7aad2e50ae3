"""Checkpoints: folders of safetensors and JSON, without pickles."""
