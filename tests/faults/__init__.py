"""Faults that a run survives. `test_NN_what`: the number of a row in docs/reliability.md, where it has one."""
