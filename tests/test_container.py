"""The Dockerfile: its order, what it installs, and its pip lines in a virtual environment with the image's torch."""

import importlib.util
import re
import shlex
import tomllib

from tests.test_readme import ROOT

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())


def instructions():
    """The Dockerfile's instructions: (name, the rest of the line)."""
    text = re.sub(r"^\s*#.*\n", "", (ROOT / "Dockerfile").read_text(), flags=re.MULTILINE).replace("\\\n", " ")
    return [tuple(line.split(maxsplit=1)) for line in text.splitlines() if line.strip()]


def requirements():
    spec = importlib.util.spec_from_file_location("requirements", ROOT / "docker/requirements.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.requirements(PROJECT)


def test_the_image_is_a_fixed_one():
    (base,) = (rest for name, rest in instructions() if name == "ARG")
    assert re.fullmatch(r"BASE=nvcr\.io/nvidia/pytorch:\d\d\.\d\d-py3", base)


def test_no_line_lets_pip_choose_a_torch():
    """What is required is required without torch, and what requires torch is installed without dependencies."""
    assert "torch" not in [re.match(r"[\w.-]+", requirement)[0] for requirement in requirements()]
    commands = [part.strip() for name, rest in instructions() if name == "RUN" for part in rest.split("&&")]
    lines = [shlex.split(command) for command in commands if command.startswith("pip ")]
    assert [line[:2] for line in lines] == [["pip", "install"]] * 2
    assert "-r" in lines[0]
    assert {"--no-deps", "--no-build-isolation", "."} <= set(lines[1])


def test_what_is_copied_exists_and_is_sent():
    """`.dockerignore` leaves everything out but what it names."""
    ignored = (ROOT / ".dockerignore").read_text().splitlines()
    assert "*" in ignored
    sources = [word for name, rest in instructions() if name == "COPY" for word in rest.split()[:-1]]
    assert len(sources) > 5
    for source in sources:
        assert (ROOT / source).exists(), source
        assert f"!{source.split('/')[0]}" in ignored, source
