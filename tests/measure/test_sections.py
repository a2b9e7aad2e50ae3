"""The benchmark's sections as programs, on a CPU: a small request in, well-formed rows out. Speeds are not judged."""

import io
import json
import sys
from dataclasses import asdict, replace
from functools import cache

import pytest
import torch

from gpt2_fp8 import compose
from gpt2_fp8.measure import attention, attention_kernels, gemm, peers, timing
from gpt2_fp8.measure.peer_models import PEERS, plain_gpt2
from gpt2_fp8.measure.timing import Unavailable
from gpt2_fp8.model.loss import cross_entropy
from tests import forkserver
from tests.common import CONFIG, VOCAB
from tests.forkserver import ROOT

SMALL = asdict(replace(CONFIG, vocab_size=VOCAB))
ON_CPU = pytest.mark.skipif(torch.cuda.is_available(), reason="says what a CPU answers")


def program(name, request, folder):
    out = folder / "out.json"
    ended = forkserver.python("-m", f"gpt2_fp8.measure.{name}", out, given=json.dumps(request), cwd=ROOT, timeout=300)
    assert ended.returncode == 0, ended.stderr
    assert [path.name for path in folder.iterdir()] == ["out.json"]
    rows = json.loads(out.read_text())
    assert len({tuple(row) for row in rows}) == 1, "every row has the same columns, in the same order"
    for row in rows:
        assert all(value is None or type(value) in (str, int, float) for value in row.values())
        assert row["status"] == "ok" or row["message"]
    return rows


@cache
def config():
    (found,) = compose.preflight(
        ["trainer=cpu", "precision=bf16", "run_name=x", "model.n_layer=1", "model.n_embd=32", "model.n_positions=16"]
    )
    return found


@ON_CPU
def test_gemm(tmp_path):
    rows = program("gemm", {"models": [SMALL, SMALL | {"name": "twin"}], "rows": 32}, tmp_path)
    assert len(rows) == 5 * 3, "a product that two models share is measured once"
    assert {row["status"] for row in rows} == {"ok"}
    assert all(row["tflops"] > 0 and row["fp8_tflops"] is None and "CPU" in row["message"] for row in rows)
    assert rows[0]["product"] == "test qkv, twin qkv"
    assert [row["pass"] for row in rows[:3]] == ["forward", "dgrad", "wgrad"]
    assert [(row["K"], row["N"]) for row in rows[::3]] == [(32, 96), (32, 32), (32, 128), (128, 32), (32, 320)]


@pytest.mark.parametrize("kind", gemm.PASSES)
def test_operands_have_the_shapes_of_a_layers_products(kind):
    m, k, n = 48, 16, 32
    results = {"forward": (m, n), "dgrad": (m, k), "wgrad": (n, k)}
    size = gemm.sizes(kind, m, k, n)
    assert 2 * size[0] * size[1] * size[2] == 2 * m * n * k
    a, b = gemm.plain_operands(kind, size, "cpu")
    assert (a @ b).shape == results[kind]
    a, b = gemm.fp8_operands(kind, size, "cpu")
    assert (a.float() @ b.float()).shape == results[kind]
    assert a.is_contiguous()
    assert b.t().is_contiguous()
    assert b.dtype == torch.float8_e4m3fn
    assert a.dtype == (torch.float8_e4m3fn if kind == "forward" else torch.float8_e5m2)


@ON_CPU
def test_attention(tmp_path):
    rows = program("attention", {"models": [SMALL], "micro_batch_size": 64}, tmp_path)
    assert [row["kernel"] for row in rows] == list(attention_kernels.KERNELS)
    by_name = {row["kernel"]: row for row in rows}
    for name in ("standard", "SDPA FLASH_ATTENTION"):
        row = by_name[name]
        assert (row["status"], row["batch"], row["tokens"]) == ("ok", 1, 16)
        assert "CPU" in row["message"]
        assert row["error"] < 0.02
        assert row["both_ms"] > 0
    assert by_name["SDPA CUDNN_ATTENTION"]["status"] == "refused"
    assert by_name["FlashAttention 3"]["status"] == "not installed"
    assert by_name["FlashAttention 3"]["forward_ms"] is None


def test_flops_of_causal_attention():
    shape = attention_kernels.Shape(batch=2, tokens=8, n_head=3, head_size=4)
    products = 2 * (2 * 8 * 8 * 4)  # Q K^T and P V, a multiplication and an addition each, of one head
    assert attention.forward_flops(shape) == 2 * 3 * products / 2
    assert attention.BACKWARD == 2.5


def test_a_kernel_that_computes_something_else_shows():
    shape = attention_kernels.Shape(batch=2, tokens=16, n_head=2, head_size=8)
    right = attention.measure(attention_kernels.materialised, shape, "cpu")

    def not_causal(shape, device):
        def attend(packed):
            q, k, v = (p.unflatten(2, (2, 8)).transpose(1, 2) for p in packed.split(16, dim=2))
            return torch.nn.functional.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)

        return attend

    wrong = attention.measure(not_causal, shape, "cpu")
    assert right["error"] < 0.02
    assert wrong["error"] > 0.3


def test_shared_keys_and_values_are_measured_where_a_kernel_has_them():
    shape = attention_kernels.Shape(batch=2, tokens=16, n_head=4, head_size=8, n_kv_head=2)
    assert attention._shape(SMALL | {"n_head": 2, "n_kv_head": 1}, 3)[1].heads.n_kv_head == 1
    for build in (attention_kernels.materialised, attention_kernels._sdpa("MATH")):
        assert attention.measure(build, shape, "cpu")["error"] < 0.02
    with pytest.raises(Unavailable, match="as many key-value heads as heads"):
        attention_kernels._packed(lambda packed, causal: packed, shape)


@ON_CPU
def test_peers_of_gpt2_refuse_another_model(tmp_path):
    asked = replace(config(), model=replace(config().model, norm="rms_norm"))
    request = {"config": asdict(asked), "steps": 2, "warmup": 1, "peers": ["plain torch", "torchao float8"]}
    ours, theirs = program("peers", request, tmp_path)
    assert ours["status"] == "ok"
    assert (theirs["status"], theirs["message"]) == ("refused", "its layers here have no RMSNorm")
    row = peers.rows(request | {"peer": "transformers"})
    assert [(r["status"], r["message"]) for r in row] == [("refused", "none of its classes computes this model")]


LLAMA = {"norm": "rms_norm", "mlp": "swiglu", "positions": "rope", "n_kv_head": 1, "bias": False, "tied_head": False}


@pytest.mark.parametrize("more", [{}, {"qk_norm": True}], ids=["LlamaForCausalLM", "Qwen3ForCausalLM"])
def test_transformers_has_llama_and_qwen(more):
    """The same number of parameters as ours, by transformers' own class."""
    pytest.importorskip("transformers")
    asked = replace(config(), model=replace(config().model, **LLAMA, **more))
    theirs, ours = (peers.measure(name, asked, steps=1, warmup=0) for name in ("transformers", "plain torch"))
    assert theirs["note"].startswith("Qwen3ForCausalLM" if more else "LlamaForCausalLM")
    assert theirs["parameters"] == ours["parameters"]
    assert theirs["loss"] == pytest.approx(5.55, abs=0.5)


@pytest.mark.parametrize("tuple_too", [False, True])
def test_packed_kernels_get_queries_keys_and_values_in_order(tuple_too):
    shape = attention_kernels.Shape(batch=2, tokens=8, n_head=2, head_size=4)

    def kernel(packed, causal):  # what flash_attn_qkvpacked_func computes, over [batch, tokens, 3, n_head, head_size]
        assert packed.shape == (2, 8, 3, 2, 4)
        q, k, v = (part.transpose(1, 2) for part in packed.unbind(2))
        y = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=causal).transpose(1, 2)
        return (y, None) if tuple_too else y

    found = attention.measure(lambda shape, device: attention_kernels._packed(kernel, shape), shape, "cpu")
    assert found["error"] < 0.02


@ON_CPU
def test_peers(tmp_path):
    request = {"config": asdict(config()), "steps": 2, "warmup": 1, "peers": ["plain torch", "Transformer Engine"]}
    ours, te = program("peers", request, tmp_path)
    assert (ours["name"], ours["status"]) == ("plain torch", "ok"), ours["message"]
    assert 0 < ours["slowest"] <= ours["tokens_per_second"] <= ours["fastest"]
    assert ours["loss"] == pytest.approx(5.55, abs=0.5)  # ln 257: the ids are random
    assert "CPU" in ours["note"]
    assert te["status"] in ("refused", "not installed")
    assert te["tokens_per_second"] is None


def test_a_peer_that_hangs_is_a_row():
    request = {"config": asdict(config()), "steps": 1, "warmup": 0, "peers": ["plain torch"], "timeout_s": 0.05}
    (row,) = peers.rows(request)
    assert (row["status"], row["tokens_per_second"]) == ("timed out", None)


@pytest.mark.parametrize("name", ["transformers", "torchao float8"])
def test_a_peer_that_is_not_installed_says_so(name, monkeypatch):
    module = {"transformers": "transformers", "torchao float8": "torchao.float8"}[name]
    for missing in (module.partition(".")[0], module):  # one of them may have been imported by another test
        monkeypatch.setitem(sys.modules, missing, None)
    (row,) = peers.rows({"config": asdict(config()), "steps": 1, "warmup": 0, "peer": name})
    assert (row["status"], row["message"]) == ("not installed", f"{module} is not installed")
    assert list(row) == ["name", "version", "status", "message", *peers.COLUMNS]


@pytest.mark.parametrize("name", ["transformers", "torchao float8"])
def test_a_peer_that_is_installed_trains(name):
    pytest.importorskip(name.partition(" ")[0])
    row = peers.measure(name, config(), steps=1, warmup=1)
    assert row["status"] == "ok"
    assert row["loss"] == pytest.approx(5.55, abs=0.5)


def test_the_plain_model_is_gpt2():
    """The model that others convert computes what ours does, given its weights."""
    torch.manual_seed(0)
    plain, ours = plain_gpt2(CONFIG, VOCAB), PEERS["plain torch"][0](CONFIG, VOCAB, "cpu").model
    names = {"norm.": "head.layer_norm_", "norm_1.": "qkv.layer_norm_", "norm_2.": "mlp.layer_norm_",
             "fc1.": "mlp.fc1_", "fc2.": "mlp.fc2_"}  # fmt: skip
    state = {}
    for name, value in plain.state_dict().items():
        for theirs, own in names.items():
            name = name.replace(theirs, own)
        state[name] = value
    ours.load_state_dict(state)
    ids = torch.randint(VOCAB, (2, 17))
    inputs, targets = ids[:, :-1], ids[:, 1:]
    torch.testing.assert_close(plain.logits(inputs), ours(inputs), atol=1e-5, rtol=1e-4)
    all_columns = cross_entropy(ours(inputs), targets, plain.head.out_features, fused=False)
    torch.testing.assert_close(plain(inputs, targets), all_columns, atol=1e-5, rtol=1e-4)


def test_rows_say_how_a_measurement_ended():
    def refuse():
        raise Unavailable("refused", "no such kernel")

    def run_out():
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 GiB")

    def break_down():
        raise ValueError("of another's making")

    ends = [timing.measured({"name": "x"}, ("ms",), end) for end in (refuse, run_out, break_down)]
    assert [row["status"] for row in ends] == ["refused", "out of memory", "failed"]
    assert ends[1]["message"] == "wanted 20.00 GiB more"
    assert ends[2]["message"] == "ValueError: of another's making"
    assert all(list(row) == ["name", "status", "message", "ms"] for row in ends)


def test_rows_before_a_crash_are_kept_and_it_is_said(tmp_path, monkeypatch):
    out = tmp_path / "out.json"

    def rows(request):
        yield {"name": "first", "status": "ok", "message": None}
        (kept, end) = json.loads(out.read_text())
        assert (kept["name"], kept["status"]) == ("first", "ok")
        assert (end["status"], end["message"]) == ("failed", timing.UNFINISHED)
        yield {"name": "second", "status": "ok", "message": None}

    monkeypatch.setattr(sys, "argv", ["x", str(out)])
    monkeypatch.setattr(sys, "stdin", io.StringIO("{}"))
    timing.program(rows)
    assert [row["name"] for row in json.loads(out.read_text())] == ["first", "second"]


def test_installed_tells_missing_from_broken(tmp_path, monkeypatch):
    (tmp_path / "broken_kernels.py").write_text("import a_package_that_it_needs\n")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(Unavailable, match="absent_kernels is not installed"):
        timing.installed("absent_kernels")
    with pytest.raises(ModuleNotFoundError, match="a_package_that_it_needs"):
        timing.installed("broken_kernels")
