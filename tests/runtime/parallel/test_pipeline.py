"""The interpreter of schedules: torch's results, every kind of table, errors, and what is kept."""

from __future__ import annotations

import random
import weakref
from typing import Any

import numpy as np
import pytest
import torch
from benchmarks.runtime.bubble import measure_pipeline
from benchmarks.runtime.interpreters import ModuleStages, compare, make_stage
from torch import Tensor, nn

from holdfast.core.schedule.csv import from_csv, to_csv
from holdfast.core.schedule.named import build_schedule
from holdfast.core.schedule.table import Action, ActionKind, Schedule, Value, actions_of
from holdfast.core.schedule.timing import max_in_flight
from holdfast.core.spans import COMPUTE, TraceSpan, chrome_trace
from holdfast.errors import LayoutError, PeerLostError
from holdfast.parallel.comm.comm_stats import TrafficCounter
from holdfast.parallel.comm.trace import RECEIVE, SpanRecorder
from holdfast.parallel.comm.transport import PeerGroup, exchange
from holdfast.parallel.pipeline.pipeline import PipelineInterpreter, StageWork
from holdfast.parallel.pipeline.pipeline_plan import PipelinePlan, make_pipeline_plan
from tests.support.ranks import RankContext, rank_values, ranks
from tests.support.schedules import random_executable_table

CPU = torch.device("cpu")
WIDTH, ROWS = 5, 3

# Two stages a rank in a V, the backward whole, split and overlapped (DualPipe's kind of table).
V_TABLE = (
    "0F0,0F1,3F0,3B0,(3F1;0B0)OVERLAP_F_B,3I1,0I1,3W1,0W1\n"
    "1F0,2F0,1F1,2F1,2B0,1B0,2I1,1I1,1W1,2W1\n"
)
# As torch's own interleaved schedules go round: stage s on rank s % 2.
LOOPED_TABLE = (
    "0F0,0F1,2F0,2F1,0F2,2B0,2F2,0B0,2B1,0B1,2B2,0B2\n"
    "1F0,1F1,3F0,3B0,3F1,3B1,1F2,1B0,1B1,3F2,3B2,1B2\n"
)


def meet(line: PeerGroup) -> None:
    """Everybody has come here: what was sent before has arrived."""
    exchange(line, torch.zeros(1, dtype=torch.int64), [1] * line.size, tag=1)


class SplitStages(ModuleStages):
    """The same stages with a backward in two halves."""

    def backward_input(self, stage: int, microbatch: int, gradient: Tensor | None) -> Tensor | None:
        x, y = self._kept[stage, microbatch]
        self._outgoing = {**getattr(self, "_outgoing", {}), (stage, microbatch): gradient}
        if stage == 0:
            return None
        return torch.autograd.grad(y, x, gradient, retain_graph=True)[0]

    def backward_weight(self, stage: int, microbatch: int) -> None:
        _, y = self._kept.pop((stage, microbatch))
        parameters = list(self.stages[stage].parameters())
        gradient = self._outgoing.pop((stage, microbatch))
        for p, g in zip(parameters, torch.autograd.grad(y, parameters, gradient), strict=True):
            p.grad = g if p.grad is None else p.grad + g


def batch(microbatches: int) -> tuple[list[Tensor], list[Tensor]]:
    """Inputs and targets of every microbatch."""
    generator = torch.Generator().manual_seed(3)
    # type: ignore[return-value]
    return tuple(
        [
            torch.randn(ROWS, WIDTH, generator=generator, dtype=torch.float64)
            for _ in range(microbatches)
        ]
        for _ in range(2)
    )


def alone(stages: int, microbatches: int) -> tuple[list[float], list[list[float]]]:
    """Losses, and gradients of each stage, of one process without any pipeline."""
    modules = [make_stage(s, WIDTH, 2, torch.float64) for s in range(stages)]
    losses = []
    for x, target in zip(*batch(microbatches), strict=True):
        loss = (nn.Sequential(*modules)(x) - target).square().sum()
        loss.backward()
        losses.append(loss.item())
    return losses, [flat(module) for module in modules]


def flat(module: nn.Module) -> list[float]:
    grads = [p.grad for p in module.parameters() if p.grad is not None]
    return [] if not grads else torch.cat([g.flatten() for g in grads]).tolist()


def stages_of(rank: int, schedule: Schedule, split: bool = True) -> ModuleStages:
    modules = {s: make_stage(s, WIDTH, 2, torch.float64) for s in schedule.stages_of(rank)}
    kind = SplitStages if split else ModuleStages
    return kind(modules, schedule.stages - 1, *batch(schedule.microbatches))


@pytest.mark.parametrize("stages", [2, 4])
@pytest.mark.parametrize("name", ["gpipe", "1f1b"])
def test_equals_torchs_interpreter_bit_for_bit(name: str, stages: int) -> None:
    args = {
        "schedule": name,
        "microbatches": 6,
        "width": 8,
        "depth": 2,
        "rows": 2,
        "rounds": 1,
        "dtype": "float64",
    }
    values = rank_values(compare, stages, args)
    assert [v["equal"] for v in values] == [True] * stages
    assert [v["losses"] for v in values] == [0] * (stages - 1) + [6]


def run_table(rank: RankContext, table: str) -> dict[str, Any]:
    schedule = from_csv(table, "table")
    line = PeerGroup(rank.store(), "line", rank.rank, schedule.ranks, seconds=120)
    line.traffic = TrafficCounter()
    recorder = SpanRecorder()
    work = stages_of(rank.rank, schedule)
    interpreter = PipelineInterpreter(line, CPU, recorder=recorder)
    interpreter.run(schedule, work)
    sent = line.traffic.bytes_by_kind
    meet(line)
    rank.barrier("done")
    return {
        "losses": [x.item() for x in work.losses],
        "gradients": {str(s): flat(module) for s, module in work.stages.items()},
        "order": [s.name for s in recorder.spans if s.track == COMPUTE],
        "waits": [s.name for s in recorder.spans if s.track == RECEIVE],
        "sent": sent.get("pp", 0),
    }


@pytest.mark.parametrize(
    ("table", "ranks_"),
    [
        (to_csv(build_schedule("1f1b", 3, 5)), 3),
        (to_csv(build_schedule("gpipe", 2, 3, 2)), 2),
        (V_TABLE, 2),
        (LOOPED_TABLE, 2),
        (to_csv(build_schedule("1f1b", 1, 3)), 1),
    ],
    ids=["1f1b_pp3", "gpipe_pp2_virtual2", "v_split_overlapped", "looped", "pp1"],
)
def test_every_table_equals_one_process(table: str, ranks_: int) -> None:
    schedule = from_csv(table, "table")
    losses, gradients = alone(schedule.stages, schedule.microbatches)
    values = rank_values(run_table, ranks_, {"table": table})
    assert [x for v in values for x in v["losses"]] == losses
    for stage, rank in enumerate(schedule.rank_of):
        assert values[rank]["gradients"][str(stage)] == pytest.approx(gradients[stage], rel=1e-13)
    nbytes = ROWS * WIDTH * 8
    for rank, value in enumerate(values):
        row = [action for cell in schedule.actions[rank] for action in actions_of(cell)]
        assert value["order"] == [str(action) for action in row]
        assert value["sent"] == nbytes * sum(travels(a, schedule) for a in row)


def travels(action: Action, schedule: Schedule) -> bool:
    """Whether what an action gives goes to another rank."""
    if action.kind is ActionKind.BACKWARD_WEIGHT:
        return False
    beside = action.stage + (1 if action.kind is ActionKind.FORWARD else -1)
    if not 0 <= beside < schedule.stages:
        return False
    return schedule.rank_of[beside] != schedule.rank_of[action.stage]


class Stamped:
    """Stages that give what says which stage and microbatch it is, and check what they take."""

    def __init__(self, stages: int, run: int, sizes: int = 7):
        self.stages, self.run, self.sizes, self.taken = stages, run, sizes, 0

    def boundary(self, stage: int, microbatch: int) -> tuple[tuple[int, ...], torch.dtype]:
        """Another shape for each boundary and microbatch."""
        assert 0 < stage < self.stages
        return (1 + (stage + microbatch) % self.sizes, stage + 1), torch.int64

    def stamp(self, stage: int, microbatch: int, direction: int) -> Tensor:
        shape, dtype = self.boundary(stage, microbatch)
        return torch.full(shape, (self.run * 1000 + stage) * 1000 + microbatch, dtype=dtype) * (
            direction
        )

    def forward(self, stage: int, microbatch: int, incoming: Tensor | None) -> Tensor | None:
        self.check(incoming, stage, microbatch, 1)
        return self.stamp(stage + 1, microbatch, 1) if stage + 1 < self.stages else None

    def backward(self, stage: int, microbatch: int, gradient: Tensor | None) -> Tensor | None:
        self.check(gradient, stage + 1, microbatch, -1)
        return self.stamp(stage, microbatch, -1) if stage > 0 else None

    backward_input = backward

    def backward_weight(self, stage: int, microbatch: int) -> None:
        pass

    def check(self, found: Tensor | None, boundary: int, microbatch: int, direction: int) -> None:
        if boundary in (0, self.stages):
            assert found is None
        else:
            assert found is not None
            assert torch.equal(found, self.stamp(boundary, microbatch, direction))
            self.taken += 1


@ranks(3)
def test_many_tables_one_after_another_on_one_line(rank: RankContext) -> None:
    """Training, validation and any other table, without anything between the runs.

    Only the first rank goes ahead of the others in a forward-only run; what arrives is always
    of the right run, stage and microbatch.
    """
    line = PeerGroup(rank.store(), "line", rank.rank, 3, seconds=120)
    interpreter = PipelineInterpreter(line, CPU)
    tables = [
        build_schedule("1f1b", 3, 4),
        build_schedule("forward", 3, 9),
        build_schedule("gpipe", 3, 2, 2),
    ]
    order = [0, 1, 1, 1, 0, 2, 1, 2, 0] * 3
    for number, which in enumerate(order):
        work = Stamped(tables[which].stages, number)
        interpreter.run(tables[which], work)
        assert work.taken or rank.rank == 0
    for seed in range(40):
        table = random_executable_table(seed)
        interpreter.run(table, Stamped(table.stages, seed))
    interpreter.wait_until_sent()
    rank.barrier("settled")


@pytest.mark.parametrize("seed", range(60))
def test_nothing_is_dropped_before_it_has_arrived(seed: int) -> None:
    """Play the plans of all ranks in a random order of events: what a rank takes as proof comes
    only after the message it proves has been taken, and what nothing proves gets a receipt."""
    table = random_executable_table(seed)
    plans = [make_pipeline_plan(table, rank) for rank in range(3)]
    sent, taken, kept, receipts = play(table, plans, random.Random(seed))
    assert sent == taken
    for rank, plan in enumerate(plans):
        assert {peer for peer, values in kept[rank].items() if values} == set(plan.receipt_senders)
        assert {(peer, rank) for peer in plan.receipt_senders} == {
            r for r in receipts if r[1] == rank
        }


def play(
    table: Schedule, plans: list[PipelinePlan], chance: random.Random
) -> tuple[set[Value], set[Value], list[dict[int, set[Value]]], set[tuple[int, int]]]:
    """All values sent, all taken, what each rank keeps for each peer, and who told whom."""
    at, sent, taken = [0] * len(plans), set[Value](), set[Value]()
    kept: list[dict[int, set[Value]]] = [{} for _ in plans]
    receipts = set()
    while any(at[r] < len(plans[r].steps) for r in range(len(plans))):
        able = [
            r
            for r, plan in enumerate(plans)
            if at[r] < len(plan.steps)
            and ((m := plan.steps[at[r]].incoming) is None or m.value in sent)
        ]
        rank = chance.choice(able)
        step = plans[rank].steps[at[rank]]
        at[rank] += 1
        if step.incoming is not None:
            taken.add(step.incoming.value)
            for value in step.proven_values:
                assert value in taken
                kept[rank][step.incoming.peer].remove(value)
            if step.receipt_to is not None:
                assert step.receipt_to == step.incoming.peer
                unproved = kept[step.receipt_to][rank]
                assert unproved
                receipts.add((rank, step.receipt_to))
        if step.outgoing is not None:
            sent.add(step.outgoing.value)
            kept[rank].setdefault(step.outgoing.peer, set()).add(step.outgoing.value)
    for teller, told in receipts:
        assert kept[told][teller] <= taken
    return sent, taken, kept, receipts


def test_1f1b_keeps_no_more_sends_than_activations() -> None:
    """However many microbatches: a rank's sends are dropped while the run goes on."""
    for microbatches in (8, 64):
        table = build_schedule("1f1b", 4, microbatches)
        for rank in range(4):
            held: set[Value] = set()
            peak = 0
            for step in make_pipeline_plan(table, rank).steps:
                held -= set(step.proven_values)
                held |= {step.outgoing.value} if step.outgoing else set()
                peak = max(peak, len(held))
            assert peak <= 2 * max_in_flight(table)[rank]


@ranks(3)
def test_buffers_of_sends_are_dropped_while_the_run_goes_on(rank: RankContext) -> None:
    """Every tensor that is sent lies over an array, whose end tells when its memory went."""
    arrays: list[weakref.ref[np.ndarray[Any, Any]]] = []
    alive: list[int] = []

    class Watched(Stamped):
        def forward(self, stage: int, microbatch: int, incoming: Tensor | None) -> Tensor | None:
            alive.append(sum(array() is not None for array in arrays))
            return self.watch(super().forward(stage, microbatch, incoming))

        def backward(self, stage: int, microbatch: int, gradient: Tensor | None) -> Tensor | None:
            return self.watch(super().backward(stage, microbatch, gradient))

        def watch(self, out: Tensor | None) -> Tensor | None:
            if out is None:
                return None
            array = out.numpy().copy()
            arrays.append(weakref.ref(array))
            return torch.from_numpy(array)

    line = PeerGroup(rank.store(), "line", rank.rank, 3, seconds=120)
    interpreter = PipelineInterpreter(line, CPU)
    table = build_schedule("1f1b", 3, 24)
    interpreter.run(table, Watched(3, 0))
    assert len(arrays) == 24 * (1 if rank.rank != 1 else 2)
    assert max(alive) <= 2 * max_in_flight(table)[rank.rank]
    interpreter.wait_until_sent()
    rank.barrier("settled")
    assert not [array for array in arrays if array() is not None]


@ranks(3)
def test_receives_are_posted_one_ahead(rank: RankContext) -> None:
    """A buffer exists from when its shape is asked for: never for two microbatches to come."""

    class Asked(Stamped):
        newest = -1

        def boundary(self, stage: int, microbatch: int) -> tuple[tuple[int, ...], torch.dtype]:
            if stage == rank.rank:  # what enters this rank, forwards
                self.newest = max(self.newest, microbatch)
            return super().boundary(stage, microbatch)

        def forward(self, stage: int, microbatch: int, incoming: Tensor | None) -> Tensor | None:
            ahead.append(self.newest - microbatch)
            return super().forward(stage, microbatch, incoming)

    ahead: list[int] = []
    line = PeerGroup(rank.store(), "line", rank.rank, 3, seconds=120)
    interpreter = PipelineInterpreter(line, CPU)
    for name in ("1f1b", "gpipe", "forward"):
        interpreter.run(build_schedule(name, 3, 5), Asked(3, 0))
    interpreter.wait_until_sent()
    rank.barrier("settled")
    assert rank.rank == 0 or ahead == [1, 1, 1, 1, 0] * 3


def die_in_mid_run(rank: RankContext, victim: int) -> str:
    class Dies(Stamped):
        def backward(self, stage: int, microbatch: int, gradient: Tensor | None) -> Tensor | None:
            if rank.rank == victim and microbatch == 1:
                rank.kill(victim)
            return super().backward(stage, microbatch, gradient)

    line = PeerGroup(rank.store(), "line", rank.rank, 4, seconds=120)
    schedule = build_schedule("1f1b", 4, 6)
    interpreter = PipelineInterpreter(line, CPU)
    interpreter.run(schedule, Stamped(4, 0))
    with pytest.raises(PeerLostError, match=r"pipeline|closed"):
        interpreter.run(schedule, Dies(4, 1))
    with pytest.raises(PeerLostError):  # it stays so
        interpreter.run(schedule, Stamped(4, 2))
    survivors = [r for r in range(4) if r != victim]
    me = survivors.index(rank.rank)
    again = PeerGroup(rank.store("next"), "generation2", me, 3, seconds=120)
    fresh = PipelineInterpreter(again, CPU)
    for number in range(3):
        fresh.run(build_schedule("1f1b", 3, 4), Stamped(3, 100 + number))
    fresh.wait_until_sent()
    for other in survivors:
        rank.mark("done")
        rank.wait_mark("done", other)
    return "went on"


@pytest.mark.parametrize("victim", [0, 2])
def test_a_killed_rank_stops_everybody_and_the_rest_go_on_without_it(victim: int) -> None:
    """Well before the time-out of the group (50 s), also those that were no neighbours."""
    values = rank_values(die_in_mid_run, 4, {"victim": victim}, dies={victim: "SIGKILL"})
    assert [v for r, v in enumerate(values) if r != victim] == ["went on"] * 3


@ranks(3)
def test_an_error_of_the_work_stops_the_peers_too(rank: RankContext) -> None:
    class Fails(Stamped):
        def forward(self, stage: int, microbatch: int, incoming: Tensor | None) -> Tensor | None:
            if stage == 1 and microbatch == 2:
                raise ZeroDivisionError("the model's own")
            return super().forward(stage, microbatch, incoming)

    line = PeerGroup(rank.store(), "line", rank.rank, 3, seconds=120)
    rank.barrier("joined")
    expected = ZeroDivisionError if rank.rank == 1 else PeerLostError
    with pytest.raises(expected):
        PipelineInterpreter(line, CPU).run(build_schedule("gpipe", 3, 4), Fails(3, 0))


@ranks(2)
def test_a_tensor_of_another_shape_is_named(rank: RankContext) -> None:
    class Wide(Stamped):
        def forward(self, stage: int, microbatch: int, incoming: Tensor | None) -> Tensor | None:
            return torch.zeros(3, dtype=torch.float64)

    line = PeerGroup(rank.store(), "line", rank.rank, 2, seconds=120)
    rank.barrier("joined")
    error = (ValueError, r"0F0 gave \(3,\) torch.float64, the boundary 1 is")
    expected, match = error if rank.rank == 0 else (PeerLostError, "lost")
    with pytest.raises(expected, match=match):
        PipelineInterpreter(line, CPU).run(build_schedule("1f1b", 2, 2), Wide(2, 0))


def refused(schedule: Schedule, work: StageWork) -> str:
    line = PeerGroup(None, "alone", 0, 1)  # type: ignore[arg-type]  # one rank needs no store
    with pytest.raises(LayoutError) as caught:
        PipelineInterpreter(line, CPU).run(schedule, work)
    return str(caught.value)


def test_refused_before_anything_starts() -> None:
    whole = stages_of(0, from_csv("0F0,0I0,0W0\n", "split"), split=False)
    assert "1f1b is for 2 ranks, the pipeline has 1" in refused(build_schedule("1f1b", 2, 2), whole)
    backwards = Schedule(
        "odd", 1, (0,), ((Action(0, ActionKind.BACKWARD, 0), Action(0, ActionKind.FORWARD, 0)),)
    )
    assert "0B0" in refused(backwards, whole)
    with pytest.raises(LayoutError, match="use fewer microbatches"):
        make_pipeline_plan(build_schedule("forward", 1, 10), 0, first_tag=0x7FFF0000 - 10)


def test_trace_has_a_row_for_every_track() -> None:
    spans = {
        0: [TraceSpan(COMPUTE, "0F0", 10.0, 10.5), TraceSpan(COMPUTE, "0B0", 11.0, 12.0)],
        1: [TraceSpan(RECEIVE, "1F0", 10.0, 10.6), TraceSpan(COMPUTE, "1F0", 10.6, 10.9)],
    }
    events = chrome_trace(spans)["traceEvents"]
    named = {(e["pid"], e["tid"]): e["args"]["name"] for e in events if e["name"] == "thread_name"}
    assert named == {(0, 0): COMPUTE, (1, 0): COMPUTE, (1, 1): RECEIVE}
    complete = [e for e in events if e["ph"] == "X"]
    assert len(complete) == 4
    assert all(named[e["pid"], e["tid"]] == e["cat"] for e in complete)
    assert min(e["ts"] for e in complete) == 0
    assert sum(e["dur"] for e in complete) == pytest.approx(2.4e6)
    found = measure_pipeline([spans[0], spans[1]])
    assert found.makespan_s == pytest.approx(2.0)
    assert found.bubble == pytest.approx((0.25, 0.85))
    with pytest.raises(ValueError, match="no compute spans"):
        measure_pipeline([[], [TraceSpan(RECEIVE, "1F0", 0.0, 1.0)]])
