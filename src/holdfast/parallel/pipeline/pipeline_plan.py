"""One rank's part of a pipeline's table: its actions, and the messages that follow from them.

A table may be one window of a schedule that never ends (`core/schedule/step_window.py`). An action
may take what an earlier window has left. What no action of this window takes is received at its
end.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate

from holdfast.core.schedule.table import (
    Action,
    ActionKind,
    Schedule,
    Value,
    actions_of,
    value_produced,
)
from holdfast.errors import LayoutError

FIRST_TAG = 1 << 16  # lower tags are free for small exchanges in the same group
LAST_TAG = 0x7FFF0000  # above stand the transport's own


@dataclass(frozen=True, slots=True)
class Message:
    """A value on its way between this rank and `peer`; it crosses into or out of `boundary`."""

    value: Value
    peer: int
    tag: int

    @property
    def boundary(self) -> int:
        return self.value.stage if self.value.gradient else self.value.stage + 1


@dataclass(frozen=True, slots=True)
class PlannedAction:
    """One action of this rank, with what it takes and gives.

    incoming, outgoing: the value that enters or leaves by a message, None where none does.
    local_input, local_output: the value that a stage of this same rank has given, or will take.
    proven_values: own sends that have arrived once `incoming` is here.
    receipt_to: the peer that gets a receipt, once `incoming` is here, that all it sent has been
    used.
    """

    action: Action
    incoming: Message | None
    local_input: Value | None
    outgoing: Message | None
    local_output: Value | None
    proven_values: tuple[Value, ...]
    receipt_to: int | None


@dataclass(frozen=True)
class PipelinePlan:
    """A schedule as one rank sees it. receipt_senders: peers that owe a receipt at the end of the
    run. arrivals: what each peer sends to this rank, in the order in which it does. collected:
    actions of a later window whose input arrives in this one."""

    schedule: Schedule
    steps: tuple[PlannedAction, ...]
    receipt_senders: tuple[int, ...]
    arrivals: Mapping[int, tuple[Message, ...]]
    collected: tuple[PlannedAction, ...] = ()

    def receives(self, gradient: bool) -> Iterator[Message]:
        """Arrivals in one direction, in order of use."""
        return (
            s.incoming
            for s in (*self.steps, *self.collected)
            if s.incoming and s.incoming.value.gradient is gradient
        )


def make_pipeline_plan(schedule: Schedule, rank: int, first_tag: int = FIRST_TAG) -> PipelinePlan:
    """The row of `rank`, with its messages, what proves their arrival, and its receipts.

    Tags: `first_tag` for receipts, then one per (direction, stage, microbatch).
    Raises LayoutError when there are more messages than tags.
    """
    if first_tag + 2 * schedule.stages * schedule.microbatches > LAST_TAG:
        raise LayoutError(
            f"{schedule.stages} stages and {schedule.microbatches} microbatches need more "
            "message tags than there are",
            where="layout.schedule",
            remedy="use fewer microbatches",
        )
    rows = [tuple(a for cell in row for a in actions_of(cell)) for row in schedule.actions]
    place = {action: (r, at) for r, row in enumerate(rows) for at, action in enumerate(row)}
    traffic = _ValueRoutes(schedule, place)
    peers = [peer for peer in range(schedule.ranks) if peer != rank]
    proves: dict[Value, list[Value]] = {}
    for peer in peers:
        for sent, answer in traffic.arrival_proofs(rank, peer).items():
            if answer is not None:
                proves.setdefault(answer, []).append(sent)
    receipts = {last: peer for peer in peers if (last := traffic.last_unproven(peer, rank))}
    debtors = tuple(peer for peer in peers if traffic.last_unproven(rank, peer))

    def planned(action: Action) -> PlannedAction:
        source, target = _incoming(action, schedule.stages), _outgoing(action, schedule.stages)
        taken = traffic.message(source, rank, first_tag) if source else None
        given = traffic.message(target, rank, first_tag) if target else None
        return PlannedAction(
            action=action,
            incoming=taken,
            local_input=None if taken else source,
            outgoing=given,
            local_output=None if given else target,
            proven_values=tuple(proves.get(source, ())) if source else (),
            receipt_to=receipts.get(source) if source else None,
        )

    steps, later = map(planned, rows[rank]), map(planned, traffic.collected_by(rank))
    arrivals = {peer: traffic.arrivals(peer, rank, first_tag) for peer in peers}
    return PipelinePlan(schedule, tuple(steps), debtors, arrivals, tuple(later))


class _ValueRoutes:
    """The values that travel between ranks, with their places in the rows of both. What no action
    of this window takes has a place behind the row of the rank that takes it in a later one."""

    def __init__(self, schedule: Schedule, place: dict[Action, tuple[int, int]]):
        self._schedule = schedule
        self._collected: dict[int, list[Action]] = {}
        self._sender: dict[Value, tuple[int, int]] = {}
        self._receiver: dict[Value, tuple[int, int]] = {}
        for action, where in place.items():
            source, target = _incoming(action, schedule.stages), _outgoing(action, schedule.stages)
            if source is not None:
                self._receiver[source] = where
            if target is not None:
                self._sender[target] = where
        for value in sorted(self._sender, key=self._sender.__getitem__):
            if value not in self._receiver:
                taker = _taker(value)
                later = self._collected.setdefault(schedule.rank_of[taker.stage], [])
                at = len(schedule.actions[schedule.rank_of[taker.stage]]) + len(later)
                self._receiver[value] = schedule.rank_of[taker.stage], at
                later.append(taker)

    def collected_by(self, rank: int) -> Sequence[Action]:
        """The actions of a later window whose input `rank` receives at the end of this one."""
        return self._collected.get(rank, ())

    def message(self, value: Value, rank: int, first_tag: int) -> Message | None:
        """The message that carries `value` from or to `rank`; None if it stays on it, or came in an
        earlier window."""
        if value not in self._sender:
            return None
        giver, taker = self._sender[value][0], self._receiver[value][0]
        if giver == taker:
            return None
        stages, microbatches = self._schedule.stages, self._schedule.microbatches
        number = (value.gradient * stages + value.stage) * microbatches + value.microbatch
        return Message(value, taker if giver == rank else giver, first_tag + 1 + number)

    def arrivals(self, sender: int, receiver: int, first_tag: int) -> tuple[Message, ...]:
        """What `sender` sends to `receiver`, in the order in which it does."""
        values = sorted(self._values_between(sender, receiver), key=self._sender.__getitem__)
        found = (self.message(value, receiver, first_tag) for value in values)
        return tuple(message for message in found if message is not None)

    def arrival_proofs(self, sender: int, receiver: int) -> dict[Value, Value | None]:
        """Of all that `sender` sends to `receiver`: the first to come back that proves arrival.

        Values that come back are taken in the order in which `sender` uses them. The proof is the
        first that `receiver` gave at or after the place where it took what was sent.
        """
        back = sorted(
            self._values_between(receiver, sender), key=lambda value: self._receiver[value]
        )
        newest = list(accumulate((self._sender[value][1] for value in back), max))
        found: dict[Value, Value | None] = {}
        for value in self._values_between(sender, receiver):
            at = bisect_left(newest, self._receiver[value][1])
            found[value] = back[at] if at < len(back) else None
        return found

    def last_unproven(self, sender: int, receiver: int) -> Value | None:
        """The last of what `sender` sends to `receiver` that nothing proves, in order of use."""
        open_ends = [
            v for v, answer in self.arrival_proofs(sender, receiver).items() if answer is None
        ]
        return max(open_ends, key=lambda value: self._receiver[value], default=None)

    def _values_between(self, sender: int, receiver: int) -> list[Value]:
        return [
            value
            for value, (giver, _) in self._sender.items()
            if giver == sender and self._receiver[value][0] == receiver
        ]


def _incoming(action: Action, stages: int) -> Value | None:
    """Return the input of an action from a neighbouring stage."""
    stage, microbatch = action.stage, action.microbatch
    if action.kind is ActionKind.FORWARD:
        return Value(stage - 1, microbatch) if stage > 0 else None
    if action.kind is ActionKind.BACKWARD_WEIGHT or stage + 1 == stages:
        return None
    return Value(stage + 1, microbatch, gradient=True)


def _taker(value: Value) -> Action:
    """The undivided action that takes a value of a neighbouring stage."""
    if value.gradient:
        return Action(value.stage - 1, ActionKind.BACKWARD, value.microbatch)
    return Action(value.stage + 1, ActionKind.FORWARD, value.microbatch)


def _outgoing(action: Action, stages: int) -> Value | None:
    """Return the output of an action for a neighbouring stage."""
    value = value_produced(action)
    if value is None or value.stage == (0 if value.gradient else stages - 1):
        return None
    return value
