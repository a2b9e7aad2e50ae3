"""Completion: what a line may go on with, and what the shell's script does to other commands."""

import subprocess

import pytest

from gpt2_fp8.compose import completion, read
from gpt2_fp8.config.errors import UserError

SHELL = """
gpt2-fp8() { echo optim.schedule=constant optim.schedule=cosine; }
there() { COMPREPLY=(theirs); }
complete -F there python dd
before=$COMP_WORDBREAKS
eval "$SCRIPT"; eval "$SCRIPT"
[[ $COMP_WORDBREAKS == "$before" ]] && complete -p dd
COMP_LINE="gpt2-fp8 optim.schedule=c"; COMP_POINT=${#COMP_LINE}; _gpt2_fp8 gpt2-fp8; echo ${COMPREPLY[@]}
COMP_LINE="python -m http.s"; COMP_POINT=${#COMP_LINE}; _gpt2_fp8 python; echo ${COMPREPLY[@]}
"""


@pytest.mark.parametrize(
    ("typed", "suggested"),
    [
        ("gpt2-fp8 com", "compare compile= compile_mode="),
        ("python -m gpt2_fp8.run com", "compile= compile_mode="),
        ("gpt2-fp8 seed=1 optimi", "optimizer. optimizer="),
        ("gpt2-fp8 prepare logger.wandb.g", "logger.wandb.group="),
        ("gpt2-fp8 optim.schedule=c", "optim.schedule=constant optim.schedule=cosine"),
        ("gpt2-fp8 -cd mine model=mi", "model=mini"),
        ("/bin/python3 -m gpt2_fp8.evaluate ra", "ranking="),
        ("gpt2-fp8 generate tem", "temperature="),
        ("gpt2-fp8 bench bench.b", "bench.baseline="),
        ("gpt2-fp8 trainer.fast_dev_run=", "trainer.fast_dev_run=false trainer.fast_dev_run=true"),
        ("gpt2-fp8 ckpt_path=outp", ""),
        ("gpt2-fp8 compare outp", ""),
        ("gpt2-fp8 model.n_lay=", ""),
    ],
)
def test_what_a_line_may_go_on_with(typed, suggested, tmp_path):
    (tmp_path / "mine/model").mkdir(parents=True)
    (tmp_path / "mine/model/mini.yaml").write_text("n_layer: 1")
    assert completion.suggest(typed) == suggested.split()


def test_other_commands_are_left_alone():
    script = completion.answer(read(["-sc", "install=bash"]))
    done = subprocess.run(["bash", "--norc", "-c", SHELL], env={"SCRIPT": script}, capture_output=True, text=True)
    assert (done.stdout.splitlines(), done.stderr) == (["complete -F there dd", "constant cosine", "theirs"], "")
    with pytest.raises(UserError, match="install=fish"):
        completion.answer(read(["-sc", "install=fish"]))
