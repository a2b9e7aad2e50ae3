"""Which numbers a run computes in: what was asked for, what this machine can do, and FP8's own state."""
