"""Faults 29 to 37: numbers that are not finite, and training that diverges. FP8 is pretended: see `pretended`."""

import logging
from contextlib import nullcontext
from dataclasses import replace

import pytest
import torch

from gpt2_fp8.checkpoint.files import read, read_weights
from gpt2_fp8.config.errors import Diverged
from gpt2_fp8.engine import divergence
from gpt2_fp8.engine.schedule import learning_rate_factor
from tests.common import OPTIM
from tests.faults.pretended import NAN, Faults, InFP8Alone, NanWeight, going_wrong
from tests.ranks import TWO, run
from tests.runs import assert_same_checkpoint, checkpoint, metrics, summary, train, train_until

QUIET = ["trainer.val_check_interval=12", "precision=fp8_hybrid"]  # 12 steps, a checkpoint every four


def fallback(folder):
    return summary(folder)["divergence"]


def happened(folder):
    return [(event["step"], event["what"]) for event in fallback(folder)["events"]]


def assert_finite(path):
    assert all(torch.isfinite(weight).all() for weight in read_weights(path).values())


@pytest.fixture(scope="module")
def clean(tmp_path_factory):
    """A run in which nothing goes wrong, in pretended FP8."""
    folder = tmp_path_factory.mktemp("clean") / "run"
    with going_wrong(Faults()):
        train(folder, *QUIET)
    assert fallback(folder) == {"events": [], "reruns": 0, "skipped": 0, "rollbacks": 0}
    return folder


def test_29_30_what_is_not_finite_in_fp8_is_computed_again_in_bf16_and_leaves_no_trace(tmp_path, clean):
    run = tmp_path / "run"
    with going_wrong(InFP8Alone()):
        train(run, *QUIET)
    counts = fallback(run)
    assert happened(run) == [(3, "rerun"), (5, "rerun")]
    assert (counts["reruns"], counts["skipped"], counts["rollbacks"]) == (2, 0, 0)
    reasons = [event["reason"] for event in counts["events"]]
    assert all(
        f"its {what} was not finite in FP8" in why for what, why in zip(("loss", "gradient"), reasons, strict=True)
    )
    assert metrics(run)["bf16_reruns"][3] == 1
    for column in ("train_loss", "grad_norm", "lr"):
        assert metrics(run)[column] == metrics(clean)[column], column
    assert (summary(run)["steps"], summary(run)["precision"]["ran"]) == (12, "fp8_hybrid")
    assert_same_checkpoint(checkpoint(run, 12), checkpoint(clean, 12))


def test_31_a_nan_weight_is_noticed_and_left_behind_for_a_checkpoint_without_it(tmp_path):
    keys = ["precision=fp32", "callbacks.nonfinite_limit=2", "callbacks.checkpoint_every_n_steps=2"]
    keys.append("trainer.val_check_interval=12")
    train(tmp_path / "clean", *keys)
    with going_wrong(NanWeight()):
        train(tmp_path / "run", *keys)
    assert happened(tmp_path / "run") == [(7, "skip"), (8, "skip"), (8, "rollback")]
    counts = fallback(tmp_path / "run")
    assert (counts["reruns"], counts["skipped"], counts["rollbacks"]) == (0, 2, 1), "only FP8 is run again in bf16"
    assert summary(tmp_path / "run")["precision"]["ran"] == "fp32", "there is nothing to fall back to"
    assert_same_checkpoint(checkpoint(tmp_path / "run", 12), checkpoint(tmp_path / "clean", 12))
    assert metrics(tmp_path / "run")["train_loss"] == metrics(tmp_path / "clean")["train_loss"]


class NoLoss(Faults):
    """None is finite, in any precision."""

    def loss(self, module, step, precision):
        return NAN


@pytest.mark.parametrize(
    ("faults", "rate", "told"),
    [
        (NoLoss(), "1e-3", "none of the 3 steps up to 3 had a finite"),
        (Faults(), "1e30", "after step 3 the validation loss is not finite; a lower "),
    ],
)
def test_35_a_run_that_has_no_finite_loss_at_its_end_is_not_completed(tmp_path, faults, rate, told):
    few = ["trainer.max_steps=3", "trainer.val_check_interval=3", "precision=fp32", "optim.warmup_steps=0"]
    with going_wrong(faults, fp8=False), pytest.raises(Diverged, match=told):
        train(tmp_path / "run", *few, f"optim.lr={rate}")
    report = summary(tmp_path / "run")
    assert (report["status"], report["exit_code"]) == ("diverged", 3)


class PoisonedBatch(Faults):
    """Step 7's, in any precision."""

    def loss(self, module, step, precision):
        return NAN if step == 7 else 1.0


def test_32_a_batch_that_is_bad_in_bf16_too_is_left_out_and_counts_as_a_step(tmp_path, caplog, clean):
    weights = {}

    class Watched(PoisonedBatch):
        def before(self, module, step):
            weights[step] = module.model.positions.weight.detach().clone()

    with going_wrong(Watched()):
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


@pytest.mark.parametrize("always", [False, True], ids=["in FP8", "always"])
def test_34_35_a_run_that_diverges_goes_back_once_and_on_in_bf16_or_ends_with_exit_3(tmp_path, monkeypatch, always):
    monkeypatch.setattr(divergence, "WARM_UP", 8)
    ends = pytest.raises(Diverged, match=r"one way back.*a lower optim\.lr") if always else nullcontext()
    with going_wrong(HotRate(always)), ends:
        train(tmp_path / "run", *DIVERGING)
    report, events = summary(tmp_path / "run"), happened(tmp_path / "run")
    assert (report["status"], report["exit_code"]) == (("diverged", 3) if always else ("completed", 0))
    assert [what for _, what in events] == ["spike", "rollback", *["spike"] * always]
    assert report["precision"]["ran"] == "bf16"
    (spike, _), (step, _), *_ = events
    assert 14 <= spike <= 18
    assert step == spike + 5
    if not always:
        assert report["precision"]["reason"].startswith(f"fallback at step {step}: the loss has stayed more than 6")
        table = metrics(tmp_path / "run")
        assert list(table["train_loss"]) == list(range(1, 37)), "each step once in the log"
        assert table["train_loss"][36] < table["train_loss"][12]
        rate = 0.003 * learning_rate_factor(14, replace(OPTIM, warmup_steps=2), 36)
        assert table["lr"][15] == pytest.approx(rate), "that of after the rollback"


class BadInFP8(Faults):
    """Steps 6 and 7 are not finite as long as the run is one in FP8, whatever they are computed in."""

    def loss(self, module, step, precision):
        return NAN if module.step.plan.fp8 and step in (6, 7) else 1.0


@pytest.fixture(scope="module")
def fallen(tmp_path_factory):
    """A run that fell back to bf16 in step 7, and ended after step 10 without a word."""
    folder = tmp_path_factory.mktemp("fallen") / "run"
    with going_wrong(BadInFP8()):
        train_until(10, folder, *QUIET, "callbacks.nonfinite_limit=2")
    return folder


def test_36_it_went_back_to_the_checkpoint_before_and_saved_its_next_step(fallen):
    assert happened(fallen) == [(6, "skip"), (7, "skip"), (7, "rollback")]
    assert summary(fallen)["precision"]["ran"] == "bf16"
    steps = {5, 8}  # the first after the rollback to step 4, and the interval's
    assert {path.name for path in (fallen / "checkpoints").glob("step-*")} == {f"step-{n:08d}" for n in steps}
    saved = read(checkpoint(fallen, 5))
    assert saved["precision"] == {
        "asked": "fp8_hybrid", "ran": "bf16", "recipe": None, "fell_back": True,
        "reason": "fallback at step 7: the last 2 steps had no finite loss and gradient",
    }  # fmt: skip
    assert saved["callbacks"]["DivergenceGuard"]["rollbacks"] == 1


def test_36_a_resumed_run_stays_in_bf16_and_says_so(fallen, clean, caplog):
    caplog.set_level(logging.INFO)
    with going_wrong(BadInFP8()):
        train(fallen, *QUIET, "ckpt_path=last")
    assert "has fallen back to bf16, and stays there" in caplog.text
    report = summary(fallen)
    assert (report["steps"], report["precision"]["ran"]) == (12, "bf16")
    assert happened(fallen) == [(6, "skip"), (7, "skip"), (7, "rollback")], "from the checkpoint"
    # Pretended FP8 is bf16: the run ends where one ends to which nothing happened.
    assert_same_checkpoint(checkpoint(fallen, 12), checkpoint(clean, 12))


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
    code, output = run(tmp_path, *keys, patch=script)
    assert code == 0, output
    folder = tmp_path / "outputs/run"
    expected = [(2, "rerun"), (3, "rerun"), (6, "skip"), (7, "skip"), (7, "rollback")]
    assert happened(folder) == expected
    one, other = ((tmp_path / f"rank-{rank}").read_text() for rank in (0, 1))
    assert one == other, "where they went on from, and the weights after every step"
    origins = {line.split()[2] for line in one.splitlines() if line.split()[1] == "bf16"}
    assert origins == {str(checkpoint(folder, 4))}
    steps = [tuple(line.split()[:2]) for line in one.splitlines()]
    in_fp8 = [(str(n), "fp8_hybrid") for n in range(1, 7)]
    assert steps == in_fp8 + [(str(n), "bf16") for n in range(5, 13)]
    assert output.count("step 7: going back to") == 1, "rank 0 speaks for all"
    assert_finite(checkpoint(folder, 12))
