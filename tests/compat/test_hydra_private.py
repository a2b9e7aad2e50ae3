"""What `compat.hydra_private` believes of hydra-core 1.3: a release that breaks one of these breaks this first."""

from itertools import product

import pytest
from hydra import compose, initialize_config_dir
from hydra.core.global_hydra import GlobalHydra
from hydra.core.object_type import ObjectType
from hydra.core.override_parser.overrides_parser import OverridesParser

from gpt2_fp8.compat import hydra_private
from gpt2_fp8.compose import conf_dir


def test_the_flags_that_this_program_reads():
    args = hydra_private.flag_parser().parse_args(["-m", "-cn", "mine", "-cd", "here", "seed=1", "optim.lr=2"])
    assert (args.multirun, args.config_name, args.config_dir) == (True, "mine", "here")
    assert args.overrides == ["seed=1", "optim.lr=2"]
    flags = ("help", "hydra_help", "cfg", "resolve", "package", "info", "run", "shell_completion", "config_path")
    assert {name for name in (*flags, "experimental_rerun") if not hasattr(args, name)} == set()
    parser = hydra_private.flag_parser()
    given = parser.parse_args(["-m", "--config-dir", "here", "seed=1"])
    assert hydra_private.given_flags(parser, given) == {"multirun": "--multirun/-m", "config_dir": "--config-dir/-cd"}
    assert hydra_private.given_flags(parser, parser.parse_args(["seed=1"])) == {}


def overrides(*words):
    return OverridesParser.create().parse_overrides(list(words))


def test_a_sweep_is_every_combination_the_last_key_fastest():
    jobs = hydra_private.job_words(overrides("a=1,2", "b=x", "c=range(0,2)"))
    assert jobs == [["a=1", "b=x", "c=0"], ["a=1", "b=x", "c=1"], ["a=2", "b=x", "c=0"], ["a=2", "b=x", "c=1"]]
    assert hydra_private.job_words([]) == [[]]


@pytest.fixture
def loader():
    with initialize_config_dir(str(conf_dir()), version_base="1.3"):
        yield GlobalHydra.instance().config_loader()


def test_a_folder_is_searched_last_and_has_primary_configurations(loader, tmp_path):
    (tmp_path / "mine.yaml").write_text("defaults: [config, _self_]\nseed: 7\n")
    (tmp_path / "config.yaml").write_text("seed: 8\n")
    hydra_private.search_in(loader, tmp_path)
    assert "mine" in loader.get_group_options("", ObjectType.CONFIG)
    assert compose("mine").seed == 7
    assert compose("config").seed == 1337, "ours comes first"


def test_the_options_of_a_group_are_those_that_hydra_lists(loader, tmp_path):
    (tmp_path / "model").mkdir()
    (tmp_path / "model/mine.yaml").write_text("n_layer: 1\n")
    for own in (False, True):
        if own:
            hydra_private.search_in(loader, tmp_path)
        for group, kind in product(["", "model", "experiment/none"], [ObjectType.CONFIG, ObjectType.GROUP, None]):
            options = hydra_private.group_options(loader, group, kind)
            assert options == loader.get_group_options(group, kind)
            assert ("mine" in options) == (own and group == "model" and kind != ObjectType.GROUP)
