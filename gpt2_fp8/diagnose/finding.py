"""What a rule says of a machine. Standard library only."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Status = Literal["ok", "warn", "fail"]


@dataclass(frozen=True)
class Finding:
    """What a rule says of the facts.

    Attributes:
        subject: the section of the report.
        status: "ok"; "warn": slower, or a trap; "fail": FP8, or what it needs, does not work.
        what: one line.
        why: what follows from it, or where it comes from; None if nothing needs to be said.
        remedy: what mends it, as a command where there is one; None if nothing is wrong, or nothing helps.
    """

    subject: str
    status: Status
    what: str
    why: str | None = None
    remedy: str | None = None
