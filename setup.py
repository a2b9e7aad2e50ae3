"""Names the packages of a wheel: every folder of `gpt2_fp8`, and `conf` as one of them.

The rest is in pyproject.toml. There, packages are either found or listed, and `conf` is found nowhere below `gpt2_fp8`.
"""

from setuptools import find_packages, setup

setup(packages=[*find_packages(include=["gpt2_fp8", "gpt2_fp8.*"]), "gpt2_fp8.conf"])
