"""The configuration of a script or a notebook that brings its own Lightning Trainer."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from gpt2_fp8.compose import commandline, preflight
from gpt2_fp8.config.errors import Problem, UserError
from gpt2_fp8.config.keys import show
from gpt2_fp8.config.schema import RunConfig
from gpt2_fp8.runtime import registry

# Keys that only `python -m gpt2_fp8.run` reads, and the Trainer's argument that means the same.
_SAID_BY_TRAINER = {
    "run_name": "Trainer(default_root_dir=FOLDER)",
    "hydra": "Trainer(default_root_dir=FOLDER)",
    "ckpt_path": "Trainer.fit(..., ckpt_path=FOLDER)",
    "callbacks": "Trainer(callbacks=[...])",
    "logger": "Trainer(logger=...)",
    "trainer.strategy": "Trainer(strategy=...)",
    "trainer.val_check_interval": "Trainer(val_check_interval=...)",
    "trainer.log_every_n_steps": "Trainer(log_every_n_steps=...)",
    "trainer.deterministic": "Trainer(deterministic=...)",
    "trainer.fast_dev_run": "Trainer(fast_dev_run=...)",
    "trainer.profiler": "Trainer(profiler=...)",
    "trainer.max_time": "Trainer(max_time=...)",
}


def load_config(*words: str, **keys: object) -> RunConfig:
    """Compose one run's configuration, from what `python -m gpt2_fp8.run` would be given on its command line.

    Args:
        words: choices and values, such as `"model=gpt2"` and `"seed=1"`; `"-cd", FOLDER` adds settings of your own.
        keys: none: the error says how each is written as a word.

    Raises UserError with every problem at once. Problems are also keys that only the program reads, and an `auto` that
    only the program decides. Plugins are imported last; one that cannot be imported is a UserError too.
    """
    if unwritten := [*_no_words(words), *_named(keys)]:
        raise UserError(unwritten)
    problems = [*_flags(words), *_unread(words)]
    config = None
    if not any(word in ("-m", "--multirun") for word in words):
        try:
            (config,) = preflight(list(words))
        except UserError as error:
            problems += error.problems
    if config is not None:
        problems += [problem for problem in _undecided(config) if problem not in problems]
    if problems:
        raise UserError(dict.fromkeys(problems))
    assert config is not None
    registry.load(config.plugins, Path.cwd())
    return config


def _no_words(words: tuple[object, ...]) -> Iterator[Problem]:
    """Report arguments that are no text, and so no words of a command line."""
    for word in words:
        if not isinstance(word, str):
            texts = isinstance(word, list | tuple) and word and all(isinstance(item, str) for item in word)
            remedy = f"load_config(*{list(word)})" if texts else "load_config('model=gpt2', 'seed=1')"  # type: ignore[call-overload]
            yield Problem(f"load_config takes words, each a text, and {word!r} is a {type(word).__name__}", remedy)


def _named(keys: dict[str, object]) -> Iterator[Problem]:
    """Report keyword arguments. Words can have dots in their keys, which these cannot."""
    for key, value in keys.items():
        remedy = f"load_config({f'{key}={show(value)}'!r})"
        yield Problem(f"load_config takes words, each a text, and {key}= is none", remedy)


def _flags(words: tuple[str, ...]) -> Iterator[Problem]:
    """Report flags that ask for something else than one configuration."""
    if any(word in ("-m", "--multirun") for word in words):
        yield Problem("-m: load_config gives one configuration", "call it once for each")
    elif commandline.is_help(list(words)):
        yield Problem("load_config takes no flag that shows something", "give it to python -m gpt2_fp8.run")


def _unread(words: tuple[str, ...]) -> Iterator[Problem]:
    """Report words that would do nothing."""
    for word in words:
        name = word.lstrip("+~").partition("=")[0]
        for key, said in _SAID_BY_TRAINER.items():
            if name == key or name.startswith((f"{key}.", f"{key}/")):
                yield _not_read(word, said)


def _undecided(config: RunConfig) -> Iterator[Problem]:
    """Report an `auto` that only the program decides, and keys that only the program reads.

    A choice of several keys (`debug=fdr`) may have set them.
    """
    if config.micro_batch_size == "auto":
        cause = "micro_batch_size=auto: only python -m gpt2_fp8.run looks for the largest that fits"
        yield Problem(cause, f"give a number that divides global_batch_size={config.global_batch_size}")
    if config.trainer.max_epochs is not None:
        cause = f"trainer.max_epochs={config.trainer.max_epochs}: only python -m gpt2_fp8.run counts a text's tokens"
        yield Problem(cause, "give the passes' tokens, as trainer.max_tokens=NUMBER")
    for key in ("fast_dev_run", "profiler", "max_time"):
        if value := getattr(config.trainer, key):
            yield _not_read(f"trainer.{key}={str(value).lower()}", _SAID_BY_TRAINER[f"trainer.{key}"])


def _not_read(word: str, said: str) -> Problem:
    return Problem(f"{word}: only python -m gpt2_fp8.run reads it", f"leave it out; {said} says it to your Trainer")
