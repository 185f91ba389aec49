"""The vote of a step: one small exchange after the reduction, before anything is applied.

Every rank says how many tokens its share held, the loss of each microbatch, the sum of squares
of the gradient it holds, whether all of it is whole and finite, and what is wished (stop, save).
All ranks then know the same and decide the same. Who votes "whole" can apply the step without
anybody's help; so if anyone applied it, everyone can, and replicated state needs no copy of the
state before.

Token counts are integers; losses add up in float64 in tree order and squares in shard order, so
the reported loss and norm have the same bits for any dealing.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass, fields
from functools import lru_cache, reduce
from math import isfinite
from operator import or_

import torch

from holdfast.layout import Coordinate, Replica, Topology
from holdfast.parallel.groups import Groups
from holdfast.parallel.norm import combine
from holdfast.parallel.transport import exchange
from holdfast.spec.tree import ReductionTree, Shares

_TAG, _TAG_LOSSES = 1, 3
_HEAD = 3  # tokens, flags, sum of squares
_WHOLE, _FINITE = 1, 2


@dataclass(frozen=True)
class Wishes:
    """What a rank would like to happen at the end of the step. full: it has no room for a
    snapshot now, so that none should be made that another rank would lack.

    save: a checkpoint. remember: a snapshot in memory. copy, upload: what is saved is to go to
    peers, to the bucket. brief: when stopping, a snapshot for peers is to do, as time is short.
    pause: end here, but keep the state and wait: another generation takes it up.
    """

    stop: bool = False
    save: bool = False
    full: bool = False
    remember: bool = False
    copy: bool = False
    upload: bool = False
    brief: bool = False
    pause: bool = False


_WISHES = {4 << index: wish.name for index, wish in enumerate(fields(Wishes))}
"""The bit of each wish in a record."""


@dataclass(frozen=True)
class Ballot:
    """What one rank says. `losses`: one loss sum per leaf of its share, in rising order; together
    with `tokens` it is said by the ranks that `speakers` names, the others leave it out."""

    tokens: int
    squares: float
    losses: tuple[float, ...]
    wishes: Wishes
    whole: bool = True


@dataclass(frozen=True)
class Verdict:
    """What all ranks know after the vote: the same on each of them.

    loss: sum over the tokens of the global batch. norm: of the summed gradient, before it is
    divided by `tokens`.
    """

    tokens: int
    loss: float
    norm: float
    whole: bool
    finite: bool
    wishes: Wishes

    @property
    def mean_loss(self) -> float:
        """Nats per token."""
        return self.loss / max(self.tokens, 1)

    @property
    def mean_norm(self) -> float:
        """Norm of the gradient of the mean loss."""
        return self.norm / max(self.tokens, 1)


def vote(groups: Groups, tree: ReductionTree, shares: Shares, ballot: Ballot) -> Verdict:
    """Exchange ballots and combine them. Raises PeerLostError when a peer is gone."""
    spoken = _spoken(groups.topology, shares)
    records = exchange(groups.control, _encode(ballot), [_HEAD + len(s) for s in spoken], _TAG)
    ballots = [_decode(record) for record in records]
    leaf_losses = _by_leaf([ballot.losses for ballot, _ in ballots], spoken)
    # Replicas of unlike shapes add their squares up in unlike orders: one of them speaks for all.
    norm = combine([b.squares for b, _ in ballots[: len(groups.topology.replicas[0].ranks)]])
    finite = all(flags & _FINITE for _, flags in ballots)
    return Verdict(
        tokens=sum(b.tokens for (b, _), own in zip(ballots, spoken, strict=True) if own),
        loss=tree.sum(leaf_losses),
        norm=norm,
        whole=all(b.whole for b, _ in ballots),
        finite=finite and isfinite(norm),
        wishes=_wishes(reduce(or_, (flags for _, flags in ballots))),
    )


def gather_losses(groups: Groups, shares: Shares, losses: Sequence[float]) -> list[float]:
    """Everybody's losses, by leaf. losses: of my share, in rising order, or none where this rank
    is not one that `speaks`. Raises PeerLostError."""
    spoken = _spoken(groups.topology, shares)
    record = torch.tensor(_bits(losses), dtype=torch.int64)
    records = exchange(groups.control, record, [len(s) for s in spoken], _TAG_LOSSES)
    return _by_leaf([_floats(r.tolist()) for r in records], spoken)


def speaks(replica: Replica, coordinate: Coordinate) -> bool:
    """Whether this rank tells losses: those of the last stage do, of whose context- and
    tensor-parallel ranks, which all hold the same loss, the first."""
    return (coordinate.pp, coordinate.cp, coordinate.tp) == (replica.degree("pp") - 1, 0, 0)


@lru_cache(maxsize=16)
def _spoken(topology: Topology, shares: Shares) -> tuple[tuple[int, ...], ...]:
    """The leaves whose losses each rank tells, in the order of `control`."""
    return tuple(
        tuple(sorted(shares[replica.index])) if speaks(replica, topology.coordinate(rank)) else ()
        for replica in topology.replicas
        for rank in replica.ranks
    )


def _by_leaf(losses: Sequence[Sequence[float]], spoken: Sequence[Sequence[int]]) -> list[float]:
    """The loss of each leaf: the parts that the shards of its replica held, in shard order."""
    total: dict[int, float] = {}
    for own, leaves in zip(losses, spoken, strict=True):
        for leaf, loss in zip(leaves, own, strict=True):
            total[leaf] = total.get(leaf, 0.0) + loss
    return [total[leaf] for leaf in range(len(total))]


def _encode(ballot: Ballot) -> torch.Tensor:
    """[3 + leaves] int64; floats as their bits."""
    finite = isfinite(ballot.squares) and all(isfinite(loss) for loss in ballot.losses)
    flags = _WHOLE * ballot.whole | _FINITE * finite
    flags |= sum(bit for bit, name in _WISHES.items() if getattr(ballot.wishes, name))
    words = [ballot.tokens, flags, *_bits((ballot.squares, *ballot.losses))]
    return torch.tensor(words, dtype=torch.int64)


def _decode(record: torch.Tensor) -> tuple[Ballot, int]:
    tokens, flags, *rest = record.tolist()
    squares, *losses = _floats(rest)
    return Ballot(tokens, squares, tuple(losses), _wishes(flags), bool(flags & _WHOLE)), flags


def _wishes(flags: int) -> Wishes:
    return Wishes(**{name: bool(flags & bit) for bit, name in _WISHES.items()})


def _bits(values: Sequence[float]) -> tuple[int, ...]:
    return struct.unpack(f"{len(values)}q", struct.pack(f"{len(values)}d", *values))


def _floats(words: Sequence[int]) -> tuple[float, ...]:
    return struct.unpack(f"{len(words)}d", struct.pack(f"{len(words)}q", *words))
