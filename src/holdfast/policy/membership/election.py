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

MOST_DOUBLINGS = 6
"""Limit on the doublings of the wait of less than a majority."""


class Standing(StrEnum):
    SEEKING = "seeking"  # reads the run store: who holds the newest term?
    FOLLOWING = "following"  # its coordinator answers
    SILENT = "silent"  # its coordinator does not: the peers are asked
    CLAIMING = "claiming"  # the next term is being opened
    REIGNING = "reigning"  # it is the coordinator
    LEFT = "left"


TRANSITIONS: dict[Standing, frozenset[Standing]] = {
    Standing.SEEKING: frozenset({Standing.FOLLOWING, Standing.SILENT, Standing.CLAIMING}),
    Standing.FOLLOWING: frozenset({Standing.SILENT, Standing.SEEKING}),
    Standing.SILENT: frozenset({Standing.FOLLOWING, Standing.SEEKING, Standing.CLAIMING}),
    Standing.CLAIMING: frozenset({Standing.REIGNING, Standing.SEEKING}),
    Standing.REIGNING: frozenset({Standing.SEEKING}),
    Standing.LEFT: frozenset(),
}
"""Permitted changes of state. In addition, each state may become `left`."""


class Peer(StrEnum):
    """Another agent's answer to the question about the coordinator."""

    MISSES = "misses"  # it does not hear it either
    HEARS = "hears"
    DEAD = "dead"  # no process listens there any more
    UNKNOWN = "unknown"  # no answer


@dataclass(frozen=True)
class Patience:
    """Waits before a claim, in seconds.

    Attributes:
        silence: Time for which a coordinator may not answer.
        turn: Extra wait of each further name before it claims.
        alone: Wait of less than a majority.
    """

    silence: float = 6.0
    turn: float = 1.0
    alone: float = 20.0


@dataclass(frozen=True)
class Seat:
    """One agent's place in the election; see the module.

    Attributes:
        term: The newest that it knows of; orders of older ones are refused.
        holder: Where its coordinator listens; "" if that is not known, or this agent is it.
        at: The generation that it holds.
        seen: The newest generation that it found in the run store while silent.
        members: The agents of the newest generation that it took part in.
        since: When its coordinator last answered, or the present state began.
        led: The newest term whose coordinator has answered it.
        dead: The coordinator of the newest term is known to be dead.
        sign: The last sign of other agents' progress in the run store.
        tries: Claims with less than a majority since another agent last led it.
    """

    name: str
    standing: Standing = Standing.SEEKING
    term: int = 0
    holder: str = ""
    at: int = 0
    seen: int = 0
    members: tuple[str, ...] = ()
    since: float = 0.0
    led: int = 0
    dead: bool = False
    sign: str = ""
    tries: int = 0


def found(seat: Seat, term: int, holder: str, now: float) -> Seat:
    """Take the run store's newest term and its holder; "" if no agent holds it any more."""
    if seat.standing in (Standing.LEFT, Standing.CLAIMING):
        return seat
    if term < seat.term or (term == seat.term and seat.standing is Standing.REIGNING):
        return seat
    dead = seat.dead and (term, holder) == (seat.term, seat.holder)
    known = replace(seat, term=term, holder=holder, dead=dead)
    if term > seat.term and seat.standing is not Standing.SEEKING:
        known = _become(known, Standing.SEEKING, now)
    if known.standing is Standing.SEEKING and not holder:
        return _become(known, Standing.CLAIMING, now)
    return known


def answered(seat: Seat, term: int, now: float) -> Seat:
    """A coordinator of `term` has answered. An older one than is known counts for nothing."""
    if term < seat.term or seat.standing in (Standing.LEFT, Standing.CLAIMING, Standing.REIGNING):
        return seat
    if seat.standing is not Standing.FOLLOWING:
        seat = _become(seat, Standing.FOLLOWING, now)
    return replace(seat, term=term, since=now, led=term, dead=False, tries=0)


def hears(seat: Seat, now: float, patience: Patience) -> bool:
    """Return True if this agent tells a peer that it hears the coordinator.

    One missed answer proves nothing. The second is missed before this agent's own search begins.
    """
    if seat.standing is Standing.FOLLOWING:
        return now - seat.since <= patience.silence * 2 / 3
    return seat.standing is Standing.REIGNING


def refused(seat: Seat, now: float) -> Seat:
    """Take the answer of an agent that it is not the coordinator any more."""
    if seat.standing in (Standing.FOLLOWING, Standing.SILENT):
        return _become(seat, Standing.SEEKING, now)
    return seat


def unanswered(seat: Seat, dead: bool, now: float, patience: Patience) -> Seat:
    """Take a coordinator's failure to answer. dead: its machine replied that no process listens
    there."""
    if seat.standing in (Standing.SEEKING, Standing.FOLLOWING, Standing.SILENT):
        seat = replace(seat, dead=dead)
    if seat.standing is Standing.SEEKING:
        return _become(seat, Standing.SILENT, now)
    if seat.standing is Standing.FOLLOWING and (dead or now - seat.since >= patience.silence):
        return _become(seat, Standing.SILENT, now)
    return seat


def asked(
    seat: Seat, peers: Mapping[str, Peer], newest_generation: int, now: float, patience: Patience,
    sign: str = "", alive: bool = False,
) -> Seat:  # fmt: skip
    """Take the peers' answers, while silent, and the newest generation in the run store.

    Args:
        sign: Any other sign in the run store that agents continue, such as the end of their
            journal.
        alive: True if the journal of the coordinator's own node has grown meanwhile.
    """
    if seat.standing is not Standing.SILENT:
        return seat
    newer, moved = newest_generation > max(seat.at, seat.seen), sign != seat.sign
    seat = replace(seat, sign=sign, seen=max(seat.seen, newest_generation))
    most = seat.at >= seat.seen and _most_miss(seat, peers)
    if newer or (moved and not most):
        # The other agents continue. That this agent cannot reach their coordinator is no reason to
        # disturb them.
        return replace(seat, since=now)
    if Peer.HEARS in peers.values():
        return replace(seat, since=now)
    if alive and not seat.dead:
        return seat
    if may_claim(seat, peers, now, patience):
        tries = seat.tries + (_place(seat, peers) is None)
        return replace(_become(seat, Standing.CLAIMING, now), tries=tries)
    return seat


def may_claim(seat: Seat, peers: Mapping[str, Peer], now: float, patience: Patience) -> bool:
    """Return True if this agent should open the next term now."""
    place = _place(seat, peers)
    alone = patience.alone * 2 ** min(seat.tries, MOST_DOUBLINGS)
    return now - seat.since >= (alone if place is None else place * patience.turn)


def _place(seat: Seat, peers: Mapping[str, Peer]) -> int | None:
    """Return the number of agents that may claim at once before this one; None if it may not."""
    if not seat.dead and seat.led < seat.term:
        return None
    misses, alive = _missing(seat, peers)
    if 2 * len(misses) > len(alive) or not alive:
        return misses.index(seat.name) if seat.name in misses else len(misses)
    return None


def _most_miss(seat: Seat, peers: Mapping[str, Peer]) -> bool:
    """Return True if most of the members miss the coordinator as this agent does."""
    misses, alive = _missing(seat, peers)
    return 2 * len(misses) > len(alive)


def _missing(seat: Seat, peers: Mapping[str, Peer]) -> tuple[list[str], list[str]]:
    """Return the members that miss the coordinator, by name, and those not known to be dead."""
    said = {**peers, seat.name: Peer.MISSES}
    misses = sorted(name for name in seat.members if said.get(name) is Peer.MISSES)
    return misses, [name for name in seat.members if said.get(name) is not Peer.DEAD]


def claimed(seat: Seat, term: int, made: bool, now: float) -> Seat:
    """Take the run store's answer: this agent made the term, or another agent did."""
    if seat.standing is not Standing.CLAIMING:
        return seat
    if made:
        reigns = _become(seat, Standing.REIGNING, now)
        return replace(reigns, term=term, holder="", led=term, dead=False)
    return _become(seat, Standing.SEEKING, now)


def fenced(seat: Seat, now: float) -> Seat:
    """A coordinator has found a newer term."""
    return _become(seat, Standing.SEEKING, now) if seat.standing is Standing.REIGNING else seat


def took(seat: Seat, term: int, generation: int, members: tuple[str, ...]) -> Seat:
    """Take the order of the coordinator of `term` to take part in `generation`.

    Raises ValueError for an order that is older than what it holds: it must not be obeyed.
    """
    if term < seat.term or generation <= seat.at:
        raise ValueError(
            f"an order of term {term}, generation {generation} comes after term {seat.term}, "
            f"generation {seat.at}"
        )
    return replace(seat, at=generation, members=members)


def left(seat: Seat) -> Seat:
    return replace(seat, standing=Standing.LEFT)


def _become(seat: Seat, standing: Standing, now: float) -> Seat:
    if standing not in TRANSITIONS[seat.standing]:
        raise ValueError(f"an agent that is {seat.standing} cannot become {standing}")
    return replace(seat, standing=standing, since=now)
