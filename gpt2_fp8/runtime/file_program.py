"""How the programs end that read a run's files and write others: exit codes, and two lines for what went wrong."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

from gpt2_fp8.config.errors import Problem, RunError
from gpt2_fp8.config.shown import harmless, line
from gpt2_fp8.runtime import output, torch_faults


def to_write(file: str) -> Path:
    """Return the path of a file to write, after making its folder. Raises OSError where that cannot be made."""
    path = Path(file).expanduser()
    path.parent.mkdir(parents=True, exist_ok=True)
    return path


def exit_code(work: Callable[[], None], written: Path | str, remedy: str) -> int:
    """Call `work`, and return 0, or the code of how it ended.

    That is a RunError's own code, 130 after SIGINT, 141 if the reader of its output has ended, or 1 if a file could not
    be written.

    `written`: what is named if the system does not say which file that was. `remedy`: follows "free space there, or".
    """
    try:
        work()
    except RunError as error:
        print(harmless(str(error)), file=sys.stderr)
        return error.exit_code
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:
        return output.without_reader()
    except Exception as error:
        if (known := torch_faults.explained(error)) is not None:
            print(harmless(str(known)), file=sys.stderr)
            return known.exit_code
        if not isinstance(error, OSError):
            raise
        cause = f"{error.filename or written} cannot be written: {error.strerror or error}"
        print(Problem(line(cause), f"free space there, or {remedy}"), file=sys.stderr)
        return 1
    return 0
