"""State off the device changes no bit, and the bytes on the device are those of the formula."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed import HashStore  # type: ignore[attr-defined]

from holdfast.config.sections.memory import GB, MOVABLE, MemoryConfig
from holdfast.config.sections.optimizer import OptimizerConfig
from holdfast.config.sections.train import TrainConfig
from holdfast.core.sharding.optimizer_state import ParameterSettings
from holdfast.core.sharding.update_pieces import GRAIN, cut_into_pieces, staged_elements
from holdfast.errors import StateMemoryError
from holdfast.plan.memory.estimate import rank_estimate
from holdfast.plan.memory.placed_memory import placed_by_rank
from holdfast.training.memory.ledger import MemoryLedger
from holdfast.training.memory.places import StateMemory
from holdfast.training.optimizers.offloaded_adamw import OffloadedAdamW
from holdfast.training.optimizers.optimizer import AdamW
from tests.support.layouts import (
    case,
    config_of,
    curve_of,
    engine_for,
    engine_of,
    one_step,
    topology_of,
)
from tests.support.marks import in_campaign
from tests.support.ranks import RankContext, rank_values
from tests.support.tiny_training import CPU, digest

STEPS = 3
SHAPES = ((3, GRAIN + 5), (7,), (0, 4), (2 * GRAIN,), (33, 129))
LAYOUTS = (
    *("one", "dp2", "dp3", "zero1.2", "zero2.2", "shard2", "tp2", "pp2", "pp4"),
    *("dp2-zero1.2", "dp2-shard2", "dp2-tp2", "pp2-shard2", "pp2-dp2", "pp3+pp2"),
)
PEAKS = (
    *("one", "dp2", "dp3", "tp2", "pp2", "pp4", "dp2-tp2", "pp2-dp2", "full.pp2", "selective.tp2"),
    *("zero1.2", "bf16.zero1.2", "zero2.2", "bf16.zero2.2", "shard2", "bf16.shard2"),
    *("full.shard2", "selective.bf16.shard2", "shard2-tp2", "dp2-shard2", "pp2-shard2"),
    *("pp2-zero1.2", "pp2-zero2.2", "once.zero2.2", "bf16.once.zero2.2"),
)
"""Layouts whose peak is compared, with and without recomputation."""
MOVED = (
    ("file", "host", "file"),
    ("host", "file", "host"),
    ("file", "device", "device"),
    ("device", "host", "device"),
)
"""Places of the optimizer's state, of gradients, and of parameters if they are cut."""


# --- an update ------------------------------------------------------------------------------
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("update", ["device", "host"])
@pytest.mark.parametrize("place", ["host", "file"])
def test_an_update_in_pieces_has_the_same_bits(
    dtype: torch.dtype, place: str, update: str, tmp_path: Path
) -> None:
    """Pieces of 4,096 elements, of tensors that do not divide by that, in two groups."""
    generator = torch.Generator().manual_seed(1)
    plain = [torch.randn(shape, generator=generator, dtype=dtype) for shape in SHAPES]
    moved = [tensor.clone() for tensor in plain]
    settings = [ParameterSettings(0.1 if len(shape) > 1 else 0.0) for shape in SHAPES]
    config, piece = OptimizerConfig(), GRAIN * dtype.itemsize / 1e6
    places = MemoryConfig.model_validate(
        {
            "optimizer": place,
            "gradients": place,
            "folder": str(tmp_path),
            "piece_mb": piece,
            "update": update,
        }
    )
    memory = StateMemory(places, CPU)
    sums = [memory.zeros("gradients", [shape], dtype)[0] for shape in SHAPES]
    direct = [torch.zeros_like(tensor) for tensor in plain]
    one = AdamW(plain, direct, settings, config)
    other = OffloadedAdamW(moved, sums, settings, config, {}, memory)
    for step in range(1, 5):
        for first, second in zip(direct, sums, strict=True):
            second.copy_(first.copy_(torch.randn(first.shape, generator=generator, dtype=dtype)))
        one.apply(step, 0.01, 3.7)
        other.apply(step, 0.01, 3.7)
    for first, second in zip(plain, moved, strict=True):
        assert torch.equal(first, second)
    for slot, same in zip(one.slots, other.slots, strict=True):
        for left, right in zip(slot.tensors, same.tensors, strict=True):
            assert left is not None
            assert right is not None
            assert torch.equal(left, right)
    assert os.listdir(tmp_path) == []  # a file has no name, so nothing is left
    nbytes = {kind: int(sums[0]) for kind, sums in memory.transfers.take().items()}
    one_way = 4 * dtype.itemsize * sum(tensor.numel() for tensor in plain)
    stays = place == "host" and update == "host"  # nothing is copied
    assert nbytes == ({} if stays else {"gradients": one_way, "optimizer": 4 * one_way})


def test_pieces_cover_each_element_once() -> None:
    groups = [[(0, 3 * GRAIN + 5), (1, 7)], [(2, 2 * GRAIN)]]
    pieces = cut_into_pieces(groups, 2 * GRAIN)
    found: dict[int, list[int]] = {}
    for piece in pieces:
        assert piece.size <= 2 * GRAIN
        for part in piece.parts:
            assert part.start % GRAIN == 0
            found.setdefault(part.index, []).extend(range(part.start, part.stop))
    sizes = {index: length for group in groups for index, length in group}
    assert found == {index: list(range(length)) for index, length in sizes.items()}
    assert staged_elements(pieces) == 3 * 2 * GRAIN


# --- a run ----------------------------------------------------------------------------------
def _train(rank: RankContext, layout: str, memory: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the curve, and the most bytes in each place."""
    made = engine_for(rank, layout, _config(layout, memory))
    curve = curve_of(made, STEPS)
    assert made.parameters.memory is not None
    ledger = made.parameters.memory.ledger
    peaks = {place: ledger.peak(place) for place in ("device", "host", "file")}
    made.close()
    return [curve, peaks]


def _config(layout: str, memory: dict[str, Any]) -> Any:
    """A model that is large enough for the padding of buffers to be small."""
    wide = {"model__dim": 128, "model__ffn_dim": 384, "train__precision": "fp32"}
    if memory.get("parameters", "device") != "device":
        wide["layout__dp_shard"] = case(layout).replicas[0].dp_shard
    return config_of(wide | case(layout).changes | {"train__memory": memory})


def _memory(folder: Path, layout: str, places: tuple[str, str, str]) -> dict[str, Any]:
    memory: dict[str, Any] = dict(zip(MOVABLE, places, strict=True))
    if not all(one.dp_shard > 1 for one in case(layout).replicas) or (
        "zero1" in layout or "once" in layout
    ):
        memory["parameters"] = "device"
    return memory | {"folder": str(folder), "piece_mb": 0.04}


def _compare(layout: str, moved: Sequence[tuple[str, str, str]], folder: Path) -> None:
    plain = rank_values(_train, case(layout).world_size, {"layout": layout, "memory": {}})
    for places in moved:
        memory = _memory(folder, layout, places)
        found = rank_values(_train, case(layout).world_size, {"layout": layout, "memory": memory})
        config = _config(layout, memory)
        placed = placed_by_rank(config, topology_of(case(layout), config))
        for rank, (one, other) in enumerate(zip(plain, found, strict=True)):
            assert one[0] == other[0], places
            for place, nbytes in other[1].items():
                assert nbytes == pytest.approx(getattr(placed[rank], place), rel=0.05), place
    assert os.listdir(folder) == []


QUICK = ("bf16.zero1.2",)


@pytest.mark.parametrize(
    "layout",
    [
        name if name in QUICK else in_campaign(name)
        for name in (*LAYOUTS, *(f"bf16.{name}" for name in LAYOUTS))
    ],
)
def test_places_change_no_bit_and_the_device_has_what_the_formula_says(
    layout: str, tmp_path: Path
) -> None:
    _compare(layout, MOVED[:1] if layout in QUICK else MOVED, tmp_path)


def _peak(rank: RankContext, layout: str, memory: dict[str, Any]) -> tuple[int, int]:
    """(most bytes of the device, the estimate), under a limit that is never reached."""
    config = _config(layout, memory)
    made = engine_for(rank, layout, config)
    curve_of(made, 2)
    assert made.parameters.memory is not None
    found = made.parameters.memory.ledger.peak("device")
    said = rank_estimate(config, made.groups.topology, made.groups.coordinate).peak
    made.close()
    return found, said


@pytest.mark.slow
@pytest.mark.parametrize("layout", PEAKS)
def test_the_peak_of_the_device_with_activations_is_the_estimate(
    layout: str, tmp_path: Path
) -> None:
    for places in (("device", "device", "device"), MOVED[0], MOVED[2]):
        memory = _memory(tmp_path, layout, places) | {"device_gb": 1}
        _compare_peak(layout, memory)


def _compare_peak(layout: str, memory: dict[str, Any]) -> list[int]:
    """The peak of each rank, which is that of the formulas."""
    arguments = {"layout": layout, "memory": memory}
    peaks = []
    for rank, (found, said) in enumerate(rank_values(_peak, case(layout).world_size, arguments)):
        print(f"{layout} {memory} {rank}: {found} {said} {said / found - 1:+.1%}")
        assert said == pytest.approx(found, rel=0.05)
        peaks.append(found)
    return peaks


def test_a_step_that_needs_more_than_the_limit_is_not_applied() -> None:
    """The state fits, its activations do not."""
    small = {"train__precision": "fp32", "model__layers": 1}
    plain, of = config_of(small), case("one")
    (state,) = placed_by_rank(plain, topology_of(of, plain))
    config = config_of(small | {"train__memory": {"device_gb": (state.device + 9_000) / GB}})
    made = engine_of(config, topology_of(of, config), 0, HashStore())
    before = digest(made)
    with pytest.raises(StateMemoryError, match="activations"):
        one_step(made, 1)
    assert digest(made) == before
    made.close()


# --- what does not fit ----------------------------------------------------------------------
def test_only_what_can_move_is_named_as_movable() -> None:
    on_host, other = {"memory": {"gradients": "host"}}, {"optimizer": {"name": "sgd"}}
    assert TrainConfig().movable_state == ["optimizer", "gradients"]
    assert TrainConfig.model_validate(on_host).movable_state == ["optimizer"]
    assert TrainConfig.model_validate(other).movable_state == []
    assert MemoryConfig(device_gb=1e-10).limit == 1, "no limit is 0 only"


def test_the_limit_of_the_device_is_hard() -> None:
    ledger = MemoryLedger(limit=1000)
    ledger.add("device", "parameters", 600)
    with ledger.held("device", "activations", 400):
        assert ledger.now("device") == 1000
    with pytest.raises(StateMemoryError, match="activations") as refused:
        ledger.add("device", "activations", 401)
    assert "use train.memory.device_gb=1.001e-06 or more" in str(refused.value)
    assert "move state" not in str(refused.value)
    assert ledger.now("device") == 600
    assert ledger.peak("device") == 1000
    ledger.add("host", "optimizer", 10**6)  # other places have none


def test_a_missing_folder_is_refused(tmp_path: Path) -> None:
    memory = MemoryConfig(optimizer="file", folder=str(tmp_path / "none"))
    with pytest.raises(StateMemoryError, match="there is no folder"):
        StateMemory(memory, CPU).zeros("optimizer", [(4,)], torch.float32)


def test_a_disk_without_room_is_refused_before_the_first_step(tmp_path: Path) -> None:
    """2^54 bytes: more than any file system has."""
    memory = MemoryConfig(optimizer="file", folder=str(tmp_path))
    with pytest.raises(StateMemoryError, match="GB free; make room"):
        StateMemory(memory, CPU).zeros("optimizer", [(2**52,)], torch.float32)
    assert os.listdir(tmp_path) == []
