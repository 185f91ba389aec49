"""Collectives inside a replica, plain and as pairs that autograd knows.

Tensor parallelism uses the pairs:

    forward          backward
    gather           all-gather       reduce-scatter    into a tensor parallel region, tokens cut
    scatter          reduce-scatter   all-gather        out of it
    copy             nothing          all-reduce        into it, tokens whole
    reduce           all-reduce       nothing           out of it

Context parallelism uses `gather`, `reduce`, and two more:

    swap             all-to-all       all-to-all        from tokens cut to heads cut, and back
    rotate           to the next rank, without gradient

(Shoeybi et al. 2019, section 3, where the last two are f and g; Korthikanti et al. 2022, section
4.2.2, for the first two.) Rank i's part is the i-th contiguous part of dim 0, so a gather writes
into one buffer and nothing is permuted.

Over gloo, gathers and scatters are direct messages: received where they belong, and added up in
rank order. gloo's own gather copies everything once more and its reduce-scatter moves twice the
bytes. A send is not waited for, because a send to a dead receiver may never return. It has arrived
when its receiver's part of the next collective comes. Its memory is held until then. So every rank
must call the same collectives in the same order, as always. A rotation's message has arrived once
what its receiver sent afterwards has come all the way round.

Over a device's backend they are collectives that add nothing, and the sums are taken here, in rank
order. A backend's own sum depends on how it connects the ranks, which a recovery may change.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from holdfast.core.devices import GLOO, STAGED_GLOO
from holdfast.parallel.comm.comm_stats import TrafficCounter, waiting
from holdfast.parallel.torch_compat import gather_parts

_TAG = 7  # the messages of a group come in the order in which they were sent: one tag will do


class Collectives:
    """Collectives over one process group; `traffic` counts what leaves this rank.

    kind: of that traffic. reports_loss: an operation raises if a peer is lost. Otherwise it ends
    when the group is given up, and its output is void. A group has one `Collectives`, whose calls
    come from one thread.
    If it `reports_loss`, all raise RuntimeError with the backend's text when a peer is lost.
    members: ranks of the group, this one among them, which alone take part. They can do all but
    `all_reduce`; None: all ranks, and everything. On a device every rank of the group must call it.
    """

    def __init__(
        self,
        group: dist.ProcessGroup,
        traffic: TrafficCounter | None = None,
        kind: str = "tp",
        members: Sequence[int] | None = None,
    ):
        self.group = group
        self._members = list(range(group.size()) if members is None else members)
        self.rank, self.size = self._members.index(group.rank()), len(self._members)
        self._others = [(self.rank + i) % self.size for i in range(1, self.size)]
        self._traffic, self._kind = traffic, kind
        self._pending_sends: list[_Sends] = []
        self._rotations: deque[_Sent] = deque()
        self._sent = self._received = 0  # rotations
        self.reports_loss = self._by_messages = dist.get_backend(group) in (GLOO, STAGED_GLOO)

    def among(self, members: Sequence[int]) -> Collectives:
        """Collectives of some ranks of the group alone, this one among them."""
        return Collectives(self.group, self._traffic, self._kind, members)

    # --- without gradient -----------------------------------------------------------------
    def all_gather(self, part: Tensor, out: Tensor | None = None) -> Tensor:
        """Every rank's part, in rank order.  [t, ...] -> [n * t, ...]

        out: contiguous memory for the result, of which `part` may be this rank's place; without
            it a new tensor. Neither may change until the next collective, or a vote, has ended.
        """
        return self.start_gather(part, out).wait()

    def start_gather(self, part: Tensor, out: Tensor | None = None) -> Exchange:
        """Begin `all_gather`. What is begun is waited for in its order, on every rank alike. The
        part must not change before."""
        part = part.contiguous()
        self._count(part.nbytes * (self.size - 1))
        if out is None:
            out = part.new_empty(self.size * part.shape[0], *part.shape[1:])
        whole = out
        if self._by_messages:
            places = out.view(self.size, *part.shape)
            begun = self._exchange("gather", [part] * self.size, places, lambda: whole)
            places[self.rank].copy_(part)
            return begun
        if self.size == self.group.size():
            work = gather_parts(out, part, self.group, async_op=True)
        else:
            work = self._swap_on_device(part.view(-1).repeat(self.size), out)
        return self._begun("gather", [work], lambda: whole)

    def reduce_scatter(self, whole: Tensor) -> Tensor:
        """This rank's part of the sum over ranks.  [n * t, ...] -> [t, ...], a new tensor

        Added up in rank order, so that no part depends on the order of arrival. In half
        precision on the CPU, the sum of more than two is taken in float32.
        """
        return self.start_scatter(whole).wait()

    def start_scatter(self, whole: Tensor) -> Exchange:
        """Begin `reduce_scatter`, see `start_gather`. The sum is taken by who waits."""
        whole = whole.contiguous()
        self._count(whole.nbytes // self.size * (self.size - 1))
        parts = whole.view(self.size, -1, *whole.shape[1:])
        received = torch.empty_like(parts)

        def add() -> Tensor:
            return _sum_in_order(
                [parts[i] if i == self.rank else received[i] for i in range(self.size)]
            )

        if self._by_messages:
            return self._exchange("scatter", parts, received, add)
        return self._begun("scatter", [self._swap_on_device(whole, received)], add)

    def all_reduce(self, tensor: Tensor) -> Tensor:
        """The sum over ranks, of the same bits on each; a new tensor."""
        out = tensor.clone(memory_format=torch.contiguous_format)
        self._count(2 * out.nbytes * (self.size - 1) // self.size)
        if self._by_messages:
            with waiting(self._traffic, self._kind, "all-reduce"):
                dist.all_reduce(out, group=self.group)
            return out
        part = -(-out.numel() // self.size)
        padded = out.new_zeros(self.size, part)
        padded.view(-1)[: out.numel()] = out.view(-1)
        received = torch.empty_like(padded)
        dist.all_to_all_single(received, padded, group=self.group)
        gather_parts(padded, _sum_in_order(list(received))[None], self.group)
        return padded.view(-1)[: out.numel()].view_as(out)

    def all_to_all(self, parts: Tensor) -> Tensor:
        """Send the i-th part to rank i, and receive one of each.  [n, ...] -> [n, ...], new"""
        parts = parts.contiguous()
        self._count(parts.nbytes // self.size * (self.size - 1))
        received = torch.empty_like(parts)
        if self._by_messages:
            begun = self._exchange("swap", parts, received, lambda: received)
            received[self.rank].copy_(parts[self.rank])
            return begun.wait()
        return self._begun("swap", [self._swap_on_device(parts, received)], lambda: received).wait()

    def rotate(self, tensor: Tensor) -> Exchange:
        """Start to send to the next rank and to receive as much from the one before. Rotations are
        waited for in their order, and all before another collective. The tensor must not change."""
        tensor = tensor.contiguous()
        self._count(tensor.nbytes)
        into = torch.empty_like(tensor)
        before, after = (self._members[(self.rank + i) % self.size] for i in (-1, 1))
        if self._by_messages:
            receipt = self.group.recv([into], before, _TAG)
            sending = self.group.send([tensor], after, _TAG)
            self._rotations.append(_Sent(sending, tensor, self._received))
            self._sent += 1
            return self._begun("rotate", [receipt], lambda: into, self._take_rotation)
        # On a device this is one batch of two messages: empty ones are not sent.
        coming, going = (self._sizes([peer], tensor.numel()) for peer in (before, after))
        receipt = dist.all_to_all_single(
            into.view(-1), tensor.view(-1), coming, going, group=self.group, async_op=True
        )
        return self._begun("rotate", [receipt], lambda: into)

    # --- with gradient --------------------------------------------------------------------
    def swap(self, parts: Tensor) -> Tensor:
        """`all_to_all`, in both directions.  [n, ...] -> [n, ...]"""
        return with_gradient(parts, self.all_to_all, self.all_to_all)

    def gather(self, part: Tensor) -> Tensor:
        """[t, ...] -> [n * t, ...]"""
        return with_gradient(part, self.all_gather, self.reduce_scatter)

    def scatter(self, whole: Tensor) -> Tensor:
        """[n * t, ...] -> [t, ...], summed"""
        return with_gradient(whole, self.reduce_scatter, self.all_gather)

    def copy(self, x: Tensor) -> Tensor:
        """x itself; its gradient is the sum of all ranks'."""
        return with_gradient(x, lambda x: x.view_as(x), self.all_reduce)

    def reduce(self, x: Tensor) -> Tensor:
        """The sum of all ranks' x; its gradient is passed on."""
        return with_gradient(x, self.all_reduce, lambda gradient: gradient)

    # --- messages -------------------------------------------------------------------------
    def _exchange(
        self, name: str, out: Sequence[Tensor] | Tensor, into: Tensor, result: Callable[[], Tensor]
    ) -> Exchange:
        """Start to send out[i] to rank i and to receive into into[i] from it."""
        group, ranks = self.group, self._members
        arrived = [sends for sends in self._pending_sends if sends.is_over]
        receipts = [group.recv([into[peer]], ranks[peer], _TAG) for peer in self._others]
        mine = [(group.send([out[peer]], ranks[peer], _TAG), out[peer]) for peer in self._others]
        sends = _Sends(mine, into)
        self._pending_sends.append(sends)

        def on_arrival() -> None:
            """Every peer has begun this exchange. So it had received what I sent in those that
            were over here when I began it."""
            sends.is_over = True
            self._pending_sends = [each for each in self._pending_sends if each not in arrived]
            self._rotations.clear()

        return self._begun(name, receipts, result, on_arrival)

    def _begun(
        self,
        name: str,
        works: Sequence[Any],
        result: Callable[[], Tensor],
        on_arrival: Callable[[], None] = lambda: None,
    ) -> Exchange:
        place = (self._traffic, self._kind, name, time.monotonic())
        return Exchange(works, result, on_arrival, place)

    def _swap_on_device(self, parts: Tensor, into: Tensor) -> Any:
        """Begin to exchange equal parts with each member.  [n, ...] -> [n, ...]"""
        sizes = self._sizes(self._members, parts.numel() // self.size)
        return dist.all_to_all_single(
            into.view(-1), parts.view(-1), sizes, sizes, group=self.group, async_op=True
        )

    def _sizes(self, members: Sequence[int], elements: int) -> list[int]:
        """So many elements for each of some members, none for the other ranks of the group."""
        return [elements * (rank in members) for rank in range(self.group.size())]

    def _take_rotation(self) -> None:
        """A rotation has come. The rank before sent it after it had received as many as I had when
        I sent mine. The same holds for each rank before that, up to the one after me."""
        self._received += 1
        first, arrived = self._sent - len(self._rotations) + 1, self._received
        for _ in range(self.size - 1):
            if arrived < first:
                return
            arrived = self._rotations[arrived - first].received
        for _ in range(first, arrived + 1):
            self._rotations.popleft()

    def _count(self, nbytes: int) -> None:
        if self._traffic is not None:
            self._traffic.add(self._kind, nbytes)


class _Sent(NamedTuple):
    """A rotation's message. received: rotations that had come before it was sent."""

    sending: object
    tensor: Tensor
    received: int


@dataclass(eq=False)
class _Sends:
    """What an exchange sent, and where it receives. is_over: it was waited for here."""

    works: Sequence[object]
    into: Tensor
    is_over: bool = False


class Exchange(NamedTuple):
    """An exchange that has begun. place: its counter, kind, name, and when it began."""

    works: Sequence[Any]
    result: Callable[[], Tensor]
    on_arrival: Callable[[], None]
    place: tuple[TrafficCounter | None, str, str, float]

    def wait(self) -> Tensor:
        """Return what comes of it, once it is here."""
        traffic, kind, name, start = self.place
        with nullcontext() if traffic is None else traffic.exposed(kind):
            for work in self.works:
                work.wait()
        if traffic is not None:
            traffic.note(kind, name, start)
        self.on_arrival()
        return self.result()


def _sum_in_order(parts: Sequence[Tensor]) -> Tensor:
    """A new tensor: the sum from the first part to the last."""
    first, second, *rest = parts
    half = first.dtype in (torch.bfloat16, torch.float16)
    out = first.float().add_(second) if rest and half else first + second
    for part in rest:
        out.add_(part)
    return out.to(first.dtype)


TensorMap = Callable[[Tensor], Tensor]


def with_gradient(x: Tensor, forward: TensorMap, backward: TensorMap) -> Tensor:
    """Return `forward` of x. The gradient of x is `backward` of the result's gradient."""
    return _WithGradient.apply(x, forward, backward)  # type: ignore[no-any-return, no-untyped-call]


class _WithGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, forward: TensorMap, backward: TensorMap) -> Tensor:
        ctx.way_back = backward
        return forward(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        return ctx.way_back(gradient), None, None
