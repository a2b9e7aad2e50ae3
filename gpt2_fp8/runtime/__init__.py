"""The environment of a process: ranks, signals, random numbers, memory, output."""
