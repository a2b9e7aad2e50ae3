"""Runs a command that may be missing, fail or hang."""

from __future__ import annotations

import subprocess

SECONDS = 20.0  # that a command may take


def output_of(*command: str) -> tuple[str, str | None]:
    """Return what a command prints, and why it failed in one line; None if it did not."""
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, errors="replace", timeout=SECONDS, stdin=subprocess.DEVNULL
        )
    except FileNotFoundError:
        return "", f"{command[0]} is not installed"
    except (OSError, subprocess.SubprocessError) as error:
        return "", " ".join(str(error).split())
    if done.returncode == 0:
        return done.stdout, None
    return done.stdout, " ".join((done.stderr or done.stdout).split())[:300] or f"exit code {done.returncode}"
