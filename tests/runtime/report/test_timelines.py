"""Timelines: injected offsets and drift of clocks are taken out, or the rank is refused."""

from __future__ import annotations

import json
import random
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest

from holdfast.events import GenerationStarted, Record, StepDone, StepTraced, WorkerLost
from holdfast.layout import Layout, place_layout
from holdfast.report.timelines.timeline import RunTimeline, build_timeline
from holdfast.wire.journal import read_journal
from tests.support.commands import within
from tests.support.journal_builder import Scribe, lossy_run, store_run
from tests.support.nodes import nodes_of, prepared

NODES = ("a", "b", "c", "d", "e", "f", "g", "h")
AGREE_S = 0.002
LATENCY_S = 0.0004  # of the last message, at most
STALL_S = 0.08  # of a rank that its system let wait, in one step of ten


class Fleet:
    """Nodes whose clocks differ from the true time by an offset and a drift."""

    def __init__(self, seed: int, steps: int, offset_s: float = 10.0, drift: float = 50e-6) -> None:
        self.random = random.Random(seed)
        self.clocks = {
            node: (self.random.uniform(-offset_s, offset_s), self.random.uniform(-drift, drift))
            for node in NODES
        }
        self.clocks["h"] = (offset_s, drift)  # both extremes are among them
        self.clocks["g"] = (-offset_s, -drift)
        self.scribe = Scribe()
        self.scribe.start()
        self.truth: dict[tuple[str, int], float] = {}  # when a rank saw the end of a vote
        topology = place_layout(Layout(len(NODES)), 1, NODES).to_json()
        self.scribe.write(GenerationStarted(topology, "start"))
        for step in range(1, steps + 1):
            self._step(step)

    def local(self, node: str, seconds: float) -> float:
        offset, drift = self.clocks[node]
        return 5000.0 + seconds + offset + drift * seconds

    def _step(self, step: int) -> None:
        end = 7.0 * step
        for rank, node in enumerate(NODES):
            stall = STALL_S if self.random.random() < 0.1 else 0.0
            seen = end + self.random.uniform(0, LATENCY_S) + stall
            self.truth[node, step] = seen
            spans = [
                ["compute", "F0", self.local(node, end - 3), self.local(node, end - 1)],
                ["control", "vote", self.local(node, end - 0.5), self.local(node, seen)],
            ]
            event = StepTraced(rank, spans, step=step)
            at = self.local(node, seen) + 1e9 + 77.0 * rank + self.random.uniform(0.001, 0.01)
            self.scribe.records.append(Record(1, f"rank{rank}", step, at, event))


def vote_ends(line: RunTimeline) -> dict[str, list[float]]:
    return {
        row: [span.stop for span in spans if span.name == "vote"]
        for row, spans in line.rows.items()
        if row.startswith("rank")
    }


@pytest.mark.parametrize("seed", range(10))
def test_offsets_to_10_s_and_drift_of_50_ppm_are_taken_out(seed: int) -> None:
    fleet = Fleet(seed, steps=120)
    line = build_timeline(fleet.scribe.records)
    assert not line.refused
    ends = vote_ends(line)
    assert len(ends) == len(NODES)
    for index in range(120):
        # Of ranks that their system did not hold up, which is what they really saw.
        true = [fleet.truth[node, index + 1] for node in NODES]
        prompt = [
            ends[f"rank {rank} on {node}"][index]
            for rank, node in enumerate(NODES)
            if true[rank] - min(true) <= LATENCY_S
        ]
        assert max(prompt) - min(prompt) <= AGREE_S
    base = ends["rank 0 on a"]
    for rank, node in enumerate(NODES):
        for step in (1, 60, 120):
            shown = ends[f"rank {rank} on {node}"][step - 1] - base[step - 1]
            true_late = fleet.truth[node, step] - fleet.truth["a", step]
            assert abs(shown - true_late) <= AGREE_S, "a rank that was late is shown late"


def test_a_rank_whose_exchanges_do_not_fit_is_refused_by_name() -> None:
    fleet = Fleet(1, steps=40)
    noise = random.Random(5)
    for index, record in enumerate(fleet.scribe.records):
        if isinstance(record.event, StepTraced) and record.event.rank == 3:
            late = noise.uniform(0, 5)
            spans = [[*span[:2], span[2] + late, span[3] + late] for span in record.event.spans]
            event = StepTraced(3, spans, step=record.event.step)
            fleet.scribe.records[index] = Record(1, record.writer, record.sequence, 1e9, event)
    line = build_timeline(fleet.scribe.records)
    assert list(line.refused) == ["rank 3 on d"]
    assert "rank 3 on d" not in line.rows
    assert len(vote_ends(line)) == len(NODES) - 1


def test_a_rank_with_too_few_exchanges_is_refused_by_name() -> None:
    fleet = Fleet(2, steps=2)
    line = build_timeline(fleet.scribe.records)
    assert list(line.rows) == ["rank 0 on a", "agent of a"]
    assert set(line.refused) == {f"rank {rank} on {NODES[rank]}" for rank in range(1, 8)}
    assert all("3 exchanges" in reason for reason in line.refused.values())


def test_records_of_agents_stand_where_their_node_saw_them() -> None:
    fleet = Fleet(3, steps=40)
    done = StepDone(1.0, 8, 1.0, 1e-3, 2.0, phases={"compute": 1.5, "reduce": 0.5}, step=20)
    lost = WorkerLost(2, 7, "SIGKILL", "exit", "c", step=20)
    at_20 = {r.writer: r.time for r in fleet.scribe.records if r.event.step == 20}
    fleet.scribe.records += [
        Record(1, "rank0", 500, at_20["rank0"], done),
        Record(1, "agent.c", 500, at_20["rank2"] + 1.0, lost),
    ]
    line = build_timeline(fleet.scribe.records)
    (step,) = [span for span in line.rows["agent of a"] if span.track == "steps"]
    vote = vote_ends(line)["rank 0 on a"][19]
    assert step.seconds == pytest.approx(2.0)
    assert abs(step.stop - vote) < 0.02
    phases = [span for span in line.rows["agent of a"] if span.track == "phases"]
    assert [span.name for span in phases] == ["compute", "reduce"]
    assert all(a.stop == pytest.approx(b.start) for a, b in pairwise(phases))
    (change,) = [span for span in line.rows["agent of c"] if span.track == "changes"]
    assert abs(change.start - vote - 1.0) < 0.02
    names = [e["args"]["name"] for e in line.to_chrome()["traceEvents"] if e["ph"] == "M"]
    assert {"rank 0 on a", "rank 7 on h", "agent of c"} <= set(names)


def test_the_command_writes_a_file_and_names_who_is_left_out(tmp_path: Path) -> None:
    fleet = Fleet(4, steps=12)
    records = [r for r in fleet.scribe.records if r.writer != "rank5" or r.event.step < 3]
    store_run(tmp_path / "run", records, 12)
    said = within("trace", "timeline", tmp_path / "run", "--to", tmp_path / "t.json").succeeds()
    assert "left out: rank 5 on f: it shares 2 of the 3 exchanges" in said.err
    events = json.loads((tmp_path / "t.json").read_text())["traceEvents"]
    assert sum(e["name"] == "vote" for e in events) == 7 * 12
    told = within("trace", "timeline", tmp_path / "run", "--to", tmp_path / "t.json", "--json")
    assert set(json.loads(told.out)["clocks"]) == set(NODES) - {"f"}


def test_a_run_without_traced_steps_says_how_to_get_some(tmp_path: Path) -> None:
    store_run(tmp_path / "run", lossy_run().records, 30)
    target = tmp_path / "t.json"
    within("trace", "timeline", tmp_path / "run", "--to", target).refuses("layout.trace_every")
    assert not target.exists()


@pytest.mark.slow
def test_a_real_run_of_two_nodes(tmp_path: Path) -> None:
    """Both nodes are on one machine, so their clocks are equal: what is fitted is the error."""
    run_file = prepared(tmp_path)
    settings = ("train.steps=60", "layout.trace_every=2", "cluster.min_nodes=2")
    with nodes_of(run_file, tmp_path / "run", *settings) as nodes:
        nodes.start("a", "b")
        assert nodes.end() == {"a": 0, "b": 0}, nodes.story()
    records = list(read_journal(nodes.store))
    line = build_timeline(records)
    assert not line.refused
    ranks = {row for row in line.rows if row.startswith("rank")}
    assert ranks in ({"rank 0 on a", "rank 1 on b"}, {"rank 0 on b", "rank 1 on a"})
    (other,) = [fit for fit in line.alignment.clocks.values() if fit.exchanges]
    assert other.error_s < AGREE_S
    assert abs(other.offset_s) < 5 * AGREE_S, "what a machine that is busy with other tests allows"
    ends = vote_ends(line)
    first, other_row = sorted(ends)
    for offset_s, drift in ((10.0, 50e-6), (-10.0, -50e-6), (0.3, -50e-6)):
        moved = vote_ends(build_timeline([with_clock(r, offset_s, drift) for r in records]))
        columns = (ends[other_row], ends[first], moved[other_row], moved[first])
        for true, base, there, here in zip(*columns, strict=True):
            assert abs((there - here) - (true - base)) < AGREE_S


def with_clock(record: Record, offset_s: float, drift: float) -> Record:
    """The record of a node whose clock has an offset and a drift, if it is of rank 1."""
    event = record.event
    if not isinstance(event, StepTraced) or event.rank != 1:
        return record
    spans = [
        [track, name, *(at + offset_s + drift * at for at in times)]
        for track, name, *times in event.spans
    ]
    return replace(record, time=record.time + offset_s, event=replace(event, spans=spans))
