"""Histograms, power and utilisation on a GPU: counts without the host, and losses that stay what they are."""

import pytest
import torch

from gpt2_fp8.callbacks import histograms
from gpt2_fp8.runtime import devices
from tests.runs import metrics, train

pytestmark = pytest.mark.gpu

WORDS = ["trainer=gpu", "model=tiny", "trainer.max_steps=12", "optim.warmup_steps=2", "trainer.log_every_n_steps=1",
         "trainer.val_check_interval=6", "callbacks.sample_tokens=0", "callbacks.progress_bar=false"]  # fmt: skip


def test_counts_are_the_cpus_and_nothing_waits():
    tensor = torch.randn(5_000, 5_000, generator=torch.Generator().manual_seed(1))  # more than is counted at once
    there = tensor.cuda()
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        counted = histograms.count([there])
    finally:
        torch.cuda.set_sync_debug_mode("default")
    (gpu,), (cpu,) = (histograms.read(["x"], "weight", found) for found in (counted, histograms.count([tensor])))
    assert (sum(gpu.counts), gpu.amax) == (tensor.numel(), cpu.amax)
    assert max(abs(a - b) for a, b in zip(gpu.counts, cpu.counts, strict=True)) <= 10, "numbers on an edge"
    assert gpu.squares == pytest.approx(cpu.squares, rel=1e-5)


@pytest.mark.parametrize("precision", ["bf16", pytest.param("fp8_hybrid", marks=pytest.mark.fp8)])
def test_losses_are_the_same_with_and_without(tmp_path, precision):
    for name, every in (("with", 1), ("without", 0)):
        words = [f"precision={precision}", f"logger.histograms_every_n_steps={every}", "trainer.deterministic=true"]
        train(tmp_path / name, *words, base=WORDS)
    for column in ("train_loss", "val_loss", "grad_norm"):
        assert metrics(tmp_path / "with")[column] == metrics(tmp_path / "without")[column]


def test_power_and_utilisation_are_in_the_log(tmp_path):
    pytest.importorskip("pynvml", reason="pip install nvidia-ml-py")
    assert devices.read_gpu_meter()["gpu_power_watts"] > 10
    train(tmp_path, "precision=bf16", base=WORDS)
    assert all(0 <= part <= 1 for part in metrics(tmp_path)["gpu_utilization"].values())
