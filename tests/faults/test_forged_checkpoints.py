"""Checkpoints whose digests are right and whose files are well-formed, of a state that is no run's: each is refused by
its path, before a step is trained, with cause and remedy."""

import json
import shutil

import pytest
import torch

from gpt2_fp8.checkpoint import files, pointers, run_state
from gpt2_fp8.checkpoint.errors import CheckpointError
from gpt2_fp8.config.errors import DataSourceLost, UserError
from gpt2_fp8.module import GPT2Module
from tests.faults.test_hostile_checkpoints import forge
from tests.runs import SMALL, checkpoint, command, summary, train, train_until

STEP = 4


def put(state, path, value):
    """Put `value` in the place that `path` names (a/b/0); None: take away what is there."""
    *above, last = path.split("/")

    def key_of(word):
        is_name = not word.isdigit() or (isinstance(state, dict) and word in state)
        return word if is_name else int(word)

    for word in above:
        state = state[key_of(word)]
    last = key_of(last)
    if value is None:
        del state[last]
    else:
        state[last] = value


def at(path, value=None):
    return lambda state: put(state, path, value)


def of_another_shape(state):
    moments = state["optimizer_states"][0]["state"]
    moments[3]["exp_avg"] = torch.zeros(7)


def one_more_parameter(state):
    moments = state["optimizer_states"][0]["state"]
    moments[len(moments)] = moments[0]


def fewer_groups(state):
    state["optimizer_states"][0]["param_groups"].pop()


def far_away(state):
    state["TokenDataModule"]["lanes"]["3"] |= {"position": 10**6}


BATCHES = "loops/fit_loop/epoch_loop.batch_progress"

# By types alone: seen before a run is built. What is done to the state, and what is said of it.
FORMS = {
    "no loops": (at("loops"), "loops is missing"),
    "loops of another program": (at("loops", {"fit_loop": {}}), "loops.fit_loop.epoch_progress is missing"),
    "a count that is a word": (at(f"{BATCHES}/total/ready", "four"), "batch_progress.total.ready is of type str"),
    "a count that is a truth": (at(f"{BATCHES}/total/ready", True), "total.ready is True, not an int from 0 on"),
    "a count below nothing": (at(f"{BATCHES}/total/ready", -4), "total.ready is -4, not an int from 0 on"),
    "no weights' tensors": (at("state_dict/tokens.weight", 1.0), "state_dict.tokens.weight is of type float"),
    "no optimizers": (at("optimizer_states", []), "optimizer_states is an empty list, not a list of one"),
    "an optimizer that is a word": (at("optimizer_states/0", "adam"), "optimizer_states.0 is of type str, not a dict"),
    "no moments": (at("optimizer_states/0/state/2/exp_avg"), "state.2.exp_avg is missing"),
    "parameters by name": (at("optimizer_states/0/param_groups/0/params", ["w"]), "params.0 is of type str"),
    "no schedule": (at("lr_schedulers"), "lr_schedulers is missing"),
    "a schedule of no step": (at("lr_schedulers/0/last_epoch", 4.5), "last_epoch is of type float"),
    "callbacks in a list": (at("callbacks", [1]), "callbacks is of type list, not a dict"),
    "a best that is a word": (at("callbacks/Tiers/best", "x"), "callbacks.Tiers.best is of type str"),
    "a loss that is a word": (at("callbacks/Fallback/statistics/mean", "x"), "statistics.mean is of type str"),
    "events that are none": (at("callbacks/Fallback/events", [1]), "events.0 is 1, not a dict"),
    "rng of no rank": (at("rng", []), "rng is an empty list"),
    "rng that is a word": (at("rng", "seed"), "rng is of type str, not a list"),
    "no generator of torch": (at("rng/0/torch"), "rng.0.torch is missing"),
    "FP8 scales that are words": (at("FP8Precision", {"scaling": "x", "blocks": "y"}), "FP8Precision.blocks is of ty"),
    "FP8 scales in a list": (at("FP8Precision", []), "FP8Precision is an empty list, not a dict"),
    "no data": (at("TokenDataModule"), "TokenDataModule is missing"),
    "data without lanes": (at("TokenDataModule/lanes"), "TokenDataModule.lanes is missing"),
    "data at a word": (at("TokenDataModule/lanes/3", {}), "TokenDataModule.lanes.3.epoch is missing"),
    "a precision that is a list": (at("precision", []), "precision is an empty list, not a dict"),
    "a micro-batch that is a word": (at("micro_batch_size", {"asked": 4, "fits": "4"}), "micro_batch_size.fits is of"),
}
# What no type tells: seen when it is put in its place.
FITS = {
    "moments of another shape": (of_another_shape, r"exp_avg 3 is \(7,\), and belongs to"),
    "moments of no parameter": (one_more_parameter, "moments are of 17 parameters, and it has 16"),
    "moments of none at all": (at("optimizer_states/0/state", {}), "moments are of 0 parameters"),
    "fewer groups": (fewer_groups, r"ValueError: zip\(\)"),
    "random bytes of another length": (at("rng/0/torch", torch.zeros(3, dtype=torch.uint8)), "RuntimeError"),
    "random numbers of another kind": (at("rng/0/python", (3, (1, 2), None)), "ValueError: state vector"),
    "lanes of another text": (at("TokenDataModule/lanes/7"), "it has 7 lanes that are not the 8 of this text"),
    "a lane past its end": (far_away, "IndexError"),
    "documents by other names": (at("TokenDataModule/lanes/3/documents", {"x": 1}), "TypeError: .*argument 'x'"),
    "a micro-batch of nothing": (at("micro_batch_size", {"asked": 4, "fits": 0}), "ZeroDivisionError"),
    "statistics by other names": (at("callbacks/Fallback/statistics/x", 1), "TypeError: .*argument 'x'"),
    "a version of no number": (at("pytorch-lightning_version", "evil"), "Invalid version: 'evil'"),
}  # fmt: skip


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """A run's folder with the checkpoint of one step, from which each forgery is made."""
    folder = tmp_path_factory.mktemp("trained") / "run"
    train_until(STEP, folder)
    return folder


@pytest.fixture
def run(trained, tmp_path):
    return shutil.copytree(trained, tmp_path / "run")


def forged(run, change, step=STEP):
    """Write a checkpoint anew, after `change` of what it holds."""
    path = checkpoint(run, step)
    state = files.read(checkpoint(run, STEP))
    change(state)
    state["global_step"] = step
    files.write(path, state)
    return path


@pytest.fixture
def steps(monkeypatch):
    """The steps that are trained."""
    seen = []
    original = GPT2Module.training_step

    def training_step(self, batch, batch_idx):
        seen.append(batch["cursor"]["step"])
        return original(self, batch, batch_idx)

    monkeypatch.setattr(GPT2Module, "training_step", training_step)
    return seen


def test_the_checkpoint_itself_continues(run, steps):
    """Or else the refusals would prove nothing."""
    forged(run, lambda state: None)
    train(run, "ckpt_path=last", f"trainer.max_steps={STEP + 1}")
    assert steps == [STEP + 1]


@pytest.mark.parametrize("name", FORMS)
def test_a_state_of_another_form_is_refused_before_a_run_is_built(trained, tmp_path, name):
    change, words = FORMS[name]
    state = files.read(checkpoint(trained, STEP))
    change(state)
    path = tmp_path / pointers.folder_name(STEP)
    files.write(path, state)
    with pytest.raises(CheckpointError) as refused:
        run_state.check(path)
    assert words in str(refused.value)
    assert_told(refused.value, path)


@pytest.mark.parametrize("name", FITS)
def test_a_state_that_does_not_fit_is_refused_where_it_is_restored(run, steps, name):
    change, words = FITS[name]
    path = forged(run, change)
    before = summary(run)
    run_state.check(path)  # types do not tell
    with pytest.raises(CheckpointError, match=words) as refused:
        train(run, f"ckpt_path={path}")
    assert_told(refused.value, path)
    assert steps == []
    assert summary(run) == before


def assert_told(refused, path):
    cause, remedy = str(refused).splitlines()
    assert cause.startswith(f"error: {path} cannot be continued from: ")
    assert "init_from=PATH" in remedy
    assert refused.exit_code == 2


def test_a_block_past_its_unit_is_a_text_that_changed(run, steps):
    path = forged(run, lambda state: state["TokenDataModule"]["lanes"]["3"].update(block=10**6))
    with pytest.raises(UserError, match="of which 1000000 sequences were read has only"):
        train(run, f"ckpt_path={path}")
    assert steps == []


def test_what_a_schedule_brings_along_is_not_taken(run, steps):
    """Torch would put any value in the place of a scheduler's methods."""
    path = forged(run, lambda state: state["lr_schedulers"][0].update(step="x", _step_count="y", base_lrs=[]))
    train(run, f"ckpt_path={path}", f"trainer.max_steps={STEP + 1}")
    assert steps == [STEP + 1]


def test_last_passes_over_it(run, steps, caplog):
    forged(run, lambda state: state.pop("loops"), STEP + 1)
    pointers.write(run / "checkpoints", "last", pointers.Pointer(pointers.folder_name(STEP + 1), STEP + 1, None))
    train(run, "ckpt_path=last", f"trainer.max_steps={STEP + 1}")
    assert "passed over" in caplog.text
    assert "loops is missing" in caplog.text
    assert steps == [STEP + 1]


def test_its_weights_can_be_taken(run, tmp_path, steps):
    path = forged(run, lambda state: state.pop("loops"))
    train(tmp_path / "other", f"init_from={path}", "trainer.max_steps=1", "optim.warmup_steps=0")
    assert steps == [1]


def test_a_step_that_is_a_word_does_not_fit_the_manifest(run):
    path = checkpoint(run, STEP)
    state = json.loads((path / "state.json").read_text())
    forge(path, "state.json", json.dumps(state | {"global_step": "4"}).encode())
    with pytest.raises(CheckpointError, match=r"state\.json is of another step"):
        run_state.check(path)


def test_a_command_ends_with_2_and_two_lines(run, tmp_path):
    path = forged(run, of_another_shape)
    done = command(*SMALL, "run_name=other", f"ckpt_path={path}", cwd=tmp_path)
    assert done.returncode == 2
    assert len(done.stderr.strip().splitlines()) == 2


def test_an_error_of_training_stays_what_it_is(run, monkeypatch):
    def training_step(self, batch, batch_idx):
        raise KeyError("ours")

    monkeypatch.setattr(GPT2Module, "training_step", training_step)
    with pytest.raises(KeyError, match="ours"):
        train(run, "ckpt_path=last")
    assert summary(run)["exit_code"] == 1


@pytest.mark.parametrize("error", [torch.OutOfMemoryError("x"), OSError("x"), DataSourceLost("x"), MemoryError()])
def test_what_is_no_fault_of_the_checkpoint_is_not_blamed_on_it(error):
    with pytest.raises(type(error)) as caught, run_state.restoring("a checkpoint"):
        raise error
    assert caught.value is error


def test_escapes_in_what_is_said_are_shown():
    with pytest.raises(CheckpointError) as caught, run_state.restoring("a checkpoint"):
        raise KeyError("\x1b[2J")
    assert "\x1b" not in str(caught.value)
