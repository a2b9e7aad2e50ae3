"""What the scripts share: options before `--`, the words of a run behind it, and files of conditions."""

from __future__ import annotations

import argparse
import os
from collections.abc import Sequence
from pathlib import Path

from gpt2_fp8 import compose
from gpt2_fp8.compose import benchmark
from gpt2_fp8.config.errors import Problem, UserError
from gpt2_fp8.config.schema import RunConfig


def environment(gpus: str | None = None) -> dict[str, str]:
    """Return the variables of a run that a script starts: plug-ins are beside it. `gpus`: CUDA_VISIBLE_DEVICES."""
    paths = [str(Path(__file__).resolve().parent), *filter(None, [os.environ.get("PYTHONPATH")])]
    seen = {} if gpus is None else {"CUDA_VISIBLE_DEVICES": gpus}
    return os.environ | {"PYTHONPATH": os.pathsep.join(paths)} | seen


class Parser(argparse.ArgumentParser):
    """A parser of the options before `--`, with a script's docstring for its help."""

    def __init__(self, description: str | None):
        super().__init__(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)

    def split(self, argv: Sequence[str]) -> tuple[argparse.Namespace, list[str]]:
        """Return the options of a command line, and the words behind `--`."""
        mark = list(argv).index("--") if "--" in argv else len(argv)
        return self.parse_args(argv[:mark]), list(argv[mark + 1 :])

    def composed(self, words: Sequence[str]) -> RunConfig:
        """Return the settings that the words of one run come to. Exits with 2 if they are refused."""
        try:
            configs = compose.preflight(list(words))
        except UserError as error:
            self.error(str(error))
        if len(configs) > 1:
            self.error(f"{len(configs)} runs are asked for instead of one")
        return configs[0]

    def conditions(self, file: str) -> dict[str, list[str]]:
        """Return the words of each line `NAME: WORDS` of a file, by its name. Exits with 2 if it cannot be read."""
        problems: list[Problem] = []
        rows = benchmark.read_rows(file, problems, "--conditions")
        if problems:
            self.error(str(UserError(problems)))
        return rows
