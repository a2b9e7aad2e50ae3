"""Lightning callbacks, one concern a file; none knows of another."""
