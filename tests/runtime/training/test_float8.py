"""float8 products (`train.precision: fp8`), as torchao emulates them on a CPU.

They take minutes, so the campaign runs them, and `make test-fp8` alone.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torchao")

from holdfast.core.sharding.run_table import run_state_table
from tests.runtime.training.test_recover import survivors
from tests.support.checkpoints import newest_tensors
from tests.support.commands import write_run_file
from tests.support.faulty_trainer import DEEDS
from tests.support.layouts import case, config_of, curve_of, engine_for
from tests.support.ranks import ROOT, RankContext, rank_values
from tests.support.step_recovery import undisturbed

pytestmark = pytest.mark.slow

STEPS = 6


def _trained(rank: RankContext, layout: str) -> dict[str, Any]:
    config = config_of(case(layout).changes)
    made = engine_for(rank, layout, config)
    table = {spec.name: spec for spec in run_state_table(config)}
    for local in made.state():
        assert str(local.tensor.dtype) == "torch.float32"
        assert local.global_shape == table[local.name].shape
    found = curve_of(made, STEPS)
    made.close()
    return found


def _run(layout: str) -> list[dict[str, Any]]:
    return rank_values(_trained, case(layout).world_size, {"layout": layout})


def test_it_stays_near_bf16_and_replicas_change_no_bit() -> None:
    (alone,), (half,) = _run("shallow.fp8.one"), _run("shallow.wider.bf16.one")
    assert alone["losses"] != half["losses"]
    assert alone["losses"] == pytest.approx(half["losses"], rel=0.01)
    for found in _run("shallow.fp8.dp3"):
        assert found == alone


@pytest.mark.parametrize("layout", ["zero1.2", "shard2", "zero2.2", "tp2", "plain.tp2", "pp2"])
def test_every_axis_trains_near_one_process(layout: str) -> None:
    (alone,) = _run("shallow.fp8.one")
    for found in _run(f"shallow.fp8.{layout}"):
        assert found["losses"] == pytest.approx(alone["losses"], rel=0.01)


@pytest.mark.parametrize("policy", ["full", "selective"])
def test_recomputation_changes_no_bit(policy: str) -> None:
    assert _run(f"shallow.{policy}.fp8.one") == _run("shallow.fp8.one")


def test_one_of_three_replicas_is_killed() -> None:
    found = survivors("fp8.dp3", 2, "voted", "fp8.dp2", [0, 1])
    (alone,) = undisturbed("fp8.one")
    assert len(found) == 2
    for value in found:
        assert value["curve"] == alone["curve"]


SETTINGS = (
    *("train.precision=fp8", "train.steps=12", "train.evaluate.every=0", "model.dim=64"),
    *("model.heads=4", "model.kv_heads=2", "model.ffn_dim=128"),
    *("data.sequence_length=16", "checkpoint.every_steps=4", "cluster.threads_per_worker=1"),
    *("train.schedule.steps=12", "device=cpu"),
)


def _command(run_file: Path, folder: Path, *settings: str, **deeds: Any) -> None:
    told = {"float8 anywhere": True, **deeds}
    found = subprocess.run(
        [
            *(sys.executable, "-m", "tests.support.faulty_trainer", run_file),
            *(f"folder={folder}", *SETTINGS, *settings),
        ],
        cwd=ROOT,
        env={**os.environ, DEEDS: json.dumps(told)},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert found.returncode == 0, found.stdout + found.stderr


def test_runs_that_are_stopped_killed_or_of_bf16_save_alike(tmp_path: Path) -> None:
    """The real command: killed workers and a resume change no bit, and no checkpoint tells of
    float8 in its names, shapes or dtypes."""
    run_file = write_run_file(tmp_path)
    alone, killed, resumed, half = (tmp_path / name for name in ("a", "k", "r", "h"))
    two = "layout.workers=2"
    _command(run_file, alone, two)
    _command(run_file, killed, two, **{"raise": [[1, 1, 6]]})
    _command(run_file, resumed, two, "train.steps=6")
    _command(run_file, resumed, two)
    _command(run_file, half, two, "train.precision=bf16")
    last = newest_tensors(alone, 12)
    assert newest_tensors(killed, 12) == last
    assert newest_tensors(resumed, 12) == last
    other = newest_tensors(half, 12)
    assert {n: len(b) for n, b in other.items()} == {n: len(b) for n, b in last.items()}
    assert other != last
