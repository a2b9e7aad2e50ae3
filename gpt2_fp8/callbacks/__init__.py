"""Lightning callbacks; none uses another."""
