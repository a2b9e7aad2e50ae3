"""What the programs of this package share: their list, how they begin and end, their exit codes. Stdlib only."""

from __future__ import annotations

import argparse
import ast
import atexit
import hashlib
import logging
import os
import platform
import signal
import sys
from collections.abc import Callable
from contextlib import suppress
from functools import cache, wraps
from importlib import metadata
from pathlib import Path
from typing import Any

from gpt2_fp8 import __version__
from gpt2_fp8.config.errors import RunError, UserError
from gpt2_fp8.config.shown import harmless
from gpt2_fp8.runtime import ranks, signals
from gpt2_fp8.runtime.signals import SIGNALS

VERSION = f"gpt2_fp8 {__version__}"
_FOLDER = Path(__file__).resolve().parents[1]


def names() -> list[str]:
    """Return the programs' names: `run`, which trains, before the others. No program is imported."""
    found = sorted(path.stem for path in _FOLDER.glob("*.py") if not path.stem.startswith("_"))
    return sorted(found, key=lambda name: name != "run")


def table() -> dict[str, str]:
    """Return what each program does, by the first line of its docstring. Their files are read, and not run."""
    texts = {name: ast.get_docstring(ast.parse((_FOLDER / f"{name}.py").read_bytes())) or "" for name in names()}
    return {name: text.partition("\n")[0] for name, text in texts.items()}


@cache
def source_digest(folder: Path = _FOLDER) -> str | None:
    """Return the first 12 hexadecimal digits of a SHA-256 of the package's code; None if it cannot be read."""
    found = hashlib.sha256()
    try:
        paths = sorted(path for path in folder.rglob("*") if path.suffix in (".py", ".cu", ".cuh"))
        for path in paths:
            content = path.read_bytes()
            found.update(f"{path.relative_to(folder).as_posix()}\0{len(content)}\0".encode() + content)
    except OSError:  # an editor's lock file is a link to nothing
        return None
    return found.hexdigest()[:12] if paths else None


def read_versions() -> dict[str, str | None]:
    """Return versions as installed, without importing anything, and as `code` the digest of this package's files."""
    found: dict[str, str | None] = {"gpt2_fp8": __version__, "code": source_digest()}
    found["python"] = platform.python_version()
    return found | {name: installed_version(name) for name in ("torch", "lightning", "transformer_engine")}


def installed_version(package: str) -> str | None:
    """Return the version of an installed package; None without it."""
    with suppress(metadata.PackageNotFoundError):
        return metadata.version(package)
    return None


def asks_version(argv: list[str]) -> bool:
    """Return whether a command line asks for the version."""
    return "--version" in argv[: argv.index("--") if "--" in argv else None]


def answer_questions(argv: list[str], help_text: Callable[[], str]) -> bool:
    """Print the version or the help if a command line asks for one; returns whether it did."""
    if asks_version(argv):
        print(VERSION)
    elif {"-h", "--help"} & set(argv):
        print(help_text())
    else:
        return False
    return True


def parser(name: str, description: str, exits: str = "", epilog: str = "", **options: Any) -> argparse.ArgumentParser:
    """Return the parser of a program, with what all have: `--version`, and the exit codes below the help."""
    exits = exits or "1 the files could not be written; "
    epilog = f"{epilog} Exit codes: 0 done; {exits}2 your input; 130 stopped.".strip()
    prog = f"python -m gpt2_fp8.{name}"
    made = argparse.ArgumentParser(prog=prog, description=description, epilog=epilog, **options)
    made.add_argument("--version", action="version", version=VERSION)
    return made


def positive(text: str) -> int:
    """Return the number that an argument is, for a parser."""
    if not (text.isascii() and text.isdigit() and int(text) > 0):
        raise argparse.ArgumentTypeError(f"{text} is not a whole number from 1 on")
    return int(text)


def begin() -> None:
    """Prepare the process, before torch is imported."""
    # Busy waiting makes training 3 times slower beside two busy programs on two cores; sleeping costs an idle CPU 6 %.
    os.environ.setdefault("OMP_WAIT_POLICY", "passive")
    logging.raiseExceptions = False  # a line that a pipe or a disk does not take costs that line alone


def end(code: int) -> int:
    """Flush standard output at the end of a program; returns the exit code, 141 if the reader has ended (`| head`)."""
    try:
        sys.stdout.flush()
    except BrokenPipeError:
        return without_reader()
    except OSError as error:  # a full disk
        say(f"error: standard output cannot be written: {error.strerror}")
        without_reader()
        return code or 1
    return code


def say(text: str) -> None:
    """Print to standard error, without what a terminal would obey. Raises nothing if the terminal is gone."""
    with suppress(OSError):
        print(harmless(text), file=sys.stderr, flush=True)


def main(name: str, program: Callable[[list[str]], int], once_a_node: bool = False) -> int:
    """Call `program` with this process's words, and return its exit code; 2 if a launcher has started several.

    `once_a_node`: the program is about a machine, so one process on each node is meant.
    """
    begin()
    ranks.forget()
    try:
        place = ranks.current()
        if place.several and not (once_a_node and place.local_world_size == 1):
            cause = f"{name} is one process, and {place.launcher} has started {place.world_size}"
            raise UserError.of(cause, f"python -m gpt2_fp8.{name} without {place.launcher}")
    except UserError as error:
        if ranks.is_first_rank():
            say(str(error))
        return error.exit_code
    return end(program(sys.argv[1:]))


def exit_code(work: Callable[[list[str]], int | None]) -> Callable[[list[str]], int]:
    """Make a program's `main` return an exit code: its own or 0, or the code of how it ended.

    That is a RunError's own code, 130 after SIGINT, 141 if the reader of the output has ended, or 1 if a file could not
    be written.
    """

    @wraps(work)
    def main(argv: list[str]) -> int:
        try:
            return work(argv) or 0
        except RunError as error:
            print(harmless(str(error)), file=sys.stderr)
            return error.exit_code
        except KeyboardInterrupt:
            return 130
        except BrokenPipeError:
            return without_reader()
        except OSError as error:
            print(f"error: {error}", file=sys.stderr)
            return 1

    return main


def stoppable(main: Callable[[list[str]], int]) -> Callable[[list[str]], int]:
    """Make a program's `main` end at once by a signal, with exit code 128 plus its number."""

    @wraps(main)
    def stopped(argv: list[str]) -> int:
        with signals.handle_signals() as handlers:
            try:
                with handlers.at_once():
                    return main(argv)
            except BaseException:  # what was interrupted may have failed for that
                if handlers.received is None:
                    raise
            say("stopped")
        return 128 + handlers.received

    return stopped


def path(text: str) -> Path:
    """Return the path that an argument names, for a parser: the shell leaves `--out=~/x` and `runs=[~/x]` as typed."""
    return Path(os.path.expanduser(text))  # Path's own raises for a home that nobody has


def to_write(file: str) -> Path:
    """Return the path of a file to write, after making its folder. Raises OSError if that cannot be made."""
    found = path(file)
    found.parent.mkdir(parents=True, exist_ok=True)
    return found


def without_reader() -> int:
    """Drop what is still buffered, since the output has no reader; returns the exit code, 141."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return 128 + signal.SIGPIPE


def leave_with(code: int) -> None:
    """Make a signal end the process at once with exit code `code`, since it has come to its end."""
    for number in SIGNALS:
        if signal.getsignal(number) != signal.SIG_IGN:
            signal.signal(number, lambda *_: os._exit(code))


def ignore_at_the_end() -> None:
    """Ignore signals at the very end of the process, when Python resets handlers to the default, which would end it.

    Call this before anything else registers with `atexit`, which calls what registered first last.
    """
    atexit.register(lambda: [signal.signal(number, signal.SIG_IGN) for number in SIGNALS])
