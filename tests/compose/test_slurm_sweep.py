"""`hydra/launcher=slurm`: what it composes to, what is refused. `tests/slurm` sends sweeps to a real SLURM."""

import pytest
from omegaconf import OmegaConf

from gpt2_fp8.compose import Purpose, preflight
from gpt2_fp8.compose.composition import open_catalog
from gpt2_fp8.config import errors

LAUNCH = ["-m", "hydra/launcher=slurm"]


def launcher(*words):
    with open_catalog() as catalog:
        return OmegaConf.to_container(catalog.compose(["hydra/launcher=slurm", *words]).hydra.launcher, resolve=True)


COMPOSED = [
    ((), {"nodes": 1, "tasks_per_node": 1, "gpus_per_node": 1, "cpus_per_task": 1, "timeout_min": 1440}),
    (("trainer=cpu",), {"nodes": 1, "tasks_per_node": 1, "gpus_per_node": None}),
    (("trainer=ddp", "trainer.devices=8", "trainer.num_nodes=2"),
     {"nodes": 2, "tasks_per_node": 8, "gpus_per_node": 8}),
    (("data.num_workers=5",), {"cpus_per_task": 6}),
    (("data=mixture", "+data@data.sources.a=fineweb", "+data@data.sources.b=openwebtext",
      "data.sources.a.num_workers=2", "data.sources.b.num_workers=1"), {"cpus_per_task": 4}),
    (("hydra.launcher.timeout_min=60", "hydra.launcher.mem_gb=64"), {"timeout_min": 60, "mem_gb": 64}),
    (("+hydra.launcher.additional_parameters.exclusive=true",),
     {"additional_parameters": {"requeue": True, "exclusive": True}}),
]  # fmt: skip


@pytest.mark.parametrize(("words", "found"), COMPOSED, ids=[" ".join(words) or "nothing" for words, _ in COMPOSED])
def test_what_it_composes_to(words, found):
    assert launcher(*words).items() >= found.items()
    assert launcher(*words)["_target_"].endswith(".SlurmLauncher")
    assert preflight([*LAUNCH, *words, "micro_batch_size=1"])


def test_submitit_takes_each_key():
    """What sbatch is told, as submitit writes it, without a SLURM."""
    from submitit.slurm.slurm import _make_sbatch_string

    given = launcher("hydra.launcher.partition=gpu", "trainer=ddp", "trainer.devices=4")
    plain = {"timeout_min": "time", "tasks_per_node": "ntasks_per_node", "name": "job_name"}
    left_out = {"_target_", "submitit_folder", "max_num_timeout", "mem_gb"}
    told = {plain.get(key, key): value for key, value in given.items() if key not in left_out}
    script = _make_sbatch_string(command="run", folder="there", **told)
    for line in ("--partition=gpu", "--ntasks-per-node=4", "--gpus-per-node=4", "--requeue", "--signal=USR2@120"):
        assert f"#SBATCH {line}\n" in script
    assert 'export SRUN_CPUS_PER_TASK="$SLURM_CPUS_PER_TASK"' in script


KEY = "hydra.launcher."
REFUSED = [
    ([f"{KEY}partitoin=gpu"], "partitoin"),
    ([f"{KEY}_target_=os.system"], "_target_"),
    (["trainer=ddp", "micro_batch_size=1"], "trainer.devices=auto"),
    (["trainer=ddp", "trainer.devices=4", "trainer.max_restarts=1"], "trainer.max_restarts"),
    (["trainer.devices=1,2", "micro_batch_size=1"], "trainer.devices"),
]


@pytest.mark.parametrize(("words", "key"), REFUSED, ids=[" ".join(words) for words, _ in REFUSED])
def test_what_is_refused(words, key):
    with pytest.raises(errors.UserError, match=key):
        preflight([*LAUNCH, *words])


def test_a_sweep_that_a_file_sends_is_refused_where_there_is_no_slurm(tmp_path, monkeypatch):
    """submitit ended it in a traceback."""
    (tmp_path / "mine/experiment").mkdir(parents=True)
    text = "# @package _global_\ndefaults:\n  - override /hydra/launcher: slurm\n"
    (tmp_path / "mine/experiment/sent.yaml").write_text(text)
    words = ["-m", "-cd", "mine", "experiment=sent", "seed=1,2"]
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(errors.UserError, match="there is no srun or sbatch or sacct on this"):
        preflight(words, Purpose(begins=True))
    assert len(preflight(words)) == 2


def test_a_job_that_sends_a_sweep_and_is_started_again_replaces_nothing(tmp_path, monkeypatch):
    """It has sent the jobs in its first turn. Those of the second would be new, and begin again in the same folders."""
    for name, value in {"ENVIRONMENT": "BATCH", "SLURM_JOB_ID": "7", "SLURM_RESTART_COUNT": "1"}.items():
        monkeypatch.setenv(name, value)
    (tmp_path / "outputs/x/0/checkpoints/step-00000005").mkdir(parents=True)
    (tmp_path / "outputs/x/0/checkpoints/step-00000005/manifest.json").write_text("{}")
    with pytest.raises(errors.UserError, match="already holds a run"):
        preflight([*LAUNCH, "seed=1,2", "run_name=x"], Purpose(name="slurm-7"))
    for words, name in (([*LAUNCH, "seed=1,2"], None), (["seed=1"], "slurm-7")):
        named = {config.run_name for config in preflight(words, Purpose(name="slurm-7"))}
        assert (named == {"slurm-7"}) == (name is not None)
