"""What keeps torch, its compiler or Triton from their work here: compilers, folders, variables. Each in two lines.

Errors are known by their names and texts, since some come before torch is imported. Standard library only.
"""

from __future__ import annotations

import os
import re
import subprocess
from collections.abc import Iterator
from pathlib import Path

from gpt2_fp8.config.errors import Problem, UserError
from gpt2_fp8.config.output_folder import unwritable

# Where torch's compiler and Triton keep what they have built, by the variable that names another place.
_INDUCTOR, _TRITON = "TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR"
# An OSError, also as the text that a process of the compiler sends of its own.
_OS_ERROR = re.compile(r"\[Errno \d+\] ([^:\n]+): '([^'\n]+)'")

_REFUSED = re.compile(r"The value of (TORCH_\w+) must be ")  # torch.distributed's


def explained(error: BaseException) -> UserError | None:
    """Return the error that says what to install or which variable to change; None for an error of another kind."""
    problem = next((found for each in _chain(error) if (found := _problem(each))), None)
    return None if problem is None else UserError([problem])


def check_folders(on_gpu: bool) -> None:
    """Raise UserError if torch's compiler, and for a GPU Triton, could not keep what they build."""
    problems = []
    for name in (_INDUCTOR, _TRITON) if on_gpu else (_INDUCTOR,):
        if not (folder := os.environ.get(name)):
            continue
        try:
            os.makedirs(folder, exist_ok=True)
            reason = unwritable(Path(folder))
        except OSError as error:
            reason = error.strerror or str(error)
        if reason:
            problems.append(_unwritable(folder, reason, name))
    if problems:
        raise UserError(problems)


def _chain(error: BaseException) -> Iterator[BaseException]:
    """Yield an error and those that caused it. torch's compiler has its own attribute for them."""
    left, seen = [error], set()
    while left:
        each = left.pop(0)
        if id(each) not in seen:
            seen.add(id(each))
            yield each
            causes = (getattr(each, "inner_exception", None), each.__cause__, each.__context__)
            left += [cause for cause in causes if isinstance(cause, BaseException)]


def _problem(error: BaseException) -> Problem | None:
    name, text = type(error).__name__, str(error)
    if name == "ValueError" and text.lstrip().startswith("Invalid log settings"):
        cause = f"TORCH_LOGS={os.environ.get('TORCH_LOGS', '')}: torch has no such log"
        return Problem(cause, "unset TORCH_LOGS; or TORCH_LOGS=NAME, of those that TORCH_LOGS=help lists")
    if name == "ValueError" and (refused := _REFUSED.match(text)):
        cause = f"{refused[1]}={os.environ.get(refused[1], '')}: {text}"
        return Problem(cause, f"unset {refused[1]}")
    tried = os.environ.get("CXX")
    if name == "InvalidCxxCompiler" or (isinstance(error, OSError) and tried and error.filename == tried):
        cause = f"torch.compile needs a C++ compiler, and {f'CXX={tried} is none' if tried else 'there is no g++ here'}"
        way = "unset CXX, or CXX=PATH of one" if tried else "install one (apt-get install g++), or CXX=PATH"
        return Problem(cause, f"{way}; compile=false does without")
    if name == "CppCompileError":
        output = getattr(error, "output", text).splitlines()
        said = next((line.strip() for line in output if "error" in line.lower()), "it does not say why")
        cause = f"torch.compile needs a C++ compiler, and it has failed: {said}"
        return Problem(cause, "install a whole one (apt-get install g++), or CXX=PATH; compile=false does without")
    if "Failed to find C compiler" in text:
        return Problem("Triton needs a C compiler, and there is none here", "install gcc, or CC=PATH of one")
    if isinstance(error, subprocess.CalledProcessError) and _is_build(error.cmd):
        cause = f"Triton needs a C compiler, and {error.cmd[0]} has failed: its own words are above"
        return Problem(cause, "install what it lacks (Python's headers: apt-get install python3-dev), or CC=PATH")
    return _of_folder(text)


def _is_build(command: object) -> bool:
    """Return whether a command is Triton's to build a module of Python's."""
    return isinstance(command, list) and "-shared" in command and any(str(word).endswith(".c") for word in command)


def _of_folder(text: str) -> Problem | None:
    """Return the problem of a file in the compiler's folders; None if the error is not of such a file."""
    triton_home = os.environ.get("TRITON_HOME") or str(Path("~").expanduser())
    places = {_INDUCTOR: os.environ.get(_INDUCTOR), _TRITON: os.environ.get(_TRITON)}
    for match in _OS_ERROR.finditer(text):
        for name, folder in (*places.items(), (_TRITON, os.path.join(triton_home, ".triton"))):
            if folder and f"{match[2]}/".startswith(f"{os.path.abspath(folder)}/"):
                return _unwritable(folder, match[1], name)
    return None


def _unwritable(folder: str, reason: str, name: str) -> Problem:
    cause = f"{folder}, where compiled code is kept ({name}), cannot be written: {reason}"
    chosen = name in os.environ and not os.path.basename(folder).startswith("torchinductor_")  # torch's own: it sets it
    return Problem(cause, f"{name}=FOLDER, one that can be written{f'; or unset {name}' if chosen else ''}")
