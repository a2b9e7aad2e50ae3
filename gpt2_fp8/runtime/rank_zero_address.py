"""Whether MASTER_ADDR can be where rank 0 is: a host's name, or an address. Standard library only.

A name that nobody knows is tried for a while (`runtime/meeting_place.py`). What is no name at all is known at once.
"""

from __future__ import annotations

import ipaddress
import re

from gpt2_fp8.config.errors import Problem

# RFC 1123, and _, which some clusters use.
_NAME = re.compile(r"(?!-)[A-Za-z0-9_-]{1,63}(\.(?!-)[A-Za-z0-9_-]{1,63})*\.?")
_LONGEST = 253  # characters of a name
_NUMBERS = re.compile(r"[0-9.]+")
_URL = re.compile(r"[a-z0-9+]+://", re.IGNORECASE)
_IN_BRACKETS = re.compile(r"\[([^\]]*)\](?::(.*))?")
_WITH_PORT = re.compile(r"([^:]*):(\d*)")
_LIST = re.compile(r"\[(\d+)[^\]]*\]")  # SLURM's node[05-08,11]


def is_one(address: str) -> bool:
    """Return whether `address` can be a host's: a name, or an address of IPv4 or IPv6, without a port."""
    if _is_number(address):
        return True
    return len(address) <= _LONGEST and not _NUMBERS.fullmatch(address) and _NAME.fullmatch(address) is not None


def check(address: str) -> Problem | None:
    """Return what is wrong with a MASTER_ADDR, and what was probably meant; None: nothing is."""
    if is_one(address):
        return None
    meant, port = _meant(address)
    remedy = "the name or address of rank 0's host, and nothing else, the same for every process"
    if meant is not None:
        remedy = f"MASTER_ADDR={meant}" + (f" MASTER_PORT={port}" if port else "") + ", the same for every process"
    what = "has a port in it, which belongs into MASTER_PORT" if port else "is no host's name or address"
    return Problem(f"MASTER_ADDR={address!r} {what}", remedy)


def first_of(listed: str) -> str:
    """Return the first host of a list as SLURM writes it: `node[05-08,11],gpu1` begins with node05."""
    return _LIST.sub(r"\1", re.split(r",(?![^\[]*\])", listed)[0])


def _meant(address: str) -> tuple[str | None, str | None]:
    """Return the host in what was typed, if there is one, and the port that was typed with it."""
    bare, port = _URL.sub("", address.strip()).split("/")[0], None
    if (matched := _IN_BRACKETS.fullmatch(bare)) or (matched := _WITH_PORT.fullmatch(bare)):
        bare, port = matched[1], matched[2]
    host = bare.rpartition("@")[2] if is_one(bare.rpartition("@")[2]) else first_of(bare).strip()
    is_port = port is not None and port.isascii() and port.isdigit() and 0 < int(port[:6]) < 65536
    return host if is_one(host) else None, port if is_port else None


def _is_number(address: str) -> bool:
    try:
        ipaddress.ip_address(address)
    except ValueError:
        return False
    return True
