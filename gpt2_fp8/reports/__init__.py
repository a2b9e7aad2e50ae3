"""What runs have left, read again and shown: the table of a sweep, the comparison of runs."""
