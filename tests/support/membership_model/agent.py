"""One agent for `model.py`, carried as `elastic/membership/role_loop.py` and
`elastic/coordinator/coordinator.py` do it.

Each method is a step that cannot be divided, from immutable values to new ones. Time is no number:
every clock shows 0, and a time that is up is set as long ago.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from types import ModuleType, SimpleNamespace
from typing import Any

from holdfast.policy.membership import election, transitions
from holdfast.policy.membership.election import ElectionTimeouts, PreVoteReply, Role
from holdfast.policy.membership.transitions import (
    STAGE_TRANSITIONS,
    STOPPED_STAGES,
    MembershipRules,
    NodeCommand,
    NodeRecord,
    NodeStage,
    Phase,
    StageReport,
)
from tests.support.membership_model.world import (
    NAMES,
    Agent,
    Answer,
    Request,
    Store,
    ViolationError,
)

PATIENCE = ElectionTimeouts()
TURNS, LONG = -10.0, -1000.0
"""Begin of a silent agent's wait: until its turn, or longer than any agent waits."""


def all_of(least: int) -> Callable[[Any], tuple[str, ...]]:
    return lambda nodes: tuple(node.name for node in nodes) if len(nodes) >= least else ()


@dataclass(frozen=True)
class Carried:
    """member, succeed: the two machines, or broken ones in their place. least: nodes that a
    generation needs."""

    member: ModuleType | SimpleNamespace = transitions
    succeed: ModuleType | SimpleNamespace = election
    least: int = 1

    @property
    def rules(self) -> MembershipRules:
        return MembershipRules(all_of(self.least), settle_time_s=0.0, gather_wait_s=0.0)

    def changed(self, old: Agent, new: Agent) -> Agent:
        """Check what holds for every step of one agent. Return it without times and without mere
        reports."""
        if new.up and new.mark == old.mark:
            if new.seat.generation < old.seat.generation or new.seat.term < old.seat.term:
                raise ViolationError(f"{new.seat.name} went back: {old.seat} to {new.seat}")
            if new.stage is not old.stage and new.stage not in STAGE_TRANSITIONS[old.stage]:
                raise ViolationError(f"{new.seat.name}: {old.stage} to {new.stage}")
        seat = new.seat
        seat = replace(
            seat,
            role_since=0.0,
            minority_candidacies=0,
            newest_seen_generation=seat.newest_seen_generation
            if seat.newest_seen_generation > seat.generation
            else 0,
            is_leader_dead=seat.is_leader_dead and seat.role is Role.PRE_CANDIDATE,
            last_answered_term=seat.last_answered_term
            if seat.last_answered_term == seat.term
            else 0,
        )
        reign = new.reign
        if reign is not None:
            # After the choice of the generation that is being made. The choice may be repeated.
            before = None if old.reign is None else old.reign.pending_generation
            late = [
                before == reign.pending_generation is not None and node.joined_at > 0
                for node in reign.nodes
            ]
            nodes = tuple(
                replace(node, last_heard=0.0, joined_at=float(came))
                if node.last_heard or node.joined_at
                else node
                for node, came in zip(reign.nodes, late, strict=True)
            )
            apart = tuple(sorted(reign.unreachable_pairs, key=lambda pair: (pair.one, pair.other)))
            reign = replace(
                reign,
                phase_since=0.0,
                reason="",
                lost_members=(),
                nodes=nodes,
                unreachable_pairs=apart,
            )
            if reign.phase is Phase.FENCED:
                seat, reign = self.succeed.newer_term_found(seat, 0.0), None
            else:
                return self._talks_to_itself(old, new._replace(seat=seat, reign=reign))
        return new._replace(seat=seat, reign=reign)

    def _talks_to_itself(self, old: Agent, agent: Agent) -> Agent:
        """A coordinator's own node is heard at once, and obeys at once."""
        served, answer = self.serve(agent, self.request(agent))
        done = self.obey(served, answer)
        return agent if done == agent else self.changed(agent, done)

    # --- asking and answering ---------------------------------------------------------------
    def request(self, agent: Agent) -> Request:
        seat = agent.seat
        follows = seat.role in (Role.FOLLOWER, Role.LEADER)
        return Request(
            NAMES.index(seat.leader_address[0]),
            not (follows and agent.known),
            seat.name,
            agent.mark,
            seat.term,
            seat.generation,
            agent.stage,
            agent.parted,
        )

    def serve(self, agent: Agent, request: Request) -> tuple[Agent, Answer]:
        """As `Coordinator.handle_join` and `beat` do it."""
        reign = agent.reign
        if reign is None:
            return agent, Answer(agent.seat.term, NodeCommand.REFUSE)
        name, mark = request.name, str(request.mark)
        if request.term > reign.term:
            reign = self.member.term_superseded(reign, 0.0)
        elif request.join:
            new = NodeRecord(name, mark, 1, 0.0, 0.0, request.at, request.stage)
            reign = self.member.node_joined(reign, new, 0.5, self.rules)
        else:
            report = StageReport(name, mark, request.at, request.stage)
            reign = self.member.reports_received(reign, [report], 0.0, self.rules)
        if request.parted and request.at == reign.generation:
            reign = self.member.link_failed(reign, name, request.parted, 0.0, self.rules)
        agent = agent._replace(reign=reign)
        node = reign.node(name)
        if reign.phase is not Phase.FENCED and (node is None or node.incarnation != mark):
            return agent, Answer(reign.term, "join" if node is None else "replaced")
        due = self.member.directive_for(reign, name)
        members = tuple(sorted(reign.members)) if due.command is NodeCommand.START else ()
        return agent, Answer(reign.term, due.command, due.generation, members)

    def ask(self, one: Agent, other: Agent) -> tuple[Agent, Agent]:
        """The answer is under way; one that would change nothing need not come."""
        other, answer = self.serve(other, self.request(one))
        idle = one._replace(answer=None)
        done = self.obey(idle, answer)
        if answer.order not in (NodeCommand.START, NodeCommand.HALT, NodeCommand.PAUSE):
            return done, other
        return idle._replace(answer=None if done == idle else answer), other

    def deliver(self, agent: Agent) -> Agent:
        assert agent.answer is not None
        return self.obey(agent._replace(answer=None), agent.answer)

    def take_late(self, agent: Agent, late: Request) -> Agent:
        return self.serve(agent, late)[0]

    def obey(self, agent: Agent, answer: Answer) -> Agent:
        """As `Follower.obey` does it."""
        seat = agent.seat
        if answer.term < seat.term or answer.order == NodeCommand.REFUSE:
            return agent._replace(seat=self.succeed.leader_refused(seat, 0.0))
        seat = self.succeed.leader_answered(seat, answer.term, 0.0)
        agent = agent._replace(seat=seat, known=answer.order not in ("join", "replaced"))
        if answer.order == NodeCommand.START and answer.generation > seat.generation:
            if agent.stage not in STOPPED_STAGES:
                raise ViolationError(f"{seat.name} was started while it works: {agent.stage}")
            seat = self.succeed.generation_joined(
                seat, answer.term, answer.generation, answer.members
            )
            agent = agent._replace(seat=seat, stage=NodeStage.BUILDING, parted="")
        halts = (
            answer.order in (NodeCommand.HALT, NodeCommand.PAUSE)
            and answer.generation == seat.generation
        )
        if halts and agent.stage not in STOPPED_STAGES:
            agent = agent._replace(stage=NodeStage.HELD)
        return agent

    # --- one agent alone --------------------------------------------------------------------
    def unanswered(self, agent: Agent, dead: bool) -> Agent:
        seat = replace(agent.seat, role_since=LONG)
        return agent._replace(seat=self.succeed.leader_unanswered(seat, dead, 0.0, PATIENCE))

    def lost(self, agent: Agent, name: str) -> Agent:
        """Time a node out, or all other nodes after a clock jump."""
        reign = agent.reign
        assert reign is not None
        nodes = tuple(
            replace(n, last_heard=LONG)
            if n.name == name or (not name and n.name != agent.seat.name)
            else n
            for n in reign.nodes
        )
        return agent._replace(reign=self.member.tick(replace(reign, nodes=nodes), 0.0, self.rules))

    def tick(self, agent: Agent) -> Agent:
        """Short waits are over."""
        return agent._replace(reign=self.member.tick(agent.reign, 0.0, self.rules))

    def build(self, agent: Agent) -> Agent:
        return agent._replace(stage=NodeStage.WORKING)

    def stage(self, agent: Agent, stage: NodeStage, parted: str) -> Agent:
        return agent._replace(stage=stage, parted=parted)

    def try_again(self, agent: Agent) -> Agent:
        assert agent.reign is not None
        return agent._replace(
            reign=self.member.tick(replace(agent.reign, unreachable_pairs=()), 0.0, self.rules)
        )

    # --- with the run store -----------------------------------------------------------------
    def look(self, agent: Agent, store: Store) -> tuple[Agent, Store]:
        if agent.seat.role is Role.PRE_CANDIDATE and store.term <= agent.seat.term:
            return agent, store
        seat = self.succeed.newest_term_read(agent.seat, store.term, store.holder, 0.0)
        known = agent.known and seat.term == agent.seat.term
        return agent._replace(seat=seat, known=known), store

    def asked(
        self,
        agent: Agent,
        store: Store,
        said: tuple[tuple[str, PreVoteReply], ...],
        since: float,
        moving: bool,
        alive: bool,
    ) -> tuple[Agent, Store]:
        if store.term > agent.seat.term:
            return agent, store  # `look` comes first
        seat = replace(agent.seat, role_since=since)
        newest = len(store.generations)
        seat = self.succeed.pre_vote_ended(
            seat, dict(said), newest, 0.0, PATIENCE, "x" if moving else "", alive
        )
        return agent._replace(seat=replace(seat, journal_sizes="")), store

    def claim(self, agent: Agent, store: Store) -> tuple[Agent, Store]:
        number = agent.seat.term + 1
        made = number > store.term
        if made and number != store.term + 1:
            raise ViolationError(f"term {number} after {store.term}")
        seat = self.succeed.candidacy_ended(agent.seat, number, made, 0.0)
        if not made:
            if seat.role is Role.LEADER:
                raise ViolationError(f"{seat.name} reigns in a term that it has not opened")
            return agent._replace(seat=seat), store
        return (
            agent._replace(seat=replace(seat, leader_address=agent.address), known=False),
            store._replace(term=number, holder=agent.address),
        )

    def begin(self, agent: Agent, store: Store) -> tuple[Agent, Store]:
        newest = len(store.generations)
        members = store.generations[-1] if newest else frozenset()
        nodes = [NodeRecord(address[0], address[1:], 1, 0.0, 0.0) for address in sorted(members)]
        return agent._replace(
            reign=self.member.begin_term(agent.seat.term, 0.0, newest, nodes)
        ), store

    def watch(self, agent: Agent, store: Store) -> tuple[Agent, Store]:
        """A coordinator looks now and then whether there is a newer term."""
        if store.term > agent.seat.term:
            agent = agent._replace(reign=self.member.term_superseded(agent.reign, 0.0))
        return agent, store

    def check(self, agent: Agent, store: Store) -> tuple[Agent, Store]:
        reign, newest = agent.reign, len(store.generations)
        assert reign is not None
        assert reign.pending_generation is not None
        number, names = reign.pending_generation
        if store.term > reign.term or newest >= number:
            return agent._replace(
                reign=self.member.creation_rejected(reign, store.term, newest, 0.0)
            ), store
        marks = {node.name: node.incarnation for node in reign.nodes}
        members = frozenset(f"{name}{marks[name]}" for name in names)
        return agent._replace(pending=(number, members)), store

    def create(self, agent: Agent, store: Store) -> tuple[Agent, Store]:
        assert agent.pending is not None
        (number, members), reign = agent.pending, agent.reign
        agent, newest = agent._replace(pending=None), len(store.generations)
        if newest < number:
            store = store._replace(generations=(*store.generations, members))
            if reign is not None:
                names = frozenset(address[0] for address in members)
                reign = self.member.generation_created(reign, number, names, 0.0, self.rules)
        elif reign is not None:
            reign = self.member.creation_rejected(reign, store.term, newest, 0.0)
        return agent._replace(reign=reign), store
