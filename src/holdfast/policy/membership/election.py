"""Leader election: the part of every agent, as a state machine without clock, network or store.

An agent follows the coordinator of the newest term that it knows. When that coordinator falls
silent, the agents of its last generation are asked, and one of them opens the next term:

    seeking ---the holder answers---> following ---no answer for a while, or refused---> silent
       ^  '---no holder---------> claiming <---may claim---------------------------------'  |
       |                             |  '---made---> reigning ---a newer term---.           |
       '------- another was faster --'--------------------------------------------'---------'

Opening a term is a create-if-absent in the run store, so a term never has more than one
coordinator. The term's number fences an older coordinator wherever it writes or gives orders. All
rules here are about *when* to claim: they limit disturbance, and safety does not depend on them.

- An agent does not claim if a peer reports that the coordinator answers there: only the agent's own
  link is cut.
- An agent claims at once if it reaches a majority of the last generation's agents and all of these
  miss the coordinator. The lowest name claims first, each further one a little later, in case the
  first one dies.
- Agents that are known to be dead are not counted: their machine answers that no process listens.
- An agent that has never heard the coordinator of the newest term is not counted either: it may be
  the one that is cut off.
- A smaller rest waits longer, twice as long each further time. Its wait restarts whenever the run
  store shows that other agents continue.
- A majority of the newest generation that misses the coordinator is no rest: it may claim even
  though its members continue. Otherwise they would see each other's journals grow, and train
  without a coordinator until the next fault. Only a sign that the coordinator itself continues
  delays this claim.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from enum import StrEnum

MAX_BACKOFF_DOUBLINGS = 6
"""Limit on the doublings of the wait of less than a majority."""


class Role(StrEnum):
    DISCOVERING = "seeking"  # reads the run store: who holds the newest term?
    FOLLOWER = "following"  # its coordinator answers
    PRE_CANDIDATE = "silent"  # its coordinator does not: the peers are asked
    CANDIDATE = "claiming"  # the next term is being opened
    LEADER = "reigning"  # it is the coordinator
    SHUTDOWN = "left"


ROLE_TRANSITIONS: dict[Role, frozenset[Role]] = {
    Role.DISCOVERING: frozenset({Role.FOLLOWER, Role.PRE_CANDIDATE, Role.CANDIDATE}),
    Role.FOLLOWER: frozenset({Role.PRE_CANDIDATE, Role.DISCOVERING}),
    Role.PRE_CANDIDATE: frozenset({Role.FOLLOWER, Role.DISCOVERING, Role.CANDIDATE}),
    Role.CANDIDATE: frozenset({Role.LEADER, Role.DISCOVERING}),
    Role.LEADER: frozenset({Role.DISCOVERING}),
    Role.SHUTDOWN: frozenset(),
}
"""Permitted changes of state. In addition, each state may become `left`."""


class PreVoteReply(StrEnum):
    """Another agent's answer to the question about the coordinator."""

    MISSES_LEADER = "misses"  # it does not hear it either
    HEARS_LEADER = "hears"
    DEAD = "dead"  # no process listens there any more
    UNKNOWN = "unknown"  # no answer


@dataclass(frozen=True)
class ElectionTimeouts:
    """Waits before a claim, in seconds."""

    leader_timeout_s: float = 6.0  # for which a coordinator may not answer
    delay_per_place_s: float = 1.0  # extra wait of each further name before it claims
    minority_wait_s: float = 20.0  # wait of less than a majority


@dataclass(frozen=True)
class AgentState:
    """One agent's place in the election; see the module."""

    name: str
    role: Role = Role.DISCOVERING
    term: int = 0  # the newest that it knows of; orders of older ones are refused
    leader_address: str = ""  # of its coordinator; "": not known, or this agent is it
    generation: int = 0  # that it holds
    newest_seen_generation: int = 0  # that it found in the run store while silent
    members: tuple[str, ...] = ()  # agents of the newest generation that it took part in
    role_since: float = 0.0  # when its coordinator last answered, or the present state began
    last_answered_term: int = 0  # the newest term whose coordinator has answered it
    is_leader_dead: bool = False  # the coordinator of the newest term is known to be dead
    journal_sizes: str = ""  # the last sign of other agents' progress in the run store
    minority_candidacies: int = 0  # claims with less than a majority since another agent led it


@dataclass(frozen=True)
class LackedMajority:
    """What an agent without a coordinator reaches, if that is no majority."""

    reached: tuple[str, ...]  # members that miss the coordinator too, this agent included
    members: tuple[str, ...]  # of the newest generation that the agent took part in
    wait_s: float  # seconds until it continues without the others


def newest_term_read(state: AgentState, term: int, leader_address: str, now: float) -> AgentState:
    """Take the run store's newest term and its holder; "" if no agent holds it any more."""
    if state.role in (Role.SHUTDOWN, Role.CANDIDATE):
        return state
    if term < state.term or (term == state.term and state.role is Role.LEADER):
        return state
    dead = state.is_leader_dead and (term, leader_address) == (state.term, state.leader_address)
    known = replace(state, term=term, leader_address=leader_address, is_leader_dead=dead)
    if term > state.term and state.role is not Role.DISCOVERING:
        known = _enter_role(known, Role.DISCOVERING, now)
    if known.role is Role.DISCOVERING and not leader_address:
        return _enter_role(known, Role.CANDIDATE, now)
    return known


def leader_answered(state: AgentState, term: int, now: float) -> AgentState:
    """A coordinator of `term` has answered. An older one than is known counts for nothing."""
    if term < state.term or state.role in (Role.SHUTDOWN, Role.CANDIDATE, Role.LEADER):
        return state
    if state.role is not Role.FOLLOWER:
        state = _enter_role(state, Role.FOLLOWER, now)
    return replace(
        state,
        term=term,
        role_since=now,
        last_answered_term=term,
        is_leader_dead=False,
        minority_candidacies=0,
    )


def hears_leader(state: AgentState, now: float, timeouts: ElectionTimeouts) -> bool:
    """Return True if this agent tells a peer that it hears the coordinator.

    One missed answer proves nothing. The second is missed before this agent's own search begins.
    """
    if state.role is Role.FOLLOWER:
        return now - state.role_since <= timeouts.leader_timeout_s * 2 / 3
    return state.role is Role.LEADER


def leader_refused(state: AgentState, now: float) -> AgentState:
    """Take the answer of an agent that it is not the coordinator any more."""
    if state.role in (Role.FOLLOWER, Role.PRE_CANDIDATE):
        return _enter_role(state, Role.DISCOVERING, now)
    return state


def leader_unanswered(
    state: AgentState, is_leader_dead: bool, now: float, timeouts: ElectionTimeouts
) -> AgentState:
    """Take a coordinator's failure to answer. is_leader_dead: its machine replied that no process
    listens there."""
    if state.role in (Role.DISCOVERING, Role.FOLLOWER, Role.PRE_CANDIDATE):
        state = replace(state, is_leader_dead=is_leader_dead)
    if state.role is Role.DISCOVERING:
        return _enter_role(state, Role.PRE_CANDIDATE, now)
    if state.role is Role.FOLLOWER and (
        is_leader_dead or now - state.role_since >= timeouts.leader_timeout_s
    ):
        return _enter_role(state, Role.PRE_CANDIDATE, now)
    return state


def pre_vote_ended(
    state: AgentState,
    replies: Mapping[str, PreVoteReply],
    newest_generation: int,
    now: float,
    timeouts: ElectionTimeouts,
    journal_sizes: str = "",
    has_leader_progress: bool = False,
) -> AgentState:
    """Take the peers' answers, while silent, and the newest generation in the run store.

    Args:
        journal_sizes: Any other sign in the run store that agents continue, such as the end of
            their journal.
        has_leader_progress: True if the journal of the coordinator's own node has grown meanwhile.
    """
    if state.role is not Role.PRE_CANDIDATE:
        return state
    newer = newest_generation > max(state.generation, state.newest_seen_generation)
    moved = journal_sizes != state.journal_sizes
    newest = max(state.newest_seen_generation, newest_generation)
    state = replace(state, journal_sizes=journal_sizes, newest_seen_generation=newest)
    misses, alive = _missing_and_alive(state, replies)
    most = state.generation >= newest and 2 * len(misses) > len(alive)  # miss the coordinator
    if newer or (moved and not most):
        # The other agents continue. That this agent cannot reach their coordinator is no reason to
        # disturb them.
        return replace(state, role_since=now)
    if PreVoteReply.HEARS_LEADER in replies.values():
        return replace(state, role_since=now)
    if has_leader_progress and not state.is_leader_dead:
        return state
    if can_be_candidate(state, replies, now, timeouts):
        tries = state.minority_candidacies + (_candidate_place(state, replies) is None)
        return replace(_enter_role(state, Role.CANDIDATE, now), minority_candidacies=tries)
    return state


def can_be_candidate(
    state: AgentState, replies: Mapping[str, PreVoteReply], now: float, timeouts: ElectionTimeouts
) -> bool:
    """Return True if this agent should open the next term now."""
    place = _candidate_place(state, replies)
    return now - state.role_since >= (
        _minority_wait_s(state, timeouts) if place is None else place * timeouts.delay_per_place_s
    )


def _candidate_place(state: AgentState, replies: Mapping[str, PreVoteReply]) -> int | None:
    """Return the number of agents that may claim at once before this one; None if it may not."""
    if not state.is_leader_dead and state.last_answered_term < state.term:
        return None
    misses, alive = _missing_and_alive(state, replies)
    if 2 * len(misses) > len(alive) or not alive:
        return misses.index(state.name) if state.name in misses else len(misses)
    return None


def lacked_majority(
    state: AgentState, replies: Mapping[str, PreVoteReply], now: float, timeouts: ElectionTimeouts
) -> LackedMajority | None:
    """Return what a silent agent lacks after `pre_vote_ended`. None: a majority misses the
    coordinator, or another agent shows that the run continues."""
    misses, alive = _missing_and_alive(state, replies)
    others_continue = state.role_since == now or PreVoteReply.HEARS_LEADER in replies.values()
    if state.role is not Role.PRE_CANDIDATE or others_continue or 2 * len(misses) > len(alive):
        return None
    wait_s = max(0.0, state.role_since + _minority_wait_s(state, timeouts) - now)
    return LackedMajority(tuple(misses), state.members, wait_s) if misses else None


def _minority_wait_s(state: AgentState, timeouts: ElectionTimeouts) -> float:
    return timeouts.minority_wait_s * 2.0 ** min(state.minority_candidacies, MAX_BACKOFF_DOUBLINGS)


def _missing_and_alive(
    state: AgentState, replies: Mapping[str, PreVoteReply]
) -> tuple[list[str], list[str]]:
    """Return the members that miss the coordinator, by name, and those not known to be dead."""
    said = {**replies, state.name: PreVoteReply.MISSES_LEADER}
    misses = sorted(name for name in state.members if said.get(name) is PreVoteReply.MISSES_LEADER)
    return misses, [name for name in state.members if said.get(name) is not PreVoteReply.DEAD]


def candidacy_ended(state: AgentState, term: int, is_won: bool, now: float) -> AgentState:
    """Take the run store's answer: this agent made the term, or another agent did."""
    if state.role is not Role.CANDIDATE:
        return state
    if is_won:
        reigns = _enter_role(state, Role.LEADER, now)
        return replace(
            reigns, term=term, leader_address="", last_answered_term=term, is_leader_dead=False
        )
    return _enter_role(state, Role.DISCOVERING, now)


def newer_term_found(state: AgentState, now: float) -> AgentState:
    """A coordinator has found a newer term."""
    return _enter_role(state, Role.DISCOVERING, now) if state.role is Role.LEADER else state


def generation_joined(
    state: AgentState, term: int, generation: int, members: tuple[str, ...]
) -> AgentState:
    """Take the order of the coordinator of `term` to take part in `generation`.

    Raises ValueError for an order that is older than what it holds: it must not be obeyed.
    """
    if term < state.term or generation <= state.generation:
        raise ValueError(
            f"an order of term {term}, generation {generation} comes after term {state.term}, "
            f"generation {state.generation}"
        )
    return replace(state, generation=generation, members=members)


def shut_down(state: AgentState) -> AgentState:
    return replace(state, role=Role.SHUTDOWN)


def _enter_role(state: AgentState, role: Role, now: float) -> AgentState:
    if role not in ROLE_TRANSITIONS[state.role]:
        raise ValueError(f"an agent that is {state.role} cannot become {role}")
    return replace(state, role=role, role_since=now)
