"""Checkpoints: folders of safetensors and JSON that nothing has to unpickle."""
