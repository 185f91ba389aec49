"""Rounds of learners while nodes join and are lost: no state that is old or unrelated ever wins.

The machines of `test_transitions_simulated.py`, with a state each. Terms, generations, commits and
notes of starts lie in a run store in memory. The run's own code decides. `GenerationCreator` and
`GenerationPlanner` make generations. `RestorePointFinder` chooses among snapshots and checkpoints,
`try_commit` fences checkpoints. `resolve_step` ends a round that was cut short. The weights of a
round are a word with the round and the generation that computed it. So two branches of a run
never look alike. `HOLDFAST_ROUND_SCHEDULES` says how many schedules are drawn.
"""

from __future__ import annotations

import asyncio
import os
import random
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cache, partial
from typing import Any, cast

import pytest

from holdfast.checkpoint.format.save_context import SaveContext
from holdfast.checkpoint.memory.snapshot_store import InventoryEntry
from holdfast.checkpoint.mover.messages import RestorePoint
from holdfast.checkpoint.restore import catalog, restore_point
from holdfast.checkpoint.restore.reader import Checkpoint
from holdfast.checkpoint.restore.restore_point import RestorePointFinder
from holdfast.checkpoint.restore.start_records import record_start
from holdfast.checkpoint.save.writer import try_commit, write_part
from holdfast.config.run import RunConfig
from holdfast.core.format.manifest import PartManifest, PlacedBox
from holdfast.core.sharding.run_table import run_state_table
from holdfast.core.sharding.state_table import learner_shares
from holdfast.elastic.coordinator import survivors
from holdfast.elastic.coordinator.coordinator import CreationRejectedError, PlanOutdatedError
from holdfast.elastic.coordinator.generation_planner import GenerationPlanner, PlannerContext
from holdfast.elastic.coordinator.generation_store import GenerationCreator
from holdfast.elastic.coordinator.survivors import RecoveryPlanner
from holdfast.elastic.protocol.coordinator_messages import AgentFacts, NodeReport, StartState
from holdfast.elastic.protocol.generation_outcome import NodeOutcome
from holdfast.elastic.protocol.generation_record import GenerationRecord, record_of
from holdfast.errors import CheckpointError, FencedError, HoldfastError
from holdfast.layout import Topology
from holdfast.plan.placing.planner import plan_layout
from holdfast.policy.membership import transitions
from holdfast.policy.membership.election import AgentState
from holdfast.policy.membership.transitions import STOPPED_STAGES, Directive, NodeStage, StageReport
from holdfast.policy.recovery import survivors as held_states
from holdfast.policy.recovery.step_resolution import RankProgress, StepStage, resolve_step
from holdfast.policy.recovery.survivors import HeldState
from holdfast.wire.term import Term, create_term
from tests.runtime.policy.membership.test_transitions_simulated import (
    QUIET,
    RULES,
    Machine,
    Simulation,
)
from tests.support.checkpoint_faults import states
from tests.support.memory_store import MemoryStore

SCHEDULES = int(os.environ.get("HOLDFAST_ROUND_SCHEDULES", "40"))
LEARNERS, DURABLE_EVERY = 6, 7
MODEL = {"preset": None, "layers": 1, "dim": 4, "heads": 1, "kv_heads": 1, "ffn_dim": 4}
CONFIG = RunConfig.model_validate(
    {
        "data": {"folder": "unused"},
        "model": MODEL | {"vocab_size": 8},
        "train": {"batch_size": LEARNERS, "microbatch_size": 1, "optimizer": {"name": "sgd"}},
        "outer": {"learners": LEARNERS},
    }
)
TABLE = run_state_table(CONFIG)
assert any(row.of_learners for row in TABLE)


@dataclass
class Process:
    """A worker. state: generation and rank whose part it holds; None: none, as a newcomer."""

    number: int
    generation: int = 0
    rank: int = 0
    applied: int = 0
    weights: str = ""
    whole: str = ""  # the weights of the next round, whose sum it holds; "": not yet
    state: tuple[int, int] | None = None

    def held(self) -> HeldState:
        torn = self.state is None
        whole = self.applied + 1 if self.whole and not torn else None
        return HeldState(
            self.generation, self.rank, self.applied, whole, torn=torn, state=self.state
        )


@dataclass(frozen=True)
class Begun:
    """What a generation was made of."""

    record: GenerationRecord
    start: StartState

    @property
    def topology(self) -> Topology:
        assert self.record.topology is not None
        return self.record.topology


@cache
def _blob(topology: Topology, rank: int) -> tuple[tuple[PlacedBox, ...], bytes, int]:
    tensors = states.owned(topology, rank, TABLE)
    return tensors, *states.blob(0, tensors, TABLE)


class Memory:
    """The snapshots in one node's memory, by (generation, round, rank), and their weights."""

    def __init__(self, name: str, run: RoundRun) -> None:
        self.name, self.run = name, run
        self.parts: dict[tuple[int, int, int], str] = {}

    def inventory(self) -> list[InventoryEntry]:
        return [self._entry(at, weights) for at, weights in self.parts.items()]

    def _entry(self, at: tuple[int, int, int], weights: str) -> InventoryEntry:
        generation, step, rank = at
        part = _part(MemoryStore(), self.run.context(generation), step, rank, weights)
        return InventoryEntry(*at, part.blob.size, part.to_bytes())

    def topology_and_table(self, generation: int) -> tuple[Topology, Any]:
        return self.run.begun[generation].topology, TABLE


def _part(
    store: MemoryStore, context: SaveContext, step: int, rank: int, weights: str
) -> PartManifest:
    tensors, data, start = _blob(context.topology, rank)
    meta = {"weights": weights}
    return write_part(store, context, step, rank, [data], start, tensors, meta)


class RoundRun(Simulation):
    """A run of learners. line: the weights of each round of the run, from the initial ones."""

    def __init__(self, seed: int, agents: int) -> None:
        super().__init__(seed, agents)
        self.store, self.loop = MemoryStore(), asyncio.new_event_loop()
        self.numbers = iter(range(1, 10**9))
        self.processes = {name: Process(next(self.numbers)) for name in self.machines}
        self.memory = {name: Memory(name, self) for name in self.machines}
        self.terms: dict[str, Term] = {}
        self.planners: dict[str, GenerationPlanner] = {}
        self.reports: dict[str, dict[str, NodeReport]] = {}
        self.begun: dict[int, Begun] = {}
        self.line, self.parents = ["initial"], {"initial": ""}
        self.phases: dict[int, int] = {}  # of the open round of each generation that works
        self.starts: list[int] = []  # rounds that generations began from
        self.is_refused = False  # no state in reach can be trusted
        self.noted: dict[int, int] = {}  # the same, as the run store has it before they begin

    def context(self, generation: int) -> SaveContext:
        return SaveContext(
            generation, self.begun[generation].topology, TABLE, "config", "data", 512
        )

    # --- making a generation ----------------------------------------------------------------
    def _claim(self, m: Machine) -> None:
        super()._claim(m)
        if m.reign is None:
            return
        term = create_term(self.store, m.reign.term, m.address, m.name)
        assert term is not None, "the store has the terms that the simulation has"
        self.terms[m.name], self.reports[m.name] = term, {}
        context = PlannerContext(
            CONFIG,
            plan_layout,
            cast(Any, _Mover(self, m.name)),
            "",
            lambda event: None,
            partial(self._opened, m.name),
            self._newest_durable,
        )
        self.planners[m.name] = planner = GenerationPlanner(context)
        if self.generations:
            planner.load_record(record_of(self.store, len(self.generations)))

    def _newest_durable(self) -> int:
        return max(map(catalog.step_of, catalog.list_commits(self.store)), default=0)

    def _serve(
        self, m: Machine, report: StageReport, join: bool, term: int, parted: str
    ) -> tuple[int, str, Directive, tuple[str, ...]]:
        other, process = self.machines[report.name], self.processes[report.name]
        now = str(other.mark), other.seat.generation, other.stage
        said = report.incarnation, report.generation, report.stage
        if m.reign is not None and report.stage in STOPPED_STAGES and said == now:
            held = {process.number: process.held()} if process.generation else {}
            facts = AgentFacts(other.address)
            report_of = NodeReport(facts, NodeOutcome(held), process.generation)
            self.reports[m.name][report.name] = report_of
        return super()._serve(m, report, join, term, parted)

    def _create(self, m: Machine, mark: int, number: int, marks: dict[str, int]) -> None:
        if m.reign is None or not m.up or m.mark != mark or self.outage:
            return
        planner, names = self.planners[m.name], frozenset(marks)
        reports = {name: NodeReport(AgentFacts(self.machines[name].address)) for name in names}
        reports |= {n: r for n, r in self.reports[m.name].items() if m.reign.node(n) is not None}
        self._marks, reachable = marks, self._reachable(m.name, names, reports)
        creator = GenerationCreator(
            self.terms[m.name], self.store, planner.plan_generation, planner.make_start_state
        )
        try:
            made = self.loop.run_until_complete(creator(m.reign, number, names, reports))
        except CreationRejectedError as error:
            newest = error.term, error.generation
            m.reign = transitions.creation_rejected(m.reign, *newest, self.now)
        except FencedError:
            m.reign = transitions.term_superseded(m.reign, self.now)
        except PlanOutdatedError:
            pass
        except HoldfastError as error:  # the coordinator tries again
            self.is_refused = isinstance(error, CheckpointError)  # all in reach was given up
        else:
            self.is_refused = False
            self.begun[number] = Begun(record_of(self.store, number), made.start)
            step = made.start.step
            assert step >= reachable, f"{number} begins from round {step}, of {reachable} there"
            self.reports[m.name] = {
                name: replace(one, node_outcome=None) for name, one in reports.items()
            }
            used = frozenset(self.begun[number].topology.nodes)
            m.reign = transitions.generation_created(
                m.reign, number, used, self.now, RULES, made.taken
            )

    def _opened(self, leader: str, generation: int) -> None:
        """The object of a generation was made, whatever comes next."""
        assert generation == len(self.generations) + 1
        nodes = record_of(self.store, generation).topology.nodes  # type: ignore[union-attr]
        self.generations.append({name: self._marks[name] for name in nodes})
        self.opened_at.append(self.now)

    def _reachable(self, leader: str, names: frozenset[str], reports: dict[str, NodeReport]) -> int:
        """The newest round of the run that a checkpoint, the memory of nodes in reach, or the
        processes of these nodes hold completely."""
        rounds = [0]
        for key in catalog.list_commits(self.store):
            commit = Checkpoint.open(self.store, key).commit
            is_ours = self._is_of_run(commit.step, commit.meta["weights"])
            is_given_up = self._is_given_up(commit.generation, commit.step)
            rounds += [commit.step] * (is_ours and not is_given_up)
        kept: dict[tuple[int, int], dict[int, str]] = {}
        for memory in self.memories_in_reach(leader):
            for (generation, step, rank), weights in memory.parts.items():
                kept.setdefault((generation, step), {})[rank] = weights
        for (generation, step), parts in kept.items():
            if len(parts) == self.begun[generation].topology.world_size:
                is_ours = self._is_of_run(step, parts[0])
                rounds += [step] * (is_ours and not self._is_given_up(generation, step))
        held: dict[int, list[HeldState]] = {}
        for name in names & reports.keys():
            for one in (reports[name].node_outcome or NodeOutcome()).processes.values():
                if one.state is not None:
                    held.setdefault(one.state[0], []).append(one)
        for generation, states_of in held.items():
            newest, workers = max(h.applied for h in states_of), self.begun[generation].topology
            able = [h for h in states_of if newest in (h.applied, h.whole)]
            shares = learner_shares(LEARNERS, workers.world_size)
            have = {k for h in able if h.state is not None for k in shares[h.state[1]]}
            holding = {
                process.weights
                for process in self.processes.values()
                if process.state and process.state[0] == generation and process.applied == newest
            }
            is_ours = any(self._is_of_run(newest, one) for one in holding)
            rounds += [newest] * (len(have) == LEARNERS and is_ours)
        return max(rounds)

    def _is_given_up(self, generation: int, step: int) -> bool:
        return any(g > generation and start < step for g, start in self.noted.items())

    def memories_in_reach(self, name: str) -> list[Memory]:
        machines = self.machines.values()
        return [self.memory[m.name] for m in machines if m.up and self.linked(name, m.name)]

    def _is_of_run(self, step: int, weights: Any) -> bool:
        return step < len(self.line) and self.line[step] == weights

    # --- its rounds -------------------------------------------------------------------------
    def _obey(
        self, m: Machine, term: int, other: str, due: Directive, members: tuple[str, ...]
    ) -> None:
        before = m.seat.generation
        super()._obey(m, term, other, due, members)
        if m.seat.generation > before:
            self._start(m, m.seat.generation)

    def _start(self, m: Machine, generation: int) -> None:
        """The worker of a node gets a rank; what it holds stays where the run continues live."""
        begun, process = self.begun[generation], self.processes[m.name]
        rank = begun.topology.nodes.index(m.name)
        came_from, seat = begun.record.came_from, begun.record.processes[rank]
        if came_from is None or came_from[rank] is None or seat != process.number:
            process.state, process.whole = None, ""
        process.generation, process.rank = generation, rank
        point = begun.start.restore_point
        try:
            is_from_store = point is not None and point.durable
            record_start(self.store, generation, begun.start.step, is_from_store)
            self.noted[generation] = begun.start.step
        except FencedError:
            m.stage = NodeStage.BROKEN

    def _work(self, m: Machine) -> None:
        super()._work(m)
        generation = m.seat.generation
        is_first = generation and m.name == min(self.generations[generation - 1])
        if m.stage is NodeStage.WORKING and is_first and self.trains(generation):
            if generation in self.phases:
                self._train(generation)
            else:
                self._begin(generation)
                self.phases[generation] = 0

    def _ranks(self, generation: int) -> list[Process]:
        return [self.processes[name] for name in self.begun[generation].topology.nodes]

    def _learners_of(self, processes: Iterable[Process]) -> set[int]:
        """The learners whose state these processes hold."""
        learners: set[int] = set()
        for process in processes:
            assert process.state is not None
            generation, rank = process.state
            workers = self.begun[generation].topology.world_size
            learners |= set(learner_shares(LEARNERS, workers)[rank])
        return learners

    def _begin(self, generation: int) -> None:
        """All workers are connected: they agree on the round, and those that lack it receive it."""
        begun, ranks = self.begun[generation], self._ranks(generation)
        step, point = begun.start.step, begun.start.restore_point
        if begun.record.came_from is None:
            assert point is not None
            weights = str(point.meta["weights"]) if point.key else self.line[0]
        else:
            steps = [RankProgress(p.applied if p.state else None, _stage(p)) for p in ranks]
            step = resolve_step(steps).step
            at_step = {p.weights for p in ranks if p.state and p.applied == step}
            ahead = {p.whole for p in ranks if p.state and p.whole and p.applied == step - 1}
            assert len(at_step | ahead) == 1, f"of one round they hold {at_step | ahead}"
            missing = set(range(LEARNERS)) - self._learners_of(
                p for p in ranks if p.state and (p.applied == step or p.whole in ahead)
            )
            assert not missing, f"none of them holds learners {missing}"
            (weights,) = at_step | ahead
        if step == len(self.line) and self.parents[weights] == self.line[-1]:
            self.line.append(weights)  # all had its sum, and none had applied it
        assert self._is_of_run(step, weights), (
            f"generation {generation} begins from {weights}; the run had {self.line[: step + 1]}"
        )
        if generation == len(self.generations):
            del self.line[step + 1 :]  # no node in reach has the rest
        self.starts.append(step)
        for rank, process in enumerate(ranks):
            process.applied, process.weights, process.whole = step, weights, ""
            process.state = (generation, rank)

    def _train(self, generation: int) -> None:
        """A third of a round. A fault may come after each."""
        ranks, phase = self._ranks(generation), self.phases[generation]
        self.phases[generation] = (phase + 1) % 3
        if phase == 0:
            weights = f"{ranks[0].applied + 1}@{generation}"
            self.parents[weights] = ranks[0].weights
            for process in ranks:
                process.whole = weights
            return
        first = ranks[: self.draw.randint(1, len(ranks))] if phase == 1 else ranks
        for process in first:
            if process.whole:
                process.applied, process.weights = process.applied + 1, process.whole
                process.whole = ""
        step, weights = ranks[0].applied, ranks[0].weights
        if phase == 1 and generation == len(self.generations):
            assert step == len(self.line)
            assert self.parents[weights] == self.line[-1]
            self.line.append(weights)
        if phase == 2:
            self._snapshot(generation, step, weights)

    def _snapshot(self, generation: int, step: int, weights: str) -> None:
        """Into the memory of each node and of a peer; now and then into the run store."""
        nodes = self.begun[generation].topology.nodes
        for rank, name in enumerate(nodes):
            for holder in {name, nodes[(rank + 1) % len(nodes)]}:
                memory = self.memory[holder]
                memory.parts = {at: w for at, w in memory.parts.items() if at[1] != step - 2}
                if self.draw.random() < 0.95:
                    memory.parts[generation, step, rank] = weights
        if step % DURABLE_EVERY == 0:
            writers = len(nodes) - (self.draw.random() < 0.2)
            late = self.draw.uniform(0, 4)
            self.at(late, lambda: self._save(generation, step, weights, writers))

    def _save(self, generation: int, step: int, weights: str, writers: int) -> None:
        if self.outage:
            return
        context = self.context(generation)
        with suppress(FencedError):
            for rank in range(writers):
                _part(self.store, context, step, rank, weights)
                try_commit(self.store, context, step)

    # --- faults -----------------------------------------------------------------------------
    def crash(self, name: str, *, says: bool = True) -> None:
        super().crash(name, says=says)
        self.processes[name], self.memory[name].parts = Process(next(self.numbers)), {}

    def back(self, name: str) -> None:
        if not self.machines[name].up:
            self.processes[name] = Process(next(self.numbers))
        super().back(name)

    def fault(self) -> None:
        if self.draw.random() < 0.7:
            super().fault()
            return
        machine = self.machines[self.draw.choice(sorted(self.machines))]
        if machine.stage in (NodeStage.BUILDING, NodeStage.WORKING):
            self.lose_worker(machine)

    def lose_worker(self, machine: Machine) -> None:
        """The worker dies. Its node keeps its memory, and has another worker."""
        machine.stage = NodeStage.BROKEN
        fresh = Process(next(self.numbers), machine.seat.generation)
        self.processes[machine.name] = fresh


class _Mover:
    """What a coordinator asks its mover."""

    def __init__(self, run: RoundRun, name: str) -> None:
        self._run, self._name = run, name

    async def choose_restore_point(
        self, generation: int, rejected: dict[str, str], machines: object
    ) -> RestorePoint:
        memories = cast(list[Any], self._run.memories_in_reach(self._name))
        finder = RestorePointFinder(
            self._run.store, memories, generation, "config", "data", lambda key, reason: None
        )
        choice = finder.find_newest(rejected)
        if choice is None:
            return RestorePoint(None, 0, 0, {}, ())
        commit = choice.commit
        return RestorePoint(
            commit.key, commit.step, commit.generation, commit.meta, (), choice.is_durable
        )


def _stage(process: Process) -> StepStage:
    return StepStage.REDUCED if process.whole else StepStage.COMPUTING


def _all_train(run: RoundRun) -> bool:
    up = {m.name for m in run.machines.values() if m.up}
    return run.trains(len(run.generations)) and run.generations[-1].keys() == up


def _schedule(seed: int) -> RoundRun:
    draw = random.Random(-seed - 1)
    run = RoundRun(seed, draw.randint(2, LEARNERS))
    for _ in range(draw.randint(2, 6)):
        run.run(run.now + draw.uniform(0, 25))
        run.fault()
        run.safe()
    run.run(run.now + 61)
    run.calm, run.cuts, run.outage = True, set(), False
    for name in run.machines:
        run.back(name)
    end = run.now + QUIET
    while run.now < end and not _all_train(run) and not run.is_refused:
        run.run(run.now + 1)
    assert run.is_refused or _all_train(run), f"seed {seed}: not all train"
    reached = len(run.line)
    run.run(run.now + 10)
    assert run.is_refused or len(run.line) > reached, f"seed {seed}: no round after {reached}"
    run.loop.close()
    return run


def test_no_schedule_lets_an_old_or_unrelated_state_win() -> None:
    runs = [_schedule(seed) for seed in range(SCHEDULES)]
    starts = [step for run in runs for step in run.starts]
    assert sum(step > 0 for step in starts) > SCHEDULES
    assert sum(run.is_refused for run in runs) <= SCHEDULES // 50, "a run hardly ever gives up"
    rounds = sum(len(run.line) for run in runs)
    print(f"{SCHEDULES} schedules, {len(starts)} generations, {rounds} rounds")


# --- a stranger and a run ------------------------------------------------------------------------
def _run_of_three(seed: int) -> RoundRun:
    run = RoundRun(seed, 3)
    run.loss = 0.0
    while len(run.line) <= 2 * DURABLE_EVERY:
        run.run(run.now + 1)
    return run


def _add_stranger(run: RoundRun, cuts: bool) -> Machine:
    """A fresh worker that finds the run store. cuts: it reaches no node of the run."""
    name = "stranger"
    run.machines[name] = machine = Machine(name, seat=AgentState(name, role_since=run.now))
    run.processes[name], run.memory[name] = Process(next(run.numbers)), Memory(name, run)
    if cuts:
        run.cuts = {frozenset((name, other)) for other in run.machines if other != name}
    run.at(0.0, run._life(machine))
    return machine


def test_a_fresh_singleton_never_overwrites_a_run_elsewhere() -> None:
    """It reaches the run store and no node of the run. The journal grows there, so it waits. Once
    the cut heals, it takes the run's round and not the reverse."""
    run = _run_of_three(1)
    stranger = _add_stranger(run, cuts=True)
    generations, rounds = len(run.generations), list(run.line)
    run.run(run.now + 600)
    assert (len(run.generations), run.term) == (generations, 1)
    assert stranger.seat.generation == 0
    assert run.line[: len(rounds)] == rounds
    assert len(run.line) > len(rounds) + 100
    rounds, run.cuts = list(run.line), set()
    run.run(run.now + 60)
    assert run.generations[-1].keys() == set(run.machines)
    assert run.starts[-1] >= len(rounds) - 1
    assert run.line[: len(rounds)] == rounds


@pytest.mark.parametrize("seed", range(5))
def test_a_fresh_singleton_continues_a_run_that_is_lost_and_old_nodes_join_it(seed: int) -> None:
    """All nodes of the run vanish, so the stranger takes the newest checkpoint and never initial
    weights. Then the nodes return with newer rounds in memory, which the run has given up."""
    run = _run_of_three(seed)
    kept = {name: dict(memory.parts) for name, memory in run.memory.items()}
    durable, lost = run._newest_durable(), list(run.line)
    for name in kept:
        run.crash(name, says=False)
    _add_stranger(run, cuts=False)
    run.run(run.now + 90)
    assert run.generations[-1].keys() == {"stranger"}
    assert run.starts[-1] == durable > 0
    assert run.line[: durable + 1] == lost[: durable + 1]
    reached = list(run.line)
    for name, parts in kept.items():
        run.back(name)
        run.memory[name].parts = parts
    run.run(run.now + 60)
    assert run.generations[-1].keys() == set(run.machines)
    run.crash("stranger")
    run.run(run.now + 60)
    assert run.line[: len(reached)] == reached


# --- the check finds what is wrong ----------------------------------------------------------------
def _plan_without_store(*arguments: Any, **_: Any) -> Any:
    """Processes may continue from what they hold, whatever the run store has."""
    return PLAN_RECOVERY(*arguments[:4])


PLAN_RECOVERY = RecoveryPlanner.plan_recovery
BROKEN: dict[str, tuple[tuple[object, str, Any], ...]] = {
    "a snapshot that was given up counts": ((restore_point, "is_superseded", lambda *_: False),),
    "a state older than a checkpoint counts": (
        (RecoveryPlanner, "plan_recovery", _plan_without_store),
    ),
    "any learner will do": (
        (survivors, "first_missing_tensor", lambda *_: None),
        (held_states, "first_missing_tensor", lambda *_: None),
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("rule", BROKEN)
def test_a_broken_rule_is_found(rule: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for target, name, value in BROKEN[rule]:
        monkeypatch.setattr(target, name, value)
    with pytest.raises(AssertionError, match=r"begins from|hold"):
        for _ in map(_schedule, range(1000)):
            pass
