"""State in bf16 and 8 bits through layouts: replicas, ZeRO, stages, tp, a restore and a loss."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from holdfast.core.sharding.boxes import Box
from holdfast.core.sharding.run_table import run_state_table
from tests.runtime.training.test_recover import survivors
from tests.support.layouts import (
    as_numpy,
    assert_all_state,
    case,
    config_of,
    engine_for,
    load_pieces,
    one_step,
    pieces,
    save_pieces,
)
from tests.support.marks import in_campaign
from tests.support.ranks import RankContext, rank_values
from tests.support.step_recovery import assert_undisturbed, undisturbed
from tests.support.tiny_training import digest

HALF, STEPS = 3, 6
ITEM = {"U8": torch.uint8, "BF16": torch.bfloat16, "F32": torch.float32}


def _trained(rank: RankContext, layout: str, to: str, start: str) -> list[Any]:
    """Return the losses, and the digest of the last state. With `start`, restore that state, and
    write what the rank holds then to `to`. Without, write the state after `HALF` steps."""
    config = config_of(case(layout).changes)
    made = engine_for(rank, layout, config)
    table = {spec.name: spec for spec in run_state_table(config)}
    for local in made.state():
        assert local.global_shape == table[local.name].shape
        assert local.tensor.dtype == ITEM[table[local.name].dtype]
    if start:
        whole = _whole(start)
        made.load(lambda box, tensor: _read(whole, box, tensor))
        save_pieces(f"{to}-{rank.rank}.npz", pieces(made))
    losses = []
    for step in range(HALF + 1 if start else 1, STEPS + 1):
        losses.append(one_step(made, step).mean_loss)
        if step == HALF and to:
            save_pieces(f"{to}-{rank.rank}.npz", pieces(made))
    found = [*losses, digest(made)]
    made.close()
    return found


def _whole(path: str) -> dict[str, np.ndarray]:
    return {name: values for name, _, values in load_pieces(f"{path}-0.npz")}


def _read(whole: dict[str, np.ndarray], box: Box, tensor: Tensor) -> None:
    part = whole[box.name][tuple(slice(a, b) for a, b in zip(box.offsets, box.stops, strict=True))]
    as_numpy(tensor)[...] = part


def _run(layout: str, to: str | Path = "", start: str | Path = "") -> list[list[Any]]:
    arguments = {"layout": layout, "to": str(to), "start": str(start)}
    return rank_values(_trained, case(layout).world_size, arguments)


@pytest.mark.parametrize("short", ["state8bit", in_campaign("statebf16")])
def test_replicas_change_no_bit(short: str) -> None:
    curves = {
        tuple(found) for layout in ("one", "dp3") for found in _run(f"shallow.{short}.{layout}")
    }
    assert len(curves) == 1


def _restored(short: str, layouts: tuple[str, ...], folder: Path) -> None:
    """A restore has the bits that were saved, in any layout; and the losses follow as before."""
    half = folder / "half"
    (curve,) = _run(f"shallow.{short}.one", half)
    for layout in layouts:
        name = f"shallow.{short}.{layout}"
        found = _run(name, folder / layout, half)
        files = [Path(f"{folder / layout}-{rank}.npz") for rank in range(len(found))]
        assert_all_state(_whole(str(half)), files, 0.0)
        for losses in found:
            assert losses[:-1] == pytest.approx(curve[HALF:STEPS], rel=2e-3)


@pytest.mark.parametrize("short", ["state8bit", in_campaign("statebf16")])
def test_zero_1_restores_the_bits(short: str, tmp_path: Path) -> None:
    _restored(short, ("zero1.2",), tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("short", ["state8bit", "statebf16"])
def test_each_cut_restores_the_bits(short: str, tmp_path: Path) -> None:
    cuts = ("zero2.2", "shard2", "pp2", "dp2-shard2", "zero1.3", "tp2")
    _restored(short, cuts if short == "statebf16" else cuts[:-1], tmp_path)


@pytest.mark.slow
def test_tensor_parallelism_cuts_between_blocks(tmp_path: Path) -> None:
    _restored("state8bit.wide", ("tp2", "dp2-tp2", "pp2-tp2"), tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("when", ["forward", "voted", "applied"])
@pytest.mark.parametrize("short", ["state8bit", "statebf16"])
def test_one_of_three_replicas_is_killed(short: str, when: str) -> None:
    found = survivors(f"{short}.dp3", 2, when, f"{short}.dp2", [0, 1])
    assert len(found) == 2
    assert_undisturbed(found, f"{short}.one")


@pytest.mark.slow
@pytest.mark.parametrize("short", ["state8bit", "statebf16"])
def test_state_moves_to_a_replica_that_joins(short: str) -> None:
    """A newcomer gets the state of the survivors, by messages."""
    found = survivors(f"{short}.dp2", 1, "forward", f"{short}.dp2", [0, None])
    (alone,) = undisturbed(f"{short}.one")
    for value in found:
        assert value["digest"] == alone["digest"]
