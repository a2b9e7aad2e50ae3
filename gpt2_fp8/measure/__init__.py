"""Measurements of training, for the benchmark, and the facts of a machine, for `doctor`."""
