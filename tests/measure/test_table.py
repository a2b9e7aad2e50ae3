from dataclasses import replace

import pytest

from gpt2_fp8 import compose
from gpt2_fp8.bench import Measured, case_rows, kernel_rows, ratio
from gpt2_fp8.config.shown import table
from gpt2_fp8.measure.case import WAITS, Case, Kernel, Result


def measured(precision="bf16", size=4, rate=100.0, compiled=True, **result):
    (config,) = compose.preflight([f"precision={precision}", f"micro_batch_size={size}", f"global_batch_size={size}"])
    values = {
        "status": "ok", "ran": precision, "tokens_per_second": rate, "slowest": rate, "fastest": rate,
        "backend": "reference" if precision == "bf16" else "te",
        "layers": "te" if precision != "bf16" else "compiled" if compiled else "plain",
        "compiled": compiled and precision == "bf16",
    } | result  # fmt: skip
    return Measured(Case(config=config, steps=2, warmup=1), Result(**values))


@pytest.fixture(autouse=True)
def _elsewhere(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


def test_columns_are_aligned_and_stand_if_they_hold_anything():
    rows = [{"a b": "x", "n": "1,234", "empty": None}, {"a b": "long|er", "n": "0.5", "more": 2}]
    assert table(rows).splitlines() == [
        "| a b      |     n | more |",
        "| -------- | ----: | ---: |",
        "| x        | 1,234 |      |",
        "| long\\|er |   0.5 |    2 |",
    ]
    assert table([]) == ""


def test_the_kernel_of_attention_is_shown_where_one_was_asked_for():
    cases = [measured(attention="torch's cuDNN kernel") for _ in range(2)]
    config = replace(cases[1].config, attention="cudnn")
    asked = Measured(replace(cases[1].case, config=config), cases[1].result)
    assert [row["attention"] for row in case_rows([cases[0], asked])] == ["", "torch's cuDNN kernel"]
    assert "attention" not in table(case_rows([cases[0]]))


def test_the_ratio_is_to_compiled_bf16_on_the_same_work():
    plain, compiled, other = measured(rate=50, compiled=False), measured(rate=100), measured(size=8, rate=1)
    fp8, alone = measured("fp8_hybrid", rate=150), measured("fp8_hybrid", size=2)
    every = [plain, compiled, other, fp8, alone]
    assert [ratio(m, every) for m in every] == [0.5, 1.0, 1.0, 1.5, None]


def test_bf16_in_place_of_fp8_is_no_baseline():
    fell_back = measured("fp8_hybrid", ran="bf16", reason="no FP8 here")
    assert ratio(fell_back, [fell_back]) is None
    assert case_rows([fell_back])[0]["note"] == "ran bf16: no FP8 here"


def test_kernels_beyond_the_first_are_one_row_and_waits_another():
    kernels = [Kernel(name=f"k{i}", milliseconds=4 - i, share=(4 - i) / 10, calls=1) for i in range(4)]
    kernels.insert(1, Kernel(name=WAITS, milliseconds=2, share=0.25, calls=3))
    rows = kernel_rows(Result(status="ok", profile=kernels), count=2)
    assert [(row["kernel"], row["calls"]) for row in rows] == [("k0", 1), ("k1", 1), ("2 others", 2), (WAITS, 3)]
    assert (rows[2]["ms"], rows[2]["share"]) == ("3.000", "30.0%")
