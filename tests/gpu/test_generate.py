"""`generate` and `evaluate` on a GPU: the whole forward, a CPU's texts, and the own loss of a run in FP8."""

import json
from dataclasses import replace

import pytest
import torch

from gpt2_fp8 import evaluate, generate
from gpt2_fp8.layers import reference
from gpt2_fp8.layers.block import Composed
from gpt2_fp8.model.decoder import Decoder
from gpt2_fp8.model.gpt2 import GPT2, initialise
from gpt2_fp8.train import ranking
from tests.gpu.common import CONFIG, RUN, VOCAB, hopper
from tests.runs import metrics, summary, train

LLAMA = {
    "norm": "rms_norm", "mlp": "swiglu", "positions": "rope", "bias": False, "n_kv_head": 2, "qk_norm": True,
}  # fmt: skip
FEW = ["data.val_sequences=8", "callbacks.sample_tokens=0", "callbacks.progress_bar=false"]
ALIKE = {torch.float32: 1e-4, torch.bfloat16: 0.05}  # of the logits' standard deviation


def built(dtype, **options):
    model = GPT2(replace(CONFIG, **options), VOCAB, Composed(reference, recompute="none"))
    initialise(model, 1)
    generator = torch.Generator().manual_seed(2)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn(parameter.shape, generator=generator) * 0.02)
    return model.to("cuda", dtype).eval()


@pytest.mark.parametrize("options", [{}, LLAMA], ids=["GPT-2", "Llama"])
@pytest.mark.parametrize("dtype", ALIKE, ids=str)
def test_each_token_sees_what_the_whole_forward_sees(dtype, options):
    model = built(dtype, **options)
    ids = torch.randint(0, VOCAB, (3, 40), generator=torch.Generator().manual_seed(3)).tolist()
    decoder = Decoder(model, 3, 64)
    logits = decoder.begin([ids[0][:20], ids[1][:5], ids[2][:30]])
    for place in range(8):
        for row, context in enumerate(decoder.contexts):
            with torch.no_grad():
                whole = model(torch.tensor([context], device="cuda"))[0, -1].float()
            assert float((whole - logits[row].float()).abs().max() / whole.std()) < ALIKE[dtype]
        logits = decoder.step([row[30 + place] for row in ids])


def test_texts_are_those_of_a_cpu(tmp_path, monkeypatch):
    """In float32, the likeliest tokens of a model that has learned something."""
    monkeypatch.chdir(tmp_path)
    train(tmp_path / "outputs/first", "precision=bf16", "trainer.max_steps=30", base=[*RUN[:-1], *FEW])
    words = ["ckpt_path=outputs/first", "prompt=def", "prompt=import os", "tokens=30", "temperature=0"]
    words += ["precision=fp32"]
    texts = {}
    for device in ("gpu", "cpu"):
        assert generate.main([*words, f"device={device}", f"out={device}.jsonl"]) == 0
        rows = [json.loads(line) for line in (tmp_path / f"{device}.jsonl").read_text().splitlines()]
        texts[device] = [row["text"] for row in rows]
    assert texts["gpu"] == texts["cpu"]
    assert generate.main(["ckpt_path=outputs/first", "tokens=30", "samples=3"]) == 0, "in bf16, drawn"


@pytest.mark.fp8
@pytest.mark.parametrize("backend", ["te", pytest.param("fused", marks=hopper)])
def test_an_evaluation_of_an_fp8_run_is_its_own_validation(tmp_path, monkeypatch, backend):
    """Delayed scaling's scales come from the checkpoint."""
    monkeypatch.chdir(tmp_path)
    words = [f"precision.backend={backend}", "recipe=delayed", "trainer.deterministic=true", "precision.evaluation=fp8"]
    train(tmp_path / "outputs/first", *words, base=[*RUN, *FEW])
    assert evaluate.main(["ckpt_path=outputs/first", "out=result.json"]) == 0
    found = json.loads((tmp_path / "result.json").read_text())
    assert (found["precision"], found["loss"]) == ("fp8_hybrid", summary(tmp_path / "outputs/first")["last_val_loss"])
    assert 0 < found["peak_memory_gb"] < 10
    assert evaluate.main(["ckpt_path=outputs/first", "precision=bf16", "compile=false", "out=result.json"]) == 0
    plain = json.loads((tmp_path / "result.json").read_text())
    assert (plain["precision"], plain["loss"]) == ("bf16", pytest.approx(found["loss"], rel=0.02))


@pytest.mark.parametrize("precision", ["bf16", pytest.param("fp8_hybrid", marks=pytest.mark.fp8)])
def test_endings_are_ranked_on_the_gpu_in_a_run_and_of_its_checkpoint(tmp_path, monkeypatch, precision):
    """Validations move the module there, and `evaluate`'s Trainer leaves it on the CPU."""
    monkeypatch.chdir(tmp_path)
    devices, original = [], ranking._of_batch

    def of_batch(logits_of, batch):
        def noted(ids):
            logits = logits_of(ids)
            devices.append(logits.device.type)
            return logits

        return original(noted, batch)

    monkeypatch.setattr(ranking, "_of_batch", of_batch)
    items = [
        {"ctx": "import", "endings": ["os", "qzxj vv"], "label": 0},
        {"ctx": "a", "endings": ["b", "c d"], "label": 1},
    ]
    (tmp_path / "items.jsonl").write_text("\n".join(map(json.dumps, items)))
    words = [f"precision={precision}", "callbacks.ranking=items.jsonl", "callbacks.ranking_every_n_steps=0"]
    train(tmp_path / "outputs/first", *words, base=[*RUN[:-1], *FEW])
    accuracy = metrics(tmp_path / "outputs/first")["ranking/acc"]
    assert list(accuracy) == [5, 10, 12]
    in_run = len(devices)
    assert evaluate.main(["ckpt_path=outputs/first", "ranking=items.jsonl", "out=result.json"]) == 0
    assert json.loads((tmp_path / "result.json").read_text())["ranking"]["acc"] == accuracy[12]
    assert in_run >= 3
    assert len(devices) > in_run
    assert set(devices) == {"cuda"}
