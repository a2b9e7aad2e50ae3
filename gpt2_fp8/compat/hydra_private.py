"""What is private in Hydra, and yet used. Holds for `hydra-core>=1.3.8,<1.4`. Imports no torch."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import cast

from hydra._internal.config_loader_impl import ConfigLoaderImpl
from hydra._internal.core_plugins.basic_sweeper import BasicSweeper
from hydra._internal.utils import get_args_parser
from hydra.core.config_loader import ConfigLoader
from hydra.core.object_type import ObjectType
from hydra.core.override_parser.types import Override


def flag_parser() -> argparse.ArgumentParser:
    """Return the parser of Hydra's own flags, which `hydra.main` makes inside."""
    return get_args_parser()


def given_flags(parser: argparse.ArgumentParser, args: argparse.Namespace) -> dict[str, str]:
    """Return the flags of `flag_parser` that a line sets, by argparse's name, as they are typed (`-h/--help`)."""
    flags = [action for action in parser._actions if action.option_strings]
    given = [flag for flag in flags if getattr(args, flag.dest, None) not in (None, False)]
    return {flag.dest: "/".join(flag.option_strings) for flag in given}


def job_words(overrides: list[Override]) -> list[list[str]]:
    """List the words of each job of a sweep, in the order of Hydra's basic sweeper. Raises HydraException."""
    (jobs,) = BasicSweeper.split_arguments(overrides, max_batch_size=None)
    return jobs


def group_options(loader: ConfigLoader, group: str, kind: ObjectType | None) -> list[str]:
    """List the options of a group. The loader's own `get_group_options` takes six times as long."""
    return cast(ConfigLoaderImpl, loader).repository.get_group_options(group, kind)


def search_in(loader: ConfigLoader, folder: Path) -> None:
    """Search a folder for configurations after all others, as `hydra.main` does with `-cd`, and `compose` does not."""
    private = cast(ConfigLoaderImpl, loader)
    private.config_search_path.prepend("command-line", f"file://{folder}", "schema")
    private.repository.initialize_sources(private.config_search_path)
