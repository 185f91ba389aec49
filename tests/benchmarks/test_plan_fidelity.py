"""The fidelity benchmark: quoted rows are predicted, wrong files refused."""

from __future__ import annotations

from pathlib import Path

import pytest
from benchmarks.runtime.plan_fidelity import hybrid
from benchmarks.runtime.plan_fidelity.__main__ import main, predict
from benchmarks.runtime.plan_fidelity.architectures import MPT, named, of_parameters
from benchmarks.runtime.plan_fidelity.case import predicted
from benchmarks.runtime.plan_fidelity.fsdp import cases_of
from benchmarks.runtime.plan_fidelity.megatron import EIGHT
from benchmarks.runtime.plan_fidelity.megatron import cases_of as megatron_cases
from benchmarks.runtime.plan_fidelity.report import rank_correlation
from benchmarks.runtime.plan_fidelity.rows import read_rows

from holdfast.plan.cost.workload import Workload
from holdfast.plan.hardware.devices import load_devices

# llm-foundry (Apache-2.0), scripts/train/benchmarking: six rows
FSDP = """\
Model,SeqLen (T),# GPUs,GPU,MicroBatchSize,GradAccum,Throughput (T/s/GPU),Precision,MP Mode,\
Sharding Strategy,Activation Checkpointing,NumParams
7b,2048,128,a100_40gb,18,1,3623,bf16,PURE,FULL_SHARD,True,6658859008
7b,16384,8,a100_40gb,1,4,2249,bf16,PURE,FULL_SHARD,True,6717579264
3b,2048,8,a100_40gb,5,8,10065,bf16,PURE,FULL_SHARD,False,2651837440
1b,8192,8,a100_40gb,2,8,13474,bf16,PURE,FULL_SHARD,False,1328533504
350m,512,8,a100_40gb,64,4,66284,bf16,PURE,FULL_SHARD,False,354412544
125m,2048,16,a100_40gb,26,1,130535,bf16,PURE,FULL_SHARD,False,125311488
"""


# Megatron-Bridge (Apache-2.0), performance summary: three rows, without columns that say no more
HYBRID = """\
release,model,System,gpus,Precision,GBS,MBS,Sequence Length,FSDP,TP,PP,CP,VP,EP,tok_s_gpu
26.06,LLAMA3.1_405B,DGX-H100,1024,FP8,1536,1,8192,,8,8,2,8,n/a,326
26.04,LLAMA3_70B,DGX-GB200,64,MXFP8,256,1,8192,0,2,4,1,5,n/a,3828
26.06,Qwen3_30B_a3B,DGX-GB300,8,MXFP8,512,8,4096,,1,1,1,n/a,8,45275
"""


@pytest.fixture
def rows(tmp_path: Path) -> Path:
    path = tmp_path / "rows.csv"
    path.write_text(FSDP, "utf-8")
    return path


def test_the_product_s_table_predicts_rows_that_were_measured(rows: Path) -> None:
    devices = load_devices()
    for case in cases_of(read_rows(rows), devices):
        assert predicted(case, devices) == pytest.approx(case.measured, rel=0.12), case.label


def test_the_product_s_table_predicts_hybrid_layouts(tmp_path: Path) -> None:
    path = tmp_path / "hybrid.csv"
    path.write_text(HYBRID, "utf-8")
    devices = load_devices()
    for case in hybrid.cases_of(read_rows(path), devices):
        assert predicted(case, devices) == pytest.approx(case.measured, rel=0.15), case.label


def test_a_batch_that_no_layout_divides_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "hybrid.csv"
    path.write_text(HYBRID.replace("FP8,1536", "FP8,1537"), "utf-8")
    assert main(["--rows", str(path), "--data", str(tmp_path)]) == 2
    said = capsys.readouterr().err
    assert said.startswith(f"{path}:2: GBS 1537 is no multiple of MBS x DP = 8; state GBS 1536")


def test_constants_of_other_models_rows_predict_a_model(rows: Path) -> None:
    devices = load_devices()
    cases = cases_of(read_rows(rows), devices)
    found = predict(cases, cases, devices, are_alike=False)
    assert sum(abs(each.error) for each in found) / len(found) < 15
    assert {each.source.rows for each in found} == {4, 5}


def test_one_time_of_megatron_is_near() -> None:
    devices = load_devices()
    case = next(each for each in megatron_cases(EIGHT, devices) if "175b" in each.label)
    assert predicted(case, devices) == pytest.approx(case.measured, rel=0.15)


def test_shapes_have_the_published_numbers_of_parameters() -> None:
    for name, number in (
        ("LLAMA3_70B", 70.6e9),
        ("LLAMA3.1_405B", 405.9e9),
        ("Qwen3_30B_a3B", 30.5e9),
        ("Qwen3_235B_a22B", 235.1e9),
        ("DeepSeekV3", 683e9),
        ("Kimi_K2", 1027e9),
        ("GPT OSS 120B", 116.8e9),
        ("Nemotron_3_Nano", 31.6e9),
        ("Nemotron_3_Super", 126e9),
    ):
        shape = named(name)
        assert shape is not None
        parameters = Workload(name, shape.layers(4096), 4096, 1).parameters
        assert parameters == pytest.approx(number, rel=0.03), name


def test_a_shape_from_a_number_of_parameters_is_said() -> None:
    shape = of_parameters(6_658_859_008, 50368, 2048)
    assert shape.depth == MPT["7b"].depth
    assert shape.dim == MPT["7b"].dim
    assert "32 blocks of width 4096" in shape.note


def test_missing_columns_are_derived(rows: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text = FSDP.replace("GradAccum,", "").replace(",1,3623", ",3623").replace(",4,2249", ",2249")
    lines = text.splitlines()[:3]
    rows.write_text("\n".join(lines) + "\n", "utf-8")
    assert main(["--rows", str(rows), "--data", str(rows.parent)]) == 0
    assert "fsdp: 2 rows" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        ("a100_40gb", "a100_60gb", "there is no device 'A100-60'"),
        ("7b,2048,128", "7b,zwei,128", "'zwei' in 'SeqLen (T)' is no positive number"),
        ("bf16,PURE", "int4,PURE", "the precision 'int4' is not known"),
        ("Model,", "Name,", "the header has no column 'Model'"),
        (",PURE,FULL_SHARD,True,6658859008", ",PURE", "cells where the header names"),
    ],
)
def test_wrong_files_are_refused_with_line_and_remedy(
    rows: Path, capsys: pytest.CaptureFixture[str], old: str, new: str, said: str
) -> None:
    rows.write_text(FSDP.replace(old, new, 1), "utf-8")
    assert main(["--rows", str(rows), "--data", str(rows.parent)]) == 2
    message = capsys.readouterr().err
    assert said in message
    assert message.startswith(f"{rows}:")
    assert "; " in message


def test_ranks_of_equal_values_are_shared() -> None:
    assert rank_correlation([1, 2, 3], [10, 20, 30]) == pytest.approx(1)
    assert rank_correlation([1, 2, 2, 3], [1, 2, 2, 3]) == pytest.approx(1)
    assert rank_correlation([1, 2, 3], [3, 2, 1]) == pytest.approx(-1)
