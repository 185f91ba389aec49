"""Who is coordinator: every agent's half, as a state machine without clock, network or store.

An agent follows the coordinator of the newest term that it knows. When that one falls silent, the
agents of its last generation are asked, and one of them opens the next term:

    seeking ---the holder answers---> following ---no answer for a while, or refused---> silent
       ^  '---nobody holds it---> claiming <---may claim---------------------------------'  |
       |                             |  '---made---> reigning ---a newer term---.           |
       '------- somebody was faster -'--------------------------------------------'---------'

Opening a term is a create-if-absent in the run store, so there is never more than one coordinator
of a term, and an older one is fenced by its number wherever it writes or gives orders. All rules
here are about *when* to claim, so about how much is disturbed, never about whether it is safe:

- who is told by a peer that the coordinator answers there does not claim: only its own link is cut;
- who reaches a majority of the last generation's agents, all of which miss the coordinator, claims
  at once, the lowest name first (the others a little later each, in case the first one dies);
- agents that are known to be dead (their machine answers that nobody listens) count for nobody;
- so does who has never heard the coordinator of the newest term: it may be the one who is cut off;
- a smaller rest waits longer, twice as long each further time, and anew whenever the run store
  shows that others go on;
- most of the newest generation, who miss the coordinator, are no rest: that they go on themselves
  is no reason to wait, else they would see each other's journals grow and train on without one
  until the next fault. Only that the coordinator itself goes on is.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from enum import StrEnum

MOST_DOUBLINGS = 6
"""Of the wait of less than a majority."""


class Standing(StrEnum):
    SEEKING = "seeking"  # reads the run store: who holds the newest term?
    FOLLOWING = "following"  # its coordinator answers
    SILENT = "silent"  # its coordinator does not: the others are asked
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
"""Besides, each may become `left`."""


class Peer(StrEnum):
    """What another agent said when it was asked about the coordinator."""

    MISSES = "misses"  # it does not hear it either
    HEARS = "hears"
    DEAD = "dead"  # nobody listens there any more
    UNKNOWN = "unknown"  # no answer


@dataclass(frozen=True)
class Patience:
    """Seconds. silence: how long a coordinator may not answer. turn: what each further name waits
    longer before it claims. alone: how long less than a majority waits."""

    silence: float = 6.0
    turn: float = 1.0
    alone: float = 20.0


@dataclass(frozen=True)
class Seat:
    """One agent's place; see the module.

    term: the newest that it knows of; orders of older ones are refused. holder: where its
    coordinator listens, "" where that is not known or it is this one. at: the generation that it
    holds. seen: the newest that it found in the run store while silent. members: the agents of the
    newest generation that it took part in. since: when its coordinator last answered, or the
    present state began. led: the newest term whose coordinator has answered it. dead: that of the
    newest term is. sign: the last that the run store showed of what others do. tries: how often it
    claimed with less than a majority, since another led it.
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
    """The run store's newest term, and who holds it: "" where nobody does any more."""
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
    """What this agent says to who misses the coordinator. One answer that did not come says
    nothing; the second is missed before its own search begins."""
    if seat.standing is Standing.FOLLOWING:
        return now - seat.since <= patience.silence * 2 / 3
    return seat.standing is Standing.REIGNING


def refused(seat: Seat, now: float) -> Seat:
    """Who was asked is no coordinator any more, and says so."""
    if seat.standing in (Standing.FOLLOWING, Standing.SILENT):
        return _become(seat, Standing.SEEKING, now)
    return seat


def unanswered(seat: Seat, dead: bool, now: float, patience: Patience) -> Seat:
    """The coordinator did not answer. dead: its machine did, that nobody listens there."""
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
    """What the others said, while silent, and the newest generation in the run store. sign:
    whatever else shows there that others go on, such as where their journal ends. alive: whether
    that of the coordinator's own node has grown meanwhile."""
    if seat.standing is not Standing.SILENT:
        return seat
    newer, moved = newest_generation > max(seat.at, seat.seen), sign != seat.sign
    seat = replace(seat, sign=sign, seen=max(seat.seen, newest_generation))
    most = seat.at >= seat.seen and _most_miss(seat, peers)
    if newer or (moved and not most):
        # Others go on. That their coordinator cannot be reached from here is no reason to disturb
        # them.
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
    """Whether this agent should open the next term now."""
    place = _place(seat, peers)
    alone = patience.alone * 2 ** min(seat.tries, MOST_DOUBLINGS)
    return now - seat.since >= (alone if place is None else place * patience.turn)


def _place(seat: Seat, peers: Mapping[str, Peer]) -> int | None:
    """How many of those who may claim at once come before this agent; None where it may not."""
    if not seat.dead and seat.led < seat.term:
        return None
    misses, alive = _missing(seat, peers)
    if 2 * len(misses) > len(alive) or not alive:
        return misses.index(seat.name) if seat.name in misses else len(misses)
    return None


def _most_miss(seat: Seat, peers: Mapping[str, Peer]) -> bool:
    """Whether most of those whom it works with miss the coordinator as it does."""
    misses, alive = _missing(seat, peers)
    return 2 * len(misses) > len(alive)


def _missing(seat: Seat, peers: Mapping[str, Peer]) -> tuple[list[str], list[str]]:
    """Of the members: who misses the coordinator, by name, and who is not known to be dead."""
    said = {**peers, seat.name: Peer.MISSES}
    misses = sorted(name for name in seat.members if said.get(name) is Peer.MISSES)
    return misses, [name for name in seat.members if said.get(name) is not Peer.DEAD]


def claimed(seat: Seat, term: int, made: bool, now: float) -> Seat:
    """The run store's answer: the term is ours, or somebody else's."""
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
    """It was told to take part in `generation` by the coordinator of `term`.

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
