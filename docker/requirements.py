"""Writes what pip is to install in the container, and what it is to leave as the image has it.

    python docker/requirements.py pyproject.toml requirements.txt constraints.txt

The image's torch is a pre-release such as 2.11.0a0, which pip takes to be older than 2.11. So neither torch nor
Transformer Engine is required: they are in the image, built for each other. The constraints hold what was compiled
against them at the versions that are installed.
"""

import re
import sys
import tomllib
from importlib import metadata
from pathlib import Path

KEPT = ("torch", "transformer-engine")  # of the image; not required
HELD = ("torch", "transformer-engine", "transformer-engine-torch", "triton", "pytorch-triton", "numpy")
EXTRAS = ("fp8", "bench", "hf")


def requirements(project: dict) -> list[str]:
    """Return the requirements of a `pyproject.toml` and of `EXTRAS`, without those of `KEPT`."""
    build, project = project["build-system"]["requires"], project["project"]  # the build is not isolated
    every = [
        *build,
        *project["dependencies"],
        *(line for name in EXTRAS for line in project["optional-dependencies"][name]),
    ]
    return [line for line in every if re.match(r"[\w.-]+", line)[0].lower() not in KEPT]


def constraints() -> list[str]:
    """Return the installed versions of what is held."""
    found = []
    for name in HELD:
        try:
            found.append(f"{name}=={metadata.version(name)}")
        except metadata.PackageNotFoundError:
            continue
    return found


if __name__ == "__main__":
    source, wanted, held = map(Path, sys.argv[1:])
    wanted.write_text("\n".join(requirements(tomllib.loads(source.read_text()))) + "\n")
    held.write_text("\n".join(constraints()) + "\n")
