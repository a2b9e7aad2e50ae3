"""How a study's program begins and ends: as the package's do, whatever becomes of the reader of what it prints."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import NoReturn

from gpt2_fp8.runtime import output


def run(main: Callable[[list[str]], int]) -> NoReturn:
    """Call `main` with this process's words, and end with its exit code; 130 after Ctrl-C.

    A reader that ends, as `head` does, ends nothing: what is printed after it is lost.
    """
    output.begin()
    try:
        code = main(sys.argv[1:])
    except KeyboardInterrupt:
        code = 130
    sys.exit(code)
