"""Reads single variables by which processes find each other, and notes what is wrong. Standard library only."""

from __future__ import annotations

from collections.abc import Mapping

from gpt2_fp8.config.errors import Problem
from gpt2_fp8.runtime import rank_zero_address

_LONGEST = 9  # digits of a number


class VariableReader:
    """Reads an environment. A variable that is empty counts as not set.

    Attributes:
        problems: what is wrong with what has been read.
    """

    def __init__(self, environment: Mapping[str, str]) -> None:
        self.environment = {name: value for name, value in environment.items() if value}
        self.problems: list[Problem] = []

    def number(self, name: str, default: int | None = None) -> int:
        """Return a variable's number, and note if it lacks or is none."""
        value = self.environment.get(name)
        if value is None and default is not None:
            return default
        if value is None or not value.isascii() or not value.isdigit() or len(value) > _LONGEST:
            said = "is not set" if value is None else f"is {value!a}, not a number"
            unset = "" if value is None else f"; or unset {name}, if it is left of another run"
            self.refuse(
                f"{name} {said}, and the variables say that this is one of several processes",
                f"set {name}, or start the processes with torchrun or srun, which set all of them{unset}",
            )
            return 1
        return int(value)

    def address(self) -> str | None:
        """Return MASTER_ADDR, and note if it can be no host's."""
        address = self.environment.get("MASTER_ADDR")
        if address and (problem := rank_zero_address.check(address)):
            self.problems.append(problem)
        return address

    def port(self, default: int) -> int:
        """Return MASTER_PORT, and note if it is none."""
        port = self.number("MASTER_PORT", default)
        if not 0 < port < 65536:
            self.refuse(f"MASTER_PORT={port} is no port", "a number from 1024 to 65535, the same for every process")
        return port

    def refuse(self, cause: str, remedy: str) -> None:
        """Note a problem."""
        self.problems.append(Problem(cause, remedy))
