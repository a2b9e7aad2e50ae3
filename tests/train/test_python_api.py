"""A script of one's own: `load_config`, the module, the text and the precision, under a Trainer of Lightning's."""

import re
import warnings
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch import Trainer, seed_everything
from lightning.pytorch.callbacks import EarlyStopping, EMAWeightAveraging, LearningRateMonitor, ModelCheckpoint
from lightning.pytorch.demos.boring_classes import BoringModel
from lightning.pytorch.loggers import Logger
from lightning.pytorch.strategies import ModelParallelStrategy
from lightning.pytorch.trainer.states import TrainerFn

from gpt2_fp8 import FolderCheckpointIO, FP8Precision, GPT2Module, TokenDataModule, load_config
from gpt2_fp8.callbacks.checkpointing import Checkpointing
from gpt2_fp8.callbacks.graceful_stop import DivergenceGuard
from gpt2_fp8.callbacks.throughput import Throughput
from gpt2_fp8.checkpoint import files
from gpt2_fp8.config.errors import UserError
from tests.runs import SMALL, train

DOCUMENT = Path(__file__).resolve().parents[2] / "docs/python.md"
WORDS = [
    "trainer=cpu", "model.n_layer=1", "model.n_embd=32", "model.n_head=2", "model.n_positions=32",
    "global_batch_size=8", "micro_batch_size=4", "trainer.max_steps=12", "optim.warmup_steps=2",
    "data.val_sequences=8",
]  # fmt: skip
STEPS = 12


class Rows(Logger):
    """Keeps what it is given."""

    name, version = "rows", ""

    def __init__(self):
        super().__init__()
        self.rows, self.hparams = [], None

    def log_hyperparams(self, params, *_):
        self.hparams = params

    def log_metrics(self, metrics, step=None):
        self.rows.append((step, dict(metrics)))

    def of(self, name):
        return {step: metrics[name] for step, metrics in self.rows if name in metrics}


@pytest.fixture(scope="module")
def config():
    return load_config(*WORDS)


def trainer(config, folder, plugins=(), **options):
    quiet = {"enable_progress_bar": False, "enable_model_summary": False, "logger": False, "accelerator": "cpu"}
    precision = [] if "precision" in options else [FP8Precision.from_config(config)]
    return Trainer(plugins=[*precision, FolderCheckpointIO()], default_root_dir=folder, **quiet | options)


def fit(config, folder, ckpt_path=None, **options):
    """Train from the seed; returns the module and the Trainer."""
    seed_everything(config.seed, verbose=False)
    module, made = GPT2Module(config), trainer(config, folder, **options)
    made.fit(module, datamodule=TokenDataModule.from_config(config), ckpt_path=ckpt_path)
    return module, made


@pytest.fixture(scope="module")
def whole(config, tmp_path_factory):
    """A run of all steps: the module, the Trainer, what its logger was given, and what its steps returned."""
    rows, losses = Rows(), {}

    class Outputs(pl.Callback):
        def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
            losses[trainer.global_step] = float(outputs["loss"])

    every = ModelCheckpoint(every_n_train_steps=1, save_top_k=-1)
    callbacks = [every, Outputs()]
    folder = tmp_path_factory.mktemp("whole")
    module, made = fit(config, folder, logger=rows, log_every_n_steps=1, val_check_interval=4, callbacks=callbacks)
    return SimpleNamespace(module=module, trainer=made, rows=rows, losses=losses, checkpoints=Path(every.dirpath))


def test_the_held_out_text_is_tested_and_predicted(config, whole, tmp_path):
    module = GPT2Module.load_from_checkpoint(whole.checkpoints / "epoch=0-step=12.ckpt")
    data = TokenDataModule.from_config(config)
    (tested,) = trainer(config, tmp_path).test(module, datamodule=data, verbose=False)
    assert tested == {"test_loss": pytest.approx(whole.rows.of("val_loss")[12])}
    logits = torch.cat(trainer(config, tmp_path).predict(module, datamodule=data))
    ids = torch.cat([batch["ids"] for batch in data.val_dataloader()]).long()
    losses = torch.nn.functional.cross_entropy(logits.float().flatten(0, 1), ids[:, 1:].flatten())
    assert losses.item() == pytest.approx(tested["test_loss"], rel=1e-4)


def same(one, other):
    """Whether two modules, or state dicts, have equal weights."""
    one, other = (x if isinstance(x, dict) else x.state_dict() for x in (one, other))
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


@pytest.mark.parametrize(
    ("words", "causes"),
    [
        (["-m", "seed=1,2"], ["-m"]),
        (["run_name=x", "trainer.val_check_interval=5"], ["run_name=x", "trainer.val_check_interval=5"]),
        (["micro_batch_size=auto"], ["micro_batch_size=auto"]),
        ([["model=tiny"]], ["['model=tiny'] is no override in text"]),
    ],
)
def test_what_only_the_program_reads_is_refused_all_at_once(words, causes):
    with pytest.raises(UserError) as caught:
        load_config(*words)
    told = [problem.cause for problem in caught.value.problems]
    assert all(any(cause in line for line in told) for cause in causes), told


def test_it_computes_what_the_program_computes(whole, tmp_path):
    val_loss = train(tmp_path / "run", base=[*SMALL, "trainer.val_check_interval=4"])
    theirs = files.read(tmp_path / "run/checkpoints/step-00000012")
    assert same(whole.module, theirs["state_dict"])
    assert whole.trainer.callback_metrics["val_loss"] == val_loss
    assert list(whole.rows.of("train_loss")) == list(range(1, STEPS + 1))
    assert whole.losses == whole.rows.of("train_loss"), "what a training step returns"
    assert list(whole.rows.of("val_loss")) == [4, 8, 12]
    assert whole.module.hparams == theirs["hyper_parameters"] | {
        name: whole.module.hparams[name] for name in ("run_name", "trainer", "callbacks")
    }


@pytest.mark.parametrize(
    ("options", "cause"),
    [
        ({"max_epochs": 3}, "max_epochs=3"),
        ({"max_steps": 13}, "max_steps=13"),
        ({"precision": "bf16-mixed"}, "'bf16-mixed'"),
        ({"callbacks": EMAWeightAveraging()}, "EMAWeightAveraging"),
        ({"devices": 2, "strategy": "ddp_spawn"}, "forks or spawns"),
        ({"strategy": ModelParallelStrategy()}, "ModelParallelStrategy"),
    ],
)
def test_a_trainer_that_contradicts_the_configuration_is_refused(config, tmp_path, options, cause):
    """Asked as `fit` asks, which would start the other process of two first."""
    module, made = GPT2Module(config), trainer(config, tmp_path, **options)
    module.trainer, made.state.fn = made, TrainerFn.FITTING
    with pytest.raises(UserError) as caught:
        module.configure_callbacks()
    assert any(cause in problem.cause for problem in caught.value.problems)


def test_the_precision_refuses_a_module_of_someone_elses(config, tmp_path):
    for call in ("fit", "validate", "predict"):
        with pytest.raises(UserError, match="BoringModel"):
            getattr(trainer(config, tmp_path), call)(BoringModel())


@pytest.mark.parametrize(
    ("options", "steps"),
    [
        ({"max_steps": 5, "max_epochs": 1}, 5),
        ({"max_time": timedelta(0)}, 0),
        ({"callbacks": [EarlyStopping("val_loss", stopping_threshold=1e9)], "val_check_interval": 3}, 3),
        ({"max_epochs": -1}, STEPS),
    ],
)
def test_it_stops_earlier_or_at_the_end(config, tmp_path, options, steps):
    module, made = fit(config, tmp_path, enable_checkpointing=False, **options)
    assert made.global_step == steps
    assert (module.val_loss is not None) == (steps > 0)


def test_it_goes_on_as_if_it_had_not_stopped_the_program_from_it_and_it_from_the_program(config, whole, tmp_path):
    module, made = fit(config, tmp_path, whole.checkpoints / "epoch=0-step=3.ckpt", enable_checkpointing=False)
    assert made.global_step == STEPS
    assert same(module, whole.module)
    train(tmp_path / "run", f"ckpt_path='{whole.checkpoints / 'epoch=0-step=8.ckpt'}'")
    theirs = tmp_path / "run/checkpoints/step-00000012"
    assert same(files.read(theirs)["state_dict"], whole.module)
    other, _ = fit(config, tmp_path, theirs, enable_checkpointing=False)
    assert same(other, whole.module)


def test_an_average_of_weights_goes_on_with_the_same_bits(whole, tmp_path):
    averaged = load_config(*WORDS, "optim.ema_decay=0.8")
    module, made = fit(averaged, tmp_path, enable_checkpointing=False)
    assert same(module, whole.module)
    found, folder = module.step.average.state_dict(), tmp_path / "end"
    loss = made.callback_metrics["val_loss"]
    assert loss != whole.rows.of("val_loss")[STEPS]
    made.save_checkpoint(folder)
    fit(averaged, tmp_path, max_steps=5, callbacks=[ModelCheckpoint(tmp_path / "half", save_last=True)])
    other, _ = fit(averaged, tmp_path, tmp_path / "half/last.ckpt", enable_checkpointing=False)
    assert same(other.step.average.state_dict(), found)
    data = TokenDataModule.from_config(averaged)
    for validated, path in ((other, None), (GPT2Module(averaged), folder)):
        validator = trainer(averaged, tmp_path)
        (metrics,) = validator.validate(validated, datamodule=data, ckpt_path=path, verbose=False)
        assert metrics["val_loss"] == loss


def test_a_checkpoint_without_a_runs_state_is_refused(config, whole, tmp_path):
    whole.trainer.save_checkpoint(tmp_path / "weights", weights_only=True)
    with pytest.raises(UserError, match=r"cannot be continued from: it has no .*optimizer_states"):
        fit(config, tmp_path, tmp_path / "weights")
    shorter = load_config(*WORDS, "trainer.max_steps=6")
    with pytest.raises(UserError, match="max_steps=6 ends before"):
        fit(shorter, tmp_path, whole.checkpoints / "epoch=0-step=8.ckpt")


def test_lightnings_callbacks_work_beside_ours(config, whole, tmp_path):
    rows, own = Rows(), ModelCheckpoint(tmp_path / "own", monitor="val_loss", save_last=True, save_top_k=1)
    callbacks = [own, EarlyStopping("val_loss", patience=50), LearningRateMonitor()]
    folder = tmp_path / "checkpoints"
    guard = DivergenceGuard(config.callbacks, lambda trainer: True)
    callbacks += [guard, Throughput(config, 257, guard.policy)]
    callbacks += [Checkpointing(folder, every_n_steps=4, keep=9, asynchronous=False)]
    module, _ = fit(config, tmp_path, logger=rows, log_every_n_steps=2, val_check_interval=4, callbacks=callbacks)
    assert same(module, whole.module)
    best = min(whole.rows.of("val_loss").items(), key=lambda found: found[1])
    assert Path(own.best_model_path).name == f"epoch=0-step={best[0]}.ckpt"
    assert own.best_model_score == pytest.approx(best[1])
    assert files.read_manifest(own.last_model_path)["global_step"] == STEPS
    schedule = module.step.schedule
    rates = [schedule.base_lrs[0] * schedule.lr_lambdas[0](step) for step in (1, 3, 5, 7, 9, 11)]
    assert list(rows.of("lr-AdamW/pg1").values()) == pytest.approx(rates)
    assert list(rows.of("tokens_per_second")) == [10, STEPS]  # as trainer.log_every_n_steps says, and at the end
    assert (folder / "step-00000012").is_dir()


def test_a_sanity_check_leaves_nothing_behind(config, whole, tmp_path):
    rows, plain = Rows(), Rows()
    made = {"val_check_interval": 4, "log_every_n_steps": 1, "enable_checkpointing": False}
    module, _ = fit(config, tmp_path, num_sanity_val_steps=1, logger=rows, **made)
    other, _ = fit(config, tmp_path, num_sanity_val_steps=0, logger=plain, **made)
    assert rows.rows == plain.rows
    assert rows.rows[0][0] == 1
    assert same(module, other)


def test_load_from_checkpoint_needs_the_folder_alone(config, whole, tmp_path):
    folder = whole.checkpoints / "epoch=0-step=12.ckpt"
    module = GPT2Module.load_from_checkpoint(folder)
    assert module.config == config
    assert module.hparams == whole.module.hparams
    assert same(module, whole.module)
    ids = torch.arange(8)[None]
    with torch.no_grad():
        assert torch.equal(module.eval().model(ids), whole.module.eval().model(ids))
    data = TokenDataModule.from_config(config)
    (metrics,) = trainer(config, tmp_path).validate(module, datamodule=data, verbose=False)
    expected = whole.rows.of("val_loss")[STEPS]
    assert metrics == {"val_loss": expected}
    fresh = GPT2Module(config)
    (metrics,) = trainer(config, tmp_path).validate(fresh, datamodule=data, ckpt_path=folder, verbose=False)
    assert metrics == {"val_loss": expected}


def test_a_module_that_is_called_computes_logits(config, whole, tmp_path):
    ids = torch.arange(20).reshape(2, 10)
    with pytest.raises(UserError, match="no layers yet"):
        GPT2Module(config)(ids)
    loaded = GPT2Module.load_from_checkpoint(whole.checkpoints / "epoch=0-step=12.ckpt")
    loaded.train()
    logits = loaded(ids)
    assert (logits.shape, logits.requires_grad, loaded.model.training) == ((2, 10, 257), False, True)
    with torch.no_grad():
        assert torch.equal(logits, whole.module.eval().model(ids)[..., :257])
    bf16 = load_config(*WORDS, "precision=bf16")
    loaded = GPT2Module.load_from_checkpoint(whole.checkpoints / "epoch=0-step=12.ckpt", config=bf16)
    trainer(bf16, tmp_path).validate(loaded, datamodule=TokenDataModule.from_config(bf16), verbose=False)
    assert loaded(ids).dtype == torch.bfloat16
    assert torch.allclose(loaded(ids).float(), logits, atol=0.05)
    with pytest.raises(UserError, match="33 tokens, and the model has 32 positions"):
        loaded(torch.zeros(1, 33, dtype=torch.long))
    with pytest.raises(UserError, match=r"shape \[10\]"):
        loaded(ids[0])


def test_a_data_module_of_an_earlier_fit_begins_again(config, whole, tmp_path):
    """After a fit that was ended early, and after one that has come to the end of the text's steps."""
    data = TokenDataModule.from_config(config)
    for steps in (5, 12):
        seed_everything(config.seed, verbose=False)
        rows, module = Rows(), GPT2Module(config)
        made = trainer(config, tmp_path, logger=rows, log_every_n_steps=1, max_steps=steps)
        made.fit(module, datamodule=data)
        expected = {step: loss for step, loss in whole.rows.of("train_loss").items() if step <= steps}
        assert rows.of("train_loss") == expected
        assert data.state_dict()["step"] == steps
    assert same(module, whole.module)


def test_the_code_of_the_document_runs(tmp_path, monkeypatch, recwarn):
    """And Lightning contradicts it nowhere: what it still warns of is this machine's, or the folder's, and right."""
    warnings.simplefilter("always")
    monkeypatch.chdir(tmp_path)
    blocks = re.findall(r"^```python\n(.*?)^```$", DOCUMENT.read_text(), re.MULTILINE | re.DOTALL)
    assert len(blocks) == 7
    names: dict = {}
    for block in blocks[:3]:
        exec(compile(block, str(DOCUMENT), "exec"), names)
    assert names["trainer"].global_step == 12
    for block in blocks[3:5]:
        exec(compile(block, str(DOCUMENT), "exec"), names)
    assert names["metrics"]["val_loss"] == pytest.approx(float(names["checkpoints"].best_model_score))
    assert names["logits"].shape == (1, 2, 257)
    for block in blocks[5:]:
        exec(compile(block, str(DOCUMENT), "exec"), names)
    assert names["logits"].shape == (8, 128, 257)
    assert names["trainer"].global_step == 8
    right = "The `srun` command", "GPU available", "`isinstance(treespec, LeafSpec)`", "Checkpoint directory"
    of_lightning = [str(warning.message) for warning in recwarn if "lightning" in warning.filename]
    assert [text for text in of_lightning if not text.startswith(right)] == []
