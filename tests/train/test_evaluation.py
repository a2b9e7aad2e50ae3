"""The program `evaluate`: a run's own validation loss to the last bit, other text and precisions, ranked endings."""

import json
import math
import re
import shlex
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn.functional import cross_entropy

from gpt2_fp8 import evaluate
from gpt2_fp8.config.errors import Diverged, UserError
from gpt2_fp8.config.programs import Item, read_ranking
from gpt2_fp8.data.tokenizer import load_file, load_tokenizer
from gpt2_fp8.train import trained
from gpt2_fp8.train.module import GPT2Module
from gpt2_fp8.train.ranking import count_right, encode, encode_pair, log_likelihoods
from tests.data.tokenizers_made import write_ranks
from tests.runs import checkpoint, summary, train

TEXT = "To be, or not to be, that is the question: é\n" * 60
ITEMS = [
    {"ctx": "import", "endings": ["os", "qzxj vv", "sys as a long word"], "label": 0},
    {"ctx": "def f(a, b):", "endings": ["return a", "\x00\x01", "x", "     "[:4] + "y"], "label": "2"},
    {"ctx": "", "endings": ["a", "bcd"], "label": 1},
    {"ctx": "x" * 60, "endings": ["return a " * 3, "b"], "label": 1},
]


@pytest.fixture(scope="module")
def run(tmp_path_factory: Any) -> Path:
    folder = tmp_path_factory.mktemp("runs") / "first"
    train(folder, "callbacks.keep_checkpoints=9", "trainer.val_check_interval=4")
    return folder


@pytest.fixture(autouse=True)
def _here(tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "other.txt").write_text(TEXT)
    (tmp_path / "items.jsonl").write_text("\n".join(map(json.dumps, ITEMS)))


def evaluated(*words: str) -> dict[str, Any]:
    assert evaluate.main([*words, "out=result.json"]) == 0
    found: dict[str, Any] = json.loads(Path("result.json").read_text())
    return found


def test_the_loss_is_the_runs_own_to_the_last_bit(run: Path, capsys: Any) -> None:
    found = evaluated(f"ckpt_path={run}")
    assert (found["loss"], found["checkpoint"]) == (summary(run)["last_val_loss"], str(checkpoint(run, 12)))
    assert (found["tokens"], found["sequences"], found["precision"]) == (8 * 32, 8, "fp32")
    assert found["perplexity"] == math.exp(found["loss"])
    assert f"{found['loss']:.6f}" in capsys.readouterr().out
    best = evaluated(str(run), "checkpoint=best")
    assert best["loss"] == summary(run)["best_val_loss"]
    many = evaluated(f"ckpt_path={run}", "data.val_sequences=400")  # with ids that end documents and have no bytes
    assert 0 < many["tokens"] - many["bytes"] < many["tokens"] / 100
    assert many["bits_per_byte"] == pytest.approx(many["loss"] * many["tokens"] / many["bytes"] / math.log(2))
    assert evaluated(f"ckpt_path={checkpoint(run, 4)}")["loss"] not in (found["loss"], best["loss"])


def test_the_figures_are_those_of_the_logits(run: Path) -> None:
    """On another text, computed here: the ids that are held out, their loss and their bytes, of 2 bytes an é."""
    words = ["data=text_files", "data.train_files=[other.txt]", "data.val_fraction=0.5", "data.val_sequences=20"]
    found = evaluated(f"ckpt_path={run}", *words, "data.num_workers=0")
    module = GPT2Module.load_from_checkpoint(checkpoint(run, 12))
    held_out = TEXT.encode()[len(TEXT.encode()) // 2 :]
    length = found["sequences"] * 32 + 1
    ids = next(  # the tail begins after a newline
        part for start in range(len(held_out)) if held_out[start - 1 : start] == b"\n"
        and len(part := held_out[start : start + length]) == length
    )  # fmt: skip
    blocks = torch.tensor(list(ids))
    total = sum(
        float(cross_entropy(module(blocks[None, at : at + 32])[0], blocks[at + 1 : at + 33], reduction="sum"))
        for at in range(0, length - 1, 32)
    )
    assert found["tokens"] == found["bytes"] == length - 1
    assert found["loss"] == pytest.approx(total / (length - 1), rel=1e-5)
    assert found["bits_per_byte"] == pytest.approx(total / math.log(2) / (length - 1), rel=1e-5)
    assert found["data"] == "text_files"


def test_a_loss_that_is_not_finite_is_no_result(tmp_path: Path, capsys: Any) -> None:
    with pytest.raises(Diverged):
        train(tmp_path / "dead", "optim.lr=1e30", "optim.warmup_steps=0", "trainer.max_steps=4")
    assert evaluate.main([f"ckpt_path={tmp_path / 'dead'}", "out=result.json"]) == 3
    assert "the loss on this text is nan" in capsys.readouterr().err
    assert not Path("result.json").exists()


def test_delayed_scales_come_from_the_checkpoint(tmp_path: Path) -> None:
    """A run in FP8, emulated: its own last loss again, by the scales that it ended with."""
    train(tmp_path / "fp8", "precision.backend=emulated", "recipe=delayed")
    assert evaluated("ckpt_path=fp8")["loss"] == summary(tmp_path / "fp8")["last_val_loss"]


def test_a_mixture_is_evaluated_source_by_source(run: Path) -> None:
    words = [
        "data=mixture", "+data@data.sources.code=stdlib", "+data@data.sources.words=text_files",
        "data.sources.words.train_files=[other.txt]", "data.sources.words.val_fraction=0.5",
        "data.sources.words.num_workers=0", "data.sources.code.val_sequences=8",
        "data.sources.words.val_sequences=8",
    ]  # fmt: skip
    found = evaluated(f"ckpt_path={run}", *words)
    assert (found["sources"].keys(), found["sources"]["code"]) == ({"code", "words"}, summary(run)["last_val_loss"])
    assert found["loss"] == pytest.approx(sum(found["sources"].values()) / 2, rel=1e-6)


# Ranking


def score(module: Any, context: str, ending: str) -> float:
    """The log-likelihood of an ending, token by token, in bytes: each byte is a token."""
    ids = [*(context.encode() or [256]), *b" ", *ending.encode()]
    total = 0.0
    for place in range(len(ids) - len(ending.encode()) - 1, len(ids)):
        seen = torch.tensor([ids[:place][-32:]])
        total += float(module(seen)[0, -1].double().log_softmax(-1)[ids[place]])
    return total


def test_ids_are_moved_to_the_layers(run: Path) -> None:
    """As in a ranking, which makes them on the CPU. The meta device stands in for a GPU: nothing is computed there."""
    module = GPT2Module.load_from_checkpoint(checkpoint(run, 12))
    module.model.to("meta")
    module.model.forward = lambda ids, *_: torch.empty(*ids.shape, 320, device=ids.device)  # type: ignore[method-assign]
    assert module(torch.zeros(2, 8, dtype=torch.int64)).device.type == "meta"


def test_endings_are_ranked_by_their_probabilities(run: Path, capsys: Any) -> None:
    """Items whose texts fit: against the logits of one token after another."""
    Path("rank.jsonl").write_text("\n".join(map(json.dumps, ITEMS[:3])) + "\n\n")
    found = evaluated(f"ckpt_path={run}", "ranking=rank.jsonl", "micro_batch_size=2")["ranking"]
    module = GPT2Module.load_from_checkpoint(checkpoint(run, 12))
    right = {"acc": 0, "acc_norm": 0}
    for item in ITEMS[:3]:
        endings: list[str] = item["endings"]  # type: ignore[assignment]
        sums = [score(module, str(item["ctx"]), ending) for ending in endings]
        normed = [value / len(ending) for value, ending in zip(sums, endings, strict=True)]
        for name, values in (("acc", sums), ("acc_norm", normed)):
            right[name] += values.index(max(values)) == int(str(item["label"]))
        encoded = [encode_pair(load_tokenizer("bytes"), str(item["ctx"]), ending) for ending in endings]
        assert log_likelihoods(module, encoded, 2) == pytest.approx(sums, rel=1e-5)
    assert {name: found[name] for name in right} == {name: count / 3 for name, count in right.items()}
    assert (found["items"], found["acc_stderr"]) == (3, pytest.approx(math.sqrt(found["acc"] * (1 - found["acc"]) / 2)))
    assert "acc_norm" in capsys.readouterr().out


def test_what_does_not_fit_is_cut_at_the_front_and_halved_in_memory() -> None:
    """As lm-eval cuts. The stand-in model predicts that a byte follows itself, and takes two rows at most."""
    sizes: list[tuple[int, ...]] = []

    def logits_of(ids: torch.Tensor) -> torch.Tensor:
        sizes.append(tuple(ids.shape))
        if len(ids) > 2:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return torch.nn.functional.one_hot(ids.long(), 257) * 10.0

    items = [Item("ab" * 40, ("aaa", "b"), 0)] * 3
    endings = encode(load_tokenizer("bytes"), items, 16)
    sums = log_likelihoods(logits_of, endings, rows=4)
    assert sizes == [(4, 16), (2, 16), (2, 16), (2, 16)]
    assert count_right(items, sums)["acc_norm"] == 1.0
    with pytest.raises(torch.OutOfMemoryError):
        log_likelihoods(logits_of, endings, rows=4, least=4)
    assert sizes[4:] == [(4, 16)]


def test_a_run_names_its_own_key_of_endings_that_cannot_be_scored(tmp_path: Path) -> None:
    (tmp_path / "long.jsonl").write_text(json.dumps({"ctx": "a", "endings": ["b" * 40, "c"], "label": 0}))
    with pytest.raises(UserError, match=r"^error: callbacks\.ranking, item 1, ending bbb"):
        train(tmp_path / "run", f"callbacks.ranking={tmp_path / 'long.jsonl'}")


def test_pairs_are_encoded_as_lm_eval_does() -> None:
    """Blanks at the end of a beginning are the ending's; the two are encoded together."""
    encoded = encode_pair(load_tokenizer("bytes"), "ab  ", "c")
    assert encoded == ([*b"ab   c"], 4)
    assert encode_pair(load_tokenizer("bytes"), "", "c") == ([256, *b" c"], 2)
    merged = load_file(str(write_ranks(Path("tokenizer.model"))))  # it has " the"
    assert encode_pair(merged, "x", "the") == (merged.encode_ordinary("x the"), 1)


def test_hellaswags_own_lines_are_prepared_as_lm_eval_does() -> None:
    row = {
        "ind": 24, "activity_label": "Roof shingle removal", "ctx_a": "A man is [header] on a roof. [title] He",
        "ctx_b": "he", "ctx": "not this", "endings": ["is [step] up.", " pulls  off. "], "label": 1,
    }  # fmt: skip
    Path("h.jsonl").write_text(json.dumps(row))
    problems: list[Any] = []
    assert read_ranking("h.jsonl", problems) == [
        Item("Roof shingle removal: A man is on a roof.. He He", ("is up.", "pulls off."), 1)
    ]
    assert problems == []


# Refusals

REFUSED = [
    "", "ckpt_path=gone data=stdlip", "ckpt_path=damaged", "RUN data=text_files",
    "RUN data=text_files data.val_files=[short.txt]", "RUN data.val_sequences=0", "RUN data.tokenizer=gpt2",
    "RUN model.n_layer=2", "RUN optim.lr=1", "RUN precision=fp8_hybrid precision.fallback=error", "RUN trainer=ddp",
    "RUN rankin=x", "RUN ranking=bad.jsonl", "RUN ranking=items.jsonl out=items.jsonl", "RUN data=stdlib,text_files",
]  # fmt: skip


@pytest.mark.parametrize("words", REFUSED)
def test_what_is_wrong_is_refused_by_its_key(run: Path, capsys: Any, words: str) -> None:
    if "damaged" in words:
        shutil.copytree(checkpoint(run, 12), "damaged")
        Path("damaged/model.safetensors").write_bytes(b"x")
    if "short.txt" in words:
        Path("short.txt").write_text("short")
    if "bad.jsonl" in words:
        Path("bad.jsonl").write_text(f"{json.dumps(ITEMS[0])}\n\n" + '{"ctx": 3}\n')
    assert evaluate.main([f"ckpt_path={run}" if word == "RUN" else word for word in shlex.split(words)]) == 2
    out, said = capsys.readouterr()
    assert out == ""
    assert re.fullmatch(r"(?:data: .*\n)*error: .*\n(  fix: .*\n)?", said), said
    keys = [word.partition("=")[0] for word in words.split() if word != "RUN"] or ["ckpt_path"]
    assert any(key in said for key in keys) or "evaluate" in said or "text is too short" in said


def test_bad_lines_are_named_by_their_numbers() -> None:
    lines = ['{"ctx": "a", "endings": ["b"], "label": 0}', '{"ctx": "a", "endings": ["b", "c"], "label": 2}', "{", "[]"]
    Path("bad.jsonl").write_text("\n".join([json.dumps(ITEMS[0]), *lines]))
    problems: list[Any] = []
    assert len(read_ranking("bad.jsonl", problems)) == 1
    assert [problem.cause.split(":")[0] for problem in problems] == [
        f"ranking=bad.jsonl, line {n}" for n in (2, 3, 4, 5)
    ]


def test_a_strangers_configuration_runs_no_code_and_reads_no_environment(run: Path) -> None:
    """Plug-ins, callbacks and `${...}` that a checkpoint holds are left out, or stay text."""
    config = trained.load(str(run), "last").config
    odd = replace(
        config, plugins=["os_of_a_stranger"], notes="${oc.env:HOME}", run_name="${oc.env:HOME}",
        callbacks=replace(config.callbacks, extra=["theirs"]),
    )  # fmt: skip
    made = evaluate.configuration(evaluate.read_words([f"ckpt_path={run}", "data=stdlib"]), odd)
    assert (made.plugins, made.callbacks.extra, made.notes) == ([], [], "${oc.env:HOME}")
