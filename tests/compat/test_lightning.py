"""What `compat.lightning_private` expects of Lightning, on its own Trainer and a model of one weight."""

from collections.abc import Iterator

import pytest
import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import Checkpoint, LambdaCallback
from lightning.pytorch.loggers.logger import DummyLogger

from gpt2_fp8.compat import lightning_private


class Module(LightningModule):
    """One weight, manual optimization, an optimizer step a batch, a metric a step."""

    def __init__(self):
        super().__init__()
        self.automatic_optimization = False
        self.weight = torch.nn.Parameter(torch.ones(1))
        self.calls = []

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=0.1)

    def training_step(self, batch, batch_idx):
        self.calls.append(f"training_step {self.trainer.global_step}")
        optimizer = self.optimizers()
        self.manual_backward((self.weight * batch).sum())
        optimizer.step()
        optimizer.zero_grad()
        self.log("count", float(self.trainer.global_step))

    def validation_step(self, batch, batch_idx):
        self.calls.append("validation_step")


class Batches(torch.utils.data.IterableDataset):
    """`count` batches."""

    def __init__(self, count):
        self.count = count

    def __len__(self):
        return self.count

    def __iter__(self) -> Iterator[torch.Tensor]:
        return iter(torch.ones(self.count, 1))


class Rows(DummyLogger):
    """Keeps what it is given."""

    def __init__(self):
        super().__init__()
        self.rows = []

    def log_metrics(self, metrics, step=None):
        self.rows.append(metrics["count"])


def trainer(folder, callbacks=(), steps=2, **options):
    options = {"val_check_interval": 2, "check_val_every_n_epoch": None, "logger": False} | options
    return Trainer(
        accelerator="cpu", devices=1, max_steps=steps, max_epochs=-1, callbacks=list(callbacks), num_sanity_val_steps=0,
        log_every_n_steps=1, enable_progress_bar=False, enable_model_summary=False, default_root_dir=folder, **options,
    )  # fmt: skip


def fit(of, module, count=4, **options):
    loader, validation = (torch.utils.data.DataLoader(Batches(n), batch_size=None) for n in (count, 1))
    of.fit(module, loader, validation, **options)


# ---- the order of hooks, which no file of `compat` has, and on which `train.module` and the callbacks rely -----------


def test_the_hooks_of_a_step_come_in_this_order(tmp_path):
    """A step's end is put off until the next batch is here; what saves and stops comes after everything else."""
    module = Module()
    hooks = ("on_train_batch_start", "on_train_batch_end", "on_validation_end")

    def noting(kind, name):
        noted = {hook: lambda *_, hook=hook: module.calls.append(f"{name}.{hook}") for hook in hooks}
        return type(name, (kind,), noted)()

    class Fetched(Batches):
        def __iter__(self):
            for i in range(self.count):
                module.calls.append(f"fetch {i}")
                yield torch.ones(1)

    for hook in (*hooks[:2], "on_validation_model_eval"):
        setattr(module, hook, lambda *_, hook=hook: module.calls.append(f"module.{hook}"))
    of = trainer(tmp_path, [noting(Checkpoint, "last"), noting(Callback, "first")], enable_checkpointing=True)
    of.fit(module, *(torch.utils.data.DataLoader(kind(n), batch_size=None) for kind, n in ((Fetched, 4), (Batches, 1))))
    start, end = ([f"{name}.{hook}" for name in ("first", "last", "module")] for hook in hooks[:2])
    assert module.calls == [
        *("fetch 0", *start, "training_step 0", *end),
        "fetch 1",  # not before, since the loader says how long it is
        *(*start, "training_step 1", *end),
        *("module.on_validation_model_eval", "validation_step", "first.on_validation_end", "last.on_validation_end"),
    ]


# ---- the process -----------------------------------------------------------------------------------------------------


def test_warnings_of_a_loader_of_ours_are_hidden(tmp_path, recwarn):
    lightning_private.ignore_warnings(whole_run=True)
    fit(trainer(tmp_path), Module())
    shown = "\n".join(str(warning.message) for warning in recwarn)
    assert "does not have many workers" not in shown
    assert "has `__len__` defined" not in shown


def test_a_launcher_that_forks_is_known(tmp_path):
    several = Trainer(accelerator="cpu", devices=3, strategy="ddp", logger=False, default_root_dir=tmp_path)
    assert not lightning_private.forks_or_spawns(several.strategy.launcher)
    forking = Trainer(accelerator="cpu", devices=2, strategy="ddp_fork", logger=False, default_root_dir=tmp_path)
    assert lightning_private.forks_or_spawns(forking.strategy.launcher)


# ---- logging ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("logged", [False, True])
def test_a_step_that_a_callback_ends_is_logged_by_log_last_step_alone(tmp_path, logged):
    class Stop(Callback):
        def on_train_batch_end(self, trainer, *_):
            if trainer.global_step == 2:
                if logged:
                    lightning_private.log_last_step(trainer)
                raise ZeroDivisionError

    rows = Rows()
    with pytest.raises(ZeroDivisionError):
        fit(trainer(tmp_path, [Stop()], steps=4, logger=rows), Module())
    assert rows.rows == ([1, 2] if logged else [1])


def test_what_log_from_host_logs_is_never_read_from_the_modules_device(tmp_path):
    class Elsewhere(Module):
        device = torch.device("meta")  # where nothing can be read

        def training_step(self, batch, batch_idx):
            self.optimizers().step()
            if batch_idx == 0:
                lightning_private.log_from_host(self, {"count": 7.0}, logger=False)

    made = trainer(tmp_path, steps=3)
    fit(made, Elsewhere())
    assert made.global_step == 3
    assert made.progress_bar_metrics == {"count": 7.0}


@pytest.mark.parametrize("only", [False, True])
def test_validate_returns_what_return_only_keeps_from_the_loggers(tmp_path, only):
    class Validated(Module):
        def on_validation_epoch_end(self):
            self.log("count", 7.0)
            self.log("other", 8.0)
            if only:
                lightning_private.return_only(self.trainer, "other")

    rows = Rows()
    rows.log_metrics = lambda metrics, step=None: rows.rows.append(metrics)
    loader = torch.utils.data.DataLoader(Batches(1), batch_size=None)
    returned = trainer(tmp_path, logger=rows).validate(Validated(), loader, verbose=False)
    assert returned == [{"count": 7.0, "other": 8.0}]
    assert rows.rows == [{"count": 7.0, "epoch": 0} if only else {"count": 7.0, "other": 8.0, "epoch": 0}]


def test_limit_steps_ends_a_trainer_that_was_told_of_no_steps(tmp_path):
    for told, ends in ((-1, 2), (1, 1)):
        made = trainer(tmp_path, steps=told)
        lightning_private.limit_steps(made, 2)
        module = Module()
        fit(made, module)
        assert made.global_step == made.max_steps == ends


@pytest.mark.parametrize(("told_at", "seen"), [(None, [False, False, True]), (2, [False, True])])
def test_is_last_step_is_that_of_max_steps_or_of_a_trainer_that_is_told_to_stop(tmp_path, told_at, seen):
    class Look(Callback):
        def __init__(self):
            self.found = []

        def on_train_batch_end(self, trainer, *_):
            trainer.should_stop = trainer.global_step == told_at
            self.found.append(lightning_private.is_last_step(trainer))

    look = Look()
    fit(trainer(tmp_path, [look], steps=3), Module())
    assert look.found == seen


def test_callbacks_hold_the_module_until_detach_logging(tmp_path):
    callback = Callback()
    of = trainer(tmp_path, [callback])
    module = Module()
    fit(of, module)
    assert vars(callback)["log"].__self__ is vars(callback)["log_dict"].__self__ is module
    lightning_private.detach_logging(of)
    assert vars(callback) == {}


# ---- the loops' counters ---------------------------------------------------------------------------------------------


class Saver(Callback):
    """Saves in `on_train_batch_end` of the step `at`, and asks what is due there."""

    def __init__(self, path, at):
        self.path, self.at, self.due = path, at, []

    def on_train_batch_end(self, trainer, *_):
        self.due.append(lightning_private.is_validation_due(trainer))
        if trainer.global_step == self.at:
            trainer.save_checkpoint(self.path)


@pytest.mark.parametrize("into_validation", [False, True])
def test_a_resumed_run_validates_first_only_where_resume_into_validation_says_so(tmp_path, into_validation):
    path = tmp_path / "a.ckpt"
    saver = Saver(path, at=2)
    fit(trainer(tmp_path, [saver], steps=3), Module())
    assert saver.due == [False, True, False]
    if into_validation:
        saved = torch.load(path, weights_only=False)
        lightning_private.resume_into_validation(saved["loops"]["fit_loop"])
        torch.save(saved, path)
    module = Module()
    fit(trainer(tmp_path, steps=3), module, ckpt_path=path, weights_only=False)
    assert module.calls == (["validation_step"] if into_validation else []) + ["training_step 2"]


def test_a_step_is_left_out_by_uncount_step(tmp_path):
    path = tmp_path / "a.ckpt"

    class GivenUp(Callback):
        def on_train_batch_end(self, trainer, *_):
            if trainer.global_step == 3:
                lightning_private.uncount_step(trainer)
                trainer.save_checkpoint(path)
                raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fit(trainer(tmp_path, [GivenUp()], steps=3, val_check_interval=4), Module())
    assert torch.load(path, weights_only=False)["global_step"] == 2
    module = Module()
    fit(trainer(tmp_path, steps=3, val_check_interval=4), module, ckpt_path=path, weights_only=False)
    assert [call for call in module.calls if "training_step" in call] == ["training_step 2"]


@pytest.mark.parametrize("at", [1, 2, 3])
def test_between_two_steps_set_back_to_last_step_says_what_the_last_hook_would_have(tmp_path, at):
    """Step 2 is followed by a validation; what is saved then must lead to it, or past it, all the same."""

    class Between(Callback):
        def on_train_batch_start(self, trainer, *_):
            if trainer.global_step == at:
                lightning_private.set_back_to_last_step(trainer)
                trainer.save_checkpoint(tmp_path / "between.ckpt")

    fit(trainer(tmp_path, [Saver(tmp_path / "hook.ckpt", at=at), Between()], steps=4), Module())
    hook, between = (torch.load(tmp_path / f"{name}.ckpt", weights_only=False) for name in ("hook", "between"))
    assert between["global_step"] == hook["global_step"] == at
    progress = [state["loops"]["fit_loop"]["epoch_loop.batch_progress"]["current"] for state in (between, hook)]
    if at != 2:  # after a validation the step counts as completed, so that it is not validated twice
        assert progress[0] == progress[1]
    left = []
    for name in ("hook", "between"):
        module = Module()
        fit(trainer(tmp_path, steps=4), module, ckpt_path=tmp_path / f"{name}.ckpt", weights_only=False)
        left.append([call for call in module.calls if "training_step" in call])
    assert left[0] == left[1] == [f"training_step {step}" for step in range(at, 4)]


@pytest.mark.parametrize("alone", [False, True])
def test_several_ranks_ask_for_a_sigterm_before_each_step_but_where_leave_signals_alone_says_no(
    tmp_path, monkeypatch, alone
):
    asked, of = [], trainer(tmp_path, steps=3)
    of.strategy.world_size = 2
    if alone:
        lightning_private.leave_signals_alone(of)
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    monkeypatch.setattr(torch.distributed, "broadcast", lambda tensor, src: asked.append(src))
    try:
        fit(of, Module())
    finally:
        torch.distributed.destroy_process_group()
    assert asked == ([] if alone else [0, 0, 0])


def test_hooks_into_backward_knows_those_that_lightning_calls(tmp_path):
    class Before(Callback):
        def on_before_backward(self, *_):
            called.append("before")

    class After(Module):
        def on_after_backward(self):
            called.append("after")

    ran = []
    for callbacks, module, hooked in (
        ([Callback()], Module(), []),
        ([Before()], Module(), ["before"]),
        ([], After(), ["after"]),
        ([LambdaCallback(on_after_backward=lambda *_: ran.append("lambda"))], Module(), []),
    ):
        called, of = [], trainer(tmp_path, callbacks, steps=1)
        ran.clear()
        fit(of, module)
        assert called == hooked
        assert lightning_private.hooks_into_backward(of) == bool(hooked or ran)
