"""Saved under one layout, resumed under another: every ordered pair of the list.

The save is the real one: captured into the mover's arenas, hashed, written and committed by the
mover's process. After the restore every tensor has the saved bits; from there on the losses, and
at the end parameters and moments, are those of a single process that was never interrupted.

The quick tests save under each axis and resume under each; the other pairs are with the long tests
(marker slow).
"""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from holdfast.checkpoint.capture.capturer import Capturer, CompletedCapture
from holdfast.checkpoint.mover.client import MoverClient
from holdfast.checkpoint.restore.reader import Checkpoint
from holdfast.config.run import RunConfig
from holdfast.core.sharding.boxes import Box
from holdfast.core.sharding.run_table import run_state_table
from holdfast.wire.secret import Secret
from holdfast.wire.store.run_store import FolderStore
from tests.support.layouts import (
    assert_all_state,
    case,
    config_of,
    engine_for,
    engine_of,
    load_complete,
    load_pieces,
    model_flags,
    one_step,
    pieces,
    pieces_of_curve,
    save_pieces,
    topology_of,
    train_layout,
)
from tests.support.mover_process import Mover
from tests.support.ranks import RankContext, rank_values

LAYOUTS = ["shard2", "tp2", "pp2", "zero1.2", "tp2+one"]
PAIRS = [(a, b) for a in LAYOUTS for b in LAYOUTS if a != b]
NEAR = [(a, LAYOUTS[(i + n) % 5]) for i, a in enumerate(LAYOUTS) for n in (1, 2, 3)]
MIXED = [
    ("pp2-tp2", "shard4"),
    ("shard4", "pp2-tp2"),
    ("tp4", "pp4"),
    ("pp4", "tp4"),
    ("pp2-dp2-tp2", "one"),
    ("one", "pp3+pp2"),
    ("pp3+pp2", "shard2-tp2"),
    ("pp2-shard2", "tp2"),
    ("tp2", "pp2-shard2"),
    ("zero2.2", "once.zero2.2"),
    ("once.zero2.2", "zero2.2"),
    ("pp2", "zbv.pp2"),
    ("interleaved.pp2", "pp2"),
    ("zbv.pp2", "interleaved.pp2"),
]
LATE = [
    ("pipedream.pp2", "tp2"),
    ("shard2", "2bw.pp2"),
    ("untied.pipemare.pp2", "untied.pipemare.tp2"),
    ("untied.pipemare.dp2", "untied.pipemare.pp2"),
]
"""Asynchronous schedules. Here they are shown no later step, so each has the curve of 1F1B."""
WITH_EXPERTS = [
    ("experts.ep2.shard4", "experts.pp2-tp2"),
    ("experts.pp2-shard2", "experts.ep2.shard2-tp2"),
    ("experts.ep4.shard2-cp2", "experts.ep2.cp2-tp2"),
    ("experts.tp2", "experts.ep2.cp2"),
    ("experts.ep2.cp2", "experts.ep2.shard2"),
    ("experts.copies.ep2.shard2", "experts.pp2"),
    ("experts.tp2", "experts.copies.ep2.shard4"),
]
COMPONENTS = [
    ("att2.tp4", "pp2"),
    ("shard2", "att2ffn1.tp4"),
    ("att1.shard2-tp2", "att2ffn1.tp4"),
    ("tp4", "att1.pp2-tp2"),
    ("att2.tp4+tp2", "ffn1.zero1.2-tp2"),
]
UNEVEN = [("pp2", "uneven.pp2"), ("uneven.pp2", "pp2")]
CONTEXT = [("ring.cp2", "tp2"), ("shard2", "ring.cp2"), ("pp2-cp2", "shard2-cp2")]
CHOSEN = {*NEAR[::3], ("pp3+pp2", "shard2-tp2"), ("interleaved.pp2", "pp2"), ("ring.cp2", "tp2")}
"""Each axis is saved under and resumed under, and one product; the campaign takes all pairs."""
STEPS = 4
SAVED = STEPS // 2
BATCH = 16  # four microbatches, one for each stage of the deepest pipeline


def config_for(name: str) -> RunConfig:
    return config_of({"train__batch_size": BATCH, **case(name).changes, "train__steps": STEPS})


def save_body(rank: RankContext, name: str, socket: str, secret: str) -> list[float]:
    """Train to the middle and have the mover commit it."""
    of = case(name)
    config = config_for(name)
    topology = topology_of(of, config)
    made = engine_of(config, topology, rank.rank, rank.store())
    losses = [one_step(made, step).mean_loss for step in range(1, SAVED + 1)]
    client = MoverClient(socket, Secret(bytes.fromhex(secret)), 1)
    table = run_state_table(config)
    tensors = {local.name: local.tensor for local in made.state()}
    capturer = Capturer(client, topology, table, rank.rank, tensors, run="test")
    assert isinstance(capturer.capture(SAVED, wait=60), CompletedCapture)
    assert capturer.announce(SAVED, {"position": 0}) is None
    assert capturer.wait_until_committed(SAVED, 60) is None
    save_pieces(rank.folder / f"{rank.rank}.npz", pieces(made))
    made.close()
    return losses


def resume_body(rank: RankContext, name: str, store: Path, key: str) -> list[float]:
    """Restore and train to the end."""
    made = engine_for(rank, name, config_for(name))
    checkpoint = Checkpoint.open(FolderStore(store), key)

    def read(box: Box, out: torch.Tensor) -> None:
        checkpoint.read(box, out.view(-1).view(torch.uint8).numpy().data)

    made.load(read)
    save_pieces(rank.folder / f"restored{rank.rank}.npz", pieces(made))
    losses = [one_step(made, step).mean_loss for step in range(SAVED + 1, STEPS + 1)]
    save_pieces(rank.folder / f"{rank.rank}.npz", pieces_of_curve(made))
    made.close()
    return losses


def assemble(folder: Path, prefix: str, ranks: int, shapes: dict[str, tuple[int, ...]]) -> Any:
    """The global tensors, from what all ranks hold; whoever holds the same holds the same bits."""
    out: dict[str, np.ndarray] = {}
    for rank in range(ranks):
        for name, offsets, values in load_pieces(folder / f"{prefix}{rank}.npz"):
            tensor = out.setdefault(name, np.full(shapes[name], np.nan))
            place_ = tuple(slice(o, o + n) for o, n in zip(offsets, values.shape, strict=True))
            known = tensor[place_]
            assert np.array_equal(known[~np.isnan(known)], values[~np.isnan(known)]), name
            tensor[place_] = values
    assert not any(np.isnan(tensor).any() for tensor in out.values())
    return out


def shapes_of(name: str) -> dict[str, tuple[int, ...]]:
    config = config_for(name)
    return {row.name: row.shape for row in run_state_table(config)}


@cache
def saved(name: str, folder: Path) -> tuple[Path, str, dict[str, np.ndarray]]:
    """Run store, commit and global tensors of a run that was saved under `name`."""
    here = folder / name
    here.mkdir()
    of = case(name)
    config = config_for(name)
    mover = Mover(here / "run")
    try:
        mover.begin(topology_of(of, config), run_state_table(config))
        arguments = {"name": name, "socket": mover.socket, "secret": mover.secret.hex()}
        rank_values(save_body, of.world_size, arguments, folder=here)
    finally:
        mover.close()
    (key,) = FolderStore(here / "run").list("commits/")
    return here / "run", key, assemble(here, "", of.world_size, shapes_of(name))


@cache
def undisturbed(flags: str, folder: Path) -> tuple[list[float], dict[str, np.ndarray]]:
    here = folder / f"undisturbed-{flags}"
    here.mkdir()
    arguments = {"name": f"{flags}one", "steps": STEPS, "train__batch_size": BATCH}
    (curve,) = rank_values(train_layout, 1, arguments | {"train__steps": STEPS}, folder=here)
    return curve["losses"], load_complete(here / "0.npz")


@pytest.fixture(scope="session")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("runs")


@pytest.mark.parametrize(
    ("a", "b"),
    [
        pytest.param(a, b, id=f"{a}_to_{b}", marks=() if (a, b) in CHOSEN else pytest.mark.slow)
        for a, b in [*PAIRS, *MIXED, *COMPONENTS, *UNEVEN, *CONTEXT, *WITH_EXPERTS, *LATE]
    ],
)
def test_saved_under_a_resumed_under_b(a: str, b: str, runs: Path, tmp_path: Path) -> None:
    store, key, whole = saved(a, runs)
    losses, final = undisturbed(model_flags(b), runs)
    ranks = case(b).world_size
    arguments = {"name": b, "store": store, "key": key}
    for found in rank_values(resume_body, ranks, arguments, folder=tmp_path, deadline=240):
        np.testing.assert_allclose(found, losses[SAVED:], rtol=1e-10, atol=0)
    for prefix, want, tolerance in (("restored", whole, 0.0), ("", final, 1e-10)):
        assert_all_state(
            want, [tmp_path / f"{prefix}{rank}.npz" for rank in range(ranks)], tolerance
        )
