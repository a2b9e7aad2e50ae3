"""The entry: compose, check, run, and turn however it ended into an exit code.

    python -m gpt2_fp8.run model=gpt2 precision=fp8_hybrid data=fineweb
    python -m gpt2_fp8.run -m precision=bf16,fp8_hybrid seed=1,2

Bad input is refused before torch is imported. Exit codes: 0 done, 1 any fault, 2 the input, 3 diverged, 4 data source
lost, 130 and 143 stopped by SIGINT and SIGTERM.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

import hydra
from hydra.core.hydra_config import HydraConfig
from omegaconf import DictConfig

from gpt2_fp8 import compose
from gpt2_fp8.config.errors import RunError


def job(cfg: DictConfig) -> float | None:
    """One run of a sweep, or the only one; Hydra has made its folder. Returns the last validation loss."""
    from gpt2_fp8.train import run  # imports torch

    return run(compose.to_run_config(cfg), Path(HydraConfig.get().runtime.output_dir))


def main(argv: list[str]) -> int:
    """Run the command line `argv` (without the program's name); returns the exit code."""
    try:
        if not compose.is_help(argv):
            compose.preflight(argv)
        os.environ["HYDRA_FULL_ERROR"] = "1"  # let errors through to here; Hydra would print them and exit 1
        sys.argv[1:] = argv
        hydra.main(version_base="1.3", config_path=str(compose.conf_dir()), config_name="config")(job)()
    except RunError as error:
        print(error, file=sys.stderr)
        return error.exit_code
    return 0


def entry() -> None:
    """The `gpt2-fp8` command."""
    sys.exit(main(sys.argv[1:]))


if __name__ == "__main__":
    entry()
