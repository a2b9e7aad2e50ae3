"""The faults that a run is to survive, by the numbers of docs/reliability.md: `test_NN_what`."""
