"""What only Hydra knows of a job: its folder, its log, and that there are other jobs."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from gpt2_fp8.compose import complete_run, parallel
from gpt2_fp8.compose.composer import lookup
from gpt2_fp8.compose.sweep_folders import Place
from gpt2_fp8.config import hydra_policy, output_folder, run_folder, slurm_launcher
from gpt2_fp8.config.errors import Finding, Problem
from gpt2_fp8.config.keys import show
from gpt2_fp8.config.schema import RunConfig
from gpt2_fp8.runtime import launcher


def is_named_by_time(plain: dict[str, Any], in_sweep: bool) -> bool:
    """Return whether the folder of a run, or of a sweep, is by its name, and the name by the time.

    plain: its configuration, with `${...}` as written.
    """
    folder = lookup(plain, "hydra.sweep.dir" if in_sweep else "hydra.run.dir")[1]
    return "${run_name}" in str(folder) and "${now:" in str(plain["run_name"])


class Surroundings:
    """Checks where a job will write, and whether it can run among others.

    Attributes:
        plain: its configuration, with `${...}` as written.
        number: its place in a sweep; None if it is the only job.
        given: tells whether a word sets a key.
        restarted: whether the processes know that they are started again: the run's folder then is its own. None: they
            have not met, and their launcher says it.
        folder: where it will write; None until that is known.
        place: the same of a sweep's job.
    """

    def __init__(
        self,
        cfg: DictConfig,
        plain: dict[str, Any],
        config: RunConfig,
        number: int | None,
        given: Callable[[str], bool],
        restarted: bool | None = None,
    ):
        self.cfg, self.plain, self.config, self.number, self.given = cfg, plain, config, number, given
        self.restarted = restarted
        self.folder: str | None = None
        self.place: Place | None = None

    def check(self, bad: set[str]) -> Iterator[Finding]:
        """Find everything that is wrong with it. `bad` has the keys that are known to be wrong."""
        yield from hydra_policy.check_values(self._value)
        setting = "hydra.run.dir" if self.number is None else "hydra.sweep.dir"
        by_name = "${run_name}" in str(lookup(self.plain, setting)[1])
        if not (by_name and "run_name" in bad):
            yield from self._folder(setting, "run_name" if by_name else setting)
        fresh = is_named_by_time(self.plain, self.number is not None) and not self.given("run_name")
        if self.config.ckpt_path in ("last", "best") and fresh:
            path = self.config.ckpt_path
            cause = f"ckpt_path={path}: of which run? A run without a name starts in a new, empty folder"
            yield Finding(("ckpt_path", "run_name"), Problem(cause, "add the run_name=NAME of the run to continue"))
        if fresh and self.number is None and launcher.current().forgets:
            cause = "TORCHELASTIC_USE_AGENT_STORE is not True: started again, the processes would not find this run"
            yield Finding(("run_name",), Problem(cause, "add run_name=NAME"))
        own_launcher = self.number is None and not launcher.current().starts_all
        if self.config.trainer.num_nodes > 1 and fresh and own_launcher and "MASTER_ADDR" in os.environ:
            cause = f"trainer.num_nodes={self.config.trainer.num_nodes}, and each node would give the run another name"
            yield Finding(("trainer.num_nodes", "run_name"), Problem(cause, "add run_name=NAME, the same on all nodes"))
        if self.number is not None and self._starts_processes():
            trainer = self.config.trainer
            values = f"trainer.devices={show(trainer.devices)}, trainer.num_nodes={trainer.num_nodes}"
            cause = f"{values} in a sweep: each process would start the whole sweep again"
            remedy = "sweep with trainer=gpu, a GPU a job; or start the runs one by one, without -m"
            yield Finding(("trainer.devices", "trainer.num_nodes"), Problem(cause, remedy))
        if self.number is not None and parallel.is_chosen(self.cfg.hydra):
            yield from parallel.check_job(self.config)

    def _folder(self, setting: str, key: str) -> Iterator[Finding]:
        """Find what is wrong with the folder that it will write into. `key` is the key that the user gave."""
        try:
            self.folder = self._resolved(setting)
        except OmegaConfBaseException as error:
            yield Finding((setting,), Problem(f"{setting}: {str(error).splitlines()[0]}", "correct the ${...}"))
            return
        if self.number is not None:
            above = str(OmegaConf.select(self.cfg, setting))
            self.place = Place(self.number, self.folder, above, self.config.run_name, key == "run_name")
        wrong = output_folder.check(self.folder, setting, key)
        yield from wrong
        own = Path(self.folder)
        problems = [] if wrong else run_folder.check(own, *self._file_names())
        if self.number is not None:
            problems += run_folder.check_sweep(Path(str(OmegaConf.select(self.cfg, setting))))
        yield from (Finding((key,), problem) for problem in problems)
        again = launcher.current().again if self.restarted is None else self.restarted
        if slurm_launcher.is_chosen(self.cfg.hydra.launcher.get("_target_")):  # its jobs are new, and begin afresh
            again = False
        if self.config.ckpt_path is None and not wrong and not again:
            yield from output_folder.check_untaken(own)
        if self.config.ckpt_path is not None and not wrong:
            yield from complete_run.check(own, self.config)

    def _resolved(self, setting: str) -> str:
        """Return the folder into which Hydra will put the job. Raises OmegaConfBaseException."""
        folder = str(OmegaConf.select(self.cfg, setting))
        if self.number is None or not folder:
            return folder
        return str(Path(folder, str(OmegaConf.select(self.cfg, "hydra.sweep.subdir"))))

    def _file_names(self) -> tuple[str | None, str | None]:
        """Return what Hydra writes into a run's folder: the log's name, and the name of its settings' folder."""
        job = OmegaConf.select(self.cfg, "hydra.job.name", throw_on_missing=False) or "run"
        settings = OmegaConf.select(self.cfg, "hydra.output_subdir")
        return f"{job}.log", None if settings is None else str(settings)

    def _starts_processes(self) -> bool:
        """Return whether Lightning would start this very command again for its other devices."""
        trainer = self.config.trainer
        one = trainer.devices == 1 or (trainer.devices == "auto" and trainer.accelerator == "cpu")
        basic = str(self.cfg.hydra.launcher.get("_target_", "")).endswith("BasicLauncher")
        return not (one and trainer.num_nodes == 1) and basic

    def _value(self, key: str) -> Any:
        """Return a setting of Hydra's as a plain value; None if there is none or it does not resolve."""
        try:
            value = OmegaConf.select(self.cfg, key)
            return OmegaConf.to_container(value, resolve=False) if OmegaConf.is_config(value) else value
        except OmegaConfBaseException:
            return None
