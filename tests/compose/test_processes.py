"""The number of a run's processes is the launcher's, whatever its files say; what was typed otherwise is refused."""

import pytest

from gpt2_fp8.compose import preflight
from gpt2_fp8.compose.jobs import continue_from
from gpt2_fp8.config.errors import UserError

TWO_BY_FOUR = {
    "TORCHELASTIC_RUN_ID": "none", "RANK": "5", "WORLD_SIZE": "8", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "4",
    "GROUP_RANK": "1", "GROUP_WORLD_SIZE": "2", "MASTER_ADDR": "node1", "MASTER_PORT": "29500",
    "TORCHELASTIC_USE_AGENT_STORE": "True",
}  # fmt: skip


@pytest.fixture
def torchrun(monkeypatch):
    for name, value in TWO_BY_FOUR.items():
        monkeypatch.setenv(name, value)


@pytest.mark.parametrize("words", [[], ["trainer=ddp"], ["trainer=cpu"], ["trainer.devices=4", "trainer.num_nodes=2"]])
def test_the_launchers_number(torchrun, words):
    (config,) = preflight([*words, "trainer.accelerator=cpu"])
    assert (config.trainer.devices, config.trainer.num_nodes, config.trainer.strategy) == (4, 2, "ddp")
    assert (config.global_batch_size, config.micro_batch_size) == (16, 2)


@pytest.mark.parametrize(
    ("words", "cause"),
    [
        (["trainer.devices=2"], "trainer.devices=2: torchrun has started 4"),
        (["trainer.num_nodes=3"], "trainer.num_nodes=3: torchrun has started 2"),
        (["trainer.max_restarts=2"], "trainer.max_restarts=2: torchrun has started the ranks"),
        (["global_batch_size=12"], "a step of 12 sequences does not divide into forward passes of"),
        (["micro_batch_size=16"], "a step of 16 sequences does not divide into forward passes of 16 on each of 8"),
    ],
)
def test_what_the_launcher_has_not_started(torchrun, words, cause):
    with pytest.raises(UserError) as refused:
        preflight(words)
    assert any(cause in problem.cause for problem in refused.value.problems), refused.value


def test_a_run_that_is_started_again_continues_only_what_is_saved(tmp_path):
    (config,) = preflight(["trainer=cpu"])
    assert continue_from(config, tmp_path) is config
    (tmp_path / "checkpoints/step-00000004").mkdir(parents=True)
    (tmp_path / "checkpoints/step-00000004/manifest.json").touch()
    assert continue_from(config, tmp_path).ckpt_path == "last"


def test_the_only_process_of_a_launcher_may_be_left_of_several(torchrun, monkeypatch):
    """Two processes take the group's micro-batch in part, so one of them alone does, too."""
    words = ["global_batch_size=8"]
    for name in ("WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_WORLD_SIZE"):
        monkeypatch.setenv(name, "1")
    for name in ("RANK", "LOCAL_RANK", "GROUP_RANK"):
        monkeypatch.setenv(name, "0")
    (config,) = preflight(words)
    assert config.micro_batch_size == 8
