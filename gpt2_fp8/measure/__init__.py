"""Measuring training: what the benchmark prints and what `precision=auto` decides by."""
