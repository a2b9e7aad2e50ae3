"""lm-evaluation-harness runs on an exported folder with a local task, and gives our model's own log-likelihoods."""

import json
import subprocess
import sys

import pytest
import torch

from gpt2_fp8 import export
from gpt2_fp8.train.module import GPT2Module
from tests.runs import checkpoint, train

TASK = """\
task: words
dataset_path: json
dataset_kwargs:
  data_files:
    test: {file}
test_split: test
output_type: multiple_choice
doc_to_text: "{{{{ctx}}}}"
doc_to_choice: "{{{{endings}}}}"
doc_to_target: "{{{{label}}}}"
target_delimiter: ""
metric_list:
  - metric: acc
"""
ROWS = [
    {"ctx": "def f(self", "endings": ["):", "zqx"], "label": 0},
    {"ctx": "import", "endings": [" os", " üü"], "label": 0},
    {"ctx": "return", "endings": ["xqzj", " None"], "label": 1},
]


@torch.no_grad()
def log_likelihood(module, context, ending):
    ids = list((context + ending).encode())
    scores = module(torch.tensor([ids]))[0].double().log_softmax(-1)
    first = len(context.encode())
    return float(sum(scores[place - 1, ids[place]] for place in range(first, len(ids))))


@pytest.mark.slow
def test_log_likelihoods_are_those_of_the_checkpoint(tmp_path):
    pytest.importorskip("lm_eval")
    train(tmp_path / "run", "trainer.max_steps=20", "trainer.val_check_interval=20", "optim.warmup_steps=5")
    assert export.main([str(tmp_path / "run"), str(tmp_path / "out")]) == 0
    (tmp_path / "words.jsonl").write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    (tmp_path / "words.yaml").write_text(TASK.format(file=tmp_path / "words.jsonl"))
    command = [
        sys.executable, "-m", "lm_eval", "--model", "hf", "--model_args", "pretrained=out,dtype=float32",
        "--tasks", "words", "--include_path", ".", "--device", "cpu", "--log_samples", "--output_path", "results",
    ]  # fmt: skip
    subprocess.run(command, cwd=tmp_path, check=True, timeout=300, capture_output=True)
    (samples,) = (tmp_path / "results").rglob("samples_words_*.jsonl")
    module = GPT2Module.load_from_checkpoint(checkpoint(tmp_path / "run", 20))
    found = [json.loads(line) for line in samples.read_text().splitlines()]
    assert len(found) == len(ROWS)
    for sample, row in zip(sorted(found, key=lambda sample: sample["doc_id"]), ROWS, strict=True):
        theirs = [float(response[0]) for response in sample["filtered_resps"]]
        ours = [log_likelihood(module, row["ctx"], ending) for ending in row["endings"]]
        assert theirs == pytest.approx(ours, abs=1e-4)
