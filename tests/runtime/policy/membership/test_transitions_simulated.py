"""Two to nine agents under a simulated clock: runs drawn from seeds, thousands in the campaign.

The machines with real times: heartbeats, silence, waits; requests and answers take time, some are
lost or come twice, late and in another order. Nodes crash (with or without a machine that says so)
and return, links are cut and heal, the run store is out of reach, notices come. What must hold at
every moment is looked at after every event, and at the end, when all faults are over and some time
has passed, everybody who is there trains. HYPOTHESIS=search draws other runs.
"""

from __future__ import annotations

import heapq
import os
import random
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from itertools import count

import pytest

from holdfast.policy.membership import election, transitions
from holdfast.policy.membership.election import AgentState, ElectionTimeouts, PreVoteReply, Role
from holdfast.policy.membership.transitions import (
    STOPPED_STAGES,
    CoordinatorState,
    Directive,
    MembershipRules,
    NodeCommand,
    NodeRecord,
    NodeStage,
    Phase,
    StageReport,
)
from tests.support.marks import in_campaign

BEAT = 2.0
RULES = MembershipRules(lambda nodes: tuple(n.name for n in nodes), gather_wait_s=1.0)
PATIENCE = ElectionTimeouts()
QUIET = 180.0
"""Seconds after the last fault in which everything has to be well again: two waits of a minority,
and what it takes to try two nodes together again that could not reach each other."""


@dataclass
class Machine:
    name: str
    mark: int = 0
    up: bool = True
    says_dead: bool = True  # its machine answers that nobody listens
    seat: AgentState = field(default_factory=lambda: AgentState(""))
    reign: CoordinatorState | None = None
    stage: NodeStage = NodeStage.IDLE
    known: bool = False
    asked: int = 0  # number of its open question
    parted: str = ""

    @property
    def address(self) -> str:
        return f"{self.name}/{self.mark}"


class Simulation:
    def __init__(self, seed: int, agents: int) -> None:
        self.draw = random.Random(seed)
        self.now = 0.0
        self.term, self.holder = 0, ""
        self.generations: list[dict[str, int]] = []
        self.opened_at: list[float] = []
        self.outage = False
        self.cuts: set[frozenset[str]] = set()
        self.loss = self.draw.choice((0.0, 0.0, 0.05))
        self.calm = False  # no more losses
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._count = count()
        names = [f"n{i}" for i in range(agents)]
        self.machines = {name: Machine(name, seat=AgentState(name)) for name in names}
        for machine in self.machines.values():
            self.at(self.draw.uniform(0, 1), self._life(machine))

    # --- time -------------------------------------------------------------------------------
    def at(self, after: float, do: Callable[[], None]) -> None:
        heapq.heappush(self._events, (self.now + after, next(self._count), do))

    def run(self, until: float) -> None:
        while self._events and self._events[0][0] <= until:
            self.now, _, do = heapq.heappop(self._events)
            do()
        self.now = until

    def _delay(self) -> float:
        return (
            self.draw.uniform(0.001, 0.02) if self.draw.random() < 0.95 else self.draw.uniform(0, 3)
        )

    def _lost(self) -> bool:
        return not self.calm and self.draw.random() < self.loss

    # --- an agent ---------------------------------------------------------------------------
    def _life(self, m: Machine) -> Callable[[], None]:
        """Its loop, as long as this process lives: what its standing asks for, again and again."""
        mark = m.mark

        def turn() -> None:
            if not m.up or m.mark != mark:
                return
            again = 0.2
            match m.seat.role:
                case Role.DISCOVERING if not self.outage:
                    m.seat = election.newest_term_read(m.seat, self.term, self.holder, self.now)
                    if m.seat.role is Role.DISCOVERING:
                        self._ask(m)
                        again = 0.5
                case Role.FOLLOWER:
                    again = BEAT / 2
                    self._ask(m)
                case Role.PRE_CANDIDATE:
                    again = 0.5
                    self._look_around(m)
                case Role.CANDIDATE if not self.outage:
                    self._claim(m)
                case Role.LEADER:
                    again = BEAT / 2
                    self._lead(m)
            self._work(m)
            self.at(again, turn)

        return turn

    def linked(self, one: str, other: str) -> bool:
        return one == other or frozenset((one, other)) not in self.cuts

    def _ask(self, m: Machine) -> None:
        """A request to its coordinator, and the answer; or none, which it notices after a while."""
        m.asked += 1
        asked, mark, holder = m.asked, m.mark, m.seat.leader_address
        other = self.machines.get(holder.partition("/")[0])
        if other is None or not self.linked(m.name, other.name) or self._lost():
            self.at(BEAT, lambda: self._unanswered(m, mark, asked, False))
            return
        if not other.up or other.address != holder:
            self._unanswered(m, mark, asked, other.up or other.says_dead)
            return
        join = not (m.seat.role is Role.FOLLOWER and m.known)
        report = StageReport(m.name, str(m.mark), m.seat.generation, m.stage)
        term, parted = m.seat.term, m.parted

        def arrive() -> None:
            if not other.up or other.address != holder or not self.linked(m.name, other.name):
                return
            answer = self._serve(other, report, join, term, parted)
            if not self._lost():
                self.at(self._delay(), lambda: self._answered(m, mark, asked, answer))

        self.at(self._delay(), arrive)
        if not self.calm and self.draw.random() < 0.02:  # comes twice
            self.at(self._delay() + 1.0, arrive)
        self.at(BEAT, lambda: self._unanswered(m, mark, asked, False))

    def _unanswered(self, m: Machine, mark: int, asked: int, dead: bool) -> None:
        if m.up and (m.mark, m.asked) == (mark, asked):
            m.asked += 1
            m.seat = election.leader_unanswered(m.seat, dead, self.now, PATIENCE)

    def _serve(
        self, m: Machine, report: StageReport, join: bool, term: int, parted: str
    ) -> tuple[int, str, Directive, tuple[str, ...]]:
        if m.reign is None:
            return m.seat.term, "", Directive(NodeCommand.REFUSE), ()
        if term > m.reign.term:
            m.reign = transitions.term_superseded(m.reign, self.now)
        elif join:
            new = NodeRecord(
                report.name,
                report.incarnation,
                1,
                self.now,
                self.now,
                report.generation,
                report.stage,
            )
            m.reign = transitions.node_joined(m.reign, new, self.now, RULES)
        else:
            m.reign = transitions.reports_received(m.reign, [report], self.now, RULES)
        if parted and report.generation == m.reign.generation:
            m.reign = transitions.link_failed(m.reign, report.name, parted, self.now, RULES)
        reign = m.reign
        node = reign.node(report.name)
        if reign.phase is not Phase.FENCED and (
            node is None or node.incarnation != report.incarnation
        ):
            return reign.term, "join", Directive(NodeCommand.WAIT), ()
        due = transitions.directive_for(reign, report.name)
        return reign.term, "", due, tuple(sorted(reign.members))

    def _answered(
        self, m: Machine, mark: int, asked: int, answer: tuple[int, str, Directive, tuple[str, ...]]
    ) -> None:
        if not m.up or (m.mark, m.asked) != (mark, asked):
            return
        m.asked += 1
        self._obey(m, *answer)

    def _obey(
        self, m: Machine, term: int, other: str, due: Directive, members: tuple[str, ...]
    ) -> None:
        if term < m.seat.term or due.command is NodeCommand.REFUSE:
            m.seat = election.leader_refused(m.seat, self.now)
            return
        m.seat = election.leader_answered(m.seat, term, self.now)
        m.known = not other
        if due.command is NodeCommand.START and due.generation > m.seat.generation:
            assert m.stage in STOPPED_STAGES, f"{m.name} is started while it works"
            assert self.generations[due.generation - 1].keys() == set(members)
            m.seat = election.generation_joined(m.seat, term, due.generation, members)
            m.stage, m.parted = NodeStage.BUILDING, ""
        halts = (
            due.command in (NodeCommand.HALT, NodeCommand.PAUSE)
            and due.generation == m.seat.generation
        )
        if halts and m.stage not in STOPPED_STAGES:
            m.stage = NodeStage.HELD

    def _look_around(self, m: Machine) -> None:
        if self.outage:
            self._ask(m)
            return
        if self.term > m.seat.term:
            m.seat = election.newest_term_read(m.seat, self.term, self.holder, self.now)
            return
        said = {}
        for name in m.seat.members:
            other = self.machines[name]
            if name == m.name:
                continue
            if not self.linked(m.name, name) or (not other.up and not other.says_dead):
                said[name] = PreVoteReply.UNKNOWN
            elif not other.up:
                said[name] = PreVoteReply.DEAD
            elif other.seat.term < m.seat.term:
                said[name] = PreVoteReply.UNKNOWN
            else:
                hears = election.hears_leader(other.seat, self.now, PATIENCE)
                said[name] = PreVoteReply.HEARS_LEADER if hears else PreVoteReply.MISSES_LEADER
        sign = str(int(self.now / 5)) if self.trains(len(self.generations)) else ""
        newest = len(self.generations)
        m.seat = election.pre_vote_ended(m.seat, said, newest, self.now, PATIENCE, sign)
        if m.seat.role is Role.PRE_CANDIDATE:
            self._ask(m)

    # --- leading ----------------------------------------------------------------------------
    def _claim(self, m: Machine) -> None:
        number = m.seat.term + 1
        made = number > self.term
        m.seat = election.candidacy_ended(m.seat, number, made, self.now)
        if not made:
            return
        self.term, self.holder = number, m.address
        m.seat, m.known = replace(m.seat, leader_address=m.address), False
        last = self.generations[-1] if self.generations else {}
        nodes = [
            NodeRecord(n, str(mark), 1, self.now, self.now) for n, mark in sorted(last.items())
        ]
        m.reign = transitions.begin_term(number, self.now, len(self.generations), nodes)

    def _lead(self, m: Machine) -> None:
        assert m.reign is not None
        if not self.outage and self.term > m.reign.term:
            m.reign = transitions.term_superseded(m.reign, self.now)
        m.reign = transitions.tick(m.reign, self.now, RULES)
        own = StageReport(m.name, str(m.mark), m.seat.generation, m.stage)
        answer = self._serve(m, own, not m.known, m.seat.term, m.parted)
        if m.reign.phase is Phase.FENCED:
            m.seat, m.reign = election.newer_term_found(m.seat, self.now), None
            return
        self._obey(m, *answer)
        if m.reign.pending_generation is not None and not self.outage:
            number, names = m.reign.pending_generation
            marks = {
                n: int(node.incarnation) for n in names if (node := m.reign.node(n)) is not None
            }
            mark = m.mark
            self.at(self._delay(), lambda: self._create(m, mark, number, marks))

    def _create(self, m: Machine, mark: int, number: int, marks: dict[str, int]) -> None:
        """The check was before; what is in the run store now says who was first."""
        mine = m.reign if m.up and m.mark == mark else None
        newest = len(self.generations)
        if newest >= number:
            if mine is not None:
                m.reign = transitions.creation_rejected(mine, self.term, newest, self.now)
        elif newest == number - 1:
            self.generations.append(marks)
            self.opened_at.append(self.now)
            if mine is not None:
                m.reign = transitions.generation_created(
                    mine, number, frozenset(marks), self.now, RULES
                )

    # --- working ----------------------------------------------------------------------------
    def _work(self, m: Machine) -> None:
        if m.stage not in (NodeStage.BUILDING, NodeStage.WORKING):
            return
        others = [self.machines[name] for name in m.seat.members]
        for other in others:
            if not self.linked(m.name, other.name):
                m.stage, m.parted = NodeStage.BROKEN, other.name
            ours = other.up and other.seat.generation == m.seat.generation
            held = ours and other.stage in (NodeStage.HELD, NodeStage.BROKEN)
            if not other.up or held or other.seat.generation > m.seat.generation:
                m.stage = NodeStage.BROKEN
        ready = (NodeStage.BUILDING, NodeStage.WORKING)
        if m.stage is NodeStage.BUILDING and all(
            o.seat.generation == m.seat.generation and o.stage in ready for o in others
        ):
            m.stage = NodeStage.WORKING

    def trains(self, generation: int) -> bool:
        if not generation:
            return False
        return all(
            (m := self.machines[name]).up
            and (m.mark, m.seat.generation, m.stage) == (mark, generation, NodeStage.WORKING)
            and all(self.linked(name, other) for other in self.generations[generation - 1])
            for name, mark in self.generations[generation - 1].items()
        )

    # --- faults -----------------------------------------------------------------------------
    def crash(self, name: str, *, says: bool = True) -> None:
        old = self.machines[name]
        old.up, old.says_dead, old.reign = False, says, None
        old.stage, old.seat = NodeStage.IDLE, AgentState(name)

    def back(self, name: str) -> None:
        m = self.machines[name]
        if not m.up:
            m.up, m.mark, m.seat, m.known = (
                True,
                m.mark + 1,
                AgentState(name, role_since=self.now),
                False,
            )
            m.asked, m.parted = m.asked + 1, ""
            self.at(0.0, self._life(m))

    def fault(self) -> None:
        names = sorted(self.machines)
        name, draw = self.draw.choice(names), self.draw
        match draw.randrange(6):
            case 0 | 1:
                self.crash(name, says=draw.random() < 0.7)
                self.at(draw.uniform(0.5, 40), lambda: self.back(name))
            case 2:
                side = set(draw.sample(names, draw.randint(1, len(names) - 1)))
                new = {frozenset((a, b)) for a in side for b in names if b not in side}
                self._cut(new, draw.uniform(1, 60))
            case 3:
                self._cut({frozenset(draw.sample(names, 2))}, draw.uniform(1, 60))
            case 4:
                self.outage = True
                self.at(draw.uniform(1, 30), self._store_back)
            case 5:
                for m in self.machines.values():
                    if m.reign is not None:
                        until = self.now + draw.uniform(5, 30)
                        m.reign = transitions.node_leaving(m.reign, name, until, self.now, RULES)
                self.at(30.0, lambda: self.crash(name))
                self.at(45.0, lambda: self.back(name))

    def _cut(self, pairs: set[frozenset[str]], seconds: float) -> None:
        self.cuts |= pairs
        self.at(seconds, lambda: self.cuts.difference_update(pairs))

    def _store_back(self) -> None:
        self.outage = False

    def safe(self) -> None:
        terms = [m.reign.term for m in self.machines.values() if m.reign is not None]
        assert len(set(terms)) == len(terms), "two hold one term"
        for m in self.machines.values():
            if m.up and m.stage in (NodeStage.BUILDING, NodeStage.WORKING):
                assert self.generations[m.seat.generation - 1].keys() == set(m.seat.members)


def _all_train(s: Simulation) -> bool:
    up = {m.name for m in s.machines.values() if m.up}
    return s.trains(len(s.generations)) and s.generations[-1].keys() == up


def _seeds(number: int) -> range:
    other = os.environ.get("HYPOTHESIS") == "search"
    first = random.SystemRandom().randrange(2**40) if other else 0
    return range(first, first + number)


@pytest.mark.parametrize("part", [0, *map(in_campaign, range(1, 4))])
def test_whatever_happens_all_train_again_once_it_is_over(part: int) -> None:
    _campaign(1000 * part, 20)


@pytest.mark.slow
@pytest.mark.parametrize("part", range(4, 24))
def test_whatever_happens_in_thousands_of_runs(part: int) -> None:
    _campaign(1000 * part, 200)


def _campaign(first: int, runs: int) -> None:
    for seed in (first + seed for seed in _seeds(runs)):
        draw = random.Random(-seed - 1)
        s = Simulation(seed, draw.randint(2, 9))
        for _ in range(draw.randint(1, 5)):
            s.run(s.now + draw.uniform(0, 25))
            s.fault()
            s.safe()
        s.run(s.now + 61)
        s.calm, s.cuts, s.outage = True, set(), False
        for name in s.machines:
            s.back(name)
        end = s.now + QUIET
        while s.now < end and not _all_train(s):
            s.run(s.now + 1)
            s.safe()
        assert _all_train(s), f"seed {seed}: not all train after {QUIET:.0f} s"
        made = len(s.generations)
        s.run(s.now + 60)
        assert len(s.generations) == made, f"seed {seed}: disturbed without a cause"


def _settled(agents: int, seed: int) -> Simulation:
    s = Simulation(seed, agents)
    s.loss = 0.0
    s.run(60)
    assert _all_train(s)
    return s


@pytest.mark.parametrize("agents", [2, 3, 5, 9])
def test_a_lost_node_costs_its_silence_and_a_few_beats(agents: int) -> None:
    for seed in _seeds(5):
        s = _settled(agents, seed)
        lost = next(m.name for m in s.machines.values() if m.reign is None)
        s.crash(lost, says=False)
        s.run(s.now + RULES.node_timeout_s + 4 * BEAT + 3)
        assert _all_train(s), f"seed {seed}"


@pytest.mark.parametrize("agents", [3, 5, 9])
@pytest.mark.parametrize("says", [True, False])
def test_a_lost_coordinator_costs_silence_turns_and_a_few_beats(agents: int, says: bool) -> None:
    for seed in _seeds(5):
        s = _settled(agents, seed)
        holder = next(m.name for m in s.machines.values() if m.reign is not None)
        s.crash(holder, says=says)
        claims = (
            (0.0 if says else PATIENCE.leader_timeout_s) + PATIENCE.delay_per_place_s + 3 * BEAT
        )
        s.run(s.now + claims + 3)
        assert any(m.reign is not None for m in s.machines.values()), f"seed {seed}: nobody leads"
        s.run(s.now + RULES.node_timeout_s + 4 * BEAT + 3)
        assert _all_train(s), f"seed {seed}"


def test_nobody_is_disturbed_without_a_cause() -> None:
    for seed in _seeds(10):
        s = _settled(5, seed)
        made = len(s.generations)
        s.run(s.now + 600)
        assert (len(s.generations), s.term) == (made, 1), f"seed {seed}"


def test_of_two_sides_that_stay_apart_one_trains_and_is_left_alone() -> None:
    for seed in _seeds(10):
        s = _settled(5, seed)
        side, rest = {"n0", "n1"}, {"n2", "n3", "n4"}
        s.cuts = {frozenset((a, b)) for a in side for b in rest}
        s.run(s.now + 120)
        made = len(s.generations)
        assert s.trains(made), f"seed {seed}"
        s.run(s.now + 600)
        assert len(s.generations) == made, f"seed {seed}: they disturb each other"


def test_two_that_cannot_reach_each_other_are_tried_more_and_more_rarely() -> None:
    s = _settled(4, 1)
    leader = next(m.name for m in s.machines.values() if m.reign is not None)
    one, other = sorted(s.machines.keys() - {leader})[:2]
    s.cuts = {frozenset((one, other))}
    made = len(s.generations)
    s.run(s.now + 3600)
    assert len(s.generations) - made <= 14  # 60 s, 120 s, ... each two generations
    assert s.trains(len(s.generations))
    assert len(s.generations[-1]) == 3
