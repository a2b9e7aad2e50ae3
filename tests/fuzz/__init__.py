"""A fuzzer of the program: settings, checkpoints, pointers, logs and data files as nobody should make them.

`promise.py` says what must hold of every one; a file a class of input says how such input is made, and what the right
thing is where the program accepts it. `tally.py` tries many of them, `count.py` is the command that does and counts,
and `test_fuzz.py` tries a few of each in every test run.
"""
