"""The studies of speed: a bare loop, a GPU's power under one, and single GEMMs, as far as a CPU goes."""

import importlib
import re
import shlex
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from gpt2_fp8 import load_config
from gpt2_fp8.callbacks.throughput import Throughput
from gpt2_fp8.compose import preflight
from gpt2_fp8.config.checks import vocabulary
from gpt2_fp8.engine.micro_batching import MicroBatching
from gpt2_fp8.engine.training_step import TrainingStep
from tests.runs import SMALL, train
from tests.test_readme import ALL

STUDIES = Path(__file__).resolve().parents[1] / "docs/studies"
TINY = [word for word in SMALL if word.startswith(("trainer=", "model.", "global_", "micro_"))]
EMULATED = ["--precision", "fp8_hybrid", "--backend", "emulated", "--recipe", "delayed"]


@pytest.fixture
def study(monkeypatch):
    """A study's module, by name."""
    monkeypatch.syspath_prepend(str(STUDIES))
    return importlib.import_module


def documented(name):
    """The words behind `python docs/studies/NAME.py` of every command in the documents."""
    start = ["python", f"docs/studies/{name}.py"]
    return [found.words[2:] for found in ALL if found.words[:2] == start]


def test_a_bare_loop_trains_and_says_its_speed(study, capsys, monkeypatch):
    """Every step is one of the project's, on other tokens; the timed ones are told."""
    trained, call = [], TrainingStep.__call__
    monkeypatch.setattr(TrainingStep, "__call__", lambda self, ids: [trained.append(ids), call(self, ids)][1])
    assert study("bare_loop").main([*EMULATED, "--micro-batch", "2", "--steps", "3", "--warmup", "2", "--", *TINY]) == 0
    assert len(trained) == 5
    assert {tuple(ids.shape) for ids in trained} == {(8, 33)}
    assert all(not ids.equal(trained[0]) for ids in trained[1:])
    model, ran, speed = capsys.readouterr().out.splitlines()
    assert model == "tiny on the CPU, 8 x 32 tokens, 4 at a time"  # the run's own word is the last
    assert ran.endswith("fp8_hybrid (delayed)")
    numbers = re.fullmatch(
        r"([\d,]+) tokens/s, the median of 3 steps \(slowest ([\d,]+), fastest ([\d,]+)\)", speed
    ).groups()
    median, slowest, fastest = (int(number.replace(",", "")) for number in numbers)
    assert 0 < slowest <= median <= fastest


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["--steps", "0"], "--steps is less than 1"),
        (["--stepz", "2"], "unrecognized arguments: --stepz 2"),
        (["--precision", "bf16", "--", "seed=1,2", "-m"], "2 runs are asked for"),
        (["--", "micro_batch_size=auto"], "micro_batch_size=auto is measured by a run alone"),
        (
            ["--", "trainer.max_steps=null", "trainer.max_epochs=2"],
            "trainer.max_epochs=2: the run alone counts steps",
        ),
        (["--recipe", "nothing"], "recipe=nothing: there is no such choice"),
    ],
)
def test_a_loop_that_cannot_be_is_refused_in_two_lines(words, told, study, capsys):
    assert study("bare_loop").main(words) == 2
    error, fix = capsys.readouterr().err.splitlines()
    assert error == f"error: {told}"
    assert fix.startswith("  fix: ")


@pytest.mark.parametrize("seconds", ["0", "-1", "nan", "inf"])
def test_a_gpu_is_read_for_a_time(seconds, study, capsys):
    assert study("power").main(["--seconds", seconds]) == 2
    assert capsys.readouterr().err == f"error: --seconds {seconds} is no time above 0\n  fix: --seconds 20\n"


@pytest.mark.parametrize(
    ("words", "told", "fix"),
    [
        (["model=tiny", "prompt=300"], "prompt=300, tokens=64: tiny has a context of 256", "prompt=128 tokens=128"),
        (["model=tiny", "prompt=200"], "prompt=200, tokens=64: tiny has a context of 256", "tokens=56"),
        (["device=nowhere"], "device=nowhere: must be auto, cpu or gpu", "device=auto, or device=cpu, or device=gpu"),
        (["precision=fp8"], "precision=fp8: must be auto, fp32 or bf16", "precision=auto, "),
    ],
)
def test_texts_that_cannot_be_written_are_refused_before_anything_is(words, told, fix, study, capsys):
    assert study("generate_speed").main(words) == 2
    error, remedy = capsys.readouterr().err.splitlines()
    assert error == f"error: {told}"
    assert remedy.startswith(f"  fix: {fix}")


def test_what_lies_between_two_steps_is_told_apart_by_the_logs_rows(study, tmp_path, monkeypatch):
    for owner, name in ((TrainingStep, "__call__"), (MicroBatching, "gradients")):
        monkeypatch.setattr(owner, name, getattr(owner, name))  # and back, after the study has replaced it
    between, seconds = study("between_steps"), 0.02
    marks = between.Marks()
    marks.placed()
    monkeypatch.setattr(Throughput, "_metrics", slowed(Throughput._metrics, seconds))
    train(tmp_path, "trainer.log_every_n_steps=3", "trainer.val_check_interval=12")
    assert [step.row for step in marks.steps] == [False, False, True] * 4
    said = re.fullmatch(
        r"([\d.]+) ms a step; without work ([\d.]+) ms after a step with a row of the log, of 3; "
        r"([\d.]+) ms after a step without a row of the log, of 6; ([\d.]+) ms a step in the mean, [\d.]+ % of it",
        between.told(marks.steps[between.FIRST - 1 :]),
    )
    length, with_row, without, mean = (float(number) for number in said.groups())
    assert with_row >= 1000 * seconds
    assert 0 < without < length
    assert mean == pytest.approx((3 * with_row + 6 * without) / 9, abs=0.02)


def slowed(function, seconds):
    """The function, which then takes that much longer."""

    def longer(*args):
        time.sleep(seconds)
        return function(*args)

    return longer


@pytest.mark.parametrize("word", ["-m", "--multirun"])
def test_steps_of_several_runs_have_nothing_between_them(word, study, capsys):
    assert study("between_steps").main([word, "seed=1,2"]) == 2
    error, fix = capsys.readouterr().err.splitlines()
    assert error == f"error: {word} is several runs"
    assert fix == "  fix: leave it out, with one value for each key"


def test_a_run_ends_with_what_lies_between_its_steps(tmp_path):
    words = [*TINY, "trainer.max_steps=6", "trainer.log_every_n_steps=2", "data.val_sequences=0", "run_name=run"]
    done = subprocess.run(
        [sys.executable, STUDIES / "between_steps.py", *words],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=100,
    )
    assert done.returncode == 0, done.stderr
    last = done.stdout.splitlines()[-1]
    assert re.fullmatch(
        r"[\d.]+ ms a step; without work .* row of the log, of 1; .* of 2; .* in the mean, .* % of it", last
    )
    assert (tmp_path / "outputs/run/summary.json").is_file()


READERLESS = {
    "bare_loop": ["--precision", "bf16", "--steps", "1", "--warmup", "1", "--", *TINY], "block_bytes": [],
    "fp8_gap": ["--help"], "gemms": ["--help"], "generate_speed": ["model=tiny", "tokens=2", "times=1"],
    "gradient_bias": ["--help"], "peaks": ["64"], "power": ["--help"],
}  # fmt: skip


@pytest.mark.parametrize("name", READERLESS)
def test_a_reader_that_ends_costs_no_traceback(name):
    command = [sys.executable, str(STUDIES / f"{name}.py"), *READERLESS[name]]
    program = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    program.stdout.close()
    said = program.stderr.read()
    assert program.wait(timeout=100) == 0
    assert "BrokenPipe" not in said, said


def test_a_study_that_is_interrupted_says_no_more(study, monkeypatch):
    program = study("program")
    monkeypatch.setattr(program.output, "begin", lambda: None)

    def main(argv):
        raise KeyboardInterrupt

    with pytest.raises(SystemExit) as ended:
        program.run(main)
    assert ended.value.code == 130


def test_a_block_has_no_settings(study, capsys):
    """A width that is typed would be one that is not counted."""
    assert study("block_bytes").main(["--width", "512"]) == 2
    assert capsys.readouterr().out == ""


@pytest.mark.skipif(torch.cuda.is_available(), reason="for machines without a GPU")
@pytest.mark.parametrize("name", ["power", "gemms"])
def test_without_a_gpu_a_study_of_one_says_so_in_two_lines(name, study, capsys):
    assert study(name).main([]) == 2
    said = capsys.readouterr()
    assert said.out == ""
    assert [line.partition(":")[0] for line in said.err.splitlines()] == ["error", "  fix"]


def stand_in(folder, monkeypatch, script):
    """Put a program in the place of nvidia-smi."""
    program = folder / "nvidia-smi"
    program.write_text(f"#!/bin/sh\n{script}\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", str(folder), prepend=":")


def test_a_gpu_is_read_while_steps_run_and_no_longer(tmp_path, monkeypatch, study):
    """The stand-in writes readings until it is ended, and notes what it was asked and its process."""
    power, read = study("power"), tmp_path / "read"
    stand_in(
        tmp_path,
        monkeypatch,
        f'cd {shlex.quote(str(tmp_path))}; echo "$@" > asked; echo "[N/A], 1980, 31, 0x0000000000000000"\n'
        'for watts in 600.50 692.10 700.25; do echo "$watts, 1480, 56, 0x0000000000000024"; done\n'
        'echo "650.00, 1500, 57, 0x0000000000000004"; echo $$ > read; exec sleep 600',
    )

    def steps():
        while not (read.exists() and read.read_text().strip()):
            time.sleep(0.01)

    samples = power.sampled(steps, "GPU-1")
    assert [sample.watts for sample in samples] == [600.5, 692.1, 700.25, 650.0]
    assert not Path("/proc", read.read_text().strip()).exists()
    assert (tmp_path / "asked").read_text().split()[:2] == ["--id=GPU-1", f"--query-gpu={power.FIELDS}"]
    assert power.told(samples).splitlines() == [
        "671 W, 1,480 MHz, 56 C: medians of 4 readings",
        "the clock is limited by: software power cap 100 %, software thermal slowdown 75 %",
    ]


def test_a_driver_that_does_not_answer_is_said(tmp_path, monkeypatch, study):
    said = tmp_path / "said"
    stand_in(tmp_path, monkeypatch, f"echo 'NVIDIA-SMI has failed'; : > {shlex.quote(str(said))}; exit 9")
    power = study("power")

    def steps():
        while not said.exists():
            time.sleep(0.01)

    with pytest.raises(power.UserError, match="gave no reading: NVIDIA-SMI has failed"):
        power.sampled(steps, "GPU-1")


def test_steps_run_until_the_time_is_over(study):
    """At least once, however short it is."""
    found = study("bare_loop")
    _, words = found.read(found.parser(None), ["--precision", "fp32", "--", *TINY])
    rates = study("power").steps_for(found.built(words), seconds=0.001)
    assert len(rates) == study("power").CHUNK
    assert min(rates) > 0


def test_every_gemm_of_a_model_has_its_operands(study, monkeypatch):
    """By the formula in the place of cuBLASLt: shapes, formats and what is added are the fused layers'."""
    gemms, calls = study("gemms"), []

    def product(a, b, out, a_scale_inv, b_scale_inv, *, bias, add, fast_accumulate):
        assert a_scale_inv.shape == b_scale_inv.shape == (1,)
        assert a.is_contiguous()
        assert b.is_contiguous()
        total = a.float() @ b.float().t()
        for more in (bias, add):
            total = total if more is None else total + more.float()
        kind = (bias is not None, add is not None, add is out, fast_accumulate, out.dtype)
        calls.append((*a.shape, len(b), a.dtype, b.dtype, *kind))
        return out.copy_(total)

    monkeypatch.setattr(gemms, "matmul", product)
    monkeypatch.setattr(gemms, "CALLS", 2)
    model = load_config("model=gpt2", "model.n_embd=64", "model.n_head=2", "model.vocab_size=320").model
    header, _, *rows = gemms.table(model, 96, 32, "cpu").splitlines()
    assert header.count("|") == 5
    assert [row.split("|")[1].strip() for row in rows] == [
        "qkv 64 x 192", "projection 64 x 64, with the residual added", "fc1 64 x 256",
        "fc2 256 x 64, with the residual added", "head 64 x 320",
    ]  # fmt: skip
    assert all(len(re.findall(r"\d\.\d{3} \([\d,]+\)", row)) == 3 for row in rows)
    e4m3, e5m2, bf16, f32 = torch.float8_e4m3fn, torch.float8_e5m2, torch.bfloat16, torch.float32
    assert list(dict.fromkeys(calls)) == [
        (96, 64, 192, e4m3, e4m3, True, False, False, True, bf16),
        (96, 192, 64, e5m2, e4m3, False, False, False, False, bf16),
        (192, 96, 64, e5m2, e4m3, False, True, True, False, f32),
        (96, 64, 64, e4m3, e4m3, True, True, False, True, bf16),
        (96, 64, 64, e5m2, e4m3, False, False, False, False, bf16),
        (64, 96, 64, e5m2, e4m3, False, True, True, False, f32),
        (96, 64, 256, e4m3, e4m3, True, False, False, True, bf16),
        (96, 256, 64, e5m2, e4m3, False, False, False, False, bf16),
        (256, 96, 64, e5m2, e4m3, False, True, True, False, f32),
        (96, 256, 64, e4m3, e4m3, True, True, False, True, bf16),
        (96, 64, 256, e5m2, e4m3, False, False, False, False, bf16),
        (64, 96, 256, e5m2, e4m3, False, True, True, False, f32),
        (32, 64, 320, e4m3, e4m3, False, False, False, True, bf16),
        (32, 320, 64, e5m2, e4m3, False, False, False, False, bf16),
        (320, 32, 64, e5m2, e4m3, False, True, True, False, f32),
    ]  # fmt: skip


def test_every_command_of_the_documents_is_read(study, tmp_path, monkeypatch):
    """And the runs that they ask for compose."""
    monkeypatch.chdir(tmp_path)
    loops, power = study("bare_loop"), study("power")
    asked = [loops.read(loops.options(), words)[1] for words in documented("bare_loop")]
    assert len(asked) >= 4
    (between,) = documented("between_steps")
    for of_run in [*asked, between]:
        (config,) = preflight(of_run)
        assert config.micro_batch_size == 64
        assert vocabulary(config) == 50257
    (words,) = documented("power")
    options, of_run = loops.read(power.options(), words)
    assert options.seconds == 20
    assert len(preflight(of_run)) == 1
    assert documented("gemms") == [["--rows", "65536"]]


def test_the_bytes_of_a_block_are_those_of_the_page(study, capsys):
    """What bf16 keeps is counted here; the fused layers' count is made of the fields that they keep."""
    assert study("block_bytes").main([]) == 0
    told = capsys.readouterr().out
    page = (STUDIES.parent / "performance.md").read_text().partition("### Bytes of a block")[2].partition("\n## ")[0]
    sums = re.findall(r"^\| sum.*$", told, re.MULTILINE)
    assert len(sums) == 4
    assert all(line in page for line in sums)
    shares = re.search(r"^moved: (\d+)% of bf16, (\d+)% of the (\d+) with the same fusions$", told, re.MULTILINE)
    for figure in (f"{shares[1]} % of what bf16 does", f"FP8 {shares[2]} % of it", f"would move {shares[3]},"):
        assert figure in page
    plain, compiled = map(float, re.search(r"^kept in bf16: ([\d.]+), compiled ([\d.]+)$", told, re.MULTILINE).groups())
    assert (plain, compiled) == (32.1, 32.1)
    assert "32.1 bytes a token and channel in bf16" in page
    assert re.search(r"^kept in FP8, fused: 23 ", told, re.MULTILINE)
    assert documented("block_bytes") == [[]]


def test_what_grows_with_the_micro_batch_is_what_blocks_and_logits_keep():
    """The page's sentence on the peaks, from the figures of its table."""
    page = (STUDIES.parent / "performance.md").read_text()
    table = page.partition("### Micro-batch, format, and norm")[2]
    peaks = {
        size: [
            float(cell.rpartition("), ")[2]) for cell in re.search(rf"^\| {size} x .*", table, re.M)[0].split("|")[2:4]
        ]
        for size in (32, 128)
    }
    bf16, fused = ((large - small) * 2**30 / (96 * 1024) for small, large in zip(peaks[32], peaks[128], strict=True))
    channels, logits = 12 * 768, 2 * 50304
    assert bf16 == pytest.approx(32.1 * channels + logits, rel=0.01)
    assert fused == pytest.approx(23.1 * channels, rel=0.015)
    assert round(100 * fused / bf16) == 54
