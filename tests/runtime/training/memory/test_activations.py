"""Activations off the device change no bit, and the device holds what two blocks keep."""

from __future__ import annotations

import errno
import gc
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed import HashStore

from holdfast.config.run import RunConfig
from holdfast.config.sections.memory import MemoryConfig
from holdfast.errors import StateMemoryError
from holdfast.layout import Topology
from holdfast.plan.memory.estimate import rank_estimate
from holdfast.plan.memory.placed_memory import placed_by_rank
from holdfast.training.engine.engine import StepEngine
from holdfast.training.memory.activation_rooms import FileRoom, HostRoom
from holdfast.training.memory.places import StateMemory
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

STEPS = 2
LAYOUTS = (
    *("full.dp2", "tp2", "plain.tp2", "full.bf16.tp2", "selective.tp2", "biased.tp2"),
    *("pp2", "bf16.pp2", "full.pp2", "gpipe.pp2", "selective.pp4", "pp2-dp2", "pp3+pp2"),
    *("zero1.2", "zero2.2", "bf16.zero2.2", "shard2", "full.bf16.shard2", "shard2-tp2"),
    *("pp2-shard2", "compiled.tp2", "compiled.full.shard2"),
)
MOVED = {"optimizer": "host", "gradients": "host", "piece_mb": 0.04}
"""Without most of the state on the device, its peak is that of activations."""


def _config(layout: str, memory: dict[str, Any], layers: int = 6) -> RunConfig:
    wide = {"model__dim": 128, "model__ffn_dim": 384, "model__layers": layers}
    wide |= {"train__precision": "fp32", "data__sequence_length": 12}
    return config_of({**wide, **case(layout).changes, "train__memory": memory})


def _engine(
    layout: str, memory: dict[str, Any], layers: int = 6
) -> tuple[StepEngine, RunConfig, Topology]:
    """An engine of one process."""
    config = _config(layout, memory, layers)
    topology = topology_of(case(layout), config)
    return engine_of(config, topology, 0, HashStore()), config, topology


def _peak(made: StepEngine, place: str) -> int:
    assert made.parameters.memory is not None
    return made.parameters.memory.ledger.peak(place)


@pytest.mark.parametrize("layout", ["one", in_campaign("full.one")])
def test_what_blocks_keep_leaves_the_device(layout: str, tmp_path: Path) -> None:
    found, peaks = [], []
    for place in ("device", "host", "file"):
        memory = MOVED | {"device_gb": 1, "activations": place, "folder": str(tmp_path)}
        made, config, topology = _engine(layout, memory, layers=3)
        losses = [one_step(made, step).mean_loss.hex() for step in (1, 2)]
        found.append([*losses, digest(made)])
        (placed,), said = (
            placed_by_rank(config, topology),
            rank_estimate(config, topology, made.groups.coordinate),
        )
        assert said.peak == pytest.approx(_peak(made, "device"), rel=0.05)
        assert _peak(made, "host") == pytest.approx(placed.host, rel=0.01)
        assert _peak(made, "file") == pytest.approx(placed.file, rel=0.01)
        peaks.append(_peak(made, "device"))
        made.close()
    assert found[0] == found[1] == found[2]
    assert peaks[1] == peaks[2] < peaks[0]
    assert os.listdir(tmp_path) == []


def _train(rank: RankContext, layout: str, memory: dict[str, Any]) -> list[Any]:
    config = _config(layout, memory)
    made = engine_for(rank, layout, config)
    curve = curve_of(made, STEPS)
    said = rank_estimate(config, made.groups.topology, made.groups.coordinate).peak
    peak = _peak(made, "device")
    made.close()
    return [curve, peak, said]


@pytest.mark.slow
@pytest.mark.parametrize("layout", LAYOUTS)
def test_bits_and_peak_on_each_layout(layout: str, tmp_path: Path) -> None:
    of, is_metered = case(layout), "compiled" not in layout
    before: list[list[Any]] = []
    for place in ("device", "host", "file"):
        memory = MOVED | {"activations": place, "folder": str(tmp_path), "device_gb": 1}
        after = rank_values(_train, of.world_size, {"layout": layout, "memory": memory})
        for rank, values in enumerate(after):
            curve, peak, said = values
            print(f"{layout} {place} {rank}: {peak} {said} {said / peak - 1:+.1%}")
            if is_metered:
                assert said == pytest.approx(peak, rel=0.05)
            if before:
                assert curve == before[rank][0]
                promised = before[rank][2] - said  # what the formulas say that it falls by
                falls = promised > 0.01 * said
                assert not (is_metered and falls) or peak < before[rank][1]
        before = before or after


def _bits(rank: RankContext, layout: str, place: str) -> dict[str, Any]:
    made = engine_for(rank, layout, _config(layout, {"activations": place}))
    found = curve_of(made, STEPS)
    made.close()
    return found


@pytest.mark.slow
@pytest.mark.parametrize(
    "layout",
    [
        *("experts.shard2", "experts.ep2.shard2", "full.experts.ep2.shard2", "experts.zbv.pp2"),
        *("ring.cp2", "interleaved.pp2", "zbv.pp2"),
    ],
)
def test_bits_where_no_formula_knows_the_peak(layout: str) -> None:
    """Experts that other ranks share are gathered while their block runs."""
    world = case(layout).world_size
    stayed, moved = (
        rank_values(_bits, world, {"layout": layout, "place": place})
        for place in ("device", "host")
    )
    assert moved == stayed


def test_a_disk_that_fails_ends_the_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made, _, _ = _engine("one", {"activations": "file", "folder": str(tmp_path)})
    one_step(made, 1)
    before = digest(made)

    def fail(*given: object) -> int:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    monkeypatch.setattr(os, "pwritev", fail)
    with pytest.raises(StateMemoryError, match="cannot be used"):
        one_step(made, 2)
    assert digest(made) == before
    made.close()


def test_what_a_pass_without_a_backward_kept_is_free_again() -> None:
    made, config, _ = _engine("one", {"activations": "host"})
    tokens = torch.randint(config.model.vocab_size, (4, 12))
    for _ in range(3):
        loss = made.objective(tokens, tokens.clone(), None)
        del loss
        gc.collect()
    assert made.parameters.memory is not None
    held = made.parameters.memory.ledger.by_kind("host")["activations"]
    one_step(made, 1)
    assert made.parameters.memory.ledger.by_kind("host")["activations"] == held
    made.close()


def _memory(place: str, folder: Path) -> StateMemory:
    config = {"activations": place, "folder": str(folder)}
    return StateMemory(MemoryConfig.model_validate(config), CPU)


def test_pieces_of_the_host_are_used_again(tmp_path: Path) -> None:
    memory = _memory("host", tmp_path)
    room = HostRoom(memory)
    first, second = room.take(1000), room.take(2000)
    for spot in (first, second):
        room.give(spot)
    assert room.take(1500) is second
    assert room.take(900) is first
    assert memory.ledger.now("host") == 3000
    room.give(first)
    assert room.take(1001) is not first  # which is too small, and leaves
    assert memory.ledger.now("host") == 3001


def test_pieces_of_a_file_are_joined(tmp_path: Path) -> None:
    memory = _memory("file", tmp_path)
    room = FileRoom(memory)
    first, second, third = room.take(1000), room.take(1000), room.take(500)
    data = torch.arange(1000, dtype=torch.uint8)
    room.write(second, 0, data)
    into = torch.zeros_like(data)
    room.read(second, 0, into)
    assert torch.equal(into, data)
    room.give(first)
    room.give(second)
    whole = room.take(2000)
    assert (whole.start, third.start) == (0, 2000)
    assert memory.ledger.now("file") == 2500
    assert room.take(10).start == 2500
    assert os.listdir(tmp_path) == []
