"""Measurements of training: the benchmark prints them, and `precision=auto` decides by them."""
