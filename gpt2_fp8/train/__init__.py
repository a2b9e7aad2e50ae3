"""A run under Lightning."""
