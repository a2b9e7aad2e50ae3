"""Faults 29 to 37: numbers that are not finite, and training that diverges. FP8 is pretended: see `pretended`."""

import logging
import os
import signal
from dataclasses import replace

import pytest
import torch

from gpt2_fp8.checkpoint.files import read, read_weights
from gpt2_fp8.config.errors import Diverged, Stopped
from gpt2_fp8.data.datamodule import Steps
from gpt2_fp8.engine import divergence
from gpt2_fp8.engine.optim import learning_rate_factor
from gpt2_fp8.runtime import signals
from tests.common import OPTIM
from tests.faults.pretended import NAN, Faults, InFP8Alone, NanLoss, NanWeight, going_wrong
from tests.ranks import TWO, run
from tests.runs import assert_same_checkpoint, checkpoint, metrics, summary, train, train_until

QUIET = ["trainer.val_check_interval=12", "precision=fp8_hybrid"]  # 12 steps, a checkpoint every four


def fallback(folder):
    return summary(folder)["divergence"]


def happened(folder):
    return [(event["step"], event["what"]) for event in fallback(folder)["events"]]


@pytest.fixture(scope="module")
def clean(tmp_path_factory):
    folder = tmp_path_factory.mktemp("clean") / "run"
    with going_wrong(Faults()):
        train(folder, *QUIET)
    assert fallback(folder) == {"events": [], "reruns": 0, "skipped": 0, "rollbacks": 0}
    return folder


def test_29_30_a_loss_or_gradient_that_is_not_finite_in_fp8_is_computed_again_in_bf16(tmp_path, clean):
    """The step counts once, and leaves no trace."""
    rerun = tmp_path / "run"
    with going_wrong(InFP8Alone()):
        train(rerun, *QUIET)
    assert happened(rerun) == [(3, "rerun"), (5, "rerun")]
    counts = fallback(rerun)
    assert "its loss was not finite in FP8" in counts["events"][0]["reason"]
    assert "its gradient was not finite in FP8" in counts["events"][1]["reason"]
    assert (counts["reruns"], counts["skipped"], counts["rollbacks"]) == (2, 0, 0)
    assert metrics(rerun)["bf16_reruns"][3] == 1
    for column in ("train_loss", "grad_norm", "lr"):
        assert metrics(rerun)[column] == metrics(clean)[column]
    assert (summary(rerun)["steps"], summary(rerun)["precision"]["ran"]) == (12, "fp8_hybrid")
    assert_same_checkpoint(checkpoint(rerun, 12), checkpoint(clean, 12))


def test_29_a_step_is_run_again_in_bf16_whatever_comes_after_it(tmp_path):
    """A validation (5), a checkpoint (8) and a log alone (10), for which it is finished early, nothing (2), the end."""
    keys = ["trainer.log_every_n_steps=10", "trainer.val_check_interval=5", "precision=fp8_hybrid"]
    folders = tmp_path / "clean", tmp_path / "run"
    for folder, faults in zip(folders, (Faults(), NanLoss(2, 5, 8, 10, 12, precision="fp8")), strict=True):
        with going_wrong(faults):
            train(folder, *keys)
    assert happened(folders[1]) == [(step, "rerun") for step in (2, 5, 8, 10, 12)]
    assert_same_checkpoint(*(checkpoint(folder, 12) for folder in folders))
    assert metrics(folders[0])["val_loss"] == metrics(folders[1])["val_loss"]


class TwoBadSteps(Faults):
    """7 and 8, in any precision, once."""

    left = 5  # a pass in FP8 and one in bf16 each; 8's in FP8 twice, since that ahead of 7's verdict is taken back

    def loss(self, module, step, precision):
        if step not in (7, 8) or not self.left:
            return 1.0
        self.left -= 1
        return NAN


def test_34_a_signal_beside_a_way_back_ends_the_run_which_goes_back_when_it_is_continued(tmp_path, caplog):
    """It comes in the wait for step 9's data; that step 8 was one too many is known when it is to be saved."""
    keys = ["callbacks.nonfinite_limit=2", "callbacks.checkpoint_every_n_steps=5", "trainer.log_every_n_steps=100"]
    items = Steps.__iter__

    def interrupted(self):
        for item in items(self):
            if item["cursor"]["step"] == 9:
                with signals.allow_interrupt():
                    os.kill(os.getpid(), signal.SIGTERM)
            yield item

    with going_wrong(TwoBadSteps()) as patch:
        patch.setattr(Steps, "__iter__", interrupted)
        with pytest.raises(Stopped):
            train(tmp_path / "run", *QUIET, *keys)
    assert summary(tmp_path / "run")["exit_code"] == 143
    assert "step 8 is not saved, continuing will come to it again" in caplog.text
    with going_wrong(TwoBadSteps()):
        train(tmp_path / "run", "ckpt_path=last", *QUIET, *keys)
    assert happened(tmp_path / "run") == [(7, "skip"), (8, "skip"), (8, "rollback")]
    assert summary(tmp_path / "run")["steps"] == 12


def test_31_a_nan_weight_is_noticed_and_left_behind_for_a_checkpoint_without_it(tmp_path):
    keys = ["precision=fp32", "callbacks.nonfinite_limit=2", "callbacks.checkpoint_every_n_steps=2"]
    keys += ["trainer.val_check_interval=12", "optim.ema_decay=0.9"]
    train(tmp_path / "clean", *keys)
    with going_wrong(NanWeight()):
        train(tmp_path / "run", *keys)
    assert happened(tmp_path / "run") == [(7, "skip"), (8, "skip"), (8, "rollback")]
    counts = fallback(tmp_path / "run")
    assert (counts["reruns"], counts["skipped"], counts["rollbacks"]) == (0, 2, 1), "only FP8 is run again in bf16"
    assert summary(tmp_path / "run")["precision"]["ran"] == "fp32", "there is nothing to fall back to"
    assert_same_checkpoint(checkpoint(tmp_path / "run", 12), checkpoint(tmp_path / "clean", 12))
    assert metrics(tmp_path / "run")["train_loss"] == metrics(tmp_path / "clean")["train_loss"]


def test_31_a_run_that_is_killed_before_it_notices_goes_back_when_it_goes_on(tmp_path):
    keys = ["precision=fp32", "trainer.val_check_interval=12", "callbacks.checkpoint_every_n_steps=2"]
    keys.append("callbacks.nonfinite_limit=2")
    train(tmp_path / "clean", *keys)
    with going_wrong(NanWeight(), fp8=False):
        train_until(6, tmp_path / "run", *keys)
    train(tmp_path / "run", *keys, "ckpt_path=last")
    assert fallback(tmp_path / "run")["rollbacks"] == 1
    assert_same_checkpoint(checkpoint(tmp_path / "run", 12), checkpoint(tmp_path / "clean", 12))


def test_35_a_run_all_of_whose_steps_are_left_out_is_not_completed(tmp_path):
    """However few they are: it has trained nothing."""
    keys = ["trainer.max_steps=3", "trainer.val_check_interval=3", "precision=fp32"]
    with (
        going_wrong(NanLoss(1, 2, 3), fp8=False),
        pytest.raises(Diverged, match="none of the 3 steps up to 3 had a finite"),
    ):
        train(tmp_path / "run", *keys)
    assert (summary(tmp_path / "run")["status"], summary(tmp_path / "run")["exit_code"]) == ("diverged", 3)
    assert [what for _, what in happened(tmp_path / "run")] == ["skip"] * 3


def test_35_a_run_whose_model_has_no_finite_loss_at_the_end_is_not_completed(tmp_path):
    """One update is so large that nothing is finite after it; its weights are, and too few steps are left out."""
    few = ["trainer.max_steps=4", "trainer.val_check_interval=4", "callbacks.sample_tokens=0", "precision=fp32"]
    with pytest.raises(Diverged, match="after step 4 the validation loss is not finite; a lower "):
        train(tmp_path / "run", *few, "optim.lr=1e30", "optim.warmup_steps=0")
    assert (summary(tmp_path / "run")["status"], summary(tmp_path / "run")["exit_code"]) == ("diverged", 3)
    assert summary(tmp_path / "run")["best_val_loss"] is None


def test_32_a_batch_that_is_bad_in_bf16_too_is_left_out_and_counts_as_a_step(tmp_path, caplog, clean):
    weights = {}

    class Watched(NanLoss):
        def before(self, module, step):
            weights[step] = module.model.positions.weight.detach().clone()

    with going_wrong(Watched(7)):
        train(tmp_path / "run", *QUIET)
    assert torch.equal(weights[7], weights[8])
    assert not torch.equal(weights[8], weights[9])
    report = summary(tmp_path / "run")
    assert (report["steps"], report["skipped_steps"]) == (12, 1)
    assert happened(tmp_path / "run") == [(7, "skip")]
    assert (fallback(tmp_path / "run")["reruns"], fallback(tmp_path / "run")["skipped"]) == (1, 1)
    assert sum("counts as a step" in record.getMessage() for record in caplog.records) == 1
    assert metrics(tmp_path / "run")["lr"] == metrics(clean)["lr"]
    ours, theirs = (read(checkpoint(folder, 12))["TokenDataModule"] for folder in (tmp_path / "run", clean))
    assert ours["lanes"] == theirs["lanes"], "the text went on"


class HotRate(Faults):
    """A learning rate a thousand times too high from step 13 to 32; in FP8 alone, or always."""

    def __init__(self, always):
        self.always = always

    def before(self, module, step):
        if 13 <= step <= 32 and (self.always or module.step.plan.fp8):
            for group in module.optimizers().param_groups:
                group["lr"] *= 1000


DIVERGING = [
    "precision=fp8_hybrid", "trainer.max_steps=36", "trainer.val_check_interval=36", "callbacks.divergence_steps=6",
    "callbacks.checkpoint_every_n_steps=6", "optim.lr=0.003",
]  # fmt: skip
SCHEDULE = replace(OPTIM, warmup_steps=2)


def test_34_a_run_that_diverges_goes_back_once_and_on_in_bf16(tmp_path, monkeypatch):
    monkeypatch.setattr(divergence, "WARM_UP", 8)
    with going_wrong(HotRate(always=False)):
        train(tmp_path / "run", *DIVERGING)
    (spike, since), (step, what) = happened(tmp_path / "run")
    assert (since, what) == ("spike", "rollback")
    assert 14 <= spike <= 18
    assert step == spike + 5
    report = summary(tmp_path / "run")
    assert (report["status"], report["steps"]) == ("completed", 36)
    assert report["precision"]["ran"] == "bf16"
    assert report["precision"]["reason"].startswith(f"fallback at step {step}: the loss has stayed more than 6")
    table = metrics(tmp_path / "run")
    assert list(table["train_loss"]) == list(range(1, 37)), "each step once in the log"
    assert table["train_loss"][36] < table["train_loss"][12]
    assert table["lr"][15] == pytest.approx(0.003 * learning_rate_factor(14, SCHEDULE, 36)), (
        "that of after the rollback"
    )


def test_35_a_run_that_diverges_again_ends_with_exit_3(tmp_path, monkeypatch):
    monkeypatch.setattr(divergence, "WARM_UP", 8)
    with going_wrong(HotRate(always=True)), pytest.raises(Diverged, match=r"one way back.*a lower optim\.lr"):
        train(tmp_path / "run", *DIVERGING)
    report = summary(tmp_path / "run")
    assert (report["status"], report["exit_code"]) == ("diverged", 3)
    assert [what for _, what in happened(tmp_path / "run")] == ["spike", "rollback", "spike"]
    assert report["precision"]["ran"] == "bf16"


class BadInFP8(Faults):
    """Steps 6 and 7 are not finite as long as the run is one in FP8, whatever they are computed in."""

    def loss(self, module, step, precision):
        return NAN if module.step.plan.fp8 and step in (6, 7) else 1.0


def test_36_a_run_that_fell_back_to_bf16_stays_there_when_it_is_resumed_and_says_so(tmp_path, clean, caplog):
    """It falls back in step 7, to the checkpoint of step 4, and ends after step 10 without a word."""
    folder, expected = tmp_path / "run", [(6, "skip"), (7, "skip"), (7, "rollback")]
    with going_wrong(BadInFP8()):
        train_until(10, folder, *QUIET, "callbacks.nonfinite_limit=2")
    assert happened(folder) == expected
    assert summary(folder)["precision"]["ran"] == "bf16"
    steps = {5, 8}  # the first after the rollback to step 4, and the interval's
    assert {path.name for path in (folder / "checkpoints").glob("step-*")} == {f"step-{n:08d}" for n in steps}
    saved = read(checkpoint(folder, 5))
    assert saved["precision"] == {
        "asked": "fp8_hybrid", "ran": "bf16", "recipe": None, "fell_back": True,
        "reason": "fallback at step 7: the last 2 steps had no finite loss and gradient",
    }  # fmt: skip
    assert saved["callbacks"]["DivergenceGuard"]["rollbacks"] == 1
    caplog.set_level(logging.INFO)
    with going_wrong(BadInFP8()):
        train(folder, *QUIET, "ckpt_path=last")
    assert "has fallen back to bf16, and stays there" in caplog.text
    report = summary(folder)
    assert (report["steps"], report["precision"]["ran"]) == (12, "bf16")
    assert happened(folder) == expected, "from the checkpoint"
    # Pretended FP8 is bf16: the run ends where one ends to which nothing happened.
    assert_same_checkpoint(checkpoint(folder, 12), checkpoint(clean, 12))


ONE_RANK = """
import hashlib, os
import pytest, torch
sys.path.insert(0, REPOSITORY)
from tests.faults.pretended import NAN, Faults, pretend, put

class OnRankOne(Faults):
    def loss(self, module, step, precision):
        here = module.global_rank == 1 and module.step.plan.fp8
        return NAN if here and (step in (6, 7) or (step, precision) == (2, "fp8")) else 1.0

    def gradient(self, module, step, precision):
        return NAN if module.global_rank == 1 and (step, precision) == (3, "fp8") else 1.0

patch = pytest.MonkeyPatch()
pretend(patch)
put(OnRankOne(), patch)
end = GPT2Module.on_train_batch_end

def on_train_batch_end(self, *args):
    end(self, *args)
    weights = hashlib.sha256(b"".join(p.detach().numpy().tobytes() for p in self.model.parameters())).hexdigest()
    with Path(f"rank-{self.global_rank}").open("a") as file:
        file.write(f"{self.global_step} {self.step.plan.ran} {self.trainer.ckpt_path} {weights}\\n")

GPT2Module.on_train_batch_end = on_train_batch_end
"""


def test_37_two_ranks_decide_alike_whichever_of_them_it_happens_to(tmp_path, request):
    script = ONE_RANK.replace("REPOSITORY", repr(str(request.config.rootpath)))
    keys = [word for word in TWO if "val_check" not in word]
    keys += [*QUIET, "callbacks.nonfinite_limit=2", "run_name=run"]
    output = run(tmp_path, *keys, patch=script)
    folder = tmp_path / "outputs/run"
    assert happened(folder) == [(2, "rerun"), (3, "rerun"), (6, "skip"), (7, "skip"), (7, "rollback")]
    one, other = ((tmp_path / f"rank-{rank}").read_text() for rank in (0, 1))
    assert one == other, "where they went on from, and the weights after every step"
    origins = {line.split()[2] for line in one.splitlines() if line.split()[1] == "bf16"}
    assert origins == {str(checkpoint(folder, 4))}
    steps = [tuple(line.split()[:2]) for line in one.splitlines()]
    in_fp8 = [(str(n), "fp8_hybrid") for n in range(1, 7)]
    assert steps == in_fp8 + [(str(n), "bf16") for n in range(5, 13)]
    assert output.count("step 7: going back to") == 1, "rank 0 speaks for all"
    assert all(torch.isfinite(weight).all() for weight in read_weights(checkpoint(folder, 12)).values())
