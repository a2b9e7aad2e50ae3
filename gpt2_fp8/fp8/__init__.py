"""How a model computes: backends, one class each, FP8 recipes, and the scales of FP8 tensors."""
