"""The vote of a step: what all ranks must know before anything is applied, in two exchanges.

    account   how many tokens each share held, and the loss of each microbatch. Sent as soon as a
              share is computed, so it travels while gradients are summed and no rank waits for it
    vote      the sum of squares of the gradient that each rank holds, whether all of it is complete
              and finite, and what is wished (stop, save)

All ranks then know the same and decide the same. A rank that votes "complete" holds the account
too, so it can apply the step without help. If one rank has applied it, every rank can. Replicated
state therefore needs no copy of the state before. If a rank is lost in the vote, the remaining
ranks still have every number of the verdict.

The ranks of one replica compute in lockstep, and only some of them may see a loss. If there are
other replicas, they `meet` after the vote. They continue with the verdict if one of them has it.

Weights add up exactly (`core/weights.py`). Losses add up in float64 in tree order, and squares in
shard order.
So the reported loss and norm have the same bits for any dealing.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, fields
from functools import lru_cache, reduce
from math import isfinite
from operator import or_

import torch

from holdfast.core.sharding.reduction_tree import ReductionTree, Shares
from holdfast.core.weights import from_units, shortest
from holdfast.errors import PeerLostError, ScriptError
from holdfast.layout import Coordinate, Replica, Topology
from holdfast.parallel.axes.process_groups import ProcessGroups
from holdfast.parallel.comm.transport import exchange
from holdfast.parallel.gradients.grad_norm import combine_norms
from holdfast.parallel.torch_compat import Work

_BALLOT_TAG, _TAG_LOSSES, _TAG_ACCOUNT, _TAG_SHARED_VERDICT, _TAG_PARTING = 1, 3, 4, 5, 6
_WHOLE_BIT, _FINITE_BIT, _SKIPPED_BIT = 1, 2, 4


@dataclass(frozen=True)
class Wishes:
    """A rank's wishes for the end of the step. has_no_slot: it has no room for a snapshot now, so
    that none should be made that another rank would lack.

    save: a checkpoint. snapshot: a snapshot in memory. copy, upload: what is saved is to go to
    peers, to the bucket. is_snapshot_enough: when stopping, a snapshot for peers suffices, as time
    is short. pause: end here, but keep the state and wait for another generation. is_node_leaving:
    a node leaves then with a part of the state that no other node holds, so the remaining nodes
    need a snapshot. reject: the step is not to be applied, because its loss has jumped.
    """

    stop: bool = False
    save: bool = False
    has_no_slot: bool = False
    snapshot: bool = False
    copy: bool = False
    upload: bool = False
    is_snapshot_enough: bool = False
    pause: bool = False
    reject: bool = False
    is_node_leaving: bool = False


_WISH_BITS = {8 << index: wish.name for index, wish in enumerate(fields(Wishes))}
"""The bit of each wish in a record."""


@dataclass(frozen=True)
class StepAccount:
    """What was computed in a step. losses: one sum for each microbatch of the global batch."""

    tokens: float  # a whole number, unless a task's weights are fractions
    losses: tuple[float, ...]
    sums: tuple[float, ...] = ()  # of an objective: sum and count of each of its names

    @property
    def loss(self) -> float:
        return ReductionTree(len(self.losses)).sum(self.losses)

    @property
    def is_finite(self) -> bool:
        return all(isfinite(loss) for loss in self.losses)


@dataclass(frozen=True)
class Ballot:
    """What one rank says of the gradient that it holds. options: digest of what a script's
    optimizers apply it with, 0 without a script."""

    squared_norm: float
    requests: Wishes
    has_whole_gradient: bool = True
    learning_rate: float = 0.0
    options: int = 0


@dataclass(frozen=True)
class StepVerdict:
    """What all ranks know after the vote: the same on each of them.

    loss: sum over the tokens of the global batch. norm: of the summed gradient, before it is
    divided by `tokens`. is_skipped: the gradient is not finite because it was scaled; the step is
    applied, and changes nothing but the loss scale. loss_scale: of an applied step; 0: none. sums:
    as in `StepAccount`.
    """

    tokens: float
    loss: float
    norm: float
    is_whole: bool
    is_finite: bool
    requests: Wishes
    is_skipped: bool = False
    loss_scale: float = 0.0
    sums: tuple[float, ...] = ()

    @property
    def skipped_at(self) -> float:
        """The loss scale of a step that was skipped; 0: it was not."""
        return self.loss_scale if self.is_skipped else 0.0

    @property
    def can_be_applied(self) -> bool:
        return (self.is_finite or self.is_skipped) and not self.requests.reject

    @property
    def mean_loss(self) -> float:
        """Nats per token."""
        return self.loss / (self.tokens or 1)

    @property
    def mean_norm(self) -> float:
        """Norm of the gradient of the mean loss; 0 if the step is skipped."""
        return 0.0 if self.is_skipped else self.norm / (self.tokens or 1)


class AccountExchange:
    """The account of a step on its way: mine is sent at once, those of other ranks come meanwhile.

    units, losses: of my share: its weight in units, and `width` numbers per leaf in rising order,
    its loss and an objective's sums. Only the ranks that speak send them. `wait_for_all` raises
    any failure as PeerLostError.
    """

    def __init__(
        self,
        groups: ProcessGroups,
        shares: Shares,
        units: int,
        losses: Sequence[float],
        width: int = 1,
    ):
        self._reported_leaves = _reported_leaves(groups.topology, shares)
        self._width = width
        control, own = groups.control, self._reported_leaves[groups.control.rank]
        self._records = [
            torch.empty(1 + len(s) * width, dtype=torch.int64) for s in self._reported_leaves
        ]
        self._receives: list[Work] = []
        self._error: RuntimeError | None = None
        if own:
            words = [units, *_float_words(losses)]
            self._records[control.rank] = torch.tensor(words, dtype=torch.int64)
        try:
            if own and control.size > 1:
                control.send_to_all(self._records[control.rank], _TAG_ACCOUNT)
            self._receives = [
                control.receive(self._records[peer], peer, _TAG_ACCOUNT)
                for peer in control.others
                if self._reported_leaves[peer]
            ]
        except RuntimeError as error:  # raised where all ranks of the replica come to
            self._error = error

    def wait_for_all(self) -> StepAccount:
        """The account of all. Raises PeerLostError."""
        try:
            if self._error is not None:
                raise self._error
            for work in self._receives:
                work.wait()
        except RuntimeError as error:
            raise PeerLostError(f"a peer was lost before its losses came: {error}") from error
        said = [
            record.tolist() if own else [0]
            for record, own in zip(self._records, self._reported_leaves, strict=True)
        ]
        floats = [_floats(words[1:]) for words in said]
        losses, sums = _columns(floats, self._reported_leaves, self._width)
        return StepAccount(from_units(sum(words[0] for words in said)), losses, sums)


def vote(
    groups: ProcessGroups,
    account: StepAccount,
    ballot: Ballot,
    on_sent: Callable[[], None] = lambda: None,
) -> StepVerdict:
    """Exchange ballots and combine them. on_sent: called when this one's is on its way. Raises
    PeerLostError when a peer is lost, and on all ranks alike ScriptError if their rates or options
    differ."""
    control = groups.control
    records = exchange(control, _encode(ballot), [4] * control.size, _BALLOT_TAG, on_sent)
    ballots = [_decode(record) for record in records]
    rates = sorted({b.learning_rate for b, _ in ballots})
    if len(rates) > 1:  # a rank's own script may say so; the run file says the same to all
        raise ScriptError(
            f"the ranks have unlike learning rates: {rates[0]:.6g} and {rates[-1]:.6g}",
            where="step.apply",
            remedy="make the rate a function of step.number, or give run.keep() the scheduler",
        )
    if len({b.options for b, _ in ballots}) > 1:
        raise ScriptError(
            "the groups of the ranks' optimizers have unlike options",
            where="step.apply",
            remedy="make each option a function of step.number, or give run.keep() the scheduler",
        )
    # Replicas of unlike shapes add their squares up in unlike orders: one of them speaks for all.
    norm = combine_norms(
        [b.squared_norm for b, _ in ballots[: len(groups.topology.replicas[0].ranks)]]
    )
    finite = account.is_finite and all(flags & _FINITE_BIT for _, flags in ballots)
    return StepVerdict(
        tokens=account.tokens,
        loss=account.loss,
        norm=norm,
        is_whole=all(b.has_whole_gradient for b, _ in ballots),
        is_finite=finite and isfinite(norm),
        requests=_wishes_from_flags(reduce(or_, (flags for _, flags in ballots))),
        sums=account.sums,
    )


def share_verdict(
    groups: ProcessGroups, verdict: StepVerdict | None, sums: int = 0
) -> StepVerdict | None:
    """Return the verdict if any rank of my replica has it. All of its ranks must call this, and
    get the same answer. sums: how many a verdict has. Raises PeerLostError when a rank is lost."""
    meeting = groups.replica_groups.lockstep
    if meeting is None or not groups.is_lockstep:
        return verdict
    size = VERDICT_WORDS + sums
    words = [0] * size if verdict is None else verdict_words(verdict)
    record = torch.tensor([int(verdict is not None), *words], dtype=torch.int64)
    said = exchange(meeting, record, [1 + size] * meeting.size, _TAG_SHARED_VERDICT)
    known = [words for found, *words in (other.tolist() for other in said) if found]
    return verdict_from_words(known[0]) if known else None


def meet_before_leaving(groups: ProcessGroups) -> None:
    """Meet all ranks once more before each of them stops by itself. A rank that has been here
    knows that all ranks know why, so it may be stopped at any moment. Nothing is raised."""
    control = groups.control
    with suppress(PeerLostError):
        exchange(control, torch.zeros(1, dtype=torch.int64), [1] * control.size, _TAG_PARTING)


VERDICT_WORDS = 4
"""Of a verdict without sums."""


def verdict_words(verdict: StepVerdict) -> list[int]:
    """A verdict as int64 words; floats as their bits."""
    flags = _WHOLE_BIT * verdict.is_whole | _FINITE_BIT * verdict.is_finite
    flags |= _SKIPPED_BIT * verdict.is_skipped | _flags(verdict.requests)
    return [flags, *_float_words((verdict.tokens, verdict.loss, verdict.norm, *verdict.sums))]


def verdict_from_words(words: Sequence[int]) -> StepVerdict:
    """The inverse of `verdict_words`."""
    flags, *rest = words
    tokens, loss, norm, *sums = _floats(rest)
    return StepVerdict(
        shortest(tokens),
        loss,
        norm,
        bool(flags & _WHOLE_BIT),
        bool(flags & _FINITE_BIT),
        _wishes_from_flags(flags),
        bool(flags & _SKIPPED_BIT),
        sums=tuple(sums),
    )


def gather_losses(
    groups: ProcessGroups, shares: Shares, losses: Sequence[float], width: int = 1
) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Return the losses of all ranks, by leaf, and an objective's sums over all leaves. losses:
    `width` numbers for each leaf of my share, in rising order; empty if this rank is not one that
    `speaks`. Raises PeerLostError."""
    spoken = _reported_leaves(groups.topology, shares)
    record = torch.tensor(_float_words(losses), dtype=torch.int64)
    records: list[torch.Tensor] | None = None
    try:
        sizes = [len(s) * width for s in spoken]
        records = exchange(groups.control, record, sizes, _TAG_LOSSES)
    finally:  # no rank continues alone to a point that the rest of its replica will not reach
        together = _do_all_have(groups, records is not None)
    if not together:
        raise PeerLostError("a peer of another rank of this replica was lost in a validation")
    assert records is not None
    return _columns([_floats(r.tolist()) for r in records], spoken, width)


def _do_all_have(groups: ProcessGroups, have: bool) -> bool:
    """Return True if all ranks of my replica have what they wanted; collective over it."""
    meeting = groups.replica_groups.lockstep
    if meeting is None or not groups.is_lockstep:
        return have
    record = torch.tensor([int(have)], dtype=torch.int64)
    return all(int(r) for r in exchange(meeting, record, [1] * meeting.size, _TAG_SHARED_VERDICT))


def reports_losses(replica: Replica, coordinate: Coordinate) -> bool:
    """Return True if this rank reports losses. The last stage does; of its context- and
    tensor-parallel ranks, which all hold the same loss, only the first."""
    return (coordinate.pp, coordinate.cp, coordinate.tp) == (replica.last_pp, 0, 0)


@lru_cache(maxsize=16)
def _reported_leaves(topology: Topology, shares: Shares) -> tuple[tuple[int, ...], ...]:
    """The leaves whose losses each rank tells, in the order of `control`."""
    return tuple(
        tuple(sorted(shares[replica.index]))
        if reports_losses(replica, topology.coordinate(rank))
        else ()
        for replica in topology.replicas
        for rank in replica.ranks
    )


def _columns(
    floats: Sequence[Sequence[float]], reported: Sequence[Sequence[int]], width: int
) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """`width` numbers for each leaf -> the first of each leaf, and the tree sums of the rest."""
    places = [[leaf * width + k for leaf in leaves for k in range(width)] for leaves in reported]
    found = _by_leaf(floats, places)
    tree = ReductionTree(len(found) // width)
    sums = tuple(tree.sum(found[k::width]) for k in range(1, width))
    return tuple(found[::width]), sums


def _by_leaf(losses: Sequence[Sequence[float]], reported: Sequence[Sequence[int]]) -> list[float]:
    """The loss of each leaf: the parts that the shards of its replica held, in shard order."""
    total: dict[int, float] = {}
    for own, leaves in zip(losses, reported, strict=True):
        for leaf, loss in zip(leaves, own, strict=True):
            total[leaf] = total.get(leaf, 0.0) + loss
    return [total[leaf] for leaf in range(len(total))]


def _encode(ballot: Ballot) -> torch.Tensor:
    """[4] int64; floats as their bits."""
    flags = (
        _WHOLE_BIT * ballot.has_whole_gradient
        | _FINITE_BIT * isfinite(ballot.squared_norm)
        | _flags(ballot.requests)
    )
    said = _float_words((ballot.squared_norm, ballot.learning_rate))
    return torch.tensor([flags, *said, ballot.options], dtype=torch.int64)


def _decode(record: torch.Tensor) -> tuple[Ballot, int]:
    flags, *words, options = record.tolist()
    squares, rate = _floats(words)
    requests, is_whole = _wishes_from_flags(flags), bool(flags & _WHOLE_BIT)
    return Ballot(squares, requests, is_whole, rate, options), flags


def _flags(wishes: Wishes) -> int:
    return sum(bit for bit, name in _WISH_BITS.items() if getattr(wishes, name))


def _wishes_from_flags(flags: int) -> Wishes:
    return Wishes(**{name: bool(flags & bit) for bit, name in _WISH_BITS.items()})


def _float_words(values: Sequence[float]) -> tuple[int, ...]:
    return struct.unpack(f"{len(values)}q", struct.pack(f"{len(values)}d", *values))


def _floats(words: Sequence[int]) -> tuple[float, ...]:
    return struct.unpack(f"{len(words)}d", struct.pack(f"{len(words)}q", *words))
