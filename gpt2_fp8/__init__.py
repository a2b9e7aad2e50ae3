"""gpt2_fp8: train GPT-2 in FP8, from one command (`python -m gpt2_fp8.run`) or under a Lightning Trainer of your own.

Importing it imports nothing else: a name is looked up when it is first used, so that `load_config` refuses bad
settings before torch is imported.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from gpt2_fp8.compose import load_config as load_config
    from gpt2_fp8.data.datamodule import TokenDataModule as TokenDataModule
    from gpt2_fp8.train.language_model import LanguageModel as LanguageModel
    from gpt2_fp8.train.module import GPT2Module as GPT2Module
    from gpt2_fp8.train.precision_plugin import FP8Precision as FP8Precision
    from gpt2_fp8.train.trainer import FolderCheckpointIO as FolderCheckpointIO

__version__ = "0.1.0"
_PLACES = {
    "load_config": "compose",
    "GPT2Module": "train.module",
    "TokenDataModule": "data.datamodule",
    "FP8Precision": "train.precision_plugin",
    "FolderCheckpointIO": "train.trainer",
    "LanguageModel": "train.language_model",
}
__all__ = ["build", *_PLACES]


def build(*words: str, **choices: str) -> LanguageModel:
    """Build a model for a training loop of one's own: `build(model="gpt2", precision="fp8_hybrid")`.

    `choices` are keys without a dot, and `words` any keys, as the command line takes them: "model.n_layer=6".
    See `LanguageModel`. Raises UserError with every problem.
    """
    from gpt2_fp8.compose import load_config
    from gpt2_fp8.train.language_model import LanguageModel

    own = [f"{key}={value}" for key, value in choices.items()]
    return LanguageModel.from_config(load_config("micro_batch_size=1", *words, *own))  # a loop has its own batches


def __getattr__(name: str) -> Any:
    """Import a public name from the module that has it. Raises AttributeError for any other."""
    if name not in _PLACES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(import_module(f"{__name__}.{_PLACES[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    """List the public names too, for a notebook's completion."""
    return sorted({*globals(), *__all__})
