"""Workers that live through a change of generation: real processes, a real mover, a real control
server, and in between another topology."""

from __future__ import annotations

import threading
import time
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest

from holdfast.config.run import RunConfig
from holdfast.core.sharding.state_table import state_table
from holdfast.elastic.protocol.generation_record import PreviousState
from holdfast.elastic.protocol.worker_commands import Begin
from holdfast.elastic.protocol.worker_spec import WorkerSpec
from holdfast.elastic.worker.commands import CommandClient
from holdfast.elastic.worker.worker import Worker
from holdfast.layout import Layout, Topology, place_layout
from holdfast.wire.secret import Secret
from tests.support import control_server
from tests.support.control_server import Control, controlling
from tests.support.corpus import make
from tests.support.mover_process import Mover, newest_verified
from tests.support.ranks import RankContext, rank_values, wait_until
from tests.support.worker_generations import config_in

STEPS, LEAVE = 16, 4


@dataclass
class Journal:
    """What an agent would have written down, and its wish that generation 1 ends early."""

    early: bool
    losses: dict[int, float] = field(default_factory=dict)
    fed: list[tuple[int, int]] = field(default_factory=list)  # (step, sample position)
    ready: list[tuple[int, int, int]] = field(default_factory=list)  # (generation, rank, step)

    async def report(self, generation: int, body: dict[str, Any]) -> dict[str, Any]:
        for each in body["events"]:
            event = each["event"]
            match each["kind"]:
                case "step_done":
                    assert event["step"] not in self.losses, "a step was done twice"
                    self.losses[event["step"]] = event["loss"]
                case "batch_fed":
                    for entry in event["entries"]:
                        span = range(entry["start"], entry["stop"])
                        self.fed += [(event["step"], position) for position in span]
                case "worker_ready":
                    self.ready.append((generation, event["rank"], event["step"]))
        stop = self.early and generation == 1 and len(self.losses) >= LEAVE
        return {"stop": stop, "generation": generation, "stored": True}


def _config(folder: Path) -> RunConfig:
    evaluate = {"every": 8, "samples": 5}
    return config_in(folder, {"steps": STEPS, "batch_size": 8, "evaluate": evaluate})


def _life(rank: RankContext, boot: dict[str, Any], secret: str, after: Any) -> list[Any]:
    """A worker from its first step to its last, by way of `after` if that is given."""
    boot |= {"rank": rank.rank, "forked": time.monotonic()}
    spec, shared = WorkerSpec.from_json(boot), Secret.from_hex(secret)
    worker = Worker(spec, shared, CommandClient(spec.agent, shared))
    worker.begin_generation()
    outcome = worker.train()
    steps = [outcome.step]
    if after is not None:
        assert (outcome.kind, outcome.unsaved_reason) == ("left", None)
        assert worker.step == outcome.step
        rank.mark("left")
        wait_until((rank.folder / "opened").exists, what="the next generation")
        topology = Topology.from_json(after)
        me = rank.world_size - 1 - rank.rank
        before = PreviousState(worker.held_session.current.groups.topology, worker.step)
        spec = replace(spec, topology=topology, generation=topology.generation, rank=me)
        came_from = tuple(rank.world_size - 1 - r for r in range(rank.world_size))
        worker.apply_command(Begin(spec, came_from, before))
        outcome = worker.train()
        steps.append(outcome.step)
    assert (outcome.kind, outcome.unsaved_reason) == ("finished", None)
    worker.close()
    assert worker.reporter.close()
    return steps


def _opening(folder: Path, mover: Mover, control: Control, topology: Topology, table: Any) -> None:
    """What the agent does when all have left: open the generation for mover and rendezvous."""
    for rank in range(topology.world_size):
        wait_until((folder / f"left.{rank}.mark").exists, what=f"rank {rank} to leave")
    mover.begin(topology, table)
    control.begin(topology.generation)
    (folder / "opened").touch()


def _run(
    folder: Path,
    config: RunConfig,
    topology: Topology,
    after: Topology | None,
    monkeypatch: pytest.MonkeyPatch,
) -> tuple[Journal, list[list[int]], Mover]:
    """One run of real workers; its journal, the steps at which they stopped, its store."""
    (folder / "run").mkdir(parents=True)
    (folder / "ranks").mkdir()
    journal = Journal(early=after is not None)
    table = state_table(config.model, config.train.precision)
    mover = Mover(folder / "run", run=config.name)
    monkeypatch.setattr(control_server, "SECRET", mover.secret)
    dataset = str(make(config.data).folder)
    try:
        mover.begin(topology, table)
        with controlling(journal.report) as control:
            boot = WorkerSpec(
                config.model_dump(mode="json"),
                topology,
                1,
                0,
                1,
                control.address,
                mover.socket,
                str(folder / "run"),
                dataset,
                None,
                0,
                "cpu",
                "",
            )
            arguments = {"boot": boot.to_json(), "secret": mover.secret.hex(), "after": None}
            opening = threading.Thread()
            if after is not None:
                arguments["after"] = after.to_json()
                opening = threading.Thread(
                    target=_opening, args=(folder / "ranks", mover, control, after, table)
                )
            opening.start()
            steps = rank_values(
                _life, topology.world_size, arguments, deadline=240, folder=folder / "ranks"
            )
            opening.join()
        return journal, steps, mover
    finally:
        mover.close()


@pytest.mark.parametrize(
    ("before", "after"),
    [
        pytest.param(Layout(dp_replicate=2), Layout(dp_shard=2), marks=pytest.mark.slow),
        pytest.param(Layout(dp_shard=2), Layout(dp_shard=2), marks=pytest.mark.slow),
        (Layout(tp=2), Layout(pp=2, stages=(1, 1))),
    ],
    ids=["dp2-shard2", "shard2-shard2", "tp2-pp2"],
)
def test_workers_adopt_a_topology(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, before: Layout, after: Layout
) -> None:
    config = _config(tmp_path)
    nodes = ("node0", "node0")
    alone, ((whole,),), _ = _run(
        tmp_path / "alone", config, place_layout(Layout(), 1, nodes[:1]), None, monkeypatch
    )
    journal, stopped, mover = _run(
        tmp_path / "moved",
        config,
        place_layout(before, 1, nodes),
        place_layout(after, 2, nodes),
        monkeypatch,
    )
    ((left, finished),) = {tuple(steps) for steps in stopped}
    assert LEAVE <= left < finished == whole == STEPS
    assert sorted(journal.losses) == list(range(1, STEPS + 1))
    for step, loss in journal.losses.items():
        assert loss == pytest.approx(alone.losses[step], rel=1e-10)
    assert sorted(journal.fed) == sorted(alone.fed)
    assert sorted(journal.ready) == [(1, 0, 0), (1, 1, 0), (2, 0, left), (2, 1, left)]
    newest = newest_verified(mover.store, lambda *_: None)
    assert (newest.commit.step, newest.commit.generation) == (STEPS, 2)
