"""Hugging Face's weights in and out: logits equal to transformers', every bit back, and what cannot be expressed."""

import functools
import json
import re
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from gpt2_fp8 import compose, evaluate, export, generate, import_hf
from gpt2_fp8.checkpoint import files
from gpt2_fp8.checkpoint.manifest import CheckpointError
from gpt2_fp8.config import hf_config
from gpt2_fp8.config.errors import UserError
from gpt2_fp8.config.schema import ModelConfig
from gpt2_fp8.data.tokenizer import load_tokenizer
from gpt2_fp8.layers import reference
from gpt2_fp8.layers.block import Composed
from gpt2_fp8.model.gpt2 import GPT2, initialise
from gpt2_fp8.train import huggingface
from gpt2_fp8.train.module import GPT2Module
from tests.common import CONFIG
from tests.data.tokenizers_made import write_json
from tests.runs import checkpoint, train

IDS = 257
MATRICES = ("c_attn.weight", "c_proj.weight", "c_fc.weight")  # of GPT-2
BOUND = 1e-5  # of the logits' standard deviation; 6e-6 was seen, as transformers has RoPE's angles in float32
LLAMA3 = {
    "rope_type": "llama3", "rope_theta": 5e5, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8,
}  # fmt: skip
SIZES = {
    "vocab_size": IDS, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
    "max_position_embeddings": 64, "bos_token_id": None, "eos_token_id": None, "pad_token_id": None,
}  # fmt: skip
GPT2_SIZES = {
    "vocab_size": IDS, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64, "bos_token_id": None,
    "eos_token_id": None,
}  # fmt: skip
THEIRS = {
    "GPT-2": lambda: transformers.GPT2Config(**GPT2_SIZES, layer_norm_epsilon=1e-3),
    "GPT-2, untied": lambda: transformers.GPT2Config(**GPT2_SIZES, n_inner=48, tie_word_embeddings=False),
    "Llama 3.2": lambda: transformers.LlamaConfig(
        **SIZES, num_key_value_heads=2, rope_parameters=LLAMA3, tie_word_embeddings=True
    ),
    "Llama, biases, linear": lambda: transformers.LlamaConfig(
        **SIZES, num_key_value_heads=1, head_dim=16, attention_bias=True, mlp_bias=True, rms_norm_eps=1e-3,
        rope_parameters={"rope_type": "linear", "rope_theta": 1e4, "factor": 4.0},
    ),
    "Qwen3": lambda: transformers.Qwen3Config(
        **SIZES, num_key_value_heads=2, head_dim=16, rope_parameters={"rope_type": "default", "rope_theta": 1e6}
    ),
}  # fmt: skip


def save_theirs(folder: Path, name: str, **options: Any) -> Any:
    """A model of transformers, in which every parameter is random and so matters, saved to a folder."""
    torch.manual_seed(7)
    model = transformers.AutoModelForCausalLM.from_config(THEIRS[name]()).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.2)
    model.save_pretrained(folder, **options)
    return model


def expressed(folder: Path, **changes: Any) -> ModelConfig:
    return replace(CONFIG, **hf_config.read_folder(folder)[1] | changes)


def built(model: ModelConfig, weights: dict[str, torch.Tensor] | None = None) -> GPT2:
    made = GPT2(model, IDS, Composed(reference, recompute="none")).eval()
    initialise(made, 3)
    with torch.no_grad():
        for parameter in made.parameters():
            parameter[..., : model.n_embd].add_(torch.randn(parameter[..., : model.n_embd].shape) * 0.1)
        made.tokens.weight[IDS:].zero_()
        made.head.weight[IDS:].zero_()
    if weights is not None:
        made.load_state_dict(weights)
    return made


@torch.no_grad()
def apart(ours: GPT2, theirs: Any) -> float:
    """How far logits lie apart, of ids up to the last position."""
    ids = torch.randint(0, IDS, (3, 64), generator=torch.Generator().manual_seed(1))
    there = theirs(ids).logits
    assert 0.1 < there.std() < 20
    return float((ours(ids)[..., :IDS] - there).abs().max() / there.std())


def write_checkpoint(path: Path, model: ModelConfig, weights: dict[str, torch.Tensor]) -> None:
    plain = asdict(_base()) | {"model": asdict(model)}
    files.write(path, {"state_dict": dict(weights), "hyper_parameters": plain, "global_step": 0})


@functools.cache
def _base() -> Any:
    return compose.preflight(["run_name=r"])[0]


def edited(folder: Path, **changes: Any) -> Path:
    """Change keys of a folder's `config.json`; `None` removes one."""
    text = json.loads((folder / "config.json").read_bytes()) | changes
    (folder / "config.json").write_text(json.dumps({key: value for key, value in text.items() if value != "gone"}))
    return folder


def test_the_first_gpt2_folders_are_read(tmp_path: Path) -> None:
    """Without the prefix, with masks as tensors, with the head a second time, in a single file."""
    theirs = save_theirs(tmp_path, "GPT-2")
    stored = {key.removeprefix("transformer."): value for key, value in theirs.state_dict().items()}
    masks = {f"h.{i}.attn.bias": torch.ones(1, 1, 64, 64).tril().to(torch.uint8) for i in range(2)}
    masks |= {f"h.{i}.attn.masked_bias": torch.tensor(-1e4) for i in range(2)}
    save_file({key: value.clone() for key, value in (stored | masks).items()}, tmp_path / "model.safetensors")
    edited(tmp_path, tie_word_embeddings="gone", layer_norm_epsilon=1e-3)
    model = expressed(tmp_path)
    assert apart(built(model, huggingface.read_weights(tmp_path, model, IDS)), theirs) < BOUND


@pytest.mark.parametrize("bias", [True, False])
def test_a_checkpoint_of_nanogpt_comes_in_by_the_code_of_the_page(
    bias: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its names are Hugging Face's, its matrices lie the other way round, and biases may be missing."""
    monkeypatch.chdir(tmp_path)
    theirs = save_theirs(tmp_path / "theirs", "GPT-2").state_dict()
    stored = {name: value.T if name.endswith(MATRICES) else value for name, value in theirs.items()}
    stored = {f"_orig_mod.{name}": value for name, value in stored.items() if bias or not name.endswith(".bias")}
    shape = {"n_layer": 2, "n_head": 4, "n_embd": 32, "block_size": 64, "vocab_size": IDS, "bias": bias, "dropout": 0.0}
    torch.save({"model": stored, "optimizer": {}, "model_args": shape, "iter_num": 5, "config": {}}, "ckpt.pt")
    page = Path(__file__).resolve().parents[2] / "docs/coming-from.md"
    code, _ = re.findall(r"```python\n(.*?)```", page.read_text(), re.DOTALL)
    exec(code, {})
    weights = load_file("from_nanogpt/model.safetensors")
    for name, value in weights.items():
        kept = bias or not name.endswith(".bias")
        assert torch.equal(value, theirs[name] if kept else torch.zeros_like(value)), name
    assert hf_config.read_folder(Path("from_nanogpt"))[1]["n_positions"] == 64


def test_narrow_weights_become_the_same_numbers_in_float32(tmp_path: Path) -> None:
    save_theirs(tmp_path, "Qwen3").to(torch.bfloat16).save_pretrained(tmp_path)
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)
    model = expressed(tmp_path)
    weights = huggingface.read_weights(tmp_path, model, IDS)
    assert {weight.dtype for weight in weights.values()} == {torch.float32}
    assert apart(built(model, weights), theirs.eval()) < BOUND


REFUSED = [
    ("Llama 3.2", {"architectures": ["MistralForCausalLM"]}, "['MistralForCausalLM']"),
    ("Llama 3.2", {"architectures": "gone", "model_type": "gemma"}, "model_type 'gemma'"),
    ("Llama 3.2", {"rope_parameters": LLAMA3 | {"rope_type": "yarn"}}, "rope_type='yarn'"),
    ("Llama 3.2", {"rope_parameters": LLAMA3 | {"partial_rotary_factor": 0.5}}, "partial_rotary_factor=0.5"),
    ("Llama 3.2", {"hidden_act": "gelu"}, "hidden_act='gelu', not 'silu'"),
    ("Llama 3.2", {"attention_bias": True}, "attention_bias without mlp_bias"),
    ("Llama 3.2", {"quantization_config": {"bits": 4}}, "its weights are quantized"),
    ("Llama 3.2", {"hidden_size": "gone"}, "its config.json cannot be read: KeyError('hidden_size')"),
    ("Llama 3.2", {"hidden_size": "wide"}, "its config.json cannot be read: ValueError("),
    ("GPT-2", {"activation_function": "relu"}, "activation_function='relu', not 'gelu_new'"),
    ("GPT-2", {"scale_attn_by_inverse_layer_idx": True}, "scale_attn_by_inverse_layer_idx=True"),
    ("Qwen3", {"use_sliding_window": True}, "use_sliding_window=True"),
    ("Qwen3", {"layer_types": ["sliding_attention"] * 2}, "layer_types other than full_attention"),
]


@pytest.mark.parametrize(("name", "changes", "cause"), REFUSED, ids=[cause for _, _, cause in REFUSED])
def test_what_no_key_says_is_refused(tmp_path: Path, name: str, changes: Any, cause: str) -> None:
    THEIRS[name]().save_pretrained(tmp_path)
    save_file({}, tmp_path / "model.safetensors")
    architecture = {"GPT-2": "GPT2LMHeadModel", "Llama 3.2": "LlamaForCausalLM", "Qwen3": "Qwen3ForCausalLM"}[name]
    edited(tmp_path, architectures=[architecture])
    assert hf_config.read_folder(tmp_path)[0].name == architecture
    with pytest.raises(UserError) as caught:
        hf_config.read_folder(edited(tmp_path, **changes))
    (problem,) = caught.value.problems
    assert cause in problem.cause


def test_every_difference_is_told_with_the_word_to_type_and_then_taken(tmp_path: Path) -> None:
    save_theirs(tmp_path / "hf", "Llama 3.2")
    words = ["run_name=r", "precision=fp32", f"init_from={tmp_path / 'hf'}"]
    with pytest.raises(UserError) as caught:
        compose.preflight(words)
    told = [problem.remedy for problem in caught.value.problems]
    assert all(problem.cause.startswith(problem.remedy.partition("=")[0]) for problem in caught.value.problems)
    assert set(told) == {
        "model.norm=rms_norm", "model.norm_epsilon=1e-06", "model.mlp=swiglu", "model.positions=rope",
        "model.rope_base=500000.0", "model.rope_scaling=8.0", "model.rope_low_freq_factor=1.0",
        "model.rope_high_freq_factor=4.0", "model.rope_original_positions=8", "model.n_layer=2", "model.n_embd=32",
        "model.bias=false", "model.n_kv_head=2", "model.mlp_width=48", "model.n_positions=64",
    }  # fmt: skip
    (config,) = compose.preflight([*words, *told])
    assert (config.model.n_kv_head, config.model.rope_scaling) == (2, 8.0)
    (shorter,) = compose.preflight([*words, *told, "model.n_positions=32"])
    assert shorter.model.n_positions == 32, "a run may use fewer positions than RoPE's model has"


def test_damaged_weights_are_refused(tmp_path: Path) -> None:
    save_theirs(tmp_path, "GPT-2", max_shard_size="20KB")
    model, index = expressed(tmp_path), tmp_path / "model.safetensors.index.json"
    names = json.loads(index.read_bytes())["weight_map"]
    first = tmp_path / names["transformer.wte.weight"]
    some = {key: file for key, file in names.items() if file != names["transformer.h.0.mlp.c_fc.weight"]}
    whole = first.read_bytes()
    for weight_map, content, named in [
        (some, whole, "transformer.h.0.mlp.c_fc.weight"), ({"a": "../a.safetensors"}, whole, "../a.safetensors"),
        ({"a": "gone.safetensors"}, whole, "gone.safetensors"), (names, whole[:-8], "cannot be read"),
    ]:  # fmt: skip
        index.write_text(json.dumps({"weight_map": weight_map}))
        first.write_bytes(content)
        with pytest.raises(CheckpointError) as caught:
            huggingface.read_weights(tmp_path, model, IDS)
        assert named in str(caught.value)
    save_file({"transformer.wte.weight": torch.zeros(IDS, 32, dtype=torch.int32)}, first)
    with pytest.raises(CheckpointError, match="int32"):
        huggingface.read_weights(tmp_path, model, IDS)


def test_folders_of_pickles_are_refused(tmp_path: Path) -> None:
    save_theirs(tmp_path, "GPT-2")
    (tmp_path / "model.safetensors").rename(tmp_path / "pytorch_model.bin")
    with pytest.raises(UserError, match="pickles") as caught:
        hf_config.read_folder(tmp_path)
    assert "save_pretrained" in caught.value.problems[0].remedy


def test_a_model_that_no_class_computes_is_not_exported() -> None:
    changes: Any
    for changes in ({"norm": "rms_norm"}, {"bias": False}, {"n_kv_head": 2}):
        with pytest.raises(UserError, match="GPT2LMHeadModel"):
            huggingface.choose_architecture(replace(CONFIG, vocab_size=IDS, **changes), Path("x"))


def test_a_run_begins_with_a_folder_and_its_checkpoint_goes_back(tmp_path: Path, capsys: Any) -> None:
    """With a tokenizer of a file, which is gone when the run is exported."""
    theirs = save_theirs(tmp_path / "hf", "GPT-2")
    tokenizer = write_json(tmp_path / "t", [chr(i) for i in range(256)], ["</s>"], "</s>")
    keys = {"n_layer": 2, "n_head": 4, "n_embd": 32, "n_positions": 64, "norm_epsilon": 1e-3}
    words = [f"model.{key}={value}" for key, value in keys.items()]
    few = ["trainer.max_steps=1", "optim.warmup_steps=0", "optim.lr=1e-12", "trainer.val_check_interval=1"]
    train(tmp_path / "run", *words, *few, f"init_from={tmp_path / 'hf'}", f"data.tokenizer={tokenizer}")
    (tokenizer / "tokenizer.json").unlink()
    module = GPT2Module.load_from_checkpoint(checkpoint(tmp_path / "run", 1))
    assert apart(module.model, theirs) < BOUND, "a step with next to no learning rate"
    assert export.main([str(tmp_path / "run"), str(tmp_path / "out")]) == 2
    assert not (tmp_path / "out").exists()
    error = capsys.readouterr().err
    assert str(tokenizer) in error
    assert "--no-tokenizer" in error
    assert export.main([str(tmp_path / "run"), str(tmp_path / "out"), "--no-tokenizer"]) == 0
    assert capsys.readouterr().out.startswith(f"{tmp_path / 'out'}: GPT2LMHeadModel, ")
    assert f"| began from | {tmp_path / 'hf'} |" in (tmp_path / "out" / "README.md").read_text()
    back = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out").eval()
    assert apart(module.model, back) < BOUND
    assert back.config.eos_token_id is None, "the tokenizer's file is gone"


@pytest.mark.parametrize("name", THEIRS)
def test_an_imported_folder_is_a_checkpoint_and_goes_back_bit_for_bit(tmp_path: Path, name: str, capsys: Any) -> None:
    theirs = save_theirs(tmp_path / "in", name, max_shard_size="20KB")
    assert len(list((tmp_path / "in").glob("model-*.safetensors"))) > 1
    assert import_hf.main([str(tmp_path / "in"), str(tmp_path / "own")]) == 2
    assert "tokenizer" in capsys.readouterr().err
    assert import_hf.main([str(tmp_path / "in"), str(tmp_path / "own"), "data.tokenizer=bytes"]) == 0
    module = GPT2Module.load_from_checkpoint(tmp_path / "own")
    assert apart(module.model, theirs) < BOUND
    assert generate.main([f"ckpt_path={tmp_path / 'own'}", "prompt=ab", "tokens=4", "temperature=0"]) == 0
    assert export.main([str(tmp_path / "own"), str(tmp_path / "out")]) == 0
    there, back = theirs.state_dict(), load_file(tmp_path / "out" / "model.safetensors")
    if module.config.model.tied_head:
        del there["lm_head.weight"]
    assert back.keys() == there.keys()
    assert all(torch.equal(back[key], there[key]) for key in there)
    asked, said = (json.loads((tmp_path / place / "config.json").read_bytes()) for place in ("in", "out"))
    assert (said["architectures"], said["eos_token_id"]) == (asked["architectures"], 256)


def test_an_exported_folder_has_the_tokenizer_and_says_what_the_run_knows(tmp_path: Path, capsys: Any) -> None:
    """Bytes, and a file that was changed after training."""
    few = ["trainer.max_steps=2", "optim.warmup_steps=0", "trainer.val_check_interval=2"]
    train(tmp_path / "run", *few)
    assert export.main([str(tmp_path / "run"), str(tmp_path / "out")]) == 0
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path / "out")
    back = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    assert tokenizer("aé").input_ids == [97, 195, 169]
    assert back.config.vocab_size == len(tokenizer) == 257
    card = (tmp_path / "out" / "README.md").read_text()
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert f"| parameters | {back.num_parameters():,} |" in card
    assert f"| validation loss | {summary['last_val_loss']:.4f} nats a token" in card
    own = write_json(tmp_path / "t", [chr(i) for i in range(256)], ["</s>"], "</s>")
    train(tmp_path / "own", *few, f"data.tokenizer={own}")
    write_json(tmp_path / "t", [chr(i) for i in reversed(range(256))], ["</s>"], "</s>")
    load_tokenizer.cache_clear()
    capsys.readouterr()
    for program, *words in ((export, str(tmp_path / "other")), (evaluate,), (generate, "prompt=a")):
        assert program.main([str(tmp_path / "own"), *words]) == 2
        assert "its content is not what the run was trained with" in capsys.readouterr().err
