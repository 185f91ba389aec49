"""`cluster.prediction` on real processes. An alarm leads to a copy of this node's part alone. If a
spare can take its workers, it leads to a planned move.

Nothing else is saved durably or sent to a peer. A false alarm changes nothing else; after a true
one the rest continues from its own memory and the copy.
"""

from __future__ import annotations

import json
import os
from math import log
from pathlib import Path

import pytest

from holdfast.elastic.protocol.fault_orders import FaultOrders
from holdfast.events import (
    CheckpointRestored,
    GenerationStarted,
    NoticeReceived,
    PredictedMove,
    PredictionFailed,
    RestorePointFound,
    SnapshotKept,
    SparesChanged,
    StepDone,
)
from holdfast.policy.prediction.models import BaseRateModel
from holdfast.policy.prediction.predictor import FittedModels, ModelVerdict
from tests.support.commands import apart, within
from tests.support.nodes import Nodes, nodes_of
from tests.support.ranks import DEADLINE_S

SETTINGS = (
    "train.steps=100000",
    "train.batch_size=6",
    "train.microbatch_size=2",
    "train.evaluate.every=0",
    "checkpoint.every_steps=0",
    "checkpoint.memory_every_steps=5",
    "checkpoint.peer_every_steps=100000",
    "layout.workers=2",
    "layout.dp_shard=2",
    "cluster.min_nodes=1",
    "cluster.gather_seconds=120",
)


DEVICE = """\
index, name, ecc.errors.uncorrected.volatile.total
0, NVIDIA H100 80GB HBM3, {}
"""


def fit_file(path: Path, horizon_s: float) -> Path:
    """A model that foresees the loss of every node, always, with a chance of 0.6."""
    model = BaseRateModel(-log(0.4) / horizon_s)
    fit = FittedModels(
        horizon_s,
        (horizon_s,),
        horizon_s,
        (model,),
        None,
        model.name,
        {model.name: ModelVerdict(0.5, 0.6, 1.0, 0.6)},
        (),
    )
    path.write_text(json.dumps(fit.to_json()))
    return path


@pytest.mark.slow
@pytest.mark.parametrize("is_true", [False, True])
def test_an_alarm_copies_the_part_of_its_node(
    run_file: Path, tmp_path: Path, is_true: bool
) -> None:
    model = fit_file(tmp_path / "model.json", 600.0 if is_true else 3.0)
    with nodes_of(run_file, tmp_path / "run", *SETTINGS) as nodes:
        nodes.start("a")
        nodes.wait_until(lambda: nodes.leader == "a", "a does not lead")
        nodes.start("b", settings=(f"cluster.prediction={model}",))
        nodes.wait_step(1, nodes={"a", "b"})
        nodes.wait_until(lambda: len(nodes.events(SnapshotKept)) >= 2, "no early copy")
        alarms = [e for e in nodes.events(NoticeReceived) if e.source == "prediction"]
        assert {tuple(e.nodes) for e in alarms} == {("b",)}
        assert not any(e.leave for e in alarms)
        kept = nodes.events(SnapshotKept)
        assert {event.peer for event in kept} == {"a"}, "only the part of b has travelled"
        step = max(event.step for event in nodes.events(StepDone))
        if is_true:
            before = nodes.newest
            nodes.kill("b")
            nodes.wait_step(1, before, {"a"})
            assert nodes.events(GenerationStarted)[-1].step >= kept[0].step
            assert [e.durable for e in nodes.events(RestorePointFound)] == [False]
            assert [set(e.sources) for e in nodes.events(CheckpointRestored)] == [{"memory"}]
        else:
            nodes.wait_step(step + 20, nodes={"a", "b"})
            assert len(nodes.events(GenerationStarted)) == 1
        for agent in nodes.agents.values():
            agent.terminate()
        assert set(nodes.end().values()) == {0}, nodes.story()


@pytest.mark.slow
def test_a_new_memory_error_moves_the_workers_of_its_node(run_file: Path, tmp_path: Path) -> None:
    """The driver's tool of b counts one more uncorrected error: b is left before it is lost."""
    answer, tool = tmp_path / "answer", tmp_path / "bin" / "nvidia-smi"
    tool.parent.mkdir()
    answer.write_text(DEVICE.format(0))
    tool.write_text(f"#!/bin/sh\ncat {answer}\n")
    tool.chmod(0o755)
    path = f"PATH={tool.parent}:{os.environ['PATH']}"
    gate = FaultOrders(tmp_path / "gate")
    gate.prepare(10)
    settings = (*SETTINGS, "train.steps=40", f"cluster.faults={gate.folder}")
    with nodes_of(run_file, tmp_path / "run", *settings) as nodes:
        nodes.start("a")
        nodes.wait_until(lambda: nodes.leader == "a", "a does not lead")
        signals = ("cluster.signals=[memory_errors,power]",)
        nodes.start("b", settings=signals, before=["env", path])
        nodes.wait_step(10, nodes={"a", "b"})
        nodes.start("c")
        nodes.wait_until(lambda: len(nodes.events(SparesChanged)) > 0, "c is no spare")
        assert not nodes.events(PredictedMove)
        answer.write_text(DEVICE.format(1))
        nodes.wait_generation({"a", "c"})
        nodes.kill("b")
        gate.open_gate(40)
        assert set(nodes.end().values()) == {0}, nodes.story()
        (move,) = nodes.events(PredictedMove)
        assert move.node == "b"
        assert "its memory has new uncorrected errors" in nodes.story()
        steps = [e.step for e in nodes.events(StepDone)]
        assert sorted(steps) == list(range(1, 41)), "a step was repeated"


@pytest.mark.slow
@pytest.mark.parametrize("is_true", [False, True])
def test_an_alarm_moves_the_workers_of_its_node_to_a_spare(
    run_file: Path, tmp_path: Path, is_true: bool
) -> None:
    """Before b is lost, c has taken its worker: no step is done twice, and all bits are equal."""
    short = (*SETTINGS, "train.steps=40")
    whole = Nodes(run_file, tmp_path / "whole")
    apart("train", run_file, f"folder={whole.folder}", *short, deadline=DEADLINE_S).succeeds()
    model = fit_file(tmp_path / "model.json", 600.0 if is_true else 20.0)
    gate = FaultOrders(tmp_path / "gate")
    gate.prepare(10)
    settings = (*short, f"cluster.faults={gate.folder}")
    with nodes_of(run_file, tmp_path / "run", *settings) as nodes:
        nodes.start("a")
        nodes.wait_until(lambda: nodes.leader == "a", "a does not lead")
        nodes.start("b", settings=(f"cluster.prediction={model}",))
        nodes.wait_step(10, nodes={"a", "b"})
        nodes.start("c")
        nodes.wait_generation({"a", "c"})
        if is_true:
            nodes.kill("b")
        else:
            nodes.wait_until(
                lambda: any(e.moved for e in nodes.events(PredictionFailed)), "no end of it"
            )
        gate.open_gate(40)
        ended = nodes.end()
        assert set(ended.values()) == {0}, nodes.story()
        assert [e.node for e in nodes.events(PredictedMove)] == ["b"]
        started = nodes.events(GenerationStarted)
        assert [set(e.topology["nodes"]) for e in started] == [{"a", "b"}, {"a", "c"}]
        steps = [e.step for e in nodes.events(StepDone)]
        assert sorted(steps) == sorted(set(steps)) == list(range(1, 41)), "a step was repeated"
        nodes.assert_same_run(whole.losses())
        false = [e.node for e in nodes.events(PredictionFailed) if e.moved]
        assert false == ([] if is_true else ["b"]), "one alarm cost one move"
        said = within("report", nodes.outside).succeeds().err
        assert "predictions: 1 planned move" in said
        assert ("0 false alarms" in said) is is_true
