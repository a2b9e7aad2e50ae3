"""Lightning callbacks, one concern a file; none uses another."""
