"""Checkpoints whose digests are right and whose files are well-formed, of a state that is no run's: each is refused by
its path, before a step is trained, with cause and remedy."""

import json
import shutil
import struct

import pytest
import torch

from gpt2_fp8.checkpoint import files, pointers, run_state
from gpt2_fp8.checkpoint.errors import CheckpointError
from gpt2_fp8.config.errors import DataSourceLost
from gpt2_fp8.data.loaders import Steps
from gpt2_fp8.runtime import rng
from gpt2_fp8.train.module import GPT2Module
from tests.faults.test_hostile_checkpoints import forge
from tests.runs import SMALL, checkpoint, forked, summary, train, train_until

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


POLICY = "callbacks/DivergenceGuard"
CHECKPOINTING = "callbacks/Checkpointing"


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
    "a best that is a word": (at(f"{CHECKPOINTING}/best", "x"), "callbacks.Checkpointing.best is of type str"),
    "a loss that is a word": (at("callbacks/DivergenceGuard/statistics/mean", "x"), "statistics.mean is of type str"),
    "events that are none": (at("callbacks/DivergenceGuard/events", [1]), "events.0 is 1, not a dict"),
    "rng of no rank": (at("rng", []), "rng is an empty list"),
    "rng that is a word": (at("rng", "seed"), "rng is of type str, not a list"),
    "no generator of torch": (at("rng/0/torch"), "rng.0.torch is missing"),
    "FP8 scales that are words": (
        at("training_step/scaling", {"settings": "x", "blocks": "y"}),
        "scaling.blocks is of type",
    ),
    "FP8 scales in a list": (at("training_step/scaling", []), "training_step.scaling is an empty list, not a dict"),
    "no data": (at("TokenDataModule"), "TokenDataModule is missing"),
    "data without lanes": (at("TokenDataModule/lanes"), "TokenDataModule.lanes is missing"),
    "no digests": (at("TokenDataModule/digests", {}), "TokenDataModule.digests.train is missing"),
    "data at a word": (at("TokenDataModule/lanes/3", {}), "TokenDataModule.lanes.3.epoch is missing"),
    "a precision that is a list": (at("precision", []), "precision is an empty list, not a dict"),
    "random numbers of another kind": (at("rng/0/python", (3, (1, 2), None)), "rng.0.python.1 is of type tuple, not a"),
    "a micro-batch of nothing": (
        at("training_step/micro_batch_size", {"asked": 4, "fits": 0}),
        "fits is 0, not an int from 1 on",
    ),
    "last steps that are a word": (at("training_step/last_in_bf16", "4"), "last_in_bf16 is of type str"),
    "a version of no number": (at("pytorch-lightning_version", "evil"), "of type str, not a version from 2.0 on"),
    "a micro-batch that is a word": (
        at("training_step/micro_batch_size", {"asked": 4, "fits": "4"}),
        "micro_batch_size.fits is of",
    ),
}
# What no type tells: seen when it is put in its place.
FITS = {
    "moments of another shape": (of_another_shape, r"exp_avg 3 is \(7,\), and belongs to"),
    "moments of no parameter": (one_more_parameter, "optimizer state is of 17 parameters, and the model has 16"),
    "moments of none at all": (at("optimizer_states/0/state", {}), "optimizer state is of 0 parameters"),
    "fewer groups": (fewer_groups, r"ValueError: zip\(\)"),
    "random bytes of another length": (at("rng/0/torch", torch.zeros(3, dtype=torch.uint8)), "and this one 3"),
    "lanes of another text": (at("TokenDataModule/lanes/7"), "it has 7 lanes that are not the 8 of this text"),
    "a lane past its end": (far_away, r"lane 3 stands at its unit 1000000, counted from 0, of 1\d\n"),
    "digests that are none": (at("TokenDataModule/digests/train", "@"), "the digests of its text are damaged"),
    "documents by other names": (at("TokenDataModule/lanes/3/documents", {"x": 1}), "TypeError: .*argument 'x'"),
    "statistics by other names": (at("callbacks/DivergenceGuard/statistics/x", 1), "TypeError: .*argument 'x'"),
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


def refusal(trained, tmp_path, change):
    """How a checkpoint with a forged state, its digests right, is refused before a run is built of it."""
    state = files.read(checkpoint(trained, STEP))
    change(state)
    path = tmp_path / pointers.folder_name(STEP)
    files.write(path, state)
    with pytest.raises(CheckpointError) as refused:
        run_state.check(path)
    assert_told(refused.value, path)
    return str(refused.value)


@pytest.mark.parametrize("name", FORMS)
def test_a_state_of_another_form_is_refused_before_a_run_is_built(trained, tmp_path, name):
    change, words = FORMS[name]
    assert words in refusal(trained, tmp_path, change)


FIT = "loops/fit_loop/"
DONE = f"{FIT}epoch_loop.manual_optimization.optim_step_progress/total"
HUGE = 10**400
# Forged so that every digest and every type is right: each number is held against what a run writes, before it is used.
NUMBERS = {
    "a text beyond the step": (at("TokenDataModule/step", 10**6), "step is 1000000, and the state's step"),
    "a text one step ahead": (at("TokenDataModule/step", STEP + 1), "step is 5, and the state's step 4"),
    "a text of a step that no file has": (at("TokenDataModule/step", HUGE), "is an int of 1329 bits, not an int"),
    "fewer steps than its name": (at(f"{DONE}/completed", 1), "total.completed is 1, and the state's step 4"),
    "more steps than its name": (at(f"{DONE}/ready", 10**9), "total.ready is 1000000000, and the state's step 4"),
    "batches of another step": (at(f"{BATCHES}/total/processed", 2), "total.processed is 2, and the state's step 4"),
    "batches ended before they began": (at(f"{BATCHES}/total/completed", 9), "completed is 9, and the state's step 4"),
    "batches of this epoch beyond it": (at(f"{BATCHES}/current/ready", 9), "current.ready is 9, beyond the state's"),
    "a validation that never began": (
        at(f"{FIT}epoch_loop.val_loop.batch_progress/total/completed", 7), "val_loop.batch_progress.total has finished",
    ),
    "a method of Lightning's": (at(f"{BATCHES}/current/reset_on_restart", 1), "reset_on_restart is of no run"),
    "epochs without end": (at(f"{FIT}epoch_progress/current/processed", 10**9), "beyond twice the steps (10)"),
    "logs of other steps": (at(f"{FIT}epoch_loop.state_dict/_batches_that_stepped", 99), "stepped is 99, beyond the"),
    "a schedule elsewhere": (at("lr_schedulers/0/last_epoch", 10**9), "last_epoch is 1000000000, and the state's st"),
    "a second optimizer": (lambda s: s["optimizer_states"].append(s["optimizer_states"][0]), "which there are 1 at"),
    "a best of no number": (at(f"{CHECKPOINTING}/best", {"step": 4, "val_loss": float("nan")}), "val_loss is nan, not"),
    "a best that nothing beats": (at(f"{CHECKPOINTING}/best", {"step": 4, "val_loss": -1e9}), "-1000000000.0, not a"),
    "a best of no step": (at(f"{CHECKPOINTING}/best", {"step": HUGE, "val_loss": 5}), "step is an int of 1329 bits"),
    "validated before it was trained": (at(f"{CHECKPOINTING}/validated_step", 9), "validated_step is 9, beyond the st"),
    "a variance below 0": (at(f"{POLICY}/statistics/variance", -1.0), "variance is -1.0, not a number from 0 to 1e+80"),
    "a mean of 10^400": (at(f"{POLICY}/statistics/mean", HUGE), "statistics.mean is an int of 1329 bits, not a number"),
    "a mean of no number": (at(f"{POLICY}/statistics/mean", float("inf")), "statistics.mean is inf, not a number"),
    "losses of other steps": (at(f"{POLICY}/statistics/count", 500), "statistics.count is 500, beyond the state's"),
    "skips of other steps": (at(f"{POLICY}/in_a_row/skips", 10**9), "in_a_row.skips is 1000000000, beyond the state's"),
    "a second rollback": (at(f"{POLICY}/rollbacks", 2), "rollbacks is 2, not an int from 0 to 1"),
    "an event that a terminal obeys": (
        at(f"{POLICY}/events", [{"step": 1, "what": "skip", "reason": "\x1b[2J"}]), "reason is of type str, not",
    ),
    "an event of a megabyte": (
        at(f"{POLICY}/events", [{"step": 1, "what": "skip", "reason": "x" * 10**6}]), "at most 1000 printable",
    ),
    "numpy past its state": (at("rng/0/numpy/position", 10**6), "position is 1000000, not an int from 0 to 624"),
    "numpy of another kind": (at("rng/0/numpy/name", "PCG64"), "numpy.name is of type str, not MT19937"),
    "numpy of fewer words": (at("rng/0/numpy/keys", torch.ones(8, dtype=torch.uint8)), "of shape (8,), not a"),
    "Python's next normal number": (lambda s: normal(s, "x"), "rng.0.python.2 is of type str"),
    "Python's of an old version": (lambda s: python(s, 2), "rng.0.python.0 is 2, not an int from 3 to 3"),
    "a lane in an epoch without end": (at("TokenDataModule/lanes/3/epoch", HUGE), "3.epoch is an int of 1329 bits"),
    "a lane beyond its tokens": (at("TokenDataModule/lanes/3/epoch", 10**9), "epoch is 1000000000, beyond the tokens"),
    "a lane past its tokens": (at("TokenDataModule/lanes/3/offset", 10**12), "offset is 1000000000000, beyond the tok"),
    "a lane past its sequences": (at("TokenDataModule/lanes/3/block", 10**12), "block is 1000000000000, beyond the se"),
    "documents without number": (at("TokenDataModule/lanes/3/documents/read", HUGE), "read is an int of 1329 bits"),
    "moments of half precision": (lambda s: cast(s, "exp_avg", torch.float16), "exp_avg is a tensor of torch.float16"),
    "moments of whole numbers": (lambda s: cast(s, "exp_avg_sq", torch.int32), "exp_avg_sq is a tensor of torch.int32"),
    "a count of updates in bits": (lambda s: cast(s, "step", torch.int64), "step is a tensor of torch.int64"),
    "a precision of its own": (at("precision/ran", "\x1b[2J"), "precision.ran is of type str, not fp32 or bf16"),
    "a model that a terminal obeys": (at("model/n_head", "\x1b[2J" + "x" * 10**6), "model.n_head is"),
    "a text that a terminal obeys": (at("TokenDataModule/fingerprint/data", "\x1b[2J"), "fingerprint.data is"),
    "a weight's name of a megabyte": (at("state_dict/" + "w" * 10**6, torch.ones(1)), "wwww is of no run"),
    "a weight's name that a terminal obeys": (at("state_dict/\x1b[2J", torch.ones(1)), r"\x1b[2J is of no run"),
    "a callback that a terminal obeys": (at("callbacks/\x1b[2J", {}), r"\x1b[2J is of no run"),
    "a version of a megabyte": (at("pytorch-lightning_version", "2.6.6+" + "a" * 10**6), "not a version from 2.0 on"),
}  # fmt: skip
# In tensors: seen where they are restored.
TENSORS = {
    "torch past its state": (lambda s: place(s, 624, 624), r"at no place of theirs \(624 of 624 left, 624 taken\)"),
    "torch before its state": (lambda s: place(s, -100, 725), r"at no place of theirs \(-100 of 624 left"),
    "torch that was never seeded": (lambda s: s["rng"][0]["torch"].zero_(), "at no place of theirs"),
    "numpy of zeros": (lambda s: s["rng"][0]["numpy"]["keys"].zero_(), "numpy's random numbers of rank 0"),
    "CUDA between two numbers": (at("rng/0/cuda", torch.full((16,), 3, dtype=torch.uint8)), "CUDA's random numbers"),
    "a mean of squares below 0": (lambda s: moments(s)["exp_avg_sq"].fill_(-1.0), "a mean of squares, has numbers"),
    "a mean that is no number": (lambda s: moments(s)["exp_avg"].fill_(float("nan")), "exp_avg_sq 0 is not finite"),
    "squares without end": (lambda s: moments(s)["exp_avg_sq"].fill_(float("inf")), "exp_avg_sq 0 is not finite"),
    "a mean beyond its squares": (lambda s: moments(s)["exp_avg"].fill_(1e30), r"exp_avg 0 reaches 1e\+30, but"),
    "updates below 0": (lambda s: moments(s)["step"].fill_(-5.0), "step 0 is -5.0, in a state of 4 steps"),
    "updates of other steps": (lambda s: moments(s)["step"].fill_(10.0**6), "step 0 is 1000000.0, in a state of 4"),
}  # fmt: skip


def moments(state):
    return state["optimizer_states"][0]["state"][0]


def cast(state, name, dtype):
    moments(state)[name] = moments(state)[name].to(dtype)


def python(state, version):
    state["rng"][0]["python"] = (version, *state["rng"][0]["python"][1:])


def normal(state, value):
    state["rng"][0]["python"] = (*state["rng"][0]["python"][:2], value)


def place(state, left, after):
    """In torch's state: how many words are left before new ones are made, and where the next one lies."""
    struct.pack_into("<iiQ", state["rng"][0]["torch"].numpy(), 8, left, 1, after)


@pytest.mark.parametrize("name", NUMBERS)
def test_102_a_number_that_no_run_writes_is_refused_before_a_run_is_built(trained, tmp_path, name):
    change, words = NUMBERS[name]
    told = refusal(trained, tmp_path, change)
    assert words in told
    assert told.replace("\n", "").isprintable()
    assert len(told) < 3000


@pytest.mark.parametrize("name", TENSORS)
def test_102_nor_is_a_tensor_that_no_run_writes_put_in_its_place(run, steps, name):
    change, words = TENSORS[name]
    path = forged(run, change)
    with pytest.raises(CheckpointError, match=words) as refused:
        train(run, f"ckpt_path={path}")
    assert_told(refused.value, path)
    assert steps == []


@pytest.mark.parametrize("key", ["ckpt_path", "init_from"])
@pytest.mark.parametrize("number", [float("nan"), float("-inf")])
def test_102_weights_that_are_not_finite_are_refused(run, tmp_path, steps, key, number):
    path = forged(run, lambda state: state["state_dict"]["positions.weight"][0, :1].fill_(number))
    with pytest.raises(CheckpointError, match=r"holds weights that are not finite .*: positions\.weight\n") as refused:
        train(tmp_path / "other", f"{key}={path}", f"trainer.max_steps={STEP + 1}")
    assert refused.value.exit_code == 2
    assert "an earlier one of the same run" in str(refused.value)
    assert steps == []


def test_102_a_text_beyond_the_step_ends_at_once(run, tmp_path):
    """Lightning waited for ever for a step that did not come, and passed SIGTERM by."""
    path = forged(run, at("TokenDataModule/step", 10**6))
    done = forked(*SMALL, "run_name=other", f"ckpt_path={path}", cwd=tmp_path)
    assert done.returncode == 2
    assert len(done.stderr.strip().splitlines()) == 2


def test_102_steps_that_are_none_are_no_wait_for_ever():
    """Whatever a state says: what Lightning iterates over never ends without a step."""
    with pytest.raises(AssertionError, match="nothing is left"):
        next(iter(Steps(lambda: (7, None), max_steps=5, overfit_batches=0)))


def test_102_last_passes_over_it_to_one_that_is_a_run_s(run, steps, caplog):
    forged(run, at(f"{POLICY}/statistics/variance", -1.0), STEP + 1)
    pointers.write(run / "checkpoints", "last", pointers.Pointer(pointers.folder_name(STEP + 1), STEP + 1, None))
    train(run, "ckpt_path=last", f"trainer.max_steps={STEP + 1}")
    assert "variance is -1.0" in caplog.text
    assert steps == [STEP + 1]


@pytest.mark.parametrize("seed", range(3))
def test_102_what_generators_come_to_is_taken(seed):
    torch.manual_seed(seed)
    for draws in range(1, 700, 23):
        torch.rand(draws), torch.randn(1), torch.randn(1, dtype=torch.float64)
        rng.check(rng.gather())


@pytest.mark.parametrize("fell_back", [True, False])
def test_103_a_reason_of_a_stranger_s_reaches_no_terminal(run, tmp_path, fell_back):
    reason = "\x1b[2J\x1b]0;owned\x07" + "x" * 10**6
    path = forged(run, lambda state: state["precision"].update(reason=reason, fell_back=fell_back))
    done = forked(*SMALL, "run_name=other", f"ckpt_path={path}", "trainer.max_steps=5", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    for text in (done.stdout, done.stderr, (tmp_path / "outputs/other/summary.json").read_text()):
        assert "\x1b" not in text
        assert len(text) < 20_000


def test_103_names_of_weights_reach_no_terminal(run, tmp_path):
    path = forged(run, lambda state: state["state_dict"].update({"\x1b[2J" + "x" * 10**5: torch.zeros(1)}))
    done = forked(*SMALL, "run_name=other", f"init_from={path}", cwd=tmp_path)
    assert done.returncode == 2
    assert done.stderr.replace("\n", "").isprintable()
    assert len(done.stderr) < 3000


@pytest.mark.parametrize("key", ["ckpt_path", "init_from"])
@pytest.mark.parametrize("dtype", [torch.int32, torch.bfloat16, torch.float64], ids=str)
def test_104_weights_of_another_dtype_are_not_cast(run, tmp_path, steps, key, dtype):
    def change(state):
        state["state_dict"]["tokens.weight"] = state["state_dict"]["tokens.weight"].to(dtype)

    with pytest.raises(CheckpointError, match=f"tokens.weight is {dtype} there, torch.float32 here") as refused:
        train(tmp_path / "other", f"{key}={forged(run, change)}")
    assert refused.value.exit_code == 2
    assert steps == []


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


def test_what_a_schedule_brings_along_is_not_taken(run, steps):
    """Torch would put any value in the place of a scheduler's methods."""
    path = forged(run, lambda state: state["lr_schedulers"][0].update(step="x", _step_count="y", base_lrs=[]))
    train(run, f"ckpt_path={path}", f"trainer.max_steps={STEP + 1}")
    assert steps == [STEP + 1]


def test_last_passes_over_it(run, steps, caplog):
    forged(run, lambda state: state.pop("loops"), STEP + 1)
    pointers.write(run / "checkpoints", "last", pointers.Pointer(pointers.folder_name(STEP + 1), STEP + 1, None))
    train(run, "ckpt_path=last", f"trainer.max_steps={STEP + 1}")
    assert "skipped" in caplog.text
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
    done = forked(*SMALL, "run_name=other", f"ckpt_path={path}", cwd=tmp_path)
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
