"""Every refusal, as a careless user meets it: what is typed, and a key that the message names."""

import shlex
from dataclasses import replace

import pytest

from gpt2_fp8.compose import preflight
from gpt2_fp8.config.checks import check, check_batch
from gpt2_fp8.config.errors import UserError

TABLE = """\
data=mixture -> data
data=text_files -> data.train_files
precision=fp8_e5m2 -> precision
trainer.num_nodes=3 -> trainer.num_nodes
trainer=ddp trainer.shard=node -> trainer.shard
trainer.strategy=fsdp -> trainer.shard
trainer=fsdp trainer.devices=4 trainer.shard=3 -> trainer.shard
trainer=fsdp trainer.devices=1 -> trainer=fsdp
trainer=fsdp optimizer=muon -> optimizer
trainer=fsdp precision.backend=fused -> precision.backend
trainer=fsdp precision=fp32 -> trainer.gather
trainer=fsdp cuda_graphs=true -> cuda_graphs
trainer=fsdp precision=bf16 compile_mode=reduce-overhead -> compile_mode
ckpt_path=last run_name=x init_from=/ -> ckpt_path
model.n_embd=100 model.n_head=3 precision=bf16 -> model.n_embd
global_batch_size=999983 micro_batch_size=999982 -> global_batch_size
trainer.max_steps=5 optim.warmup_steps=10 -> trainer.max_steps
optim.schedule=constant -> optim.schedule
optim.schedule=warmup_stable_decay -> optim.schedule
trainer.max_steps=null -> trainer.max_steps
data=fineweb trainer.max_epochs=1 -> trainer.max_epochs
run_name=x ckpt_path=last debug=fdr -> trainer.fast_dev_run
trainer.max_epochs=1 debug=overfit -> trainer.max_epochs
debug=[fdr,profiler] -> trainer.profiler
callbacks.keep_epochs=true -> callbacks.keep_epochs
callbacks.sample_tokens=0 callbacks.sample_prompt=x -> callbacks.sample_prompt
callbacks=none callbacks.fp8_health_every_n_steps=7 -> callbacks.fp8_health_every_n_steps
callbacks.divergence_sigma=0 callbacks.divergence_steps=7 -> callbacks.divergence_steps
data=text_files data.train_files=[a] data.val_files=[b] data.val_fraction=0.1 -> data.val_fraction=0.1
cuda_graphs=true trainer=cpu -> cuda_graphs
precision.fast_accumulation=true trainer=cpu -> precision.fast_accumulation
trainer.max_time=12h -> trainer.max_time
data.tokenizer=gpt2 model.vocab_size=50000 -> model.vocab_size
model.positions=rope model.head_size=7 precision=bf16 -> model.positions
model.rope_base=1e6 -> model.rope_base
model=llama3_2_1b model.rope_low_freq_factor=4 -> model.rope_low_freq_factor
model.mlp_width=500 -> model.mlp_width
model.head_size=4 model.n_kv_head=1 -> model.n_kv_head
precision.backend=fused model.mlp=swiglu -> precision.backend
model.n_embd=100 -> model.n_embd
recipe=mxfp8 model.n_embd=144 model.n_head=3 -> model.n_embd
'precision.keep_bf16=[blocks.4]' -> precision.keep_bf16
recipe=delayed precision.backward=bf16_wgrad -> no
precision.backend=fused precision.backward=bf16 -> precision.backend
precision.backward=bf16 recipe=delayed -> no
precision.fast_accumulation=true 'precision.keep_bf16=[blocks.*]' -> precision.fast_accumulation
recipe.margin=1 -> recipe.margin
precision.backend=reference -> precision.backend
precision=bf16 precision.backend=fused -> precision.backend
precision.backend=fused document_mask=true -> precision.backend
precision.backend=torchao recipe=delayed -> precision.backend
precision.backend=torchao attention=te -> attention
precision.backend=te recipe=rowwise -> precision.backend
precision.fast_accumulation=true precision.backend=te -> precision.fast_accumulation
activation_checkpointing=true -> activation_checkpointing
document_mask=true attention=cudnn -> attention
compile_mode=reduce-overhead -> compile_mode
compile_mode=reduce-overhead precision=bf16 precision.backend=te -> compile_mode
attention=cudnn trainer=cpu -> attention
optimizer.name=muon -> optimizer.name
optimizer.momentum=0.9 -> optimizer.momentum
model=gpt3 -> model
logger.wandb.project=x -> logger.wandb.entity
logger=csv logger.histograms_every_n_steps=5 -> logger.histograms_every_n_steps
model@encoder=gpt2 -> model@encoder
lr=1e-3 -> lr
optm.lr=1 -> optm
model._target_=os.system -> model._target_
seed=x -> seed
optim.lr=nan -> optim.lr
optim.scalar_lr=0 -> optim.scalar_lr=0
seed=1,2 -> seed
-m 'optim.lr=interval(1,2)' -> BasicSweeper
-m 'experiment=glob(zz*)' -> experiment
-m hydra.job.name=a,b -> hydra.job.name
hydra.callbacks.x._target_=os.system -> hydra.callbacks.x._target_
hydra/launcher=ray -> hydra/launcher
hydra/launcher=slurm -> hydra/launcher=slurm
hydra.sweeper.params.seed=1 -> the
hydra.launcher.n_jobs=2 -> hydra.launcher.n_jobs
hydra.job.chdir=true -> hydra.job.chdir
data=text_files 'data.train_files=[nope/*.txt]' -> data.train_files
data=token_files 'data.train_files=[/etc/passwd]' -> data.val_files
+data@data.sources.web=fineweb -> data.sources
data=mixture +data@data.sources.a=stdlib -> data
data=text_files 'data.train_files=[/]' -> data.train_files
ckpt_path=nope -> ckpt_path
init_from=gpt2 -> init_from
ckpt_path=last -> ckpt_path
run_name=../x -> run_name
data.cache_dir=/dev/null/x -> data.cache_dir
hydra.run.dir=/dev/null -> hydra.run.dir
"""


def refusals(line):
    with pytest.raises(UserError) as caught:
        preflight(shlex.split(line))
    return caught.value.problems


@pytest.mark.parametrize("row", TABLE.splitlines())
def test_a_mistake_is_refused_by_its_key(row):
    line, _, key = row.rpartition(" -> ")
    assert any(key in problem.cause for problem in refusals(line))


GOLDEN = {
    "optim.lr=x": "error: optim.lr=x: must be a number",
    "model.mlp=relu2": "error: model.mlp=relu2: must be gelu, swiglu or relu_squared",  # gelu is no near name
    "learning_rate=1": "error: there is no key learning_rate\n  fix: here it is optim.lr",
    "optim.weight_decai=1": "error: there is no key optim.weight_decai\n  fix: did you mean optim.weight_decay?",
    "precision.backend=fused recipe=current":
        "error: precision.backend=fused cannot run: they do delayed scaling alone, not recipe=current",
    "penalty.foo=1": "error: there is no key penalty.foo\n  fix: penalty has the keys z_loss, logit_l2, activation_l1",
    "steps=3": "error: there is no key steps\n  fix: here it is trainer.max_steps",
    "--optim.lr=3e-4": "error: --optim.lr=3e-4 is no flag of python -m gpt2_fp8.run\n"
                       "  fix: optim.lr=3e-4, without dashes",
    "--dtype=bfloat16": "error: --dtype=bfloat16 is no flag of python -m gpt2_fp8.run\n"
                        "  fix: precision=bf16, fp32 or fp8_hybrid, without dashes",
    "wandb.project=x": "error: there is no key wandb\n  fix: here it is logger.wandb, with 'logger=[default,wandb]'",
    "trainer=dpp": "error: trainer=dpp: there is no such choice\n"
                   "  fix: did you mean trainer=ddp? (the choices are auto, cpu, ddp, fsdp, gpu)",
}  # fmt: skip


@pytest.mark.parametrize("line", GOLDEN)
def test_a_message_is_two_lines_at_most(line):
    (problem,) = refusals(line)
    assert str(problem) == GOLDEN[line]


def test_all_mistakes_are_told_at_once():
    causes = "\n".join(problem.cause for problem in refusals(
        "modle=x trainer=dpp optim.lr=x trainer.max_steps=0 optim.schedule=constant micro_batch_size=3 a={ seed=1,2"
    ))  # fmt: skip
    keys = "modle trainer=dpp optim.lr trainer.max_steps optim.schedule optim.min_lr_ratio micro_batch a={ seed=1,2"
    assert [key for key in keys.split() if key not in causes] == []


@pytest.mark.parametrize(
    ("line", "why"),
    [
        ("data=tinyshakespear data.path=x", "no such choice"),
        ("model=gpt3 model.n_embd=2048", "no such choice"),
        ("recipe=delayd recipe.margin=1", "no such choice"),
        ("data=text_files data.train_files=a(b", "cannot be read"),
    ],
)
def test_what_follows_from_a_wrong_word_is_not_said(line, why):
    (problem,) = refusals(line)
    assert why in problem.cause


def test_a_key_that_follows_another_is_not_blamed():
    assert [p.cause for p in refusals("seed=-1")] == ["seed=-1: must be from 0 to 4294967295"]
    assert [p.cause for p in refusals("seed=-1 data.seed=-2")][1:] == ["data.seed=-2: must be from 0 to 4294967295"]


ACCEPTED = """\
model.head_size=48 model.n_embd=80 model.n_head=3 model.n_kv_head=1
model.positions=rope model.rope_scaling=8
model.n_head=6 model.n_kv_head=3 model.n_embd=96
precision=bf16 recipe=mxfp8 model.n_embd=100 model.n_positions=50
recipe=rowwise model.n_embd=144 model.n_head=3 model.n_positions=240
data=text_files data.train_files=['**/b.txt']
data=text_files data.train_files=~/sub/b.txt
data=text_files data.train_files=[~/sub,sub/b.txt]
init_from=ckpt
"""


@pytest.mark.parametrize("line", ACCEPTED.splitlines())
def test_what_fits_is_accepted(line, tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "sub").mkdir()
    (tmp_path / "sub" / "b.txt").write_text("text")
    (tmp_path / "ckpt").mkdir()
    (config,) = preflight(shlex.split(line))
    assert check(config) == []


def test_batch_once_the_world_is_known():
    (config,) = preflight(["trainer=ddp"])
    check_batch(config, 1)
    with pytest.raises(UserError, match="16 on each of 4 devices"):
        check_batch(config, 4)
    check_batch(replace(config, micro_batch_size=4), 4)
    (config,) = preflight(["trainer=fsdp", "trainer.shard=4", "micro_batch_size=1", "global_batch_size=48"])
    check_batch(config, 8)
    for world_size in (1, 2, 6):
        with pytest.raises(UserError, match="processes"):
            check_batch(config, world_size)


def test_two_sources_of_the_same_files_are_refused_by_any_spelling(tmp_path):
    (tmp_path / "d").mkdir()
    for name in ("good.txt", "other.txt"):
        (tmp_path / "d" / name).write_text("text")
    (tmp_path / "ln.txt").symlink_to(tmp_path / "d" / "good.txt")
    mixed = "data=mixture +data@data.sources.a=text_files +data@data.sources.b=text_files"
    first = f"{mixed} data.sources.a.train_files=[d/good.txt]"
    for word in (f"{tmp_path}/d/good.txt", "d/../d/good.txt", "ln.txt", "d/go*.txt"):
        (problem,) = refusals(f"{first} data.sources.b.train_files=[{word}]")
        assert "data.sources.b" in problem.cause
    assert preflight(f"{first} data.sources.b.train_files=[d/other.txt]".split())


def test_a_run_is_not_written_over_another(tmp_path):
    (tmp_path / "outputs/x/checkpoints/step-00000010").mkdir(parents=True)
    (tmp_path / "outputs/x/checkpoints/step-00000010/manifest.json").write_text("{}")
    assert "outputs/x" in refusals("run_name=x")[0].cause
    assert preflight(["run_name=x", "ckpt_path=last"])


def test_a_folder_that_cannot_be_written_is_refused(tmp_path):
    (tmp_path / "file").write_text("")
    assert "file" in refusals("hydra.run.dir=file/x")[0].cause
    assert preflight(["hydra.run.dir=new/x"])
    assert not (tmp_path / "new").exists()
