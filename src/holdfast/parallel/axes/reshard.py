"""Moving live state to another layout: the plan of `core/sharding/reshard_plan.py`, carried out by
real messages.

Nothing passes through a disk or through one rank, and nothing is kept twice. A process copies what
it holds already; every other piece comes straight from a rank that holds it.

    agree    all ranks say the digest of their plan and the step of their state: both ends of a
             transfer are of one plan, and states of two steps are never mixed
    keep     copy what is in my old and my new box
    round    post the receives, start the sends, wait for what comes, unpack; then a small
             exchange: a rank that speaks in it has received all of the round. So the buffers of
             its sends may go, and with them the old tensors that no later round needs

A piece that is not contiguous in memory (columns of a matrix) is packed before it leaves and
unpacked where it arrives. All other pieces are sent from and received into the tensors themselves.
"""

from __future__ import annotations

from collections.abc import Iterable, MutableMapping, Sequence
from itertools import groupby
from typing import Protocol

import torch
from torch import Tensor

from holdfast.core.sharding.boxes import Box
from holdfast.core.sharding.reshard_plan import ReshardPlan, Transfer
from holdfast.errors import LayoutError, PeerLostError
from holdfast.parallel.comm.abortable_wait import AbortableWait
from holdfast.parallel.comm.transport import PeerGroup, exchange

_TAG = 8  # of the exchanges that open the move and close its rounds
_FIRST_TAG = 16


class LocalShard(Protocol):
    """A rank's part of one state tensor: the elements of `box`, in `tensor`."""

    @property
    def name(self) -> str: ...

    @property
    def tensor(self) -> Tensor: ...

    @property
    def box(self) -> Box: ...


@torch.no_grad()
def move(
    old: MutableMapping[str, LocalShard],
    new: Sequence[LocalShard],
    plan: ReshardPlan,
    peers: PeerGroup,
    positions: Sequence[int],
    *,
    step: int,
) -> None:
    """Fill `new` with the state that the processes of `peers` hold in `old`. Collective.

    old: by tensor name; nothing of a newcomer. It is emptied: a tensor is released as soon as no
        rank needs it any more, so that the peak is not always old + new.
    new: memory of the new layout; every element is written.
    peers: joins all ranks of the new generation, and carries nothing else meanwhile.
    positions: positions[rank] is that rank's number in `peers`.
    step: the state is that after this step.

    Raises LayoutError, on every rank alike, when the ranks made their plans from different
    topologies or come from different steps: `old` is intact then. RuntimeError when `old` or `new`
    is not what the plan says. PeerLostError when a peer is lost: `new` is then of no use, and
    neither is what is left of `old`.
    """
    here = {held.name: held for held in new}
    try:
        _check(old, here, plan)
    except RuntimeError:
        peers.abort()  # the other ranks would wait for this one otherwise
        raise
    _check_agreement(plan, peers, step)
    for box in plan.copies:
        if here[box.name].tensor is not old[box.name].tensor:  # else it has stayed where it was
            view_of_box(here[box.name], box).copy_(view_of_box(old[box.name], box))
    last = {t.box.name: t.round for t in plan.sends}
    for name in [name for name in old if name not in last]:
        del old[name]
    sends, receives = _by_round(plan.sends), _by_round(plan.receives)
    for index in range(plan.rounds):
        try:
            _run_round(old, here, sends.get(index, ()), receives.get(index, ()), peers, positions)
        except RuntimeError as error:
            peers.abort()
            raise PeerLostError(f"a peer was lost while state was moved: {error}") from error
        exchange(peers, torch.tensor([index]), [1] * peers.size, _TAG)
        peers.forget_sends()
        for name in [name for name, at in last.items() if at == index]:
            del old[name]


def _run_round(
    old: MutableMapping[str, LocalShard],
    new: dict[str, LocalShard],
    sends: Iterable[Transfer],
    receives: Iterable[Transfer],
    peers: PeerGroup,
    positions: Sequence[int],
) -> None:
    """One round of one rank; returns when everything it receives is in its place."""
    coming = []
    for transfer in receives:
        place = view_of_box(new[transfer.box.name], transfer.box)
        into = (
            place if _can_be_sent_directly(place) else torch.empty(place.shape, dtype=place.dtype)
        )
        work = peers.receive(into, positions[transfer.source], _FIRST_TAG + transfer.number)
        coming.append((work, into, place))
    for transfer in sends:
        piece = view_of_box(old[transfer.box.name], transfer.box)
        packed = piece if _can_be_sent_directly(piece) else piece.cpu().contiguous()
        peers.send(packed, positions[transfer.target], _FIRST_TAG + transfer.number)

    def arrive(errand: AbortableWait) -> None:
        for work, into, place in coming:
            errand.wait(work)
            if into is not place:
                with torch.no_grad():  # which is a thread's own
                    place.copy_(into)

    if coming:
        errand = AbortableWait(arrive, "moves")
        peers.start_wait(errand)
        peers.join_wait(errand)


def view_of_box(shard: LocalShard, box: Box) -> Tensor:
    """The view of `box` in a tensor that holds it.  -> [*box.lengths]"""
    view = shard.tensor
    for dim, (start, length) in enumerate(zip(box.offsets, box.lengths, strict=True)):
        view = view.narrow(dim, start - shard.box.offsets[dim], length)
    return view


def _can_be_sent_directly(piece: Tensor) -> bool:
    """Return True if a message can be read from, or written into, this memory directly."""
    return piece.device.type == "cpu" and piece.is_contiguous()


def _check_agreement(moves: ReshardPlan, peers: PeerGroup, step: int) -> None:
    """Raises LayoutError unless all ranks have parts of one plan, and the state of one step."""
    plan = [int(moves.digest[at : at + 15], 16) for at in (0, 15, 30, 45)]  # 60 bits each
    said = exchange(peers, torch.tensor([step, *plan]), [1 + len(plan)] * peers.size, _TAG)
    if any(not record[1:].equal(said[0][1:]) for record in said):
        raise LayoutError(
            "ranks were told of different rebuilds",
            where="topology",
            remedy="give all of them one topology, and one list of where they came from",
        )
    steps = sorted({int(record[0]) for record in said})
    if len(steps) > 1:
        raise LayoutError(
            f"some ranks hold the state after step {steps[0]}, other ranks that after {steps[-1]}",
            remedy="rebuild from ranks of one step, or restore a checkpoint",
        )


def _check(
    old: MutableMapping[str, LocalShard], new: dict[str, LocalShard], moves: ReshardPlan
) -> None:
    """Every box lies in the tensor it is taken from or put into, with the size it should have."""
    for held in (*old.values(), *new.values()):
        if tuple(held.tensor.shape) != held.box.lengths:
            raise RuntimeError(f"{held.box} is held by a tensor of {tuple(held.tensor.shape)}")
        other = old.get(held.name)
        if other is not None and other.tensor.dtype != held.tensor.dtype:
            raise RuntimeError(
                f"{held.name} was {other.tensor.dtype} and would be {held.tensor.dtype}"
            )
    for place, boxes in (
        (old, [*moves.copies, *(t.box for t in moves.sends)]),
        (new, [*moves.copies, *(t.box for t in moves.receives)]),
    ):
        for box in boxes:
            if box.name not in place or not place[box.name].box.contains(box):
                raise RuntimeError(f"{box} is in the plan of rank {moves.rank}, which has it not")
    arriving = dict.fromkeys(new, 0)
    for box in (*moves.copies, *(t.box for t in moves.receives)):
        arriving[box.name] += box.size
    for name, size in arriving.items():
        if size != new[name].tensor.numel():
            raise RuntimeError(
                f"{size} of {new[name].tensor.numel()} elements of {name} would arrive"
            )


def _by_round(transfers: Sequence[Transfer]) -> dict[int, list[Transfer]]:
    return {index: list(group) for index, group in groupby(transfers, lambda t: t.round)}
