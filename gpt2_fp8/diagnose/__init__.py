"""Whether FP8 works on a machine: facts are recorded, and rules say what they mean and what mends them."""
