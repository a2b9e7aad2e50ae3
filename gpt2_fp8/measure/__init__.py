"""Measurements of training, which the benchmark prints."""
