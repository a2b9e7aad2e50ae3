"""A run's precision: what was asked for, what this machine can do, and the state that FP8 needs."""
