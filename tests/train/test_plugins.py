"""Code of the user's own, as docs/plugins.md has it: in data workers and on two ranks."""

import json
import sys

import pytest
import torch

from gpt2_fp8.compat.torch_private import skip_where
from gpt2_fp8.compose import preflight
from gpt2_fp8.config.errors import UserError
from gpt2_fp8.engine.optim import build_optimizer
from gpt2_fp8.runtime import registry
from tests.runs import SMALL, assert_same_checkpoint, checkpoint, forked, metrics, summary, train
from tests.test_readme import ROOT, blocks

DOCUMENT = ROOT / "docs/plugins.md"
(MODULE,) = blocks(DOCUMENT, "python")
(LINE,) = blocks(DOCUMENT, "bash")
WORDS = LINE.split()[3:]
ALONE = {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
SEEN = """
import os
with open(f"seen-{os.getpid()}", "w") as file:
    file.write(os.environ.get("LOCAL_RANK", "0") + " " + __import__("multiprocessing").current_process().name)
"""


@pytest.fixture
def here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "my_module.py").write_text(MODULE + SEEN)
    (tmp_path / "poems").mkdir()
    for number in range(4):
        (tmp_path / f"poems/{number}.txt").write_text(f"A rose is a rose is a rose, {number}.\n" * 40)
    return tmp_path


TWO = ["trainer=ddp", "trainer.accelerator=cpu", "trainer.devices=2", "micro_batch_size=2"]


@pytest.mark.parametrize("ranks", [["trainer=cpu"], pytest.param(TWO, marks=pytest.mark.slow)], ids=["one", "two"])
def test_a_run_with_a_worker_has_the_documents_code(here, ranks):
    labels = ["+tags.purpose=test", "+tags.round=2", "notes='for the record'"]
    forked(*SMALL[1:], *ranks, "data.num_workers=1", *labels, *WORDS, "run_name=x", cwd=here, code=0, **ALONE)
    seen = sorted(path.read_text() for path in here.glob("seen-*"))
    count = 2 if ranks is TWO else 1
    assert {line.split()[0] for line in seen} == set("01"[:count])
    assert sum(line.split()[1] == "MainProcess" for line in seen) == count
    assert sum(line.split()[1] != "MainProcess" for line in seen) >= count, "a worker on each rank"
    folder = here / "outputs/x"
    rows = list(map(json.loads, (folder / "metrics.jsonl").read_text().splitlines()))
    assert [row["step"] for row in rows if "weight_norm" in row] == [5, 10, 12]
    labels = {"tags.purpose": "test", "tags.round": 2, "notes": "for the record"}
    assert any(labels.items() <= row.items() for row in rows)
    assert "weight_norm" not in (folder / "metrics.csv").read_text()
    told = summary(folder)
    assert told["data"]["source"] == {"poems": 4}
    assert (told["tags"], told["notes"]) == ({"purpose": "test", "round": 2}, "for the record")


@pytest.fixture
def _unknown(monkeypatch):
    """A registry of its own, and modules that are imported for the first time."""
    monkeypatch.setattr(registry, "_known", {key: {} for key in registry._known})
    monkeypatch.setattr(registry, "_folders", [])
    monkeypatch.setattr(sys, "path", list(sys.path))
    before = set(sys.modules)
    yield
    for name in set(sys.modules) - before:
        del sys.modules[name]


@pytest.mark.usefixtures("_unknown")
def test_a_module_is_found_in_the_folder_and_once(tmp_path):
    (tmp_path / "counted.py").write_text("from gpt2_fp8.runtime import registry\nregistry.callback('one')(list)\n")
    registry.load(["counted"], tmp_path)
    registry.load(["counted"], tmp_path)
    assert registry.folders() == [str(tmp_path)]
    assert registry.make("callbacks.extra", "one", list, "abc") == ["a", "b", "c"]


@pytest.mark.usefixtures("_unknown")
@pytest.mark.parametrize(
    ("text", "cause"), [("import no_such_module_", "ModuleNotFoundError"), ("x = (", "SyntaxError")]
)
def test_a_module_that_cannot_be_imported_is_the_users(tmp_path, text, cause):
    (tmp_path / "broken_.py").write_text(text)
    with pytest.raises(UserError, match=f"plugins: broken_ cannot be imported: {cause}"):
        registry.load(["broken_"], tmp_path)


@pytest.mark.usefixtures("_unknown")
def test_names_and_kinds_that_do_not_fit():
    registry.callback("norms")(dict)
    with pytest.raises(UserError, match=r"did you mean callbacks\.extra=norms"):
        registry.make("callbacks.extra", "norm", dict)
    with pytest.raises(UserError, match="makes a dict"):
        registry.make("callbacks.extra", "norms", list)
    with pytest.raises(UserError, match=r"plugins=\[MODULE\]"):
        registry.make("logger.extra", "norms", list)
    with pytest.raises(ValueError, match="registered by builtins already"):
        registry.callback("norms")(list)


OPTIMIZER = """
import torch
from gpt2_fp8.runtime import registry

for fused in (True, False):
    registry.optimizer(f"sgd {fused}")(
        lambda groups, optim, fused=fused: torch.optim.SGD(groups, lr=optim.lr, momentum=optim.beta1, fused=fused)
    )
"""


@pytest.mark.parametrize("fused", [True, False])
def test_an_optimizer_of_ones_own_skips_what_is_not_finite_and_continues_to_the_bit(tmp_path, monkeypatch, fused):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "sgds.py").write_text(OPTIMIZER)
    words = ["plugins=[sgds]", "optimizer=registered", f"optimizer.factory='sgd {fused}'", "optim.lr=0.5"]
    whole, again = tmp_path / "whole", tmp_path / "again"
    train(whole, *words, "callbacks.checkpoint_every_n_steps=6", "callbacks.keep_checkpoints=9")
    train(again, *words, f"ckpt_path={checkpoint(whole, 6)}")
    assert_same_checkpoint(checkpoint(whole, 12), checkpoint(again, 12))
    losses = metrics(whole)["train_loss"]
    assert losses[12] < losses[1]
    with pytest.raises(UserError, match=f"optimizer=registered sgd {fused}, and this run has optimizer=adamw"):
        train(tmp_path / "other", f"ckpt_path={checkpoint(whole, 6)}")
    # a gradient that is not finite changes nothing
    (config,) = preflight([*SMALL, *words])
    registry.load(config.plugins, tmp_path)
    model = torch.nn.Linear(2, 2)
    optimizer = build_optimizer(model, config.optim, config.optimizer)
    model(torch.full((1, 2), torch.inf)).sum().backward()
    before = [weight.clone() for weight in model.parameters()]
    skip_where(optimizer, torch.ones(()))
    optimizer.step()
    assert all(map(torch.equal, before, model.parameters()))
