"""gpt2_fp8: train GPT-2 in FP8 from one command, `python -m gpt2_fp8.run`. Importing it imports nothing else."""

__version__ = "0.1.0"
