"""Parameter servers between the workers of one step: each rank owns a shard of the weights.

    worker                                   server on each rank, for its shard
    weights()                   <----------  sends its weights as soon as the rule allows
    push(microbatch, gradient)  ---------->  takes the gradient, applies it or waits for more
    finish()                    <----------  after the last update: weights, optimizer state, record

A thread for each other rank serves that rank, so a slow one keeps no other waiting. Every shard has
its own order of updates. A step ends on all ranks with the complete state and the records of all
servers. So a rank that is lost takes nothing with it but the open step.

Sends are never waited for (`comm/transport.py`). Each is kept until a later message shows that it
has arrived.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Protocol

import torch
from torch import Tensor

from holdfast.core.sharding.reduction_tree import Shares
from holdfast.errors import PeerLostError
from holdfast.parallel.comm.abortable_wait import AbortableWait
from holdfast.parallel.comm.transport import PeerGroup
from holdfast.parallel.outer.payloads import lost_while_exchanged, receive_all
from holdfast.parallel.torch_compat import Work
from holdfast.policy.server_updates import UpdateRule

_PUSH_TAG, _PULL_TAG, _FINAL_TAG = 1 << 20, 1 << 21, 1 << 22
_CHECK_S = 0.2  # seconds between two looks at whether the group was given up
_HEADER = 1  # numbers before a gradient: its weight in the mean
_COLUMNS = 4  # of a record


@dataclass(frozen=True)
class Push:
    """A mean gradient of one microbatch, of one shard."""

    microbatch: int
    weight: float  # of the microbatch in the mean of an update
    gradient: Tensor  # [n]


@dataclass(frozen=True)
class AppliedPush:
    """A row of a server's record, in the order of their application."""

    microbatch: int
    base: int  # updates of the step that the weights of this gradient had
    weight: float  # as in `Push`


class Shard(Protocol):
    """What a rank owns while it serves. All calls come one at a time, from any thread."""

    def apply(self, pushes: Sequence[Push], version: int, staleness: int) -> None:
        """Make update `version` of the step, counted from 0, of the mean of some gradients.
        staleness: updates that their weights lack."""
        ...

    def weights(self) -> Tensor:
        """A copy of the weights. -> [n]"""
        ...

    def final(self) -> Tensor:
        """A copy of the weights and of what the optimizer keeps, after the last update. -> [m]"""
        ...

    def squares(self) -> list[float]:
        """For each parameter the sums of squares of all gradients that came, then of all that were
        applied."""
        ...


@dataclass(frozen=True)
class ShardSize:
    """Elements of a rank's shard: of its weights, of its final state, and its parameters."""

    weights: int
    final: int
    parameters: int


@dataclass(frozen=True)
class ServerRecord:
    """What a rank tells of a step. squares: see `Shard.squares`."""

    applied: tuple[AppliedPush, ...]
    squares: tuple[float, ...]
    seconds: tuple[float, ...]  # that it took for each of its microbatches, in their order


class ServerStep:
    """Both roles of one rank in one step.

    peers: all ranks. shares: the microbatches of each. sizes: of the shard of each. dtype: of
    weights and gradients. Raises PeerLostError.
    """

    def __init__(
        self,
        peers: PeerGroup,
        shares: Shares,
        rule: UpdateRule,
        shard: Shard,
        sizes: Sequence[ShardSize],
        dtype: torch.dtype,
    ) -> None:
        self._peers, self._rule, self._shard = peers, rule, shard
        self._sizes = [size.weights for size in sizes]
        self._parameters = [size.parameters for size in sizes]
        self._orders = [rule.order(share) for share in shares]
        self._empty = partial(torch.empty, dtype=dtype)
        self._changed = threading.Condition()
        self._error: Exception | None = None
        self._version = 0
        self._done, self._base = [0] * len(shares), [0] * len(shares)  # by rank
        self._waiting: dict[int, list[Push]] = {}  # by synchronous update
        self._applied: list[AppliedPush] = []
        self._seconds: list[float] = []
        self._sent: list[object] = []  # of this rank's pushes
        self._answers: dict[int, object] = {}  # to each other rank, the last one
        peers.forget_sends()
        self._records = [
            torch.zeros(_COLUMNS * rule.microbatches + 2 * number, dtype=torch.float64)
            for number in self._parameters
        ]
        self._finals = [self._empty(size.final) for size in sizes]
        self._finals_receipts = [
            self._receive(into, peer, _FINAL_TAG + kind)
            for peer in peers.others
            for kind, into in enumerate((self._finals[peer], self._records[peer]))
            if into.numel()
        ]
        self._errands = [
            AbortableWait(partial(self._serve, peer), f"server for rank {peer}")
            for peer in peers.others
            if self._orders[peer]
        ]
        for errand in self._errands:
            peers.start_wait(errand)

    # --- the worker -----------------------------------------------------------------------
    @property
    def order(self) -> list[int]:
        """The microbatches of this rank, in the order in which it computes them."""
        return self._orders[self._peers.rank]

    def weights(self) -> list[Tensor] | None:
        """Return the weights for the next microbatch, by rank: [n]; None: those of the one before,
        or of the run. Raises PeerLostError."""
        me, done = self._peers.rank, len(self._seconds)
        if not self._rule.asks_for_weights(self.order, done):
            return None
        tag = _PULL_TAG + self.order[done]
        found = [self._empty(0) for _ in self._sizes]
        answers = {
            peer: self._empty(self._sizes[peer]) for peer in self._peers.others if self._sizes[peer]
        }
        receipts = [self._receive(into, peer, tag) for peer, into in answers.items()]
        self._wait_until(lambda: self._may_pull(me))
        with self._changed:
            found[me] = self._give_weights(me)
        receive_all(self._peers, receipts, "weights")
        for peer, into in answers.items():
            found[peer] = into
        self._sent.clear()  # the servers answered, so the pushes have arrived
        return found

    def push(
        self, microbatch: int, weight: float, gradients: Sequence[Tensor], seconds: float
    ) -> None:
        """Give each server its part of a gradient. gradients: by rank, [n]. seconds: that its
        computation took. Raises PeerLostError."""
        self._seconds.append(seconds)
        for peer in self._peers.others:
            if self._sizes[peer]:
                message = torch.cat([self._empty(_HEADER).fill_(weight), gradients[peer]])
                self._sent.append((message, self._send(message, peer, _PUSH_TAG + microbatch)))
        me = self._peers.rank
        self._take(me, Push(microbatch, weight, gradients[me]))

    def finish(self) -> tuple[list[Tensor], list[ServerRecord]]:
        """Wait for the last update of each shard. Return its final state, by rank: [m]; and what
        each server recorded. Raises PeerLostError."""
        me = self._peers.rank
        self._wait_until(lambda: self._is_over)
        with self._changed:
            self._finals[me] = self._shard.final()
        self._write_record(self._records[me])
        for peer in self._peers.others:
            for kind, record in enumerate((self._finals[me], self._records[me])):
                if record.numel():
                    self._peers.send(record, peer, _FINAL_TAG + kind)
        receive_all(self._peers, self._finals_receipts, "final weights")
        for errand in self._errands:
            self._join_errand(errand)
        return self._finals, [
            self._read_record(record, rank) for rank, record in enumerate(self._records)
        ]

    def give_up(self) -> None:
        """End the threads of a step that has failed: nothing of it counts."""
        with self._changed:
            self._error = self._error or PeerLostError("the step was given up")
            self._changed.notify_all()
        if self._errands:
            self._peers.abort()

    # --- the server -----------------------------------------------------------------------
    def _serve(self, peer: int, errand: AbortableWait) -> None:
        """Take the pushes of one other rank, and answer them."""
        order, size = self._orders[peer], self._sizes[self._peers.rank]
        if not size:
            return
        try:
            for done, microbatch in enumerate(order):
                if self._rule.asks_for_weights(order, done):
                    self._wait_until(lambda: self._may_pull(peer), errand)
                    with self._changed:
                        answer = self._give_weights(peer)
                    self._answers[peer] = answer, self._send(answer, peer, _PULL_TAG + microbatch)
                message = self._empty(_HEADER + size)
                errand.wait(self._receive(message, peer, _PUSH_TAG + microbatch))
                self._answers.pop(peer, None)  # it had them, or it would not push
                self._take(peer, Push(microbatch, float(message[0]), message[_HEADER:]))
        except Exception as error:
            with self._changed:
                self._error = self._error or error
                self._changed.notify_all()
            self._peers.abort()
            raise

    def _take(self, rank: int, push: Push) -> None:
        """Count a push, and apply what is complete now."""
        if not self._sizes[self._peers.rank]:
            return
        with self._changed:
            self._done[rank] += 1
            rule = self._rule
            if rule.is_synchronous:
                number = rule.update_of(push.microbatch)
                self._waiting.setdefault(number, []).append(push)
                while len(self._waiting.get(self._version, ())) == rule.width:
                    pushes = sorted(self._waiting.pop(self._version), key=lambda p: p.microbatch)
                    self._apply(pushes, self._version)
            else:
                self._apply([push], self._base[rank])
            self._changed.notify_all()

    def _apply(self, pushes: list[Push], base: int) -> None:
        self._shard.apply(pushes, self._version, self._version - base)
        self._applied += [AppliedPush(push.microbatch, base, push.weight) for push in pushes]
        self._version += 1

    @property
    def _is_over(self) -> bool:
        return self._version == self._rule.updates or not self._sizes[self._peers.rank]

    def _may_pull(self, rank: int) -> bool:
        if not self._sizes[self._peers.rank]:
            return True
        others = (
            done
            for peer, done in enumerate(self._done)
            if peer != rank and done < len(self._orders[peer])
        )
        done = self._done[rank]
        return self._rule.may_continue(self._orders[rank], done, self._version, others)

    def _give_weights(self, rank: int) -> Tensor:
        self._base[rank] = self._version
        return self._shard.weights()

    def _write_record(self, record: Tensor) -> None:
        """record: [4 x microbatches + 2 x parameters] float64"""
        count, applied = self._rule.microbatches, self._applied
        columns: tuple[list[float], ...] = (
            [push.microbatch for push in applied],
            [push.base for push in applied],
            [push.weight for push in applied],
            self._seconds,
        )
        for at, column in enumerate(columns):
            numbers = torch.tensor(column, dtype=torch.float64)
            record[at * count : at * count + len(column)] = numbers
        record[_COLUMNS * count :] = torch.tensor(self._shard.squares(), dtype=torch.float64)

    def _read_record(self, record: Tensor, rank: int) -> ServerRecord:
        count, numbers = self._rule.microbatches, record.tolist()
        rows = zip(*(numbers[at * count : (at + 1) * count] for at in range(3)), strict=True)
        applied = tuple(AppliedPush(int(j), int(base), weight) for j, base, weight in rows)
        return ServerRecord(
            applied if self._sizes[rank] else (),
            tuple(numbers[_COLUMNS * count :]),
            tuple(numbers[3 * count : 3 * count + len(self._orders[rank])]),
        )

    # --- messages -------------------------------------------------------------------------
    def _send(self, tensor: Tensor, peer: int, tag: int) -> object:
        self._peers.count(tensor.nbytes)
        try:
            return self._peers.group.send([tensor], peer, tag)
        except RuntimeError as error:
            raise lost_while_exchanged(error) from error

    def _receive(self, into: Tensor, peer: int, tag: int) -> Work:
        try:
            return self._peers.receive(into, peer, tag)
        except RuntimeError as error:
            raise lost_while_exchanged(error) from error

    def _wait_until(self, is_true: Callable[[], bool], errand: AbortableWait | None = None) -> None:
        """Wait for what other ranks' pushes change. Raises what a thread of this step raised."""
        with self._changed:
            while not is_true():
                if self._error is not None:
                    raise lost_while_exchanged(self._error) from self._error
                if errand is not None:
                    errand.check()
                self._changed.wait(_CHECK_S)

    def _join_errand(self, errand: AbortableWait) -> None:
        try:
            self._peers.join_wait(errand)
        except RuntimeError as error:
            raise lost_while_exchanged(error) from error
