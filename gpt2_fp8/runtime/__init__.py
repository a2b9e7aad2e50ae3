"""What a process stands on: ranks, signals, random numbers, memory, output."""
