"""Direct messages between the ranks of a bare gloo group that torch's registry never sees.

Every message goes straight from its sender to its receiver. So a rank's loss reaches each rank
that waits for it at once, and no rank depends on a neighbour in a ring. Four properties of
gloo shape this file (all observed with torch 2.13):

- A wait on a *send* may never return after its peer has died. Sends are therefore never waited
  for: their buffers are reused only after the vote of the step, which proves that they arrived.
  A send that is dropped before it has left is lost, so each is kept until then, and no longer.
- A wait that times out closes every connection of the group. So there is one deadline, the
  group's own. `abort` is a deliberate short wait for a message that never comes. It wakes every
  thread blocked in this group, here and, through closed connections, elsewhere. That takes
  10 ms a peer, so known connections are shut down before (`gloo_sockets.py`).
- gloo reads and writes the host's memory only: tensors of a device go through it
  (`staged_group.py`).
- A receive posted before its message arrives lets the data go straight into its buffer. A receive
  that has got a part is never woken. So large messages are waited for by an errand
  (`abortable_wait.py`).
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor

from holdfast.errors import PeerLostError
from holdfast.parallel.comm.abortable_wait import AbortableGroup, AbortableWait
from holdfast.parallel.comm.batched_store import make_batched_store
from holdfast.parallel.comm.comm_stats import TrafficCounter
from holdfast.parallel.comm.gloo_sockets import (
    Address,
    address_from_text,
    address_to_text,
    cut_connections,
    listening_addresses,
    pace_connections,
    received_bytes,
)
from holdfast.parallel.comm.lanes import Lane
from holdfast.parallel.comm.staged_group import StagedGroup
from holdfast.parallel.torch_compat import GlooGroup, Store, Work, gloo_device, gloo_group

_UNUSED_TAG = 0x7FFFFFF0  # a tag on which no rank sends
CLOSE_TIMEOUT_S, CLOSE_AFTER_CUT_TIMEOUT_S = 0.001, 0.05
"""Seconds to wait on an open connection before it is closed, and on one that was shut down."""


class PeerGroup(AbortableGroup):
    """A fully connected group of `size` ranks under `name` in `store`.

    Construction is collective: it returns when all ranks have connected, and raises
    PeerLostError when they have not within `seconds`, which also bounds every later wait.
    traffic: counts what leaves this rank; None does not count. staged_type: the type of device
    whose tensors go through the host's memory; "": none come.
    """

    def __init__(
        self,
        store: Store,
        name: str,
        rank: int,
        size: int,
        *,
        interface: str = "lo",
        seconds: float = 1800.0,
        traffic: TrafficCounter | None = None,
        staged_type: str = "",
    ):
        super().__init__(rank, size, traffic)
        self._pending_sends: list[object] = []
        self._exchange_sends: list[object] = []  # the sends of the last exchange
        self._group: GlooGroup | None = None
        self._addresses: tuple[Address, tuple[Address, ...]] | None = None
        if size == 1:
            return
        try:
            before = listening_addresses()
            device = gloo_device(interface)
            found = listening_addresses() - before
            own = found.pop() if len(found) == 1 else None
            # torch keeps its C++ half only
            self._store = make_batched_store(store, rank, size, seconds, address_to_text(own))
            group = gloo_group(self._store, name, rank, size, device=device, seconds=seconds)
            self._group = StagedGroup(group, staged_type) if staged_type else group
            # Store both ends of this group's connections, if all ranks have sent theirs.
            told = [address_from_text(note) for note in getattr(self._store, "notes", ())]
            theirs = [at for at in told if at is not None and at != own]
            if own is not None and len(theirs) == self.size - 1:
                self._addresses = own, tuple(theirs)
        except RuntimeError as error:
            raise PeerLostError(f"rank {rank} of {size} could not join {name}: {error}") from error

    @property
    def others(self) -> tuple[int, ...]:
        """Every rank but this one, beginning with the next, so that not all write to rank 0."""
        return tuple((self.rank + i) % self.size for i in range(1, self.size))

    @property
    def group(self) -> GlooGroup:
        if self._group is None:
            raise PeerLostError("this group has one rank, or was closed")
        return self._group

    def send(self, tensor: Tensor, peer: int, tag: int, kind: str = "reduce") -> None:
        """Start to send; `tensor` must stay as it is until `forget_sends`. kind: of traffic."""
        self.count(tensor.nbytes, kind)
        self._pending_sends.append(self.group.send([tensor], peer, tag))

    def receive(self, tensor: Tensor, peer: int, tag: int) -> Work:
        """Post a receive into `tensor`, which must have the sender's dtype and size."""
        return self.group.recv([tensor], peer, tag)

    def all_reduce(self, tensor: Tensor) -> Work:
        """Start gloo's own sum in place. All ranks must call in the same order."""
        self.count(2 * (self.size - 1) * tensor.nbytes // self.size)
        return self.group.allreduce([tensor])

    def all_to_all(
        self, out: Tensor, tensor: Tensor, out_sizes: list[int], sizes: list[int]
    ) -> Work:
        """Start to send the i-th run of `tensor`, of sizes[i] elements, to rank i, and to receive
        the i-th run of `out` from it. All ranks must call in the same order."""
        self.count((sum(sizes) - sizes[self.rank]) * tensor.element_size())
        return self.group.alltoall_base(out, tensor, out_sizes, sizes)

    def all_gather(self, out: Tensor, part: Tensor) -> Work:
        """Start to gather parts of one size in rank order.  part: [t] -> out: [size * t]

        `part` may be this rank's place in `out`. All ranks must call in the same order.
        """
        self.count(part.nbytes * (self.size - 1))
        return self.group._allgather_base(out, part)

    def lane(self, errand: AbortableWait) -> Lane:
        """Return the place for work on what arrives: gloo's waits block."""
        return Lane(errand)

    def mark(self) -> object:
        """Return None: what a thread has computed is final, or `StagedGroup` waits for it."""
        return None

    def forget_sends(self) -> None:
        """Drop finished sends. Call only when a vote has shown that they arrived."""
        self._pending_sends.clear()

    def send_to_all(self, record: Tensor, tag: int) -> None:
        """Send a record to all ranks, as part of an exchange."""
        self.count(record.nbytes * len(self.others), "control")
        self._exchange_sends += [self.group.send([record], peer, tag) for peer in self.others]

    def forget_previous_exchange(self) -> None:
        """Forget the sends of the exchange before: all ranks ended it, as this one has ended."""
        del self._exchange_sends[: len(self._exchange_sends) - len(self.others)]

    def pace(self, rates: Mapping[int, float]) -> None:
        """Send no faster than so many bytes a second to some peers, and to all on their hosts."""
        if self._addresses is not None:
            own, theirs = self._addresses
            peers = [peer for peer in range(self.size) if peer != self.rank]
            hosts = {peer: host for peer, (host, _) in zip(peers, theirs, strict=True)}
            pace_connections(own, theirs, {hosts[peer]: rate for peer, rate in rates.items()})

    def received_bytes(self) -> int:
        """Return the bytes that have come from the other ranks, parts of messages included; 0 if
        this group's connections are not known."""
        return 0 if self._addresses is None else received_bytes(*self._addresses)

    def abort(self) -> None:
        """Close every connection: all waits in this group raise, here and at the peers. Only a
        wait for a message of which a part has come does not, unless an errand waits for it."""
        if self._group is None:
            return
        if self._addresses is not None:
            cut_connections(*self._addresses)
        close_connections(
            self._group,
            self.others,
            CLOSE_AFTER_CUT_TIMEOUT_S if self._addresses is not None else CLOSE_TIMEOUT_S,
        )
        self._abort_waits()

    def close(self) -> None:
        """Give the group up after an orderly end, or after `abort`.

        gloo ends a group when its collectives are over. One that waits for the rest of a message
        is never woken (`abortable_wait.py`). So a thread of its own ends a group that was aborted.
        """
        self._pending_sends.clear()
        self._exchange_sends.clear()
        last, self._group = [self._group], None
        if self._is_aborted:
            threading.Thread(target=last.clear, name="end of a group", daemon=True).start()


def close_connections(
    group: GlooGroup | dist.ProcessGroup, others: Iterable[int], seconds: float = CLOSE_TIMEOUT_S
) -> None:
    """Close every connection of a gloo group to other ranks that is still open after `seconds`.

    A wait that times out closes all of them. On a connection that has failed there is no such
    wait: it raises at once and leaves the rest open. So every peer is asked.
    """
    nothing = torch.empty(1)
    for peer in others:
        with suppress(RuntimeError):
            group.recv([nothing], peer, _UNUSED_TAG).wait(timedelta(seconds=seconds))


def exchange(
    peers: PeerGroup,
    record: Tensor,
    lengths: list[int],
    tag: int,
    on_sent: Callable[[], None] = lambda: None,
) -> list[Tensor]:
    """Return the records of all ranks, in rank order. A small all-gather by direct messages.

    record: [lengths[rank]] int64. on_sent: called when no rank waits for this one any more. Raises
    PeerLostError when a peer is lost.
    """
    out = [
        record if rank == peers.rank else torch.empty(length, dtype=torch.int64)
        for rank, length in enumerate(lengths)
    ]
    if peers.size == 1:
        return out
    try:
        receipts = [peers.receive(out[peer], peer, tag) for peer in peers.others]
        peers.send_to_all(record, tag)
        on_sent()
        for receipt in receipts:
            receipt.wait()
        peers.forget_previous_exchange()
    except RuntimeError as error:
        peers.abort()
        raise PeerLostError(f"a peer was lost during an exchange: {error}") from error
    return out
