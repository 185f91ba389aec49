"""The benchmark of measured plans, on a small folder in the form of the public one."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from benchmarks.runtime.plan_fidelity.gh200 import fit, main, predictions_of, textbook_error
from benchmarks.runtime.plan_fidelity.sailor import read_sailor

FORWARD, BACKWARD, UPDATE, REDUCE = 0.02, 0.04, 0.001, 0.5


def write_folder(folder: Path) -> None:
    """Six blocks. A plan of one stage takes exactly what its profile says."""
    sizes = {"params_floats": 1000, "act_mem_bytes": 4 * 2048 * 100}
    (folder / "llm_info.json").write_text(
        json.dumps({"OPT-350": {tp: {str(n): sizes for n in range(8)} for tp in ("1", "4")}})
    )
    rows = {str(n): [FORWARD, BACKWARD, UPDATE] for n in range(8)}
    times = {m: dict.fromkeys(("1", "4"), rows) for m in ("1", "2")}
    (folder / "profiles_tmp.json").write_text(json.dumps({"OPT-350": {"GH-96": times}}))
    for nodes, stages in ((1, [8]), (2, [4, 4]), (2, [8]), (4, [4, 4])):
        replicas = nodes // len(stages)
        plan = {
            "pipeline_list": [
                {
                    "layers_per_stage": [list(range(number)) for number in stages],
                    "tmp_per_stage": [[[[["GH-96", 4, "z"]], 4]] * replicas] * len(stages),
                    "dp": [replicas] * len(stages),
                }
            ],
            "mbs": 2,
            "gbs": 16 * replicas,
            "real": 8 * 8 * (FORWARD + BACKWARD) + 8 * UPDATE + REDUCE,
            "red_grads": REDUCE,
            "max_mem": 4.5e9,
            "N": nodes,
        }
        place = folder / "gh200" / "OPT-350" / f"N{nodes}"
        place.mkdir(parents=True, exist_ok=True)
        name = f"plan_config_N{nodes}_D{replicas}.json"
        (place / name).write_text(json.dumps(plan))


def test_a_plan_of_one_stage_takes_what_its_profile_says(tmp_path: Path) -> None:
    write_folder(tmp_path)
    sailor = read_sailor(tmp_path)
    plan = next(each for each in sailor.plans if each.name == "OPT-350 N2_D2")
    row = predictions_of(sailor, plan)
    constants = fit([row])
    assert row.step_error(constants, is_reduce_given=True) == pytest.approx(0.0, abs=1e-9)
    assert textbook_error(sailor, plan) == pytest.approx(0.0, abs=1e-9)


def test_the_report_has_each_plan_and_the_sums(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_folder(tmp_path)
    assert main(["--folder", str(tmp_path), "--splits", "2"]) == 0
    text = capsys.readouterr().out
    for each in ("N1_D1", "N2_D1", "N2_D2", "N4_D2", "floor: textbook", "2 random thirds"):
        assert each in text


def test_a_folder_without_plans_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["--folder", str(tmp_path)]) == 2
    assert "the measured plans are not there; give the folder with --folder" in (
        capsys.readouterr().err
    )
