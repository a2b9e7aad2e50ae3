"""Several fits in one process, as a notebook has them: each is the run that it would be alone."""

import pytest

from gpt2_fp8 import TokenDataModule
from gpt2_fp8.config.errors import UserError
from tests.train.test_python_api import GPT2Module, Rows, config, fit, same, seed_everything, trainer, whole

__all__ = ["config", "whole"]  # fixtures


def test_a_data_module_of_an_earlier_fit_begins_again(config, whole, tmp_path):
    """After a fit that was ended early, and after one that has come to the end of the text's steps."""
    data = TokenDataModule.from_config(config)
    for steps in (5, 12, 12):
        seed_everything(config.seed, verbose=False)
        rows, module = Rows(), GPT2Module(config)
        made = trainer(config, tmp_path, logger=rows, log_every_n_steps=1, max_steps=steps)
        made.fit(module, datamodule=data)
        expected = {step: loss for step, loss in whole.rows.of("train_loss").items() if step <= steps}
        assert rows.of("train_loss") == expected
        assert data.state_dict()["step"] == steps
    assert same(module, whole.module)


def test_what_a_second_fit_saves_goes_on(config, whole, tmp_path):
    data = TokenDataModule.from_config(config)
    for _ in range(2):
        seed_everything(config.seed, verbose=False)
        made = trainer(config, tmp_path, max_steps=5)
        made.fit(GPT2Module(config), datamodule=data)
    made.save_checkpoint(tmp_path / "saved")
    module, _ = fit(config, tmp_path, tmp_path / "saved")
    assert same(module, whole.module)


def test_the_text_goes_on_where_a_trainer_fits_once_more(config, tmp_path):
    """Lightning builds another optimizer then, so the weights are not those of one fit."""
    data, module = TokenDataModule.from_config(config), GPT2Module(config)
    made = trainer(config, tmp_path, max_steps=5)
    made.fit(module, datamodule=data)
    made.fit_loop.epoch_loop.max_steps = 12
    made.fit(module, datamodule=data)
    assert (made.global_step, data.state_dict()["step"]) == (12, 12)


def test_a_text_that_stands_elsewhere_is_refused(config, tmp_path):
    module, made = GPT2Module(config), trainer(config, tmp_path, max_steps=5)
    made.fit(module, datamodule=TokenDataModule.from_config(config))
    made.fit_loop.epoch_loop.max_steps = 12
    with pytest.raises(UserError, match="training stands at step 5, and its TokenDataModule at step 0"):
        made.fit(module, datamodule=TokenDataModule.from_config(config))


@pytest.mark.parametrize("options", [{"log_every_n_steps": 0}, {"barebones": True}], ids=str)
def test_a_trainer_may_log_nothing(config, whole, tmp_path, options):
    module, made = fit(config, tmp_path, **options, **({"logger": None} if "barebones" in options else {}))
    assert made.global_step == 12
    assert same(module, whole.module)
