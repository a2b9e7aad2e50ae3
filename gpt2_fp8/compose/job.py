"""One job: its words composed into a configuration, and checked."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any, NamedTuple, cast

from hydra.core.hydra_config import HydraConfig
from hydra.core.override_parser.types import Override
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from gpt2_fp8.compose import processes, surroundings, sweep_folders, sweeps, tried
from gpt2_fp8.compose.composer import Composer, above, lookup
from gpt2_fp8.config import checks, parsing, run_length
from gpt2_fp8.config.errors import Finding, Problem
from gpt2_fp8.config.schema import RunConfig
from gpt2_fp8.runtime import ranks


class Purpose(NamedTuple):
    """What a configuration is wanted for, where that is not a run that begins here."""

    restarted: bool | None = None  # whether its folder may hold what it has saved before; None: its launcher knows
    drawn: bool = False  # its schedule is only drawn: a warm-up and a decay that do not fit stay as they are
    begins: bool = False  # the run, or the sweep, begins here, so that the programs that it calls must be here
    name: str | None = None  # for a run, or a sweep, whose own name would be the time


TO_RUN = Purpose()


class Job:
    """One job of a sweep, or the only one: its words composed, and checked as far as its mistakes allow."""

    def __init__(
        self,
        composer: Composer,
        words: Sequence[Override],
        number: int | None = None,
        whole: DictConfig | None = None,
        purpose: Purpose = TO_RUN,
    ):
        self.composer, self.number, self.whole = composer, number, whole
        self.launcher, self.purpose = ranks.current(), purpose
        self.request = composer.request
        self.words = list(words)
        self.typed = {word.key_or_group for word in self.words}
        self.dropped: set[str] = set()
        self.folder: str | None = None  # where it will write
        self.place: sweep_folders.Place | None = None  # the same of a sweep's job
        self.plain: dict[str, Any] = {}  # with `${...}` as written

    def composed(self) -> tuple[DictConfig, dict[str, Any]]:
        """Return the configuration of the words that could be composed, and the same as plain values.

        Raises UserError if there is none.
        """
        while True:
            composed, self.words = self.composer.compose(self.words)
            cfg, self.plain = composed.cfg, composed.plain
            if self.number is not None and self.whole is not None:
                sweeps.number(cfg, self.number, self.whole)
            if "${hydra:" in str(self.plain):  # slow, and rare
                HydraConfig.instance().set_config(cfg)
            try:
                return cfg, _resolved(cfg)
            except OmegaConfBaseException as error:
                self.words = self.composer.drop_unresolved(self.words, error)

    def absent(self, found: list[Finding]) -> list[Finding]:
        """Report values without a + for keys that the choices lack, except keys that `found` is about.

        Hydra refuses such values, even if the key is one of this program's.
        """
        told = {key for finding in found for key in finding.keys}
        mine = {word.key_or_group for word in self.words}
        words = [word for word in self.composer.absent if word.key_or_group in mine]
        base = self.composer.base(self.words) if words else {}
        lacking = [word for word in words if not lookup(base, word.key_or_group)[0]]
        return [
            Finding((word.key_or_group,), _lacking(word))
            for word in lacking
            if not told & set(above(word.key_or_group))
        ]

    def check(self) -> tuple[RunConfig | None, list[Problem]]:
        """Return the configuration, if there is one, and its problems, except those that follow from other mistakes."""
        words = list(self.words)
        config, problems = self.checked()
        return config, tried.tried(problems, words, self._problems_of)

    def _problems_of(self, words: Sequence[Override]) -> list[Problem]:
        composer = Composer(self.request, self.composer.catalog)
        _, problems = Job(composer, words, self.number, self.whole, self.purpose).checked()
        return [*problems, *(finding.problem for finding in composer.found)]

    def checked(self) -> tuple[RunConfig | None, list[Problem]]:
        """Return what `check` does, with ways out that are not tried."""
        cfg, data = self.composed()
        config, found = parsing.build(RunConfig, data)
        found = [*found, *self.absent(found)]
        if config is None:  # check the other keys against each other, with these as in the files
            self.dropped = {key for finding in found for key in finding.keys}
            self.words = [word for word in self.words if word.key_or_group not in self.dropped]
            cfg, data = self.composed()
            config, _ = parsing.build(RunConfig, data)
        if config is not None:
            config = config if self.purpose.drawn else run_length.fitted(config, self.typed)
            allowed = list(run_length.misfits(config)) if self.purpose.drawn else []
            started = list(processes.check(config, self.launcher, self.typed, self.number is None))
            config = processes.fitted(config, self.launcher, self.typed)
            across = [*started, *(finding for finding in checks.check(config) if finding not in allowed)]
            bad = {key for finding in across for key in finding.keys}
            around = surroundings.Surroundings(cfg, self.plain, config, self.number, self.given, self.purpose.restarted)
            across += around.check(bad)
            self.folder, self.place = around.folder, around.place
            found += [finding for finding in across if not any(map(self._doubts, finding.keys))]
        return config, [finding.problem for finding in self.causes(found)]

    def _by_experiment(self, finding: Finding) -> Finding:
        """Return a finding whose advice is to leave a key out; if an experiment has set it, the advice names that."""
        key, (cause, remedy) = finding.keys[0], finding.problem
        left_out = f"leave {key} out"
        chosen = next((word for word in self.words if word.key_or_group == "experiment"), None)
        if chosen is None or self.typed & set(above(key)[:-1]) or not remedy.endswith(left_out):
            return finding
        if lookup(self.composer.base([word for word in self.words if word is not chosen]), key)[0]:
            return finding
        remedy = f"{remedy.removesuffix(left_out)}leave {chosen.input_line} out, whose file sets it"
        return Finding(finding.keys, Problem(cause, remedy))

    def causes(self, found: list[Finding]) -> list[Finding]:
        """Return the findings without those of keys that take their value from another wrong one."""
        wrong = {key for finding in [*found, *self.composer.found] for key in finding.keys}
        causes = [finding for finding in found if not any(self._follows(key) in wrong for key in finding.keys)]
        return list(map(self._by_experiment, causes))

    def given(self, key: str) -> bool:
        """Return whether a word sets a key."""
        return key in self.typed

    def _doubts(self, key: str) -> bool:
        """Return whether a check may have seen another value than the user meant."""
        dropped = self.dropped | {key for finding in self.composer.found for key in finding.keys}
        return key in dropped or (self.request.doubts(key) and not self.given(key))

    def _follows(self, key: str) -> str | None:
        """Return the key from which another one takes its value (`data.seed: ${seed}`), unless a word sets it."""
        reference = re.fullmatch(r"\$\{([\w.]+)\}", str(lookup(self.plain, key)[1]))
        return reference[1] if reference and not self.given(key) else None


def _resolved(cfg: DictConfig) -> dict[str, Any]:
    """Return a configuration without Hydra's own node, every `${...}` resolved. Raises OmegaConfBaseException."""
    own = OmegaConf.masked_copy(cfg, [str(key) for key in cfg if key != "hydra"])
    return cast("dict[str, Any]", OmegaConf.to_container(own, resolve=True))


def _lacking(override: Override) -> Problem:
    return Problem(
        f"{override.input_line}: none of the files that were chosen has {override.key_or_group}",
        f"+{override.input_line}, to add it",
    )
